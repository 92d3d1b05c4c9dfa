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
class EngineFound:
    """A binary that a node would launch for an engine: a path, or the module of an embedded program."""

    engine: str
    program: tuple[str, ...]
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine as its agent sees it now. ``memory_gb`` is all of its RAM in GB of 10^9 bytes."""

    id: NodeId
    cores: int
    cpu_flags: frozenset[str]
    memory_gb: float
    memory_available_gb: float
    disks: tuple[Disk, ...] = ()
    engines: tuple[EngineFound, ...] = ()
