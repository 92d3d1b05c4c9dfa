from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.errors import UsageError
from llmgw.store import StoreFailed, open_store
from llmgw.store.lanes import Inline


@pytest.mark.parametrize("inline", [True, False])
async def test_a_store_is_open_in_threads_and_on_the_spot(path: Path, *, inline: bool) -> None:
    async with open_store(str(path), lanes=Inline() if inline else None) as store:
        await store.nodes.see(NodeId("node01"), 1.0)
        await store.models.put(Model(name=ModelName("a"), source="/x"), "name: a", 1.0)
        assert await store.nodes.list() == ("node01",)
        assert len(await store.models.list()) == 1


async def test_an_address_that_is_no_file_is_refused() -> None:
    with pytest.raises(UsageError, match="postgresql:// is no store of this version"):
        async with open_store("postgresql://db/llmgw"):
            raise AssertionError


async def test_what_it_is_and_how_large_can_be_looked_at(path: Path) -> None:
    async with open_store(str(path)) as store:
        assert store.path == str(path)
        before = store.condition.size_bytes
        assert before > 0
        await store.models.put(Model(name=ModelName("a"), source="/x"), "x" * 100_000, 1.0)
        assert store.condition.size_bytes > before + 100_000
        assert store.condition.failing is None


def move(path: Path, name: str) -> Path:
    return path.rename(path.with_name(name))


async def test_why_it_cannot_be_written_is_told_until_it_can(path: Path) -> None:
    async with open_store(str(path)) as store:
        elsewhere = move(path, "elsewhere")
        with pytest.raises(StoreFailed):
            await store.nodes.see(NodeId("n1"), 1.0)
        assert "was removed or replaced" in str(store.condition.failing)
        move(elsewhere, path.name)
        await store.nodes.see(NodeId("n1"), 1.0)
        assert store.condition.failing is None
