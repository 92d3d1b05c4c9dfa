from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llmgw.core.learned import Fact, FactKey
from llmgw.store import open_store
from llmgw.store.database import open_database
from llmgw.store.facts import Facts
from llmgw.store.lanes import Inline


def fact(flags: str, **figures: float) -> Fact:
    key = FactKey(source="/größe.gguf", engine="e", version="1.2", flags=flags, gpu_class="h100-80g")
    return Fact(key=key, **figures)


async def test_facts_outlive_a_restart_and_what_is_not_known_stays_unknown(path: Path) -> None:
    first, second = fact("a", load_seconds=12.5, gpu_gb=71.25, memory_gb=3.5), fact("b")
    async with open_store(str(path)) as store:
        await store.facts.put(first, 1.0)
        await store.facts.put(second, 2.0)
    async with open_store(str(path)) as store:
        assert await store.facts.list() == (first, second)


async def test_a_newer_figure_takes_the_place_of_the_one_of_its_key_and_is_the_newest(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.facts.put(fact("a", gpu_gb=1.0), 1.0)
        await store.facts.put(fact("b", gpu_gb=2.0), 1.0)
        await store.facts.put(fact("a", gpu_gb=3.0), 1.0)
        assert await store.facts.list() == (fact("b", gpu_gb=2.0), fact("a", gpu_gb=3.0))


async def test_what_is_forgotten_is_gone_and_nothing_else(path: Path) -> None:
    plain, shorter = fact("a", gpu_gb=1.0), fact("b")
    other = replace(plain, key=replace(plain.key, version="2"))
    async with open_store(str(path)) as store:
        for each in (plain, shorter, other):
            await store.facts.put(each, 1.0)
        await store.facts.remove([plain.key, shorter.key, fact("unheard").key])
        await store.facts.remove([])
        assert await store.facts.list() == (other,)


async def test_every_part_of_a_key_tells_one_from_another(path: Path) -> None:
    plain = fact("a")
    parts = ("source", "engine", "version", "flags", "gpu_class")
    others = [replace(plain, key=replace(plain.key, **{part: "other"})) for part in parts]
    async with open_store(str(path)) as store:
        for number, each in enumerate((plain, *others)):
            await store.facts.put(each, float(number))
        assert await store.facts.list() == (plain, *others)


async def test_the_oldest_go_where_there_are_too_many(path: Path) -> None:
    async with open_database(str(path), Inline()) as database:
        facts = Facts(database, most=3)
        for number in range(5):
            await facts.put(fact(str(number)), float(number))
        await facts.put(fact("2"), 9.0)
        await facts.put(fact("5"), 10.0)
        assert [each.key.flags for each in await facts.list()] == ["4", "2", "5"]
