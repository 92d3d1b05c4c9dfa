"""What a story is told on, whichever size of the simulation plays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from llmgw.core.node import NodeId
from llmgw.core.replica import Replica, ShardSpec
from simulator.books import Books
from simulator.faults import Fault
from simulator.site import Shape


class Running(Protocol):
    """An engine that is alive."""

    @property
    def spec(self) -> ShardSpec: ...
    @property
    def pid(self) -> int: ...
    @property
    def ready(self) -> bool: ...


class Ground(Protocol):
    """A node as it really is, whatever anybody believes of it."""

    @property
    def id(self) -> NodeId: ...
    @property
    def shape(self) -> Shape: ...

    def alive(self) -> Iterator[Running]:
        """The engines that run, in the order of their starts."""

    def gpu_names(self) -> tuple[str, ...]: ...

    def free_gb(self, name: str) -> float:
        """What of a card nobody holds at all."""

    def has(self, source: str) -> bool:
        """Whether these weights, which are fetched, are whole there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An engine that really runs."""

    node: NodeId
    spec: ShardSpec
    pid: int
    ready: bool

    @property
    def gpus(self) -> tuple[str, ...]:
        return self.spec.gpus or ()


class Stage(Protocol):
    """A fleet in the middle of its story."""

    lines: list[str]

    @property
    def now(self) -> float: ...

    def strike(self, fault: Fault) -> None:
        """Something goes wrong, or an operator acts."""

    def engines(self, model: str | None = None) -> list[Seen]:
        """Those that really run, by node."""

    def ready(self, model: str) -> tuple[Replica, ...]:
        """The replicas that requests go to."""

    def books(self) -> Books:
        """What the fleet says."""

    def ends(self) -> dict[str, int]:
        """How many requests ended in which way."""


# It yields how many seconds go by before what it says next.
Story = Callable[[Stage], Iterator[float]]


def was_said(stage: Stage, *words: str) -> bool:
    """Whether there is a line of the log with all of this."""
    return any(all(word in line for word in words) for line in stage.lines)


def see(grounds: Mapping[NodeId, Ground], model: str | None) -> list[Seen]:
    """The engines that really run, of one model or of all."""
    return [
        Seen(node=node, spec=running.spec, pid=running.pid, ready=running.ready)
        for node, ground in grounds.items()
        for running in ground.alive()
        if model is None or running.spec.model.name == model
    ]
