from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.core.model import Model, ModelName, Profile
from llmgw.store import StoredDefinition, open_store
from llmgw.store.database import open_database
from llmgw.store.history import FAILED, PROVEN, History
from llmgw.store.lanes import Inline

TINY, OTHER = ModelName("tiny"), ModelName("other")


def definition(source: str = "/a.gguf", name: ModelName = TINY) -> StoredDefinition:
    model = Model(name=name, source=source, profiles=(Profile(name="p", engine="e", env={"A": "ü"}),))
    return StoredDefinition(number=0, model=model, text=f"source: {source}", origin="stored", added_at=7.0)


def numbers(found: tuple[StoredDefinition, ...]) -> list[int]:
    return [each.number for each in found]


async def test_a_definition_comes_back_as_it_was_kept_with_the_next_number(path: Path) -> None:
    full = replace(
        definition(),
        origin="declared",
        place="server.yaml:7:3",
        note="returned to 3",
        outcome=FAILED,
        outcome_at=9.5,
        why="rep-tiny-1 ended",
    )
    async with open_store(str(path)) as store:
        assert numbers(await store.history.add([definition(), full])) == [1, 2]
    async with open_store(str(path)) as store:
        assert await store.history.list(TINY) == (replace(full, number=2), replace(definition(), number=1))
        assert await store.history.list(OTHER) == ()


async def test_each_model_has_its_own_numbers_and_its_own_newest(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.history.add([definition("/a"), definition("/b"), definition("/c", OTHER)])
        newest = {each.model.name: (each.number, each.model.source) for each in await store.history.newest()}
        assert newest == {TINY: (2, "/b"), OTHER: (1, "/c")}


async def test_what_became_of_one_is_kept_and_can_be_taken_back(path: Path) -> None:
    async with open_store(str(path)) as store:
        await store.history.add([definition("/a"), definition("/b"), definition("/c")])
        await store.history.judge(TINY, 1, PROVEN, 10.0)
        await store.history.judge(TINY, 2, PROVEN, 11.0)
        await store.history.judge(TINY, 3, FAILED, 12.0, "it ended")
        assert [(each.number, each.outcome_at) for each in await store.history.proven()] == [(2, 11.0)]
        last, *_ = await store.history.list(TINY)
        assert (last.outcome, last.outcome_at, last.why) == (FAILED, 12.0, "it ended")
        await store.history.judge(TINY, 3, "", 13.0)
        last, *_ = await store.history.list(TINY)
        assert (last.outcome, last.outcome_at, last.why) == ("", None, None)


async def test_the_oldest_go_and_never_the_one_to_return_to(path: Path) -> None:
    async with open_database(str(path), Inline()) as database:
        history = History(database, most=3)
        await history.add([definition()] * 3)
        await history.judge(TINY, 1, PROVEN, 1.0)
        await history.judge(TINY, 2, PROVEN, 2.0)
        for _ in range(4):
            await history.add([definition()])
        await history.add([definition(name=OTHER)])
        assert numbers(await history.list(TINY)) == [7, 6, 5, 2]
        assert numbers(await history.list(OTHER)) == [1]


async def test_a_definition_that_can_not_be_read_hides_no_other(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_store(str(path)) as store:
        await store.history.add([definition("/a"), definition("/b")])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("update history set model = '{' where number = 2")
    async with open_store(str(path)) as store:
        assert numbers(await store.history.list(TINY)) == [1]
        assert "definition 2 of the model tiny is left out of its history" in caplog.text
        assert numbers(await store.history.add([definition("/c")])) == [3]
