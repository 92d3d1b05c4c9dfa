"""Everything the fleet can ask for. The mirror of events.py, which lists everything that can happen to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from llmgw.core.learned import Fact
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import ReplicaId, ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Desire:
    """The whole of what a node is to run. A higher revision replaces a lower one; it is never a delta."""

    node: NodeId
    revision: int
    shards: tuple[ShardSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Say ``Drained`` with this number as soon as no request is in flight to this epoch of a replica. No new one goes
    there: it is out of what is ready already."""

    replica: ReplicaId
    epoch: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A model has served by this definition for a while: it is what to return to when a later one fails."""

    model: Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Reverted:
    """A model's new definition has failed, and it goes on by the one before (``by``)."""

    model: Model
    by: Model
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn:
    """Keep what a launch has shown, in place of what was kept under this key."""

    fact: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send a Wakeup at ``at`` (seconds of the same clock as ``now``). Only the earliest outstanding one matters."""

    at: float


class Happening(StrEnum):
    """What an Announce tells of, in one word."""

    PLACED = "placed"
    WAITING = "waiting"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"
    ADOPTED = "adopted"
    EVICTED = "evicted"
    ROLLING = "rolling"
    ROLLED = "rolled"
    REVERTED = "reverted"
    NODE = "node"
    FETCHING = "fetching"
    FETCHED = "fetched"
    COLLECTED = "collected"
    BRAKE = "brake"
    MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Something worth a log line and a place among the events, and a reason for whoever waits on this model (None: on
    any) to look again. ``again``: the log has had such ``lines`` before, and leaves these out."""

    model: ModelName | None
    text: str
    lines: tuple[str, ...] = ()
    again: bool = False
    warning: bool = False
    what: Happening = Happening.MODEL
    node: NodeId | None = None


Effect = Desire | Drain | Proven | Reverted | Learn | WakeAt | Announce
