"""The port that agents dial: proves who they are, tells control links, trunks and weights apart, and hands each on.

Whatever comes in may be anything: each connection lives under a guard of its own, which logs why it ended, and nothing
of it leaves.
"""

from __future__ import annotations

import functools
import logging
import socket
import ssl
from collections import Counter
from pathlib import Path

import trio
from trio_websocket import WebSocketRequest
from wsproto.utilities import LocalProtocolError, ProtocolError

from llmgw.core.node import NodeId
from llmgw.counters import Counters
from llmgw.errors import LinkLost, LlmgwError
from llmgw.link.agentlink import Agents, Pace
from llmgw.link.control import Control, Tap
from llmgw.link.handshake import Arrival, Floor, Rejection, Unwelcome, check_claim, linger, shake_hands, upgrade
from llmgw.link.pending import Pending, Visit
from llmgw.link.presence import LinkView, Presence
from llmgw.link.refusals import Refusals
from llmgw.link.relay import Relay
from llmgw.link.revoked import Revoked
from llmgw.link.tls import CONTROL_ALPN, GIVE_ALPN, TAKE_ALPN, TRUNK_ALPN, QuietTls, hand_over
from llmgw.link.trunk import Trunks
from llmgw.link.words import clean
from llmgw.reactor.credentials import Credentials
from llmgw.reactor.loop import Reactor

log = logging.getLogger("llmgw.link")

# After "too many open files": accepting again at once would only spin.
REST_SECONDS = 0.5
# Where all places of connections that have not proved themselves are taken, and deserved: until the next look.
CROWDED_SECONDS = 0.1
# Of one node at once, in whatever state; an agent has one link, for a moment two, and a few trunks.
LINKS_PER_NODE = 8
TRUNKS_PER_NODE = 32


