"""What the operator port answers: facts at one moment, as plain values. Whoever implements Management fills them in.

A fact that is not known is None here and absent in JSON. Sizes are in GB of 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from llmgw.core.model import Model
from llmgw.core.node import Disk, EngineFound
from llmgw.core.rejection import Rejection
from llmgw.dialects.toolcheck import Report


class NodeState(StrEnum):
    """How a node stands: ``silent`` has lost its link and has its lease to come back, ``lost`` had it."""

    READY = "ready"
    JOINING = "joining"
    SILENT = "silent"
    LOST = "lost"


class ModelStatus(StrEnum):
    """How a model stands.

    ``waiting``: no node can run it now. ``unreachable``: it may run, on a node that is lost. ``on-demand``: it loads
    when somebody asks. ``stopped``: it is known, and not to run.
    """

    READY = "ready"
    LOADING = "loading"
    STOPPING = "stopping"
    FAILED = "failed"
    WAITING = "waiting"
    UNREACHABLE = "unreachable"
    ON_DEMAND = "on-demand"
    STOPPED = "stopped"


class Origin(StrEnum):
    """Where a model's definition is kept: in server.yaml, or in the store."""

    DECLARED = "declared"
    STORED = "stored"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node and its link. ``version`` is llmgw's own there; ``replicas`` are those that have not ended."""

    node: str
    state: NodeState
    connected: bool
    peer: str | None = None
    heard_seconds_ago: float | None = None
    protocol: int | None = None
    version: str | None = None
    trunks: int | None = None
    cores: int | None = None
    memory_gb: float | None = None
    memory_available_gb: float | None = None
    memory_booked_gb: float | None = None
    disks: tuple[Disk, ...] | None = None
    engines: tuple[EngineFound, ...] | None = None
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """A replica. ``state`` is its shard's, or ``unreachable`` while its node is lost.

    ``cause``, ``kind``, ``remedy`` and ``lines`` (the engine's last) are of one that failed: its state is ``ended``
    until its next try. ``context_length`` is how many tokens a request may have as the engine says,
    ``context_promised`` as its model does. The counters are the engine's own, since its start.
    """

    replica: str
    model: str
    profile: str
    engine: str
    node: str
    shard: str
    epoch: int
    state: str
    seconds_in_state: float
    progress: str | None = None
    cause: str | None = None
    kind: str | None = None
    remedy: str | None = None
    lines: tuple[str, ...] | None = None
    context_length: int | None = None
    context_promised: int | None = None
    running: int | None = None
    waiting: int | None = None
    cache_used: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model: ``ready`` of ``wanted`` replicas serve. ``detail`` is how far it is, or what holds it up."""

    name: str
    status: ModelStatus
    serving: bool
    ready: int
    wanted: int
    origin: Origin
    aliases: tuple[str, ...] = ()
    where: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDetail:
    """One model whole. ``text`` is what was written when it was added, ``added_at`` when (seconds since 1970)."""

    model: ModelView
    definition: Model
    replicas: tuple[ReplicaView, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    text: str | None = None
    added_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginView:
    """An installed engine plugin. ``origin`` is what brought it, ``binary`` what is looked for on a node's PATH; the
    rest is what it can, in the words of a definition's keys."""

    name: str
    title: str
    binary: str
    tasks: tuple[str, ...]
    cpu: bool
    tp: bool
    pp: bool
    nodes: bool
    loras: bool
    mmproj: bool
    tool_parser: bool
    reasoning_parser: bool
    origin: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A plugin that is installed and can't be used, and why."""

    plugin: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEngines:
    """The binaries that a node would launch, None before it has said so. What is told of one is of before the node's
    last word, where it is not ``ready``."""

    node: str
    state: NodeState
    engines: tuple[EngineFound, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesView:
    """The plugins that this server has, and the binaries that the nodes have for them."""

    plugins: tuple[PluginView, ...]
    left_out: tuple[LeftOut, ...]
    nodes: tuple[NodeEngines, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Concern:
    """Something that an operator should look at: a node or a model, and what is the matter."""

    kind: str
    name: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView:
    """The whole in numbers; ``nodes``, ``models`` and ``replicas`` count by state."""

    version: str
    up_seconds: float
    nodes: Mapping[str, int]
    models: Mapping[str, int]
    replicas: Mapping[str, int]
    memory_gb: float
    memory_booked_gb: float
    concerns: tuple[Concern, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedModel:
    """A model that was added. ``replaced``: it had a definition before; ``runs``: it has, or may get, replicas."""

    name: str
    replaced: bool
    runs: bool
    not_in_effect: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """A model that was removed. ``declared`` says where the file has it still, when it has."""

    name: str
    declared: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """A configuration that was read again: the keys that changed, and those that need a new start to."""

    file: str
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsChecked:
    """Whether tool calls work at a model, as one of its replicas showed."""

    model: str
    replica: str
    node: str
    engine: str
    check: Report


def encode(view: object) -> bytes:
    """A view as JSON, without what is not known."""
    return msgspec.json.encode(_known(msgspec.to_builtins(view)))


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _known(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_known(inner) for inner in value]
    return value
