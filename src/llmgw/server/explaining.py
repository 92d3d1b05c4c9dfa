"""Why a model is where it is, and where one more replica of it would go, as the operator port shows it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from llmgw.admin.views import DecisionView, ExplanationView
from llmgw.core.crews import STOPPING_SECONDS
from llmgw.core.fleet import Fleet
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import Model, ModelName, launch_facts
from llmgw.core.node import NodeId
from llmgw.core.picture import FleetStatistics, NodeStatistics
from llmgw.core.placement import NOBODY, Explanation, Placement, Rejected, explain, place
from llmgw.core.replica import Replica, ReplicaId, ShardState, replica_id
from llmgw.core.trace import Decision
from llmgw.server.looking import view_replicas
from llmgw.units import format_duration


def explain_model(fleet: Fleet, model: Model, explanation: Explanation, now: float) -> ExplanationView:
    """Of a model that there is."""
    return ExplanationView(
        explanation=explanation,
        numbers=fleet.figures(model),
        evicts=_tell_eviction(fleet, model, explanation, now),
        wanted=fleet.wanted(model, now),
        most=model.scaling.max,
        replicas=tuple(each for each in view_replicas(fleet.statistics(), now) if each.model == model.name),
        decisions=view_decisions(fleet.trace.of(model.name), now),
        held_up=fleet.held_up(now),
    )


def _tell_eviction(fleet: Fleet, model: Model, explanation: Explanation, now: float) -> str | None:
    if explanation.placement is not None:
        return None
    found = fleet.would_evict(model, now)
    if not isinstance(found, float):
        return f"{found} is idle, and would make way for it"
    if found == math.inf:
        return None
    return f"an idle replica may make way for it in {format_duration(math.ceil(found - now))}"


def explain_written(
    models: Sequence[Model],
    fleet: FleetStatistics,
    now: float,
    *,
    away: Mapping[NodeId, Standing] = NOBODY,
    held_up: str | None = None,
) -> tuple[ExplanationView, ...]:
    """Of models that are only written, as if they stood in the catalog, in the place of those of their names that there
    are: what they would not launch themselves has stopped, and what failed before is forgotten. Each of them comes
    after those before it have got the replicas that they ask for."""
    stops = {model.name: _find_stops(model, fleet) for model in models}
    gone = frozenset[ReplicaId]().union(*stops.values())
    hosts = {each.node.id: _without(each, gone, now) for each in fleet.nodes}
    running = view_replicas(fleet, now)
    views: list[ExplanationView] = []
    for model in models:
        explanation = explain(model, list(hosts.values()), {}, now, away=away)
        theirs = tuple(each for each in running if each.model == model.name)
        taken = {each.replica for each in theirs if each.replica not in gone and each.state != ShardState.ENDED}
        missing = max(model.scaling.min - len(taken), 0)
        views.append(
            ExplanationView(
                explanation=explanation,
                wanted=model.scaling.min,
                most=model.scaling.max,
                what_if=True,
                replicas=theirs,
                stops=tuple(sorted(stops[model.name])),
                missing=missing,
                places=_fill(hosts, model, explanation.placement, missing, taken),
                held_up=held_up,
            )
        )
    return tuple(views)


def _fill(
    hosts: dict[NodeId, Host],
    model: Model,
    first: Placement | None,
    missing: int,
    taken: Collection[str],
) -> int:
    """Book so many replicas one after the other, as far as they find a place; how many did."""
    names = (name for number in itertools.count(1) if (name := replica_id(model.name, number)) not in taken)
    verdict: Placement | Rejected | None = first
    for count in range(missing):
        if not isinstance(verdict, Placement):
            return count
        _book(hosts, model.name, verdict, next(names))
        if count + 1 < missing:
            verdict = place(model, list(hosts.values()), {}, 0.0)
    return missing


def _book(hosts: dict[NodeId, Host], name: ModelName, placement: Placement, replica: ReplicaId) -> None:
    for shard in placement.shards:
        host = hosts[shard.node]
        hosts[shard.node] = replace(
            host,
            booked_gb=host.booked_gb + (placement.profile.min_memory_gb or 0.0),
            booked={**host.booked, **dict.fromkeys(shard.gpus or (), replica)},
            replicas={**host.replicas, name: host.replicas.get(name, 0) + 1},
        )


def see_hosts(fleet: FleetStatistics, now: float) -> list[Host]:
    """The nodes as placement sees them, with what is on its way out told as such."""
    return [_see(each, now) for each in fleet.nodes]


def _see(each: NodeStatistics, now: float) -> Host:
    leaving: dict[ReplicaId, float] = {}
    for replica in each.replicas:
        for shard in replica.shards:
            # What has not ended by then may never.
            stopping = shard.state is ShardState.STOPPING and now < shard.since + STOPPING_SECONDS
            going = stopping or replica.draining is not None
            if shard.spec.node == each.node.id and going:
                leaving[replica.id] = leaving.get(replica.id, 0.0) + (shard.spec.profile.min_memory_gb or 0.0)
    return replace(each.host, leaving=leaving) if leaving else each.host


def find_away(fleet: FleetStatistics, seen: Collection[NodeId]) -> Mapping[NodeId, Standing]:
    """Of the nodes that were here before this start those that have not come since."""
    here = {each.node.id for each in fleet.nodes}
    return {
        node: Standing.LOST if node in fleet.absent else Standing.SILENT for node in sorted(seen) if node not in here
    }


def view_decisions(decisions: Iterable[Decision], now: float) -> tuple[DecisionView, ...]:
    return tuple(
        DecisionView(
            seconds_ago=round(max(now - each.at, 0.0), 1),
            model=each.model,
            why=each.why,
            replica=each.replica,
            profile=each.profile,
            nodes=each.nodes,
            reasons=each.reasons or None,
        )
        for each in decisions
    )


def _find_stops(model: Model, fleet: FleetStatistics) -> frozenset[ReplicaId]:
    """The replicas of its name that the fleet would stop if this were the model's definition."""
    defined = [launch_facts(model, profile) for profile in model.profiles]
    return frozenset(
        replica.id
        for each in fleet.nodes
        for replica in each.replicas
        if replica.model == model.name
        and replica.state is not ShardState.ENDED
        and launch_facts(replica.shard.model, replica.shard.profile) not in defined
    )


def _without(each: NodeStatistics, stopped: frozenset[ReplicaId], now: float) -> Host:
    """The node, once these have stopped and given back what was booked for them."""
    gone = [replica for replica in each.replicas if replica.id in stopped and _is_booked(replica, each)]
    host = _see(each, now)
    if not gone:
        return host
    counts = dict(host.replicas)
    for replica in gone:
        counts[replica.model] = counts.get(replica.model, 0) - 1
    return replace(
        host,
        booked_gb=host.booked_gb - sum(replica.shard.profile.min_memory_gb or 0.0 for replica in gone),
        booked={uuid: replica for uuid, replica in host.booked.items() if replica not in stopped},
        leaving={replica: gb for replica, gb in host.leaving.items() if replica not in stopped},
        replicas={name: count for name, count in counts.items() if count > 0},
    )


def _is_booked(replica: Replica, each: NodeStatistics) -> bool:
    return any(shard.spec.node == each.node.id and shard.state is not ShardState.ENDED for shard in replica.shards)
