"""One epoll object drained by one trio task: descriptors, a run-queue and deadlines, all as plain callbacks.

A task per connection costs a wake-up, a cancel scope and a rescheduling for every chunk; here everything that is ready
shares one wake-up. The laws that come with it: a callback never blocks; whatever it raises ends only what it belongs
to; and a turn gives way after ``TURN_SECONDS``, so that the program's tasks run beside it.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import trio

log = logging.getLogger("llmgw.reactor")

IN, OUT = select.EPOLLIN, select.EPOLLOUT
RDHUP = select.EPOLLRDHUP
GONE = select.EPOLLHUP | select.EPOLLERR

TURN_SECONDS = 0.002
BATCH = 256
# One look at the clock per this many callbacks: the clock costs as much as a small callback does.
LOOK_EVERY = 16
TICK_SECONDS = 0.25
# Under a steady trickle a wake-up costs more than the event it is for: then the loop looks again this much later, and
# one wake-up is shared by what came meanwhile. Far below what a reader can see.
GATHER_SECONDS = 0.0005
# Where gathering gathers nothing (one client that waits for each answer) it is tried once in so many wake-ups.
GATHER_AGAIN = 64


class Owner(Protocol):
    """Whatever a callback belongs to: told when it raised, so that this one thing ends and nothing else."""

    def on_crash(self, error: Exception) -> None: ...


class Watcher(Owner, Protocol):
    """What waits for a descriptor."""

    def on_event(self, mask: int) -> None: ...


class Reactor:
    """The table of descriptors, the run-queue and the deadlines. ``now`` is the time of the batch in hand."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.clock = clock
        self._sleep = sleep
        self.now = clock()
        self.lag_seconds = 0.0
        self._epoll = select.epoll()
        self._table: dict[int, Watcher] = {}
        self._queue: deque[tuple[Owner, Callable[..., None], tuple[Any, ...]]] = deque()
        self._batch: list[tuple[int, int]] = []
        self._closing: list[socket.socket] = []
        self._buckets: dict[int, dict[Deadline, None]] = {}
        self._first_bucket = math.inf
        self._ticking = trio.Event()
        self._parked = False
        self._gather_after = GATHER_AGAIN
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, IN)

    # -- descriptors

    def register(self, fd: int, mask: int, watcher: Watcher) -> None:
        """Call ``watcher.on_event`` while ``fd`` is as ``mask`` asks (level-triggered)."""
        self._epoll.register(fd, mask)
        self._table[fd] = watcher

    def modify(self, fd: int, mask: int) -> None:
        self._epoll.modify(fd, mask)

    def unregister(self, fd: int) -> None:
        """Forget ``fd``; events of it that are already in hand are dropped."""
        if self._table.pop(fd, None) is not None and not self._epoll.closed:
            self._epoll.unregister(fd)

    def close_later(self, sock: socket.socket) -> None:
        """Close after the batch in hand: a new connection on the same number must not get an old one's events."""
        self._closing.append(sock)
        if self._epoll.closed:
            # Its owner outlived the reactor; there is no batch in hand any more.
            self._close_sockets()
        if self._parked:
            self.wake()

    # -- the run-queue

    def call_soon(self, owner: Owner, call: Callable[..., None], *args: Any) -> None:
        """Call in this turn or the next, never from inside the caller; safe from any task of the same thread."""
        self._queue.append((owner, call, args))
        if self._parked:
            self.wake()

    def wake(self) -> None:
        """End the wait of ``serve``."""
        self._parked = False
        os.eventfd_write(self._wake, 1)

    # -- one turn

    def turn(self) -> bool:
        """Do what there is to do, for ``TURN_SECONDS`` at most. False when nothing is left."""
        clock = self.clock
        began = self.now = clock()
        end = began + TURN_SECONDS
        if began >= self._first_bucket * TICK_SECONDS:
            self._expire(began)
        while True:
            if not self._batch:
                self._close_sockets()
                self._batch = self._epoll.poll(0, BATCH)
                if not self._batch and not self._queue:
                    return False
                self._batch.reverse()
            if not self._run_batch(end) or not self._run_queue(end):
                self.lag_seconds = clock() - began
                return True
            # also with nothing in hand: under a steady trickle the next poll always finds something
            self.now = clock()
            if self.now >= end:
                self.lag_seconds = self.now - began
                return True

    def _run_batch(self, end: float) -> bool:
        batch, get = self._batch, self._table.get
        count = 0
        while batch:
            fd, mask = batch.pop()
            watcher = get(fd)
            if watcher is None:
                if fd == self._wake:
                    os.eventfd_read(fd)
                continue
            try:
                watcher.on_event(mask)
            except Exception as error:
                self._crashed(watcher, error)
            count += 1
            if count % LOOK_EVERY == 0 and self.clock() >= end:
                return False
        return True

    def _run_queue(self, end: float) -> bool:
        queue = self._queue
        count = 0
        while queue:
            owner, call, args = queue.popleft()
            try:
                call(*args)
            except Exception as error:
                self._crashed(owner, error)
            count += 1
            if count % LOOK_EVERY == 0 and self.clock() >= end:
                return False
        return True

    def _crashed(self, owner: Owner, error: Exception) -> None:
        log.error("a callback of %s failed", type(owner).__name__, exc_info=error)
        try:
            owner.on_crash(error)
        except Exception:
            log.exception("and ending it failed too")

    def _close_sockets(self) -> None:
        closing = self._closing
        while closing:
            try:
                closing.pop().close()
            except OSError as error:  # close() reports an earlier write error; the descriptor is gone all the same
                log.debug("closing a socket: %s", error)

    # -- deadlines: in buckets of a tick, so that thousands of them cost nothing until one is due

    def _schedule(self, deadline: Deadline, at: float) -> None:
        number = int(at / TICK_SECONDS) + 1
        deadline.bucket = number
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            if number < self._first_bucket:
                self._first_bucket = number
                self._ticking.set()
        bucket[deadline] = None

    def _unschedule(self, deadline: Deadline) -> None:
        bucket = self._buckets.get(deadline.bucket)
        if bucket is not None:
            bucket.pop(deadline, None)
        deadline.bucket = 0

    def _expire(self, now: float) -> None:
        reached = now / TICK_SECONDS
        for number in sorted(number for number in self._buckets if number <= reached):
            for deadline in self._buckets.pop(number):
                deadline.bucket = 0
                if deadline.at <= now:
                    # by the run-queue, whose time is bounded: thousands may be due at once
                    self._queue.append((deadline.owner, deadline.fire, ()))
                elif deadline.at != math.inf:
                    self._schedule(deadline, deadline.at)
        self._first_bucket = min(self._buckets, default=math.inf)

    # -- in trio

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Turn for ever."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tick)
                task_status.started()
                while True:
                    if self.turn():
                        await trio.lowlevel.checkpoint()
                        continue
                    self._parked = True
                    try:
                        await trio.lowlevel.wait_readable(self._epoll.fileno())
                    finally:
                        self._parked = False
                    self._gather()
        finally:
            self.close()

    def _gather(self) -> None:
        """Let others join the event that woke the loop, as long as others come."""
        if self._gather_after:
            self._gather_after -= 1
            return
        self._sleep(GATHER_SECONDS)
        self._batch = self._epoll.poll(0, BATCH)
        self._batch.reverse()
        if len(self._batch) < 2:
            self._gather_after = GATHER_AGAIN

    async def _tick(self) -> None:
        while True:
            if self._buckets:
                await trio.sleep(TICK_SECONDS)
                if self._parked and self.clock() >= self._first_bucket * TICK_SECONDS:
                    self.wake()
            else:
                self._ticking = trio.Event()
                await self._ticking.wait()

    def close(self) -> None:
        """Give the descriptors back; what is still registered is left to its owner."""
        self._close_sockets()
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake)


