"""What a node reports of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

NodeId = NewType("NodeId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The filesystem that holds ``path``; sizes in GB of 10^9 bytes."""

    path: str
    free_gb: float
    total_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagFound:
    """A flag of a launch that a binary does not simply take: who gives it ("llmgw" or "profile"), what the binary says
    of it in one word (``engines.check.FlagState``), and what to write instead."""

    flag: str
    given_by: str
    state: str
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFound:
    """A binary that a node would launch for an engine (a path, or the module of an embedded program), and what came of
    trying it.

    ``broken``: why nothing can be launched with it, in one line, and ``starts`` false where that is because it does not
    run at all. ``problems``: what else of it does not fit, one line each. ``missing_libraries``: those that its loader
    did not find. ``flags`` are those of an ordinary launch that there is something to tell of, the worst first;
    ``flags_ok`` counts the others. None of it is known before ``checked``.
    """

    engine: str
    program: tuple[str, ...]
    version: str | None = None
    checked: bool = False
    starts: bool = True
    broken: str | None = None
    problems: tuple[str, ...] = ()
    missing_libraries: tuple[str, ...] = ()
    flags: tuple[FlagFound, ...] = ()
    flags_ok: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine as its agent sees it now. ``memory_gb`` is all of its RAM in GB of 10^9 bytes; ``outdated`` is the
    server's word for an agent that passes over what definitions have gained since (``newer_keys``)."""

    id: NodeId
    cores: int
    cpu_flags: frozenset[str]
    memory_gb: float
    memory_available_gb: float
    disks: tuple[Disk, ...] = ()
    engines: tuple[EngineFound, ...] = ()
    outdated: bool = False
