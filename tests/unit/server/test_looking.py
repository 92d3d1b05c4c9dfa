from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    ShardView,
    StoreView,
)
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import Model, Task
from llmgw.core.node import EngineFound, FabricFound, Node, NodeId
from llmgw.core.picture import FleetStatistics, ModelStatistics, NodeStatistics
from llmgw.core.placement import Rejected, Verdict, place
from llmgw.core.replica import Load, Replica, ReplicaId, Shard, ShardId, ShardSpec, ShardState
from llmgw.core.rolling import Failed, Rollout
from llmgw.core.weights import Fetch, Phase
from llmgw.engines import READY, Command, EngineInfo, Health, Launch, SourceKind, hookimpl
from llmgw.engines.registry import Found, open_engine
from llmgw.errors import Problem
from llmgw.server.looking import (
    UNSEEN,
    concerns_of_store,
    count,
    find_concerns,
    lost_nodes,
    view_engines,
    view_model,
    view_replicas,
)

NOW = 1000.0
N1, N2 = NodeId("n1"), NodeId("n2")
NOBODY = frozenset[NodeId]()


Replicas = Callable[..., Replica]


@pytest.fixture
def a_replica(a_model: Any) -> Replicas:
    """A replica on these nodes; all its shards are in this state, and those on ``others`` in theirs."""

    def make(
        state: ShardState,
        number: int = 1,
        *,
        nodes: tuple[NodeId, ...] = (N1,),
        epoch: int = 3,
        others: dict[NodeId, ShardState] | None = None,
        load: Load | None = None,
        progress: str | None = None,
        **facts: Any,
    ) -> Replica:
        model: Model = a_model()
        shards = tuple(
            Shard(
                spec=ShardSpec(
                    id=ShardId(f"shd-{number}-{rank}"),
                    replica=ReplicaId(f"rep-{number}"),
                    epoch=epoch,
                    node=node,
                    model=model,
                    profile=model.profiles[0],
                    rank=rank,
                    count=len(nodes),
                    gpus=(f"GPU-{rank}",),
                    fabric="ib-a" if len(nodes) > 1 else None,
                ),
                state=(others or {}).get(node, state),
                since=NOW - 61.26,
                progress=progress,
                load=load or Load(),
            )
            for rank, node in enumerate(nodes)
        )
        return Replica(
            id=shards[0].spec.replica,
            model=model.name,
            profile="p",
            epoch=epoch,
            shards=shards,
            state=state,
            since=NOW - 61.26,
            **facts,
        )

    return make


def fleet_of(node: Node, *replicas: Replica, lost: bool = False) -> FleetStatistics:
    host = Host(node=node, standing=Standing.LOST if lost else Standing.READY, booked_gb=1.5)
    each = NodeStatistics(host=host, lost_at=1.0 if lost else None, revision=1, replicas=replicas)
    return FleetStatistics(nodes=(each,), models=())


def rejected(model: Model, *nodes: Node) -> Rejected:
    """What comes of placing a model where these nodes can't run it."""
    verdict = place(model, [Host(node=node) for node in nodes], {}, NOW)
    assert isinstance(verdict, Rejected)
    return verdict


def judged(
    model: Model, *replicas: Replica, verdict: Verdict | None = None, lost: frozenset[NodeId] = NOBODY
) -> ModelView:
    return view_model(ModelStatistics(model=model, replicas=replicas, verdict=verdict), lost, Origin.STORED, None)


def test_a_replica_shows_how_long_and_why(node: Node, a_replica: Replicas) -> None:
    failed = a_replica(ShardState.ENDED, cause="out of memory", remedy="buy some", lines=("a", "b"))
    (view,) = view_replicas(fleet_of(node, failed), NOW)
    assert (view.replica, view.shard, view.epoch, view.engine, view.node) == ("rep-1", "shd-1-0", 3, "e", "n1")
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


def test_one_of_several_nodes_is_shown_once_with_each_of_its_shards(node: Node, a_replica: Replicas) -> None:
    group = a_replica(ShardState.LOADING, nodes=(N1, N2), others={N2: ShardState.READY})
    hosts = (Host(node=node), Host(node=replace(node, id=N2)))
    both = tuple(NodeStatistics(host=host, lost_at=None, revision=1, replicas=(group,)) for host in hosts)
    (view,) = view_replicas(FleetStatistics(nodes=both, models=()), NOW)
    assert (view.node, view.shard, view.fabric, view.state) == ("n1", "shd-1-0", "ib-a", "loading")
    assert view.shards == (
        ShardView(shard="shd-1-0", node="n1", rank=0, state="loading", seconds_in_state=61.3, gpus=("GPU-0",)),
        ShardView(shard="shd-1-1", node="n2", rank=1, state="ready", seconds_in_state=61.3, gpus=("GPU-1",)),
    )


