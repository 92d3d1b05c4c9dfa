from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from llmgw.admin.views import BrakeView, ClassView, FabricView, KeptView, NodeState, NodeView
from llmgw.core.brake import Brake
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import ModelName
from llmgw.core.node import Disk, FabricFound, ForeignUse, Gpu, Node, NodeId
from llmgw.core.picture import Draining, FleetStatistics, ModelStatistics, NodeStatistics
from llmgw.core.placement import Rejected, place
from llmgw.core.replica import Replica, ReplicaId, Shard, ShardId, ShardSpec, ShardState
from llmgw.server.machines import (
    find_ailments,
    living,
    sum_classes,
    sum_fabrics,
    view_brake,
    view_nodes,
)

WALL = 1_700_000_000.0
N1, N2 = NodeId("n1"), NodeId("n2")
M = ModelName("m")
NOBODY = FleetStatistics(nodes=(), models=())


@dataclass(frozen=True)
class Link:
    node: NodeId
    connected: bool
    peer: str = "10.0.0.2:41000"
    heard_seconds_ago: float = 2.0499
    protocol: int = 4
    version: str = "0.1.0"
    trunks: int = 2


@dataclass(frozen=True)
class Kept:
    node: NodeId
    last_seen: float | None = None
    cordoned: bool = False
    draining: bool = False
    drain_until: float | None = None
    labels: Mapping[str, str | None] = field(default_factory=dict)


def gpu(index: int, **facts: Any) -> Gpu:
    given = {"gpu_class": "h100-80g", "name": "H100", "memory_gb": 85.0, "memory_used_gb": 1.0, **facts}
    return Gpu(uuid=f"GPU-{index}", index=index, **given)


def host_of(node: Node, count: int = 0, *, booked: tuple[int, ...] = (), **facts: Any) -> Host:
    """The node with so many GPUs; those of these indices are booked."""
    gpus = tuple(gpu(index) for index in range(count)) if count else node.gpus
    taken = {f"GPU-{index}": ReplicaId("rep-1") for index in booked}
    return Host(node=replace(node, gpus=gpus), booked=taken, **facts)


def fleet_of(*hosts: Host, replicas: tuple[Replica, ...] = (), **facts: Any) -> FleetStatistics:
    nodes = [
        NodeStatistics(
            host=host,
            lost_at=1.0 if host.standing is Standing.LOST else None,
            revision=1,
            replicas=tuple(replica for replica in replicas if host.id in replica.nodes),
        )
        for host in hosts
    ]
    return FleetStatistics(nodes=tuple(nodes), models=(), **facts)


Replicas = Callable[..., Replica]


@pytest.fixture
def a_replica(a_model: Any) -> Replicas:
    """A replica with a shard of each of these states, on n1, n2 and so on."""

    def make(number: int, *states: ShardState) -> Replica:
        model = a_model()
        shards = tuple(
            Shard(
                spec=ShardSpec(
                    id=ShardId(f"shd-{number}-{rank}"),
                    replica=ReplicaId(f"rep-{number}"),
                    epoch=1,
                    node=NodeId(f"n{rank + 1}"),
                    model=model,
                    profile=model.profiles[0],
                    rank=rank,
                    count=len(states),
                ),
                state=state,
                since=0.0,
            )
            for rank, state in enumerate(states)
        )
        return Replica(
            id=shards[0].spec.replica,
            model=model.name,
            profile="p",
            epoch=1,
            shards=shards,
            state=states[0],
            since=0.0,
        )

    return make


def shown(
    fleet: FleetStatistics,
    *links: Link,
    kept: tuple[Kept, ...] = (),
    skews: Mapping[NodeId, float] | None = None,
    gpus: bool = True,
) -> tuple[NodeView, ...]:
    by_node = {each.node: each for each in kept}
    return view_nodes(fleet, links, kept=by_node, skews=skews or {}, wall=WALL, gpus=gpus)


