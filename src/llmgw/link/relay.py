"""Hands weights on between nodes that can't reach each other: a node asks here, and over a connection that another one
has dialled that one is asked in its name.

It shares its thread with everybody's requests, so it gives way: one chunk of all that it carries goes in a turn of the
loop, and all of them together no faster than they may.
"""

from __future__ import annotations

import logging
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import h11
import trio

from llmgw.core.node import NodeId
from llmgw.core.weights import RELAY_FROM
from llmgw.counters import Counters
from llmgw.link.gives import MAX_BODY_BYTES, Give, GiveBroke, Gives
from llmgw.link.handshake import Arrival, Unwelcome
from llmgw.link.pipe import Pipe
from llmgw.link.words import clean
from llmgw.reactor.rate import Rate
from llmgw.reactor.talk import Asked, Over, Talk

log = logging.getLogger("llmgw.link")

# The key of a source, and whether it is asked for a piece, and not for what there is.
TARGET = re.compile(r"/llmgw/weights/([0-9a-f]{1,64})/[0-9a-f]{1,64}(/\d{1,6}/\d{1,6})?(?:\?[!-~]*)?", re.ASCII)
# Of all nodes: descriptors are for those who ask models, too.
MAX_LINES = 8192
# Of one node.
MAX_GIVES = 32
MAX_TAKES = 96
# Of the former, that wait for news: they must not be in the way of those that bring pieces.
MAX_NEWS = MAX_GIVES - 8
# A connection that has gone shows only when it is used: then the next one is asked.
TRIES = 2
# One that waits says nothing, and would wait for ever for a machine that has lost its power. Seconds.
LOST_NODE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
# What is handed on of the head of an answer.
HEADERS = frozenset({b"content-type", b"content-length", b"retry-after"})

