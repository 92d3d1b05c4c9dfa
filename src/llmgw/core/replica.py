"""A replica and its shards, and the one table of what may follow what."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import NodeId
from llmgw.core.weights import Fetch

ReplicaId = NewType("ReplicaId", str)
ShardId = NewType("ShardId", str)

_UNSAFE = re.compile(rb"[^A-Za-z0-9._-]")


class ShardState(StrEnum):
    """Where a shard's life stands, as its agent reports it."""

    PLACED = "placed"
    # its node looks whether all is there that the launch needs, and gets what is not
    PREPARING = "preparing"
    # of several: all is there on this node, and the launch waits for the others
    PREPARED = "prepared"
    LAUNCHING = "launching"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    ENDED = "ended"


BEFORE_LAUNCH = frozenset({ShardState.PLACED, ShardState.PREPARING, ShardState.PREPARED})

# A report that skips or repeats a step is late or lost news, never a reason to fall over: what is not in this table
# is ignored. A shard that was adopted goes from placed to ready in one step.
_AHEAD = (
    ShardState.PLACED,
    ShardState.PREPARING,
    ShardState.PREPARED,
    ShardState.LAUNCHING,
    ShardState.LOADING,
    ShardState.READY,
)
_OVER = frozenset({ShardState.STOPPING, ShardState.ENDED})
MAY_FOLLOW: dict[ShardState, frozenset[ShardState]] = {
    **{state: frozenset(_AHEAD[max(at, 1) :]) | _OVER for at, state in enumerate(_AHEAD)},
    ShardState.STOPPING: _OVER,
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
    """What a node is told to run: everything its agent needs, and the epoch that tells one try from the next.

    ``gpus`` are the UUIDs of those that are booked for it, in the order of the ranks; None where nobody chooses. The
    ``count`` shards of one replica meet over the ``fabric`` of that name, at ``rendezvous``: ``host:port`` of rank 0.
    ``go`` False: prepare the launch and say so, and launch when a later set says True. That is for several shards only,
    each of which has said then that it is prepared. ``on_trial``: its model has served by another definition, and not
    by this one: it is ready when it has answered a request for one token, also where it is alone.
    """

    id: ShardId
    replica: ReplicaId
    epoch: int
    node: NodeId
    model: Model
    profile: Profile
    rank: int = 0
    count: int = 1
    gpus: tuple[str, ...] | None = None
    fabric: str | None = None
    rendezvous: str | None = None
    go: bool = True
    on_trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a launch has shown, as its agent has measured it: ``load_seconds`` from the start of the process to ready,
    and the most that it has held since, in GB of 10^9 bytes: ``gpu_gb`` of any one of its GPUs, ``memory_gb`` of the
    machine's memory. ``version`` is the engine's. What could not be measured is None."""

    load_seconds: float | None = None
    gpu_gb: float | None = None
    memory_gb: float | None = None
    version: str | None = None


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
    engine's last. ``context_length`` is how many tokens a request may have, as the engine says. ``fetch``: the weights
    that it waits for.
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
    measured: Measured | None = None
    fetch: Fetch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One engine process of a replica; ``since`` is when it took its present state, the rest as in its reports."""

    spec: ShardSpec
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
    measured: Measured | None = None
    fetch: Fetch | None = None


def reached(report: ShardReport, spec: ShardSpec) -> ShardState:
    """How far a shard is: one that is to answer requests and says not where is not ready."""
    if report.state is ShardState.READY and spec.rank == 0 and report.endpoint is None:
        return ShardState.LOADING
    return report.state


def booked_gb_of(shard: Shard) -> float:
    """The machine's memory that is kept for it: as its profile says, else what it was seen to hold."""
    declared = shard.spec.profile.min_memory_gb
    if declared is not None:
        return declared
    return (shard.measured.memory_gb if shard.measured is not None else None) or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One epoch of a serving copy of a model by one profile: a shard on each of its nodes, by rank.

    ``state`` is that of all of them together and ``since`` when it took it. Rank 0 answers requests. ``cause``,
    ``kind``, ``remedy`` and ``lines`` are those of the shard that ended it. ``draining``: why it is to stop, while its
    last requests are answered; it gets no others.
    """

    id: ReplicaId
    model: ModelName
    profile: str
    epoch: int
    shards: tuple[Shard, ...]
    state: ShardState
    since: float
    cause: str | None = None
    kind: str | None = None
    remedy: str | None = None
    lines: tuple[str, ...] = ()
    draining: str | None = None

    @property
    def shard(self) -> ShardSpec:
        """What rank 0 was told."""
        return self.shards[0].spec

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes that it is on, by rank."""
        return tuple(shard.spec.node for shard in self.shards)

    @property
    def endpoint(self) -> Endpoint | None:
        return self.shards[0].endpoint

    @property
    def load(self) -> Load:
        return self.shards[0].load

    @property
    def context_length(self) -> int | None:
        return self.shards[0].context_length

    @property
    def fetch(self) -> Fetch | None:
        """The weights that it waits for; of several shards that fetch, those that take the longest."""
        found = [shard.fetch for shard in self.shards if shard.fetch is not None]
        return max(found, key=_left_seconds, default=None)

    @property
    def progress(self) -> str | None:
        """Of the first shard that has something to tell, with its node where there are several."""
        for shard in self.shards:
            if shard.progress is not None:
                return shard.progress if len(self.shards) == 1 else f"{shard.spec.node}: {shard.progress}"
        return None


def _left_seconds(fetch: Fetch) -> float:
    return math.inf if fetch.left_seconds is None else fetch.left_seconds


def join_states(states: Collection[ShardState], count: int) -> ShardState:
    """What ``count`` shards are together, of which these are known: ended when all have, stopping as soon as one is."""
    if all(state is ShardState.ENDED for state in states):
        return ShardState.ENDED
    if ShardState.ENDED in states or ShardState.STOPPING in states:
        return ShardState.STOPPING
    if len(states) < count:
        return ShardState.PLACED
    # It has come as far as its last one.
    return min(states, key=_AHEAD.index)


def replica_id(model: ModelName, number: int) -> ReplicaId:
    """``rep-<model>-<number>``, safe as a file name; ``number`` counts a model's replicas from 1."""
    return ReplicaId(f"rep-{_file_name(model)}-{number}")


def shard_id(model: ModelName, number: int, rank: int) -> ShardId:
    """``shd-<model>-<number>-<rank>``, safe as a file name."""
    return ShardId(f"shd-{_file_name(model)}-{number}-{rank}")


def _file_name(model: ModelName) -> str:
    # A plain replacement would give org/model and org-model the same log file, port file and identity.
    return _UNSAFE.sub(lambda found: b"~%02x" % found[0][0], model.encode()).decode()
