from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import trio
import trio.testing

from llmgw.core.effects import Desire
from llmgw.core.events import NodeLost, NodeRegistered, NodeReported, NodeSilent, WeightsReported
from llmgw.core.fleet import Fleet
from llmgw.core.node import FabricFound, Node, NodeId
from llmgw.core.weights import NodeWeights, WeightsOrder
from llmgw.counters import Counters
from llmgw.errors import LlmgwError
from llmgw.server.agents import CLOCK_LOOKS, QUEUED_SECONDS, SEEN_SECONDS, FleetAgents
from llmgw.server.scheduler import Scheduler
from llmgw.server.weights import Weights

N1 = NodeId("n1")
NODE = Node(id=N1, cores=4, cpu_flags=frozenset(), memory_gb=16.0, memory_available_gb=8.0)
OUTAGES = "llmgw_fabric_outages_total"


class Nodes:
    """What was remembered; ``trouble`` instead, when there is one."""

    def __init__(self, trouble: LlmgwError | None = None) -> None:
        self.seen: list[tuple[NodeId, float]] = []
        self.trouble = trouble
        self.hangs = False

    async def see(self, node: NodeId, now: float) -> None:
        if self.hangs:
            await trio.sleep_forever()
        if self.trouble is not None:
            raise self.trouble
        self.seen.append((node, now))


@dataclass
class Bench:
    """The agents' side of a fleet, at an hour that the test says."""

    nodes: Nodes = field(default_factory=Nodes)
    counters: Counters = field(default_factory=Counters)
    hour: float = 1_000_000.0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(Fleet())
        self.weights = Weights(self.scheduler, counters=self.counters)
        self.agents = FleetAgents(
            self.scheduler, self.nodes, weights=self.weights, counters=self.counters, wall=lambda: self.hour
        )

    def counted(self, name: str) -> dict[tuple[str, ...], float]:
        return self.counters.by_name[name].values


@asynccontextmanager
async def serving(bench: Bench) -> AsyncIterator[Bench]:
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.scheduler.serve)
        yield bench
        nursery.cancel_scope.cancel()


def on_fabric(down: str | None, name: str = "ib-a") -> Node:
    return replace(NODE, fabrics=(FabricFound(name=name, down=down),))


async def test_a_node_that_registers_is_remembered_and_told_its_set() -> None:
    async with serving(Bench()) as bench:
        await bench.agents.report(NodeRegistered(node=NODE))
        told: list[Desire] = []
        bench.agents.follow(N1, told.append)
        await trio.testing.wait_all_tasks_blocked()
        assert [(desire.node, desire.shards) for desire in told] == [(N1, ())]
        await bench.agents.report(NodeLost(node=N1))
    assert bench.nodes.seen == [(N1, bench.hour)]
    assert bench.counted("llmgw_node_registrations_total") == {("n1",): 1}
    assert bench.counted("llmgw_nodes_lost_total") == {("n1",): 1}


async def test_a_store_in_trouble_keeps_no_node_out(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Bench(nodes=Nodes(LlmgwError("the disk is full")))) as bench:
        await bench.agents.report(NodeRegistered(node=NODE))
    assert "node n1 can't be remembered: the disk is full" in caplog.text


