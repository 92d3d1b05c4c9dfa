"""Everything the fleet can ask for. The mirror of events.py, which lists everything that can happen to it."""

from __future__ import annotations

from dataclasses import dataclass

from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Desire:
    """The whole of what a node is to run. A higher revision replaces a lower one; it is never a delta."""

    node: NodeId
    revision: int
    shards: tuple[ShardSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send a Wakeup at ``at`` (seconds of the same clock as ``now``). Only the earliest outstanding one matters."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Something worth a log line, and a reason for whoever waits on this model (None: on any) to look again."""

    model: ModelName | None
    text: str
    lines: tuple[str, ...] = ()
    warning: bool = False


Effect = Desire | WakeAt | Announce
