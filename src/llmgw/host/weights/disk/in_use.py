"""Who runs by a commit: locks of the kernel's on what says what it is, and on its folder, that every program which
shares the folder of the cache looks at before anything of it changes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from llmgw.errors import LlmgwError
from llmgw.host.weights.disk.beneath import Folder
from llmgw.host.weights.disk.file_names import HASHES_NAME, MANIFEST_NAME

# More than one: whoever holds a file that somebody removes holds nothing that the next one could find.
_HELD = (MANIFEST_NAME, HASHES_NAME)
# (some file servers let no folder be locked)
_LOCKLESS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP)


class NotRemoved(LlmgwError):  # noqa: N818 - named by what happens next, like all of them
    """It stays, for the reason that is told."""


class InUse(NotRemoved):
    """Somebody runs by it."""


class Use:
    """While it is open, no program that shares the folder removes a commit, or has another take its place."""

    __slots__ = ("_held",)

    def __init__(self, held: ExitStack) -> None:
        self._held = held

    def close(self) -> None:
        """A second time does nothing."""
        self._held.close()


def use_commit(key: Folder, commit: str) -> Use | None:
    """Keep a commit from being removed, whatever is left of it; None when it is gone. Raises OSError."""
    with ExitStack() as held:
        folder = held.enter_context(key.enter(commit))
        try:
            _lock_all(held, folder, os.O_RDONLY, fcntl.LOCK_SH)
        except BlockingIOError:
            # Somebody is removing it just now.
            return None
        # Who removes it renames it first.
        found, ours = key.status(commit), os.fstat(folder.file)
        if found is not None and (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino):
            return Use(held.pop_all())
    return None


@contextmanager
def hold_alone(folder: Folder) -> Iterator[None]:
    """While the body runs nobody begins to run by this commit. Raises InUse where somebody does, OSError."""
    with ExitStack() as held:
        try:
            _lock_all(held, folder, os.O_RDWR, fcntl.LOCK_EX)
        except BlockingIOError as error:
            raise InUse("it is in use") from error
        yield


def _lock_all(held: ExitStack, folder: Folder, flags: int, how: int) -> None:
    for name in _HELD:
        try:
            file = folder.open(name, flags)
        except OSError:
            found = folder.status(name)
            if found is not None and stat.S_ISREG(found.st_mode):
                raise
            continue
        held.callback(os.close, file)
        fcntl.flock(file, how | fcntl.LOCK_NB)
    # By a description of its own: it is let go with that, whoever else has the folder open.
    own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder.file)
    held.callback(os.close, own)
    try:
        fcntl.flock(own, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _LOCKLESS:
            raise
