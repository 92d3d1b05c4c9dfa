"""The whole fleet at one moment, for people and programs that look on; never a basis for a change."""

from __future__ import annotations

from dataclasses import dataclass

from llmgw.core.brake import Brake
from llmgw.core.catalog import Catalog
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import Model, ModelName
from llmgw.core.node import Node, NodeId
from llmgw.core.placement import Verdict
from llmgw.core.replica import Replica
from llmgw.core.roster import Roster


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
class ModelStatistics:
    """A model, its replicas (a failed one stays until its next try), and the last answer when one was to be placed."""

    model: Model
    replicas: tuple[Replica, ...]
    verdict: Verdict | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatistics:
    """The whole fleet at one moment: nodes by id, models as in the catalog, replicas by id.

    ``absent`` are the nodes that were there before the server began anew, and have not come back in time.
    """

    nodes: tuple[NodeStatistics, ...]
    models: tuple[ModelStatistics, ...]
    absent: tuple[NodeId, ...] = ()
    brake: Brake | None = None


def picture(
    roster: Roster,
    catalog: Catalog,
    verdicts: dict[ModelName, Verdict],
    absent: tuple[NodeId, ...],
    brake: Brake | None,
) -> FleetStatistics:
    """Everything as it is now."""
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
                verdict=verdicts.get(model.name),
            )
            for model in catalog
        ),
        absent=absent,
        brake=brake,
    )
