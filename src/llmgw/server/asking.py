"""One request to an engine by a task of the server's own, on the connections that clients' requests take.

It is nobody's request: no limit counts it, no log or usage has it, and it goes where it is told to go.
"""

from __future__ import annotations

import trio

from llmgw.dialects.toolreplies import Reply
from llmgw.door.http1 import ResponseHead
from llmgw.door.steps import Destination, Failure
from llmgw.door.upstream import Pool, Upstream, explain_undialled

MAX_REPLY_BYTES = 4 * 1024 * 1024


async def ask_engine(pool: Pool, address: Destination, path: str, body: bytes, *, seconds: float) -> Reply:
    """POST ``body``; the whole reply, or what came of it instead. Whoever is cancelled meanwhile stops the engine."""
    lines = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head = f"{lines}accept: application/json, text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n"
    asking = _Asking(pool, address, head.encode() + body)
    # by the run-queue: only in a turn of its own does the reactor know what time it is
    pool.reactor.call_soon(asking, asking.begin)
    try:
        with trio.move_on_after(seconds):
            await asking.over.wait()
    finally:
        asking.leave()
    if not asking.over.is_set():
        begun = "came to no end" if asking.status else "did not begin"
        return Reply(status=asking.status, problem=f"the answer {begun} within {seconds:g} s")
    return Reply(status=asking.status, body=bytes(asking.body), problem=asking.problem)


class _Asking:
    """Borrows a connection, and keeps what comes."""

    __slots__ = ("_address", "_left", "_pool", "_request", "_upstream", "body", "over", "problem", "status")

    def __init__(self, pool: Pool, address: Destination, request: bytes) -> None:
        self._pool = pool
        self._address = address
        self._request = request
        self._upstream: Upstream | None = None
        self._left = False
        self.over = trio.Event()
        self.status = 0
        self.body = bytearray()
        self.problem: str | None = None

    def begin(self) -> None:
        if self._left:
            return
        try:
            self._upstream = self._pool.ask(self._address, self._request, self, bodyless=False)
        except OSError as error:
            self.failed(explain_undialled(self._address, error))

    def leave(self) -> None:
        """Nobody waits any more: the connection goes, unless it was given back already."""
        self._left = True
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()

    def _end(self, problem: str | None = None) -> None:
        self._upstream = None
        self.problem = problem
        self.over.set()

    # -- from the connection

    def answered(self, head: ResponseHead) -> None:
        self.status = head.status
        if head.coding is not None:
            self._cut("it is compressed, which nobody asked for", ended=head.body is not None)
        elif head.body is not None:
            self.moved(head.body, True)

    def moved(self, data: bytes, ended: bool) -> None:
        if self.over.is_set():
            return
        self.body += data
        if len(self.body) > MAX_REPLY_BYTES:
            self._cut(f"it is longer than {MAX_REPLY_BYTES // 1024**2} MiB", ended=ended)
        elif ended:
            self._end()

    def _cut(self, why: str, *, ended: bool) -> None:
        upstream = self._upstream
        self._end(f"the answer can't be used: {why}")
        # (one that has ended is given back by itself)
        if upstream is not None and not ended:
            upstream.abort()

    def rebound(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def failed(self, failure: Failure) -> None:
        self._end(failure.reason)

    def on_crash(self, error: Exception) -> None:
        upstream = self._upstream
        self._end("llmgw failed at this: its log says why")
        if upstream is not None:
            upstream.abort()
