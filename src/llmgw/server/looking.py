"""The models, replicas and engines, and what is the matter with any, as the operator port shows them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

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
    ShardView,
    StoreView,
)
from llmgw.core.node import FAKE_TROUBLE, NodeId
from llmgw.core.picture import FleetStatistics, ModelStatistics, NodeStatistics
from llmgw.core.placement import Rejected
from llmgw.core.replica import Replica, ReplicaId, Shard, ShardState
from llmgw.core.rolling import defines
from llmgw.core.weights import Fetch
from llmgw.engines.registry import Engine, Found
from llmgw.server.machines import LinkFacts, find_ailments
from llmgw.server.shortage import find_shortage
from llmgw.server.stock import show_fetch

UNREACHABLE = "unreachable"
# How far that is stands in figures of their own, which move all the time.
FETCHES = "fetches its weights"
# Nodes that are named with their reasons in one line.
FEW = 4
_ON_ITS_WAY = {
    ShardState.PLACED,
    ShardState.PREPARING,
    ShardState.PREPARED,
    ShardState.LAUNCHING,
    ShardState.LOADING,
}


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


def view_replicas(
    fleet: FleetStatistics, now: float, in_flight: Mapping[ReplicaId, int] | None = None
) -> tuple[ReplicaView, ...]:
    """By id, those included whose model is gone from the catalog; ``in_flight`` are the requests that each answers, of
    its last epoch, where they are counted."""
    lost = lost_nodes(fleet)
    # One of several nodes is there once for each of them.
    found = {(replica.id, replica.epoch, replica.nodes): replica for node in fleet.nodes for replica in node.replicas}
    last: dict[ReplicaId, int] = {}
    for name, epoch, _ in found:
        last[name] = max(epoch, last.get(name, epoch))
    return tuple(
        _view_replica(
            replica,
            now,
            lost=lost if _is_unreachable(replica, lost) else frozenset(),
            in_flight=None if in_flight is None or last[name] != epoch else in_flight.get(name, 0),
        )
        for (name, epoch, _), replica in sorted(found.items())
    )


def _is_unreachable(replica: Replica, lost: frozenset[NodeId]) -> bool:
    return not lost.isdisjoint(replica.nodes) and replica.state is not ShardState.ENDED


def _view_replica(replica: Replica, now: float, *, lost: frozenset[NodeId], in_flight: int | None) -> ReplicaView:
    shard = replica.shard
    # How far those were that are lost, nobody knows by now.
    away = [f"{node} is lost" for node in replica.nodes if node in lost]
    progress = replica.progress if replica.fetch is None else FETCHES
    return ReplicaView(
        replica=replica.id,
        model=replica.model,
        profile=replica.profile,
        engine=shard.profile.engine,
        node=shard.node,
        shard=shard.id,
        epoch=shard.epoch,
        state=UNREACHABLE if away else str(replica.state),
        seconds_in_state=round(max(now - replica.since, 0.0), 1),
        draining=replica.draining,
        in_flight=in_flight if replica.state is ShardState.READY else None,
        progress=", ".join(away) or progress,
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
        fabric=shard.fabric,
        fetch=None if away else show_fetch(replica.fetch),
        shards=tuple(_view_shard(each, now, lost) for each in replica.shards),
    )


def _view_shard(shard: Shard, now: float, lost: frozenset[NodeId]) -> ShardView:
    is_away = shard.spec.node in lost and shard.state is not ShardState.ENDED
    progress = shard.progress if shard.fetch is None else FETCHES
    return ShardView(
        shard=shard.spec.id,
        node=shard.spec.node,
        rank=shard.spec.rank,
        state=UNREACHABLE if is_away else str(shard.state),
        seconds_in_state=round(max(now - shard.since, 0.0), 1),
        gpus=shard.spec.gpus,
        progress=f"{shard.spec.node} is lost" if is_away else progress,
        cause=shard.cause,
        kind=shard.kind,
        lines=shard.lines or None,
        fetch=None if is_away else show_fetch(shard.fetch),
    )


UNSEEN = "not placed yet: it may run on a node that this server has not heard since it began"


def view_model(
    each: ModelStatistics,
    lost: frozenset[NodeId],
    origin: Origin,
    where: str | None,
    *,
    failure: str | None = None,
    held_up: bool = False,
) -> ModelView:
    """``lost``: the nodes that requests can't go to. ``failure`` is why its definition has failed, where an earlier
    server has seen that: this one's fleet was only told that it has. ``held_up``: nothing is placed that
    may run on a node that the server has not heard yet."""
    # Of a replica that was placed anew the earlier epoch is still there, on a node that is lost or has to stop it.
    each = replace(each, replicas=tuple({replica.id: replica for replica in each.replicas}.values()))
    ready = sum(
        replica.state is ShardState.READY and not replica.draining and not _is_unreachable(replica, lost)
        for replica in each.replicas
    )
    # One that failed counts until its next try: it is missing, not unwanted; one that is to go is not.
    counted = sum(replica.state is not ShardState.STOPPING and not replica.draining for replica in each.replicas)
    wanted = 0 if each.held else max(each.model.scaling.min, min(counted, each.model.scaling.max))
    failed = None if each.failed is None else failure or each.failed.why
    rolling = _tell_rollout(each)
    if 0 < wanted <= ready:
        status, detail = ModelStatus.READY, _find_ailing(each)
    else:
        status, detail = _judge_model(each, lost, wanted, held_up)
    if failed is not None:
        # Whatever else there is to tell: this waits for somebody who does something about it.
        goes_on = _tell_going_on(status, detail)
        detail = f"the definition{f' in {where}' if where else ''} failed: {failed}; the one before {goes_on}"
    elif rolling is not None and status is ModelStatus.READY:
        detail = rolling
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
        held=each.held,
        rolling=rolling,
        failed=failed,
        fetch=_find_fetch(each) if status is ModelStatus.LOADING else None,
    )


def _find_fetch(each: ModelStatistics) -> Fetch | None:
    """What keeps the replica from loading that will be there first."""
    found = [replica.fetch for replica in each.replicas if replica.fetch is not None and replica.state in _ON_ITS_WAY]
    return show_fetch(min(found, key=_left_seconds, default=None))


def _left_seconds(fetch: Fetch) -> float:
    return math.inf if fetch.left_seconds is None else fetch.left_seconds


def _tell_going_on(status: ModelStatus, detail: str | None) -> str:
    """What the definition does that runs in the place of one that has failed."""
    if status is ModelStatus.WAITING:
        return f"waits for a place: {detail}" if detail else "waits for a place"
    if status is ModelStatus.FAILED:
        return f"has failed too: {detail}"
    return "goes on"


def _tell_rollout(each: ModelStatistics) -> str | None:
    """What is on its way from one definition to another, and what that waits for."""
    if each.rollout is None or each.held:
        return None
    going = {replica.id for replica in each.replicas if replica.draining is not None}
    stay = [name for name in each.rollout.outdated if name not in going]
    leave = [name for name in each.rollout.outdated if name in going]
    told = []
    if stay:
        told.append(f"{', '.join(stay)} {'runs' if len(stay) == 1 else 'run'} by the earlier definition")
    if leave:
        verb = "answers" if len(leave) == 1 else "answer"
        told.append(f"{', '.join(leave)} still {verb} requests by {'it' if stay else 'the earlier definition'}")
    if each.rollout.waits:
        told.append(f"the next waits for room: {each.rollout.waits}")
    return f"rolling: {', and '.join(told)}"


def _find_ailing(each: ModelStatistics) -> str | None:
    """What is the matter with a replica that counts as ready: one that serves has nothing more to tell."""
    ailing = (replica for replica in each.replicas if replica.state is ShardState.READY and replica.progress)
    return next((f"{replica.id} on {replica.shard.node} {replica.progress}" for replica in ailing), None)


def _judge_model(
    each: ModelStatistics, lost: frozenset[NodeId], wanted: int, held_up: bool
) -> tuple[ModelStatus, str | None]:
    """What keeps it from being ready: what an operator can do something about comes first."""
    if each.held:
        going = any(replica.state is not ShardState.ENDED for replica in each.replicas)
        status = ModelStatus.STOPPING if going else ModelStatus.STOPPED
        return status, f"an operator has stopped it: `llmgw ctl load {each.model.name}` ends that"
    ended = next((replica for replica in each.replicas if replica.state is ShardState.ENDED), None)
    why = None if ended is None else f"{ended.id} ended on {ended.shard.node}: {ended.cause}"
    if ended is not None and each.retries and not defines(each.model, ended.shard):
        # What speaks against its definition as it is written says nothing of this one.
        return ModelStatus.FAILED, f"{why}; it is tried again by the earlier definition"
    # What has failed long ago and finds no room any more can't be tried again: that is what is the matter with it.
    if why is not None and find_shortage(each.verdict) is None:
        return ModelStatus.FAILED, why
    for replica in each.replicas:
        if _is_unreachable(replica, lost):
            away = next(node for node in replica.nodes if node in lost)
            return ModelStatus.UNREACHABLE, f"{replica.id} is on {away}, which is lost"
    for replica in each.replicas:
        if replica.state in _ON_ITS_WAY:
            return ModelStatus.LOADING, replica.progress if replica.fetch is None else FETCHES
    if isinstance(each.verdict, Rejected):
        waits = tell_reasons(each.model.name, each.verdict)
        return ModelStatus.WAITING, waits if why is None else f"{waits} (before that {why})"
    if any(replica.state is ShardState.STOPPING or replica.draining for replica in each.replicas):
        return ModelStatus.STOPPING, None
    if wanted:
        # (for how long is told once, of all)
        return ModelStatus.WAITING, UNSEEN if held_up else None
    return (ModelStatus.ON_DEMAND if each.model.scaling.max else ModelStatus.STOPPED), None


def tell_reasons(name: str, verdict: Rejected) -> str:
    """A few nodes are named each with its reason; of many the reasons are counted."""
    if sum(verdict.reasons().values()) <= FEW:
        return "; ".join(f"{no.node}: {no.detail}" for no in verdict.rejections) or "there is no node to run it"
    return f"no node can run it ({verdict.counted()}): `llmgw ctl explain-placement {name}` tells of each"


def find_concerns(
    nodes: Iterable[NodeView], machines: Mapping[NodeId, NodeStatistics], models: Iterable[ModelView]
) -> list[Concern]:
    """What an operator should look at. No figures that always move: they are no news to whoever watches."""
    found = [
        Concern(kind="node", name=node.node, message=message)
        for node in nodes
        for message in _concerns_of(node, machines.get(NodeId(node.node)))
    ]
    for model in models:
        # (a rollout is on its way)
        ailing = model.status is ModelStatus.READY and model.detail not in (None, model.rolling)
        if ailing or model.failed or model.status in {ModelStatus.FAILED, ModelStatus.WAITING, ModelStatus.UNREACHABLE}:
            message = f"{model.status}: {model.detail}" if model.detail else str(model.status)
            found.append(Concern(kind="model", name=model.name, message=message))
    return found


def _concerns_of(view: NodeView, each: NodeStatistics | None) -> Iterator[str]:
    if view.state is NodeState.SILENT:
        yield "silent: its link is down"
    elif view.state is NodeState.LOST:
        yield "lost: not heard for longer than its lease"
    elif each is not None:
        # (what one that is away said last may be mended by now)
        yield from find_ailments(each, view.clock_skew_seconds)
        yield from (line for line in each.node.warnings if line.startswith(FAKE_TROUBLE))
    if view.draining and view.drain_waits_for is not None:
        yield f"draining: {view.drain_waits_for}"
    for found in view.engines or ():
        if found.broken is not None:
            yield f"{found.engine} can't be used ({' '.join(found.program)}): {found.broken}"


def concerns_of_store(store: StoreView) -> Iterator[Concern]:
    if store.failing is not None:
        yield Concern(kind="store", name=store.where, message=store.failing)


def count(states: Iterable[str]) -> Mapping[str, int]:
    return dict(sorted(Counter(states).items()))
