"""Where the blocking work of a store is done: in threads, or on the spot for a simulation that owns the clock."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

import trio

from llmgw.store.faults import CLOSED, StoreBusy, StoreFailed
from llmgw.store.writing import Write

T = TypeVar("T")
Commit: TypeAlias = Callable[[Sequence[Write]], None]

MAX_WAITING = 1024
# More in one transaction would not be quicker, and would make the first of them wait for the last.
MAX_TOGETHER = 256


class Writer(Protocol):
    """Takes writes on, and does each that it took."""

    async def put(self, write: Write) -> None:
        """Return when it is done. StoreBusy or StoreFailed when it was not taken on; a caller that is cancelled
        meanwhile does not stop it."""

    async def close(self) -> None:
        """Take no more, do what was taken on, and come to the end."""


class Lanes(Protocol):
    async def run(self, act: Callable[[], T], *, may_leave: bool = False) -> T:
        """Its value, from where it may block. One at a time, and always to its end; with ``may_leave`` a caller that is
        cancelled does not wait for that."""

    def start_writer(self, commit: Commit, end: Callable[[], None]) -> Writer:
        """``commit`` is called for a few writes at a time, never twice at once, and ``end`` after the last of them.
        Neither raises anything."""


class Threads:
    """One thread that writes and one that does all else."""

    def __init__(self, *, max_waiting: int = MAX_WAITING) -> None:
        self._limiter = trio.CapacityLimiter(1)
        self._max_waiting = max_waiting

    async def run(self, act: Callable[[], T], *, may_leave: bool = False) -> T:
        return await trio.to_thread.run_sync(act, limiter=self._limiter, abandon_on_cancel=may_leave)

    def start_writer(self, commit: Commit, end: Callable[[], None]) -> Writer:
        return ThreadWriter(commit, end, max_waiting=self._max_waiting)


class ThreadWriter:
    """A thread that takes all that waits, has it committed, and wakes those who wait for it."""

    def __init__(self, commit: Commit, end: Callable[[], None], *, max_waiting: int) -> None:
        self._commit = commit
        self._end = end
        self._max_waiting = max_waiting
        self._token = trio.lowlevel.current_trio_token()
        self._queue: queue.SimpleQueue[tuple[Write, trio.Event] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._closed = False
        self._ended = trio.Event()
        # A disk that does not answer must not keep the program from ending.
        threading.Thread(target=self._run, name="store", daemon=True).start()

    async def put(self, write: Write) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise StoreFailed(CLOSED)
        if self._waiting >= self._max_waiting:
            raise StoreBusy(f"{self._waiting} writes wait for the disk of the store already: try again later")
        done = trio.Event()
        self._waiting += 1
        self._queue.put((write, done))
        await done.wait()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        await self._ended.wait()

    def _run(self) -> None:
        while (together := self._take()) is not None:
            self._commit([write for write, _ in together])
            self._tell(partial(self._wake, together))
        # Here, for nobody else knows that this thread is not in the middle of a commit.
        self._end()
        self._tell(self._ended.set)

    def _take(self) -> list[tuple[Write, trio.Event]] | None:
        """All that waits, at least one; None at the end."""
        first = self._queue.get()
        if first is None:
            return None
        together = [first]
        while len(together) < MAX_TOGETHER:
            try:
                following = self._queue.get_nowait()
            except queue.Empty:
                break
            if following is None:
                self._queue.put(None)
                break
            together.append(following)
        return together

    def _tell(self, act: Callable[[], None]) -> None:
        # When trio has ended nobody waits any more.
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(act)

    def _wake(self, together: list[tuple[Write, trio.Event]]) -> None:
        self._waiting -= len(together)
        for _, done in together:
            done.set()


class Inline:
    """Everything at once, where it is asked for: no thread, and no time that passes by itself."""

    async def run(self, act: Callable[[], T], *, may_leave: bool = False) -> T:
        await trio.lowlevel.checkpoint()
        return act()

    def start_writer(self, commit: Commit, end: Callable[[], None]) -> Writer:
        return InlineWriter(commit, end)


class InlineWriter:
    """Commits each write by itself."""

    def __init__(self, commit: Commit, end: Callable[[], None]) -> None:
        self._commit = commit
        self._end = end
        self._closed = False

    async def put(self, write: Write) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise StoreFailed(CLOSED)
        self._commit([write])
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end()
        await trio.lowlevel.checkpoint()
