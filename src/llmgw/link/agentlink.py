"""The server's end of one control link: whether the agent may be there, what it says, and what it is told to run."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import trio

from llmgw.core.effects import Desire
from llmgw.core.events import Event, NodeRegistered, NodeReported, ShardChanged, WeightsReported
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import ShardSpec
from llmgw.core.weights import WeightsOrder
from llmgw.errors import LinkLost
from llmgw.link.control import PONG_SECONDS
from llmgw.link.handshake import Unwelcome
from llmgw.link.line import Line
from llmgw.link.sessions import Claim, Free, Session, Sessions, Turned
from llmgw.link.sparing import SparingLog
from llmgw.link.words import clean
from llmgw.wire import (
    FETCHES_WEIGHTS,
    PROTOCOL,
    AgentMessage,
    Desired,
    Goaway,
    Hello,
    NodeWord,
    OrderWord,
    Refused,
    Register,
    Resync,
    ShardWord,
    WeightsWord,
    Welcome,
    WireError,
    decode_from_agent,
    diff,
    encode,
    refuse_protocol,
)

log = logging.getLogger("llmgw.link")

# How often the agent that is there may change while another waits for its place.
CHALLENGES = 3
REASON_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things may take on the agents' port, in seconds.

    ``answer``: what a connected agent gets to show that it lives, when another process comes in its name. ``lag``: an
    agent says which desired set it took last; one that lags this long is told the whole again. ``poll``: between two
    looks at the list of revoked certificates. ``ping``: a little more than an agent is silent in good health, so that
    a thousand of them need no pings; with ``pong`` less than the lease.
    """

    handshake: float = 10.0
    hello: float = 10.0
    answer: float = 5.0
    ping: float = 6.0
    pong: float = PONG_SECONDS
    lag: float = 15.0
    poll: float = 1.0


class Agents(Protocol):
    """The fleet, as the agents' port sees it."""

    def follow(self, node: NodeId, tell: Callable[[Desire], None]) -> Callable[[], None]:
        """Call ``tell`` with the node's desired set, now if there is one and at each change, until the answer is
        called. ``tell`` neither waits nor raises."""

    def follow_orders(self, node: NodeId, tell: Callable[[WeightsOrder], None]) -> Callable[[], None]:
        """The same for what the node is told of weights."""

    def refuse(self, node: NodeId) -> None:
        """The certificate that the node had is revoked. It may be said again, and neither waits nor raises; a
        registration that is reported later is one by a certificate that is good."""

    async def report(self, event: Event) -> None:
        """Take an event; events count in the order of the calls. An agent is not read while this waits. When a
        registration was taken, ``follow`` tells what the node is to run since."""


class Proven(Protocol):
    """Who is at the other end, as its certificate has proved. ``handshake.Arrival`` is one."""

    @property
    def node(self) -> NodeId: ...

    @property
    def serial(self) -> int: ...

    @property
    def peer(self) -> str:
        """Its address in words."""


class TrunksOf(Protocol):
    """What the end of a session ends."""

    def close_node(self, node: NodeId, reason: str) -> None: ...


