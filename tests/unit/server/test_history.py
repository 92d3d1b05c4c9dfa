"""Which definitions are recorded, with a real store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import trio

from llmgw.admin.views import Outcome
from llmgw.core.model import Model, ModelName
from llmgw.core.replica import ReplicaId, ShardId, ShardSpec
from llmgw.errors import LlmgwError
from llmgw.server.history import Current, Histories, find_entry, view_entries
from llmgw.store import StoredDefinition
from llmgw.store.history import FAILED, PROVEN, History

WHEN = 1_700_000_000.0
TINY = ModelName("tiny")

Write = Callable[..., Current]


class Full:
    """A store whose disk is full for a while."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.is_full = True

    async def add(self, definitions: Iterable[StoredDefinition]) -> tuple[StoredDefinition, ...]:
        await trio.lowlevel.checkpoint()
        if self.is_full:
            raise LlmgwError("its disk is full")
        return await self._history.add(definitions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._history, name)


@pytest.fixture
def write(a_model: Any) -> Write:
    def make(source: str = "/good.gguf", *, text: str | None = None, place: str | None = None, **facts: Any) -> Current:
        model = replace(a_model(), source=source, **facts)
        return Current(model=model, text=text or f"source: {source}", place=place)

    return make


async def begin(store: Any, *currents: Current) -> Histories:
    histories = Histories(store, wall=lambda: WHEN)
    await histories.load()
    await histories.record(currents)
    return histories


async def kept(store: Any) -> list[tuple[int, str, str]]:
    return [(each.number, each.model.source, each.outcome) for each in reversed(await store.list(TINY))]


async def test_what_is_as_it_was_is_recorded_once(a_store: Any, write: Write) -> None:
    for _ in range(2):
        histories = await begin(a_store.history, write())
        await histories.record([write()])
    (entry,) = await a_store.history.list(TINY)
    assert (entry.number, entry.origin, entry.place, entry.added_at) == (1, "stored", None, WHEN)


async def test_another_text_and_another_home_are_recorded_and_another_line_is_not(a_store: Any, write: Write) -> None:
    histories = await begin(a_store.history, write())
    await histories.record([write(text="# a word")])
    await histories.record([write(text="# a word", place="server.yaml:3:5")])
    await histories.record([write(text="# a word", place="server.yaml:9:5")])
    entries = await a_store.history.list(TINY)
    assert [(each.number, each.origin, each.place) for each in entries] == [
        (3, "declared", "server.yaml:3:5"),
        (2, "stored", None),
        (1, "stored", None),
    ]
    newest = histories.newest("tiny")
    assert newest is not None
    assert newest.number == 3


async def test_what_no_engine_notices_needs_no_proof_and_cures_nothing(a_store: Any, write: Write) -> None:
    histories = await begin(a_store.history, write())
    await histories.note_proven(write().model)
    await histories.record([write(aliases=("a",))])
    bad = write("/bad.gguf", aliases=("a",))
    await histories.record([bad])
    await histories.note_failed(bad.model, "no such file")
    await histories.record([write("/bad.gguf", aliases=("b",))])
    assert await kept(a_store.history) == [
        (1, "/good.gguf", PROVEN),
        (2, "/good.gguf", PROVEN),
        (3, "/bad.gguf", FAILED),
        (4, "/bad.gguf", FAILED),
    ]
    assert histories.failure("tiny") == "no such file"
    assert histories.failed() == {"tiny"}
    assert histories.proven() == {"tiny": write(aliases=("a",)).model}


async def test_a_later_server_knows_what_failed_and_what_to_return_to(a_store: Any, write: Write) -> None:
    histories = await begin(a_store.history, write())
    await histories.note_proven(write().model)
    await histories.record([write("/bad.gguf")])
    await histories.note_failed(write("/bad.gguf").model, "no such file")
    later = await begin(a_store.history, write("/bad.gguf"))
    assert (later.failed(), later.proven()) == ({"tiny"}, {"tiny": write().model})
    mended = await begin(a_store.history, write("/better.gguf"))
    assert (mended.failed(), mended.proven()) == (frozenset(), {"tiny": write().model})
    gone = await begin(a_store.history)
    assert (gone.failed(), gone.proven()) == (frozenset(), {})


