"""What an operator says of nodes, on a real fleet and a real store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llmgw.admin.management import Refused
from llmgw.admin.views import NodeMarks, RemovedNode
from llmgw.core.events import CatalogChanged, NodeLost, NodeRegistered, NodesExpected, NodeSilent, ShardChanged
from llmgw.core.fleet import Fleet
from llmgw.core.hosts import Host
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import ShardState
from llmgw.core.rolling import PROVING_SECONDS
from llmgw.errors import LlmgwError
from llmgw.server.marking import MAX_LABELS, Marking
from llmgw.server.scheduler import Scheduler
from llmgw.store import Store, StoredNode, open_store
from llmgw.store.lanes import Inline

N1, N2 = NodeId("n1"), NodeId("n2")


@dataclass(frozen=True)
class Link:
    node: NodeId
    connected: bool = True
    peer: str = "10.0.0.2:41000"
    heard_seconds_ago: float = 1.0
    protocol: int = 4
    version: str = "0.1.0"
    trunks: int = 2


class Bench:
    """A server's marks, from its start to its end."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.wall = 1_700_000_000.0
        self.scheduler = Scheduler(Fleet())
        self.links: tuple[Link, ...] = ()
        self.forgotten: list[NodeId] = []
        self.let_go: list[NodeId] = []
        self.marking = Marking(
            self.scheduler,
            store.nodes,
            links=lambda: self.links,
            forgotten=self.forgotten.append,
            let_go=self.let_go.append,
            wall=lambda: self.wall,
        )

    async def tell(self, *events: Any) -> None:
        for event in events:
            await self.scheduler.post(event)
        await wait_all_tasks_blocked()

    async def register(self, *nodes: Node) -> None:
        """Let these nodes come, and be remembered."""
        for node in nodes:
            await self.store.nodes.see(node.id, 1.0)
        await self.tell(*(NodeRegistered(node=node) for node in nodes))

    async def host(self, name: NodeId) -> Host:
        await wait_all_tasks_blocked()
        return next(each.host for each in self.scheduler.fleet.statistics().nodes if each.node.id == name)

    async def members(self) -> list[str]:
        await wait_all_tasks_blocked()
        return [str(each.node.id) for each in self.scheduler.fleet.statistics().nodes]


@pytest.fixture
def start(tmp_path: Path) -> Callable[[], Any]:
    """Starts a server on the same store each time."""

    @asynccontextmanager
    async def starting() -> AsyncIterator[Bench]:
        async with open_store(str(tmp_path / "llmgw.db"), lanes=Inline()) as store, trio.open_nursery() as nursery:
            bench = Bench(store)
            await nursery.start(bench.scheduler.serve)
            await bench.marking.load()
            await bench.tell()
            yield bench
            nursery.cancel_scope.cancel()

    return starting


Start = Callable[[], Any]


