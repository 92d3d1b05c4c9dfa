"""The files in a commit's folder that say what lies there; a folder without them holds nothing that can be used.

A manifest is a page of text. The hashes of its pieces, of which there may be hundreds of thousands, lie beside it as
bytes: read as a part of that text they would hold up every other thread for as long as that takes.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import msgspec

from llmgw.core.weights import FileKept, Manifest, count_pieces
from llmgw.host.weights.disk.beneath import Folder
from llmgw.host.weights.disk.file_names import HASHES_NAME, MANIFEST_NAME, OUR_NAMES, RENEWED_NAME, find_bad_name

HASH_BYTES = 32
# Far more than the largest repositories have; what is larger was not written by us.
_MOST_BYTES = 256 * 1024 * 1024
_MOST_MOMENT_BYTES = 64
# No clock and no file comes near these: such a number stands where a sign of it was changed, and can't be told.
_MOST_MOMENT = 10**12
_MOST_FILE_BYTES = 2**53

_Moment = Annotated[float, msgspec.Meta(ge=-_MOST_MOMENT, le=_MOST_MOMENT)]
_Size = Annotated[int, msgspec.Meta(le=_MOST_FILE_BYTES)]


class _File(msgspec.Struct, frozen=True, omit_defaults=True):
    """``pieces``: where the hashes stand in the manifest itself."""

    name: str
    size_bytes: _Size
    sha256: str
    pieces: tuple[str, ...] | None = None


class _Manifest(msgspec.Struct, frozen=True):
    source: str
    commit: str
    fetched_at: _Moment
    files: tuple[_File, ...]


def mode_of(source: str) -> int:
    """Who may read a file that holds a source: what stands behind the ? of an address may open it."""
    return 0o600 if "?" in source else 0o666


def write_manifest(folder: Folder, manifest: Manifest) -> None:
    """Raises OSError."""
    files = tuple(_File(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256) for file in manifest.files)
    text = _Manifest(source=manifest.source, commit=manifest.commit, fetched_at=manifest.fetched_at, files=files)
    folder.write(HASHES_NAME, b"".join(bytes.fromhex("".join(file.pieces)) for file in manifest.files))
    folder.write(MANIFEST_NAME, msgspec.json.encode(text), mode=mode_of(manifest.source))


def read_manifest(folder: Folder) -> Manifest:
    """Raises OSError, and ValueError when it means nothing, or names what does not lie in its folder."""
    found = _read_text(folder)
    if (why := find_bad_name([file.name for file in found.files])) is not None:
        raise ValueError(f"its manifest is not llmgw's own: {why}")
    if not found.files:
        # (nothing is fetched without one)
        raise ValueError("its manifest is not llmgw's own: it names no file")
    for file in found.files:
        count = None if file.pieces is None else len(file.pieces)
        if file.size_bytes < 0 or count not in (None, count_pieces(file.size_bytes)):
            raise ValueError(f"its manifest is not llmgw's own: {file.name!r} can't have {count} pieces")
    kept = _add_hashes(folder, found.files)
    return Manifest(source=found.source, commit=found.commit, files=kept, fetched_at=_find_moment(folder, found))


def read_fetched_at(folder: Folder) -> float:
    """When this commit was fetched, or found to be the newest again. Raises OSError, ValueError."""
    return _find_moment(folder, _read_text(folder))


def renew_manifest(folder: Folder, manifest: Manifest, at: float) -> Manifest:
    """It counts as fetched at this moment. Raises OSError.

    The manifest itself is not written again: whoever uses the commit holds a lock on that very file, and it would be
    lost by a kill in the middle. Half a moment counts for nothing, and leaves the commit what it was.
    """
    folder.write(RENEWED_NAME, f"{at!r}\n".encode())
    folder.sync()
    return replace(manifest, fetched_at=at)


def _read_text(folder: Folder) -> _Manifest:
    text = _read_whole(folder, MANIFEST_NAME)
    try:
        return msgspec.json.decode(text, type=_Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its manifest means nothing: {error}") from error


def _read_whole(folder: Folder, name: str) -> bytes:
    try:
        return folder.read(name, _MOST_BYTES)
    except OSError as error:
        if error.errno == errno.EIO:
            # (a sector that can't be read any more is mended by being written)
            raise ValueError(f"{name} can't be read: {error.strerror}") from error
        raise


def _add_hashes(folder: Folder, files: tuple[_File, ...]) -> tuple[FileKept, ...]:
    counts = [count_pieces(file.size_bytes) if file.pieces is None else 0 for file in files]
    try:
        hashes = _read_whole(folder, HASHES_NAME) if any(counts) else b""
    except FileNotFoundError as error:
        raise ValueError(f"{HASHES_NAME} is missing") from error
    if len(hashes) != sum(counts) * HASH_BYTES:
        raise ValueError(f"{HASHES_NAME} has {len(hashes)} bytes of {sum(counts) * HASH_BYTES}")
    kept, start = [], 0
    for file, count in zip(files, counts, strict=True):
        stop = start + count * HASH_BYTES
        pieces = file.pieces if file.pieces is not None else _split(hashes[start:stop].hex())
        kept.append(FileKept(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256, pieces=pieces))
        start = stop
    return tuple(kept)


def read_hashes(folder: Folder, count: int) -> tuple[str, ...]:
    """The hashes that lie beside a manifest, whatever became of that; nothing where they can't be those of so many
    pieces. Raises OSError."""
    try:
        hashes = _read_whole(folder, HASHES_NAME)
    except (FileNotFoundError, ValueError):
        return ()
    return _split(hashes.hex()) if len(hashes) == count * HASH_BYTES else ()


def _split(digits: str) -> tuple[str, ...]:
    length = 2 * HASH_BYTES
    return tuple(digits[at : at + length] for at in range(0, len(digits), length))


def _find_moment(folder: Folder, manifest: _Manifest) -> float:
    try:
        if folder.status(RENEWED_NAME) is None:
            return manifest.fetched_at
        moment = float(folder.read(RENEWED_NAME, _MOST_MOMENT_BYTES))
    except (OSError, ValueError):
        # (a commit is not lost by that)
        return manifest.fetched_at
    return max(manifest.fetched_at, moment) if abs(moment) <= _MOST_MOMENT else manifest.fetched_at


def list_foreign(folder: Folder, names: Iterable[str]) -> list[str]:
    """What is in the folder besides these files, their folders and what llmgw itself keeps there; what is in a folder
    before the folder. Raises OSError."""
    wanted = {*names, *OUR_NAMES}
    folders = {name[: match.start()] for name in wanted for match in re.finditer("/", name)}
    return [name for name, found in folder.walk() if name not in _fitting(found, wanted, folders)]


def _fitting(found: os.stat_result, files: set[str], folders: set[str]) -> set[str]:
    if stat.S_ISDIR(found.st_mode):
        return folders
    # A link in the place of a file is not that file.
    return files if stat.S_ISREG(found.st_mode) else set()


def describe_unread(folder: Folder, source: str, commit: str) -> Manifest:
    """What lies in the folder of a commit whose manifest can't be read whole any more: names and sizes, and what is
    still said of their SHA-256 ("": nothing). It counts as fetched when something was last put there.
    Raises OSError."""
    sums: dict[str, str] = {}
    with suppress(FileNotFoundError, ValueError):
        found_text = _read_text(folder)
        if (found_text.source, found_text.commit) == (source, commit):
            sums = {file.name: file.sha256 for file in found_text.files}
    files = tuple(
        FileKept(name=name, size_bytes=found.st_size, sha256=sums.get(name, ""), pieces=())
        for name, found in folder.walk()
        if stat.S_ISREG(found.st_mode) and name not in OUR_NAMES
    )
    at = max((found.st_mtime for name, found in folder.walk() if name not in OUR_NAMES), default=0.0)
    return Manifest(source=source, commit=commit, files=files, fetched_at=at)


def find_fault(folder: Folder, manifest: Manifest) -> str | None:
    """What of a commit is not there as its manifest says, by sizes alone. Raises OSError."""
    for file in manifest.files:
        found = folder.status(file.name)
        if found is None:
            return f"{file.name} is missing"
        if not stat.S_ISREG(found.st_mode):
            return f"{file.name} is no plain file"
        if found.st_size != file.size_bytes:
            return f"{file.name} has {found.st_size} bytes of {file.size_bytes}"
    return None
