from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

from llmgw.errors import UsageError
from llmgw.store.schema import APPLICATION_ID, MIGRATIONS, check_ours, migrate


@pytest.fixture
def connection(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as found:
        yield found


def number(connection: sqlite3.Connection) -> int:
    return int(connection.execute("pragma user_version").fetchone()[0])


def tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}


def make_first(tables: Database) -> None:
    tables.create_table("first", {"n": int}, pk="n")


def make_second(tables: Database) -> None:
    tables.create_table("second", {"n": int}, pk="n")


def fail_halfway(tables: Database) -> None:
    make_second(tables)
    tables.execute("insert into nowhere values (1)")


def test_an_empty_file_gets_all_tables(connection: sqlite3.Connection) -> None:
    assert migrate(connection, "x.db") == len(MIGRATIONS)
    assert tables(connection) == {"models", "nodes", "history", "holds", "facts"}
    assert number(connection) == len(MIGRATIONS)
    assert connection.execute("pragma application_id").fetchone() == (APPLICATION_ID,)


def test_each_migration_runs_once(connection: sqlite3.Connection) -> None:
    assert migrate(connection, "x.db", [make_first]) == 1
    assert migrate(connection, "x.db", [make_first]) == 0
    assert migrate(connection, "x.db", [make_first, make_second]) == 1
    assert tables(connection) == {"first", "second"}
    assert number(connection) == 2


def test_a_migration_that_fails_leaves_what_the_one_before_made(connection: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.OperationalError, match="nowhere"):
        migrate(connection, "x.db", [make_first, fail_halfway])
    assert not connection.in_transaction
    assert tables(connection) == {"first"}
    assert number(connection) == 1
    assert migrate(connection, "x.db", [make_first, make_second]) == 1


def test_rows_outlive_a_migration(connection: sqlite3.Connection) -> None:
    migrate(connection, "x.db", [make_first])
    connection.execute("insert into first values (7)")
    migrate(connection, "x.db", [make_first, make_second])
    assert connection.execute("select n from first").fetchall() == [(7,)]


def test_a_newer_database_is_refused_and_left_alone(connection: sqlite3.Connection, path: Path) -> None:
    migrate(connection, "x.db", [make_first, make_second])
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"x\.db was written by a newer llmgw .its tables are version 2, .* knows 1"):
        migrate(connection, "x.db", [make_first])
    assert path.read_bytes() == before


@pytest.mark.parametrize("made", ["create table theirs (n)", "pragma user_version = 1", "pragma application_id = 7"])
def test_another_programs_database_is_refused_and_left_alone(
    made: str, connection: sqlite3.Connection, path: Path
) -> None:
    connection.execute(made)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"x\.db is another program's database"):
        migrate(connection, "x.db")
    assert path.read_bytes() == before


def test_looking_changes_nothing(connection: sqlite3.Connection, path: Path) -> None:
    assert check_ours(connection, "x.db", 1) == 0
    assert path.read_bytes() == b""


def test_a_migration_of_nodes_that_fails_leaves_them_as_they_were(connection: sqlite3.Connection) -> None:
    migrate(connection, "x.db", MIGRATIONS[:1])
    connection.execute("insert into nodes values ('n1', 1.0, 2.0)")
    # somebody's own table is in the way
    connection.execute("create table seen_nodes (n)")
    with pytest.raises(sqlite3.OperationalError, match="seen_nodes"):
        migrate(connection, "x.db")
    assert number(connection) == 1
    assert connection.execute("select * from nodes").fetchall() == [("n1", 1.0, 2.0)]


def test_what_the_second_tables_hold_is_there_in_the_third(connection: sqlite3.Connection) -> None:
    migrate(connection, "x.db", MIGRATIONS[:2])
    connection.execute("insert into models values ('a', '{}', 'name: a', 1.5)")
    connection.execute("insert into nodes values ('n1', 1.0, 2.0, 1, '{\"a\":null}'), ('n2', null, null, 1, '{}')")
    migrate(connection, "x.db", MIGRATIONS[:3])
    assert number(connection) == 3
    assert connection.execute("select * from models").fetchall() == [("a", "{}", "name: a", 1.5)]
    columns = "id, first_seen, last_seen, cordoned, labels, draining, drain_until"
    assert connection.execute(f"select {columns} from nodes order by id").fetchall() == [
        ("n1", 1.0, 2.0, 1, '{"a":null}', 0, None),
        ("n2", None, None, 1, "{}", 0, None),
    ]
