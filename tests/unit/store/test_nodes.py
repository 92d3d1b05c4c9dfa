from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from llmgw.core.node import NodeId
from llmgw.store import StoredNode, open_store
from llmgw.store.schema import MIGRATIONS, migrate

N1, N2 = NodeId("node01"), NodeId("node02")


async def test_a_node_that_was_seen_is_known_after_a_restart(path: Path) -> None:
    async with open_store(str(path)) as store:
        assert await store.nodes.list() == ()
        for name in (N2, N1, N2):
            await store.nodes.see(name, 1.0)
    async with open_store(str(path)) as store:
        assert await store.nodes.list() == (N1, N2)


async def test_a_forgotten_node_is_not_known_any_more(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.nodes.see(N1, 1.0)
        await store.nodes.mark(N1, cordoned=True, labels={})
        assert await store.nodes.forget(N1) is True
        assert await store.nodes.forget(N1) is False
        assert await store.nodes.list_marks() == ()


async def test_the_times_are_of_the_first_and_the_last_look(path: Path) -> None:
    async with open_store(str(path)) as store:
        for now in (2.0, 5.0, 3.0):
            await store.nodes.see(N1, now)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("select first_seen, last_seen from nodes").fetchall() == [(2.0, 5.0)]


async def test_marks_outlive_a_restart_and_each_later_look_at_the_node(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.nodes.see(N1, 1.0)
        await store.nodes.mark(N1, cordoned=True, labels={"zone": "a", "rack": None})
        await store.nodes.see(N1, 7.0)
    async with open_store(str(path)) as store:
        assert await store.nodes.list_marks() == (
            StoredNode(node=N1, last_seen=7.0, cordoned=True, labels={"zone": "a", "rack": None}),
        )


async def test_a_mark_for_a_node_that_was_never_seen_is_kept_and_the_node_is_not_waited_for(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.nodes.mark(N1, cordoned=True, labels={})
        assert await store.nodes.list() == ()
        assert await store.nodes.list_marks() == (StoredNode(node=N1, cordoned=True),)
        await store.nodes.see(N1, 3.0)
        assert await store.nodes.list_marks() == (StoredNode(node=N1, last_seen=3.0, cordoned=True),)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("select first_seen from nodes").fetchall() == [(3.0,)]


async def test_taking_the_last_mark_off_leaves_a_seen_node_and_no_other(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.nodes.see(N1, 1.0)
        for node in (N1, N2):
            await store.nodes.mark(node, cordoned=True, labels={"a": "b"})
            await store.nodes.mark(node, cordoned=False, labels={})
        assert await store.nodes.list_marks() == (StoredNode(node=N1, last_seen=1.0),)


async def test_a_drain_is_kept_with_its_end_and_goes_with_the_next_mark(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.nodes.see(N1, 1.0)
        await store.nodes.mark(N1, cordoned=True, labels={}, draining=True, drain_until=99.5)
        await store.nodes.mark(N2, cordoned=False, labels={}, draining=True)
        await store.nodes.see(N1, 2.0)
    async with open_store(str(path)) as store:
        assert await store.nodes.list_marks() == (
            StoredNode(node=N1, last_seen=2.0, cordoned=True, draining=True, drain_until=99.5),
            StoredNode(node=N2, draining=True),
        )
        for node in (N1, N2):
            await store.nodes.mark(node, cordoned=False, labels={})
        assert await store.nodes.list_marks() == (StoredNode(node=N1, last_seen=2.0),)


async def test_labels_that_cannot_be_read_are_left_out_and_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_store(str(path)) as store:
        await store.nodes.mark(N1, cordoned=True, labels={"a": "b"})
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("update nodes set labels = '[1]'")
    async with open_store(str(path)) as store:
        assert await store.nodes.list_marks() == (StoredNode(node=N1, cordoned=True),)
    assert "the stored labels of node node01 are left out" in caplog.text


async def test_nodes_of_the_first_tables_are_there_and_can_be_marked(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, str(path), MIGRATIONS[:1])
        connection.execute("insert into nodes values ('node01', 1.0, 2.0), ('node02', 3.0, 4.0)")
    async with open_store(str(path)) as store:
        await store.nodes.mark(N2, cordoned=True, labels={})
        assert await store.nodes.list_marks() == (
            StoredNode(node=N1, last_seen=2.0),
            StoredNode(node=N2, last_seen=4.0, cordoned=True),
        )
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("select first_seen from nodes order by id").fetchall() == [(1.0,), (3.0,)]