async def refusal(act: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        await act
    return caught.value


async def run_one(bench: Bench, model: Any, a_report: Any) -> None:
    """Have a replica of this model run on whatever node it is placed."""
    await bench.tell(CatalogChanged(models=(model,)))
    (shard,) = (await bench.scheduler.desired(N1, 0)).shards
    await bench.tell(ShardChanged(node=N1, report=a_report(shard, ShardState.READY)))


async def test_a_cordoned_node_gets_nothing_new(start: Start, node: Node, a_model: Any) -> None:
    async with start() as bench:
        await bench.register(node)
        assert await bench.marking.cordon("n1", cordoned=True) == NodeMarks(
            node="n1", cordoned=True, labels={}, known=True
        )
        assert (await bench.host(N1)).cordoned
        await bench.tell(CatalogChanged(models=(a_model(),)))
        assert bench.scheduler.fleet.idle()
        await bench.marking.cordon("n1", cordoned=False)
        assert not (await bench.host(N1)).cordoned
        assert not bench.scheduler.fleet.idle(), "what waited for a place finds it at once"


async def test_a_cordon_says_what_stays_and_may_be_said_again(
    start: Start, node: Node, a_model: Any, a_report: Any
) -> None:
    async with start() as bench:
        await bench.register(node)
        await run_one(bench, a_model("m"), a_report)
        first = await bench.marking.cordon("n1", cordoned=True)
        assert (first.running, await bench.marking.cordon("n1", cordoned=True)) == (("rep-m-1",), first)
        assert not bench.scheduler.fleet.idle()


async def test_a_cordon_survives_a_restart(start: Start, node: Node, a_model: Any) -> None:
    """As when a node in maintenance was given replicas by the server's next start."""
    async with start() as bench:
        await bench.register(node)
        await bench.marking.cordon("n1", cordoned=True)
        await bench.marking.label("n1", {"zone": "a"})
    async with start() as bench:
        assert bench.marking.seen() == {N1}
        await bench.tell(NodesExpected(nodes=bench.marking.seen(), until=0.0))
        await bench.tell(CatalogChanged(models=(a_model(),)), NodeRegistered(node=node))
        host = await bench.host(N1)
        assert (host.cordoned, host.labels) == (True, {"zone": "a"})
        assert bench.scheduler.fleet.idle()


async def test_a_node_that_was_never_here_can_be_marked_before_it_comes(start: Start, node: Node) -> None:
    async with start() as bench:
        await bench.register(replace(node, id=NodeId("gpu02")))
        marks = await bench.marking.cordon("gpu01", cordoned=True)
        assert (marks.known, marks.close) == (False, "gpu02")
    async with start() as bench:
        assert bench.marking.seen() == {"gpu02"}, "nobody waits for it"
        await bench.register(replace(node, id=NodeId("gpu01")))
        assert (await bench.host(NodeId("gpu01"))).cordoned


async def test_labels_lie_over_the_nodes_own(start: Start, node: Node) -> None:
    async with start() as bench:
        await bench.register(replace(node, labels={"zone": "own", "rack": "r1", "disk": "ssd"}))
        marks = await bench.marking.label("n1", {"zone": "a", "rack": None, "nothing": None})
        assert (marks.labels, marks.without) == ({"zone": "a"}, ("rack",))
        assert (await bench.host(N1)).labels == {"zone": "a", "disk": "ssd"}
        marks = await bench.marking.label("n1", {"rack": "r2", "zone": None})
        assert (marks.labels, marks.without) == ({"rack": "r2"}, ("zone",))
        assert (await bench.host(N1)).labels == {"rack": "r2", "disk": "ssd"}


async def test_a_label_is_taken_from_a_node_that_is_away_as_well(start: Start, node: Node) -> None:
    async with start() as bench:
        await bench.marking.cordon("n1", cordoned=True)
        marks = await bench.marking.label("n1", {"rack": None})
        assert (marks.without, marks.known) == (("rack",), False)
        await bench.register(replace(node, labels={"rack": "r1"}))
        assert (await bench.host(N1)).labels == {}


async def test_labels_and_a_cordon_leave_each_other_alone(start: Start, node: Node) -> None:
    async with start() as bench:
        await bench.register(node)
        await bench.marking.label("n1", {"zone": "a"})
        assert (await bench.marking.cordon("n1", cordoned=True)).labels == {"zone": "a"}
        assert (await bench.marking.label("n1", {"zone": None})).cordoned
        assert await bench.store.nodes.list_marks() == (StoredNode(node=N1, last_seen=1.0, cordoned=True),)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "no label is given"),
        ({"-x": "a"}, "label '-x' may hold letters, digits and . _ / - only"),
        ({"zone": "a\nb"}, "label 'zone' has a value that is not one printable line"),
        ({"zone": "x" * 1000}, "label 'zone' is longer than"),
        ({f"l{number}": "" for number in range(MAX_LABELS + 1)}, f"{MAX_LABELS} are the most"),
    ],
)
async def test_what_can_be_no_label_is_refused_and_nothing_is_kept(
    start: Start, changes: dict[str, str | None], said: str
) -> None:
    async with start() as bench:
        bench.links = (Link(N1),)
        error = await refusal(bench.marking.label("n1", changes))
        assert (error.status, error.code) == (400, "invalid_label")
        assert said in error.message
        assert await bench.store.nodes.list_marks() == ()


