from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from llmgw.admin.views import (
    Concern,
    LeftOut,
    ModelStatus,
    ModelView,
    NodeEngines,
    NodeState,
    NodeView,
    Origin,
    PluginView,
)
from llmgw.core.fleet import FleetStatistics, ModelStatistics, NodeStatistics
from llmgw.core.model import Model, Task
from llmgw.core.node import Disk, EngineFound, Node, NodeId
from llmgw.core.placement import Rejected, Verdict
from llmgw.core.rejection import Reason, Rejection
from llmgw.core.replica import Load, Replica, ReplicaId, ShardId, ShardSpec, ShardState
from llmgw.engines import READY, Command, EngineInfo, Health, Launch, SourceKind, hookimpl
from llmgw.engines.registry import Found, open_engine
from llmgw.errors import Problem
from llmgw.server.looking import (
    count,
    find_concerns,
    lost_nodes,
    view_engines,
    view_model,
    view_nodes,
    view_replicas,
)

NOW = 1000.0
N1 = NodeId("n1")
NOBODY = frozenset[NodeId]()
REJECTED = Rejected(
    rejections=(Rejection(node="n1", profile="p", reason=Reason.NO_GPU, detail="the node reports no GPU"),)
)


@dataclass(frozen=True)
class Link:
    node: NodeId
    connected: bool
    peer: str = "10.0.0.2:41000"
    heard_seconds_ago: float = 2.0499
    protocol: int = 2
    version: str = "0.1.0"
    trunks: int = 2


Replicas = Callable[..., Replica]


@pytest.fixture
def a_replica(a_model: Any) -> Replicas:
    def make(state: ShardState, number: int = 1, **facts: Any) -> Replica:
        model: Model = a_model()
        spec = ShardSpec(
            id=ShardId(f"shd-{number}"),
            replica=ReplicaId(f"rep-{number}"),
            epoch=3,
            node=N1,
            model=model,
            profile=model.profiles[0],
        )
        return Replica(
            id=spec.replica, model=model.name, profile="p", shard=spec, state=state, since=NOW - 61.26, **facts
        )

    return make


def fleet_of(node: Node, *replicas: Replica, lost: bool = False) -> FleetStatistics:
    each = NodeStatistics(node=node, lost=lost, revision=1, booked_gb=1.5, replicas=replicas)
    return FleetStatistics(nodes=(each,), models=())


def judged(
    model: Model, *replicas: Replica, verdict: Verdict | None = None, lost: frozenset[NodeId] = NOBODY
) -> ModelView:
    return view_model(ModelStatistics(model=model, replicas=replicas, verdict=verdict), lost, Origin.STORED, None)


def test_a_node_shows_its_link_and_what_it_has(node: Node, a_replica: Replicas) -> None:
    on_it = (a_replica(ShardState.READY, 1), a_replica(ShardState.ENDED, 2))
    disks = (Disk(path="/", free_gb=1.0, total_gb=2.0),)
    (view,) = view_nodes(fleet_of(replace(node, disks=disks), *on_it), (Link(N1, connected=True),))
    assert view == NodeView(
        node="n1",
        state=NodeState.READY,
        connected=True,
        peer="10.0.0.2:41000",
        heard_seconds_ago=2.0,
        protocol=2,
        version="0.1.0",
        trunks=2,
        cores=4,
        memory_gb=16.0,
        memory_available_gb=12.0,
        memory_booked_gb=1.5,
        disks=disks,
        engines=node.engines,
        replicas=("rep-1",),
    )


def test_what_a_node_did_not_say_is_not_known(node: Node) -> None:
    (view,) = view_nodes(fleet_of(node), ())
    assert (view.disks, view.peer, view.heard_seconds_ago, view.trunks) == (None, None, None, None)
    (joining,) = view_nodes(FleetStatistics(nodes=(), models=()), (Link(N1, connected=True),))
    assert (joining.cores, joining.memory_gb, joining.engines, joining.replicas) == (None, None, None, ())


@pytest.mark.parametrize(
    ("registered", "lost", "link", "state"),
    [
        (True, False, Link(N1, connected=True), NodeState.READY),
        (False, False, Link(N1, connected=True), NodeState.JOINING),
        (True, False, Link(N1, connected=False), NodeState.SILENT),
        (False, False, Link(N1, connected=False), NodeState.SILENT),
        (True, False, None, NodeState.SILENT),
        (True, True, Link(N1, connected=False), NodeState.LOST),
        (True, True, None, NodeState.LOST),
    ],
)
def test_a_nodes_state_comes_of_its_link_and_its_lease(
    node: Node, registered: bool, lost: bool, link: Link | None, state: NodeState
) -> None:
    fleet = fleet_of(node, lost=lost) if registered else FleetStatistics(nodes=(), models=())
    (view,) = view_nodes(fleet, (link,) if link else ())
    assert view.state is state


