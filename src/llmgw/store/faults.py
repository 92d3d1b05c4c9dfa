"""What a fault of SQLite or of its disk is called, and what helps."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmgw.errors import LlmgwError, UsageError


class StoreFailed(LlmgwError):  # noqa: N818 - named by what happens next, like all of them
    """The store could not do it, and has not done it. It may work the next time."""


class StoreBusy(StoreFailed):
    """More waits to be written than is taken on; nothing of this was begun."""


CLOSED = "the store is closed: the server is stopping"

_FAULTS = {
    sqlite3.SQLITE_FULL: "its disk is full: free some space",
    sqlite3.SQLITE_READONLY: "it can't be written: is its disk mounted read-only, or was it replaced while in use?",
    sqlite3.SQLITE_PERM: "it can't be written: check its owner and mode, and those of its folder",
    sqlite3.SQLITE_CANTOPEN: "it can't be opened: check its owner and mode, and those of its folder",
    sqlite3.SQLITE_BUSY: "another program has it locked (an sqlite3 shell, or a backup?): end that first",
    sqlite3.SQLITE_LOCKED: "another program has it locked (an sqlite3 shell, or a backup?): end that first",
    sqlite3.SQLITE_IOERR: "its disk can't be read or written: look at the kernel's log, and at the space left",
    sqlite3.SQLITE_CORRUPT: "it is damaged: stop the server and put a backup in its place",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite database: name another file, or put a backup in its place",
    sqlite3.SQLITE_PROTOCOL: "its disk does not lock files as SQLite needs it: keep it on a local disk",
    sqlite3.SQLITE_NOMEM: "there is not enough memory",
    sqlite3.SQLITE_TOOBIG: "this is more than one row can hold",
}


@contextmanager
def explained(path: str) -> Iterator[None]:
    """A fault of the database becomes StoreFailed; what is a mistake in our own SQL stays what it is."""
    try:
        yield
    except sqlite3.Error as error:
        raise explain(error, path) from error


def explain(error: Exception, path: str) -> Exception:
    """StoreFailed in place of a fault of the database; any other error as it is."""
    if not isinstance(error, sqlite3.Error):
        return error
    # The upper bits tell variants; errors of the Python module itself have no number.
    fault = _FAULTS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    if fault is None:
        return error
    failed = StoreFailed(f"the store {path} can't be used: {fault} ({error})")
    failed.__cause__ = error
    return failed


@contextmanager
def place_explained(path: Path) -> Iterator[None]:
    """An OSError about the file or its folder becomes UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"the store {path} can't be used: {_say(error, path)}") from error


def _say(error: OSError, path: Path) -> str:
    folder = path.parent
    if isinstance(error, FileNotFoundError):
        return f"there is no folder {folder}: make it, for the user that the server runs as"
    if isinstance(error, NotADirectoryError):
        return f"{folder} is not a folder: name another file in auth.store"
    if isinstance(error, IsADirectoryError):
        return "it is a folder: name a file in it"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "its disk is full: free some space"
    if isinstance(error, PermissionError):
        place = error.filename or path
        return f"{place}: {error.strerror}: the server's user has to own it, and may make files in {folder}"
    return f"{error.filename or path}: {error.strerror or error}: mend that, or name another file in auth.store"
