"""The folder of a commit on its way: room for it, the one step to its final name, and what is left of others."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from contextlib import suppress

from llmgw.core.weights import FileListed, Listing, Manifest, count_pieces
from llmgw.host.weights.disk.beneath import Folder, count_bytes
from llmgw.host.weights.disk.damage import read_mark
from llmgw.host.weights.disk.extents import give_back_room, take_room
from llmgw.host.weights.disk.file_names import DAMAGED_NAME, PIECES_NAME, is_commit
from llmgw.host.weights.disk.in_use import hold_alone
from llmgw.host.weights.disk.manifest_file import (
    find_fault,
    list_foreign,
    read_fetched_at,
    read_manifest,
    write_manifest,
)
from llmgw.host.weights.disk.reserve import Claim, Reservations
from llmgw.units import printable

log = logging.getLogger(__name__)

PART_SUFFIX = ".part"
# What is being removed, by a name that nobody takes for a commit.
GONE_SUFFIX = ".gone"

# Of the list of pieces and the manifest, for each piece and in all.
_NOTED_BYTES = 200
_NOTES_BYTES = 64 * 1024


def claim_room(part: Folder, key: Folder, listing: Listing, reservations: Reservations) -> Claim:
    """Make its files as long as they will be, with room for all of them taken or promised. Raises NoRoom, OSError."""

    def take() -> int:
        return sum(_take_room(part, file) for file in listing.files)

    pieces = sum(count_pieces(file.size_bytes) for file in listing.files)
    needed = sum(_count_missing(part, file) for file in listing.files)
    return reservations.claim(part.file, key.path.parent, needed + pieces * _NOTED_BYTES + _NOTES_BYTES, take)


def _count_missing(part: Folder, file: FileListed) -> int:
    found = part.status(file.name)
    return file.size_bytes - min(file.size_bytes, count_bytes(found) if found is not None else 0)


def _take_room(part: Folder, file: FileListed) -> int:
    """The bytes of it that could not be taken."""
    above, _, _ = file.name.rpartition("/")
    if above:
        part.enter(above, make=True).close()
    missing = _count_missing(part, file)
    target = part.open(file.name, os.O_RDWR | os.O_CREAT)
    try:
        return 0 if take_room(target, file.size_bytes) else missing
    except OSError as error:
        error.filename = str(part.path / file.name)
        raise
    finally:
        os.close(target)


def give_room_back(part: Folder) -> None:
    """Give back what was taken for that which has not come: nobody knows when somebody goes on with it. Nobody writes
    to it meanwhile. Where that fails, it takes room, and no harm is done."""
    try:
        for name, found in part.walk():
            if stat.S_ISREG(found.st_mode):
                file = part.open(name, os.O_RDWR)
                try:
                    give_back_room(file)
                finally:
                    os.close(file)
    except OSError as error:
        log.warning("the room of %s can't be given back: %s", error.filename or part.path, error.strerror)


def publish(key: Folder, part: Folder, manifest: Manifest) -> Manifest:
    """Give the folder its final name; all of it is on the disk when this returns. What its files hold is there already.

    Where the commit is here after all (somebody fetched it where locks hold nobody off), that stays, and is returned.
    Raises InUse where somebody runs by that, and it is no copy any more; OSError.
    """
    for name in _list_folders(manifest):
        with part.enter(name) as folder:
            folder.sync()
    write_manifest(part, manifest)
    # (what was wrong with it is mended)
    part.remove(DAMAGED_NAME)
    part.sync()
    if key.status(manifest.commit) is not None and (there := _make_way(key, manifest)) is not None:
        key.remove(manifest.commit + PART_SUFFIX)
        return there
    key.rename(manifest.commit + PART_SUFFIX, manifest.commit)
    part.path = key.path / manifest.commit
    key.sync()
    return manifest


def come_after(key: Folder, commit: str, now: float) -> float:
    """``now``, or later than whatever else is here of this source: a clock that was ahead would have it be the newest
    for as long as it was wrong. Raises OSError."""
    moments = [now]
    for name in filter(is_commit, key.names()):
        # (what can't be read is nothing that a launch would take)
        with suppress(OSError, ValueError):
            if name != commit and key.has_folder(name):
                with key.enter(name) as folder:
                    moments.append(read_fetched_at(folder) + 1)
    return max(moments)


def _make_way(key: Folder, manifest: Manifest) -> Manifest | None:
    """Set aside what is left of an older fetch of this commit. When that is whole, it stays, and is returned."""
    with key.enter(manifest.commit) as folder:
        names = [file.name for file in manifest.files]
        with suppress(FileNotFoundError, ValueError):
            there = read_manifest(folder)
            names += [file.name for file in there.files]
            if find_fault(folder, there) is None and read_mark(folder) is None:
                return there
        if foreign := list_foreign(folder, names):
            raise OSError(errno.EEXIST, "llmgw did not put it there", printable(str(folder.path / foreign[0])))
        with hold_alone(folder):
            key.remove(manifest.commit + GONE_SUFFIX)
            key.rename(manifest.commit, manifest.commit + GONE_SUFFIX)
    return None


def clear_after(key: Folder, part: Folder, commit: str) -> None:
    """Remove what nobody needs now that this commit is whole; where that fails, it takes room, and no harm is done."""
    try:
        part.unlink(PIECES_NAME)
        clear_others(key, commit)
    except OSError as error:
        log.warning("%s can't be removed: %s", error.filename, error.strerror)


def clear_others(key: Folder, commit: str) -> int:
    """Remove what is left of other commits that never became whole, and of removed ones. Returns the bytes freed."""
    left = [name for name in key.names() if name.endswith((PART_SUFFIX, GONE_SUFFIX))]
    return sum(key.remove(name) for name in left if is_commit(name.rpartition(".")[0]) and name != commit + PART_SUFFIX)


def _list_folders(manifest: Manifest) -> list[str]:
    """The folders that its files lie in, inner ones first."""
    names = [file.name for file in manifest.files]
    return sorted({name[: match.start()] for name in names for match in re.finditer("/", name)}, reverse=True)