def test_nodes_stand_by_name(node: Node) -> None:
    links = (Link(NodeId("n3"), connected=True), Link(NodeId("n0"), connected=True))
    assert [view.node for view in view_nodes(fleet_of(node), links)] == ["n0", "n1", "n3"]


def test_a_replica_shows_how_long_and_why(node: Node, a_replica: Replicas) -> None:
    failed = a_replica(ShardState.ENDED, cause="out of memory", remedy="buy some", lines=("a", "b"))
    (view,) = view_replicas(fleet_of(node, failed), NOW)
    assert (view.replica, view.shard, view.epoch, view.engine, view.node) == ("rep-1", "shd-1", 3, "e", "n1")
    assert (view.state, view.seconds_in_state, view.cause, view.lines) == ("ended", 61.3, "out of memory", ("a", "b"))
    assert (view.remedy, view.progress, view.running) == ("buy some", None, None)


def test_a_replica_shows_what_its_engine_counts_and_no_nought_for_what_it_does_not(
    node: Node, a_replica: Replicas
) -> None:
    load = Load(running=2, waiting=0, cache_used=0.25, prompt_tokens=90, cached_tokens=60, steps=7)
    busy, silent = a_replica(ShardState.READY, 1, load=load), a_replica(ShardState.READY, 2)
    told, untold = view_replicas(fleet_of(node, busy, silent), NOW)
    assert (told.running, told.waiting, told.cache_used) == (2, 0, 0.25)
    assert (told.prompt_tokens, told.cached_tokens, told.steps) == (90, 60, 7)
    assert (untold.running, untold.cache_used, untold.prompt_tokens, untold.steps) == (None, None, None, None)


def test_what_runs_on_a_lost_node_is_unreachable(node: Node, a_replica: Replicas) -> None:
    fleet = fleet_of(node, a_replica(ShardState.READY, 1), a_replica(ShardState.ENDED, 2), lost=True)
    assert lost_nodes(fleet) == {"n1"}
    assert [view.state for view in view_replicas(fleet, NOW)] == ["unreachable", "ended"]


def test_a_model_is_ready_when_all_of_it_is(a_model: Any, a_replica: Replicas) -> None:
    view = judged(a_model(least=2, most=2), a_replica(ShardState.READY, 1), a_replica(ShardState.READY, 2))
    assert (view.status, view.serving, view.ready, view.wanted) == (ModelStatus.READY, True, 2, 2)


def test_a_model_that_loads_shows_how_far_it_is(a_model: Any, a_replica: Replicas) -> None:
    view = judged(a_model(), a_replica(ShardState.LOADING, progress="43 %"))
    assert (view.status, view.serving, view.ready, view.wanted) == (ModelStatus.LOADING, False, 0, 1)
    assert view.detail == "43 %"


def test_one_that_serves_with_less_than_it_should_tells_of_the_rest(a_model: Any, a_replica: Replicas) -> None:
    failed = a_replica(ShardState.ENDED, 2, cause="it broke")
    view = judged(a_model(least=2, most=2), a_replica(ShardState.READY, 1), failed)
    assert (view.status, view.serving, view.ready, view.wanted) == (ModelStatus.FAILED, True, 1, 2)
    assert view.detail == "rep-2 ended on n1: it broke"


@pytest.mark.parametrize(
    ("least", "most", "states", "verdict", "status", "detail"),
    [
        (0, 1, [], None, ModelStatus.ON_DEMAND, None),
        (0, 0, [], None, ModelStatus.STOPPED, None),
        (1, 1, [], None, ModelStatus.WAITING, None),
        (1, 1, [], REJECTED, ModelStatus.WAITING, "n1: the node reports no GPU"),
        (0, 1, [], REJECTED, ModelStatus.WAITING, "n1: the node reports no GPU"),
        (1, 1, [], Rejected(), ModelStatus.WAITING, "there is no node to run it"),
        (0, 0, [ShardState.STOPPING], None, ModelStatus.STOPPING, None),
        (1, 1, [ShardState.STOPPING], None, ModelStatus.STOPPING, None),
        (1, 1, [ShardState.STOPPING, ShardState.PLACED], None, ModelStatus.LOADING, None),
    ],
)
def test_a_model_without_a_ready_replica_says_what_it_waits_for(
    a_model: Any,
    a_replica: Replicas,
    *,
    least: int,
    most: int,
    states: list[ShardState],
    verdict: Verdict | None,
    status: ModelStatus,
    detail: str | None,
) -> None:
    replicas = [a_replica(state, number) for number, state in enumerate(states)]
    view = judged(a_model(least=least, most=most), *replicas, verdict=verdict)
    assert (view.status, view.detail, view.serving) == (status, detail, False)


