from __future__ import annotations

from pathlib import Path

from llmgw.core.model import ModelName
from llmgw.store import open_store

A, B = ModelName("a"), ModelName("org/b")


async def test_a_hold_outlives_a_restart_and_ends_once(path: Path) -> None:
    async with open_store(str(path)) as store:
        assert await store.holds.list() == {}
        assert await store.holds.add(B, 2.0) is True
        assert await store.holds.add(A, 3.0) is True
    async with open_store(str(path)) as store:
        assert await store.holds.list() == {A: 3.0, B: 2.0}
        assert await store.holds.remove(A) is True
        assert await store.holds.remove(A) is False
        assert await store.holds.list() == {B: 2.0}


async def test_a_hold_that_is_said_again_keeps_its_time(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.holds.add(A, 2.0)
        assert await store.holds.add(A, 5.0) is False
        assert await store.holds.list() == {A: 2.0}
