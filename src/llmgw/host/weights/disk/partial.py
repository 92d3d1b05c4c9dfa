"""A commit on its way to the disk: pieces in any order, each with its hash, and no final name before all is verified.

A kill at any line leaves what the next try goes on from. What is found then counts only as far as its bytes have the
hashes that were noted.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from blake3 import blake3

from llmgw.core.headers import HEAD_BYTES, Header, judge_header
from llmgw.core.weights import FileKept, FileListed, Listing, Manifest, count_pieces, piece_bytes_of
from llmgw.errors import LlmgwError
from llmgw.host.weights.disk.beneath import Folder
from llmgw.host.weights.disk.damage import refuse_used
from llmgw.host.weights.disk.extents import begin_writing
from llmgw.host.weights.disk.faults import explain
from llmgw.host.weights.disk.file_names import find_bad_name, is_commit
from llmgw.host.weights.disk.heads import compare_parts
from llmgw.host.weights.disk.in_use import InUse
from llmgw.host.weights.disk.manifest_file import list_foreign
from llmgw.host.weights.disk.open_files import OpenFiles
from llmgw.host.weights.disk.part_folder import (
    PART_SUFFIX,
    claim_room,
    clear_after,
    come_after,
    give_room_back,
    publish,
)
from llmgw.host.weights.disk.piece_log import PieceLog
from llmgw.host.weights.disk.reserve import Claim, Reservations
from llmgw.host.weights.disk.sums import Sum
from llmgw.host.weights.errors import FetchFailed, Kind

# While one piece is written, so many that came before their turn are read back for the file's sum: it keeps up with
# what comes, and no write takes much longer than another.
_CAUGHT_UP = 8
_STRIPES = 16
# For a longer write the kernel takes longer stretches of memory than it keeps at hand, which a virtual machine may have
# to get from its host first: that costs several times what the writing does.
_WRITTEN_BYTES = 32 * 1024

Buffer = bytes | bytearray | memoryview


class Corrupt(Exception):  # noqa: N818 - named by what happens next, like all errors of ours
    """A piece is not what it was said to be; nothing of it was written."""


class CorruptFile(FetchFailed):
    """A whole file is not what its origin says; its pieces count no more. ``file``: its number in the listing."""

    def __init__(self, message: str, file: int, *, remedy: str) -> None:
        super().__init__(message, Kind.CORRUPT, remedy=remedy)
        self.file = file


class Stopped(LlmgwError):  # noqa: N818
    """Whoever asked for it wants it no more; it can be asked for again."""


def never() -> bool:
    """Nobody stops it."""
    return False


def tell_nobody(done_bytes: int) -> None:
    """Nobody asks how far it is."""


def tell_nobody_both(read_bytes: int, right_bytes: int) -> None:
    """Nor how much of that is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a partial lies, all of it open: the folder of its source, its own, and what is in that. ``alone``: no other
    machine writes to that disk."""

    key: Folder
    part: Folder
    claim: Claim
    notes: PieceLog
    files: OpenFiles
    alone: bool


class Partial:
    """One commit that is being fetched, by whoever holds the lock of its source. Everything here blocks, and may be
    called from several threads, but for ``verify``, ``keep`` and ``forget``, each of which wants no other call beside.

    ``folder``: where it lies. ``have``: the pieces that are here, as (file, piece); ``have_bytes``: what they come to.
    ``log``: those that came, in their order, with their BLAKE3; it only grows, so that a place in it means the same for
    ever, and one that was forgotten and came again is there twice. Raises FetchFailed when the disk fails.
    """

    def __init__(self, listing: Listing, place: _Place) -> None:
        self.listing = listing
        self.folder = place.part.path
        self.have: set[tuple[int, int]] = set()
        self.have_bytes = 0
        self.log: list[tuple[int, int, str]] = []
        self._key = place.key
        self._part = place.part
        self._claim = place.claim
        self._notes = place.notes
        self._files = place.files
        self._alone = place.alone
        self._kept = False
        self._sums = [Sum(file.size_bytes) for file in listing.files]
        self._digests: dict[tuple[int, int], str] = {}
        self._verified: dict[int, str] = {}
        self._lock = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]

    def load(self, stop: Callable[[], bool], tell: Callable[[int], None]) -> None:
        """Take what an earlier try has left, as far as it is what was noted. ``tell``: so many bytes of it are looked
        through. Raises Stopped."""
        noted = self._notes.read()
        right = set()
        looked_at = 0
        for file, piece in sorted(noted):
            if stop():
                raise Stopped("looking at what is here already was stopped")
            if file >= len(self._sums) or piece >= self._sums[file].count:
                continue
            try:
                content = self._read(file, piece)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                # (a sector that can't be read may be well again once it is written)
                continue
            looked_at += len(content)
            tell(looked_at)
            if blake3(content).hexdigest() != noted[file, piece]:
                continue
            right.add((file, piece))
            if self._sums[file].next == piece:
                self._sums[file].add(content)
        for (file, piece), digest in noted.items():
            if (file, piece) in right:
                self._enter(file, piece, digest)

    def write(self, file: int, piece: int, data: Buffer, expected: str | None) -> str:
        """Keep a piece, and return its BLAKE3. Raises Corrupt when that is not ``expected``. Where it is here already,
        what is here stays."""
        self._check(file, piece, len(data))
        digest = blake3(data).hexdigest()
        if expected is not None and digest != expected:
            raise Corrupt(f"piece {piece} of {self.listing.files[file].name} is not what it was said to be")
        with self._stripes[hash((file, piece)) % _STRIPES]:
            if (known := self._digests.get((file, piece))) is not None:
                return known
            try:
                self._store(file, piece, data)
                with self._lock:
                    self._notes.add(file, piece, digest)
                    self._enter(file, piece, digest)
            except OSError as error:
                raise explain(error, self._key.path.parent) from error
        self._claim.use(len(data))
        self._take_in(file, piece, data)
        return digest

    def read(self, file: int, piece: int) -> bytes:
        """A piece that is here. Raises LookupError when it is not, or after ``close``, and OSError."""
        if (file, piece) not in self.have:
            raise LookupError(f"piece {piece} of file {file} is not here")
        return self._read(file, piece)

    def forget(self, file: int) -> None:
        """None of this file's pieces is here any more."""
        with self._sums[file].hold(), self._lock:
            gone = sorted(piece for piece in self.have if piece[0] == file)
            self.have.difference_update(gone)
            self.have_bytes -= sum(self._measure(*piece)[1] for piece in gone)
            for piece in gone:
                del self._digests[piece]
            self._sums[file].reset()
            self._verified.pop(file, None)
            try:
                self._notes.forget(gone)
            except OSError as error:
                raise explain(error, self._key.path.parent) from error

    def verify(self, tell: Callable[[int], None], stop: Callable[[], bool] = never) -> None:
        """Prove each file: by its origin's SHA-256 where that is known, and by how weights of its kind begin. All
        pieces are here. ``tell``: so many bytes of the listing are read.

        Raises CorruptFile; FetchFailed for what its origin has, and is no weights, or not of one model; Stopped.
        """
        tell(self._count_summed())
        headers: dict[str, Header | None] = {}
        for number, file in enumerate(self.listing.files):
            total = self._sums[number]
            with total.hold():
                while not total.whole:
                    if stop():
                        raise Stopped(f"verifying {file.name} was stopped")
                    if (number, total.next) not in self.have:
                        raise ValueError(f"piece {total.next} of {file.name} is to be fetched first")
                    total.add(self._read_told(number, total.next))
                    tell(self._count_summed())
                self._compare(number, file, total.digest())
            headers[file.name] = self._look_at_head(number, file)
            self._verified[number] = total.digest()
        if (wrong := compare_parts(headers)) is not None:
            raise _spoiled(wrong)

    def keep(self, now: float, stop: Callable[[], bool] = never) -> Manifest:
        """Have all that was verified on the disk under its final name, ``now`` in seconds since 1970, and as the newest
        of its source whatever the clock said before. Raises Stopped, as long as it has no name."""
        if len(self._verified) != len(self.listing.files):
            raise ValueError(f"{self.listing.commit} is to be verified first")
        source, commit = self.listing.source, self.listing.commit
        kept = tuple(self._describe(number, file) for number, file in enumerate(self.listing.files))
        try:
            for number in range(len(kept)):
                if stop():
                    raise Stopped(f"keeping {commit} was stopped")
                with self._files.use(number) as file:
                    os.fsync(file)
            manifest = Manifest(source=source, commit=commit, files=kept, fetched_at=come_after(self._key, commit, now))
            manifest = publish(self._key, self._part, manifest)
        except InUse as error:
            folder = self._key.path / commit
            raise refuse_used(source, commit, folder, "it is not whole", ()) from error
        except OSError as error:
            raise explain(error, self._key.path.parent) from error
        self._kept = True
        self._claim.close()
        clear_after(self._key, self._part, manifest.commit)
        return manifest

    def close(self) -> None:
        """What is here stays for the next try, and the room for the rest is given back. A second time does nothing."""
        with ExitStack() as nobody_writes:
            for stripe in self._stripes:
                nobody_writes.enter_context(stripe)
            if self._alone and not self._kept and self._part.file >= 0:
                give_room_back(self._part)
            with self._lock:
                self._notes.close()
            self._files.close()
        self._claim.close()
        self._part.close()
        self._key.close()

    def _check(self, file: int, piece: int, size_bytes: int) -> None:
        if not 0 <= file < len(self._sums) or not 0 <= piece < self._sums[file].count:
            raise ValueError(f"there is no piece {piece} of file {file}")
        if size_bytes != self._measure(file, piece)[1]:
            raise ValueError(f"piece {piece} of file {file} can't have {size_bytes} bytes")

    def _measure(self, file: int, piece: int) -> tuple[int, int]:
        """Where a piece begins, and how long it is."""
        size = self.listing.files[file].size_bytes
        length = piece_bytes_of(size)
        return piece * length, min(length, size - piece * length)

    def _enter(self, file: int, piece: int, digest: str) -> None:
        self._digests[file, piece] = digest
        self.log.append((file, piece, digest))
        self.have.add((file, piece))
        self.have_bytes += self._measure(file, piece)[1]

    def _store(self, file: int, piece: int, data: Buffer) -> None:
        offset, length = self._measure(file, piece)
        left = memoryview(data)
        with self._files.use(file) as target:
            place = offset
            while left:
                written = os.pwrite(target, left[:_WRITTEN_BYTES], place)
                left, place = left[written:], place + written
            begin_writing(target, offset, length)

    def _read(self, file: int, piece: int) -> bytes:
        offset, length = self._measure(file, piece)
        with self._files.use(file) as source:
            return read_at(source, offset, length)

    def _read_told(self, file: int, piece: int) -> bytes:
        try:
            return self._read(file, piece)
        except OSError as error:
            raise explain(error, self._key.path.parent) from error

    def _take_in(self, file: int, piece: int, data: Buffer) -> None:
        """As much of the file's sum as is in order now. Where another thread is at it, that one or a later one does."""
        total = self._sums[file]
        with total.try_hold() as mine:
            if not mine:
                return
            if total.next == piece:
                total.add(data)
            total.follow(
                lambda number: (file, number) in self.have,
                lambda number: self._read_told(file, number),
                most=_CAUGHT_UP,
            )

    def _count_summed(self) -> int:
        return sum(total.done_bytes for total in self._sums)

    def _compare(self, number: int, file: FileListed, digest: str) -> None:
        if file.sha256 is None or digest == file.sha256.lower():
            return
        self.forget(number)
        raise CorruptFile(
            f"{file.name} is not what its origin says: its SHA-256 is {digest}, not {file.sha256}",
            number,
            remedy="it is fetched anew at the next try; when that ends the same, something between here and the origin "
            "(a proxy, a mirror) changes it, or this node's memory or disk",
        )

    def _look_at_head(self, number: int, file: FileListed) -> Header | None:
        try:
            with self._files.use(number) as source:
                head = read_at(source, 0, min(file.size_bytes, HEAD_BYTES))
        except OSError as error:
            raise explain(error, self._key.path.parent) from error
        judged = judge_header(file.name, head, file.size_bytes)
        if judged.wrong is not None:
            raise _spoiled(f"{file.name} {judged.wrong}")
        return judged.header

    def _describe(self, number: int, file: FileListed) -> FileKept:
        pieces = tuple(self._digests[number, piece] for piece in range(count_pieces(file.size_bytes)))
        return FileKept(name=file.name, size_bytes=file.size_bytes, sha256=self._verified[number], pieces=pieces)


