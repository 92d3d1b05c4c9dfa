"""A replica and its shards, and the one table of what may follow what."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import NodeId

ReplicaId = NewType("ReplicaId", str)
ShardId = NewType("ShardId", str)

_UNSAFE = re.compile(rb"[^A-Za-z0-9._-]")


class ShardState(StrEnum):
    """Where a shard's life stands, as its agent reports it."""

    PLACED = "placed"
    LAUNCHING = "launching"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    ENDED = "ended"


# A report that skips or repeats a step is late or lost news, never a reason to fall over: what is not in this table
# is ignored. A shard that was adopted goes from placed to ready in one step.
MAY_FOLLOW: dict[ShardState, frozenset[ShardState]] = {
    ShardState.PLACED: frozenset(
        {ShardState.LAUNCHING, ShardState.LOADING, ShardState.READY, ShardState.STOPPING, ShardState.ENDED}
    ),
    ShardState.LAUNCHING: frozenset({ShardState.LOADING, ShardState.READY, ShardState.STOPPING, ShardState.ENDED}),
    ShardState.LOADING: frozenset({ShardState.LOADING, ShardState.READY, ShardState.STOPPING, ShardState.ENDED}),
    ShardState.READY: frozenset({ShardState.READY, ShardState.STOPPING, ShardState.ENDED}),
    ShardState.STOPPING: frozenset({ShardState.ENDED}),
    ShardState.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a ready shard is reached, and the name that its engine serves the model under."""

    host: str
    port: int
    served_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAddress:
    """A shard, named by who can't dial its node: the agent there knows the port, or that it runs no such thing."""

    node: NodeId
    shard: ShardId
    epoch: int

    def __str__(self) -> str:
        return f"{self.shard} on {self.node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """What a node is told to run: everything its agent needs, and the epoch that tells one try from the next."""

    id: ShardId
    replica: ReplicaId
    epoch: int
    node: NodeId
    model: Model
    profile: Profile
    rank: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy an engine is. What it does not say is None, never 0.

    ``cache_used`` is the share of the KV cache from 0 to 1. The rest are counters since the engine's start:
    ``prompt_tokens`` that came in, ``cached_tokens`` of them that a prefix cache had, and ``steps``, a number that
    grows whenever the engine computes, so that one which is hung can be told from one that is busy.
    """

    running: int | None = None
    waiting: int | None = None
    cache_used: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """What an agent says of one shard.

    ``cause`` names in one line why it ended, ``kind`` in one word, ``remedy`` what to do about it; ``lines`` are the
    engine's last. ``context_length`` is how many tokens a request may have, as the engine says.
    """

    shard: ShardId
    replica: ReplicaId
    epoch: int
    state: ShardState
    endpoint: Endpoint | None = None
    pid: int | None = None
    progress: str | None = None
    context_length: int | None = None
    cause: str | None = None
    kind: str | None = None
    remedy: str | None = None
    lines: tuple[str, ...] = ()
    load: Load = Load()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One serving copy of a model by one profile, on one node for now; ``since`` is when it took its present state."""

    id: ReplicaId
    model: ModelName
    profile: str
    shard: ShardSpec
    state: ShardState
    since: float
    endpoint: Endpoint | None = None
    progress: str | None = None
    context_length: int | None = None
    cause: str | None = None
    kind: str | None = None
    remedy: str | None = None
    lines: tuple[str, ...] = ()
    load: Load = Load()


def replica_id(model: ModelName, number: int) -> ReplicaId:
    """``rep-<model>-<number>``, safe as a file name; ``number`` counts a model's replicas from 1."""
    return ReplicaId(f"rep-{_file_name(model)}-{number}")


def shard_id(model: ModelName, number: int, rank: int) -> ShardId:
    """``shd-<model>-<number>-<rank>``, safe as a file name."""
    return ShardId(f"shd-{_file_name(model)}-{number}-{rank}")


def _file_name(model: ModelName) -> str:
    # A plain replacement would give org/model and org-model the same log file, port file and identity.
    return _UNSAFE.sub(lambda found: b"~%02x" % found[0][0], model.encode()).decode()