# Whether this node may take from that one what is of the source with this key.
MayTake = Callable[[NodeId, NodeId, str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPace:
    """Seconds: for a head from its first byte, for the next request, for a reader that takes nothing, for a free
    connection of the node that is asked (less than whoever asks has patience for), for the beginning of its answer
    (longer than it may wait for news), and for more of it."""

    head: float = 10.0
    idle: float = 75.0
    stall: float = 60.0
    borrow: float = 5.0
    answer: float = 40.0
    silence: float = 30.0


@dataclass(slots=True, eq=False, kw_only=True)
class _Line:
    """One open connection. ``why`` it was cut."""

    node: NodeId
    serial: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    why: str | None = None

    def cut(self, why: str) -> None:
        self.why = why
        self.scope.cancel()


class Relay:
    """All that is handed on. The agents' port brings it connections, each of a node that has proved which it is."""

    def __init__(
        self,
        may_take: MayTake,
        *,
        bytes_per_second: float,
        counters: Counters,
        pace: RelayPace | None = None,
        max_lines: int = MAX_LINES,
    ) -> None:
        """``max_lines``: connections of all nodes."""
        self._may_take = may_take
        self._max_lines = max_lines
        self._rate = Rate(bytes_per_second)
        self._pace = pace or RelayPace()
        self._gives = Gives()
        self._news: Counter[NodeId] = Counter()
        # Whose chunk it is: one goes in a turn of the loop, and each transfer in its turn.
        self._turn = trio.Lock()
        self._lines: dict[_Line, None] = {}
        self._giving: Counter[NodeId] = Counter()
        self._taking: Counter[NodeId] = Counter()
        self._bytes = counters.counter(
            "llmgw_relay_bytes_total", "Bytes of weights that were handed on, by the node that took them.", ("node",)
        )

    def cut_revoked(self, explain: Callable[[NodeId, int], str | None]) -> None:
        """End the connections whose certificates ``explain`` has something against."""
        for line in tuple(self._lines):
            why = explain(line.node, line.serial)
            if why is not None:
                line.cut(why)

    def let_go(self, node: NodeId, why: str) -> None:
        """End all connections of a node."""
        for line in tuple(self._lines):
            if line.node == node:
                line.cut(why)

    @contextmanager
    def _enter(self, arrival: Arrival, counts: Counter[NodeId], most: int, what: str) -> Iterator[None]:
        """Count a connection while it is there. Raises Unwelcome where there are too many, or when it is cut."""
        node = arrival.node
        if counts[node] >= most:
            raise Unwelcome(f"node {node} has {most} connections open already to {what} weights")
        if len(self._lines) >= self._max_lines:
            raise Unwelcome(f"node {node}: {self._max_lines} connections that give or take weights are open already")
        line = _Line(node=node, serial=arrival.serial)
        counts[node] += 1
        self._lines[line] = None
        try:
            with line.scope:
                yield
        finally:
            del self._lines[line]
            counts[node] -= 1
            if not counts[node]:
                del counts[node]
        if line.why is not None:
            raise Unwelcome(line.why)

    async def serve_give(self, arrival: Arrival) -> None:
        """Ask a node over this connection, until it ends. Raises Unwelcome."""
        tcp = arrival.stream.transport_stream
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in LOST_NODE.items():
            tcp.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._enter(arrival, self._giving, MAX_GIVES, "give"):
            await self._gives.keep(Give(arrival))

    async def serve_take(self, arrival: Arrival) -> None:
        """Answer what a node asks of others on this connection, until it ends. Raises Unwelcome."""
        pace, node = self._pace, arrival.node
        with self._enter(arrival, self._taking, MAX_TAKES, "take"):
            pipe = Pipe(arrival.stream)
            talk = Talk(pipe, head_seconds=pace.head, idle_seconds=pace.idle, stall_seconds=pace.stall)
            try:
                while (asked := await talk.hear()) is not None:
                    await self._answer(talk, asked, node)
                    if not talk.goes_on():
                        break
            except (Over, GiveBroke) as over:
                # What was begun can't be ended: whoever takes it sees that it is broken, and asks again.
                pipe.close()
                raise Unwelcome(f"node {node} took weights, and was cut off: {over}") from over
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                log.debug("%s, which took weights, went away", node)

    async def _answer(self, talk: Talk, asked: Asked, node: NodeId) -> None:
        if asked.problem is not None:
            return await _refuse(talk, *asked.problem, last=True)
        if asked.method != "GET":
            return await _refuse(talk, 405, "", last=True)
        found, giver = TARGET.fullmatch(asked.target), NodeId(asked.find(RELAY_FROM) or "")
        if found is None:
            return await _refuse(talk, 404, "there is nothing of this name")
        if not self._may_take(node, giver, found[1]):
            return await _refuse(talk, 403, f"node {node} is not to take this from {clean(giver)[:100]!r}")
        if found[2] is not None:
            return await self._hand_on(talk, asked.target, node, giver)
        if self._news[giver] >= MAX_NEWS:
            return await _refuse(talk, 503, f"too many ask {giver} what it has")
        self._news[giver] += 1
        try:
            await self._hand_on(talk, asked.target, node, giver)
        finally:
            self._news[giver] -= 1
            if not self._news[giver]:
                del self._news[giver]

    async def _hand_on(self, talk: Talk, target: str, node: NodeId, giver: NodeId) -> None:
        """One question and its answer. Raises GiveBroke where that breaks off in the middle."""
        why = f"no connection to {giver} is free"
        for _ in range(TRIES):
            async with self._gives.borrow(giver, seconds=self._pace.borrow) as give:
                if give is None:
                    break
                try:
                    response = await give.ask(target, node, seconds=self._pace.answer)
                except GiveBroke as broke:
                    why = f"{giver}: {broke}"
                    continue
                return await self._pass_through(talk, give, response, node)
        await _refuse(talk, 503, why)

    async def _pass_through(self, talk: Talk, give: Give, response: h11.Response, node: NodeId) -> None:
        headers = [(name, value) for name, value in response.headers if name in HEADERS]
        length = dict(headers).get(b"content-length", b"")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            raise GiveBroke(f"the answer of {give.node} is of no length that it may have")
        said = [(name.decode("ascii"), value.decode("latin-1")) for name, value in headers]
        await talk.begin(response.status_code, said)
        is_whole = False
        while not is_whole:
            async with self._turn:
                chunk, is_whole = give.read_body()
                await self._rate.take(len(chunk))
            if chunk:
                await talk.go_on(chunk)
                self._bytes.bump(node, by=len(chunk))
            elif not is_whole:
                await give.wait_body(seconds=self._pace.silence)
        await talk.end()


async def _refuse(talk: Talk, status: int, why: str, *, last: bool = False) -> None:
    body = f"{why}\n".encode() if why else b""
    headers = [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(body)))]
    if status == 503:
        headers.append(("retry-after", "1"))
    if last:
        headers.append(("connection", "close"))
    await talk.say(status, headers, body)
