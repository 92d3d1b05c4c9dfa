"""One control link, the same at both ends: a websocket whose every wait has an end.

A cancelled write leaves half a frame behind, and whatever follows it is garbage to the peer; so one task writes at a
time, and a write that does not end in time ends the link. Closing waits for the peer, which may be dead; so it is
bounded too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import trio
from trio_websocket import (
    ConnectionClosed,
    WebSocketConnection,
    WebSocketRequest,
    wrap_client_stream,
    wrap_server_stream,
)

from llmgw.errors import LinkLost
from llmgw.link.inlet import TURN_FRAMES, Inlet, TooManyFrames
from llmgw.link.words import clean
from llmgw.wire import MAX_MESSAGE_BYTES

PATH = "/llmgw/link"
# An agent says in the upgrade request which node it is; it must be the common name of its certificate.
NODE_HEADER = "x-llmgw-node"

# Longer than between two reports of a node: a server that hears those has nothing to ask.
PING_SECONDS = 6.0
PONG_SECONDS = 7.5
# Between two looks at who is silent.
LOOK_SECONDS = 1.0
STALL_SECONDS = 10.0
# A limit that is noticed so much later than it was due was missed by us, not by the peer.
LATE_SECONDS = 1.0
CLOSE_SECONDS = 3.0
# What may wait to be written: a peer that reads this slowly is as good as gone, and its words must not pile up.
QUEUE_BYTES = 1024 * 1024
QUEUE_MESSAGES = 1024
# As much as a TLS record holds.
READ_BYTES = 16384
# A large message over a slow line is no stall: each part of it has its own time.
WRITE_BYTES = 65536
# The reason in a close frame has 123 bytes at most.
REASON_BYTES = 120
# What a websocket says of an end without a close frame.
ABNORMAL = 1006

T = TypeVar("T")


class Tap(trio.abc.Stream):
    """The stream below a websocket, watched: when the peer was last heard, when it went, and no write for ever."""

    def __init__(self, stream: trio.abc.Stream, *, stall_seconds: float = STALL_SECONDS) -> None:
        self.stream = stream
        self.heard_at = trio.current_time()
        self.gone = trio.Event()
        # Why the stream is of no use any more: in words, and what was raised, if anything was.
        self.why: str | None = None
        self.fault: Exception | None = None
        self._stall_seconds = stall_seconds
        self._torn = False
        self._inlet = Inlet()
        self._work = 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """A few frames at most, however many came: what is above works on them in one go."""
        while not (given := self._take()):
            data = await self._receive(max_bytes)
            if not data:
                return data
            if head := self._inlet.feed(data):
                return head
            await self._pause(1)
        await self._pause(TURN_FRAMES // 2)
        return given

    def _take(self) -> bytes:
        try:
            return self._inlet.take()
        except TooManyFrames as broken:
            self._lose(broken.message, broken)
            raise trio.BrokenResourceError(broken.message) from None

    async def _pause(self, work: int) -> None:
        """Let others have their turn: while something is there, neither we nor the stream below wait for it."""
        self._work += work
        if self._work >= TURN_FRAMES:
            self._work = 0
            await trio.lowlevel.checkpoint()

    async def _receive(self, max_bytes: int | None) -> bytes | bytearray:
        try:
            data = await self.stream.receive_some(max_bytes)
        except trio.BrokenResourceError as error:
            self._lose(f"the connection broke: {error.__cause__ or error}", error)
            raise
        if data:
            self.heard_at = trio.current_time()
        else:
            self._lose("the peer closed the connection")
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._inlet.answered = True
        if self._torn:
            raise trio.BrokenResourceError("an earlier write was not finished")
        self._torn = True
        try:
            view = memoryview(data)
            for begin in range(0, len(view), WRITE_BYTES):
                with trio.fail_after(self._stall_seconds):
                    await self.stream.send_all(view[begin : begin + WRITE_BYTES])
        except trio.TooSlowError:
            self._lose(f"the peer took nothing for {self._stall_seconds:g} s")
            raise trio.BrokenResourceError("the peer takes nothing") from None
        except trio.BrokenResourceError as error:
            self._lose(f"the connection broke: {error.__cause__ or error}", error)
            raise
        self._torn = False

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self.stream.aclose()

    def _lose(self, why: str, fault: Exception | None = None) -> None:
        if self.why is None:
            self.why, self.fault = why, fault
        self.gone.set()


async def read_upgrade(nursery: trio.Nursery, tap: Tap) -> WebSocketRequest:
    """The server's end: the peer's upgrade request, to accept or reject. Raises LinkLost when the peer goes before it.

    The websocket's reader runs in ``nursery`` and may raise anything at garbage. The caller bounds the wait.
    """
    return await _before_it_goes(
        tap,
        lambda: wrap_server_stream(nursery, tap, max_message_size=MAX_MESSAGE_BYTES, receive_buffer_size=READ_BYTES),
    )


async def ask_upgrade(nursery: trio.Nursery, tap: Tap, *, host: str, node: str) -> WebSocketConnection:
    """The agent's end: the open websocket. Raises LinkLost when the server goes before it answers.

    ConnectionRejected, when the server says no, comes out of ``nursery``, where the websocket's reader runs. The caller
    bounds the wait.
    """
    return await _before_it_goes(
        tap,
        lambda: wrap_client_stream(
            nursery,
            # It asks for less than it says: any stream will do.
            cast("trio.SocketStream", tap),
            host,
            PATH,
            extra_headers=[(NODE_HEADER.encode(), node.encode())],
            max_message_size=MAX_MESSAGE_BYTES,
            receive_buffer_size=READ_BYTES,
        ),
    )


async def _before_it_goes(tap: Tap, wrap: Callable[[], Awaitable[T]]) -> T:
    """What ``wrap`` gives: an end before the upgrade is not noticed by the websocket itself."""
    wrapped: T | None = None
    async with trio.open_nursery() as waiting:

        async def end_with_peer() -> None:
            await tap.gone.wait()
            waiting.cancel_scope.cancel()

        waiting.start_soon(end_with_peer)
        wrapped = await wrap()
        waiting.cancel_scope.cancel()
    if wrapped is None:
        raise LinkLost(tap.why or "the peer closed the connection")
    return wrapped


class Control:
    """One link: ``send`` from anywhere, ``receive`` in one task, ``look`` now and then."""

    def __init__(self, ws: WebSocketConnection, tap: Tap, nursery: trio.Nursery, *, peer: str) -> None:
        """``ws`` is open, over ``tap``, and its reader runs in ``nursery``, as does what is done here now and then: an
        idle link has no task of its own. ``peer`` names the other end in texts."""
        self._ws = ws
        self._tap = tap
        self._nursery = nursery
        self.peer = peer
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        # While there is a task that writes: set when it is done.
        self._written: trio.Event | None = None
        self._asked = False
        self._is_silent = False
        self._reason: str | None = None
        self._shut_down = trio.Event()

    @property
    def heard_at(self) -> float:
        """trio's time of the last byte from the peer."""
        return self._tap.heard_at

    @property
    def lost(self) -> str | None:
        """Why the link is over; None while it is not."""
        return self._reason

    # -- in and out

    def send(self, data: bytes) -> None:
        """Send in order, some time. When too much waits already the link ends; after its end nothing is sent."""
        if self._reason is not None:
            return
        if self._queued_bytes > QUEUE_BYTES or len(self._queue) >= QUEUE_MESSAGES:
            return self._end(f"{self.peer} reads too slowly: {len(self._queue)} messages wait for it")
        self._queue.append(data)
        self._queued_bytes += len(data)
        if self._written is None:
            self._written = trio.Event()
            self._nursery.start_soon(self._write, self._written)

    async def receive(self) -> bytes:
        """The next message. Raises LinkLost at the link's end, after all that came before it."""
        try:
            message = await self._ws.get_message()
        except ConnectionClosed as closed:
            self._end(self._words(closed))
            # Whoever hears of the end gives up the nursery, and the goodbye needs that to be answered.
            await self._shut_down.wait()
            raise LinkLost(self._reason or "") from None
        return message.encode() if isinstance(message, str) else message

    async def is_alive(self, seconds: float) -> bool:
        """Whether anything is heard of the peer, asked now, within ``seconds``."""
        while True:
            asked = trio.current_time()
            try:
                with trio.move_on_after(seconds) as scope:
                    await self._ws.ping()
            except ConnectionClosed as closed:
                self._end(self._words(closed))
                return False
            if not scope.cancelled_caught:
                return True
            late_seconds = trio.current_time() - asked - seconds
            # What has come is read by another task, which may be due in this very turn.
            await trio.lowlevel.checkpoint()
            if self.heard_at > asked:
                return True
            if late_seconds < LATE_SECONDS:
                return False
            # We were stopped meanwhile, and the peer perhaps with us: neither could have been heard.

    def look(self, *, ping_seconds: float = PING_SECONDS, pong_seconds: float = PONG_SECONDS) -> None:
        """Ask a peer that has been silent for ``ping_seconds``; without an answer in ``pong_seconds`` the link ends.

        To be called each LOOK_SECONDS; ``receive`` tells of the end.
        """
        if trio.current_time() - self.heard_at >= ping_seconds and not self._asked and self._reason is None:
            self._asked = True
            self._nursery.start_soon(self._ask, pong_seconds)

    async def close(self, reason: str) -> None:
        """Send what waits, say goodbye and end the link, in a few seconds at most."""
        if self._written is not None:
            with trio.move_on_after(CLOSE_SECONDS):
                await self._written.wait()
        self._end(reason)
        await self._shut_down.wait()

    def give_up(self) -> None:
        """The nursery is over: nothing more is sent, and nobody waits for a goodbye."""
        self._reason = self._reason or "the link was given up here"
        self._shut_down.set()

    # -- its short tasks

    async def _write(self, written: trio.Event) -> None:
        try:
            while self._queue:
                data = self._queue.popleft()
                await self._ws.send_message(data)
                self._queued_bytes -= len(data)
        except ConnectionClosed as closed:
            self._end(self._words(closed))
        self._written = None
        written.set()

    async def _ask(self, pong_seconds: float) -> None:
        if not await self.is_alive(pong_seconds):
            silent = trio.current_time() - self.heard_at
            self._is_silent = True
            self._end(self._tap.why or f"nothing was heard of {self.peer} for {silent:.0f} s")
        self._asked = False

    def _end(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            self._nursery.start_soon(self._shut, reason)

    async def _shut(self, reason: str) -> None:
        goodbye = reason.encode()[:REASON_BYTES].decode(errors="ignore")
        try:
            # Who answered no ping, or does not take our words, answers no goodbye.
            if not self._is_silent and self._written is None:
                with trio.move_on_after(CLOSE_SECONDS):
                    await self._ws.aclose(1000, goodbye)
            await trio.aclose_forcefully(self._tap)
        finally:
            self._queue.clear()
            self._shut_down.set()

    def _words(self, closed: ConnectionClosed) -> str:
        said = closed.reason
        if self._tap.why is not None and (said is None or said.code == ABNORMAL):
            return self._tap.why
        if said is None or said.code == ABNORMAL:
            return "the connection ended without a goodbye"
        # The peer's own words: bounded by the frame.
        return clean(said.reason) if said.reason else f"{self.peer} closed the link ({said.name.lower()})"
