"""Whether a server has this node, and whether it has been without one for too long for what spans several nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio


class Tether:
    """Holds while the node is registered over a link that stands; ``overdue`` from when the server may have given up
    what spans several nodes until it holds again."""

    __slots__ = ("_changed", "_lost_at", "overdue")

    def __init__(self) -> None:
        # None while it holds, and until it has held once: nobody knows since when an earlier agent had no link.
        self._lost_at: float | None = None
        self.overdue = False
        self._changed = trio.Event()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """From the registration to the loss of the link that it came over."""
        self.overdue = False
        self._set(None)
        try:
            yield
        finally:
            self._set(trio.current_time())

    def _set(self, lost_at: float | None) -> None:
        self._lost_at = lost_at
        self._changed.set()
        self._changed = trio.Event()

    async def watch(self, find_limit: Callable[[], float | None], give_up: Callable[[float], None]) -> None:
        """For ever: call ``give_up`` with the seconds, once in each loss that lasts for as long as ``find_limit`` says
        when it begins; None: never."""
        while True:
            lost_at = self._lost_at
            seconds = None if lost_at is None else find_limit()
            # The server counts from the last word that it heard, and that was before the loss was noticed here: so this
            # is never before it may have given up by itself, and who is back by then has lost nothing.
            deadline = math.inf if lost_at is None or seconds is None else lost_at + seconds
            with trio.move_on_at(deadline) as waiting:
                await self._changed.wait()
            # (it may have come back in that very moment)
            if waiting.cancelled_caught and seconds is not None and self._lost_at == lost_at:
                self.overdue = True
                give_up(seconds)
                await self._changed.wait()
