"""Connections to engines and to the pages: dialled, kept, lent to one run at a time, and closed when it leaves.

An engine notices that nobody wants its tokens any more only by its connection closing, so a run that ends early always
takes the connection with it.
"""

from __future__ import annotations

import errno
import math
from typing import Protocol

from llmgw.core.replica import ShardAddress
from llmgw.door.http1 import BadResponse, ResponseHead, ResponseReader
from llmgw.door.steps import Destination, Failure
from llmgw.reactor.loop import Deadline, Reactor
from llmgw.reactor.transports import Plain, Transport

# Engines close an idle connection after 5 s (uvicorn, httplib); one that is reused just then loses its request.
IDLE_SECONDS = 2.0
# A kept connection that ends within this time of a request was closed before it came; later the engine had it.
RACE_SECONDS = 1.0
MAX_IDLE = 256
OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Lender(Protocol):
    """Who borrows a connection, and hears of its answer."""

    def answered(self, head: ResponseHead) -> None:
        """The answer's head came, and its whole body where that is set."""

    def moved(self, data: bytes, ended: bool) -> None:
        """A piece of the body came; ``ended`` with the last, which may be empty."""

    def rebound(self, upstream: Upstream) -> None:
        """The request has moved to another connection."""

    def failed(self, failure: Failure) -> None:
        """No more will come, and the answer is not complete. The connection is gone."""

    def on_crash(self, error: Exception) -> None: ...


class Dialer(Protocol):
    """Opens a transport to an address; tests hand in memory."""

    def __call__(self, reactor: Reactor, address: Destination, owner: Upstream) -> Transport: ...


def dial(reactor: Reactor, address: Destination, owner: Upstream) -> Transport:
    """A socket. OSError for what can't be dialled."""
    if isinstance(address, ShardAddress):
        raise OSError(errno.EHOSTUNREACH, "its node is not dialled, and has no trunk here")
    return Plain.connect(reactor, address, owner, connected=owner.connected)


def show_address(address: Destination) -> str:
    """As it stands in a sentence."""
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)


def explain_undialled(address: Destination, error: OSError) -> Failure:
    """Not even a socket could be had, or no trunk."""
    reason = f"no connection to {show_address(address)}: {error.strerror or error}"
    unreachable = isinstance(address, ShardAddress) and error.errno == errno.EHOSTUNREACH
    return Failure(reason, sent=False, busy=error.errno in OUT_OF_RESOURCES, unreachable=unreachable)


class Pool:
    """Idle connections by address, the last used first, so that the rest can grow old and go."""

    def __init__(self, reactor: Reactor, *, connect_seconds: float, dialer: Dialer = dial) -> None:
        self.reactor = reactor
        self.connect_seconds = connect_seconds
        self._dial = dialer
        self._idle: dict[Destination, list[Upstream]] = {}
        self._aging = Deadline(reactor, self, self._age)

    def on_crash(self, error: Exception) -> None:
        """Nothing of its own to end."""

    def ask(self, address: Destination, request: bytes, run: Lender, *, bodyless: bool) -> Upstream:
        """Send ``request`` on a kept or a new connection, lent to ``run`` until its answer is complete."""
        idle = self._idle.get(address)
        oldest = self.reactor.now - IDLE_SECONDS
        while idle:
            upstream = idle.pop()
            if upstream.idle_since >= oldest and not upstream.transport.closed:
                upstream.begin(run, request, bodyless=bodyless)
                return upstream
            upstream.abort()
        upstream = self.open(address)
        upstream.begin(run, request, bodyless=bodyless)
        return upstream

    def open(self, address: Destination) -> Upstream:
        """A new connection, not lent to anybody yet."""
        upstream = Upstream(self, address)
        try:
            upstream.transport = self._dial(self.reactor, address, upstream)
        except OSError:
            upstream.connected()
            raise
        return upstream

    def keep(self, upstream: Upstream) -> None:
        """Take a connection back."""
        idle = self._idle.get(upstream.address)
        if idle is None:
            idle = self._idle[upstream.address] = []
        if len(idle) >= MAX_IDLE:
            upstream.abort()
            return
        upstream.idle_since = self.reactor.now
        idle.append(upstream)
        if self._aging.at == math.inf:
            self._aging.set(self.reactor.now + IDLE_SECONDS)

    def forget(self, upstream: Upstream) -> None:
        """A kept connection has ended by itself."""
        idle = self._idle.get(upstream.address)
        if idle is not None and upstream in idle:
            idle.remove(upstream)

    def _age(self) -> None:
        oldest = self.reactor.now - IDLE_SECONDS
        for address, idle in list(self._idle.items()):
            old = [upstream for upstream in idle if upstream.idle_since <= oldest]
            idle[:] = [upstream for upstream in idle if upstream.idle_since > oldest]
            for upstream in old:
                upstream.abort()
            if not idle:
                del self._idle[address]
        if self._idle:
            self._aging.set(self.reactor.now + IDLE_SECONDS)

    def close(self) -> None:
        """Close all that is kept."""
        for idle in self._idle.values():
            for upstream in idle:
                upstream.abort()
        self._idle.clear()
        self._aging.drop()


