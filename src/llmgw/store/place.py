"""The file of a store: makes it, with its mode, and keeps a second server off it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmgw.config.paths import expand_home
from llmgw.errors import UsageError
from llmgw.store.faults import StoreFailed, place_explained

MODE = 0o640


def read_address(address: str) -> Path:
    """The path that an address stands for. UsageError for what this version has no store for."""
    if "://" in address:
        scheme = address.partition("://")[0]
        raise UsageError(f"auth.store: {scheme}:// is no store of this version: give the path of a file")
    if not address or address == ":memory:" or "\0" in address:
        raise UsageError(f"auth.store: {address!r} is not the path of a file")
    return Path(expand_home(address)).absolute()


class Held:
    """A file that this process has to itself. ``is_new``: it had to be made."""

    __slots__ = ("_parts", "_path", "is_new")

    def __init__(self, path: Path, number: int, *, is_new: bool) -> None:
        self._path = path
        self._parts = {path: _identity(os.fstat(number))}
        self.is_new = is_new

    def learn_log(self) -> None:
        """What SQLite keeps beside it is there by now, and stays the same file while it is open."""
        log = Path(f"{os.path.realpath(self._path)}-wal")
        self._parts[log] = _identity(log.stat())

    def check(self) -> None:
        """StoreFailed when one of its files is no more what its path leads to: what is written would be nowhere."""
        for path, identity in self._parts.items():
            try:
                found = _identity(path.stat())
            except OSError:
                found = None
            if found != identity:
                raise StoreFailed(
                    f"the store {self._path} can't be used: {path.name} was removed or replaced while in use. "
                    "Put it back, or restart the server, which goes on with what is there then"
                )


@contextmanager
def hold_file(path: Path) -> Iterator[Held]:
    """Have the file to oneself. UsageError when another server has it, under whatever name, or when it can't be read
    and written."""
    with place_explained(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        number, is_new = _open_or_make(path)
    try:
        # The file itself, whatever it is called. Open until SQLite has closed it: its own locks would go with ours.
        _lock(number, path)
        held = Held(path, number, is_new=is_new)
        # Another may have taken it away again before it was ours.
        held.check()
        yield held
    finally:
        os.close(number)


def discard(path: Path) -> None:
    """Take a file away again that was made for nothing, with what SQLite puts beside it."""
    for end in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + end).unlink(missing_ok=True)


def _lock(number: int, path: Path) -> None:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"another llmgw server (pid {_find_holder(number)}) has the store {path}: stop it first, or name another "
            "file in auth.store"
        ) from error


def _find_holder(number: int) -> str:
    facts = os.fstat(number)
    name = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    try:
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        locks = []
    # as 1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF
    holders = (words[4] for words in map(str.split, locks) if words[1] == "FLOCK" and words[5] == name)
    return next(holders, "unknown")


def _open_or_make(path: Path) -> tuple[int, bool]:
    """The file, open to be read and written, and whether it was made."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        number = os.open(path, flags | os.O_CREAT | os.O_EXCL, MODE)
        made = True
    except FileExistsError:
        number = os.open(path, flags)
        made = False
    try:
        if made:
            os.fchmod(number, MODE)
        elif not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
        # SQLite writes beside the file as well.
        if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, "no files can be made in it", str(path.parent))
    except BaseException:
        os.close(number)
        raise
    return number, made


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino
