"""The facts that pass between llmgw and an engine plugin: what it is told, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from llmgw.core.model import Lora, Task
from llmgw.errors import Problem

__all__ = [
    "BROKEN",
    "LOADING",
    "READY",
    "Cause",
    "CauseKind",
    "Command",
    "Embedded",
    "EngineInfo",
    "Fabric",
    "Flag",
    "FlagChange",
    "FlagStyle",
    "Health",
    "HealthState",
    "Launch",
    "LogFact",
    "ParserFlag",
    "ProbeOutput",
    "Problem",
    "RequestRules",
    "SourceKind",
    "Takes",
    "Version",
]


class SourceKind(StrEnum):
    """What an engine can be pointed at."""

    FILE = "file"
    REPOSITORY = "repository"


class Takes(StrEnum):
    """How many values follow a flag. MAYBE is none or one, MANY is one or more; UNSAID where the help does not tell."""

    NONE = "none"
    ONE = "one"
    MAYBE = "maybe"
    MANY = "many"
    UNSAID = "unsaid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag as a binary's help has it: every spelling, its values, and the words that say it is on its way out.

    ``choices`` is empty where any value goes; ``widened_by`` is the flag that adds others to them. ``number``: a value
    that does not begin as a number is refused. ``deprecated``: it still works; ``removed``: it is named and refused.
    """

    names: tuple[str, ...]
    takes: Takes = Takes.UNSAID
    choices: frozenset[str] = frozenset()
    widened_by: str | None = None
    number: bool = False
    deprecated: str | None = None
    removed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagStyle:
    """How an engine reads the words of its command line.

    ``equals``: ``--flag=value`` is understood. ``underscores``: ``--a_b`` is ``--a-b``. ``abbreviations``: the
    beginning of a flag will do while it fits one only, and ``-n2`` is ``-n 2``, as argparse has it; ``whole`` are flags
    that are short for no other, whatever longer one begins with them. ``dotted``: ``--flag.key value`` sets a key of
    JSON.
    """

    equals: bool = True
    underscores: bool = False
    abbreviations: bool = False
    dotted: bool = False
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagChange:
    """A flag that releases from ``gone_in`` on do not know; ``instead`` is the flag that does it now, if one does."""

    flag: str
    gone_in: str
    instead: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is and can do.

    ``file_suffixes`` (".gguf") tell which files are its own kind. ``owned_by`` is what its ``/v1/models`` says there.
    What it can't do (``tasks``, ``tensor_parallel``, ``loras``, ``projector``, ``tool_parser`` ...) is refused by llmgw
    in a definition that asks for it. ``context_path`` tells how long a request may be. ``probe_seconds``: how long its
    probe may take on a busy machine.
    """

    title: str
    default_binary: str
    sources: frozenset[SourceKind]
    file_suffixes: tuple[str, ...] = ()
    api_paths: frozenset[str] = frozenset()
    tasks: frozenset[Task] = frozenset({Task.CHAT})
    cpu: bool = False
    tensor_parallel: bool = False
    pipeline_parallel: bool = False
    span_nodes: bool = False
    loras: bool = False
    projector: bool = False
    tool_parser: bool = False
    reasoning_parser: bool = False
    health_path: str = "/health"
    load_path: str | None = None
    context_path: str | None = None
    stop_signal: str = "SIGTERM"
    stop_grace_seconds: float = 10.0
    probe_seconds: float = 20.0
    owned_by: str | None = None
    flag_style: FlagStyle = FlagStyle()
    flag_changes: tuple[FlagChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """A program of the plugin's own that takes the engine's flags: ``python -m module``.

    It runs where ``requires`` can be imported; ``install`` is what an operator types when it can't.
    """

    module: str
    requires: str
    install: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The network that the shards of one replica meet over: this node's address on it, the interface that has it, and
    the adapters (``mlx5_0``) for RDMA, where there are any."""

    address: str
    interface: str
    hcas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Every fact about one shard to be started, and no opinion.

    ``program`` is what is run before any flag: a binary's path, or an interpreter with ``-m`` and a module.
    ``gpus`` are indices by PCI bus order, () is none at all, None where llmgw does not choose. ``tp`` times ``pp`` is
    the world over all nodes; ``rank`` counts the ``count`` nodes from 0; ``rendezvous`` is ``host:port`` of rank 0 on
    the ``fabric``. ``cache`` is a folder for what the engine keeps over restarts. ``env`` is the profile's own: llmgw
    sets it over what the command brings.
    """

    program: tuple[str, ...]
    source: str
    served_name: str
    host: str
    port: int
    version: Version | None = None
    gpus: tuple[int, ...] | None = None
    tp: int = 1
    pp: int = 1
    rank: int = 0
    count: int = 1
    rendezvous: str | None = None
    fabric: Fabric | None = None
    task: Task = Task.CHAT
    context_length: int | None = None
    max_output: int | None = None
    mmproj: str | None = None
    loras: tuple[Lora, ...] = ()
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    threads: int | None = None
    cache: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to execute.

    ``env`` is set, ``scrub`` names prefixes of inherited variables that are removed first; ``defaults`` are set where
    neither the machine nor the profile says otherwise. ``serves``: this shard answers HTTP; one of a group that does
    not is up while its process lives.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    scrub: tuple[str, ...] = ()
    cwd: str | None = None
    serves: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutput:
    """What a probe printed, and its exit code, minus the signal that ended it."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A binary's version as it names itself, and the flags it knows; () when its help was not read."""

    number: str
    flags: tuple[Flag, ...] = ()

    def find(self, name: str) -> Flag | None:
        """The flag of exactly this spelling."""
        return next((flag for flag in self.flags if name in flag.names), None)


class HealthState(StrEnum):
    """What an answer of the health path means."""

    READY = "ready"
    LOADING = "loading"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state, and for BROKEN the reason in one line."""

    state: HealthState
    reason: str | None = None


READY = Health(state=HealthState.READY)
LOADING = Health(state=HealthState.LOADING)


def BROKEN(reason: str) -> Health:  # noqa: N802 - reads as the third of the three states
    """An engine that answers and will never serve."""
    return Health(state=HealthState.BROKEN, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFact:
    """What one log line tells a person who waits."""

    progress: str


class CauseKind(StrEnum):
    """What ended an engine, in one word: the closed list that programs and metrics go by."""

    GPU_MEMORY = "gpu_memory"
    KV_CACHE = "kv_cache"
    GPU_IN_USE = "gpu_in_use"
    HOST_MEMORY = "host_memory"
    GPU_UNSUPPORTED = "gpu_unsupported"
    DRIVER = "driver"
    GPU_FAULT = "gpu_fault"
    COLLECTIVE = "collective"
    RENDEZVOUS = "rendezvous"
    LIBRARY = "library"
    CPU_UNSUPPORTED = "cpu_unsupported"
    FLAG = "flag"
    PORT = "port"
    WEIGHTS_MISSING = "weights_missing"
    WEIGHTS_CORRUPT = "weights_corrupt"
    ARCHITECTURE = "architecture"
    UNAUTHORISED = "unauthorised"
    OFFLINE = "offline"
    TOKENIZER = "tokenizer"
    CONTEXT = "context"
    PARALLEL = "parallel"
    PARSER = "parser"
    QUANTIZATION = "quantization"
    DISK = "disk"
    HUNG = "hung"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why an engine ended: the line that names it, cleaned of prefixes, and what to do about it in one line."""

    kind: CauseKind
    line: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserFlag:
    """What makes an engine parse the tool calls of a model: its flag, the value that is given for it now, the one that
    fits this model as far as its name tells, and a switch that has to stand beside it."""

    flag: str
    given: str | None = None
    suggested: str | None = None
    beside: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    """How a request body is edited for this engine.

    ``usage_in_streams``: asking for usage in a stream (``stream_options.include_usage``) is understood, so llmgw may
    ask for its own accounting and take the extra event out again. ``loras``: by the name of each adapter, the fields
    that a body has to have for it (``{"sql": {"model": "sql"}}``), and ``base`` those for the model itself, as JSON.
    """

    usage_in_streams: bool = True
    loras: Mapping[str, Mapping[str, object]] = field(default_factory=dict, hash=False)
    base: Mapping[str, object] = field(default_factory=dict, hash=False)
