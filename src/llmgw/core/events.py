"""Everything that can happen to the fleet. The mirror of effects.py, which lists everything it can ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmgw.core.learned import Fact
from llmgw.core.model import Model, ModelName
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import ReplicaId, ShardReport, ShardSpec
from llmgw.core.weights import NodeWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogChanged:
    """The models that there are now, all of them.

    ``proven`` is for a model the definition that it last served by, where that is known from an earlier server, and
    ``failed`` names those whose definition has failed before: they go on by the proven one. ``served`` are
    those that have served before: of models that have to be placed anew they come first.
    """

    models: tuple[Model, ...]
    proven: Mapping[ModelName, Model] = field(default_factory=dict, hash=False)
    failed: frozenset[ModelName] = frozenset()
    served: frozenset[ModelName] = frozenset()


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
class NodeSilent:
    """A node's link is down. Its lease goes on: what runs there keeps its place, and nothing new is put there until it
    has registered again."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMarked:
    """What an operator has said of a node, whether or not it is there: the whole of it, in place of what was said
    before. ``labels`` are laid over the node's own; a value of None takes one away.

    ``draining``: all that runs there is to run elsewhere, or not at all; ``drain_until`` is when it stops even so (of
    the fleet's clock), None where it may wait for room for ever. A draining node takes nothing new.
    """

    node: NodeId
    cordoned: bool = False
    draining: bool = False
    drain_until: float | None = None
    labels: Mapping[str, str | None] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRemoved:
    """An operator has removed a node that is lost, or that nothing runs on. Any other stays, and that is announced."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesChanged:
    """How patient the fleet is with nodes that are lost, in seconds: what ran on one is placed anew
    ``replace_after`` its lease has ended, and ``brake`` after that where most nodes were lost together."""

    replace_after: float
    brake: float


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
class WeightsReported:
    """A node says which weights it has and fetches: all of it, in place of what it said before."""

    node: NodeId
    weights: NodeWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How much a model is asked for at this moment: the whole of it, in place of what was said before.

    ``waiting`` requests wait for a replica; ``in_flight`` are answered, by replica (none is 0). Since the last word
    somebody was ``answered``, or has ``asked`` in vain and was told to come back: whoever hangs up is neither.
    ``answered_by`` are the replicas that have answered somebody for the first time, each with its epoch.
    """

    model: ModelName
    waiting: int = 0
    in_flight: Mapping[ReplicaId, int] = field(default_factory=dict, hash=False)
    asked: bool = False
    answered: bool = False
    answered_by: frozenset[tuple[ReplicaId, int]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalled:
    """An operator wants a model to load now, as somebody who asks for it would; and by its definition as it is written,
    though that has failed."""

    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """No request is in flight to a replica's epoch any more, since the ``Drain`` of this number asked for that word."""

    replica: ReplicaId
    epoch: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsHeld:
    """The models that an operator holds at zero, all of them, whatever their scaling says."""

    models: frozenset[ModelName]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRecalled:
    """An operator wants this epoch of a replica replaced: by another one first where there is room, else in place."""

    replica: ReplicaId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsKnown:
    """What launches have shown before this server began (``learned.Fact``)."""

    facts: tuple[Fact, ...]


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
    | NodeSilent
    | NodeLost
    | NodeMarked
    | NodeRemoved
    | RulesChanged
    | ShardChanged
    | WeightsReported
    | Demand
    | ModelCalled
    | Drained
    | ModelsHeld
    | ReplicaRecalled
    | FactsKnown
    | Wakeup
    | Stopping
)
