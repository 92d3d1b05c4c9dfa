from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from llmgw.store.writing import Write, commit_together


@pytest.fixture
def connection(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as found:
        found.execute("create table rows (n integer primary key check (n < 100), filling blob)")
        yield found


def insert(n: int, size: int = 0) -> Callable[[sqlite3.Connection], int]:
    def act(connection: sqlite3.Connection) -> int:
        connection.execute("insert into rows values (?, zeroblob(?))", (n, size))
        return n

    return act


def stored(connection: sqlite3.Connection) -> list[int]:
    return [n for (n,) in connection.execute("select n from rows order by n")]


def test_all_are_stored_with_one_commit_and_answer_their_callers(connection: sqlite3.Connection) -> None:
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    writes = [Write(insert(n)) for n in range(10)]
    commit_together(connection, writes)
    connection.set_trace_callback(None)
    assert [write.value for write in writes] == list(range(10))
    assert [write.error for write in writes] == [None] * 10
    assert stored(connection) == list(range(10))
    assert [line.lower() for line in statements].count("commit") == 1


def test_an_sql_error_reaches_its_own_caller_only(connection: sqlite3.Connection) -> None:
    writes = [Write(insert(n)) for n in (1, 100, 2, 2, 3)]
    commit_together(connection, writes)
    assert [type(write.error) for write in writes] == [
        type(None),
        sqlite3.IntegrityError,
        type(None),
        sqlite3.IntegrityError,
        type(None),
    ]
    assert stored(connection) == [1, 2, 3]


def test_a_write_that_fails_halfway_leaves_no_half(connection: sqlite3.Connection) -> None:
    def act(connection: sqlite3.Connection) -> None:
        insert(1)(connection)
        raise KeyError("after the first row")

    writes = [Write(insert(0)), Write(act), Write(insert(2))]
    commit_together(connection, writes)
    assert isinstance(writes[1].error, KeyError)
    assert stored(connection) == [0, 2]


def test_one_that_is_too_much_for_the_disk_takes_no_other_with_it(connection: sqlite3.Connection) -> None:
    connection.execute("pragma max_page_count = 40")
    writes = [Write(insert(1)), Write(insert(2, 1_000_000)), Write(insert(3))]
    commit_together(connection, writes)
    assert [write.error is None for write in writes] == [True, False, True]
    assert "full" in str(writes[1].error)
    assert stored(connection) == [1, 3]


def test_a_transaction_that_is_torn_down_tears_down_only_the_guilty(connection: sqlite3.Connection) -> None:
    connection.execute(
        "create trigger guard before insert on rows when new.n = 13 begin select raise(rollback, 'unlucky'); end"
    )
    writes = [Write(insert(n)) for n in (1, 13, 2)]
    commit_together(connection, writes)
    assert [write.value for write in writes] == [1, None, 2]
    assert "unlucky" in str(writes[1].error)
    assert stored(connection) == [1, 2]
    alone = Write(insert(13))
    commit_together(connection, [alone])
    assert "unlucky" in str(alone.error)


def test_a_commit_that_fails_is_everybodys_who_was_at_fault(connection: sqlite3.Connection) -> None:
    connection.execute("pragma foreign_keys = on")
    connection.execute("create table parts (n integer references rows deferrable initially deferred)")
    orphan = Write(lambda connection: connection.execute("insert into parts values (77)"))
    writes = [Write(insert(1)), orphan, Write(insert(2))]
    commit_together(connection, writes)
    assert [write.error is None for write in writes] == [True, False, True]
    assert stored(connection) == [1, 2]
    assert connection.execute("select count(*) from parts").fetchone() == (0,)


def test_when_nothing_can_begin_everybody_is_told(connection: sqlite3.Connection, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")
        writes = [Write(insert(n)) for n in range(3)]
        commit_together(connection, writes)
    assert ["locked" in str(write.error) for write in writes] == [True] * 3
    commit_together(connection, again := [Write(insert(7))])
    assert again[0].error is None
    assert stored(connection) == [7]


def test_what_was_left_open_is_rolled_back_first(connection: sqlite3.Connection) -> None:
    connection.execute("begin immediate")
    insert(1)(connection)
    commit_together(connection, [write := Write(insert(2))])
    assert write.error is None
    assert stored(connection) == [2]
