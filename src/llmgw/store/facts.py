"""What launches have shown of the memory and the time that they take, so that a restart does not forget it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from llmgw.core.learned import KEPT, Fact, FactKey
from llmgw.store.database import Database

# (what is replaced is the newest again)
_PUT = "insert or replace into facts values (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_LIST = """
select source, engine, version, flags, gpu_class, load_seconds, gpu_gb, memory_gb from facts order by at, rowid
"""
_REMOVE = "delete from facts where (source, engine, version, flags, gpu_class) = (?, ?, ?, ?, ?)"
_SWEEP = "delete from facts where rowid in (select rowid from facts order by at desc, rowid desc limit -1 offset ?)"


class Facts:
    __slots__ = ("_database", "_most")

    def __init__(self, database: Database, *, most: int = KEPT) -> None:
        """There is no end of definitions that were tried once: ``most`` are kept, and the oldest go."""
        self._database = database
        self._most = most

    async def list(self) -> tuple[Fact, ...]:
        """All of them, the newest last."""
        return tuple(map(_understand, await self._database.read(_read_all)))

    async def put(self, fact: Fact, now: float) -> None:
        """Keep it, in place of what was kept under its key; ``now`` in seconds since 1970."""
        row = (*_name(fact.key), fact.load_seconds, fact.gpu_gb, fact.memory_gb, now)

        def put(connection: sqlite3.Connection) -> None:
            connection.execute(_PUT, row)
            connection.execute(_SWEEP, (self._most,))

        await self._database.write(put)

    async def remove(self, keys: Iterable[FactKey]) -> None:
        """Forget what is kept under these, all of it or nothing."""
        rows = [_name(key) for key in keys]
        await self._database.write(lambda connection: connection.executemany(_REMOVE, rows))


_Row = tuple[str, str, str, str, str, float | None, float | None, float | None]


def _name(key: FactKey) -> tuple[str, str, str, str, str]:
    return key.source, key.engine, key.version, key.flags, key.gpu_class


def _read_all(connection: sqlite3.Connection) -> list[_Row]:
    return connection.execute(_LIST).fetchall()


def _understand(row: _Row) -> Fact:
    source, engine, version, flags, gpu_class, load_seconds, gpu_gb, memory_gb = row
    key = FactKey(source=source, engine=engine, version=version, flags=flags, gpu_class=gpu_class)
    return Fact(key=key, load_seconds=load_seconds, gpu_gb=gpu_gb, memory_gb=memory_gb)