async def test_a_mark_of_a_node_that_nobody_has_heard_of_is_refused(start: Start, node: Node) -> None:
    """A typo was answered with "takes new replicas"."""
    async with start() as bench:
        await bench.register(replace(node, id=NodeId("gpu01")))
        for act in (bench.marking.cordon("gpu1", cordoned=False), bench.marking.label("gpu1", {"zone": "a"})):
            error = await refusal(act)
            assert (error.status, error.code) == (404, "unknown_node")
            assert error.message == "there is no node gpu1; did you mean gpu01?"
        await bench.marking.cordon("gpu1", cordoned=True)
        assert (await bench.marking.label("gpu1", {"zone": "a"})).labels == {"zone": "a"}
        assert not (await bench.marking.cordon("gpu1", cordoned=False)).cordoned
        bench.links = (Link(N1),)
        assert (await bench.marking.label("n1", {"zone": "a"})).labels == {"zone": "a"}, "it is joining"


@pytest.mark.parametrize("name", ["GPU01", "10.0.0.1", "a b", "x" * 300, "-x"])
async def test_a_name_that_no_node_can_have_is_not_kept(start: Start, name: str) -> None:
    async with start() as bench:
        for act in (bench.marking.cordon(name, cordoned=True), bench.marking.label(name, {"a": "b"})):
            error = await refusal(act)
            assert (error.status, error.code, len(error.message) < 400) == (400, "invalid_node", True)
        assert await bench.store.nodes.list_marks() == ()


async def test_what_can_not_be_stored_is_not_told_to_the_fleet(start: Start, node: Node) -> None:
    async with start() as bench:
        await bench.register(node)

        async def fail(*_: Any, **__: Any) -> None:
            await trio.lowlevel.checkpoint()
            raise LlmgwError("the disk is full")

        class Full:
            list_marks = staticmethod(bench.store.nodes.list_marks)
            forget = mark = staticmethod(fail)

        marking = Marking(
            bench.scheduler, Full(), links=tuple, forgotten=bench.forgotten.append, let_go=bench.let_go.append
        )
        with pytest.raises(LlmgwError, match="the disk is full"):
            await marking.cordon("n1", cordoned=True)
        assert not (await bench.host(N1)).cordoned


# Draining


async def test_what_runs_on_a_drained_node_runs_elsewhere_and_then_not_there(
    start: Start, node: Node, a_model: Any, a_report: Any, autojump_clock: MockClock
) -> None:
    async with start() as bench:
        await bench.register(node)
        await run_one(bench, a_model("m"), a_report)
        await bench.register(replace(node, id=N2))
        marks = await bench.marking.drain("n1", deadline_seconds=None)
        assert (marks.cordoned, marks.draining, marks.drain_seconds_left) == (True, True, None)
        assert marks.running == ("rep-m-1",)
        await bench.tell()
        (shard,) = (await bench.scheduler.desired(N2, 0)).shards
        assert (await bench.scheduler.desired(N1, 0)).shards, "it goes when the other one has served for a while"
        await bench.tell(ShardChanged(node=N2, report=a_report(shard, ShardState.READY)))
        await trio.sleep(PROVING_SECONDS + 1)
        assert (await bench.scheduler.desired(N1, 0)).shards == ()


async def test_a_drain_survives_a_restart_with_what_is_left_of_its_time(start: Start, node: Node) -> None:
    async with start() as bench:
        await bench.register(node)
        marks = await bench.marking.drain("n1", deadline_seconds=600.0)
        assert (marks.drain_seconds_left, marks.known) == (600.0, True)
    async with start() as bench:
        bench.wall += 100.0
        await bench.marking.load()
        await bench.tell(NodeRegistered(node=node))
        drains = bench.scheduler.fleet.statistics().draining[N1]
        assert drains.until - trio.current_time() == pytest.approx(500.0, abs=30.0)
        assert (await bench.host(N1)).cordoned


async def test_a_drain_whose_time_is_over_does_not_begin_it_anew(start: Start, node: Node) -> None:
    async with start() as bench:
        await bench.register(node)
        await bench.marking.drain("n1", deadline_seconds=60.0)
    async with start() as bench:
        bench.wall += 3600.0
        await bench.marking.load()
        await bench.tell(NodeRegistered(node=node))
        assert bench.scheduler.fleet.statistics().draining[N1].until <= trio.current_time()