class AgentPort:
    """The running port, as the tree and the operator see it."""

    def __init__(
        self,
        agents: Agents,
        *,
        credentials: Credentials[ssl.SSLContext],
        revoked: Revoked,
        trunks: Trunks,
        reactor: Reactor,
        lease_seconds: float,
        replace_after_seconds: float | None,
        pace: Pace,
        counters: Counters,
        relay: Relay | None = None,
    ) -> None:
        self._credentials = credentials
        self._relay = relay
        self._revoked = revoked
        self._trunks = trunks
        self._reactor = reactor
        self._pace = pace
        self.presence = Presence(
            agents,
            trunks=trunks,
            lease_seconds=lease_seconds,
            pace=pace,
            on_look=self._sweep,
            on_lost=self._forget_serials,
            replace_after_seconds=replace_after_seconds,
        )
        self._refusals = Refusals()
        self._refused = counters.counter(
            "llmgw_agent_refusals_total", "Connections to the agents' port that were refused, or sent nonsense."
        )
        self._open: Counter[NodeId] = Counter()
        # The certificates that a node's trunks came with: they may differ from that of its link.
        self._trunk_serials: dict[NodeId, set[int]] = {}
        self._pending = Pending()
        self._stopping: str | None = None

    def links(self) -> tuple[LinkView, ...]:
        """Every node that was connected since the start."""
        return self.presence.views()

    def set_lease(self, seconds: float) -> None:
        """How long a node counts as there without a word, from here on; agents that are connected were told the old."""
        self.presence.set_lease(seconds)

    def set_replace_after(self, seconds: float) -> None:
        """How long after its lease what a node runs is placed anew; agents that are connected were told the old."""
        self.presence.set_replace_after(seconds)

    def let_go(self, node: NodeId, reason: str) -> None:
        """End the node's link, if it has one, and what it gives and takes."""
        self.presence.let_go(node, reason)
        if self._relay is not None:
            self._relay.let_go(node, reason)

    def goaway(self, reason: str) -> None:
        """The server stops: tell every agent, and every one that still comes. What is open stays open."""
        self._stopping = reason
        self.presence.goaway(reason)

    def _sweep(self) -> None:
        """Let the log say what it withholds."""
        self._refusals.sweep(trio.current_time())
        self._trunks.sweep()

    def _forget_serials(self, node: NodeId) -> None:
        self._trunk_serials.pop(node, None)

    # -- for ever

    async def accept(self, listening: trio.SocketListener, connections: trio.Nursery) -> None:
        """Take connections, a bounded number at once of those that have not proved themselves."""
        while True:
            try:
                tcp = await listening.accept()
            except OSError as error:
                log.error("can't accept agents: %s; trying again in %s s", error, REST_SECONDS)
                await trio.sleep(REST_SECONDS)
            else:
                try:
                    await self._make_room()
                except trio.Cancelled:
                    tcp.socket.close()
                    raise
                visit = Visit(tcp=tcp, peer=_name_peer(tcp), moved_at=trio.current_time())
                self._pending.add(visit)
                connections.start_soon(self._guard, visit)

    async def _make_room(self) -> None:
        """Wait until a place is free, or take one of those who do nothing with theirs: nobody can hold them all."""
        while self._pending.is_full:
            evicted = self._pending.evict(trio.current_time())
            if evicted is None:
                await self._pending.wait_room(CROWDED_SECONDS)

    async def watch_revoked(self) -> None:
        """End the links and trunks of what is revoked while they are open."""
        await self._revoked.watch(self._cut_revoked, poll_seconds=self._pace.poll)

    def _cut_revoked(self) -> None:
        self.presence.cut_revoked(self._revoked.explain)
        if self._relay is not None:
            self._relay.cut_revoked(self._revoked.explain)
        for node, serials in self._trunk_serials.items():
            problem = next(filter(None, (self._revoked.explain(node, serial) for serial in serials)), None)
            if problem is not None:
                # All of the node's: those with a certificate that is good are dialled again at once.
                serials.clear()
                self._trunks.close_node(node, problem)

    # -- one connection

    async def _guard(self, visit: Visit) -> None:
        """One connection, from first to last; no exception leaves."""
        try:
            with visit.scope:
                await self._receive(visit)
            if visit.evicted and not visit.refused:
                self._refuse(visit, "it did nothing for a while, and its place was needed")
        finally:
            self._pending.free(visit)
            visit.tcp.socket.close()

    async def _receive(self, visit: Visit) -> None:
        problem: str | None = None
        fault: BaseException | None = None
        try:
            await self._serve(visit)
        except* Unwelcome as group:
            problem = _first(group)
        except* LinkLost:
            log.debug("%s port %d went before its upgrade request", *visit.peer)
        except* LocalProtocolError as group:
            # the websocket wants to answer a ping while the link is being closed: ours is the last word already
            log.debug("%s port %d: %s", *visit.peer, _first(group))
        except* (UnicodeError, ProtocolError) as group:
            problem = f"it sent what can't be understood: {_first(group)}"
        except* Exception as group:
            problem, fault = f"an unforeseen end: {_first(group)}", group
        if problem is not None:
            self._refuse(visit, problem, fault)
        await linger(visit.tcp)

    def _refuse(self, visit: Visit, problem: str, fault: BaseException | None = None) -> None:
        visit.refused = True
        self._refused.add((), 1)
        self._refusals.note(visit.peer, problem, trio.current_time(), node=visit.node, fault=fault)

    async def _serve(self, visit: Visit) -> None:
        deadline = trio.current_time() + self._pace.handshake
        arrival = await shake_hands(visit.tcp, self._credentials.current, peer=visit.peer, deadline=deadline)
        visit.node, visit.moved_at = arrival.node, trio.current_time()
        if arrival.protocol == TRUNK_ALPN:
            self._take_trunk(arrival)
        elif arrival.protocol == CONTROL_ALPN:
            await self._count_link(arrival, visit, deadline)
        elif self._relay is not None and arrival.protocol in (GIVE_ALPN, TAKE_ALPN):
            await self._serve_relay(self._relay, arrival, visit)
        else:
            raise Unwelcome(f"node {arrival.node}: it asks for neither {CONTROL_ALPN} nor {TRUNK_ALPN} (by ALPN)")

    def _take_trunk(self, arrival: Arrival) -> None:
        node, serial = arrival.node, arrival.serial
        problem = self._stopping or self._revoked.explain(node, serial)
        if problem is None and self._trunks.hold(node) >= TRUNKS_PER_NODE:
            problem = f"node {node} has {TRUNKS_PER_NODE} trunks already"
        if problem is not None:
            raise Unwelcome(problem)

        take_over = functools.partial(hand_over, self._reactor, arrival.stream)
        try:
            self._trunks.admit(node, take_over, refuse=functools.partial(self.presence.refuse_token, node))
        except OSError as error:
            raise Unwelcome(f"node {node}: no room for its trunk here: {error.strerror}") from error
        self._trunk_serials.setdefault(node, set()).add(serial)

    async def _serve_relay(self, relay: Relay, arrival: Arrival, visit: Visit) -> None:
        problem = self._stopping or self._revoked.explain(arrival.node, arrival.serial)
        if problem is not None:
            raise Unwelcome(problem)
        self._pending.free(visit)
        serve = relay.serve_give if arrival.protocol == GIVE_ALPN else relay.serve_take
        await serve(arrival)

    async def _count_link(self, arrival: Arrival, visit: Visit, deadline: float) -> None:
        self._open[arrival.node] += 1
        try:
            await self._serve_link(arrival, visit, deadline)
        finally:
            self._open[arrival.node] -= 1
            if not self._open[arrival.node]:
                del self._open[arrival.node]

    async def _serve_link(self, arrival: Arrival, visit: Visit, deadline: float) -> None:
        floor = Floor(QuietTls(arrival.stream))
        tap = Tap(floor)
        async with trio.open_nursery() as reading:
            with trio.CancelScope(deadline=deadline) as limit:
                ws = await upgrade(reading, tap, floor, lambda request: self._check(request, arrival))
            if limit.cancelled_caught:
                raise Unwelcome(f"node {arrival.node}: it sent no upgrade request in time")
            self._pending.free(visit)
            line = Control(ws, tap, reading, peer=f"node {arrival.node}")
            try:
                await self.presence.serve_link(
                    line, arrival, revoked=self._revoked.explain(arrival.node, arrival.serial)
                )
            finally:
                reading.cancel_scope.cancel()

    def _check(self, request: WebSocketRequest, arrival: Arrival) -> Rejection | None:
        rejection = check_claim(request, arrival.node)
        if rejection is not None:
            return rejection
        problem = self._revoked.explain(arrival.node, arrival.serial)
        if problem is not None:
            self.presence.note_revoked(arrival.node, self._revoked.explain)
            return Rejection(status=403, code="revoked", message=problem)
        if self._open[arrival.node] > LINKS_PER_NODE:
            problem = f"node {arrival.node} has {LINKS_PER_NODE} links open already"
            return Rejection(status=429, code="too_many_links", message=problem)
        return None


