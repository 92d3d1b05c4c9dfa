"""Everything that can happen to the fleet. The mirror of effects.py, which lists everything it can ask for."""

from __future__ import annotations

from dataclasses import dataclass

from llmgw.core.model import Model, ModelName
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import ShardReport, ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogChanged:
    """The models that there are now, all of them."""

    models: tuple[Model, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRegistered:
    """A node's agent has started, or found us again: what the node has, and the shards that run there already."""

    node: Node
    running: tuple[tuple[ShardSpec, ShardReport], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReported:
    """A registered node says what it has now, and the revision of the desired set that it has last taken.

    ``applied`` None: it does not say.
    """

    node: Node
    applied: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node has been silent for longer than its lease. What it runs goes on, for all we know."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesExpected:
    """The server has begun anew: these nodes were there before, and what they run is not known until they have said so.

    Nothing is placed before all of them have registered, or ``until`` has come.
    """

    nodes: frozenset[NodeId]
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChanged:
    """A node says how one of its shards is."""

    node: NodeId
    report: ShardReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Somebody asked for a model that has no ready replica."""

    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Wakeup:
    """The time that an earlier WakeAt asked for has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """The program ends and nothing is to run any more (``serve`` and ``demo`` only)."""


Event = (
    CatalogChanged
    | NodesExpected
    | NodeRegistered
    | NodeReported
    | NodeLost
    | ShardChanged
    | Demand
    | Wakeup
    | Stopping
)
