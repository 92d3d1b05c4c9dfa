"""What an operator writes: a model, the ways to run it, and how many of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NewType

ModelName = NewType("ModelName", str)

# A profile's ``gpu_class`` that takes a GPU of any class; all of one replica are of one.
ANY_CLASS = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How many replicas: ``max`` 0 is configured and deliberately not running, ``min`` 0 with more above it loads when
    somebody asks, and is stopped when nobody has for ``idle_timeout_seconds``. ``target``: requests, answered and
    waiting, for each replica; what is more asks for another one."""

    min: int = 0
    max: int = 0
    idle_timeout_seconds: float = 900.0
    target: int = 8

    @property
    def on_demand(self) -> bool:
        return self.min == 0 < self.max


class Task(StrEnum):
    """What a model is for."""

    CHAT = "chat"
    EMBED = "embed"
    RERANK = "rerank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """An adapter over a model's weights, which clients ask for by its own name."""

    name: ModelName
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One way to run a model. The higher ``priority`` is tried first; ``args`` go to the engine last, untouched.

    ``tp`` and ``pp`` are the widths of tensor and pipeline parallelism, over ``nodes`` nodes of as many GPUs each.
    ``gpu_class`` may be ``any``. ``gpu_memory_gb`` is what it takes of each of its GPUs, in GB of 10^9 bytes.
    ``labels`` are those that a node must have. ``env`` is set for the engine's process.
    """

    name: str
    engine: str
    weight: int = 1
    priority: int = 0
    gpu_class: str | None = None
    tp: int = 1
    pp: int = 1
    nodes: int = 1
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    gpu_memory_gb: float | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    startup_timeout_seconds: float = 600.0
    min_memory_gb: float | None = None
    min_disk_gb: float | None = None
    # Whoever logs a profile does not log what somebody may have hidden there.
    env: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    args: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """How many GPUs one replica takes in all: none unless something in the profile asks for them."""
        asked = self.gpu_class is not None or self.gpu_memory_gb is not None or self.tp * self.pp > 1
        return self.tp * self.pp if asked else 0

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What tokens cost, in the operator's currency per million; ``cached`` ones of a prompt as the others where it is
    None."""

    prompt: float
    completion: float
    cached: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A name that clients ask for. ``source`` is where its weights come from, as written; ``mmproj`` is that of the
    part that turns images into tokens, where the weights don't have it."""

    name: ModelName
    source: str
    task: Task = Task.CHAT
    aliases: tuple[str, ...] = ()
    mmproj: str | None = None
    loras: tuple[Lora, ...] = ()
    routing_profile: str | None = None
    context_length: int | None = None
    max_output: int | None = None
    over_limit: str = "clamp"
    prices: Prices | None = None
    scaling: Scaling = field(default_factory=Scaling)
    profiles: tuple[Profile, ...] = ()

    def names(self) -> Iterator[str]:
        """All that clients can ask for here: the name, the aliases, and the adapters."""
        yield self.name
        yield from self.aliases
        yield from (lora.name for lora in self.loras)

    def find_lora(self, name: str) -> Lora | None:
        """The adapter that is meant by this name; None where it means the model itself, or nothing here."""
        if name == self.name or name in self.aliases:
            return None
        return next((lora for lora in self.loras if lora.name == name), None)


def newer_keys(model: Model, profile: Profile) -> tuple[str, ...]:
    """What this asks for and an agent before protocol 3 passes over in silence, by its keys."""
    asked = {
        "task": model.task != Task.CHAT,
        "mmproj": model.mmproj is not None,
        "loras": bool(model.loras),
        "pp": profile.pp > 1,
        "tool_parser": profile.tool_parser is not None,
        "reasoning_parser": profile.reasoning_parser is not None,
        "env": bool(profile.env),
    }
    return tuple(key for key, is_asked in asked.items() if is_asked)


def launch_facts(model: Model, profile: Profile) -> tuple[object, ...]:
    """What a running engine depends on: where two definitions agree in this, the one's engine serves the other as well.

    Aliases, scaling, priorities and limits on requests are llmgw's own business, and change under a running engine.
    """
    return (
        model.name,
        model.source,
        model.task,
        model.mmproj,
        model.loras,
        model.context_length,
        model.max_output,
        profile.name,
        profile.engine,
        profile.gpu_class,
        # (what it takes of each is booked, and no engine is told)
        profile.gpus,
        profile.tp,
        profile.pp,
        profile.nodes,
        profile.tool_parser,
        profile.reasoning_parser,
        profile.env,
        profile.args,
    )


def with_launch(model: Model, launched: Model) -> Model:
    """``model`` launched as ``launched`` was: only what a running engine doesn't depend on is its own."""
    return replace(
        launched,
        aliases=model.aliases,
        routing_profile=model.routing_profile,
        over_limit=model.over_limit,
        prices=model.prices,
        scaling=model.scaling,
    )
