"""What goes wrong and when, what operators do meanwhile, and what clients ask: data, and the code that it prints as.

``at`` is in seconds from the beginning of the simulation, nodes and models are named as in ``site``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBroken:
    """The connection of a node's agent ends; what was on its way is lost, and both ends see it."""

    at: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Nothing passes between these nodes and the server; what was on its way comes late, if both ends still wait."""

    at: float
    nodes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """Each message of a node takes up to that much longer; one in ten was dropped, and comes with the next try."""

    at: float
    node: str
    seconds: float
    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCrash:
    """A node is without power for a while; its engines end, and nobody hears of it."""

    at: float
    node: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCrash:
    """A node's agent is gone for a while; its engines go on."""

    at: float
    node: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCrash:
    """One of the engines on a node dies: the ``pick``-th of those that run there, counted round."""

    at: float
    node: str
    pick: int = 0


class Mood(StrEnum):
    """What is wrong with the engines that a node launches for a while."""

    NEVER_READY = "never ready"
    DIES_LOADING = "dies loading"
    DIES_SERVING = "dies serving"
    DEAF = "deaf to TERM"
    SLOW = "slow to load"
    FREES_LATE = "frees its memory late"
    FREES_NEVER = "frees its memory very late"
    HANGS_SERVING = "answers nobody any more, and does not end"
    SLOW_TO_PREPARE = "takes minutes until it may be launched"


class Flaw(StrEnum):
    """What is wrong with a definition, wherever its engines are launched."""

    NEVER_READY = "never-ready"
    DIES_AT_ONCE = "dies-at-once"
    FITS_NOWHERE = "fits-nowhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadEngines:
    """Each engine that a node launches in that time is like this."""

    at: float
    node: str
    seconds: float
    mood: Mood


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFull:
    """Nothing can be written on a node for a while, and so no engine is launched."""

    at: float
    node: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignMemory:
    """Somebody else holds memory of a GPU for a while, in GB."""

    at: float
    node: str
    gpu: int
    gb: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricDown:
    """A node's adapter has no active port for a while."""

    at: float
    node: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSkew:
    """A node's wall clock is wrong by that many seconds from here on."""

    at: float
    node: str
    skew: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRestart:
    """The server is gone for a while; what it has not stored is forgotten."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginDown:
    """Nobody is given weights from outside for a while."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowOrigin:
    """Weights come so many times slower for a while."""

    at: float
    seconds: float
    times: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoiledWeights:
    """The next weights that a node fetches are not what they should be."""

    at: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddModel:
    """An operator adds a model of the site's list, or puts it back as it was."""

    at: float
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveModel:
    """An operator removes a model."""

    at: float
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EditModel:
    """An operator changes how many replicas a model has; with ``restart`` also what its engines are started with, which
    may have a ``flaw``."""

    at: float
    model: str
    min: int
    max: int
    restart: bool = False
    flaw: Flaw | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """An operator makes the last earlier definition that has served the current one of a stored model again."""

    at: float
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """An operator stops a model."""

    at: float
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """An operator lets a model run that was stopped, and loads one that loads on demand."""

    at: float
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """An operator has a replica replaced: the ``pick``-th of the model's, counted round."""

    at: float
    model: str
    pick: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """An operator keeps new replicas off a node, or no longer: then its drain ends as well."""

    at: float
    node: str
    cordoned: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainNode:
    """An operator drains a node; what is left there after that many seconds stops all the same (None: never)."""

    at: float
    node: str
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """An operator lays a label over a node's own; None takes it away."""

    at: float
    node: str
    key: str
    value: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveNode:
    """An operator removes a node, if it is lost, or cordoned with nothing on it."""

    at: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """That many requests for a model within that time. Who is told to come again does so ``returns`` times, and hangs
    up after ``patience`` seconds where he is not answered by then."""

    at: float
    model: str
    requests: int
    seconds: float
    returns: int = 0
    patience: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Each of these models has a client for that time, who asks again ``apart`` seconds after each answer."""

    at: float
    models: tuple[str, ...]
    seconds: float
    apart: float = 1.0


Fault = (
    LinkBroken
    | Partition
    | SlowLink
    | NodeCrash
    | AgentCrash
    | EngineCrash
    | BadEngines
    | DiskFull
    | ForeignMemory
    | FabricDown
    | ClockSkew
    | ServerRestart
    | OriginDown
    | SlowOrigin
    | SpoiledWeights
    | AddModel
    | RemoveModel
    | EditModel
    | Rollback
    | Hold
    | LoadModel
    | Recall
    | Cordon
    | DrainNode
    | Label
    | RemoveNode
    | Storm
    | Turns
)

# What operators do, and only a server that is there can be asked.
Act = (
    AddModel | RemoveModel | EditModel | Rollback | Hold | LoadModel | Recall | Cordon | DrainNode | Label | RemoveNode
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All that a simulation is made from: the same one is played the same way, wherever and whenever.

    ``beat_seconds``: how often an agent reports its node. ``models``: those of the site that there are at first; None:
    all of them.
    """

    seed: int
    nodes: int
    hours: float
    beat_seconds: float = 5.0
    faults: tuple[Fault, ...] = ()
    models: tuple[str, ...] | None = None


def show(scenario: Scenario) -> str:
    """The scenario as code that can be pasted into a story."""
    lines = ["Scenario("]
    for field in fields(scenario):
        value = getattr(scenario, field.name)
        if field.name == "faults" and value:
            lines += ["    faults=(", *(f"        {_show(fault)}," for fault in value), "    ),"]
        elif value is not None:
            lines.append(f"    {field.name}={value!r},")
    return "\n".join([*lines, ")"])


def _show(fault: Fault) -> str:
    values = ((field.name, getattr(fault, field.name)) for field in fields(fault))
    return f"{type(fault).__name__}({', '.join(f'{name}={_value(value)}' for name, value in values)})"


def _value(value: object) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, Mood | Flaw) else repr(value)