def test_a_node_shows_its_link_and_what_it_has(node: Node, a_replica: Replicas) -> None:
    disks = (Disk(path="/", free_gb=1.0, total_gb=2.0),)
    fabrics = (FabricFound(name="ib-a", interface="ib0"),)
    whole = replace(node, disks=disks, fabrics=fabrics, gpu_driver="550.1", memory_foreign_gb=0.5)
    on_it = (a_replica(1, ShardState.READY), a_replica(2, ShardState.ENDED))
    host = host_of(whole, 2, booked=(0,), booked_gb=1.5, labels={"zone": "a"})
    (view,) = shown(fleet_of(host, replicas=on_it), Link(N1, connected=True), skews={N1: 0.04})
    first, second = view.gpus or ()
    assert (first.uuid, first.booked_by, first.memory_gb) == ("GPU-0", "rep-1", 85.0)
    assert (second.booked_by, second.nvlink_peers, second.foreign) == (None, None, None)
    assert replace(view, gpus=None) == NodeView(
        node="n1",
        state=NodeState.READY,
        connected=True,
        labels={"zone": "a"},
        gpus_free=1,
        gpu_driver="550.1",
        classes=("h100-80g",),
        fabrics=fabrics,
        clock_skew_seconds=0.0,
        memory_foreign_gb=0.5,
        peer="10.0.0.2:41000",
        heard_seconds_ago=2.0,
        protocol=4,
        version="0.1.0",
        trunks=2,
        cores=4,
        memory_gb=16.0,
        memory_available_gb=12.0,
        memory_free_gb=14.0,
        memory_booked_gb=1.5,
        disks=disks,
        engines=node.engines,
        replicas=("rep-1",),
    )


def test_what_a_node_did_not_say_is_not_known(node: Node) -> None:
    (view,) = shown(fleet_of(Host(node=node)))
    assert (view.disks, view.peer, view.heard_seconds_ago, view.trunks) == (None, None, None, None)
    assert (view.gpus, view.gpus_free, view.classes, view.fabrics) == (None, None, None, None)
    (joining,) = shown(NOBODY, Link(N1, connected=True))
    assert (joining.cores, joining.memory_gb, joining.engines, joining.replicas) == (None, None, None, ())


def test_a_node_that_has_no_gpu_is_told_from_one_where_nobody_looked(node: Node) -> None:
    (view,) = shown(fleet_of(Host(node=replace(node, gpus=()))))
    assert (view.gpus, view.gpus_free, view.classes) == ((), 0, ())


def test_a_gpu_shows_who_else_is_on_it_and_its_peers(node: Node) -> None:
    foreign = (ForeignUse(memory_gb=3.0, pid=77, name="python"),)
    whole = replace(node, gpus=(gpu(0, foreign=foreign, nvlink_peers=()),))
    (view,) = shown(fleet_of(Host(node=whole)))
    assert view.gpus is not None
    assert (view.gpus[0].foreign, view.gpus[0].nvlink_peers) == (foreign, ())


def test_whoever_only_counts_gets_no_gpus(node: Node) -> None:
    (view,) = shown(fleet_of(host_of(node, 8)), gpus=False)
    assert (view.gpus, view.gpus_free) == (None, 8)


@pytest.mark.parametrize(
    ("standing", "connected", "state"),
    [
        (Standing.READY, True, NodeState.READY),
        (Standing.SILENT, True, NodeState.JOINING),
        (None, True, NodeState.JOINING),
        (Standing.SILENT, False, NodeState.SILENT),
        (Standing.READY, False, NodeState.SILENT),
        (None, False, NodeState.SILENT),
        (Standing.READY, None, NodeState.SILENT),
        (Standing.LOST, False, NodeState.LOST),
        (Standing.LOST, True, NodeState.LOST),
        (Standing.LOST, None, NodeState.LOST),
    ],
)
def test_a_nodes_state_comes_of_its_link_and_its_lease(
    node: Node, *, standing: Standing | None, connected: bool | None, state: NodeState
) -> None:
    fleet = NOBODY if standing is None else fleet_of(Host(node=node, standing=standing))
    links = () if connected is None else (Link(N1, connected=connected),)
    (view,) = shown(fleet, *links)
    assert view.state is state


@pytest.mark.parametrize(
    ("kept", "absent", "state", "heard"),
    [
        (Kept(N1, last_seen=WALL - 90.0), (), NodeState.SILENT, 90.0),
        (Kept(N1, last_seen=WALL - 90.0), (N1,), NodeState.LOST, 90.0),
        # the clock of this machine was set back meanwhile
        (Kept(N1, last_seen=WALL + 90.0), (N1,), NodeState.LOST, 0.0),
        (Kept(N1, cordoned=True), (), NodeState.UNSEEN, None),
    ],
)
def test_a_node_that_has_not_dialled_since_the_start_is_shown_as_the_store_has_it(
    kept: Kept, absent: tuple[NodeId, ...], state: NodeState, heard: float | None
) -> None:
    (view,) = shown(replace(NOBODY, absent=absent), kept=(kept,))
    assert (view.node, view.state, view.heard_seconds_ago, view.connected) == ("n1", state, heard, False)
    assert view.heard_before_start is (None if heard is None else True)


