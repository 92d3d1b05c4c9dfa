"""What an operator writes: a model, the ways to run it, and how many of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

ModelName = NewType("ModelName", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How many replicas: ``max`` 0 is configured and deliberately not running."""

    min: int = 0
    max: int = 0
    idle_timeout_seconds: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One way to run a model. The higher ``priority`` is tried first; ``args`` go to the engine last, untouched."""

    name: str
    engine: str
    weight: int = 1
    priority: int = 0
    gpu_class: str | None = None
    tp: int = 1
    startup_timeout_seconds: float = 600.0
    min_memory_gb: float | None = None
    min_disk_gb: float | None = None
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A name that clients ask for. ``source`` is where its weights come from, as written."""

    name: ModelName
    source: str
    aliases: tuple[str, ...] = ()
    routing_profile: str | None = None
    context_length: int | None = None
    max_output: int | None = None
    over_limit: str = "clamp"
    scaling: Scaling = field(default_factory=Scaling)
    profiles: tuple[Profile, ...] = ()


def launch_facts(model: Model, profile: Profile) -> tuple[object, ...]:
    """What a running engine depends on: where two definitions agree in this, the one's engine serves the other as well.

    Aliases, scaling, priorities and limits on requests are llmgw's own business, and change under a running engine.
    """
    return (
        model.name,
        model.source,
        model.context_length,
        model.max_output,
        profile.name,
        profile.engine,
        profile.gpu_class,
        profile.tp,
        profile.args,
    )
