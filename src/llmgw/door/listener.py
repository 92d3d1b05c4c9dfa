"""The door itself: accepts clients, counts them, and drains them when the program stops."""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import trio

from llmgw.config.node import Limits, Timeouts
from llmgw.dialects.openai import error_body
from llmgw.dialects.refusal import Refusal
from llmgw.door.budget import Budget
from llmgw.door.client import Client
from llmgw.door.exchange import Gateway
from llmgw.door.origin import Origins
from llmgw.door.upstream import Pool
from llmgw.errors import UsageError
from llmgw.reactor.loop import IN, Deadline, Reactor
from llmgw.reactor.transports import NOBODY, Plain, Transport

log = logging.getLogger("llmgw.door")

BACKLOG = 1024
ACCEPTS_A_TURN = 64
# After "too many open files" accepting rests: the listener stays readable, and the loop would spin on it.
REST_SECONDS = 0.5
# How often that is told, while it lasts.
TELL_SECONDS = 60.0
# Descriptors that are neither a client's nor for its engine: of pages, of other machines, of files that are read.
SPARE_DESCRIPTORS = 24
SPARE_PART = 16
LEAVING_LOOK_SECONDS = 0.05
# Connections over the limit that still get to read why, for a moment; more than these are just closed.
MAX_TURNED_AWAY = 64

Spawn = Callable[..., Any]


class Door:
    """What the connections share. ``spawn`` starts a trio task (a nursery's ``start_soon``) for what must wait."""

    def __init__(
        self,
        reactor: Reactor,
        gateway: Gateway,
        *,
        spawn: Spawn,
        origins: Origins,
        limits: Limits,
        timeouts: Timeouts,
        pool: Pool | None = None,
    ) -> None:
        """``pool``: where the connections to engines come from, if they are not just dialled."""
        self.reactor = reactor
        self.gateway = gateway
        self.spawn = spawn
        self.origins = origins
        self.limits = limits
        self.timeouts = timeouts
        self.pool = pool or Pool(reactor, connect_seconds=timeouts.connect)
        self.budget = Budget(reactor, limits.bodies_total)
        self.draining = False
        self.clients: set[Client] = set()
        self._empty = trio.Event()
        # connections whose last reply is not out yet
        self._leaving: list[Transport] = []
        self._hurried = False
        self._turned_away: list[Plain] = []
        self._prefix = os.urandom(5).hex()
        self._number = 0

    def reconfigure(self, origins: Origins, limits: Limits, timeouts: Timeouts) -> None:
        """Go by these from here on; what has begun under the old ones ends under them where it has looked already."""
        self.origins = origins
        self.limits = limits
        self.timeouts = timeouts
        self.budget.resize(limits.bodies_total)
        self.pool.connect_seconds = timeouts.connect

    def next_id(self) -> str:
        """A request's id: not to be guessed from another program's, and cheap."""
        self._number += 1
        return f"req-{self._prefix}{self._number:08x}"

    def admit(self, sock: socket.socket, peer: str) -> None:
        """A connection was accepted."""
        if len(self.clients) >= self.limits.max_connections:
            self._turn_away(sock)
            return
        client = Client(self, peer)
        client.transport = Plain(self.reactor, sock, client, watch_hangup=True, flush_seconds=self.timeouts.idle)
        self.clients.add(client)

    def _turn_away(self, sock: socket.socket) -> None:
        message = f"This server has {self.limits.max_connections} connections open already (max_connections)."
        body = error_body(Refusal(status=503, code="too_many_connections", message=message))
        head = (
            "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 2\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {self.next_id()}\r\nconnection: close\r\n\r\n"
        )
        self._turned_away = [transport for transport in self._turned_away if not transport.closed]
        # (few, where descriptors are few: they take some of those that the others were promised)
        if len(self._turned_away) >= min(MAX_TURNED_AWAY, max(4, self.limits.max_connections // 8)):
            # the one that has had the most time to read why
            self._turned_away.pop(0).abort()
        transport = Plain(self.reactor, sock, NOBODY)
        self._turned_away.append(transport)
        transport.send(head.encode() + body)
        transport.close(linger=True)

    def forget(self, client: Client) -> None:
        """A connection is over, but for what its transport still has to send."""
        self.clients.discard(client)
        if client.transport.pending:
            self._leaving = [transport for transport in self._leaving if transport.pending]
            self._leaving.append(client.transport)
        if self.draining and not self.clients:
            self._empty.set()

    async def drain(self) -> None:
        """Let running requests end; the caller bounds the time and calls ``close`` after."""
        self.draining = True
        for client in list(self.clients):
            client.close_idle()
        if self.clients:
            await self._empty.wait()
        await self.wait_sent()

    async def wait_sent(self) -> None:
        """Wait until the last words of closed connections are out; the caller bounds the time."""
        while self._has_unsent() and not self._hurried:  # noqa: ASYNC110 - a closed client is told nothing
            await trio.sleep(LEAVING_LOOK_SECONDS)

    def _has_unsent(self) -> bool:
        return any(transport.pending for transport in self._leaving)

    def reset_unsent(self) -> None:
        """Wait for last words no longer: the end of the program must not pass for that of a reply that is not out."""
        for transport in self._leaving:
            if transport.pending:
                transport.reset()

    def hurry(self) -> None:
        """Wait for running requests no longer."""
        self._hurried = True
        self._empty.set()

    def close(self) -> None:
        """End what is left, now; ``wait_sent`` waits for the last words."""
        self.draining = True
        self._hurried = False
        for client in list(self.clients):
            client.stop()
        for transport in self._turned_away:
            transport.abort()
        self.pool.close()


def count_descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))


