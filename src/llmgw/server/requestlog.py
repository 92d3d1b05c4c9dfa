"""One line per request, written in batches: a line at a time would cost more than many a request does."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable

import trio

from llmgw.door.request import Request
from llmgw.units import printable

PAUSE_SECONDS = 0.2
LAST_SECONDS = 1.0
# What is kept between two batches. A log that can't be written fast enough loses lines, and says how many.
MAX_WAITING = 20_000
# Of these, as whole requests: each may hold a head of 64 KiB.
MAX_WHOLE = 1_000


class RequestLog:
    """Takes finished requests, writes lines. ``write`` may block: it is called in a thread."""

    def __init__(self, write: Callable[[str], object], *, wall: Callable[[], float] = time.time) -> None:
        self._write = write
        self._wall = wall
        self._waiting: deque[tuple[float, Request]] = deque()
        self._lines: deque[str] = deque()
        self._dropped = 0

    def add(self, request: Request) -> None:
        """A plain call on the request's road: nothing is formatted here, as long as the log is written."""
        waiting = self._waiting
        if len(waiting) >= MAX_WHOLE:
            self._shorten()
        waiting.append((self._wall(), request))

    def _shorten(self) -> None:
        """Whole requests may hold a large head each: while the log is blocked only their lines wait."""
        at, request = self._waiting.popleft()
        if len(self._lines) >= MAX_WAITING:
            self._dropped += 1
        else:
            self._lines.append(format_request(at, request))

    async def serve(self) -> None:
        """Write what there is, for ever; at the end what is left, within a second."""
        try:
            while True:
                await trio.sleep(PAUSE_SECONDS)
                await self._write_waiting()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + LAST_SECONDS):
                await self._write_waiting()

    async def _write_waiting(self) -> None:
        count = len(self._waiting) + len(self._lines) + self._dropped
        if not count:
            return
        try:
            # whoever should read the log may have stopped: nothing waits for that longer than it must
            await trio.to_thread.run_sync(self._write, self.take(), abandon_on_cancel=True)
        except OSError:
            # nobody reads it any more (a pipe to head), or its disk is full: the server serves on
            self._dropped += count

    def take(self) -> str:
        """All lines that wait."""
        waiting, self._waiting = self._waiting, deque()
        dropped, self._dropped = self._dropped, 0
        lines = list(self._lines)
        self._lines.clear()
        lines.extend(format_request(at, request) for at, request in waiting)
        if dropped:
            lines.append(f"{dropped} requests are missing from this log: they ended faster than it was written\n")
        return "".join(lines)


def format_request(at: float, request: Request) -> str:
    """A request's line: when, id, who, what, how it ended, how long it took, its tokens."""
    began, usage = request.began, request.usage
    first = f" first={request.first_byte_at - began:.3f}s" if request.first_byte_at is not None else ""
    model = f" model={printable(request.model)}" if request.model is not None else ""
    replica = f" replica={request.replica}" if request.replica is not None else ""
    tokens = f" tokens={usage.prompt_tokens}+{usage.completion_tokens}" if usage is not None else ""
    problem = f" problem={printable(request.problem)[:500]!r}" if request.problem is not None else ""
    return (
        f"{_second(int(at))} {request.id} {request.peer} {request.head.method} {printable(request.path)[:200]} "
        f"{request.status or '-'} {request.outcome or '-'} {request.ended - began:.3f}s"
        f"{first}{model}{replica}{tokens}{problem}\n"
    )


@functools.lru_cache(maxsize=4)
def _second(at: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