def test_a_shard_that_ended_shows_why_and_what_its_engine_said_last(node: Node, a_replica: Replicas) -> None:
    group = a_replica(ShardState.ENDED, nodes=(N1, N2))
    ended = replace(group.shards[1], cause="out of memory", kind="memory", lines=("a", "b"))
    (view,) = view_replicas(fleet_of(node, replace(group, shards=(group.shards[0], ended))), NOW)
    assert [(each.cause, each.kind, each.lines) for each in view.shards] == [
        (None, None, None),
        ("out of memory", "memory", ("a", "b")),
    ]


def test_what_a_replica_still_answers_is_of_its_last_epoch(node: Node, a_replica: Replicas) -> None:
    going, next_one = a_replica(ShardState.READY, 1, draining="its node is drained"), a_replica(ShardState.LOADING, 2)
    before, after = a_replica(ShardState.READY, 3, epoch=1), a_replica(ShardState.READY, 3, epoch=2)
    views = view_replicas(fleet_of(node, going, next_one, before, after), NOW, {ReplicaId("rep-1"): 7})
    assert [(view.draining, view.in_flight) for view in views] == [
        ("its node is drained", 7),
        (None, None),
        (None, None),
        (None, 0),
    ]
    assert view_replicas(fleet_of(node, going), NOW)[0].in_flight is None, "nobody counts"


def test_a_replica_that_is_to_go_is_neither_ready_nor_wanted(a_model: Any, a_replica: Replicas) -> None:
    going = a_replica(ShardState.READY, 1, draining="its node is drained")
    view = judged(a_model(), going, a_replica(ShardState.READY, 2))
    assert (view.status, view.ready, view.wanted) == (ModelStatus.READY, 1, 1)
    view = judged(a_model(least=0), going)
    assert (view.status, view.serving, view.ready, view.wanted) == (ModelStatus.STOPPING, False, 0, 0)


def test_a_model_that_is_held_is_stopped_and_says_how_that_ends(a_model: Any, a_replica: Replicas) -> None:
    statistics = ModelStatistics(model=a_model(), replicas=(), verdict=None, held=True)
    view = view_model(statistics, NOBODY, Origin.STORED, None)
    assert (view.status, view.wanted, view.held) == (ModelStatus.STOPPED, 0, True)
    assert view.detail == "an operator has stopped it: `llmgw ctl load tiny` ends that"
    going = replace(statistics, replicas=(a_replica(ShardState.READY, draining="an operator has stopped it"),))
    assert view_model(going, NOBODY, Origin.STORED, None).status is ModelStatus.STOPPING
    assert find_concerns((), {}, (view,)) == [], "whoever has stopped it knows"


def test_a_rollout_is_shown_and_is_nobodys_concern(a_model: Any, a_replica: Replicas) -> None:
    rollout = Rollout(outdated=(ReplicaId("rep-1"),), waits="1 memory")
    old, new = a_replica(ShardState.READY, 1), a_replica(ShardState.LOADING, 2)
    statistics = ModelStatistics(model=a_model(), replicas=(old, new), verdict=None, rollout=rollout)
    view = view_model(statistics, NOBODY, Origin.STORED, None)
    assert (view.status, view.ready, view.wanted) == (ModelStatus.READY, 1, 1)
    assert view.detail == view.rolling
    assert view.rolling == "rolling: rep-1 runs by the earlier definition, and the next waits for room: 1 memory"
    assert find_concerns((), {}, (view,)) == []


def test_of_what_is_to_go_in_a_rollout_it_is_said_that_it_is_on_its_way_out(a_model: Any, a_replica: Replicas) -> None:
    old, new = a_replica(ShardState.READY, 1), a_replica(ShardState.READY, 3)
    going = replace(a_replica(ShardState.READY, 2), draining="its definition has changed")
    rollout = Rollout(outdated=(old.id, going.id))
    statistics = ModelStatistics(model=a_model(), replicas=(old, going, new), verdict=None, rollout=rollout)
    both = "rep-1 runs by the earlier definition, and rep-2 still answers requests by it"
    assert view_model(statistics, NOBODY, Origin.STORED, None).rolling == f"rolling: {both}"
    last = replace(statistics, rollout=Rollout(outdated=(going.id,)))
    assert view_model(last, NOBODY, Origin.STORED, None).rolling == (
        "rolling: rep-2 still answers requests by the earlier definition"
    )


