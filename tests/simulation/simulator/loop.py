"""The time of a simulation, and the order of what happens in it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

# More than this at one moment never ends.
AT_ONCE = 5000


class Standstill(Exception):  # noqa: N818 - named by what it is, like ours
    """So much happens at one moment that the next never comes."""


class Loop:
    """Calls what was put down for a time, in the order of the times; what has the same time, in the order it came."""

    __slots__ = ("_order", "_queue", "now", "steps")

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self._order = count()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when: float, do: Callable[..., None], *args: Any) -> None:
        """Call ``do(*args)`` at ``when``, or now where that is over. It can't be taken back: whoever is called looks
        whether that is still wanted."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), do, args))

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        """Call ``do(*args)`` that many seconds from now."""
        self.at(self.now + seconds, do, *args)

    def run(self, until: float, after_step: Callable[[], None]) -> None:
        """Let time go on to ``until``; ``after_step`` is called after everything that happens."""
        queue = self._queue
        at_once = 0
        while queue and queue[0][0] <= until:
            when, _, do, args = heapq.heappop(queue)
            at_once = at_once + 1 if when == self.now else 0
            if at_once > AT_ONCE:
                raise Standstill
            self.now = when
            self.steps += 1
            do(*args)
            after_step()
        self.now = until