def fit_limits(limits: Limits, used: int) -> Limits:
    """The same, with no more connections than this process has descriptors for: each may need one more for its engine.

    ``used``: how many were open before the first client came.
    """
    have, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if have == resource.RLIM_INFINITY:
        return limits
    others = used + SPARE_DESCRIPTORS + have // SPARE_PART
    fit = max(1, (have - others) // 2)
    if fit >= limits.max_connections:
        return limits
    log.warning(
        "limits.max_connections is %d, and there are descriptors for %d (%d in all): taking no more than these; "
        "raise the limit of the system (ulimit -n) to %d for all",
        limits.max_connections,
        fit,
        have,
        (used + SPARE_DESCRIPTORS + 2 * limits.max_connections) * SPARE_PART // (SPARE_PART - 1),
    )
    return replace(limits, max_connections=fit)


class Listener:
    """A listening socket in the reactor."""

    def __init__(self, reactor: Reactor, sock: socket.socket, door: Door) -> None:
        self._reactor = reactor
        self._sock = sock
        self._door = door
        self._rest = Deadline(reactor, self, self._open)
        self._told_at = -math.inf
        self.address: tuple[str, int] = sock.getsockname()[:2]
        self._open()

    def _open(self) -> None:
        self._reactor.register(self._sock.fileno(), IN, self)

    def on_crash(self, error: Exception) -> None:
        """One accept failed in an unforeseen way; the listener goes on."""

    def on_event(self, mask: int) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # mostly too many open files; whatever it is, it will be the same at the next turn
                if self._reactor.now >= self._told_at + TELL_SECONDS:
                    self._told_at = self._reactor.now
                    log.error("can't accept clients: %s; trying again every %s s", error.strerror, REST_SECONDS)
                self._reactor.unregister(self._sock.fileno())
                self._rest.set(self._reactor.now + REST_SECONDS)
                return
            sock.setblocking(False)
            self._door.admit(sock, address[0])

    def close(self) -> None:
        """Accept nothing more."""
        self._rest.drop()
        if self._sock.fileno() >= 0:
            self._reactor.unregister(self._sock.fileno())
            self._reactor.close_later(self._sock)


def bind(host: str, port: int, *, ways: str = "choose another with --port") -> socket.socket:
    """A listening socket, on all addresses where ``host`` is empty. UsageError says what stands in the way.

    ``ways``: what to do about a port that is taken.
    """
    everywhere = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host or everywhere else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if everywhere:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # inherited by accepted sockets: a token must not wait for the last one's acknowledgement
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        what = ways if error.errno == errno.EADDRINUSE else "check the address"
        if error.errno == errno.EACCES:
            what = f"ports this low are kept for root; {ways}"
        raise UsageError(f"can't listen on {host}:{port}: {error.strerror}; {what}") from error
    return sock
