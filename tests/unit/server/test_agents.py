from __future__ import annotations

import pytest
import trio
import trio.testing

from llmgw.core.effects import Desire
from llmgw.core.events import NodeLost, NodeRegistered
from llmgw.core.fleet import Fleet
from llmgw.core.node import Node, NodeId
from llmgw.counters import Counters
from llmgw.errors import LlmgwError
from llmgw.server.agents import FleetAgents
from llmgw.server.scheduler import Scheduler

N1 = NodeId("n1")
NODE = Node(id=N1, cores=4, cpu_flags=frozenset(), memory_gb=16.0, memory_available_gb=8.0)


class Nodes:
    """What was remembered; ``trouble`` instead, when there is one."""

    def __init__(self, trouble: LlmgwError | None = None) -> None:
        self.seen: list[tuple[NodeId, float]] = []
        self.trouble = trouble

    async def see(self, node: NodeId, now: float) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.seen.append((node, now))


async def register(nodes: Nodes) -> Counters:
    """Let a node come and be lost; what was counted."""
    scheduler, counters = Scheduler(Fleet()), Counters()
    agents = FleetAgents(scheduler, nodes, counters=counters, wall=lambda: 17.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(scheduler.serve)
        await agents.report(NodeRegistered(node=NODE))
        told: list[Desire] = []
        agents.follow(N1, told.append)
        await trio.testing.wait_all_tasks_blocked()
        assert [(desire.node, desire.shards) for desire in told] == [(N1, ())]
        await agents.report(NodeLost(node=N1))
        nursery.cancel_scope.cancel()
    return counters


async def test_a_node_that_registers_is_remembered_and_told_its_set() -> None:
    nodes = Nodes()
    counters = await register(nodes)
    assert nodes.seen == [(N1, 17.0)]
    assert counters.by_name["llmgw_node_registrations_total"].values == {("n1",): 1}
    assert counters.by_name["llmgw_nodes_lost_total"].values == {("n1",): 1}


async def test_a_store_in_trouble_keeps_no_node_out(caplog: pytest.LogCaptureFixture) -> None:
    await register(Nodes(LlmgwError("the disk is full")))
    assert "node n1 can't be remembered: the disk is full" in caplog.text
