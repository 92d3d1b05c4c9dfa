"""What a disk's refusal means to the operator of a fetch: where, how much is free there, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from llmgw.host.mounts import find_mount
from llmgw.host.weights.errors import FetchFailed, Kind
from llmgw.units import format_decimal

_DENIED = (errno.EACCES, errno.EPERM)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_ELSEWHERE = "name another folder in weights.cache"


class NoRoom(FetchFailed):
    """The disk has not the room that a fetch needs, or has it no more."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message, Kind.DISK, remedy=remedy)


def explain(error: OSError, folder: Path) -> FetchFailed:
    """Why weights can't be kept in this folder."""
    place = error.filename or folder
    reason = error.strerror or str(error)
    what = f"weights can't be kept in {folder} ({place}: {reason}"
    if error.errno == errno.ENOSPC and has_no_inodes(folder):
        return NoRoom(
            f"{what}; no file more can be made on {show_mount(folder)}, however many bytes are free: it has no inodes "
            "left)",
            f"remove files there that nobody needs, however small (df -i {folder} tells how many there may be), or "
            f"{_ELSEWHERE}; what has come is kept",
        )
    if error.errno == errno.EDQUOT:
        return NoRoom(
            f"{what}, on {show_mount(folder)}, as user {os.geteuid()})",
            f"raise that user's quota, of bytes or of files, remove some of what it has there, or {_ELSEWHERE}; what "
            "has come is kept",
        )
    if error.errno == errno.ENOSPC:
        free = read_free(_find_there(folder))
        shown = "nobody knows how many bytes" if free is None else format_decimal(free)
        return NoRoom(
            f"{what}; {shown} are free on {show_mount(folder)})",
            f"free some space there or {_ELSEWHERE}; what has come is kept",
        )
    if error.errno == errno.EFBIG:
        return NoRoom(
            f"{what}, on {show_mount(folder)})",
            f"allow larger files to this program (ulimit -f, LimitFSIZE) or {_ELSEWHERE}, where they can be",
        )
    if error.errno in _DENIED:
        return _fail(
            f"{what}, on {show_mount(folder)}, as user {os.geteuid()})", f"give it to that user or {_ELSEWHERE}"
        )
    if error.errno == errno.EROFS:
        return _fail(f"{what}, on {show_mount(folder)})", f"mount it so that it can be written to, or {_ELSEWHERE}")
    if error.errno in (errno.ELOOP, errno.EINVAL, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EMLINK, errno.EBUSY):
        return _fail(f"{what})", f"remove {place}, or {_ELSEWHERE}")
    return _fail(f"{what}, on {show_mount(folder)})", f"see what ails that disk (dmesg), or {_ELSEWHERE}")


def explain_lock(error: OSError, folder: Path) -> FetchFailed:
    """Why a source can't be locked in this folder."""
    if error.errno not in _NO_LOCKS:
        return explain(error, folder)
    return _fail(
        f"nothing can be locked in {folder} (on {show_mount(folder)}: {error.strerror})",
        "mount it so that files can be locked, or name a folder in weights.cache that is this node's own",
    )


def _fail(message: str, remedy: str) -> FetchFailed:
    return FetchFailed(message, Kind.DISK, remedy=remedy)


def read_free(folder: Path) -> int | None:
    """The bytes that an ordinary user may still write there; None where the disk does not say."""
    try:
        sizes = os.statvfs(folder)
    except OSError:
        return None
    return sizes.f_bavail * sizes.f_frsize


def has_no_inodes(folder: Path) -> bool:
    """Whether an ordinary user can make no file more there, though bytes are free. Filesystems without a fixed number
    of files say 0 of all."""
    try:
        sizes = os.statvfs(_find_there(folder))
    except OSError:
        return False
    return sizes.f_files > 0 and sizes.f_favail == 0 and sizes.f_bavail > 0


def _find_there(folder: Path) -> Path:
    """The folder, or the one above it that it could not be made in."""
    return next((each for each in (folder, *folder.parents) if each.exists()), folder)


def show_mount(folder: Path) -> str:
    """The filesystem of a folder, for a person."""
    return str(find_mount(folder) or "its filesystem")
