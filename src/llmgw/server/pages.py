"""Serves pages at a unix socket or a port: hypercorn's protocol code under an accept loop of our own.

The only room that knows hypercorn. Its own server is not used, because one odd request ends it, a client that never
reads holds its end up for ever, and a dead connection can leave a task behind (docs/decisions/0001).
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass, field
from typing import Any, cast

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import wrap_app
from quart_trio import QuartTrio

from llmgw.server.socket_file import open_socket_file

log = logging.getLogger(__name__)

BACKLOG = 1024
# The door keeps fewer connections than this; the rest is a leak, which must not take every descriptor with it.
MAX_CONNECTIONS = 1024
# A client may read slowly, and the door as slowly as its client. Past this it is gone for all purposes.
WRITE_SECONDS = 60.0
# What hypercorn gets to finish its bookkeeping of a connection, and what a dead one gets before its tasks are ended.
SETTLE_SECONDS = 5.0
LINGER_SECONDS = 1.0
MAX_READ_BYTES = 64 * 1024
# Longer than the door keeps an idle connection, so that it is never closed while a request is on its way.
KEEP_ALIVE_SECONDS = 75
# From the first byte of a head to its last.
HEAD_SECONDS = 10.0
# The door's own limit for a head is 64 KiB, and it adds headers of its own.
MAX_HEAD_BYTES = 80 * 1024
# Forms and nothing else come here.
MAX_BODY_BYTES = 1024 * 1024
# What goes to the log: this many records in each window.
LOG_RECORDS = 20
LOG_WINDOW_SECONDS = 60.0


async def serve_pages(
    app: QuartTrio,
    at: str | socket.socket,
    *,
    drain_seconds: float,
    max_connections: int = MAX_CONNECTIONS,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``app`` until cancelled; then running answers have ``drain_seconds`` to end, and idle connections none.

    ``at`` is the path of a unix socket that is made for it, or a socket that listens already and is closed at the end.
    ``app`` has no lifespan: what outlives a request is planted in the tree. LlmgwError when the path can't be opened.
    """
    # Quart cuts a long answer after 60 s and says nothing. The door has the timeouts.
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["BODY_TIMEOUT"] = None
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    for logger in (log, app.logger):
        logger.addFilter(SPARING)
    # of its accept loop, ten times a second while there are no descriptors
    logging.getLogger("trio.serve_listeners").addFilter(ACCEPTING)
    config = _protocol_config()
    connections = _Connections(
        app=wrap_app(cast("Any", app), 0, "asgi"),
        config=config,
        drain_seconds=drain_seconds,
        max_connections=max_connections,
    )
    with open_socket_file(at, backlog=BACKLOG) if isinstance(at, str) else at as listening:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        async with trio.open_nursery() as nursery:
            held = await nursery.start(connections.hold)
            # Whoever dials from here on waits in the backlog at worst.
            task_status.started()
            try:
                await trio.serve_listeners(connections.converse, [listener], handler_nursery=held)
            finally:
                connections.stopping.set()


def _protocol_config() -> Config:
    config = Config()
    config.errorlog = log
    config.accesslog = None
    config.include_server_header = False
    config.h11_max_incomplete_size = MAX_HEAD_BYTES
    # hypercorn's read_timeout counts the client's silence while an answer streams: it would cut every long one.
    config.read_timeout = None
    return config


