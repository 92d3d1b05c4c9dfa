"""One line per request, written in batches: a line at a time would cost more than many a request does."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable

import trio

from llmgw.door.request import Request

PAUSE_SECONDS = 0.2
# What is kept between two batches. A log that can't be written fast enough loses lines, and says how many.
MAX_WAITING = 20_000


class RequestLog:
    """Takes finished requests, writes lines. ``write`` may block: it is called in a thread."""

    def __init__(self, write: Callable[[str], object], *, wall: Callable[[], float] = time.time) -> None:
        self._write = write
        self._wall = wall
        self._waiting: deque[tuple[float, Request]] = deque()
        self._dropped = 0

    def add(self, request: Request) -> None:
        """A plain call on the request's road: nothing is formatted here."""
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
        else:
            self._waiting.append((self._wall(), request))

    async def serve(self) -> None:
        """Write what there is, for ever; at the end what is left, within a second."""
        try:
            while True:
                await trio.sleep(PAUSE_SECONDS)
                if self._waiting or self._dropped:
                    await trio.to_thread.run_sync(self._write, self.take())
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                if self._waiting or self._dropped:
                    await trio.to_thread.run_sync(self._write, self.take())

    def take(self) -> str:
        """All lines that wait."""
        waiting, self._waiting = self._waiting, deque()
        dropped, self._dropped = self._dropped, 0
        lines = [format_request(at, request) for at, request in waiting]
        if dropped:
            lines.append(f"{dropped} requests are missing from this log: they ended faster than it was written\n")
        return "".join(lines)


def format_request(at: float, request: Request) -> str:
    """A request's line: when, id, who, what, how it ended, how long it took, its tokens."""
    words = [
        _second(int(at)),
        request.id,
        request.peer,
        request.head.method,
        _clean(request.path)[:200],
        str(request.status or "-"),
        str(request.outcome or "-"),
        f"{request.ended - request.began:.3f}s",
    ]
    if request.first_byte_at is not None:
        words.append(f"first={request.first_byte_at - request.began:.3f}s")
    if request.model is not None:
        words.append(f"model={_clean(request.model)}")
    if request.replica is not None:
        words.append(f"replica={request.replica}")
    if request.usage is not None:
        words.append(f"tokens={request.usage.prompt_tokens}+{request.usage.completion_tokens}")
    if request.problem is not None:
        words.append(f"problem={_clean(request.problem)[:500]!r}")
    return " ".join(words) + "\n"


@functools.lru_cache(maxsize=4)
def _second(at: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _clean(text: str) -> str:
    """No line of the log is a client's to make: control characters are shown, not obeyed."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