async def test_the_last_word_about_a_drain_holds_and_an_uncordon_ends_it(start: Start, node: Node) -> None:
    async with start() as bench:
        await bench.register(node)
        await bench.marking.drain("n1", deadline_seconds=60.0)
        assert (await bench.marking.label("n1", {"zone": "a"})).drain_seconds_left == 60.0
        assert (await bench.marking.cordon("n1", cordoned=True)).draining
        assert (await bench.marking.drain("n1", deadline_seconds=None)).drain_seconds_left is None
        marks = await bench.marking.cordon("n1", cordoned=False)
        assert (marks.cordoned, marks.draining, marks.labels) == (False, False, {"zone": "a"})
        await bench.tell()
        assert bench.scheduler.fleet.statistics().draining == {}
        assert not (await bench.host(N1)).cordoned
        assert await bench.store.nodes.list_marks() == (StoredNode(node=N1, last_seen=1.0, labels={"zone": "a"}),)


async def test_a_drain_of_a_node_that_nobody_knows_or_for_no_time_at_all_is_refused(start: Start, node: Node) -> None:
    async with start() as bench:
        await bench.register(node)
        error = await refusal(bench.marking.drain("n11", deadline_seconds=None))
        assert (error.code, error.message) == ("unknown_node", "there is no node n11; did you mean n1?")
        for seconds in (-1.0, float("nan"), float("inf"), 1e9):
            error = await refusal(bench.marking.drain("n1", deadline_seconds=seconds))
            assert (error.status, error.code) == (400, "invalid_deadline")
        assert bench.scheduler.fleet.statistics().draining == {}


# Removing


async def test_a_lost_node_is_removed_and_stays_so(start: Start, node: Node, a_model: Any, a_report: Any) -> None:
    async with start() as bench:
        await bench.register(node)
        await run_one(bench, a_model("m"), a_report)
        bench.links = (Link(N1, connected=False),)
        await bench.tell(NodeSilent(node=N1), NodeLost(node=N1))
        await bench.marking.label("n1", {"zone": "a"})
        removed = await bench.marking.remove("n1")
        assert removed == RemovedNode(node="n1", connected=False, running=("rep-m-1",))
        assert await bench.members() == []
        assert (bench.forgotten, bench.let_go, bench.marking.links()) == ([N1], [N1], ())
        assert await bench.store.nodes.list_marks() == ()
        assert (await refusal(bench.marking.remove("n1"))).code == "unknown_node"


async def test_one_that_returns_after_it_was_removed_is_a_new_node(start: Start, node: Node) -> None:
    async with start() as bench:
        await bench.register(node)
        await bench.marking.cordon("n1", cordoned=True)
        assert await bench.marking.remove("n1") == RemovedNode(node="n1", connected=False)
        await bench.register(node)
        bench.links = (Link(N1, connected=False),)
        assert not (await bench.host(N1)).cordoned
        assert bench.marking.links() == bench.links


async def test_a_drained_node_is_removed_though_it_is_connected(
    start: Start, node: Node, a_model: Any, a_report: Any
) -> None:
    async with start() as bench:
        bench.links = (Link(N1),)
        await bench.register(node)
        await run_one(bench, a_model("m"), a_report)
        await bench.marking.cordon("n1", cordoned=True)
        error = await refusal(bench.marking.remove("n1"))
        assert (error.status, error.code) == (409, "node_in_use")
        assert error.message == (
            "n1 is ready and cordoned, with rep-m-1: first `llmgw ctl drain n1`, then wait until rep-m-1 has stopped; "
            "or stop its agent, and wait until the node is lost"
        )
        (shard,) = (await bench.scheduler.desired(N1, 0)).shards
        await bench.tell(CatalogChanged(models=()))
        # there is no model left to remove
        assert (await refusal(bench.marking.remove("n1"))).message == (
            "n1 is ready and cordoned, with rep-m-1: first wait until rep-m-1 has stopped; or stop its agent, and wait "
            "until the node is lost"
        )
        await bench.tell(ShardChanged(node=N1, report=a_report(shard, ShardState.ENDED)))
        assert await bench.marking.remove("n1") == RemovedNode(node="n1", connected=True)
        assert await bench.members() == []
        assert bench.marking.links() == bench.links, "who is connected is shown"
        assert "its agent is connected" in (await refusal(bench.marking.remove("n1"))).message


async def test_a_node_that_is_drained_already_is_only_waited_for(
    start: Start, node: Node, a_model: Any, a_report: Any
) -> None:
    async with start() as bench:
        await bench.register(node)
        # somebody is answered for ever
        bench.scheduler.attend(lambda replica, epoch, number: None)
        await run_one(bench, a_model("m"), a_report)
        await bench.marking.drain("n1", deadline_seconds=0.0)
        await bench.tell()
        assert "first wait until rep-m-1 has stopped" in (await refusal(bench.marking.remove("n1"))).message


