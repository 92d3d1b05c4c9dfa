"""The facts that pass between llmgw and an engine plugin: what it is told, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from llmgw.errors import Problem

__all__ = [
    "BROKEN",
    "LOADING",
    "READY",
    "Command",
    "Embedded",
    "EngineInfo",
    "Health",
    "HealthState",
    "Launch",
    "Load",
    "LogFact",
    "ProbeOutput",
    "Problem",
    "RequestRules",
    "SourceKind",
    "Version",
]


class SourceKind(StrEnum):
    """What an engine can be pointed at."""

    FILE = "file"
    REPOSITORY = "repository"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is and can do. ``file_suffixes`` (".gguf") tell which files are its own kind."""

    title: str
    default_binary: str
    sources: frozenset[SourceKind]
    file_suffixes: tuple[str, ...] = ()
    api_paths: frozenset[str] = frozenset()
    cpu: bool = False
    tensor_parallel: bool = False
    pipeline_parallel: bool = False
    span_nodes: bool = False
    health_path: str = "/health"
    load_path: str | None = None
    stop_signal: str = "SIGTERM"
    stop_grace_seconds: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """A program of the plugin's own that takes the engine's flags: ``python -m module``.

    It runs where ``requires`` can be imported; ``install`` is what an operator types when it can't.
    """

    module: str
    requires: str
    install: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Every fact about one shard to be started, and no opinion.

    ``program`` is what is run before any flag: a binary's path, or an interpreter with ``-m`` and a module.
    ``rank`` counts from 0; ``gpus`` are indices by PCI bus order; ``rendezvous`` is ``host:port`` of rank 0.
    """

    program: tuple[str, ...]
    source: str
    served_name: str
    host: str
    port: int
    version: Version | None = None
    gpus: tuple[int, ...] = ()
    tp: int = 1
    rank: int = 0
    count: int = 1
    rendezvous: str | None = None
    context_length: int | None = None
    max_output: int | None = None
    threads: int | None = None
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to execute. ``env`` is set, ``scrub`` names prefixes of inherited variables that are removed first."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    scrub: tuple[str, ...] = ()
    cwd: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutput:
    """What a probe printed."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A binary's version as it names itself, and the flags it knows (empty when it was not asked)."""

    number: str
    flags: frozenset[str] = frozenset()


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
    """What one log line tells: ``progress`` for a person who waits, or ``fatal``, the cause of the end in one line.

    A line marked ``generic`` is what an engine prints whatever went wrong: it counts only when no other does.
    """

    progress: str | None = None
    fatal: str | None = None
    generic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy an engine is; ``cache_used`` is a share from 0 to 1. What it does not say is None, never 0."""

    running: int | None = None
    waiting: int | None = None
    cache_used: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    """How a request body is edited for this engine.

    ``usage_in_streams``: asking for usage in a stream (``stream_options.include_usage``) is understood, so llmgw may
    ask for its own accounting and take the extra event out again.
    """

    usage_in_streams: bool = True
