"""A commit that lies in the cache and is not what was fetched: how that is found, and told."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from llmgw.core.weights import FileListed, Listing, Manifest, count_pieces, piece_bytes_of
from llmgw.host.weights.disk.beneath import Folder
from llmgw.host.weights.disk.file_names import DAMAGED_NAME
from llmgw.host.weights.disk.manifest_file import read_hashes
from llmgw.host.weights.errors import FetchFailed, Kind, show_url
from llmgw.units import printable

# (what is no file there, or is a link, is no copy)
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL)
_SHOWN_FILES = 3
_MOST_WHY_BYTES = 16 * 1024
# Where a kill has left nothing of the words.
_UNSAID = "it was found damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """A commit that is no copy any more, by its manifest (where that says nothing any more, by what lies there: without
    hashes), and ``why``: words that begin with a file's name. ``is_marked``: it is all there by its sizes, and only
    noted that somebody who has read of it has found it wrong, which may have been the read."""

    manifest: Manifest
    why: str
    is_marked: bool = False


def refuse_used(source: str, commit: str, folder: Path, why: str, users: Sequence[str]) -> FetchFailed:
    """It can't be mended now. ``users``: the shards of this agent that run by it; nobody: it is another program on the
    same folder."""
    shown = show_url(source)
    who = f"{', '.join(users)} of this node" if users else "an engine of another agent on this folder"
    return FetchFailed(
        f"{shown} ({commit[:12]}) in {folder} is damaged: {why}; it stays as it is while {who} runs by it",
        Kind.CORRUPT,
        remedy="see whether that disk is well; stop the model that runs by it there (llmgw ctl stop), then "
        f"`llmgw ctl weights pull {shown}`, and load it again",
    )


def find_wrong(
    folder: Folder, manifest: Manifest, stop: Callable[[], bool], tell: Callable[[int, int], None]
) -> str | None:
    """What of a commit does not have the hashes that it was kept with; None where all does, or ``stop`` says so.
    ``tell``: so many bytes of it were read, and so many are right. Raises OSError."""
    read = right = 0
    told: list[str] = []
    for kept in manifest.files:
        try:
            file = folder.open(kept.name, os.O_RDONLY)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            told.append(f"{kept.name} is missing" if error.errno == errno.ENOENT else f"{kept.name} is no plain file")
            continue
        wrong, whole = 0, hashlib.sha256()
        try:
            size = os.fstat(file).st_size
            for number, digest in enumerate(kept.pieces):
                if stop():
                    return None
                content = _read(file, folder.path / kept.name, kept.size_bytes, number)
                read += len(content)
                whole.update(content)
                is_right = blake3(content).hexdigest() == digest
                right += len(content) if is_right else 0
                wrong += not is_right
                tell(read, right)
        finally:
            os.close(file)
        if wrong:
            told.append(f"{kept.name} is not what was fetched in {wrong} of its {len(kept.pieces)} pieces")
        elif size != kept.size_bytes:
            told.append(f"{kept.name} has {size} bytes of {kept.size_bytes}")
        elif kept.sha256 and kept.sha256.lower() != whole.hexdigest():
            # (its bytes are right piece by piece: it is the manifest that has changed)
            told.append(f"{kept.name} has another SHA-256 than its manifest says")
    more = f", and {len(told) - _SHOWN_FILES} files more" if len(told) > _SHOWN_FILES else ""
    return ", ".join(told[:_SHOWN_FILES]) + more if told else None


def find_right(
    folder: Folder, listing: Listing, stop: Callable[[], bool], tell: Callable[[int], None]
) -> Iterator[tuple[int, int, str]]:
    """What of a commit that has no manifest is right, as (file, piece, BLAKE3): by the hashes that lie beside it, and
    of a whole file by the SHA-256 that is known of it; until ``stop`` says so. ``tell``: so many bytes were read.
    Raises OSError."""
    counts = [count_pieces(file.size_bytes) for file in listing.files]
    hashes = read_hashes(folder, sum(counts))
    first = read = 0
    for number, (listed, count) in enumerate(zip(listing.files, counts, strict=True)):
        kept = hashes[first : first + count]
        first += count
        if not kept and listed.sha256 is None:
            # (nobody can say what it should be)
            continue
        try:
            file = folder.open(listed.name, os.O_RDONLY)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            continue
        digests, whole = [], hashlib.sha256()
        try:
            for piece in range(count):
                if stop():
                    return
                content = _read(file, folder.path / listed.name, listed.size_bytes, piece)
                read += len(content)
                tell(read)
                whole.update(content)
                digests.append(blake3(content).hexdigest())
        finally:
            os.close(file)
        if not _is_whole(listed, whole.hexdigest()):
            digests = [digest if digest == known else "" for digest, known in zip(digests, kept, strict=False)]
        yield from ((number, piece, digest) for piece, digest in enumerate(digests) if digest)


def _is_whole(listed: FileListed, sha256: str) -> bool:
    return listed.sha256 is not None and listed.sha256.lower() == sha256


def write_mark(folder: Folder, why: str) -> None:
    """Have every program that looks at this commit find that it is no copy any more: on the disk when this returns.
    Raises OSError."""
    if read_mark(folder) != why:
        folder.write(DAMAGED_NAME, f"{why}\n".encode())
        folder.sync()


def read_mark(folder: Folder) -> str | None:
    """What was found wrong with it; None where nothing was."""
    if folder.status(DAMAGED_NAME) is None:
        return None
    try:
        return printable(folder.read(DAMAGED_NAME, _MOST_WHY_BYTES).decode().removesuffix("\n")) or _UNSAID
    except (OSError, UnicodeDecodeError):
        return _UNSAID


def remove_mark(folder: Folder) -> None:
    """It is a copy again. Raises OSError."""
    if folder.status(DAMAGED_NAME) is not None:
        folder.remove(DAMAGED_NAME)
        folder.sync()


def _read(file: int, path: Path, size_bytes: int, number: int) -> bytes:
    """As much of a piece as is there."""
    length = piece_bytes_of(size_bytes)
    start, content = number * length, b""
    wanted = min(length, size_bytes - start)
    try:
        while len(content) < wanted and (part := os.pread(file, wanted - len(content), start + len(content))):
            content += part
    except OSError as error:
        if error.errno != errno.EIO:
            error.filename = str(path)
            raise
        # (a sector that can't be read any more is mended by being written)
    return content
