"""The nodes that were ever seen, so that one that is away after a restart is missed rather than forgotten."""

from __future__ import annotations

import sqlite3

from llmgw.core.node import NodeId
from llmgw.store.database import Database

_SEE = """
insert into nodes (id, first_seen, last_seen) values (?, ?, ?)
on conflict (id) do update set last_seen = max(last_seen, excluded.last_seen)
"""


class Nodes:
    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self) -> tuple[NodeId, ...]:
        """In the order of their names."""
        rows = await self._database.read(_read_all)
        return tuple(NodeId(node) for (node,) in rows)

    async def see(self, node: NodeId, now: float) -> None:
        """The node is there; ``now`` in seconds since 1970."""
        await self._database.write(lambda connection: connection.execute(_SEE, (node, now, now)))

    async def forget(self, node: NodeId) -> bool:
        """Whether it was known."""
        return await self._database.write(lambda connection: _forget(connection, node))


def _read_all(connection: sqlite3.Connection) -> list[tuple[str]]:
    return connection.execute("select id from nodes order by id").fetchall()


def _forget(connection: sqlite3.Connection, node: NodeId) -> bool:
    return connection.execute("delete from nodes where id = ?", (node,)).rowcount > 0
