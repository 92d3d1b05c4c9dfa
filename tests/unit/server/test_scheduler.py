"""Events in by one inbox, effects carried out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
import trio.testing

from llmgw.core.effects import Announce, Desire, Drain, Effect, Happening, Learn, Proven, Reverted, WakeAt
from llmgw.core.events import CatalogChanged, Demand, Drained, Event, NodeRegistered, ShardChanged, Wakeup
from llmgw.core.fleet import Fleet
from llmgw.core.learned import Fact, FactKey
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import ReplicaId, ShardState
from llmgw.counters import Counters
from llmgw.server.scheduler import INBOX_EVENTS, Scheduler

M, N, R = ModelName("m"), NodeId("n1"), ReplicaId("rep-m-1")


class Script(Fleet):
    """Answers each event with the next effects of a list, and remembers when it was asked what."""

    def __init__(self, *effects: list[Effect]) -> None:
        super().__init__()
        self.effects = list(effects)
        self.heard: list[tuple[Event, float]] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.heard.append((event, now))
        return self.effects.pop(0) if self.effects else []


async def test_events_are_handled_in_their_order(nursery: trio.Nursery) -> None:
    fleet = Script()
    scheduler = Scheduler(fleet)
    await nursery.start(scheduler.serve)
    for name in ("a", "b", "c"):
        await scheduler.post(Demand(model=ModelName(name)))
    await trio.testing.wait_all_tasks_blocked()
    assert [event for event, _ in fleet.heard] == [Demand(model=ModelName(name)) for name in ("a", "b", "c")]


async def test_the_fleet_is_woken_when_it_asked_for_it(autojump_clock: trio.testing.MockClock) -> None:
    start = trio.current_time()
    fleet = Script([WakeAt(at=start + 30), WakeAt(at=start + 10)], [WakeAt(at=start + 20)])
    scheduler = Scheduler(fleet)
    async with trio.open_nursery() as nursery:
        await nursery.start(scheduler.serve)
        await scheduler.post(Demand(model=M))
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert [(type(event), round(now - start)) for event, now in fleet.heard] == [
        (Demand, 0),
        (Wakeup, 10),
        (Wakeup, 20),
    ]
    assert all(now >= start + due for (_, now), due in zip(fleet.heard, (0, 10, 20), strict=True))


async def test_a_wake_up_that_is_due_does_not_swallow_an_event(autojump_clock: trio.testing.MockClock) -> None:
    start = trio.current_time()
    fleet = Script([WakeAt(at=start)], [WakeAt(at=start)], [WakeAt(at=start)])
    scheduler = Scheduler(fleet)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            await scheduler.post(Demand(model=M))
        await nursery.start(scheduler.serve)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert sum(isinstance(event, Demand) for event, _ in fleet.heard) == 3


async def test_only_the_newest_desire_is_given(nursery: trio.Nursery) -> None:
    first, second, other = (
        Desire(node=N, revision=1, shards=()),
        Desire(node=N, revision=2, shards=()),
        Desire(node=NodeId("n2"), revision=9, shards=()),
    )
    scheduler = Scheduler(Script([first, other], [second]))
    await nursery.start(scheduler.serve)
    got: list[Desire] = []

    async def wait(after: int) -> None:
        got.append(await scheduler.desired(N, after))

    nursery.start_soon(wait, 0)
    nursery.start_soon(wait, 1)
    await trio.testing.wait_all_tasks_blocked()
    assert got == []
    await scheduler.post(Demand(model=M))
    await trio.testing.wait_all_tasks_blocked()
    assert got == [first]
    await scheduler.post(Demand(model=M))
    await trio.testing.wait_all_tasks_blocked()
    assert got == [first, second]
    assert await scheduler.desired(N, 0) == second


async def test_who_follows_is_told_what_is_desired_at_each_change(nursery: trio.Nursery) -> None:
    first, second, third = (Desire(node=N, revision=revision, shards=()) for revision in (1, 2, 3))
    scheduler = Scheduler(Script([first], [second, Desire(node=NodeId("n2"), revision=9, shards=())], [third]))
    await nursery.start(scheduler.serve)
    early: list[Desire] = []
    late: list[Desire] = []
    end_early = scheduler.follow(N, early.append)
    await scheduler.post(Demand(model=M))
    await trio.testing.wait_all_tasks_blocked()
    end_late = scheduler.follow(N, late.append)
    await scheduler.post(Demand(model=M))
    await trio.testing.wait_all_tasks_blocked()
    end_early()
    await scheduler.post(Demand(model=M))
    await trio.testing.wait_all_tasks_blocked()
    end_late()
    assert early == [first, second]
    assert late == [first, second, third]


async def test_one_that_fails_to_be_told_keeps_nobody_else_from_it(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    desire = Desire(node=N, revision=1, shards=())
    fleet = Script([desire])
    scheduler = Scheduler(fleet)
    await nursery.start(scheduler.serve)

    def fail(told: Desire) -> None:
        raise ZeroDivisionError("the test")

    told: list[Desire] = []
    scheduler.follow(N, fail)
    scheduler.follow(N, told.append)
    for _ in range(2):
        await scheduler.post(Demand(model=M))
    await trio.testing.wait_all_tasks_blocked()
    assert told == [desire]
    assert len(fleet.heard) == 2
    assert "node n1 can't be told" in caplog.text


async def test_lines_that_the_log_has_had_stand_among_the_events_all_the_same(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler(Script([Announce(model=M, text="it failed", lines=("kaputt",), again=True, warning=True)]))
    await nursery.start(scheduler.serve)
    await scheduler.settle(Demand(model=M))
    assert [record.message for record in caplog.records] == ["m: it failed"]
    assert scheduler.chronicle.since(0).happened[0].lines == ("kaputt",)


async def test_an_announcement_is_a_line_and_wakes_whoever_waits(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    lines = tuple(f"line {number}" for number in range(20))
    scheduler = Scheduler(
        Script([Announce(model=M, text="it failed", lines=lines, warning=True)], [Announce(model=M, text="it runs")])
    )
    await nursery.start(scheduler.serve)
    caplog.set_level(logging.INFO, "llmgw.scheduler")
    for _ in range(2):
        changed = trio.Event()

        async def wait(changed: trio.Event = changed) -> None:
            await scheduler.wait_changed()
            changed.set()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await scheduler.post(Demand(model=M))
        with trio.fail_after(10):
            await changed.wait()
    failed, runs = caplog.records
    assert (failed.levelname, runs.levelname) == ("WARNING", "INFO")
    assert failed.getMessage().startswith("m: it failed\n    line 12\n")
    assert failed.getMessage().endswith("line 19")
    assert runs.getMessage() == "m: it runs"


async def test_an_event_that_the_fleet_fails_at_ends_nothing(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Fleet):
        def handle(self, event: Event, now: float) -> list[Effect]:
            if isinstance(event, Demand):
                raise KeyError("no such life")
            return [Desire(node=NodeId("n1"), revision=1, shards=())]

    scheduler = Scheduler(Failing())
    await nursery.start(scheduler.serve)
    with trio.fail_after(10):
        await scheduler.settle(Demand(model=M))
        await scheduler.settle(Wakeup())
    assert "Demand could not be taken" in caplog.text
    assert (await scheduler.desired(NodeId("n1"), 0)).revision == 1


async def test_who_settles_an_event_goes_on_when_all_that_it_asked_for_is_done(nursery: trio.Nursery) -> None:
    desire = Desire(node=NodeId("n1"), revision=2, shards=())
    scheduler = Scheduler(Script([Desire(node=NodeId("n1"), revision=1, shards=())], [desire]))
    await nursery.start(scheduler.serve)
    await scheduler.post(Demand(model=M))
    with trio.fail_after(10):
        await scheduler.settle(Demand(model=M))
    told: list[Desire] = []
    scheduler.follow(NodeId("n1"), told.append)
    assert told == [desire]
    # and the next one is taken all the same
    with trio.fail_after(10):
        await scheduler.settle(Demand(model=M))


async def test_who_reports_too_much_waits(autojump_clock: trio.testing.MockClock) -> None:
    scheduler = Scheduler(Script())
    for _ in range(INBOX_EVENTS):
        await scheduler.post(Demand(model=M))
    with trio.move_on_after(5) as patience:
        await scheduler.post(Demand(model=M))
    assert patience.cancelled_caught


async def test_what_is_put_never_waits_and_is_not_lost_while_the_inbox_is_full(nursery: trio.Nursery) -> None:
    fleet = Script()
    scheduler = Scheduler(fleet)
    for _ in range(INBOX_EVENTS):
        scheduler.put(Demand(model=M))
    late = [Demand(model=M, waiting=number) for number in range(1, 2 * INBOX_EVENTS)]
    for event in late:
        scheduler.put(event)
    await nursery.start(scheduler.serve)
    with trio.fail_after(60):
        await scheduler.settle(Wakeup())
        heard = [event for event, _ in fleet.heard if isinstance(event, Demand)]
        assert len(heard) == INBOX_EVENTS + len(late)
        assert [event for event in heard if event.waiting] == late
        # and there is as much room as before
        for _ in range(3 * INBOX_EVENTS):
            await scheduler.settle(Wakeup())
    assert (scheduler._room.value, scheduler._over) == (INBOX_EVENTS, 0)


async def test_what_is_put_comes_before_what_others_wait_to_hand_over_and_after_all_else(
    nursery: trio.Nursery,
) -> None:
    fleet = Script()
    scheduler = Scheduler(fleet)
    for _ in range(INBOX_EVENTS - 1):
        await scheduler.post(Wakeup())
    await scheduler.post(Demand(model=M, waiting=1))
    nursery.start_soon(scheduler.post, Demand(model=M, waiting=4))
    await trio.testing.wait_all_tasks_blocked()
    scheduler.put(Demand(model=M, waiting=2))
    scheduler.put(Demand(model=M, waiting=3))
    await nursery.start(scheduler.serve)
    await trio.testing.wait_all_tasks_blocked()
    assert [event.waiting for event, _ in fleet.heard if isinstance(event, Demand)] == [1, 2, 3, 4]


async def test_what_is_put_in_a_turn_is_taken_after_it(nursery: trio.Nursery) -> None:
    drains: list[Effect] = [Drain(replica=R, epoch=1, number=number) for number in range(3)]
    fleet = Script(drains)
    scheduler = Scheduler(fleet)
    # nobody has said who knows what is in flight: nothing is
    for _ in range(INBOX_EVENTS):
        await scheduler.post(Demand(model=M))
    await nursery.start(scheduler.serve)
    with trio.fail_after(10):
        await scheduler.settle(Wakeup())
        # (they stand behind what was there before them)
        await scheduler.settle(Wakeup())
    drained = [event for event, _ in fleet.heard if isinstance(event, Drained)]
    assert drained == [Drained(replica=R, epoch=1, number=number) for number in range(3)]


async def test_who_attends_is_asked_to_drain(nursery: trio.Nursery) -> None:
    fleet = Script([Drain(replica=R, epoch=2, number=7)])
    scheduler = Scheduler(fleet)
    asked: list[tuple[object, ...]] = []
    scheduler.attend(lambda *drain: asked.append(drain))
    await nursery.start(scheduler.serve)
    with trio.fail_after(10):
        await scheduler.settle(Wakeup())
        await scheduler.settle(Wakeup())
    assert asked == [(R, 2, 7)]
    assert not any(isinstance(event, Drained) for event, _ in fleet.heard)


async def test_what_a_later_server_is_to_know_is_handed_on_in_order(nursery: trio.Nursery, a_model: Any) -> None:
    model = a_model()
    key = FactKey(source="/x", engine="e", version="1", flags="f", gpu_class="")
    effects: list[Effect] = [
        Proven(model=model),
        Learn(fact=Fact(key=key, load_seconds=2.0)),
        Reverted(model=model, by=model, why="it fell over"),
    ]
    scheduler = Scheduler(Script(list(effects), list(effects)))
    kept: list[Effect] = []
    await nursery.start(scheduler.serve)
    with trio.fail_after(10):
        # there may be nobody to keep it
        await scheduler.settle(Wakeup())
        scheduler.entrust(kept.append)
        await scheduler.settle(Wakeup())
    assert kept == effects


async def test_what_is_announced_is_counted_and_stands_in_the_chronicle(nursery: trio.Nursery) -> None:
    counters = Counters()
    announced = Announce(model=M, text="n1 is drained", what=Happening.NODE, node=N, warning=True, lines=("x",))
    scheduler = Scheduler(Script([announced, Announce(model=None, text="y")]), counters=counters)
    await nursery.start(scheduler.serve)
    with trio.fail_after(10):
        await scheduler.settle(Wakeup())
    assert counters.by_name["llmgw_fleet_events_total"].values == {("node",): 1, ("model",): 1}
    first, second = scheduler.chronicle.since(0).happened
    assert (first.what, first.model, first.node, first.text) == ("node", M, N, "n1 is drained")
    assert (first.lines, first.warning) == (("x",), True)
    assert (second.number, second.text) == (2, "y")


async def test_a_real_fleet_comes_to_serve(nursery: trio.Nursery, node: Any, a_model: Any, a_report: Any) -> None:
    scheduler = Scheduler(Fleet())
    await nursery.start(scheduler.serve)
    await scheduler.post(CatalogChanged(models=(a_model(),)))
    await scheduler.post(NodeRegistered(node=node))
    revision = 0
    with trio.fail_after(10):
        while True:
            desire = await scheduler.desired(node.id, revision)
            if desire.shards:
                break
            revision = desire.revision
        await scheduler.post(ShardChanged(node=node.id, report=a_report(desire.shards[0], ShardState.READY)))
        while not scheduler.fleet.ready(ModelName("tiny")):
            await scheduler.wait_changed()
