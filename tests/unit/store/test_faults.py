from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from llmgw.errors import UsageError
from llmgw.store.faults import StoreFailed, explain, explained, place_explained


def test_a_fault_says_what_where_and_what_to_do(path: Path) -> None:
    path.write_bytes(b"not a database, and long enough to be looked at" * 50)
    with closing(sqlite3.connect(path)) as connection, pytest.raises(StoreFailed) as caught, explained(str(path)):
        connection.execute("select * from sqlite_master")
    assert f"the store {path} can't be used" in caught.value.message
    assert "is not an SQLite database: name another file" in caught.value.message
    assert isinstance(caught.value.__cause__, sqlite3.DatabaseError)


def test_a_full_disk_is_called_one(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("create table rows (filling)")
        connection.execute("pragma max_page_count = 3")
        with pytest.raises(StoreFailed, match="its disk is full: free some space"), explained("x.db"):
            connection.execute("insert into rows values (zeroblob(100000))")


def test_a_mistake_in_our_own_sql_stays_what_it_is() -> None:
    with (
        closing(sqlite3.connect(":memory:")) as connection,
        pytest.raises(sqlite3.OperationalError, match="no such table"),
        explained("x.db"),
    ):
        connection.execute("select * from nowhere")
    closed = sqlite3.ProgrammingError("closed")
    assert explain(closed, "x.db") is closed
    other = KeyError("x")
    assert explain(other, "x.db") is other


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(errno.ENOENT, "gone"), "there is no folder /a: make it"),
        (NotADirectoryError(errno.ENOTDIR, "x"), "/a is not a folder"),
        (IsADirectoryError(errno.EISDIR, "x"), "it is a folder: name a file in it"),
        (PermissionError(errno.EACCES, "Permission denied"), "the server's user has to own it"),
        (OSError(errno.ENOSPC, "full"), "its disk is full"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "Read-only file system: mend that"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_fault_of_the_place_says_what_helps(error: OSError, said: str) -> None:
    with (
        pytest.raises(UsageError, match=r"the store /a/b\.db can't be used") as caught,
        place_explained(Path("/a/b.db")),
    ):
        raise error
    assert said in caught.value.message