def test_the_marks_of_a_node_that_is_away_are_shown() -> None:
    kept = Kept(N1, last_seen=WALL, cordoned=True, labels={"zone": "a", "rack": None})
    (view,) = shown(NOBODY, kept=(kept,))
    assert (view.cordoned, view.labels) == (True, {"zone": "a"})


def test_a_node_that_drains_shows_what_keeps_it_and_for_how_long(node: Node, a_model: Any, a_replica: Replicas) -> None:
    going = replace(a_replica(1, ShardState.READY), draining="its node is drained")
    stopping, waiting = a_replica(2, ShardState.STOPPING), a_replica(3, ShardState.READY)
    left = tuple(replica.id for replica in (going, stopping, waiting))
    facts = {"replicas": (going, stopping, waiting), "draining": {N1: Draining(until=None, left=left)}}
    kept = {N1: Kept(N1, WALL, cordoned=True, draining=True, drain_until=WALL + 90.04)}
    (view,) = view_nodes(fleet_of(Host(node=node), **facts), [], kept=kept, skews={}, wall=WALL)
    assert (view.draining, view.drain_seconds_left) == (True, 90.0)
    answers, stops = "rep-1 answers its last requests", "rep-2 is stopping"
    assert view.drain_waits_for == f"{answers}; {stops}; rep-3 waits for the one in its place"
    verdict = place(a_model(gb=99.0), [Host(node=node)], {}, 0.0)
    assert isinstance(verdict, Rejected)
    models = (ModelStatistics(model=a_model(), replicas=(), verdict=verdict),)
    fleet = replace(fleet_of(Host(node=node), **facts), models=models)
    (view,) = view_nodes(fleet, [], kept=kept, skews={}, wall=WALL + 100.0)
    assert view.drain_seconds_left == 0.0, "its time is over"
    assert str(view.drain_waits_for).endswith(f"rep-3 waits for room elsewhere: {verdict.counted()}")


def test_of_a_lost_node_that_drains_nothing_is_said_to_stop(node: Node, a_model: Any, a_replica: Replicas) -> None:
    going = replace(a_replica(1, ShardState.READY), draining="its node is drained")
    stopping, waiting = a_replica(2, ShardState.STOPPING), a_replica(3, ShardState.READY)
    left = tuple(replica.id for replica in (going, stopping, waiting))
    facts = {"replicas": (going, stopping, waiting), "draining": {N1: Draining(until=WALL, left=left)}}
    fleet = fleet_of(Host(node=node, standing=Standing.LOST), **facts)
    still = "can't be reached and may run there still"
    (view,) = view_nodes(fleet, [], kept={}, skews={}, wall=WALL)
    assert view.drain_waits_for == f"rep-1 {still}; rep-2 {still}; rep-3 {still}"
    verdict = place(a_model(gb=99.0), [Host(node=node)], {}, 0.0)
    assert isinstance(verdict, Rejected)
    models = (ModelStatistics(model=a_model(), replicas=(), verdict=verdict),)
    (view,) = view_nodes(replace(fleet, models=models), [], kept={}, skews={}, wall=WALL)
    room = f"waits for room elsewhere: {verdict.counted()}"
    assert view.drain_waits_for == f"rep-1 {still}; rep-2 {still}; rep-3 {still}, and {room}"


def test_what_has_ended_on_a_node_keeps_its_drain_no_more_though_it_goes_on_elsewhere(
    node: Node, a_replica: Replicas
) -> None:
    spread = replace(a_replica(1, ShardState.ENDED, ShardState.STOPPING), state=ShardState.STOPPING)
    fleet = fleet_of(Host(node=node), replicas=(spread,), draining={N1: Draining(until=None, left=(spread.id,))})
    (view,) = view_nodes(fleet, [], kept={}, skews={}, wall=WALL)
    assert (view.replicas, view.drain_waits_for) == ((), None)


def test_a_drain_that_is_done_or_may_last_says_so_by_what_it_does_not_tell(node: Node) -> None:
    kept = {N1: Kept(N1, WALL, cordoned=True, draining=True)}
    fleet = fleet_of(Host(node=node), draining={N1: Draining(until=None, left=())})
    for seen in (fleet, NOBODY):
        (view,) = view_nodes(seen, [], kept=kept, skews={}, wall=WALL)
        assert (view.draining, view.drain_seconds_left, view.drain_waits_for) == (True, None, None)


