"""What the fleet and its links are, as the operator port shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from llmgw.admin.views import (
    Concern,
    EnginesView,
    LeftOut,
    ModelStatus,
    ModelView,
    NodeEngines,
    NodeState,
    NodeView,
    Origin,
    PluginView,
    ReplicaView,
)
from llmgw.core.fleet import FleetStatistics, ModelStatistics, NodeStatistics
from llmgw.core.node import NodeId
from llmgw.core.placement import Rejected
from llmgw.core.replica import Replica, ShardState
from llmgw.engines.registry import Engine, Found

UNREACHABLE = "unreachable"
_ON_ITS_WAY = {ShardState.PLACED, ShardState.LAUNCHING, ShardState.LOADING}


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


def view_nodes(fleet: FleetStatistics, links: Iterable[LinkFacts]) -> tuple[NodeView, ...]:
    """Every node that has a link, or has registered, by name."""
    by_link: dict[str, LinkFacts] = {link.node: link for link in links}
    registered: dict[str, NodeStatistics] = {each.node.id: each for each in fleet.nodes}
    return tuple(
        _view_node(name, registered.get(name), by_link.get(name)) for name in sorted(by_link.keys() | registered.keys())
    )


def _view_node(name: str, each: NodeStatistics | None, link: LinkFacts | None) -> NodeView:
    node = each.node if each is not None else None
    return NodeView(
        node=name,
        state=_judge_node(each, link),
        connected=link is not None and link.connected,
        peer=link.peer if link else None,
        heard_seconds_ago=round(link.heard_seconds_ago, 1) if link else None,
        protocol=link.protocol if link else None,
        version=link.version if link else None,
        trunks=link.trunks if link else None,
        cores=node.cores if node else None,
        memory_gb=node.memory_gb if node else None,
        memory_available_gb=node.memory_available_gb if node else None,
        memory_booked_gb=each.booked_gb if each else None,
        disks=node.disks or None if node else None,
        engines=node.engines if node else None,
        replicas=tuple(replica.id for replica in each.replicas if replica.state is not ShardState.ENDED)
        if each
        else (),
    )


def _judge_node(each: NodeStatistics | None, link: LinkFacts | None) -> NodeState:
    if each is not None and each.lost:
        return NodeState.LOST
    if link is not None and link.connected:
        return NodeState.READY if each is not None else NodeState.JOINING
    return NodeState.SILENT


def view_engines(plugins: Found, nodes: Iterable[NodeView]) -> EnginesView:
    """The plugins by name, those that can't be used, and what each node has for them."""
    return EnginesView(
        plugins=tuple(
            _view_plugin(engine, plugins.origins.get(name)) for name, engine in sorted(plugins.engines.items())
        ),
        left_out=tuple(LeftOut(plugin=problem.key, reason=problem.message) for problem in plugins.problems),
        nodes=tuple(NodeEngines(node=node.node, state=node.state, engines=node.engines) for node in nodes),
    )


def _view_plugin(engine: Engine, origin: str | None) -> PluginView:
    info = engine.info
    return PluginView(
        name=engine.name,
        title=info.title,
        binary=info.default_binary,
        tasks=tuple(sorted(info.tasks)),
        cpu=info.cpu,
        tp=info.tensor_parallel,
        pp=info.pipeline_parallel,
        nodes=info.span_nodes,
        loras=info.loras,
        mmproj=info.projector,
        tool_parser=info.tool_parser,
        reasoning_parser=info.reasoning_parser,
        origin=origin,
    )


def lost_nodes(fleet: FleetStatistics) -> frozenset[NodeId]:
    return frozenset(each.node.id for each in fleet.nodes if each.lost)


def away_nodes(fleet: FleetStatistics, links: Iterable[LinkFacts]) -> frozenset[NodeId]:
    """Those that requests can't go to: lost, or without a link at the moment."""
    linked = {link.node for link in links if link.connected}
    return frozenset(each.node.id for each in fleet.nodes if each.lost or each.node.id not in linked)


def view_replicas(fleet: FleetStatistics, now: float) -> tuple[ReplicaView, ...]:
    """By id, those included whose model is gone from the catalog."""
    lost = lost_nodes(fleet)
    replicas = sorted((replica for node in fleet.nodes for replica in node.replicas), key=lambda replica: replica.id)
    return tuple(_view_replica(replica, now, unreachable=_is_unreachable(replica, lost)) for replica in replicas)


def _is_unreachable(replica: Replica, lost: frozenset[NodeId]) -> bool:
    return replica.shard.node in lost and replica.state is not ShardState.ENDED