def _name_peer(tcp: trio.SocketStream) -> tuple[str, int]:
    try:
        host, port = tcp.socket.getpeername()[:2]
    except OSError:  # it has reset the connection already
        return "an address that is gone", 0
    # An IPv4 client of a socket for both families looks like one of IPv4.
    return str(host).removeprefix("::ffff:"), int(port)


def _first(group: BaseExceptionGroup[BaseException]) -> str:
    """What the first of them says, safe for a log."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, LlmgwError):
        return error.message
    return clean(f"{type(error).__name__}: {error}", 300)


async def serve_agents(
    listening: socket.socket,
    agents: Agents,
    *,
    credentials: Credentials[ssl.SSLContext],
    revoked: Path,
    trunks: Trunks,
    reactor: Reactor,
    lease_seconds: float,
    replace_after_seconds: float | None = None,
    pace: Pace | None = None,
    counters: Counters | None = None,
    relay: Relay | None = None,
    task_status: trio.TaskStatus[AgentPort] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve agents on ``listening``, for ever; started with the port that can be asked.

    Being cancelled cuts every link; whoever stops says so before, by ``goaway``. Raises UsageError when ``revoked``
    can't be read. ``reactor`` moves the trunks' bytes. ``relay`` hands weights on; None: nobody does.
    """
    port = AgentPort(
        agents,
        credentials=credentials,
        revoked=Revoked(revoked),
        trunks=trunks,
        reactor=reactor,
        lease_seconds=lease_seconds,
        replace_after_seconds=replace_after_seconds,
        pace=pace or Pace(),
        counters=counters or Counters(),
        relay=relay,
    )
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(port.presence.watch_leases)
        nursery.start_soon(port.presence.tell_silent)
        nursery.start_soon(port.watch_revoked)
        task_status.started(port)
        await port.accept(listener, nursery)