def test_a_definition_that_failed_is_named_with_its_file_until_somebody_changes_it(
    a_model: Any, a_replica: Replicas
) -> None:
    model = a_model()
    failed = Failed(model=model, by=model, why="rep-1 ended: no such file")
    statistics = ModelStatistics(model=model, replicas=(a_replica(ShardState.READY),), verdict=None, failed=failed)
    view = view_model(statistics, NOBODY, Origin.DECLARED, "server.yaml:4:3")
    detail = "the definition in server.yaml:4:3 failed: rep-1 ended: no such file; the one before goes on"
    assert (view.status, view.failed, view.detail) == (ModelStatus.READY, "rep-1 ended: no such file", detail)
    assert find_concerns((), {}, (view,)) == [Concern(kind="model", name="tiny", message=f"ready: {detail}")]
    known = view_model(statistics, NOBODY, Origin.STORED, None, failure="as it was seen then")
    assert known.detail == "the definition failed: as it was seen then; the one before goes on"


def test_one_of_several_nodes_is_unreachable_when_any_of_them_is_lost(
    node: Node, a_model: Any, a_replica: Replicas
) -> None:
    group = a_replica(ShardState.READY, nodes=(N2, N1))
    assert view_replicas(fleet_of(node, group, lost=True), NOW)[0].state == "unreachable"
    view = judged(a_model(), group, lost=frozenset({N1}))
    assert (view.status, view.detail) == (ModelStatus.UNREACHABLE, "rep-1 is on n1, which is lost")


def test_how_far_a_shard_is_whose_node_is_lost_nobody_knows(node: Node, a_replica: Replicas) -> None:
    group = a_replica(ShardState.PREPARING, nodes=(N2, N1), others={N2: ShardState.PREPARED}, progress="is checked")
    (view,) = view_replicas(fleet_of(node, group, lost=True), NOW)
    assert (view.state, view.progress) == ("unreachable", "n1 is lost")
    assert {shard.node: (shard.state, shard.progress) for shard in view.shards} == {
        "n1": ("unreachable", "n1 is lost"),
        "n2": ("prepared", "is checked"),
    }
    (view,) = view_replicas(fleet_of(node, group), NOW)
    assert {shard.node: shard.state for shard in view.shards} == {"n1": "preparing", "n2": "prepared"}


def test_one_that_is_tried_again_by_its_earlier_definition_has_failed_whatever_the_new_one_lacks(
    node: Node, a_model: Any, a_replica: Replicas
) -> None:
    failed = a_replica(ShardState.ENDED, cause="killed")
    newest = replace(a_model(), source="/other.gguf")
    statistics = ModelStatistics(model=newest, replicas=(failed,), verdict=Rejected(), retries=True)
    view = view_model(statistics, NOBODY, Origin.STORED, None)
    detail = "rep-1 ended on n1: killed; it is tried again by the earlier definition"
    assert (view.status, view.detail) == (ModelStatus.FAILED, detail)
    assert view_model(replace(statistics, retries=False), NOBODY, Origin.STORED, None).status is ModelStatus.WAITING


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
        (1, 1, [], "rejected", ModelStatus.WAITING, "n1: "),
        (0, 1, [], "rejected", ModelStatus.WAITING, "n1: "),
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
    verdict: Verdict | str | None,
    status: ModelStatus,
    detail: str | None,
    node: Node,
) -> None:
    replicas = [a_replica(state, number) for number, state in enumerate(states)]
    model = a_model(least=least, most=most)
    if isinstance(verdict, str):
        verdict = rejected(model, replace(node, engines=()))
        detail = f"n1: {verdict.rejections[0].detail}"
    view = judged(model, *replicas, verdict=verdict)
    assert (view.status, view.detail, view.serving) == (status, detail, False)


def test_what_is_not_placed_because_it_may_run_unseen_says_so(a_model: Any) -> None:
    statistics = ModelStatistics(model=a_model(), replicas=(), verdict=None)
    view = view_model(statistics, NOBODY, Origin.STORED, None, held_up=True)
    assert (view.status, view.detail) == (ModelStatus.WAITING, UNSEEN)


def test_a_model_that_failed_and_has_no_room_now_says_what_it_waits_for(
    a_model: Any, a_replica: Replicas, node: Node
) -> None:
    model, ended = a_model(gb=1000.0), a_replica(ShardState.ENDED, cause="it broke")
    full = rejected(model, node)
    view = judged(model, ended, verdict=full)
    assert view.status is ModelStatus.WAITING
    assert view.detail == f"n1: {full.rejections[0].detail} (before that rep-1 ended on n1: it broke)"
    # while it is tried again after a while, that is what it waits for
    backing_off = place(a_model(), [Host(node=node)], {node.id: NOW + 5.0}, NOW)
    assert judged(a_model(), ended, verdict=backing_off).status is ModelStatus.FAILED
    # another of it is on its way
    view = judged(a_model(least=2, most=2), ended, a_replica(ShardState.LOADING, 2, progress="half"), verdict=full)
    assert (view.status, view.detail) == (ModelStatus.LOADING, "half")