async def test_a_store_that_hangs_costs_no_node_its_lease(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(Bench()) as bench:
        bench.nodes.hangs = True
        before = trio.current_time()
        await bench.agents.report(NodeRegistered(node=NODE))
        assert trio.current_time() - before == 2.0
    assert "node n1 can't be remembered: the store did not answer within 2 s" in caplog.text


async def test_when_a_node_was_last_heard_of_is_kept_now_and_then_and_when_its_link_goes_down() -> None:
    async with serving(Bench()) as bench:
        await bench.agents.report(NodeRegistered(node=NODE))
        began = bench.hour
        for seconds in (5.0, SEEN_SECONDS + 1, SEEN_SECONDS + 6):
            bench.hour = began + seconds
            await bench.agents.report(NodeReported(node=NODE))
        bench.hour = began + SEEN_SECONDS + 20
        await bench.agents.report(NodeSilent(node=N1))
    assert [hour - began for _, hour in bench.nodes.seen] == [0.0, SEEN_SECONDS + 1, SEEN_SECONDS + 20]


async def test_a_removed_node_is_not_remembered_for_its_last_word() -> None:
    async with serving(Bench()) as bench:
        await bench.agents.report(NodeRegistered(node=NODE))
        await bench.agents.report(NodeReported(node=replace(NODE, clock=0.0)))
        bench.agents.forget(N1)
        assert bench.agents.skews == {}
        bench.hour += 2 * SEEN_SECONDS
        await bench.agents.report(NodeReported(node=NODE))
        await bench.agents.report(NodeSilent(node=N1))
    assert len(bench.nodes.seen) == 1


async def test_a_node_with_a_skewed_clock_is_measured_and_its_times_are_not_used(
    mock_clock: trio.testing.MockClock,
) -> None:
    async with serving(Bench()) as bench:
        await bench.agents.report(NodeRegistered(node=replace(NODE, clock=0.0)))
        assert bench.agents.skews == {}, "that may have been looked at before there was a link"
        mock_clock.jump(QUEUED_SECONDS)
        await bench.agents.report(NodeReported(node=replace(NODE, clock=bench.hour + 86_400.0)))
        assert bench.agents.skews == {N1: 86_400.0}
        await bench.agents.report(NodeReported(node=NODE))
        assert bench.agents.skews == {N1: 86_400.0}
    assert bench.nodes.seen == [(N1, bench.hour)]


async def test_words_that_waited_for_the_server_are_no_slow_clock(mock_clock: trio.testing.MockClock) -> None:
    """Right after a restart of the server every node's clock was said to be behind."""
    async with serving(Bench()) as bench:
        await bench.agents.report(NodeRegistered(node=NODE))
        for late in (31.0, 26.0, 21.0, 16.0, 11.0, 6.0, 1.0):
            await bench.agents.report(NodeReported(node=replace(NODE, clock=bench.hour - late)))
            assert bench.agents.skews == {}
        mock_clock.jump(QUEUED_SECONDS)
        await bench.agents.report(NodeReported(node=replace(NODE, clock=bench.hour - 60.0)))
        assert bench.agents.skews == {N1: -60.0}
        await bench.agents.report(NodeRegistered(node=NODE))
        assert bench.agents.skews == {}, "what it was before its link's return is not told for what it is"


async def test_a_word_that_was_long_on_its_way_is_no_slow_clock() -> None:
    async with serving(Bench()) as bench:
        for late in (0.1, 9.0, 5.0, 7.0):
            await bench.agents.report(NodeReported(node=replace(NODE, clock=bench.hour - late)))
            assert bench.agents.skews == {N1: pytest.approx(-0.1)}


async def test_a_clock_that_was_set_is_soon_believed() -> None:
    async with serving(Bench()) as bench:
        for ahead in (60.0, *[0.0] * CLOCK_LOOKS):
            await bench.agents.report(NodeReported(node=replace(NODE, clock=bench.hour + ahead)))
        assert bench.agents.skews == {N1: 0.0}


async def test_a_fabric_that_goes_out_of_service_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "llmgw.server.agents")
    async with serving(Bench()) as bench:
        await bench.agents.report(NodeRegistered(node=on_fabric(None)))
        assert bench.counted(OUTAGES) == {}
        for _ in range(3):
            await bench.agents.report(NodeReported(node=on_fabric("mlx5_0 has no ACTIVE port")))
        # its link is lost and comes back, and the fabric is no better
        await bench.agents.report(NodeRegistered(node=on_fabric("mlx5_0 has no ACTIVE port")))
    assert bench.counted(OUTAGES) == {("n1", "ib-a"): 1}
    assert caplog.messages == ["node n1: fabric ib-a is out of service: mlx5_0 has no ACTIVE port"]


async def test_a_fabric_that_comes_back_is_told_and_goes_down_again_as_another_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", "llmgw.server.agents")
    async with serving(Bench()) as bench:
        for down in ("no port", "no \x1b[2Jadapter", None, "no port"):
            await bench.agents.report(NodeReported(node=on_fabric(down)))
    assert bench.counted(OUTAGES) == {("n1", "ib-a"): 2}
    assert caplog.messages == [
        "node n1: fabric ib-a is out of service: no port",
        "node n1: fabric ib-a is out of service: no \\x1b[2Jadapter",
        "node n1: fabric ib-a is in service again",
        "node n1: fabric ib-a is out of service: no port",
    ]


async def test_what_a_node_says_of_weights_is_known_and_it_is_told_of_them() -> None:
    async with serving(Bench()) as bench:
        await bench.agents.report(NodeRegistered(node=NODE))
        told: list[WeightsOrder] = []
        leave = bench.agents.follow_orders(N1, told.append)
        assert told == [WeightsOrder()]
        weights = NodeWeights(seed="10.0.0.1:7444")
        await bench.agents.report(WeightsReported(node=N1, weights=weights))
        assert bench.weights.known == {N1: weights}
        assert bench.weights.takes_orders(N1)
        leave()
        assert not bench.weights.takes_orders(N1)
        bench.agents.forget(N1)
        assert bench.weights.known == {}


async def test_of_a_node_that_is_revoked_nothing_is_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(Bench()) as bench, trio.open_nursery() as nursery:
        await nursery.start(bench.weights.serve)
        n2 = NodeId("n2")
        bench.weights.expect(frozenset({N1, n2}), trio.current_time() + 10_000)
        await bench.agents.report(NodeRegistered(node=replace(NODE, id=n2)))
        await bench.agents.report(WeightsReported(node=n2, weights=NodeWeights()))
        told: list[WeightsOrder] = []
        bench.agents.follow_orders(n2, told.append)
        await trio.sleep(100)
        assert told == []
        bench.agents.refuse(N1)
        await trio.sleep(100)
        assert told == [WeightsOrder()]
        nursery.cancel_scope.cancel()
