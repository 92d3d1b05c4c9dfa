"""The whole fleet at one moment, for people and programs that look on; never a basis for a change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmgw.core.brake import Brake
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import Model, ModelName
from llmgw.core.node import Node, NodeId
from llmgw.core.placement import Rejected, Verdict
from llmgw.core.replica import Replica, ReplicaId, Shard, ShardState
from llmgw.core.rolling import Failed, Rollout
from llmgw.core.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatistics:
    """A node as placement sees it, since when it is lost (None: it is not), and the replicas that have a shard there
    (ended ones book nothing)."""

    host: Host
    lost_at: float | None
    revision: int
    replicas: tuple[Replica, ...]

    @property
    def node(self) -> Node:
        return self.host.node

    @property
    def lost(self) -> bool:
        return self.host.standing is Standing.LOST

    @property
    def booked_gb(self) -> float:
        return self.host.booked_gb


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """A node that is to be drained: when what is left stops all the same (None: it may wait for ever), and the replicas
    that are left."""

    until: float | None
    left: tuple[ReplicaId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """A model, its replicas (a failed one stays until its next try), and the last answer when one was to be placed.
    ``retries``: it is tried again in a moment, wherever it has failed.

    ``held``: an operator holds it at zero. ``rollout`` is there while replicas of it run by an earlier definition, and
    ``failed`` where the one that is written has not come to serve and the one before goes on.
    """

    model: Model
    replicas: tuple[Replica, ...]
    verdict: Verdict | None
    retries: bool = False
    held: bool = False
    rollout: Rollout | None = None
    failed: Failed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatistics:
    """The whole fleet at one moment: nodes by id, models as in the catalog, replicas by id.

    ``absent`` are the nodes that were there before the server began anew, and have not come back in time. ``reserved``
    has of each model the shards that have ended and whose room is kept for its next replica.
    """

    nodes: tuple[NodeStatistics, ...]
    models: tuple[ModelStatistics, ...]
    absent: tuple[NodeId, ...] = ()
    brake: Brake | None = None
    draining: Mapping[NodeId, Draining] = field(default_factory=dict)
    reserved: Mapping[ModelName, tuple[Shard, ...]] = field(default_factory=dict)


def picture(state: State, brake: Brake | None) -> FleetStatistics:
    """Everything as it is now."""
    roster = state.roster
    on_node: dict[NodeId, list[Replica]] = {}
    of_model: dict[ModelName, list[Replica]] = {}
    for replica in sorted((life.replica for life in roster.lives.values()), key=lambda each: (each.id, each.epoch)):
        of_model.setdefault(replica.model, []).append(replica)
        for node in replica.nodes:
            on_node.setdefault(node, []).append(replica)
    return FleetStatistics(
        nodes=tuple(
            NodeStatistics(
                host=roster.host(member),
                lost_at=roster.lost_at.get(name),
                revision=member.revision,
                replicas=tuple(on_node.get(name, ())),
            )
            for name, member in sorted(roster.members.items())
        ),
        models=tuple(
            ModelStatistics(
                model=model,
                replicas=tuple(of_model.get(model.name, ())),
                verdict=state.verdicts.get(model.name),
                retries=model.name in state.retry_at,
                held=model.name in state.held,
                rollout=_find_rollout(state, model.name),
                failed=state.rolls.failed(model.name),
            )
            for model in state.catalog
        ),
        absent=tuple(sorted(state.absent)),
        reserved=dict(roster.reserved),
        brake=brake,
        draining={
            name: Draining(until=mark.drain_until, left=tuple(filter(None, map(_name_alive, on_node.get(name, ())))))
            for name in sorted(roster.members)
            if (mark := roster.marked(name)) is not None and mark.draining
        },
    )


def _name_alive(replica: Replica) -> ReplicaId | None:
    return replica.id if replica.state is not ShardState.ENDED else None


def _find_rollout(state: State, name: ModelName) -> Rollout | None:
    outdated = sorted(
        life.replica.id
        for life in state.roster.of(name)
        if life.alive and state.roster.is_desired(life) and not state.is_defined(life.replica.shard)
    )
    if not outdated:
        return None
    verdict = state.verdicts.get(name)
    return Rollout(outdated=tuple(outdated), waits=verdict.counted() if isinstance(verdict, Rejected) else None)
