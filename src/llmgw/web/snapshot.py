"""What the pages show: facts at one moment, as plain values. Whoever makes the app fills them in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ModelState(StrEnum):
    """How a model stands, in the words that the page shows."""

    SERVING = "serving"
    LOADING = "loading"
    WAITING = "waiting"
    FAILED = "failed"
    STOPPED = "not running"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShown:
    """One model. ``detail`` is the progress of one that loads, what one waits for, or why it failed; ``lines`` are the
    engine's last."""

    name: str
    state: ModelState
    aliases: tuple[str, ...] = ()
    engine: str | None = None
    node: str | None = None
    detail: str | None = None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShown:
    """One node; sizes in GB of 10^9 bytes. ``engines`` are names with versions where they are known."""

    id: str
    cores: int
    memory_gb: float
    memory_available_gb: float
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything on the first page. ``base_url`` is what a client is told to use, with its ``/v1``."""

    version: str
    base_url: str
    models: tuple[ModelShown, ...] = ()
    nodes: tuple[NodeShown, ...] = ()
