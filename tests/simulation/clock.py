"""A clock that jumps, and a run of trio that is the same for the same seed, in whatever process and however busy."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

Result = TypeVar("Result")

IDLE_TURNS = 100


class JumpClock(trio.abc.Clock):
    """Time passes only when every task waits for it, and then at once. Nothing in the run may wait for anything else: a
    thread, a socket or another process would be overtaken."""

    def __init__(self) -> None:
        self.now = 0.0
        self._idle_turns = 0

    def start_clock(self) -> None: ...

    def current_time(self) -> float:
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        if math.isinf(deadline):
            # trio wakes tasks of its own in this way when a run ends, and then it takes a turn.
            self._idle_turns += 1
            if self._idle_turns > IDLE_TURNS:
                raise AssertionError("every task of the simulation waits for another, and for no time")
            return 0.0
        self._idle_turns = 0
        self.now = max(self.now, deadline)
        return 0.0


def run_simulated(main: Callable[[], Awaitable[Result]], *, seed: int = 0) -> Result:
    """Run ``main`` under a clock that begins at 0. The order in which trio takes ready tasks is drawn from the seed."""
    # (trio has no public way to that; its plugin for hypothesis does the same)
    scheduling = trio._core._run
    before, scheduling._ALLOW_DETERMINISTIC_SCHEDULING = scheduling._ALLOW_DETERMINISTIC_SCHEDULING, True
    scheduling._r.seed(seed)
    try:
        return trio.run(main, clock=JumpClock())
    finally:
        scheduling._ALLOW_DETERMINISTIC_SCHEDULING = before
