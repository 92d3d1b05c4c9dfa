"""What another node may take of one commit from this one: all of it, or what has come so far."""

from __future__ import annotations

import errno
import os
import secrets
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeAlias, overload

from blake3 import blake3

from llmgw.core.weights import FileKept, FileListed, Manifest, piece_bytes_of
from llmgw.host.weights.disk.beneath import Folder, open_folder
from llmgw.host.weights.disk.partial import Partial, read_at
from llmgw.host.weights.errors import show_url

# The file, the piece, and the BLAKE3 of it in hex.
News: TypeAlias = tuple[int, int, str]

# Of a whole commit the pieces are told in one order on every node, whenever it is asked.
WHOLE_ORDER = "whole"


class Spoiled(LookupError):  # noqa: N818 - named by what it is, like all of ours
    """What lies here is not what was fetched, or can't be read: said in words for whoever runs this node. ``folder``:
    what is wrong with one piece of it is wrong with the others too."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


class Shelf(Protocol):
    """``log``: the pieces that are here, in an order that is called ``order``: it only ever grows, and where it is
    another one, it is called otherwise. A piece may stand in it twice: the later word counts. ``whole``: all is here
    and verified."""

    @property
    def files(self) -> Sequence[FileListed | FileKept]: ...
    @property
    def log(self) -> Sequence[News]: ...
    @property
    def order(self) -> str: ...
    @property
    def whole(self) -> bool: ...

    def read(self, file: int, piece: int) -> bytes:
        """Blocks. LookupError when it is not here, and Spoiled when it is no longer as it was fetched, or the disk
        fails."""


def note_nothing(why: str) -> None:
    """Nobody asks."""


class KeptShelf:
    """A whole commit: what its manifest says lies in ``folder``. ``note`` is told what is no longer as it was
    fetched, in words that begin with a file's name, by the thread that has read it."""

    order = WHOLE_ORDER
    whole = True

    def __init__(self, manifest: Manifest, folder: Path, note: Callable[[str], None] = note_nothing) -> None:
        self._note = note
        self.files = manifest.files
        self._manifest = manifest
        self._folder = folder

    @property
    def log(self) -> Sequence[News]:
        return _KeptLog(self.files)

    def read(self, file: int, piece: int) -> bytes:
        """Blocks. LookupError when it is not here, and Spoiled when it is no longer as it was fetched, or the disk
        fails."""
        if not 0 <= file < len(self.files) or not 0 <= piece < len(self.files[file].pieces):
            raise LookupError(f"there is no piece {piece} of file {file}")
        kept = self.files[file]
        with suppress(OSError, _Wrong):
            return self._read(kept, piece)
        # A bad moment of a cable, a controller or a file server is soon over. What is noted keeps a commit from every
        # launch on this folder: only what is wrong twice is, and what can't be read never, for it may be right.
        try:
            return self._read(kept, piece, anew=True)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._folder.exists():
                # It was collected: whoever asks has been told of it a moment ago.
                raise LookupError(f"{self._folder} is gone") from error
            raise self._tell(kept, f"can't be read ({error.strerror})") from error
        except _Wrong as error:
            # Whoever takes it would find that out too, and tell nobody here.
            wrong = f"is not what was fetched (piece {piece})"
            self._note(f"{kept.name} {wrong}")
            raise self._tell(kept, wrong) from error

    def _read(self, kept: FileKept, piece: int, *, anew: bool = False) -> bytes:
        """``anew``: from the disk, and not from what the machine remembers of it. Raises OSError, and _Wrong."""
        start = piece * piece_bytes_of(kept.size_bytes)
        size = min(piece_bytes_of(kept.size_bytes), kept.size_bytes - start)
        with open_folder(self._folder) as folder:
            data = _read_of(folder, kept, start, size, anew=anew)
        if blake3(data).hexdigest() != kept.pieces[piece]:
            raise _Wrong
        return data

    def _tell(self, kept: FileKept, wrong: str) -> Spoiled:
        source, commit = show_url(self._manifest.source), self._manifest.commit[:12]
        return Spoiled(
            f"{kept.name} of {source} ({commit}) in {self._folder} {wrong}: it is not given to other nodes, and "
            f"engines that run by it may read it. See whether this disk is well; `llmgw ctl weights pull {source}` "
            "fetches what is wrong anew, where nothing runs by it",
            self._folder,
        )


class _Wrong(Exception):  # noqa: N818
    """A piece has not the hash that it was kept with."""


def _read_of(folder: Folder, kept: FileKept, start: int, size: int, *, anew: bool) -> bytes:
    """Raises OSError, also when the file is not as long as it was."""
    number = folder.open(kept.name, os.O_RDONLY)
    try:
        if anew:
            # (where that can't be had, it is read all the same)
            with suppress(OSError):
                os.posix_fadvise(number, start, size, os.POSIX_FADV_DONTNEED)
        length = os.fstat(number).st_size
        if length < start + size:
            raise OSError(errno.EIO, f"it is cut off: it has {length} of {kept.size_bytes} bytes")
        return read_at(number, start, size)
    finally:
        os.close(number)


class _KeptLog(Sequence[News]):
    """All pieces of a manifest, in its order. Made when somebody asks, and only of what is asked for: a large commit
    has more than a hundred thousand, a node has many commits, and few of them are ever taken from it."""

    def __init__(self, files: Sequence[FileKept]) -> None:
        self._files = files
        self._stops = list(accumulate(len(file.pieces) for file in files))

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    @overload
    def __getitem__(self, index: int) -> News: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[News, ...]: ...
    def __getitem__(self, index: int | slice) -> News | tuple[News, ...]:
        places = range(len(self))[index]
        return self._find(places) if isinstance(places, int) else tuple(map(self._find, places))

    def _find(self, place: int) -> News:
        number = bisect_right(self._stops, place)
        pieces = self._files[number].pieces
        piece = place - self._stops[number] + len(pieces)
        return number, piece, pieces[piece]


class PartialShelf:
    """A commit on its way here. Made once for each opened partial: each of these has an order of its own."""

    whole = False

    def __init__(self, partial: Partial) -> None:
        self._partial = partial
        self.order = secrets.token_hex(8)

    @property
    def files(self) -> Sequence[FileListed]:
        return self._partial.listing.files

    @property
    def log(self) -> Sequence[News]:
        return self._partial.log

    def read(self, file: int, piece: int) -> bytes:
        """Blocks. LookupError when it is not here (yet, or no more), Spoiled when the disk fails."""
        try:
            return self._partial.read(file, piece)
        except OSError as error:
            listing, folder = self._partial.listing, self._partial.folder
            name, source = listing.files[file].name, show_url(listing.source)
            raise Spoiled(
                f"{name} of {source} ({listing.commit[:12]}), on its way into {folder}, can't be read "
                f"({error.strerror}): it is not given to other nodes. See whether this disk is well, and what else "
                "writes there",
                folder,
            ) from error