def _view_replica(replica: Replica, now: float, *, unreachable: bool) -> ReplicaView:
    shard = replica.shard
    return ReplicaView(
        replica=replica.id,
        model=replica.model,
        profile=replica.profile,
        engine=shard.profile.engine,
        node=shard.node,
        shard=shard.id,
        epoch=shard.epoch,
        state=UNREACHABLE if unreachable else str(replica.state),
        seconds_in_state=round(max(now - replica.since, 0.0), 1),
        progress=replica.progress,
        cause=replica.cause,
        lines=replica.lines or None,
        kind=replica.kind,
        remedy=replica.remedy,
        context_length=replica.context_length,
        context_promised=shard.model.context_length,
        running=replica.load.running,
        waiting=replica.load.waiting,
        cache_used=replica.load.cache_used,
        prompt_tokens=replica.load.prompt_tokens,
        cached_tokens=replica.load.cached_tokens,
        steps=replica.load.steps,
    )


def view_model(each: ModelStatistics, lost: frozenset[NodeId], origin: Origin, where: str | None) -> ModelView:
    """``lost``: the nodes that requests can't go to."""
    ready = sum(replica.state is ShardState.READY and not _is_unreachable(replica, lost) for replica in each.replicas)
    # One that failed counts until its next try: it is missing, not unwanted.
    counted = sum(replica.state is not ShardState.STOPPING for replica in each.replicas)
    wanted = max(each.model.scaling.min, counted)
    if 0 < wanted <= ready:
        status, detail = ModelStatus.READY, _find_ailing(each)
    else:
        status, detail = _judge_model(each, lost, wanted)
    return ModelView(
        name=each.model.name,
        status=status,
        serving=ready > 0,
        ready=ready,
        wanted=wanted,
        origin=origin,
        aliases=each.model.aliases,
        where=where,
        detail=detail,
    )


def _find_ailing(each: ModelStatistics) -> str | None:
    """What is the matter with a replica that counts as ready: one that serves has nothing more to tell."""
    ailing = (replica for replica in each.replicas if replica.state is ShardState.READY and replica.progress)
    return next((f"{replica.id} on {replica.shard.node} {replica.progress}" for replica in ailing), None)


def _judge_model(each: ModelStatistics, lost: frozenset[NodeId], wanted: int) -> tuple[ModelStatus, str | None]:
    """What keeps it from being ready: what an operator can do something about comes first."""
    for replica in each.replicas:
        if replica.state is ShardState.ENDED:
            return ModelStatus.FAILED, f"{replica.id} ended on {replica.shard.node}: {replica.cause}"
    for replica in each.replicas:
        if _is_unreachable(replica, lost):
            return ModelStatus.UNREACHABLE, f"{replica.id} is on {replica.shard.node}, which is lost"
    for replica in each.replicas:
        if replica.state in _ON_ITS_WAY:
            return ModelStatus.LOADING, replica.progress
    if isinstance(each.verdict, Rejected):
        reasons = "; ".join(f"{no.node}: {no.detail}" for no in each.verdict.rejections)
        return ModelStatus.WAITING, reasons or "there is no node to run it"
    if any(replica.state is ShardState.STOPPING for replica in each.replicas):
        return ModelStatus.STOPPING, None
    if wanted:
        return ModelStatus.WAITING, None
    return (ModelStatus.ON_DEMAND if each.model.scaling.max else ModelStatus.STOPPED), None


def find_concerns(nodes: Iterable[NodeView], models: Iterable[ModelView]) -> list[Concern]:
    """What an operator should look at. No figures that always move: they are no news to whoever watches."""
    found = []
    for node in nodes:
        if node.state is NodeState.SILENT:
            found.append(Concern(kind="node", name=node.node, message="silent: its link is down"))
        elif node.state is NodeState.LOST:
            found.append(Concern(kind="node", name=node.node, message="lost: not heard for longer than its lease"))
        for each in node.engines or ():
            if each.broken is not None:
                message = f"{each.engine} can't be used ({' '.join(each.program)}): {each.broken}"
                found.append(Concern(kind="node", name=node.node, message=message))
    for model in models:
        ailing = model.status is ModelStatus.READY and model.detail is not None
        if ailing or model.status in {ModelStatus.FAILED, ModelStatus.WAITING, ModelStatus.UNREACHABLE}:
            message = f"{model.status}: {model.detail}" if model.detail else str(model.status)
            found.append(Concern(kind="model", name=model.name, message=message))
    return found


def count(states: Iterable[str]) -> Mapping[str, int]:
    return dict(sorted(Counter(states).items()))
