"""Why a model is where it is, and where one more replica of it would go, as the operator port shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llmgw.admin.views import DecisionView, ExplanationView
from llmgw.config.definition import Definition
from llmgw.core.fleet import Fleet
from llmgw.core.hosts import Host
from llmgw.core.model import Model, launch_facts
from llmgw.core.picture import FleetStatistics, NodeStatistics
from llmgw.core.placement import Explanation, explain
from llmgw.core.replica import Replica, ReplicaId, ShardState
from llmgw.core.trace import Decision
from llmgw.server.looking import view_replicas


def explain_model(fleet: Fleet, model: Model, explanation: Explanation, now: float) -> ExplanationView:
    """Of a model that there is."""
    return ExplanationView(
        explanation=explanation,
        wanted=fleet.wanted(model, now),
        most=model.scaling.max,
        replicas=tuple(each for each in view_replicas(fleet.statistics(), now) if each.model == model.name),
        decisions=view_decisions(fleet.trace.of(model.name), now),
        held_up=fleet.held_up(now),
    )


def explain_written(definition: Definition, fleet: FleetStatistics, held_up: str | None, now: float) -> ExplanationView:
    """Of one that is only written, as if it stood in the catalog, in the place of the model of its name if there is
    one: replicas that it would not launch itself have stopped, and what failed before is forgotten."""
    model = definition.model
    stops = _find_stops(model, fleet)
    hosts = [_without(each, stops) for each in fleet.nodes]
    return ExplanationView(
        explanation=explain(model, hosts, {}, now),
        wanted=model.scaling.min,
        most=model.scaling.max,
        what_if=True,
        replicas=tuple(each for each in view_replicas(fleet, now) if each.model == model.name),
        stops=tuple(sorted(stops)),
        held_up=held_up,
    )


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


def _without(each: NodeStatistics, stopped: frozenset[ReplicaId]) -> Host:
    """The node, once these have stopped and given back what was booked for them."""
    gone = [replica for replica in each.replicas if replica.id in stopped and _is_booked(replica, each)]
    if not gone:
        return each.host
    host = each.host
    counts = dict(host.replicas)
    for replica in gone:
        counts[replica.model] = counts.get(replica.model, 0) - 1
    return replace(
        host,
        booked_gb=host.booked_gb - sum(replica.shard.profile.min_memory_gb or 0.0 for replica in gone),
        booked={uuid: replica for uuid, replica in host.booked.items() if replica not in stopped},
        replicas={name: count for name, count in counts.items() if count > 0},
    )


def _is_booked(replica: Replica, each: NodeStatistics) -> bool:
    return any(shard.spec.node == each.node.id and shard.state is not ShardState.ENDED for shard in replica.shards)