async def test_a_drain_that_waits_for_room_is_not_asked_for_again(
    start: Start, node: Node, a_model: Any, a_report: Any
) -> None:
    async with start() as bench:
        await bench.register(node)
        await run_one(bench, a_model("m"), a_report)
        await bench.marking.drain("n1", deadline_seconds=None)
        await bench.tell()
        assert (await refusal(bench.marking.remove("n1"))).message.startswith(
            "n1 is ready and cordoned, with rep-m-1: first make room elsewhere, or give the drain an end: `llmgw ctl "
            "drain n1 --deadline 10m`, then wait until rep-m-1 has stopped; or"
        )
        await bench.marking.drain("n1", deadline_seconds=60.0)
        await bench.tell()
        assert "rep-m-1: first wait until rep-m-1" in (await refusal(bench.marking.remove("n1"))).message


async def test_a_node_at_work_is_refused_with_the_way(start: Start, node: Node, a_model: Any, a_report: Any) -> None:
    async with start() as bench:
        await bench.register(node, replace(node, id=N2))
        await bench.tell(NodeSilent(node=N2))
        assert (await refusal(bench.marking.remove("n2"))).message == (
            "n2 is silent: first `llmgw ctl cordon n2`; or stop its agent, and wait until the node is lost"
        )
        await run_one(bench, a_model("m"), a_report)
        assert (await refusal(bench.marking.remove("n1"))).message.startswith(
            "n1 is ready, with rep-m-1: first `llmgw ctl drain n1`, then wait until rep-m-1 has stopped; or"
        )
        assert await bench.members() == ["n1", "n2"]
        assert await bench.store.nodes.list() == (N1, N2)


async def test_one_that_has_not_come_since_the_start_can_be_removed(start: Start, node: Node) -> None:
    async with start() as bench:
        await bench.register(node)
    async with start() as bench:
        await bench.tell(NodesExpected(nodes=bench.marking.seen(), until=trio.current_time() + 3600.0))
        assert bench.scheduler.fleet.held_up(trio.current_time()) is not None
        bench.links = (Link(N1),)
        assert (await refusal(bench.marking.remove("n1"))).message.startswith("n1 is joining")
        bench.links = ()
        assert await bench.marking.remove("n1") == RemovedNode(node="n1", connected=False)
        await bench.tell()
        assert bench.scheduler.fleet.held_up(trio.current_time()) is None, "nobody waits for it any more"
    async with start() as bench:
        assert bench.marking.seen() == frozenset()


async def test_what_a_removal_does_to_the_brake_is_told(start: Start, node: Node) -> None:
    """To remove one lost node of three ended the brake, and nobody was told."""
    names = [NodeId(f"n{number}") for number in range(1, 6)]
    async with start() as bench:
        await bench.register(*(replace(node, id=name) for name in names))
        for name in names[:4]:
            await bench.tell(NodeSilent(node=name), NodeLost(node=name))
        shrunk = await bench.marking.remove("n1")
        assert shrunk.brake_before is not None
        assert shrunk.brake is not None
        assert (shrunk.brake_before.lost, shrunk.brake_before.nodes) == (4, 5)
        assert (shrunk.brake.lost, shrunk.brake.nodes, shrunk.brake.who) == (3, 4, ("n2", "n3", "n4"))
        ended = await bench.marking.remove("n2")
        assert ended.brake_before is not None
        assert (ended.brake_before.lost, ended.brake) == (3, None)
        after = await bench.marking.remove("n3")
        assert (after.brake_before, after.brake) == (None, None)


async def test_a_mark_of_a_node_that_never_came_is_taken_away_with_it(start: Start) -> None:
    async with start() as bench:
        await bench.marking.cordon("typo", cordoned=True)
        assert not (await bench.marking.remove("typo")).known
        assert await bench.store.nodes.list_marks() == ()


async def test_an_unknown_node_is_told_with_a_name_that_is_near(start: Start, node: Node) -> None:
    async with start() as bench:
        await bench.register(replace(node, id=NodeId("gpu01")))
        error = await refusal(bench.marking.remove("gpu1"))
        assert (error.status, error.code) == (404, "unknown_node")
        assert error.message == "there is no node gpu1; did you mean gpu01?"
