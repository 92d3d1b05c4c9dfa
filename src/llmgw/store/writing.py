"""One transaction for all that waits: each write keeps or loses only itself."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

Act: TypeAlias = Callable[[sqlite3.Connection], Any]


@dataclass(slots=True, eq=False)
class Write:
    """What one caller wants written. Afterwards either ``error`` is set and nothing of it is stored, or all of it is.

    ``act`` may be run a second time, after the first was rolled back.
    """

    act: Act
    value: Any = None
    error: Exception | None = None


def commit_together(connection: sqlite3.Connection, writes: Sequence[Write]) -> None:
    """Run all of them and make them durable with one commit. Raises nothing: each write says how it went."""
    try:
        # left over from one that could not even be rolled back
        _roll_back(connection)
        connection.execute("begin immediate")
    except sqlite3.Error as error:
        for write in writes:
            write.error = error
        return
    try:
        for write in writes:
            _run_one(connection, write)
        connection.execute("commit")
    except Exception as error:
        # A full disk, say, takes the whole transaction down, and one of them was too much.
        with suppress(sqlite3.Error):
            _roll_back(connection)
        if len(writes) == 1:
            writes[0].error = error
        else:
            _commit_apart(connection, writes)


def _commit_apart(connection: sqlite3.Connection, writes: Sequence[Write]) -> None:
    for write in writes:
        write.value = write.error = None
        commit_together(connection, [write])


def _run_one(connection: sqlite3.Connection, write: Write) -> None:
    connection.execute("savepoint one")
    try:
        write.value = write.act(connection)
    except Exception as error:
        if not connection.in_transaction:
            raise
        connection.execute("rollback to one")
        write.error = error
    connection.execute("release one")


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("rollback")
