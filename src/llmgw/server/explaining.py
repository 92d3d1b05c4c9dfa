"""Why a model is where it is, and where one more replica of it would go, as the operator port shows it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from llmgw.admin.views import DecisionView, ExplanationView
from llmgw.core.crews import STOPPING_SECONDS
from llmgw.core.fleet import Fleet
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import Model, ModelName, launch_facts
from llmgw.core.node import NodeId
from llmgw.core.picture import FleetStatistics, NodeStatistics
from llmgw.core.placement import NOBODY, Explanation, Placement, Rejected, explain, place
from llmgw.core.replica import ReplicaId, ShardState, booked_gb_of, replica_id
from llmgw.core.searching import fits_soon
from llmgw.core.trace import Decision
from llmgw.server.looking import view_replicas
from llmgw.units import format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model as it is launched, and as it is ``filled`` with what was measured; the nodes as it finds them, and what
    else the answer depends on (``placement.explain``). ``serves``: a replica of it does."""

    model: Model
    filled: Model
    hosts: Sequence[Host]
    now: float
    backing_off: Mapping[NodeId, float] = field(default_factory=dict)
    failed: Mapping[NodeId, int] = field(default_factory=dict)
    away: Mapping[NodeId, Standing] = field(default_factory=dict)
    serves: bool = False

    def explain(self) -> Answer:
        """As the fleet looks for a place: by what is written alone where what was measured leaves none, nothing of the
        model serves, and there is nothing that will be over in a moment."""
        found = self._explain(self.filled)
        if found.placement is not None or self.filled is self.model or self.serves or self._may_wait():
            return Answer(explanation=found)
        unfilled = self._explain(self.model)
        return Answer(explanation=found, unfilled=unfilled if unfilled.placement is not None else None)

    def _may_wait(self) -> bool:
        return fits_soon(self.filled, self.hosts, self.backing_off, self.now, failed=self.failed)

    def _explain(self, model: Model) -> Explanation:
        return explain(model, self.hosts, self.backing_off, self.now, failed=self.failed, away=self.away)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``unfilled`` is what holds in its place where no idle replica makes way."""

    explanation: Explanation
    unfilled: Explanation | None = None


def explain_model(fleet: Fleet, model: Model, answer: Answer, now: float) -> ExplanationView:
    """Of a model that there is."""
    explanation, evicts, makes_way = answer.explanation, *_find_eviction(fleet, model, answer.explanation, now)
    unfilled = answer.unfilled if not makes_way else None
    return ExplanationView(
        explanation=explanation if unfilled is None else unfilled,
        unfilled=unfilled is not None,
        numbers=fleet.figures(model),
        evicts=evicts if unfilled is None else None,
        wanted=fleet.wanted(model, now),
        most=model.scaling.max,
        replicas=tuple(each for each in view_replicas(fleet.statistics(), now) if each.model == model.name),
        decisions=view_decisions(fleet.trace.of(model.name), now),
        held_up=fleet.held_up(now),
    )


def _find_eviction(fleet: Fleet, model: Model, explanation: Explanation, now: float) -> tuple[str | None, bool]:
    """Which idle replica makes way for it, or when one will; and whether that is now."""
    if explanation.placement is not None:
        return None, False
    found = fleet.would_evict(model, now)
    if not isinstance(found, float):
        return f"{found} is idle, and would make way for it", True
    if found == math.inf:
        return None, False
    return f"an idle replica may make way for it in {format_duration(math.ceil(found - now))}", False


def explain_written(
    models: Sequence[Model],
    fleet: FleetStatistics,
    now: float,
    *,
    filled: Mapping[ModelName, Model] = MappingProxyType({}),
    away: Mapping[NodeId, Standing] = NOBODY,
    held_up: str | None = None,
) -> tuple[ExplanationView, ...]:
    """Of models that are only written, as if they stood in the catalog, in the place of those of their names that there
    are: what they would not launch themselves has stopped, and what failed before is forgotten. Each of them comes
    after those before it have got the replicas that they ask for. ``filled``: these with what was measured."""
    stops = {model.name: _find_stops(model, fleet) for model in models}
    gone = frozenset[ReplicaId]().union(*stops.values())
    own = frozenset(model.name for model in models)
    hosts = {each.node.id: _without(each, gone, _free_kept(_see(each, now), own)) for each in fleet.nodes}
    running = view_replicas(fleet, now)
    views: list[ExplanationView] = []
    for model in models:
        theirs = tuple(each for each in running if each.model == model.name)
        taken = {each.replica for each in theirs if each.replica not in gone and each.state != ShardState.ENDED}
        missing = max(model.scaling.min - len(taken), 0)
        by = filled.get(model.name, model)
        serves = any(each.replica in taken and each.state == ShardState.READY for each in theirs)
        answer = Question(
            model=model, filled=by, hosts=list(hosts.values()), now=now, away=away, serves=serves
        ).explain()
        explanation = answer.unfilled or answer.explanation
        views.append(
            ExplanationView(
                explanation=explanation,
                unfilled=answer.unfilled is not None,
                wanted=model.scaling.min,
                most=model.scaling.max,
                what_if=True,
                replicas=theirs,
                stops=tuple(sorted(stops[model.name])),
                missing=missing,
                places=_fill(hosts, by if answer.unfilled is None else model, explanation.placement, missing, taken),
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


def see_hosts(fleet: FleetStatistics, model: ModelName, now: float) -> list[Host]:
    """The nodes as this model finds them, with what is on its way out told as such."""
    return [_free_kept(_see(each, now), {model}) for each in fleet.nodes]


def is_served(fleet: FleetStatistics, name: ModelName) -> bool:
    """Whether a replica of it can answer requests."""
    lost = {each.node.id for each in fleet.nodes if each.lost_at is not None}
    return any(
        replica.state is ShardState.READY and not lost.intersection(replica.nodes)
        for each in fleet.models
        if each.model.name == name
        for replica in each.replicas
    )


def _free_kept(host: Host, names: Collection[ModelName]) -> Host:
    """The node with the room that is kept for these models free."""
    free = {uuid for uuid, model in host.kept.items() if model in names}
    rest_gb = {model: gb for model, gb in host.kept_gb.items() if model not in names}
    if not free and len(rest_gb) == len(host.kept_gb):
        return host
    return replace(
        host,
        booked_gb=host.booked_gb - sum(host.kept_gb.values()) + sum(rest_gb.values()),
        booked={uuid: replica for uuid, replica in host.booked.items() if uuid not in free},
        kept={uuid: model for uuid, model in host.kept.items() if uuid not in free},
        kept_gb=rest_gb,
    )


def _see(each: NodeStatistics, now: float) -> Host:
    leaving: dict[ReplicaId, float] = {}
    for replica in each.replicas:
        for shard in replica.shards:
            # What has not ended by then may never.
            stopping = shard.state is ShardState.STOPPING and now < shard.since + STOPPING_SECONDS
            going = stopping or replica.draining is not None
            if shard.spec.node == each.node.id and going:
                leaving[replica.id] = leaving.get(replica.id, 0.0) + booked_gb_of(shard)
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


def _without(each: NodeStatistics, stopped: frozenset[ReplicaId], host: Host) -> Host:
    """The node, once these have stopped and given back what was booked for them."""
    gone = [
        (replica, shard)
        for replica in each.replicas
        if replica.id in stopped
        for shard in replica.shards
        if shard.spec.node == each.node.id and shard.state is not ShardState.ENDED
    ]
    if not gone:
        return host
    counts = dict(host.replicas)
    for replica, _ in gone:
        counts[replica.model] = counts.get(replica.model, 0) - 1
    return replace(
        host,
        booked_gb=host.booked_gb - sum(booked_gb_of(shard) for _, shard in gone),
        booked={uuid: replica for uuid, replica in host.booked.items() if replica not in stopped},
        leaving={replica: gb for replica, gb in host.leaving.items() if replica not in stopped},
        replicas={name: count for name, count in counts.items() if count > 0},
    )