class Upstream:
    """One connection; it speaks for at most one run at a time."""

    __slots__ = (
        "_bodyless",
        "_connecting",
        "_head_told",
        "_request",
        "_reused",
        "_run",
        "_sent_at",
        "_touched",
        "address",
        "idle_since",
        "pool",
        "reader",
        "transport",
    )

    transport: Transport

    def __init__(self, pool: Pool, address: Destination) -> None:
        self.pool = pool
        self.address = address
        self.reader = ResponseReader()
        self.idle_since = 0.0
        self._run: Lender | None = None
        self._request = b""
        self._sent_at = 0.0
        self._reused = self._touched = self._head_told = self._bodyless = False
        self._connecting: Deadline | None = Deadline(pool.reactor, self, self._connect_late)
        self._connecting.set(pool.reactor.now + pool.connect_seconds)

    def begin(self, run: Lender, request: bytes, *, bodyless: bool) -> None:
        """Send ``request`` for ``run``."""
        self._run = run
        self._request = request
        self._bodyless = bodyless
        self._touched = self._head_told = False
        self._sent_at = self.pool.reactor.now
        self.reader.begin(bodyless=bodyless)
        self.transport.send(request)

    def pause(self) -> None:
        self.transport.pause()

    def resume(self) -> None:
        self.transport.resume()

    def abort(self) -> None:
        """Whoever borrowed it has left: close, so that the engine stops."""
        self._run = None
        self._close()

    def _close(self) -> None:
        self._request = b""
        self.connected()
        self.reader.close()
        self.transport.abort()

    def connected(self) -> None:
        """It stands (or never will): the time limit on connecting is off."""
        if self._connecting is not None:
            self._connecting.end()
            self._connecting = None

    def _connect_late(self) -> None:
        self._fail(f"no connection within {self.pool.connect_seconds:g} s")

    # -- from the transport

    def on_crash(self, error: Exception) -> None:
        run, self._run = self._run, None
        self._close()
        if run is not None:
            run.on_crash(error)

    def received(self, data: bytes) -> None:
        run = self._run
        if run is None:
            # words that nobody asked for: the next answer could not be told from them
            self.pool.forget(self)
            return self._close()
        if not self._touched:
            self._touched = True
            # it can't be sent again now, and a stream may last for long
            self._request = b""
        reader = self.reader
        try:
            body = reader.feed(data)
        except BadResponse as error:
            return self._fail(str(error))
        if not self._head_told:
            head = reader.head
            if head is None:
                return
            self._head_told = True
            if reader.ended:
                head.body = body
                run.answered(head)
                return self._give_back(head)
            run.answered(head)
        if reader.ended:
            # while it is still lent: what this raises must end the run
            run.moved(body, True)
            self._give_back(reader.head)
        elif body:
            run.moved(body, False)
        return None

    def _give_back(self, head: ResponseHead | None) -> None:
        self._run = None
        self._request = b""
        if head is not None and head.keep_alive and not self.reader.spoiled and not self.transport.pending:
            self._reused = True
            self.transport.resume()
            self.pool.keep(self)
        else:
            self._close()

    def ended(self) -> None:
        run = self._run
        if run is not None and self.reader.finish():
            run.moved(b"", True)
            self._run = None
            self._close()
        else:
            self._fail("the engine closed the connection before its answer was complete")

    def lost(self, reason: str) -> None:
        self._fail(reason)

    def drained(self) -> None:
        """A request waits for its answer, not for its own bytes."""

    def _fail(self, reason: str) -> None:
        run, self._run = self._run, None
        request, sent = self._request, self._connecting is None
        self._close()
        if run is None:
            return self.pool.forget(self)
        if self._reused and not self._touched and self.pool.reactor.now < self._sent_at + RACE_SECONDS:
            # it was closed as we reused it, and not one byte came: the engine has not taken the request
            try:
                again = self.pool.open(self.address)
            except OSError as error:
                return run.failed(explain_undialled(self.address, error))
            run.rebound(again)
            again.begin(run, request, bodyless=self._bodyless)
            return None
        run.failed(Failure(reason, sent))
        return None
