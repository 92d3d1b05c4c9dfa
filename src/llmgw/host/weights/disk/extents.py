"""Where a file's bytes lie on the disk: room taken for them before they come, given back where they did not, and their
way from memory to it begun."""

from __future__ import annotations

import ctypes
import errno
import os

# Of <linux/falloc.h>: take what is there out of the file, which stays as long as it is.
_KEEP_SIZE = 1
_PUNCH_HOLE = 2
# Of <linux/fs.h>: begin to write what is changed, and wait for nothing.
_SYNC_FILE_RANGE_WRITE = 2
# A filesystem that can't take room beforehand; the last is what some say of a file with holes.
_UNABLE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)

_libc = ctypes.CDLL(None, use_errno=True)


def take_room(file: int, size_bytes: int) -> bool:
    """Make a file this long and take room for all of it; what it holds stays. False: its room can't be taken
    beforehand, and it is only this long. Raises OSError when there is no room, and the file is as long as before.

    Not posix_fallocate: where the filesystem can't, that writes the whole file once.
    """
    before = os.fstat(file).st_size
    if size_bytes and _fallocate(file, 0, 0, size_bytes):
        if before > size_bytes:
            os.ftruncate(file, size_bytes)
        return True
    os.ftruncate(file, size_bytes)
    return size_bytes == 0


def give_back_room(file: int) -> None:
    """Give back the room that was taken for what was never written; what the file holds stays, and its length. Nobody
    else writes to it meanwhile. Where a filesystem can't, it stays taken. Raises OSError."""
    size, start = os.fstat(file).st_size, 0
    while start < size:
        try:
            # What is taken and not written is a hole to whoever reads.
            hole = os.lseek(file, start, os.SEEK_HOLE)
            if hole >= size:
                return
            start = _find_data(file, hole, size)
        except OSError as error:
            if error.errno in _UNABLE:
                return
            raise
        if not _fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, hole, start - hole):
            return


def _find_data(file: int, offset: int, size: int) -> int:
    try:
        return os.lseek(file, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size


def _fallocate(file: int, mode: int, offset: int, size_bytes: int) -> bool:
    call = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
    if call is None:
        return False
    before = os.fstat(file).st_size
    while call(file, mode, ctypes.c_int64(offset), ctypes.c_int64(size_bytes)) != 0:
        number = ctypes.get_errno()
        if number in _UNABLE:
            return False
        if number != errno.EINTR:
            # It may have taken a part of the room already.
            os.ftruncate(file, before)
            raise OSError(number, os.strerror(number))
    return True


def begin_writing(file: int, offset: int, size_bytes: int) -> None:
    """Have these bytes written to the disk from now on: else all of a large file waits for the one sync at its end."""
    call = getattr(_libc, "sync_file_range", None)
    if call is not None:
        # (where it fails, the sync at the end says why)
        call(file, ctypes.c_int64(offset), ctypes.c_int64(size_bytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))