async def test_a_failure_is_excused_once(a_store: Any, write: Write) -> None:
    histories = await begin(a_store.history, write())
    await histories.note_proven(write().model)
    assert await histories.excuse(TINY) is False
    await histories.record([write("/bad.gguf")])
    await histories.note_failed(write("/bad.gguf").model, "no such file")
    assert await histories.excuse(TINY) is True
    assert await histories.excuse(TINY) is False
    assert histories.failed() == frozenset()
    assert await kept(a_store.history) == [(1, "/good.gguf", PROVEN), (2, "/bad.gguf", "")]


async def test_one_that_failed_and_then_served_is_proven(a_store: Any, write: Write) -> None:
    histories = await begin(a_store.history, write())
    await histories.note_failed(write().model, "no such file")
    assert histories.failure("tiny") is None, "nothing goes on in its place"
    await histories.note_proven(write().model)
    (entry,) = await a_store.history.list(TINY)
    assert (entry.outcome, entry.why) == (PROVEN, None)


async def test_a_store_that_can_not_take_it_is_no_reason_to_stop_and_takes_it_later(
    a_store: Any, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    histories = await begin(a_store.history, write())
    await histories.note_proven(write().model)
    bad = write("/bad.gguf")
    await histories.record([bad])
    await histories.note_failed(bad.model, "no such file")
    full = Full(a_store.history)
    later = await begin(full, write("/better.gguf"))
    assert "the history does not have the newest definitions of tiny yet: its disk is full" in caplog.text
    assert later.failed() == frozenset(), "what failed is not what is written"
    full.is_full = False
    await later.record([write("/better.gguf")])
    assert (await kept(a_store.history))[-1] == (3, "/better.gguf", "")


async def test_an_earlier_one_is_entered_again_with_its_proof_and_a_number_of_its_own(
    a_store: Any, write: Write
) -> None:
    histories = await begin(a_store.history, write(place="server.yaml:1:1"))
    await histories.note_proven(write().model)
    await histories.record([write("/bad.gguf")])
    (first,) = [each for each in await a_store.history.list(TINY) if each.number == 1]
    entry = await histories.enter_again(first, "returned to 1: 2 failed")
    assert (entry.number, entry.outcome, entry.origin, entry.place) == (3, PROVEN, "stored", None)
    await histories.record([write()])
    assert len(await a_store.history.list(TINY)) == 3


async def test_a_model_that_is_forgotten_begins_anew(a_store: Any, write: Write) -> None:
    histories = await begin(a_store.history, write())
    await histories.note_proven(write().model)
    histories.forget(TINY)
    assert histories.newest("tiny") is None
    await histories.record([write("/bad.gguf")])
    assert (await kept(a_store.history))[-1][1:] == ("/bad.gguf", "")
    assert histories.proven() == {}
    assert await histories.note_failed(replace(write().model, name=ModelName("other")), "x") is None


def entry(number: int, model: Model, outcome: str = "") -> StoredDefinition:
    return StoredDefinition(number=number, model=model, text="", origin="stored", added_at=WHEN, outcome=outcome)


def test_the_very_definition_is_found_before_one_that_launches_alike(write: Write) -> None:
    plain, alike = write().model, write(aliases=("a",)).model
    entries = (entry(3, alike), entry(2, plain), entry(1, plain))
    for model, number in ((plain, 2), (alike, 3), (write(aliases=("b",)).model, 3)):
        found = find_entry(entries, model)
        assert found is not None
        assert found.number == number
    assert find_entry(entries, write("/bad.gguf").model) is None


def test_what_serves_is_marked_at_the_definition_that_it_runs_by(write: Write) -> None:
    plain, alike, bad = write().model, write(aliases=("a",)).model, write("/bad.gguf").model

    def spec(model: Model) -> ShardSpec:
        return ShardSpec(
            id=ShardId("s"), replica=ReplicaId("r"), epoch=1, node="n1", model=model, profile=model.profiles[0]
        )

    entries = (entry(3, bad, FAILED), entry(2, alike, PROVEN), entry(1, plain, PROVEN))

    def serving(*models: Model) -> list[int]:
        return [each.number for each in view_entries(entries, map(spec, models)) if each.serving]

    assert serving(plain) == [1]
    assert serving(write(aliases=("b",)).model) == [2]
    assert serving(bad, plain) == [3, 1]
    assert serving(write("/other.gguf").model) == []
    newest, *_ = view_entries(entries, ())
    assert (newest.current, newest.outcome) == (True, Outcome.FAILED)