@dataclass(slots=True, kw_only=True)
class _Connections:
    """All connections: each under a guard of its own, and all of them outliving the accept loop."""

    app: AppWrapper
    config: Config
    drain_seconds: float
    max_connections: int
    context: WorkerContext = field(default_factory=lambda: WorkerContext(None))
    live: set[trio.SocketStream] = field(default_factory=set)
    stopping: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)

    async def hold(self, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """Keep the nursery of the connections out of reach of what cancels the accept loop, until all have ended."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                task_status.started(nursery)
                await self.stopping.wait()
                # Idle connections end now, the others with their answer.
                await self.context.terminated.set()
                with trio.move_on_after(self.drain_seconds):
                    while self.live:
                        self.ended = trio.Event()
                        await self.ended.wait()
                # A write to a client that does not read is shielded: only its socket's end wakes it.
                for stream in self.live:
                    stream.socket.close()
                nursery.cancel_scope.cancel()

    async def converse(self, stream: trio.SocketStream) -> None:
        """One connection from its first byte to its last. No exception leaves: it ends this connection and no other."""
        if len(self.live) >= self.max_connections:
            log.error("the pages have %d connections and take no more", self.max_connections)
            stream.socket.close()
            return
        self.live.add(stream)
        try:
            await _Connection(self.app, self.config, self.context, stream).run()
        except* Exception as group:
            for error in _leaves(group):
                log.warning("a connection to the pages ended with %s: %s", type(error).__name__, error)
        finally:
            self.live.discard(stream)
            stream.socket.close()
            self.ended.set()


class _Connection(TCPServer):
    """hypercorn's conversation on one connection, with three bounds it lacks: on a head that has begun, on a write, and
    on what outlives it."""

    def __init__(self, app: AppWrapper, config: Config, context: WorkerContext, stream: trio.SocketStream) -> None:
        super().__init__(app, config, context, ConnectionState({}), cast("Any", stream))
        self.over = trio.Event()
        # between two requests, and before the first
        self.idle = trio.CancelScope(deadline=trio.current_time() + KEEP_ALIVE_SECONDS)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._reap, nursery.cancel_scope)
            await super().run()
            nursery.cancel_scope.cancel()

    async def _reap(self, scope: trio.CancelScope) -> None:
        """End what outlives the connection: an idle timer, or a request behind an answer that now never comes."""
        await self.over.wait()
        await trio.sleep(LINGER_SECONDS)
        scope.cancel()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            async with self.send_lock:
                written = await self._write(event.data)
            if not written:
                self.over.set()
                self.stream.socket.close()
                await self.protocol.handle(Closed())
        else:
            if isinstance(event, Updated) and event.idle:
                self.idle = trio.CancelScope(deadline=trio.current_time() + KEEP_ALIVE_SECONDS)
            # quart-trio cancels the request's task as soon as it hears of the end, which is in the middle of this call:
            # without the shield no idle timer is started, and "Connection: close" never closes.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + SETTLE_SECONDS):
                await super().protocol_send(event)

    async def _write(self, data: bytes) -> bool:
        """Whether all of it went out. Half a chunk must not stay unsent because a request was cancelled: shielded."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + WRITE_SECONDS):
            try:
                await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
            return True
        return False

    async def _idle_timeout(self) -> None:
        with self.idle:
            await self.context.terminated.wait()
        with trio.CancelScope(shield=True):
            await self._initiate_server_close()

    async def _read_data(self) -> None:
        while (data := await self._read()) is not None:
            # Of what is behind a head it has no effect: by then nothing is idle.
            self.idle.deadline = min(self.idle.deadline, trio.current_time() + HEAD_SECONDS)
            await self.protocol.handle(RawData(data))
            if not data:
                break
        await self.protocol.handle(Closed())
        # Else the place of who has left would be taken for as long as what lingers may.
        await self.idle_task.stop()
        self.over.set()

    async def _read(self) -> bytes | None:
        """What comes next; nothing at the client's end, None at ours or without one."""
        try:
            return bytes(await self.stream.receive_some(MAX_READ_BYTES))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return None

    async def _close(self) -> None:
        self.over.set()
        await super()._close()

    async def _initiate_server_close(self) -> None:
        self.over.set()
        await super()._initiate_server_close()


class _Sparing(logging.Filter):
    """Lets a few records a minute through: whoever can make requests fail could else fill the disk with tracebacks."""

    passing = LOG_RECORDS

    def __init__(self) -> None:
        super().__init__()
        self.window = 0.0
        self.passed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created - self.window >= LOG_WINDOW_SECONDS:
            self.window, self.passed = record.created, 0
        self.passed += 1
        return self.passed <= self.passing


SPARING = _Sparing()


class _Accepting(_Sparing):
    """One line a minute of a loop that can't accept, which says what it waits for; where it stood tells nobody more."""

    passing = 1

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = None
        return super().filter(record)


ACCEPTING = _Accepting()


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
