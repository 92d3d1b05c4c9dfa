"""Where a file's bytes lie on the disk: room taken for them before they come, and their way from memory to it begun."""

from __future__ import annotations

import ctypes
import errno
import os

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
    if size_bytes and _fallocate(file, size_bytes):
        if before > size_bytes:
            os.ftruncate(file, size_bytes)
        return True
    os.ftruncate(file, size_bytes)
    return size_bytes == 0


def _fallocate(file: int, size_bytes: int) -> bool:
    call = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
    if call is None:
        return False
    before = os.fstat(file).st_size
    while call(file, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) != 0:
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
