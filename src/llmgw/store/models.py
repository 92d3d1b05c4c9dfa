"""The models that were added while the server ran."""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass

import msgspec

from llmgw.core.model import Model, ModelName
from llmgw.store.database import Database

log = logging.getLogger("llmgw.store")

_PUT = """
insert into models (name, model, text, added_at) values (?, ?, ?, ?)
on conflict (name) do update set model = excluded.model, text = excluded.text, added_at = excluded.added_at
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """``text`` is the definition as it was written; ``added_at`` in seconds since 1970, of its last change."""

    model: Model
    text: str
    added_at: float


class Models:
    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self) -> tuple[StoredModel, ...]:
        """All of them, the oldest first. One that this version can't read is left out, and said in the log."""
        rows = await self._database.read(_read_all)
        return tuple(stored for row in rows if (stored := _understand(*row)) is not None)

    async def put(self, model: Model, text: str, now: float) -> None:
        """Add a model, or replace the one of that name."""
        row = (model.name, msgspec.json.encode(model).decode(), text, now)
        await self._database.write(lambda connection: connection.execute(_PUT, row))

    async def remove(self, name: ModelName) -> bool:
        """Whether there was one. Its history and its hold stay: they are another's of that name."""
        return await self._database.write(lambda connection: _remove(connection, name))

    async def forget(self, name: ModelName) -> bool:
        """Remove it with its history and its hold, or nothing of these; whether there was one."""
        return await self._database.write(lambda connection: _forget(connection, name))


def _read_all(connection: sqlite3.Connection) -> list[tuple[str, str, str, float]]:
    return connection.execute("select name, model, text, added_at from models order by added_at, name").fetchall()


def _remove(connection: sqlite3.Connection, name: ModelName) -> bool:
    return connection.execute("delete from models where name = ?", (name,)).rowcount > 0


def _forget(connection: sqlite3.Connection, name: ModelName) -> bool:
    if not _remove(connection, name):
        return False
    connection.execute("delete from history where name = ?", (name,))
    connection.execute("delete from holds where name = ?", (name,))
    return True


def _understand(name: str, model: str, text: str, added_at: float) -> StoredModel | None:
    try:
        return StoredModel(model=msgspec.json.decode(model, type=Model), text=text, added_at=added_at)
    except msgspec.MsgspecError as error:
        log.error("the stored model %s is left out: %s; add it again, or remove it", name, error)
        return None
