"""Opens files that people name, and only those that can be read to an end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_ordinary(path: Path, size: int) -> bytes:
    """The first ``size`` bytes of a file. OSError when it can't be read, and for a folder, a pipe or a device.

    Those would be waited for, or have no end, and whoever reads is a server that has other things to do.
    """
    return read_with_stat(path, size)[0]


def read_with_stat(path: Path, size: int) -> tuple[bytes, os.stat_result]:
    """As ``read_ordinary``, and the facts of the very file that was read."""
    # Not to wait for the other end of a pipe; of an ordinary file that changes nothing.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        facts = os.fstat(number)
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
        with os.fdopen(number, "rb", closefd=False) as file:
            return file.read(size), facts
    finally:
        os.close(number)
