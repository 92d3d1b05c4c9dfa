"""The door itself: accepts clients, counts them, and drains them when the program stops."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable
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
from llmgw.reactor.transports import Plain, Transport

log = logging.getLogger("llmgw.door")

BACKLOG = 1024
ACCEPTS_A_TURN = 64
# After "too many open files" accepting rests: the listener stays readable, and the loop would spin on it.
REST_SECONDS = 0.5
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
        # while draining: connections whose last reply is not out yet
        self._leaving: list[Transport] = []
        self._turned_away: list[Plain] = []
        self._prefix = os.urandom(5).hex()
        self._number = 0

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
        client.transport = Plain(self.reactor, sock, client, watch_hangup=True)
        self.clients.add(client)

    def _turn_away(self, sock: socket.socket) -> None:
        message = f"This server has {self.limits.max_connections} connections open already (max_connections)."
        body = error_body(Refusal(status=503, code="too_many_connections", message=message))
        head = (
            "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 2\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {self.next_id()}\r\nconnection: close\r\n\r\n"
        )
        self._turned_away = [transport for transport in self._turned_away if not transport.closed]
        if len(self._turned_away) >= MAX_TURNED_AWAY:
            self.reactor.close_later(sock)
            return
        transport = Plain(self.reactor, sock, _Nobody())
        self._turned_away.append(transport)
        transport.send(head.encode() + body)
        transport.close(linger=True)

    def forget(self, client: Client) -> None:
        """A connection is over, but for what its transport still has to send."""
        self.clients.discard(client)
        if self.draining and client.transport.pending:
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
        while any(transport.pending for transport in self._leaving):  # noqa: ASYNC110 - a closed client is told nothing
            await trio.sleep(LEAVING_LOOK_SECONDS)

    def hurry(self) -> None:
        """Wait for running requests no longer."""
        self._leaving.clear()
        self._empty.set()

    def close(self) -> None:
        """End what is left, now; ``wait_sent`` waits for the last words."""
        self.draining = True
        for client in list(self.clients):
            client.stop()
        for transport in self._turned_away:
            transport.abort()
        self.pool.close()


class _Nobody:
    """The owner of a connection that was turned away: whatever comes of it, nobody minds."""

    def received(self, data: bytes) -> None: ...

    def ended(self) -> None: ...

    def lost(self, reason: str) -> None: ...

    def drained(self) -> None: ...

    def on_crash(self, error: Exception) -> None: ...


class Listener:
    """A listening socket in the reactor."""

    def __init__(self, reactor: Reactor, sock: socket.socket, door: Door) -> None:
        self._reactor = reactor
        self._sock = sock
        self._door = door
        self._rest = Deadline(reactor, self, self._open)
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
                log.error("can't accept clients: %s; trying again in %s s", error, REST_SECONDS)
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


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; UsageError says what stands in the way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # inherited by accepted sockets: a token must not wait for the last one's acknowledgement
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        ways = "choose another with --port" if error.errno == errno.EADDRINUSE else "check the address"
        raise UsageError(f"can't listen on {host}:{port}: {error.strerror}; {ways}") from error
    return sock
