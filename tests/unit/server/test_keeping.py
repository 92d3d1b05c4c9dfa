"""What is handed to the store: in order, never lost where it matters, and never waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing

from llmgw.core.effects import Learn, Proven, Reverted
from llmgw.core.learned import Fact, FactKey
from llmgw.core.model import Model
from llmgw.errors import LlmgwError
from llmgw.server.keeping import FIRST_PAUSE_SECONDS, KEEP_SECONDS, Keeping


class Shelf:
    """A store that can fail, hang, or have a fault."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.asked = 0
        self.trouble: Exception | None = None
        self.hangs = False

    async def proven(self, model: Model) -> None:
        await self._keep(f"proven {model.name}")

    async def reverted(self, model: Model, by: Model, why: str) -> None:
        await self._keep(f"reverted {model.name} to {by.source}: {why}")

    async def learn(self, fact: Fact) -> None:
        await self._keep(f"learned {fact.key.source}")

    async def _keep(self, text: str) -> None:
        self.asked += 1
        await trio.lowlevel.checkpoint()
        if self.hangs:
            await trio.sleep_forever()
        if self.trouble is not None:
            raise self.trouble
        self.kept.append(text)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def a_fact(source: str = "/x") -> Learn:
    return Learn(fact=Fact(key=FactKey(source=source, engine="e", version="1", flags="f", gpu_class="")))


async def test_all_is_handed_over_in_its_order(
    shelf: Shelf, a_model: Callable[..., Model], nursery: trio.Nursery
) -> None:
    model, keeping = a_model(), Keeping(shelf)
    keeping.keep(Proven(model=model))
    nursery.start_soon(keeping.serve)
    await trio.testing.wait_all_tasks_blocked()
    keeping.keep(a_fact())
    keeping.keep(Reverted(model=model, by=model, why="it fell over"))
    await trio.testing.wait_all_tasks_blocked()
    assert shelf.kept == ["proven tiny", "reverted tiny to /tiny.gguf: it fell over", "learned /x"]
    nursery.cancel_scope.cancel()


async def test_what_became_of_a_definition_is_offered_until_it_is_taken(
    shelf: Shelf,
    a_model: Callable[..., Model],
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, keeping = a_model(), Keeping(shelf)
    shelf.trouble = LlmgwError("the disk is full")
    nursery.start_soon(keeping.serve)
    keeping.keep(a_fact("https://h/lost?sig=x"))
    await trio.testing.wait_all_tasks_blocked()
    keeping.keep(Reverted(model=model, by=model, why="x"))
    keeping.keep(Proven(model=model))
    keeping.keep(a_fact("/later"))
    await trio.sleep(FIRST_PAUSE_SECONDS - 1)
    # the fact, and the first of the others: what follows keeps its place
    assert (shelf.asked, shelf.kept) == (2, [])
    assert (
        "what a launch of https://h/lost has shown is not kept, and it is not tried again: the disk is full"
        in caplog.text
    )
    assert "that the new definition of tiny has failed is not kept, and it is tried again later" in caplog.text
    await trio.sleep(1000)
    assert 5 < shelf.asked < 20
    shelf.trouble = None
    await trio.sleep(1000)
    assert shelf.kept == ["reverted tiny to /tiny.gguf: x", "proven tiny", "learned /later"]
    nursery.cancel_scope.cancel()


async def test_facts_hold_up_nothing_that_became_of_a_definition(
    shelf: Shelf, a_model: Callable[..., Model], nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A thousand of them, 15 s each, were before it."""
    model, keeping = a_model(), Keeping(shelf)
    shelf.hangs = True
    nursery.start_soon(keeping.serve)
    for number in range(100):
        keeping.keep(a_fact(f"/{number}"))
    await trio.sleep(1)
    keeping.keep(Reverted(model=model, by=model, why="x"))
    await trio.sleep(KEEP_SECONDS - 2)
    shelf.hangs = False
    await trio.sleep(2)
    # the one that hung is lost
    assert shelf.kept == ["reverted tiny to /tiny.gguf: x", *(f"learned /{number}" for number in range(1, 100))]
    nursery.cancel_scope.cancel()


async def test_a_store_that_hangs_is_asked_again(
    shelf: Shelf, a_model: Callable[..., Model], nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    keeping = Keeping(shelf)
    shelf.hangs = True
    nursery.start_soon(keeping.serve)
    keeping.keep(Proven(model=a_model()))
    await trio.sleep(KEEP_SECONDS + 1)
    shelf.hangs = False
    await trio.sleep(FIRST_PAUSE_SECONDS)
    assert shelf.kept == ["proven tiny"]
    nursery.cancel_scope.cancel()


async def test_a_fault_of_ours_holds_nothing_up(
    shelf: Shelf, a_model: Callable[..., Model], nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    keeping = Keeping(shelf)
    shelf.trouble = KeyError("the test")
    nursery.start_soon(keeping.serve)
    keeping.keep(Proven(model=a_model()))
    await trio.testing.wait_all_tasks_blocked()
    assert "that tiny has served by its definition is not kept, by a fault of llmgw" in caplog.text
    shelf.trouble = None
    keeping.keep(a_fact())
    await trio.testing.wait_all_tasks_blocked()
    assert shelf.kept == ["learned /x"]
    nursery.cancel_scope.cancel()


async def test_facts_give_way_when_too_much_waits(
    shelf: Shelf, a_model: Callable[..., Model], nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    model, keeping = a_model(), Keeping(shelf, most=3)
    keeping.keep(Proven(model=model))
    keeping.keep(a_fact("/1"))
    keeping.keep(a_fact("/2"))
    keeping.keep(Reverted(model=model, by=model, why="x"))
    keeping.keep(a_fact("/3"))
    keeping.keep(Proven(model=model))
    keeping.keep(a_fact("/4"))
    for source in ("/1", "/2", "/3", "/4"):
        assert f"too much waits for the store: what a launch of {source} has shown is not kept" in caplog.text
    nursery.start_soon(keeping.serve)
    await trio.testing.wait_all_tasks_blocked()
    assert shelf.kept == ["proven tiny", "reverted tiny to /tiny.gguf: x", "proven tiny"]
    nursery.cancel_scope.cancel()


async def test_what_is_left_at_the_end_is_handed_over(
    shelf: Shelf, a_model: Callable[..., Model], autojump_clock: trio.testing.MockClock
) -> None:
    keeping = Keeping(shelf)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeping.serve)
        await trio.testing.wait_all_tasks_blocked()
        keeping.keep(Proven(model=a_model()))
        nursery.cancel_scope.cancel()
    assert shelf.kept == ["proven tiny"]
    shelf.hangs = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeping.serve)
        keeping.keep(Proven(model=a_model()))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    # it has ended all the same
    assert shelf.kept == ["proven tiny"]
