"""The file of a store: makes it, with its mode, and keeps a second server off it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmgw.config.paths import expand_home
from llmgw.errors import UsageError
from llmgw.store.faults import place_explained

MODE = 0o640


def read_address(address: str) -> Path:
    """The path that an address stands for. UsageError for what this version has no store for."""
    if "://" in address:
        scheme = address.partition("://")[0]
        raise UsageError(f"auth.store: {scheme}:// is no store of this version: give the path of a file")
    if not address or address == ":memory:" or "\0" in address:
        raise UsageError(f"auth.store: {address!r} is not the path of a file")
    return Path(expand_home(address)).absolute()


@contextmanager
def hold_file(path: Path) -> Iterator[bool]:
    """Have the file to oneself; whether it had to be made. UsageError when another server has it, or when it can't be
    read and written."""
    # Beside it, not the file itself: SQLite's own locks on that are lost when anybody here closes it.
    lock = path.with_name(f"{path.name}.lock")
    with place_explained(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(number, path)
        with place_explained(path):
            is_new = _make_file(path)
        yield is_new
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
        holder = os.pread(number, 32, 0).decode(errors="replace").strip() or "unknown"
        raise UsageError(
            f"another llmgw server (pid {holder}) has the store {path}: stop it first, or name another file in "
            "auth.store"
        ) from error
    with place_explained(path):
        os.ftruncate(number, 0)
        os.pwrite(number, f"{os.getpid()}\n".encode(), 0)


def _make_file(path: Path) -> bool:
    """Whether it was made; either way it can be read and written."""
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    except FileExistsError:
        number = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        made = False
    else:
        os.fchmod(number, MODE)
        made = True
    os.close(number)
    # SQLite writes beside the file as well.
    if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, "no files can be made in it", str(path.parent))
    return made