def open_partial(
    key: Folder,
    listing: Listing,
    reservations: Reservations,
    stop: Callable[[], bool] = never,
    *,
    alone: bool = True,
    tell: Callable[[int], None] = tell_nobody,
) -> Partial:
    """What is here of this commit, in the folder of its source: looked through, with room for the rest taken or
    promised. ``alone``: no other machine writes to that disk. Raises FetchFailed, Stopped."""
    if not is_commit(listing.commit):
        raise FetchFailed(
            f"{listing.commit[:200]!r} can't be a commit",
            Kind.REFUSED,
            remedy="see what HF_ENDPOINT names: no hub says that of a repository",
        )
    if not listing.files:
        raise FetchFailed(
            f"there is nothing in {listing.commit} to be fetched",
            Kind.NO_FILE,
            remedy="see what that repository holds, and name one of its files",
        )
    if (why := find_bad_name([file.name for file in listing.files])) is not None:
        raise FetchFailed(f"{why}: it can't be kept", Kind.REFUSED, remedy="name the files that you need one by one")
    with ExitStack() as undo:
        try:
            undo.enter_context(ours := key.copy())
            undo.enter_context(part := key.enter(listing.commit + PART_SUFFIX, make=True))
            for name in list_foreign(part, [file.name for file in listing.files]):
                # An engine that is pointed at the folder would take it for a part of the model.
                part.remove(name)
            if alone:
                undo.callback(give_room_back, part)
            undo.callback((claim := claim_room(part, key, listing, reservations)).close)
            undo.callback((notes := PieceLog(part)).close)
            undo.callback((files := OpenFiles(part, [file.name for file in listing.files], os.O_RDWR)).close)
            place = _Place(key=ours, part=part, claim=claim, notes=notes, files=files, alone=alone)
            partial = Partial(listing, place)
            partial.load(stop, tell)
        except OSError as error:
            raise explain(error, key.path.parent) from error
        undo.pop_all()
    return partial


def _spoiled(message: str) -> FetchFailed:
    return FetchFailed(message, Kind.CORRUPT, remedy="see what that address gives, and name the weights themselves")


def read_at(file: int, offset: int, size_bytes: int) -> bytes:
    """These bytes of a file. Raises OSError, also when it ends before."""
    found = os.pread(file, size_bytes, offset)
    if len(found) == size_bytes:
        return found
    whole = bytearray(found)
    while len(whole) < size_bytes and (part := os.pread(file, size_bytes - len(whole), offset + len(whole))):
        whole += part
    if len(whole) < size_bytes:
        raise OSError(errno.EIO, f"it ends {size_bytes - len(whole)} bytes before it should")
    return bytes(whole)
