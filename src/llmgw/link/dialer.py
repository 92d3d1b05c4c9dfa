"""The agent's side: keeps a control link and a few trunks to the server, for ever, and is the tree's way to it.

A link that is lost costs nothing but time: what runs goes on, what is said meanwhile waits with the tree, and after the
next dial the node registers with all that it runs. Trunks outlive the link for as long as the server lets them.

What it dials is a ``Server``: dial.py has the one by TLS, a simulation one of its own memory.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import trio

from llmgw.core.effects import Desire
from llmgw.core.events import Event, NodeRegistered, NodeReported, ShardChanged, WeightsReported
from llmgw.core.node import NodeId
from llmgw.core.weights import WeightsOrder
from llmgw.errors import LinkLost, LlmgwError
from llmgw.link.control import LOOK_SECONDS, PONG_SECONDS
from llmgw.link.dial import Backoff, DialFailed, Pace
from llmgw.link.line import Line
from llmgw.link.words import clean, trace
from llmgw.wire import (
    PROTOCOL,
    Desired,
    DesiredDelta,
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
    decode_from_server,
    encode,
    patch,
)

log = logging.getLogger("llmgw.link")

T = TypeVar("T")


class Trunk(Protocol):
    """One trunk that this agent has dialled."""

    def goaway(self, reason: str) -> None:
        """Take no new streams; the server closes the trunk when the last one has ended."""

    def abort(self, reason: str) -> None:
        """End now, with all streams."""


class Server(Protocol):
    """The server, as something that can be dialled."""

    @property
    def name(self) -> str:
        """Where it is, in words."""

    async def open_link(self, nursery: trio.Nursery) -> Line:
        """A connection for the control link; what it needs to run runs in ``nursery``, and ends with it. Raises
        DialFailed, or what ``explain`` knows out of ``nursery``."""

    async def open_trunk(self, token: str, *, leave: Callable[[], None], over: Callable[[str], None]) -> Trunk:
        """A trunk that presents ``token``. ``leave`` is called when another is to be dialled in place of this one, and
        ``over`` once, with the reason, when it has ended. Raises DialFailed."""

    def explain(self, errors: tuple[Exception, ...]) -> Exception:
        """What ended a link, of all that came out of its nursery."""


class Session:
    """One control link that the server has welcomed."""

    __slots__ = (
        *("asked_whole", "desire", "ending", "give_up_seconds", "given", "line", "order", "registered", "token", "why"),
    )

    def __init__(self, line: Line, welcome: Welcome) -> None:
        self.line = line
        self.token = welcome.session
        after_seconds = welcome.replace_after_seconds
        # The lease runs before that, from the last word that the server heard.
        self.give_up_seconds = None if after_seconds is None else welcome.lease_seconds + after_seconds
        self.registered = False
        # What is to run, as far as the server has said, and the revision that the tree was given last.
        self.desire: Desire | None = None
        self.given: int | None = None
        self.asked_whole = False
        # What was said of weights last.
        self.order: WeightsOrder | None = None
        # Set when another link is to be dialled: this one is over, or the server has asked for it.
        self.ending = trio.Event()
        self.why: str | None = None


class Dialer:
    """The way to the server: ``serve`` it, and give it to the agent's tree as its ``Link``."""

    def __init__(
        self,
        server: Server,
        *,
        node: str,
        trunks: int,
        version: str,
        pace: Pace | None = None,
        randomness: random.Random | None = None,
        run: str | None = None,
    ) -> None:
        """``trunks``: how many are kept. ``run`` tells this process from all others of the node; None: a random one."""
        self._server = server
        self._node = node
        self._count = trunks
        self._version = version
        self._pace = pace or Pace()
        self._random = randomness or random.Random()  # noqa: S311 - it spreads dials, and hides nothing
        self._run = run or secrets.token_hex(8)
        self._dials = 0
        self._session: Session | None = None
        self._give_up_seconds: float | None = None
        self._why = "it is not connected yet"
        # Whose desired set was handed out last: revisions count from anew with each server.
        self._told: Session | None = None
        self._changed = trio.Event()
        # (in the order of their dials, so that the same run gives the same order)
        self._trunks: dict[Trunk, None] = {}
        self._leaving = False
        self._unsaid = Complaints("the server can't be told", self._pace.repeat)

    # -- the tree's Link

    async def desired(self, after: int) -> Desire:
        """The desired set, once there is one whose revision is greater than ``after``, or of a newer link. Raises
        LinkLost when the link is lost meanwhile."""
        session = await self._wait(self._find_registered)
        if session is not self._told:
            self._told, after = session, -1

        def find_newer() -> Desire | None:
            self._prove_standing(session)
            desire = session.desire
            return desire if desire is not None and desire.revision > after else None

        desire = await self._wait(find_newer)
        session.given = desire.revision
        return desire

    async def order(self, after: WeightsOrder | None) -> WeightsOrder:
        """What the server says of weights, once that is something else than ``after``: waits over any loss of the
        link, for an order holds until there is another one."""

        def find_newer() -> WeightsOrder | None:
            session = self._find_registered()
            return None if session is None or session.order == after else session.order

        return await self._wait(find_newer)

    async def report(self, event: Event) -> None:
        """Hand an event up. A registration waits for a link; any other word raises LinkLost when its link is gone."""
        if isinstance(event, NodeRegistered):
            session = await self._wait(self._find_welcomed)
            try:
                session.line.send(encode(Register(node=event.node, running=event.running)))
            except WireError as error:
                self._unsaid.say(error.message)
                raise LinkLost(f"the node can't be registered: {error.message}") from error
            session.registered = True
            return self._tell_change()
        welcomed = self._find_welcomed()
        if welcomed is None:
            raise LinkLost(self._why)
        if not welcomed.registered:
            raise LinkLost("the link to the server was made anew; the node registers again")
        match event:
            case NodeReported(node=node, applied=applied):
                # The number may be one of an earlier server, which counted by itself.
                known = applied if applied == welcomed.given else None
                word: NodeWord | ShardWord | WeightsWord = NodeWord(node=node, applied=known)
            case ShardChanged(report=report):
                word = ShardWord(report=report)
            case WeightsReported(weights=weights):
                word = WeightsWord(weights=weights)
            case _:
                raise TypeError(f"{type(event).__name__} is no word of an agent")
        try:
            welcomed.line.send(encode(word))
        except WireError as error:
            # A driver may say anything. What was said before goes on to count, and so does what is said next.
            self._unsaid.say(error.message)

    async def wait_open(self) -> None:
        """Until there is a link that the node can register over."""
        await self._wait(self._find_welcomed)

    @property
    def give_up_seconds(self) -> float | None:
        """How long after the last word from here the server may give up what runs on several nodes, as the last one
        that was here has said; None where it does not say."""
        return self._give_up_seconds

    async def wait_lost(self) -> None:
        """Until the link that the node is registered over is gone: then it is to register again, at once."""
        session = await self._wait(self._find_registered)
        await self._wait(lambda: True if self._find_registered() is not session else None)

    def _find_welcomed(self) -> Session | None:
        session = self._session
        return session if session is not None and session.line.lost is None and session.why is None else None

    def _find_registered(self) -> Session | None:
        session = self._find_welcomed()
        return session if session is not None and session.registered else None

    def _prove_standing(self, session: Session) -> None:
        if self._find_welcomed() is not session:
            raise LinkLost(session.why or session.line.lost or "the link to the server was made anew")

    async def _wait(self, find: Callable[[], T | None]) -> T:
        while (found := find()) is None:
            await self._changed.wait()
        return found

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # -- the control link

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Dial, for ever. ``reactor`` must be served meanwhile."""
        try:
            async with trio.open_nursery() as nursery:
                complaints = Complaints("no trunk to the server", self._pace.repeat)
                for _ in range(self._count):
                    nursery.start_soon(self._keep_trunk, complaints)
                task_status.started()
                await self._keep_link(nursery)
        finally:
            for trunk in tuple(self._trunks):
                trunk.abort("the agent ends")

    async def _keep_link(self, nursery: trio.Nursery) -> None:
        complaints = Complaints("no link to the server", self._pace.repeat)
        backoff = Backoff(self._pace, self._random)
        while True:
            began = trio.current_time()
            try:
                session: Session = await nursery.start(self._run_link)
            except LinkLost as lost:
                self._why = clean(lost.message)
                complaints.say(lost.message)
            else:
                complaints.forget()
                await session.ending.wait()
                if session.why is not None:
                    complaints.say(session.why)
            await trio.sleep(backoff.draw(lived_seconds=trio.current_time() - began))

    async def _run_link(self, *, task_status: trio.TaskStatus[Session]) -> None:
        """One link from dial to end. Raises LinkLost before the welcome, and nothing after it."""
        session: Session | None = None
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                session = await self._enter(nursery)
                before, self._session = self._session, session
                self._give_up_seconds = session.give_up_seconds
                self._tell_change()
                log.info("connected to the server at %s", self._server.name)
                task_status.started(session)
                if before is not None and before.why is None:
                    nursery.start_soon(before.line.close, "a later link has taken its place")
                await self._listen(session)
        except* Exception as group:
            failure = self._server.explain(tuple(_flatten(group)))
        finally:
            if session is not None:
                session.line.give_up()
                self._end(session, failure)
        if failure is not None and not isinstance(failure, LlmgwError):
            log.error("the link to the server failed%s", trace(failure))
        if session is None and failure is not None:
            raise failure if isinstance(failure, LinkLost) else DialFailed(_words(failure))

    def _end(self, session: Session, failure: Exception | None) -> None:
        why = session.line.lost if isinstance(failure, LinkLost) else None
        session.why = why or (_words(failure) if failure is not None else "the agent ends")
        if self._session is session:
            self._why = session.why
        session.ending.set()
        self._tell_change()

    async def _enter(self, nursery: trio.Nursery) -> Session:
        line = await self._server.open_link(nursery)
        nursery.start_soon(self._watch, line)
        self._dials += 1
        hello = Hello(protocol=PROTOCOL, node=self._node, run=self._run, dial=self._dials, version=self._version)
        line.send(encode(hello))
        answer, name = None, self._server.name
        with trio.move_on_after(self._pace.welcome):
            answer = decode_from_server(await line.receive())
        match answer:
            case Welcome(protocol=protocol) as welcome if protocol == PROTOCOL:
                return Session(line, welcome)
            case Welcome(protocol=protocol):
                raise DialFailed(f"{name} speaks protocol {protocol}, this agent {PROTOCOL}: upgrade the older one")
            case Refused(code=code, reason=reason):
                raise DialFailed(f"{name} refuses this node ({code}): {clean(reason)}")
            case None:
                raise DialFailed(f"{name} gave no welcome within {self._pace.welcome:g} s")
        raise DialFailed(f"{name} said {type(answer).__name__} where a welcome was due")

    async def _watch(self, line: Line) -> None:
        while True:
            await trio.sleep(LOOK_SECONDS)
            line.look(ping_seconds=self._pace.ping, pong_seconds=PONG_SECONDS)

    async def _listen(self, session: Session) -> None:
        """Take what the server says, to the link's end."""
        while True:
            message = decode_from_server(await session.line.receive())
            match message:
                case Desired() | DesiredDelta():
                    self._take(session, message)
                case OrderWord(order=order):
                    session.order = order
                    self._tell_change()
                case Goaway(reason=reason):
                    log.info("the server asks for another link: %s", clean(reason))
                    session.ending.set()
                case Refused(code=code, reason=reason):
                    raise WireError(f"the server has ended the link ({code}): {clean(reason)}")
                case Welcome():
                    raise WireError("the server said welcome twice")

    def _take(self, session: Session, message: Desired | DesiredDelta) -> None:
        specs = message.shards if isinstance(message, Desired) else message.put
        for spec in specs:
            if spec.node != self._node:
                raise WireError(f"the server desires shard {clean(spec.id)} of node {clean(spec.node)} here")
        desire = patch(session.desire, message, node=NodeId(self._node))
        if desire is not None:
            session.desire, session.asked_whole = desire, False
            self._tell_change()
        elif not session.asked_whole:
            # Once: what else is under way does not fit either, and each would ask again.
            session.asked_whole = True
            session.line.send(encode(Resync()))

    # -- trunks

    async def _keep_trunk(self, complaints: Complaints) -> None:
        backoff = Backoff(self._pace, self._random)
        while True:
            session = await self._wait(self._find_welcomed)
            began = trio.current_time()
            try:
                await self._run_trunk(session.token)
                complaints.forget()
            except LinkLost as lost:
                complaints.say(lost.message)
            except Exception as fault:
                log.error("a trunk failed; trying again%s", trace(fault))
            if self._leaving:
                return
            await trio.sleep(backoff.draw(lived_seconds=trio.current_time() - began))

    async def drain(self) -> None:
        """Take no more requests, and wait until those under way have ended; the caller bounds the time."""
        self._leaving = True
        for trunk in tuple(self._trunks):
            trunk.goaway("the agent is stopping")
        while self._trunks:
            await self._changed.wait()

    async def _run_trunk(self, token: str) -> None:
        """One trunk until it has ended or another is to be dialled before it does. Raises DialFailed."""
        done = trio.Event()
        trunk: Trunk | None = None

        def end(reason: str) -> None:
            if trunk is not None:
                self._trunks.pop(trunk, None)
            done.set()
            self._tell_change()

        # One that is to leave goes on with the streams it has, beside the one that is dialled next.
        trunk = await self._server.open_trunk(token, leave=done.set, over=end)
        if self._leaving:
            # it would be given new requests
            trunk.abort("the agent is stopping")
        elif not done.is_set():
            self._trunks[trunk] = None
        await done.wait()


class Complaints:
    """A trouble that lasts is told when it changes, and else each ``repeat_seconds``."""

    __slots__ = ("_at", "_last", "_repeat_seconds", "_what")

    def __init__(self, what: str, repeat_seconds: float) -> None:
        self._what = what
        self._repeat_seconds = repeat_seconds
        self._last: str | None = None
        self._at = 0.0

    def say(self, text: str) -> None:
        now = trio.current_time()
        if text != self._last or now - self._at >= self._repeat_seconds:
            self._last, self._at = text, now
            log.warning("%s: %s", self._what, clean(text))

    def forget(self) -> None:
        """It is over: the same again would be news."""
        self._last = None


def _flatten(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flatten(error)
        else:
            yield error


def _words(error: Exception) -> str:
    return clean(error.message if isinstance(error, LlmgwError) else f"{type(error).__name__}: {error}")