class Deadline:
    """One time limit that moves often: moving it later, or clearing it, costs an assignment.

    It sits in the reactor's buckets at the earliest time asked for and looks again when that has come. It fires up to
    two ``TICK_SECONDS`` late (one for the bucket, one for a loop that sleeps), never early.
    """

    __slots__ = ("at", "bucket", "call", "owner", "reactor")

    def __init__(self, reactor: Reactor, owner: Owner, call: Callable[[], None]) -> None:
        self.reactor = reactor
        self.owner = owner
        self.call = call
        self.at = math.inf
        self.bucket = 0

    def set(self, at: float) -> None:
        """Call at ``at`` (the reactor's clock) instead of whatever was set before."""
        self.at = at
        bucket = self.bucket
        if bucket == 0:
            self.reactor._schedule(self, at)
        elif at < (bucket - 1) * TICK_SECONDS:
            self.reactor._unschedule(self)
            self.reactor._schedule(self, at)

    def clear(self) -> None:
        """Never call, unless it is set again."""
        self.at = math.inf

    def drop(self) -> None:
        """Leave the buckets, so that nothing keeps the owner in memory."""
        self.at = math.inf
        if self.bucket:
            self.reactor._unschedule(self)

    def end(self) -> None:
        """The owner has ended: drop, and call it never again; they no longer know each other."""
        self.drop()
        self.owner, self.call = _NOBODY, _nothing

    def fire(self) -> None:
        """Its time has come: call, unless it was moved or cleared since."""
        if self.at <= self.reactor.now:
            self.at = math.inf
            self.call()


class _Nobody:
    """The owner of a deadline that has ended."""

    def on_crash(self, error: Exception) -> None: ...


_NOBODY = _Nobody()


def _nothing() -> None: ...
