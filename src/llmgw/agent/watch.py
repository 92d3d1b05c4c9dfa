"""Looks at things that may not answer: in a thread, for so long, and never in a second thread beside one that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import trio

T = TypeVar("T")

PATIENCE_SECONDS = 3.0
# A driver that wakes its cards for each look takes seconds to, and answers.
SLOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(Generic[T]):
    """What there was when it was last seen. ``silent_seconds``: for how long a look has been without an answer, 0 while
    that is no longer than an answer may take."""

    value: T
    silent_seconds: float = 0.0


class Watch(Generic[T]):
    """One thing that is looked at again and again. Before it was ever seen it is ``unseen``.

    A driver that hangs holds its thread for as long as it does, and nothing can end that: the thread is left to it.
    Until it comes back nobody waits for another. What a slow one says in the end is kept for the next look.
    """

    __slots__ = ("_began", "_last", "_limiter", "_patience_seconds", "_slow_seconds", "_was_seen")

    def __init__(
        self, unseen: T, *, patience_seconds: float = PATIENCE_SECONDS, slow_seconds: float = SLOW_SECONDS
    ) -> None:
        self._last = unseen
        self._was_seen = False
        self._patience_seconds = patience_seconds
        self._slow_seconds = slow_seconds
        self._limiter = trio.CapacityLimiter(1)
        # When the look began that is under way, for whoever may read it from another thread.
        self._began: float | None = None

    async def look(self, read: Callable[[], T], *, patient: bool = False) -> Seen[T]:
        """What ``read`` says, or said last when it does not answer in time; what it raises is raised.

        ``patient``: wait for as long as an answer may take, as is done where there never was one.
        """
        if not self._measure_silence():
            long = patient or not self._was_seen
            with trio.move_on_after(self._slow_seconds if long else self._patience_seconds):
                await trio.to_thread.run_sync(self._read, read, abandon_on_cancel=True, limiter=self._limiter)
        return Seen(value=self._last, silent_seconds=self._measure_silence())

    def _read(self, read: Callable[[], T]) -> None:
        self._began = time.monotonic()
        try:
            self._last = read()
            self._was_seen = True
        finally:
            self._began = None

    def _measure_silence(self) -> float:
        began = self._began
        waited = 0.0 if began is None else time.monotonic() - began
        return waited if waited >= self._slow_seconds else 0.0
