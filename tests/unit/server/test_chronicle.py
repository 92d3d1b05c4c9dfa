"""The last happenings, by number."""

from __future__ import annotations

import trio
import trio.testing

from llmgw.core.effects import Announce, Happening
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.server.chronicle import KEPT, LONGEST_LINE, LONGEST_TEXT, MOST_LINES, Chronicle, Excerpt

M, N = ModelName("m"), NodeId("n1")


def numbers(excerpt: Excerpt) -> list[int]:
    return [each.number for each in excerpt.happened]


def test_each_has_its_number_and_its_time() -> None:
    chronicle = Chronicle(wall=lambda: 1_700_000_000.5)
    assert chronicle.since(0) == Excerpt(happened=(), last=0, missed=0)
    chronicle.add(Announce(model=M, node=N, text="it runs", lines=("a", "b"), warning=True, what=Happening.READY))
    chronicle.note("reloaded", "server.yaml was read again")
    first, second = chronicle.since(0).happened
    assert (first.number, first.at, first.what, first.text) == (1, 1_700_000_000.5, "ready", "it runs")
    assert (first.model, first.node, first.lines, first.warning) == (M, N, ("a", "b"), True)
    assert (second.number, second.what, second.model, second.node) == (2, "reloaded", None, None)
    assert type(first.what) is str


def test_who_was_away_is_told_how_much_is_no_longer_kept() -> None:
    chronicle = Chronicle()
    for number in range(KEPT + 5):
        chronicle.note("node", f"text {number}")
    assert numbers(chronicle.since(KEPT + 3)) == [KEPT + 4, KEPT + 5]
    everything = chronicle.since(0)
    assert (numbers(everything)[0], len(everything.happened), everything.missed) == (6, KEPT, 5)
    assert (everything.happened[0].text, everything.last) == ("text 5", KEPT + 5)
    assert chronicle.since(2).missed == 3
    assert chronicle.since(5).missed == 0
    assert numbers(chronicle.since(5))[0] == 6
    assert chronicle.since(KEPT + 5) == Excerpt(happened=(), last=KEPT + 5, missed=0)


def test_a_number_of_an_earlier_server_is_answered_with_all() -> None:
    chronicle = Chronicle()
    chronicle.note("node", "x")
    chronicle.note("node", "y")
    assert numbers(chronicle.since(700)) == [1, 2]
    assert numbers(chronicle.since(-1)) == [1, 2]


def test_one_model_or_one_node_can_be_followed() -> None:
    chronicle = Chronicle()
    chronicle.note("ready", "a", model=M, node=N)
    chronicle.note("ready", "b", model=ModelName("other"), node=N)
    chronicle.note("ready", "c", model=M)
    assert numbers(chronicle.since(0, model=M)) == [1, 3]
    assert numbers(chronicle.since(0, node=N)) == [1, 2]
    assert numbers(chronicle.since(0, model=M, node=N)) == [1]
    # what comes next is asked for after the last of all
    assert chronicle.since(0, node=N).last == 3


def test_no_words_fill_the_memory() -> None:
    chronicle = Chronicle()
    chronicle.note("failed", "x" * 10_000, lines=(*["y" * 10_000] * MOST_LINES, "the last"))
    (found,) = chronicle.since(0).happened
    assert len(found.text) == LONGEST_TEXT
    assert len(found.lines) == MOST_LINES
    assert len(found.lines[0]) == LONGEST_LINE
    assert found.lines[-1] == "the last"


async def test_who_waits_is_told_of_the_next(nursery: trio.Nursery) -> None:
    chronicle = Chronicle()
    came: list[int] = []

    async def follow(number: int) -> None:
        await chronicle.wait(number)
        came.append(chronicle.last)

    nursery.start_soon(follow, 0)
    await trio.testing.wait_all_tasks_blocked()
    assert came == []
    chronicle.note("node", "x")
    await trio.testing.wait_all_tasks_blocked()
    assert came == [1]
    with trio.fail_after(10):
        await chronicle.wait(0)
        # of an earlier server: it is to look now
        await chronicle.wait(700)
    nursery.start_soon(follow, 1)
    await trio.testing.wait_all_tasks_blocked()
    assert came == [1]
    chronicle.note("node", "y")
    await trio.testing.wait_all_tasks_blocked()
    assert came == [1, 2]