def test_a_skewed_clock_changes_no_time_that_is_shown(node: Node) -> None:
    fleet = fleet_of(Host(node=replace(node, clock=0.0)))
    (view,) = shown(fleet, Link(N1, connected=True), kept=(Kept(N1, last_seen=5.0),), skews={N1: -WALL})
    assert (view.state, view.heard_seconds_ago, view.clock_skew_seconds) == (NodeState.READY, 2.0, -WALL)


def test_what_the_clock_of_a_node_that_is_away_was_is_not_told(node: Node) -> None:
    (view,) = shown(fleet_of(Host(node=node, standing=Standing.LOST)), skews={N1: 9.0})
    assert (view.clock_skew_seconds, view.warnings) == (None, None)


def test_nodes_stand_by_name(node: Node) -> None:
    links = (Link(NodeId("n3"), connected=True), Link(NodeId("n0"), connected=True))
    views = shown(fleet_of(Host(node=node)), *links, kept=(Kept(N2, last_seen=1.0), Kept(N1, last_seen=1.0)))
    assert [view.node for view in views] == ["n0", "n1", "n2", "n3"]


def test_all_that_is_the_matter_with_a_machine_is_a_warning(node: Node) -> None:
    ailing = replace(
        node,
        warnings=("the processor has no AVX2",),
        gpus=(gpu(0), gpu(3, broken="it fell off the bus")),
        fabrics=(FabricFound(name="ib-a"), FabricFound(name="ib-b", down="mlx5_1 has no ACTIVE port")),
    )
    (view,) = shown(fleet_of(Host(node=ailing)), Link(N1, connected=True), skews={N1: 3.2})
    assert view.warnings == (
        "the processor has no AVX2",
        "GPU 3 (GPU-3) can't be used: it fell off the bus",
        "fabric ib-b is out of service: mlx5_1 has no ACTIVE port",
        "its clock is more than 2 s ahead of the server's: have both set by NTP",
    )
    assert view.gpus_free == 1


@pytest.mark.parametrize(
    ("skew", "said"), [(None, ""), (2.0, ""), (-2.0, ""), (2.1, "ahead of"), (-2.1, "behind"), (-1e9, "behind")]
)
def test_a_clock_is_a_matter_only_when_it_is_far_off(node: Node, skew: float | None, said: str) -> None:
    (each,) = fleet_of(Host(node=node)).nodes
    assert [line.split("2 s ")[1].split(" the server")[0] for line in find_ailments(each, skew)] == [said] * bool(said)


def test_what_is_free_is_what_placement_could_book_whatever_an_engine_uses(node: Node) -> None:
    full = replace(node, memory_gb=16.0, memory_available_gb=16.0, memory_foreign_gb=4.0)
    (view, over) = shown(fleet_of(Host(node=full, booked_gb=10.0), Host(node=replace(full, id=N2), booked_gb=14.0)))
    assert (view.memory_free_gb, over.memory_free_gb) == (2.0, 0.0)


def test_room_that_is_kept_is_no_replicas(node: Node) -> None:
    kept = {"GPU-0": M, "GPU-1": M}
    host = host_of(node, 3, booked=(0, 1, 2), booked_gb=12.0, kept=kept, kept_gb={M: 4.0, ModelName("tiny"): 1.0})
    (view,) = shown(fleet_of(host))
    assert [(gpu.booked_by, gpu.kept_for) for gpu in view.gpus or ()] == [(None, "m"), (None, "m"), ("rep-1", None)]
    assert view.kept == (
        KeptView(model="m", gpus=("GPU-0", "GPU-1"), memory_gb=4.0),
        KeptView(model="tiny", memory_gb=1.0),
    )
    broken = replace(host, node=replace(host.node, gpus=(gpu(0, broken="Xid 79"),)))
    assert list(find_ailments(fleet_of(broken).nodes[0], None)) == [
        "GPU 0 (GPU-0) can't be used: Xid 79",
        "GPU-2 is gone: rep-1 has it, and the node no longer reports it",
    ]


def test_a_booked_gpu_that_breaks_or_vanishes_is_told_with_whose_it_is(node: Node) -> None:
    """A card that a replica had was gone, and nothing said so."""
    cards = (gpu(0), gpu(1, broken="it fell off the bus"))
    booked = {name: ReplicaId("rep-1") for name in ("GPU-1", "GPU-7")}
    (each,) = fleet_of(Host(node=replace(node, gpus=cards), booked=booked)).nodes
    assert list(find_ailments(each, None)) == [
        "GPU 1 (GPU-1) can't be used: it fell off the bus (rep-1 has it)",
        "GPU-7 is gone: rep-1 has it, and the node no longer reports it",
    ]
    (each,) = fleet_of(Host(node=replace(node, gpus=None), booked=booked)).nodes
    assert list(find_ailments(each, None)) == [], "nobody has looked"