@pytest.mark.parametrize(
    ("ended", "verdict", "tail"),
    [
        (False, Rejected(), "waits for a place: there is no node to run it"),
        (False, None, "waits for a place"),
        (True, None, "has failed too: rep-1 ended on n1: it broke"),
    ],
)
def test_what_goes_on_in_the_place_of_a_failed_definition_may_have_its_own_trouble(
    a_model: Any, a_replica: Replicas, *, ended: bool, verdict: Verdict | None, tail: str
) -> None:
    model = a_model()
    replicas = (a_replica(ShardState.ENDED, cause="it broke"),) if ended else ()
    failed = Failed(model=model, by=model, why="no such file")
    statistics = ModelStatistics(model=model, replicas=replicas, verdict=verdict, failed=failed)
    view = view_model(statistics, NOBODY, Origin.STORED, None)
    assert view.detail == f"the definition failed: no such file; the one before {tail}"


def test_of_many_nodes_that_can_not_run_it_the_reasons_are_counted(a_model: Any, node: Node) -> None:
    model = a_model("m", gb=1000.0)
    nodes = [replace(node, id=NodeId(f"n{number}"), engines=node.engines if number else ()) for number in range(9)]
    view = judged(model, verdict=rejected(model, *nodes))
    assert view.detail == (
        "no node can run it (8 not_enough_memory, 1 no_engine): `llmgw ctl explain-placement m` tells of each"
    )


def test_a_replica_that_was_placed_anew_is_judged_by_its_newest_epoch(a_model: Any, a_replica: Replicas) -> None:
    fenced = a_replica(ShardState.READY, 1, epoch=3)
    anew = a_replica(ShardState.READY, 1, epoch=4, nodes=(N2,))
    view = judged(a_model(), fenced, anew, lost=frozenset({N1}))
    assert (view.status, view.ready, view.wanted) == (ModelStatus.READY, 1, 1)


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
    assert find_concerns(nodes, {}, models) == [
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
    assert find_concerns([node], {}, []) == [
        Concern(kind="node", name="a", message="e can't be used (/opt/e -m x): libe.so.1 is missing")
    ]


def test_what_is_the_matter_with_a_machine_is_a_concern_while_it_is_there(node: Node) -> None:
    trouble = "the fake inventory can't be used, and what it said before holds: f.yaml:1:1 is not YAML"
    node = replace(node, warnings=("no AVX2", trouble), fabrics=(FabricFound(name="ib-a", down="no port"),))
    (ailing,) = fleet_of(node).nodes
    views = [
        NodeView(node="n1", state=NodeState.READY, connected=True, clock_skew_seconds=-3.0),
        NodeView(node="n2", state=NodeState.SILENT, connected=False),
        NodeView(node="n3", state=NodeState.UNSEEN, connected=False),
    ]
    assert [str(each.message) for each in find_concerns(views, {N1: ailing, N2: ailing}, [])] == [
        "fabric ib-a is out of service: no port",
        "its clock is more than 2 s behind the server's: have both set by NTP",
        trouble,
        "silent: its link is down",
    ]


def test_a_store_that_can_not_be_written_is_a_concern() -> None:
    assert list(concerns_of_store(StoreView(kind="sqlite", where="/x.db"))) == []
    assert list(concerns_of_store(StoreView(kind="sqlite", where="/x.db", failing="its disk is full"))) == [
        Concern(kind="store", name="/x.db", message="its disk is full")
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
    nodes = (
        NodeView(node="n1", state=NodeState.READY, connected=True, engines=node.engines),
        NodeView(node="n2", state=NodeState.JOINING, connected=True),
    )
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


def test_weights_that_a_replica_waits_for_are_shown(a_replica: Replicas, a_model: Any, node: Node) -> None:
    fetch = Fetch(source="https://h/a.gguf?token=x", phase=Phase.FETCHING, left_seconds=9.0)
    shown = replace(fetch, source="https://h/a.gguf")
    first, second = (a_replica(ShardState.PREPARING, number) for number in (1, 2))
    first = replace(first, shards=(replace(first.shards[0], fetch=replace(fetch, left_seconds=None)),))
    second = replace(second, shards=(replace(second.shards[0], fetch=fetch),))
    (_, view) = view_replicas(fleet_of(node, first, second), NOW)
    assert (view.fetch, view.shards[0].fetch) == (shown, shown)
    assert (view.progress, view.shards[0].progress) == ("fetches its weights", "fetches its weights")
    each = ModelStatistics(model=a_model(), replicas=(first, second), verdict=None)
    model = view_model(each, NOBODY, Origin.STORED, None)
    # (the one that will be there first)
    assert (model.status, model.fetch, model.detail) == (ModelStatus.LOADING, shown, "fetches its weights")
    ready = ModelStatistics(model=a_model(), replicas=(a_replica(ShardState.READY), second), verdict=None)
    assert view_model(ready, NOBODY, Origin.STORED, None).fetch is None
