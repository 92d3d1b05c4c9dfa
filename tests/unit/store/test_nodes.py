from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from llmgw.core.node import NodeId
from llmgw.store import open_store


async def test_a_node_that_was_seen_is_known_after_a_restart(path: Path) -> None:
    async with open_store(str(path)) as store:
        assert await store.nodes.list() == ()
        for name in ("node02", "node01", "node02"):
            await store.nodes.see(NodeId(name), 1.0)
    async with open_store(str(path)) as store:
        assert await store.nodes.list() == ("node01", "node02")


async def test_a_forgotten_node_is_not_known_any_more(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.nodes.see(NodeId("node01"), 1.0)
        assert await store.nodes.forget(NodeId("node01")) is True
        assert await store.nodes.forget(NodeId("node01")) is False
        assert await store.nodes.list() == ()


async def test_the_times_are_of_the_first_and_the_last_look(path: Path) -> None:
    async with open_store(str(path)) as store:
        for now in (2.0, 5.0, 3.0):
            await store.nodes.see(NodeId("node01"), now)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("select first_seen, last_seen from nodes").fetchall() == [(2.0, 5.0)]
