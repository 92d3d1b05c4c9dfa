"""What nodes are told of weights, on a real fleet whose clock jumps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw.core.events import (
    CatalogChanged,
    Event,
    NodeLost,
    NodeRegistered,
    NodeReported,
    NodeSilent,
    Wakeup,
    WeightsReported,
)
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model
from llmgw.core.node import Node, NodeId
from llmgw.core.weights import RELAY, Cached, Collect, Collected, Fetch, NodeWeights, Phase, Pull, WeightsOrder, key_of
from llmgw.counters import Counters
from llmgw.server.scheduler import Scheduler
from llmgw.server.weights import ANSWER_SECONDS, COLLECT_SECONDS, MOST_TOLD, Weights

SOURCE = "hf:org/repo/a.gguf"
N1, N2, N3 = NodeId("n1"), NodeId("n2"), NodeId("n3")
HAS = NodeWeights(seed="10.0.0.1:1", cached=(Cached(source=SOURCE, commit="c1", size_bytes=5, fetched_at=1.0),))
FETCHES = NodeWeights(seed="10.0.0.2:1", fetches=(Fetch(source=SOURCE, phase=Phase.FETCHING, commit="c1"),))
ONE = HAS.cached


def find(free: dict[NodeId, Any]) -> Callable[[], Awaitable[dict[NodeId, Any]]]:
    """What nobody wants any more."""

    async def answer() -> dict[NodeId, Any]:
        return free

    return answer


@dataclass
class Bench:
    weights: Weights
    scheduler: Scheduler
    node: Node
    told: dict[NodeId, list[WeightsOrder]] = field(default_factory=dict)

    def register(self, name: NodeId) -> Callable[[], None]:
        self.weights.heed(NodeRegistered(node=replace(self.node, id=name)))
        return self.weights.follow(name, self.told.setdefault(name, []).append)

    async def hear(self, *events: Event) -> None:
        for event in events:
            self.weights.heed(event)
        await self.settle()

    async def settle(self) -> None:
        """What follows has been told: the clock jumps over the pause before it."""
        await trio.sleep(5.0)

    def last(self, name: NodeId) -> WeightsOrder:
        return self.told[name][-1]

    def members(self, name: NodeId) -> list[list[str]]:
        return [[member.node for member in swarm.members] for swarm in self.last(name).swarms]

    def texts(self) -> list[str]:
        return [each.text for each in self.scheduler.chronicle.since(0).happened]


@pytest.fixture
def serving(node: Node, a_model: Callable[..., Model]) -> Callable[..., Any]:
    @asynccontextmanager
    async def begin(**facts: Any) -> AsyncIterator[Bench]:
        scheduler = Scheduler(Fleet())
        async with trio.open_nursery() as nursery:
            await nursery.start(scheduler.serve)
            await scheduler.settle(CatalogChanged(models=(replace(a_model(), source=SOURCE),)))
            weights = Weights(scheduler, counters=Counters(), wall=lambda: 1_700_000_000.9, **facts)
            await nursery.start(weights.serve)
            yield Bench(weights, scheduler, node)
            nursery.cancel_scope.cancel()

    return begin


async def test_nodes_are_told_of_each_other_when_one_fetches(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        bench.register(N1), bench.register(N2)
        assert bench.told == {N1: [WeightsOrder()], N2: [WeightsOrder()]}
        await bench.hear(WeightsReported(node=N1, weights=HAS), WeightsReported(node=N2, weights=FETCHES))
        assert bench.members(N1) == bench.members(N2) == [["n1", "n2"]]
        await bench.hear(WeightsReported(node=N2, weights=replace(HAS, seed=None)))
        assert bench.last(N1) == bench.last(N2) == WeightsOrder()
        assert bench.weights.known == {N1: HAS, N2: replace(HAS, seed=None)}


async def test_a_node_is_told_at_once_when_it_is_back_and_nothing_twice(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        leave = bench.register(N1)
        await bench.hear(WeightsReported(node=N1, weights=FETCHES), Wakeup())
        told = len(bench.told[N1])
        await bench.hear(NodeReported(node=replace(bench.node, id=N1)), WeightsReported(node=N1, weights=FETCHES))
        assert len(bench.told[N1]) == told
        leave()
        assert not bench.weights.takes_orders(N1)
        bench.register(N1)
        assert bench.told[N1][-2] == bench.told[N1][-1] != WeightsOrder()


async def test_one_that_is_lost_is_no_member_and_one_whose_link_blinks_stays_one(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        leave, _ = bench.register(N1), bench.register(N2)
        await bench.hear(WeightsReported(node=N1, weights=HAS), WeightsReported(node=N2, weights=FETCHES))
        told = len(bench.told[N2])
        leave()
        await bench.hear(NodeSilent(node=N1))
        bench.register(N1)
        await bench.hear(WeightsReported(node=N1, weights=HAS))
        assert len(bench.told[N2]) == told
        await bench.hear(NodeSilent(node=N1), NodeLost(node=N1))
        assert bench.members(N2) == [["n2"]]
        assert bench.weights.known[N1] == HAS
        bench.weights.forget(N1)
        assert N1 not in bench.weights.known


@pytest.mark.parametrize("revoked", [N1, N2])
async def test_one_that_is_revoked_is_named_to_nobody_at_once_until_it_registers_again(
    serving: Callable[..., Any], autojump_clock: MockClock, revoked: NodeId
) -> None:
    async with serving() as bench:
        for name in (N1, N2, N3):
            bench.register(name)
        await bench.hear(
            WeightsReported(node=N1, weights=HAS),
            WeightsReported(node=N2, weights=FETCHES),
            WeightsReported(node=N3, weights=FETCHES),
        )
        assert bench.members(N3) == [["n1", "n2", "n3"]]
        bench.weights.refuse(revoked)
        await bench.settle()
        others = sorted({N1, N2, N3} - {revoked})
        assert [bench.members(name) for name in others] == [[others], [others]]
        assert not bench.weights.may_take(revoked, N3, key_of(SOURCE))
        bench.register(revoked)
        await bench.settle()
        assert bench.members(N3) == [["n1", "n2", "n3"]]


async def test_one_that_is_revoked_while_a_new_server_waits_ends_the_waiting(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        bench.weights.expect(frozenset({N1, N2, N3}), trio.current_time() + 10_000)
        bench.register(N1), bench.register(N2)
        await bench.hear(WeightsReported(node=N1, weights=HAS), WeightsReported(node=N2, weights=FETCHES))
        assert bench.told == {N1: [], N2: []}
        bench.weights.refuse(N1)
        await bench.settle()
        # (else it would go on to be named by what the earlier server said)
        assert bench.members(N2) == [["n2"]]


async def test_a_new_server_does_not_wait_for_one_that_is_revoked(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        bench.weights.expect(frozenset({N1, N2}), trio.current_time() + 10_000)
        bench.register(N2)
        await bench.hear(WeightsReported(node=N2, weights=FETCHES))
        assert bench.told == {N2: []}
        bench.weights.refuse(N1)
        await bench.settle()
        assert bench.members(N2) == [["n2"]]


async def test_one_that_is_revoked_and_dials_again_and_again_ends_no_waiting_for_others(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        bench.weights.expect(frozenset({N1, N2, N3}), trio.current_time() + 10_000)
        bench.register(N2)
        await bench.hear(WeightsReported(node=N2, weights=FETCHES))
        for _ in range(3):
            bench.weights.refuse(N1)
            await bench.settle()
        assert bench.told == {N2: []}


async def test_a_new_server_tells_nobody_of_swarms_before_all_have_said_what_they_have(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        bench.weights.expect(frozenset({N1, N2}), trio.current_time() + 30.0)
        bench.register(N2), bench.register(N3)
        await bench.hear(WeightsReported(node=N2, weights=FETCHES), WeightsReported(node=N3, weights=FETCHES))
        assert bench.told[N2] == []
        # (one that no earlier server has told anything is told what there is)
        assert bench.members(N3) == [["n2", "n3"]]
        bench.register(N1)
        await bench.settle()
        assert bench.told[N1] == bench.told[N2] == []
        await bench.hear(WeightsReported(node=N1, weights=HAS))
        assert bench.members(N1) == bench.members(N2) == [["n1", "n2", "n3"]]
        assert len(bench.told[N2]) == 1


async def test_a_new_server_does_not_wait_for_one_that_is_removed_or_for_ever(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        bench.weights.expect(frozenset({N1, N2, N3}), trio.current_time() + 30.0)
        bench.register(N2)
        await bench.hear(WeightsReported(node=N2, weights=replace(HAS, seed=None)))
        bench.weights.forget(N3)
        await bench.settle()
        assert bench.told[N2] == []
        # What an operator asks for does not wait.
        bench.weights.pull(SOURCE, (N2,))
        await bench.settle()
        assert len(bench.last(N2).pulls) == 1
        bench.register(N2)
        assert bench.told[N2][0] == bench.told[N2][1]
        await trio.sleep(30.0)
        bench.weights.forget(N1)
        bench.register(N1)
        # It may have something of an earlier server, that it is to give up.
        assert bench.told[N1] == [WeightsOrder()]


async def test_one_that_was_kept_waiting_is_told_at_the_end_that_there_is_nothing(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        bench.weights.expect(frozenset({N1, N2}), trio.current_time() + 30.0)
        bench.register(N2)
        await trio.sleep(29.0)
        assert bench.told[N2] == []
        await trio.sleep(2.0)
        assert bench.told[N2] == [WeightsOrder()]


async def test_without_seeding_nobody_has_a_seed(serving: Callable[..., Any], autojump_clock: MockClock) -> None:
    async with serving(seeds=False) as bench:
        bench.register(N2)
        await bench.hear(WeightsReported(node=N2, weights=FETCHES))
        assert [member.seed for member in bench.last(N2).swarms[0].members] == [None]


async def test_a_follower_that_breaks_breaks_nobody_else(
    serving: Callable[..., Any], autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(order: WeightsOrder) -> None:
        raise ValueError("its link is lost")

    async with serving() as bench:
        bench.weights.follow(N1, fail)
        bench.register(N2)
        bench.weights.pull(SOURCE, (N1, N2))
        await bench.settle()
        assert bench.last(N2).pulls
    assert "node n1 can't be told of weights" in caplog.text


async def test_an_order_to_fetch_stands_until_the_node_says_how_it_went(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        bench.register(N1)
        asked = bench.weights.pull("hf:org/repo/other.gguf", (N1,))
        await bench.settle()
        assert bench.last(N1).pulls == (Pull(number=asked.number, source="hf:org/repo/other.gguf"),)
        assert asked.number > 1_700_000_000
        fetch = Fetch(source="hf:org/repo/other.gguf", phase=Phase.FETCHING, commit="c", pull=asked.number)
        await bench.hear(WeightsReported(node=N1, weights=NodeWeights(seed="h:1", fetches=(fetch,))))
        # (of no model, and shared all the same while somebody wants it fetched)
        assert bench.members(N1) == [["n1"]]
        ready = replace(fetch, phase=Phase.READY)
        await bench.hear(WeightsReported(node=N1, weights=NodeWeights(fetches=(ready,))))
        assert bench.last(N1) == WeightsOrder()
        assert bench.weights.find_pull(asked.number) is asked
        assert asked.ended == {N1: ready}


async def test_a_node_that_was_removed_carries_nothing_out(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        bench.register(N1)
        asked = bench.weights.pull(SOURCE, (N1,))
        bench.weights.forget(N1)
        await bench.settle()
        assert asked.ended[N1].cause == "n1 was removed"
        assert bench.told[N1] == [WeightsOrder()]


async def test_what_is_removed_is_told_and_announced(serving: Callable[..., Any], autojump_clock: MockClock) -> None:
    async with serving() as bench:
        bench.register(N1), bench.register(N2)
        found: list[Any] = []

        async def collect() -> None:
            found.append(await bench.weights.collect(find({N1: ONE, N2: ONE})))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect)
            await bench.settle()
            order = bench.last(N1).collect
            assert order is not None
            assert order == Collect(number=order.number, items=((SOURCE, "c1"),))
            # It is not carried out before it was asked whether it stands.
            for mark in ("m1", "m1", "m2"):
                await bench.hear(WeightsReported(node=N1, weights=NodeWeights(asks=mark)))
                stands = bench.last(N1).collect
                assert stands is not None
                assert (stands.items, stands.asked) == (order.items, mark)
                assert 0 < stands.seconds < COLLECT_SECONDS
            assert [each.collect.asked for each in bench.told[N1][1:] if each.collect] == [None, "m1", "m2"]
            await bench.hear(WeightsReported(node=N3, weights=NodeWeights(asks="m3")))
            stale = Collected(number=order.number - 1, freed_bytes=1)
            first, second = (
                Collected(number=order.number, freed_bytes=5_000, kept=("a.gguf: in use",)),
                Collected(number=order.number),
            )
            await bench.hear(
                WeightsReported(node=N1, weights=NodeWeights(collected=stale)),
                WeightsReported(node=N3, weights=NodeWeights(collected=first)),
                WeightsReported(node=N1, weights=NodeWeights(collected=first)),
                WeightsReported(node=N1, weights=NodeWeights(collected=first)),
            )
            assert found == []
            await bench.hear(WeightsReported(node=N2, weights=NodeWeights(collected=second)))
        assert found[0].answers == {N1: first, N2: second}
        await bench.settle()
        assert bench.last(N1) == bench.last(N2) == WeightsOrder()
        assert bench.texts() == [
            "n1 has removed weights that nothing wants: 5kB are free again",
            "n2 has removed weights that nothing wants: 0B are free again",
        ]


async def test_who_does_not_answer_in_time_is_to_remove_nothing_any_more(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench:
        bench.register(N1)
        began = trio.current_time()
        assert (await bench.weights.collect(find({N1: ONE}))).answers == {}
        assert trio.current_time() - began == pytest.approx(COLLECT_SECONDS)
        await bench.settle()
        assert bench.last(N1) == WeightsOrder()
        assert (await bench.weights.collect(find({}))).items == {}


async def test_an_order_stands_for_no_longer_than_it_is_waited_for(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving() as bench, trio.open_nursery() as nursery:
        bench.register(N1)
        ends = trio.current_time() + COLLECT_SECONDS
        nursery.start_soon(bench.weights.collect, find({N1: ONE}))
        await trio.sleep(20)
        asked_at = trio.current_time()
        bench.weights.heed(WeightsReported(node=N1, weights=NodeWeights(asks="m1")))
        await bench.settle()
        stands = bench.last(N1).collect
        assert stands is not None
        assert asked_at + stands.seconds == pytest.approx(ends - ANSWER_SECONDS)
        # In the last moment it is not begun anew.
        await trio.sleep_until(ends - ANSWER_SECONDS / 2)
        bench.weights.heed(WeightsReported(node=N1, weights=NodeWeights(asks="m2")))
        assert await told_until(bench, ends) == ["m1"]


async def told_until(bench: Bench, at: float) -> list[str]:
    """The marks by which it was told until then that an order stands."""
    await trio.sleep_until(at - 0.01)
    return [
        each.collect.asked for each in bench.told[N1] if each.collect is not None and each.collect.asked is not None
    ]


async def test_what_a_model_names_by_the_time_it_is_asked_does_not_stand(
    serving: Callable[..., Any], autojump_clock: MockClock, a_model: Callable[..., Model]
) -> None:
    async with serving() as bench, trio.open_nursery() as nursery:
        bench.register(N1)
        other = replace(ONE[0], source="hf:org/repo/other.gguf")
        nursery.start_soon(bench.weights.collect, find({N1: (*ONE, other)}))
        await bench.settle()
        models = tuple(replace(a_model(), name=name, source=name) for name in (SOURCE, other.source))
        await bench.scheduler.settle(CatalogChanged(models=models))
        await bench.hear(WeightsReported(node=N1, weights=NodeWeights(asks="m1")))
        # (of the one that was named before it is an older commit that goes)
        assert bench.last(N1).collect.items == ((SOURCE, "c1"),)


async def test_one_that_is_lost_is_not_waited_for(serving: Callable[..., Any], autojump_clock: MockClock) -> None:
    async with serving() as bench:
        bench.register(N1), bench.register(N2)
        began, found = trio.current_time(), []

        async def collect() -> None:
            found.append(await bench.weights.collect(find({N1: ONE, N2: ONE})))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect)
            await bench.settle()
            number = bench.last(N1).collect.number
            done = WeightsReported(node=N1, weights=NodeWeights(collected=Collected(number=number)))
            await bench.hear(NodeLost(node=N1), NodeLost(node=N3))
            assert bench.last(N1) == WeightsOrder()
            await bench.hear(WeightsReported(node=N1, weights=NodeWeights(asks="m1")))
            assert bench.last(N1) == WeightsOrder()
            # It is back, and says what it had done.
            await bench.hear(done, NodeLost(node=N1))
            assert found == []
            await bench.hear(NodeLost(node=N2))
        assert (found[0].answers.keys(), found[0].lost, found[0].stands) == ({N1}, {N2}, {})
        assert trio.current_time() - began < COLLECT_SECONDS


async def test_what_runs_by_an_earlier_definition_is_wanted_too(
    serving: Callable[..., Any], autojump_clock: MockClock, a_model: Callable[..., Model]
) -> None:
    async with serving() as bench:
        assert bench.weights.wanted == {SOURCE}
        assert bench.weights.find_model(SOURCE) == "tiny"
        assert bench.weights.find_model("hf:org/repo/none.gguf") is None
        earlier, now = replace(a_model(), source=SOURCE), replace(a_model(), source="hf:org/repo/new.gguf")
        failed = CatalogChanged(models=(now,), proven={now.name: earlier}, failed=frozenset({now.name}))
        await bench.scheduler.settle(failed)
        assert bench.weights.wanted == {SOURCE, "hf:org/repo/new.gguf"}


async def test_a_fault_ends_neither_a_link_nor_the_server(
    serving: Callable[..., Any], autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as bench:
        bench.register(N1)
        await bench.hear(WeightsReported(node=N1, weights=None))  # type: ignore[arg-type]
        assert "WeightsReported could not be taken" in caplog.text
        fleet = bench.scheduler.fleet
        bench.scheduler.fleet = None  # type: ignore[assignment]
        await bench.hear(WeightsReported(node=N1, weights=FETCHES))
        assert "nodes could not be told of weights" in caplog.text
        bench.scheduler.fleet = fleet
        await bench.hear(WeightsReported(node=N1, weights=HAS), WeightsReported(node=N1, weights=FETCHES))
        assert bench.members(N1) == [["n1"]]


async def test_an_order_has_a_bound(serving: Callable[..., Any], autojump_clock: MockClock) -> None:
    async with serving() as bench:
        bench.register(N1)
        for number in range(MOST_TOLD + 1):
            bench.weights.pull(f"hf:org/repo/{number}.gguf", (N1,))
        await bench.settle()
        assert len(bench.last(N1).pulls) == MOST_TOLD


async def test_only_nodes_of_one_swarm_take_from_each_other_through_the_server(
    serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving(relays=True) as bench:
        for name in (N1, N2, N3):
            bench.register(name)
        await bench.hear(WeightsReported(node=N1, weights=HAS), WeightsReported(node=N2, weights=FETCHES))
        (swarm,) = bench.last(N2).swarms
        assert {member.seed for member in swarm.members} == {RELAY}
        key, may_take = key_of(SOURCE), bench.weights.may_take
        assert may_take(N2, N1, key)
        assert not any((may_take(N3, N1, key), may_take(N2, N3, key), may_take(N2, N1, "0" * 32)))
        await bench.hear(WeightsReported(node=N2, weights=HAS))
        assert not may_take(N2, N1, key)
    async with serving() as bench:
        bench.register(N1), bench.register(N2)
        await bench.hear(WeightsReported(node=N1, weights=HAS), WeightsReported(node=N2, weights=FETCHES))
        # they are to reach each other themselves
        assert not bench.weights.may_take(N2, N1, key)
