"""The tables, as numbered steps from nothing to what this version knows; a step that was released is never changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llmgw.errors import UsageError

if TYPE_CHECKING:
    from sqlite_utils import Database

# "llmg": by this a database is known to be a store, whatever its name.
APPLICATION_ID = 0x6C6C6D67

Migration = Callable[["Database"], None]


def _stored_models_and_seen_nodes(tables: Database) -> None:
    models = {"name": str, "model": str, "text": str, "added_at": float}
    tables.create_table("models", models, pk="name", not_null=set(models))
    nodes = {"id": str, "first_seen": float, "last_seen": float}
    tables.create_table("nodes", nodes, pk="id", not_null=set(nodes))


def _marks_of_nodes(tables: Database) -> None:
    # Rows are kept for nodes that were never seen as well, and SQLite takes no "not null" off a column.
    tables.execute("alter table nodes rename to seen_nodes")
    nodes = {"id": str, "first_seen": float, "last_seen": float, "cordoned": int, "labels": str}
    tables.create_table("nodes", nodes, pk="id", not_null={"id", "cordoned", "labels"})
    tables.execute("insert into nodes select id, first_seen, last_seen, 0, '{}' from seen_nodes")
    tables.execute("drop table seen_nodes")


def _history_holds_and_facts(tables: Database) -> None:
    definitions = {
        "name": str,
        "number": int,
        "model": str,
        "text": str,
        "origin": str,
        "place": str,
        "note": str,
        "added_at": float,
        "outcome": str,
        "outcome_at": float,
        "why": str,
    }
    may_be_null = {"place", "note", "outcome_at", "why"}
    tables.create_table("history", definitions, pk=("name", "number"), not_null=set(definitions) - may_be_null)
    tables.create_table("holds", {"name": str, "since": float}, pk="name", not_null={"name", "since"})
    keys = ("source", "engine", "version", "flags", "gpu_class")
    figures = {"load_seconds": float, "gpu_gb": float, "memory_gb": float, "at": float}
    tables.create_table("facts", {**dict.fromkeys(keys, str), **figures}, pk=keys, not_null={*keys, "at"})
    tables.execute("alter table nodes add column draining integer not null default 0")
    tables.execute("alter table nodes add column drain_until float")


MIGRATIONS: tuple[Migration, ...] = (_stored_models_and_seen_nodes, _marks_of_nodes, _history_holds_and_facts)


def check_ours(connection: sqlite3.Connection, path: str, known: int) -> int:
    """The number of migrations that the database has seen. Reads only.

    Raises UsageError for another program's database, and for one that a newer llmgw has migrated.
    """
    (application,) = connection.execute("pragma application_id").fetchone()
    (version,) = connection.execute("pragma user_version").fetchone()
    (tables,) = connection.execute("select count(*) from sqlite_master").fetchone()
    if application != APPLICATION_ID and (application or version or tables):
        raise UsageError(f"{path} is another program's database: name another file in auth.store")
    if version > known:
        raise UsageError(
            f"{path} was written by a newer llmgw (its tables are version {version}, this one knows {known}): "
            "install that version again, or put a backup from before it in its place"
        )
    return int(version)


def migrate(connection: sqlite3.Connection, path: str, migrations: Sequence[Migration] = MIGRATIONS) -> int:
    """Bring the tables up to date, each step in a transaction of its own, and say how many steps that took.

    A step that fails leaves the database as the one before made it.
    """
    from sqlite_utils import Database  # noqa: PLC0415 - it takes a while to load, and most starts need no migration

    done = 0
    for version in range(check_ours(connection, path, len(migrations)), len(migrations)):
        connection.execute("begin immediate")
        try:
            migrations[version](Database(connection, execute_plugins=False, recursive_triggers=False))
            connection.execute(f"pragma application_id = {APPLICATION_ID}")
            connection.execute(f"pragma user_version = {version + 1}")
            connection.execute("commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("rollback")
            raise
        done += 1
    return done