def test_a_model_on_a_lost_node_does_not_serve(a_model: Any, a_replica: Replicas) -> None:
    view = judged(a_model(), a_replica(ShardState.READY), lost=frozenset({N1}))
    assert (view.status, view.serving, view.ready, view.wanted) == (ModelStatus.UNREACHABLE, False, 0, 1)
    assert view.detail == "rep-1 is on n1, which is lost"


def test_only_what_is_wrong_is_a_concern(a_model: Any, a_replica: Replicas) -> None:
    nodes = [
        NodeView(node=name, state=state, connected=False)
        for name, state in (("a", NodeState.READY), ("b", NodeState.SILENT), ("c", NodeState.LOST))
    ]
    models = [
        judged(a_model("m1"), a_replica(ShardState.READY)),
        judged(a_model("m2"), a_replica(ShardState.ENDED, cause="it broke")),
        judged(a_model("m3")),
        judged(a_model("m4", least=0)),
        judged(a_model("m5"), a_replica(ShardState.READY, progress="runs, but does not answer")),
    ]
    assert find_concerns(nodes, models) == [
        Concern(kind="node", name="b", message="silent: its link is down"),
        Concern(kind="node", name="c", message="lost: not heard for longer than its lease"),
        Concern(kind="model", name="m2", message="failed: rep-1 ended on n1: it broke"),
        Concern(kind="model", name="m3", message="waiting"),
        Concern(kind="model", name="m5", message="ready: rep-1 on n1 runs, but does not answer"),
    ]


def test_a_binary_that_can_not_start_is_a_concern_and_one_with_a_fault_is_none() -> None:
    engines = (
        EngineFound(engine="e", program=("/opt/e", "-m", "x"), checked=True, broken="libe.so.1 is missing"),
        EngineFound(engine="f", program=("/opt/f",), checked=True, problems=("--x is old",)),
    )
    node = NodeView(node="a", state=NodeState.READY, connected=True, engines=engines)
    assert find_concerns([node], []) == [
        Concern(kind="node", name="a", message="e can't be used (/opt/e -m x): libe.so.1 is missing")
    ]


class Able:
    """An engine that can nearly all."""

    @hookimpl
    def engine_describe(self) -> EngineInfo:
        return EngineInfo(
            title="Able",
            default_binary="able-server",
            sources=frozenset({SourceKind.FILE}),
            tasks=frozenset({Task.RERANK, Task.CHAT}),
            tensor_parallel=True,
            span_nodes=True,
            projector=True,
            reasoning_parser=True,
        )

    @hookimpl
    def engine_build_command(self, launch: Launch) -> Command:
        return Command(argv=launch.program)

    @hookimpl
    def engine_read_health(self, status: int | None, body: str) -> Health:
        return READY


def test_engines_are_the_plugins_those_left_out_and_what_the_nodes_have(node: Node) -> None:
    plugins = Found(
        engines={"z": open_engine("z", Able()), "able": open_engine("able", Able())},
        origins={"able": "distribution able 2.0"},
        problems=(Problem(key="engine f", message="plugin f can't be imported"),),
    )
    nodes = view_nodes(fleet_of(node), (Link(N1, connected=True), Link(NodeId("n2"), connected=True)))
    view = view_engines(plugins, nodes)
    able, z = view.plugins
    assert able == PluginView(
        name="able",
        title="Able",
        binary="able-server",
        tasks=("chat", "rerank"),
        cpu=False,
        tp=True,
        pp=False,
        nodes=True,
        loras=False,
        mmproj=True,
        tool_parser=False,
        reasoning_parser=True,
        origin="distribution able 2.0",
    )
    assert (z.name, z.origin) == ("z", None)
    assert view.left_out == (LeftOut(plugin="engine f", reason="plugin f can't be imported"),)
    assert view.nodes == (
        NodeEngines(node="n1", state=NodeState.READY, engines=node.engines),
        NodeEngines(node="n2", state=NodeState.JOINING),
    )


def test_states_are_counted() -> None:
    assert count(["ready", "failed", "ready"]) == {"failed": 1, "ready": 2}
