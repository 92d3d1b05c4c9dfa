"""The nodes and what they have, as the operator port shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from llmgw.admin.views import BrakeView, ClassView, FabricView, GpuView, KeptView, NodeState, NodeView
from llmgw.core.hosts import Host, Standing
from llmgw.core.node import Gpu, NodeId
from llmgw.core.picture import FleetStatistics, NodeStatistics
from llmgw.core.placement import Rejected
from llmgw.core.replica import Replica, ShardState

# Nothing here goes by a node's clock; its own logs, and the certificates that it checks, do.
SKEW_SECONDS = 2.0


class LinkFacts(Protocol):
    """What the listener knows of a node's link."""

    @property
    def node(self) -> NodeId: ...
    @property
    def peer(self) -> str: ...
    @property
    def connected(self) -> bool: ...
    @property
    def heard_seconds_ago(self) -> float: ...
    @property
    def protocol(self) -> int: ...
    @property
    def version(self) -> str: ...
    @property
    def trunks(self) -> int: ...


class KeptNode(Protocol):
    """What the store has of a node: when it was last seen (None when never), and its marks. Times are in seconds since
    1970."""

    @property
    def node(self) -> NodeId: ...
    @property
    def last_seen(self) -> float | None: ...
    @property
    def cordoned(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    @property
    def drain_until(self) -> float | None: ...
    @property
    def labels(self) -> Mapping[str, str | None]: ...


def view_nodes(
    fleet: FleetStatistics,
    links: Iterable[LinkFacts],
    *,
    kept: Mapping[NodeId, KeptNode],
    skews: Mapping[NodeId, float],
    wall: float,
    gpus: bool = True,
) -> tuple[NodeView, ...]:
    """Every node that has a link, has registered or is kept, by name; without the single GPUs where nobody asks for
    them. ``skews`` are seconds, ``wall`` seconds since 1970."""
    by_link = {link.node: link for link in links}
    registered = {each.node.id: each for each in fleet.nodes}
    return tuple(
        _view_node(
            name,
            registered.get(name),
            by_link.get(name),
            kept.get(name),
            absent=name in fleet.absent,
            drain_waits_for=_tell_left(fleet, registered.get(name)),
            skew=skews.get(name),
            wall=wall,
            gpus=gpus,
        )
        for name in sorted(by_link.keys() | registered.keys() | kept.keys())
    )


def _view_node(
    name: NodeId,
    each: NodeStatistics | None,
    link: LinkFacts | None,
    kept: KeptNode | None,
    *,
    absent: bool,
    drain_waits_for: str | None,
    skew: float | None,
    wall: float,
    gpus: bool,
) -> NodeView:
    state = _judge_node(each, link, kept, absent=absent)
    view = NodeView(
        node=name,
        state=state,
        connected=link is not None and link.connected,
        cordoned=kept is not None and kept.cordoned,
        draining=kept is not None and kept.draining,
        drain_seconds_left=_drain_left(kept, wall),
        drain_waits_for=drain_waits_for,
        labels=_own_words(kept),
        peer=link.peer if link else None,
        heard_seconds_ago=_heard_ago(link, kept, wall),
        heard_before_start=True if link is None and kept is not None and kept.last_seen is not None else None,
        protocol=link.protocol if link else None,
        version=link.version if link else None,
        trunks=link.trunks if link else None,
        # What a clock was a while ago says nothing of what it is.
        clock_skew_seconds=round(skew, 1) if skew is not None and state is NodeState.READY else None,
    )
    if each is None:
        return view
    host, node = each.host, each.node
    view = replace(
        view,
        cordoned=host.cordoned,
        labels=host.labels or None,
        gpus=None if node.gpus is None or not gpus else tuple(_view_gpu(gpu, host) for gpu in node.gpus),
        gpus_free=None if node.gpus is None else len(host.free),
        gpu_driver=node.gpu_driver,
        classes=None if node.gpus is None else tuple(sorted({gpu.gpu_class for gpu in node.gpus})),
        fabrics=node.fabrics or None,
        cores=node.cores,
        memory_gb=node.memory_gb,
        memory_available_gb=node.memory_available_gb,
        memory_free_gb=max(host.free_gb, 0.0),
        memory_booked_gb=host.booked_gb,
        memory_foreign_gb=node.memory_foreign_gb,
        disks=node.disks or None,
        engines=node.engines,
        replicas=living(each),
        kept=_view_kept(host) or None,
    )
    return replace(view, warnings=(*node.warnings, *find_ailments(each, view.clock_skew_seconds)) or None)


def _judge_node(
    each: NodeStatistics | None, link: LinkFacts | None, kept: KeptNode | None, *, absent: bool
) -> NodeState:
    connected = link is not None and link.connected
    if each is not None and each.lost:
        return NodeState.LOST
    if connected:
        return NodeState.READY if each is not None and each.host.standing is Standing.READY else NodeState.JOINING
    if absent:
        return NodeState.LOST
    if each is None and link is None and (kept is None or kept.last_seen is None):
        return NodeState.UNSEEN
    return NodeState.SILENT


def _heard_ago(link: LinkFacts | None, kept: KeptNode | None, wall: float) -> float | None:
    if link is not None:
        return round(link.heard_seconds_ago, 1)
    if kept is not None and kept.last_seen is not None:
        return round(max(wall - kept.last_seen, 0.0), 1)
    return None


def _drain_left(kept: KeptNode | None, wall: float) -> float | None:
    if kept is None or not kept.draining or kept.drain_until is None:
        return None
    return round(max(kept.drain_until - wall, 0.0), 1)


def _tell_left(fleet: FleetStatistics, each: NodeStatistics | None) -> str | None:
    """What still keeps a node that is drained, and what for."""
    drains = fleet.draining.get(each.node.id) if each is not None else None
    if each is None or drains is None:
        return None
    # (the shard of one that spans nodes may have ended here, and not on another)
    here = living(each)
    found = {replica.id: replica for replica in each.replicas if replica.id in here}
    told = (
        f"{name} {_tell_wait(fleet, found[name], lost=each.lost)}"
        for name in dict.fromkeys(drains.left)
        if name in found
    )
    return "; ".join(told) or None


def _tell_wait(fleet: FleetStatistics, replica: Replica, *, lost: bool) -> str:
    going = replica.state is ShardState.STOPPING or replica.draining is not None
    if lost:
        # Nobody there hears that it is to stop, and none of its requests can be seen to end.
        still = "can't be reached and may run there still"
        return still if going or (room := _tell_room(fleet, replica)) is None else f"{still}, and {room}"
    if going:
        return "is stopping" if replica.state is ShardState.STOPPING else "answers its last requests"
    return _tell_room(fleet, replica) or "waits for the one in its place"


def _tell_room(fleet: FleetStatistics, replica: Replica) -> str | None:
    """What keeps another from taking its place; None where nothing does."""
    verdict = next((each.verdict for each in fleet.models if each.model.name == replica.model), None)
    if isinstance(verdict, Rejected):
        reasons = verdict.counted()
        return f"waits for room elsewhere: {reasons}" if reasons else "waits for room elsewhere"
    return None


def _own_words(kept: KeptNode | None) -> Mapping[str, str] | None:
    """The labels that an operator has given: all that is known of a node that is away."""
    labels = kept.labels if kept is not None else {}
    return {name: value for name, value in labels.items() if value is not None} or None


def _view_gpu(gpu: Gpu, host: Host) -> GpuView:
    return GpuView(
        uuid=gpu.uuid,
        index=gpu.index,
        gpu_class=gpu.gpu_class,
        name=gpu.name,
        memory_gb=gpu.memory_gb,
        memory_used_gb=gpu.memory_used_gb,
        pci=gpu.pci,
        temperature_c=gpu.temperature_c,
        utilization_percent=gpu.utilization_percent,
        ecc_errors=gpu.ecc_errors,
        nvlink_peers=gpu.nvlink_peers,
        mig=gpu.mig,
        foreign=gpu.foreign or None,
        broken=gpu.broken,
        booked_by=None if gpu.uuid in host.kept else host.booked.get(gpu.uuid),
        kept_for=host.kept.get(gpu.uuid),
    )


def _view_kept(host: Host) -> tuple[KeptView, ...]:
    """What others don't get of its room though nothing runs in it."""
    return tuple(
        KeptView(
            model=model,
            gpus=tuple(sorted(uuid for uuid, other in host.kept.items() if other == model)),
            memory_gb=host.kept_gb.get(model, 0.0),
        )
        for model in sorted({*host.kept.values(), *host.kept_gb})
    )


def living(each: NodeStatistics) -> tuple[str, ...]:
    """The replicas that have a shard on this node which has not ended, by id."""
    return tuple(
        dict.fromkeys(
            replica.id
            for replica in each.replicas
            for shard in replica.shards
            if shard.spec.node == each.node.id and shard.state is not ShardState.ENDED
        )
    )


def find_ailments(each: NodeStatistics, skew_seconds: float | None) -> Iterator[str]:
    """What of a machine somebody has to mend, and which replicas that concerns. No figures that always move."""
    # (what is kept for a model gets another place where a card of it is gone)
    booked = {uuid: replica for uuid, replica in each.host.booked.items() if uuid not in each.host.kept}
    gpus = each.node.gpus
    for gpu in gpus or ():
        if gpu.broken is not None:
            holder = f" ({booked[gpu.uuid]} has it)" if gpu.uuid in booked else ""
            yield f"GPU {gpu.index} ({gpu.uuid}) can't be used: {gpu.broken}{holder}"
    if gpus is not None:
        there = {gpu.uuid for gpu in gpus}
        for uuid, replica in sorted(booked.items()):
            if uuid not in there:
                yield f"{uuid} is gone: {replica} has it, and the node no longer reports it"
    yield from _find_down(each)
    if skew_seconds is not None and abs(skew_seconds) > SKEW_SECONDS:
        where = "ahead of" if skew_seconds > 0 else "behind"
        yield f"its clock is more than {SKEW_SECONDS:g} s {where} the server's: have both set by NTP"


def _find_down(each: NodeStatistics) -> Iterator[str]:
    """The fabrics that are out of service here, whether or not anything needs them, and those that are gone from under
    a replica."""
    needed: dict[str, list[str]] = {}
    for replica in each.replicas:
        for shard in replica.shards:
            if (
                shard.spec.node == each.node.id
                and shard.state is not ShardState.ENDED
                and shard.spec.fabric is not None
            ):
                needed.setdefault(shard.spec.fabric, []).append(replica.id)
    reasons = {fabric.name: fabric.down for fabric in each.node.fabrics if fabric.down is not None}
    for name in needed:
        if name not in reasons and name not in each.host.fabrics:
            declared = any(fabric.name == name for fabric in each.node.fabrics)
            reasons[name] = "it has no address here" if declared else "it is no longer declared here"
    for name, why in reasons.items():
        over = f" ({', '.join(dict.fromkeys(needed[name]))} runs over it)" if name in needed else ""
        yield f"fabric {name} is out of service: {why}{over}"


# The whole in numbers


def sum_classes(fleet: FleetStatistics) -> Mapping[str, ClassView]:
    """The GPUs of each class; free are those on nodes that take replicas now."""
    total = Counter(gpu.gpu_class for each in fleet.nodes for gpu in each.node.gpus or ())
    free = Counter(gpu.gpu_class for each in fleet.nodes if _takes(each.host) for gpu in each.host.free)
    return {name: ClassView(free=free[name], total=total[name]) for name in sorted(total)}


def sum_fabrics(fleet: FleetStatistics) -> Mapping[str, FabricView]:
    """The nodes of each fabric; whole free are those that take replicas now, with all their GPUs."""
    total, down, whole = Counter[str](), Counter[str](), Counter[str]()
    for each in fleet.nodes:
        for fabric in each.node.fabrics:
            total[fabric.name] += 1
            if fabric.name not in each.host.fabrics:
                down[fabric.name] += 1
            elif each.node.gpus and len(each.host.free) == len(each.node.gpus) and _takes(each.host):
                whole[fabric.name] += 1
    return {name: FabricView(whole_free=whole[name], down=down[name], total=total[name]) for name in sorted(total)}


def _takes(host: Host) -> bool:
    return host.standing is Standing.READY and not host.cordoned


def view_brake(fleet: FleetStatistics, now: float) -> BrakeView | None:
    """The brake, while it holds."""
    brake = fleet.brake
    if brake is None:
        return None
    lost = [each for each in fleet.nodes if each.lost]
    return BrakeView(
        lost=brake.lost,
        nodes=brake.nodes,
        seconds_left=round(max(brake.until - now, 0.0), 1),
        who=tuple(sorted({*(each.node.id for each in lost), *fleet.absent})),
        held=tuple(sorted({replica for each in lost for replica in living(each)})),
    )
