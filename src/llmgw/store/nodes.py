"""The nodes that were ever seen, so that one that is away after a restart is missed rather than forgotten, and what an
operator has said of each."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from llmgw.core.node import NodeId
from llmgw.store.database import Database

log = logging.getLogger("llmgw.store")

_SEE = """
insert into nodes (id, first_seen, last_seen, cordoned, labels) values (?1, ?2, ?2, 0, '{}')
on conflict (id) do update set
    first_seen = coalesce(first_seen, excluded.first_seen),
    last_seen = max(coalesce(last_seen, 0), excluded.last_seen)
"""
_MARK = """
insert into nodes (id, cordoned, draining, drain_until, labels) values (?, ?, ?, ?, ?)
on conflict (id) do update set
    cordoned = excluded.cordoned,
    draining = excluded.draining,
    drain_until = excluded.drain_until,
    labels = excluded.labels
"""
_LIST = "select id, last_seen, cordoned, draining, drain_until, labels from nodes order by id"
# What says nothing of a node that was never seen is no more than a name.
_SWEEP = "delete from nodes where id = ? and last_seen is null and cordoned = 0 and draining = 0 and labels = '{}'"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNode:
    """A node that was seen (at ``last_seen``, in seconds since 1970, None when it never was) or marked.

    ``labels`` are laid over the node's own; a value of None takes one away. ``drain_until``: when a drain stops what
    has found no room elsewhere, in seconds since 1970; None where it waits for ever.
    """

    node: NodeId
    last_seen: float | None = None
    cordoned: bool = False
    draining: bool = False
    drain_until: float | None = None
    labels: Mapping[str, str | None] = field(default_factory=dict, hash=False)


class Nodes:
    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self) -> tuple[NodeId, ...]:
        """Those that were seen, in the order of their names."""
        return tuple(each.node for each in await self.list_marks() if each.last_seen is not None)

    async def list_marks(self) -> tuple[StoredNode, ...]:
        """Those that were seen or marked, in the order of their names. Labels that this version can't read are left
        out, and said in the log."""
        return tuple(map(_understand, await self._database.read(_read_all)))

    async def see(self, node: NodeId, now: float) -> None:
        """The node is there; ``now`` in seconds since 1970. Its marks stay."""
        await self._database.write(lambda connection: connection.execute(_SEE, (node, now)))

    async def mark(
        self,
        node: NodeId,
        *,
        cordoned: bool,
        labels: Mapping[str, str | None],
        draining: bool = False,
        drain_until: float | None = None,
    ) -> None:
        """Keep this of a node, in place of what was kept before; it need never have been seen."""
        row = (node, int(cordoned), int(draining), drain_until, msgspec.json.encode(labels).decode())
        await self._database.write(lambda connection: _mark(connection, row))

    async def forget(self, node: NodeId) -> bool:
        """Whether it was known; its marks go with it."""
        return await self._database.write(lambda connection: _forget(connection, node))


_Row = tuple[str, float | None, int, int, float | None, str]


def _read_all(connection: sqlite3.Connection) -> list[_Row]:
    return connection.execute(_LIST).fetchall()


def _mark(connection: sqlite3.Connection, row: tuple[str, int, int, float | None, str]) -> None:
    connection.execute(_MARK, row)
    connection.execute(_SWEEP, row[:1])


def _forget(connection: sqlite3.Connection, node: NodeId) -> bool:
    return connection.execute("delete from nodes where id = ?", (node,)).rowcount > 0


def _understand(row: _Row) -> StoredNode:
    node, last_seen, cordoned, draining, drain_until, labels = row
    try:
        read = msgspec.json.decode(labels, type=dict[str, str | None])
    except msgspec.MsgspecError as error:
        log.error("the stored labels of node %s are left out: %s; set them again", node, error)
        read = {}
    return StoredNode(
        node=NodeId(node),
        last_seen=last_seen,
        cordoned=bool(cordoned),
        draining=bool(draining),
        drain_until=drain_until,
        labels=read,
    )
