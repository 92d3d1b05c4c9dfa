"""The models that an operator has stopped, until they are loaded again."""

from __future__ import annotations

import sqlite3

from llmgw.core.model import ModelName
from llmgw.store.database import Database


class Holds:
    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self) -> dict[ModelName, float]:
        """Since when (in seconds since 1970) each of them is held, whether or not there is such a model now."""
        return dict(await self._database.read(_read_all))

    async def add(self, name: ModelName, now: float) -> bool:
        """Whether it was not held before; what was keeps its time."""
        row = (name, now)
        return await self._database.write(lambda connection: _add(connection, row))

    async def remove(self, name: ModelName) -> bool:
        """Whether it was held."""
        return await self._database.write(lambda connection: _remove(connection, name))


def _read_all(connection: sqlite3.Connection) -> list[tuple[ModelName, float]]:
    return connection.execute("select name, since from holds order by name").fetchall()


def _add(connection: sqlite3.Connection, row: tuple[str, float]) -> bool:
    return connection.execute("insert or ignore into holds values (?, ?)", row).rowcount > 0


def _remove(connection: sqlite3.Connection, name: str) -> bool:
    return connection.execute("delete from holds where name = ?", (name,)).rowcount > 0