@pytest.mark.parametrize(
    ("fabrics", "said"),
    [
        ((FabricFound(name="ib-a", address="10.0.0.1"),), []),
        ((FabricFound(name="ib-a", down="no port"),), ["fabric ib-a is out of service: no port (rep-1 runs over it)"]),
        ((FabricFound(name="ib-a"),), ["fabric ib-a is out of service: it has no address here (rep-1 runs over it)"]),
        ((), ["fabric ib-a is out of service: it is no longer declared here (rep-1 runs over it)"]),
        (
            (FabricFound(name="ib-a", address="10.0.0.1"), FabricFound(name="ib-b", down="no port")),
            ["fabric ib-b is out of service: no port"],
        ),
    ],
)
def test_a_fabric_that_goes_from_under_a_replica_is_told_with_whose_it_is(
    node: Node, a_replica: Replicas, fabrics: tuple[FabricFound, ...], said: list[str]
) -> None:
    group = a_replica(1, ShardState.READY, ShardState.READY)
    over = replace(group, shards=tuple(replace(each, spec=replace(each.spec, fabric="ib-a")) for each in group.shards))
    ended = replace(over, shards=tuple(replace(each, state=ShardState.ENDED) for each in over.shards))
    host = Host(node=replace(node, fabrics=fabrics))
    (each,) = fleet_of(host, replicas=(over, a_replica(2, ShardState.READY))).nodes
    assert list(find_ailments(each, None)) == said
    (each,) = fleet_of(host, replicas=(ended,)).nodes
    assert [line for line in find_ailments(each, None) if "runs over" in line] == []


def test_a_replica_lives_where_a_shard_of_it_does(node: Node, a_replica: Replicas) -> None:
    half = a_replica(1, ShardState.READY, ShardState.ENDED)
    stopping = a_replica(2, ShardState.STOPPING)
    first, second = fleet_of(Host(node=node), Host(node=replace(node, id=N2)), replicas=(half, stopping)).nodes
    assert (living(first), living(second)) == (("rep-1", "rep-2"), ())


def test_gpus_are_counted_by_class_and_free_where_one_could_have_them(node: Node) -> None:
    mixed = replace(node, id=NodeId("n4"), gpus=(gpu(0, gpu_class="a100-40g"), gpu(1, broken="it is hot")))
    fleet = fleet_of(
        host_of(node, 8, booked=(0, 1, 2, 3)),
        host_of(replace(node, id=N2), 8, cordoned=True),
        host_of(replace(node, id=NodeId("n3")), 4, standing=Standing.LOST),
        Host(node=mixed),
        Host(node=replace(node, id=NodeId("n5"))),
    )
    assert sum_classes(fleet) == {
        "a100-40g": ClassView(free=1, total=1),
        "h100-80g": ClassView(free=4, total=8 + 8 + 4 + 1),
    }


def test_whole_nodes_are_counted_by_fabric(node: Node) -> None:
    a = FabricFound(name="ib-a", interface="ib0", address="10.0.0.1")
    b = FabricFound(name="ib-b", interface="ib1", address="10.0.1.1")
    on_a = replace(node, fabrics=(a,))
    on_both = replace(node, fabrics=(replace(a, down="no port"), b))
    fleet = fleet_of(
        host_of(on_a, 8),
        host_of(replace(on_a, id=N2), 8, booked=(0,)),
        host_of(replace(on_a, id=NodeId("n3")), 8, cordoned=True),
        host_of(replace(on_both, id=NodeId("n4")), 8),
        # nothing of it can be free
        Host(node=replace(on_a, id=NodeId("n5"), gpus=())),
    )
    assert sum_fabrics(fleet) == {
        "ib-a": FabricView(whole_free=1, down=1, total=5),
        "ib-b": FabricView(whole_free=1, down=0, total=1),
    }


def test_the_brake_names_who_is_lost_and_what_waits_there(node: Node, a_replica: Replicas) -> None:
    assert view_brake(NOBODY, 0.0) is None
    fleet = fleet_of(
        Host(node=node, standing=Standing.LOST),
        Host(node=replace(node, id=N2)),
        replicas=(a_replica(1, ShardState.READY),),
        absent=(NodeId("n7"),),
        brake=Brake(lost=2, nodes=3, until=1600.04),
    )
    assert view_brake(fleet, 1000.0) == BrakeView(
        lost=2, nodes=3, seconds_left=600.0, who=("n1", "n7"), held=("rep-1",)
    )