class AgentLink:
    """One link, from its accepted upgrade to its end."""

    def __init__(
        self,
        line: Line,
        proven: Proven,
        *,
        sessions: Sessions,
        agents: Agents,
        trunks: TrunksOf,
        pace: Pace,
        words: SparingLog,
        replace_after_seconds: float | None = None,
    ) -> None:
        """``replace_after_seconds``: what the agent is told of that; None: nothing."""
        self.node = proven.node
        self.serial = proven.serial
        self._peer = proven.peer
        self._line = line
        self._sessions = sessions
        self._agents = agents
        self._trunks = trunks
        self._pace = pace
        self._words = words
        self._replace_after_seconds = replace_after_seconds
        self._talk = trio.CancelScope()
        self._code: str | None = None
        self._reason: str | None = None
        self._session: Session | None = None
        # Since the node has registered: they end what it is told.
        self._unfollow: tuple[Callable[[], None], ...] = ()
        self._sent: Desire | None = None
        self._sent_at = 0.0

    @property
    def heard_at(self) -> float:
        return self._line.heard_at

    @property
    def is_revoked(self) -> bool:
        """Whether it was cut for its certificate."""
        return self._code == "revoked"

    async def is_alive(self, seconds: float) -> bool:
        return await self._line.is_alive(seconds)

    def look(self) -> None:
        """Ask an agent that has been silent whether it lives."""
        self._line.look(ping_seconds=self._pace.ping, pong_seconds=self._pace.pong)

    def cut(self, code: str | None, reason: str) -> None:
        """Take nothing more from the agent and end the link, with ``code`` after a last word; returns at once."""
        if self._reason is None:
            self._code, self._reason = code, reason
            if self._session is not None:
                self._sessions.leave(self._session)
            # An event that waits for room in the inbox is taken back: late words have no effect.
            self._talk.cancel()

    def goaway(self, reason: str) -> None:
        """Tell the agent that the server stops."""
        if self._session is None:
            self.cut("stopping", reason)
        else:
            self._line.send(encode(Goaway(reason=reason[:REASON_CHARS])))

    async def serve(self) -> None:
        """Talk until the link ends. Raises Unwelcome when the agent was never let in, and told why."""
        try:
            with self._talk:
                try:
                    await self._converse()
                except WireError as broken:
                    self.cut("violation", str(broken))
            if self._code is not None:
                self._line.send(encode(Refused(code=self._code, reason=str(self._reason)[:REASON_CHARS])))
            await self._line.close(self._reason or "")
        except LinkLost as lost:
            # How every link ends, one way or the other; the control knows the first cause.
            log.debug("node %s: %s", self.node, clean(lost.message))
        finally:
            self._line.give_up()
            for unfollow in self._unfollow:
                unfollow()
            if self._session is not None:
                self._sessions.leave(self._session)
                level = logging.WARNING if self._code == "violation" else logging.INFO
                reason = self._reason or self._line.lost or "this end was closed"
                self._say(level, f"node {self.node}: the link from {self._peer} has ended: {reason}")
        if self._session is None and self._reason is not None:
            raise Unwelcome(f"node {self.node}: {self._reason}")

    def _say(self, level: int, text: str) -> None:
        self._words.say(self.node, level, text, trio.current_time())

    async def _converse(self) -> None:
        session = self._session = await self._introduce()
        if session is None:
            return
        claim = session.claim
        what = f"llmgw {claim.version}, protocol {claim.protocol}"
        self._say(logging.INFO, f"node {self.node} is connected from {self._peer} ({what})")
        welcome = Welcome(
            protocol=claim.protocol,
            session=session.token,
            lease_seconds=self._sessions.lease_seconds,
            replace_after_seconds=self._replace_after_seconds,
        )
        self._line.send(encode(welcome))
        await self._hear(session)

    # -- who is it

    async def _introduce(self) -> Session | None:
        """The session of the agent that says hello; None when it was told no."""
        hello = None
        with trio.move_on_after(self._pace.hello):
            hello = decode_from_agent(await self._line.receive(), PROTOCOL)
        if hello is None:
            self.cut("violation", f"no hello within {self._pace.hello:g} s")
            return None
        if not isinstance(hello, Hello):
            raise WireError(f"the first message is to be Hello, and was {type(hello).__name__}")
        self._prove(hello.node)
        problem = refuse_protocol(hello.protocol)
        if problem is not None:
            self.cut("protocol", problem)
            return None
        claim = Claim(
            node=self.node,
            run=hello.run,
            dial=hello.dial,
            protocol=hello.protocol,
            version=hello.version,
            peer=self._peer,
            serial=self.serial,
        )
        turned = await self._challenge(claim)
        if turned is not None:
            self.cut(turned.code, turned.reason)
        if self._reason is not None:
            # Also when it was cut in that very moment: the cancellation would come only at the next wait.
            return None
        # Since the verdict nobody can have come between: there was no await.
        entry = self._sessions.enter(claim, self, trio.current_time())
        if entry.replaced is not None:
            entry.replaced.end.cut("replaced", f"node {self.node} has connected anew, from {self._peer}")
        if entry.new_run:
            self._trunks.close_node(self.node, "the node's agent has started anew")
        return entry.session

    async def _challenge(self, claim: Claim) -> Turned | None:
        """Why ``claim`` may not enter. Another run is in the way as long as it answers."""
        for _ in range(CHALLENGES):
            verdict = self._sessions.consider(claim)
            if isinstance(verdict, Free):
                return None
            if isinstance(verdict, Turned):
                return verdict
            there = verdict.session
            if await there.end.is_alive(self._pace.answer):
                break
            if self._sessions.is_current(there):
                return None
        return Turned(code="connected", reason=f"node {self.node} is already connected from {there.claim.peer}")

    # -- what it says

    async def _hear(self, session: Session) -> None:
        while True:
            # No name for the message: it would stay in memory until the next one.
            event = self._read(decode_from_agent(await self._line.receive(), session.claim.protocol))
            if self._reason is not None:
                # It was cut in that very moment.
                return
            if event is None:
                continue
            if isinstance(event, NodeRegistered):
                self._sessions.register(session)
            await self._agents.report(event)
            if isinstance(event, NodeRegistered):
                self._tell_whole()
                if not self._unfollow:
                    self._follow(session)

    def _follow(self, session: Session) -> None:
        self._unfollow = (self._agents.follow(self.node, self._tell),)
        if session.claim.protocol >= FETCHES_WEIGHTS:
            self._unfollow += (self._agents.follow_orders(self.node, self._order),)

    def _read(self, message: AgentMessage) -> Event | None:
        if isinstance(message, Hello):
            raise WireError("hello is said once")
        if not isinstance(message, Register) and not self._unfollow:
            raise WireError(f"{type(message).__name__} before Register")
        for claimed in _claimed_nodes(message):
            self._prove(claimed)
        match message:
            case Register(node=node, running=running):
                for spec, report in running:
                    if (spec.id, spec.replica, spec.epoch) != (report.shard, report.replica, report.epoch):
                        raise WireError(f"the report of shard {spec.id!a} is one of {report.shard!a}")
                return NodeRegistered(node=_share_flags(node), running=running)
            case NodeWord(node=node, applied=applied):
                self._repair(applied)
                return NodeReported(node=_share_flags(node), applied=applied)
            case ShardWord(report=report):
                return ShardChanged(node=self.node, report=report)
            case WeightsWord(weights=weights):
                return WeightsReported(node=self.node, weights=weights)
            case Resync():
                self._tell_whole()
        return None

    def _prove(self, claimed: str) -> None:
        if claimed != self.node:
            raise WireError(f"it speaks of node {claimed!a}, and its certificate is of node {self.node}")

    # -- what it is told

    def _tell(self, desire: Desire) -> None:
        if self._reason is not None:
            return
        try:
            message = encode(diff(self._sent, desire))
        except WireError:
            desire = self._leave_out(desire)
            message = encode(Desired(revision=desire.revision, shards=desire.shards))
        self._line.send(message)
        self._sent, self._sent_at = desire, trio.current_time()

    def _order(self, order: WeightsOrder) -> None:
        if self._reason is not None:
            return
        try:
            message = encode(OrderWord(order=order))
        except WireError as why:
            # It goes on by the one before: nothing runs or ends by these.
            self._say(logging.ERROR, f"node {self.node} can't be told of weights: {why}")
        else:
            self._line.send(message)

    def _leave_out(self, desire: Desire) -> Desire:
        """What of it can be sent: one shard that can't must not keep all others of the node from being started, and
        stopped. The fleet finds out that nobody launches it."""
        fit: list[ShardSpec] = []
        for spec in desire.shards:
            try:
                encode(Desired(revision=desire.revision, shards=(*fit, spec)))
            except WireError as why:
                self._say(logging.ERROR, f"node {self.node} can't be told to run {clean(spec.id)}: {why}")
            else:
                fit.append(spec)
        return dataclasses.replace(desire, shards=tuple(fit))

    def _tell_whole(self) -> None:
        if self._sent is not None:
            self._line.send(encode(Desired(revision=self._sent.revision, shards=self._sent.shards)))
            self._sent_at = trio.current_time()

    def _repair(self, applied: int | None) -> None:
        """Tell the whole again to an agent that has not taken it. One of protocol 1 does not say."""
        if self._session is None or self._session.claim.protocol == 1 or self._sent is None:
            return
        if applied != self._sent.revision and trio.current_time() - self._sent_at > self._pace.lag:
            self._tell_whole()


def _share_flags(node: Node) -> Node:
    """The node, whose processor's hundred flags are kept once for all nodes that have the same."""
    return dataclasses.replace(node, cpu_flags=_keep_one(node.cpu_flags))


@functools.lru_cache(maxsize=64)
def _keep_one(flags: frozenset[str]) -> frozenset[str]:
    return flags


def _claimed_nodes(message: AgentMessage) -> Iterator[str]:
    """Every node that a message speaks of."""
    match message:
        case Register(node=node):
            # what runs there may be of a time when the node had another name: the fleet has it stopped
            yield node.id
        case NodeWord(node=node):
            yield node.id
