"""A message link between a node's agent and the server: in order, and slow; it stalls in a partition, and it breaks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from llmgw.core.effects import Desire
from llmgw.core.events import Event
from llmgw.core.node import NodeId
from simulator.loop import Loop

DELAY_SECONDS = 0.002
JITTER_SECONDS = 0.05


class Ways:
    """The network: which nodes are cut off, and whose messages are slow."""

    __slots__ = ("_cut", "_slow")

    def __init__(self) -> None:
        self._cut: dict[NodeId, int] = {}
        self._slow: dict[NodeId, list[float]] = {}

    def is_cut(self, node: NodeId) -> bool:
        return node in self._cut

    def cut(self, node: NodeId) -> None:
        self._cut[node] = self._cut.get(node, 0) + 1

    def heal(self, node: NodeId) -> bool:
        """One of its partitions is over; whether that was the last."""
        self._cut[node] -= 1
        if not self._cut[node]:
            del self._cut[node]
        return node not in self._cut

    def slow_down(self, node: NodeId, seconds: float) -> None:
        self._slow.setdefault(node, []).append(seconds)

    def speed_up(self, node: NodeId) -> None:
        self._slow[node].pop(0)

    def slowness(self, node: NodeId) -> float:
        return sum(self._slow.get(node, ()))


class Up(Protocol):
    """What arrives at the server."""

    def __call__(self, link: Link, event: Event) -> None: ...


class Link:
    """One connection. Each end closes by itself; what reaches a closed one is lost, and closes the other."""

    __slots__ = (
        "_down",
        "_down_at",
        "_loop",
        "_rng",
        "_up",
        "_up_at",
        "_ways",
        "agent_open",
        "held",
        "node",
        "registered",
        "server_open",
    )

    def __init__(
        self, node: NodeId, loop: Loop, rng: Random, ways: Ways, *, up: Up, down: Callable[[Link, Desire], None]
    ) -> None:
        self.node = node
        self.agent_open = True
        self.server_open = True
        self.registered = False
        # What waits for the partition's end, in order.
        self.held: list[tuple[Callable[..., None], Event | Desire]] = []
        self._loop = loop
        self._rng = rng
        self._ways = ways
        self._up = up
        self._down = down
        self._up_at = 0.0
        self._down_at = 0.0

    def send_up(self, event: Event) -> None:
        self._up_at = max(self._up_at, self._loop.now + self._draw_delay())
        self._loop.at(self._up_at, self._arrive, self._deliver_up, event)

    def send_down(self, desire: Desire) -> None:
        self._down_at = max(self._down_at, self._loop.now + self._draw_delay())
        self._loop.at(self._down_at, self._arrive, self._deliver_down, desire)

    def _draw_delay(self) -> float:
        chance = self._rng.random()
        slowness = self._ways.slowness(self.node)
        if not slowness:
            return DELAY_SECONDS + chance * JITTER_SECONDS
        # One in ten was dropped on the way, and is sent again.
        return DELAY_SECONDS + (chance + (chance > 0.9)) * slowness

    def _arrive(self, deliver: Callable[..., None], message: Event | Desire) -> None:
        if self._ways.is_cut(self.node) or self.held:
            self.held.append((deliver, message))
        else:
            deliver(message)

    def release(self) -> None:
        """The partition is over: what was held arrives now."""
        held, self.held = self.held, []
        for deliver, message in held:
            deliver(message)

    def _deliver_up(self, event: Event) -> None:
        if self.server_open:
            self._up(self, event)

    def _deliver_down(self, desire: Desire) -> None:
        if self.agent_open:
            self._down(self, desire)
