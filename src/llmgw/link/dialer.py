"""The agent's side: keeps a control link and a few trunks to the server, for ever, and is the tree's way to it.

A link that is lost costs nothing but time: what runs goes on, what is said meanwhile waits with the tree, and after the
next dial the node registers with all that it runs. Trunks outlive the link for as long as the server lets them.
"""

from __future__ import annotations

import datetime
import logging
import random
import secrets
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio
from trio_websocket import ConnectionRejected
from wsproto.utilities import LocalProtocolError

from llmgw.config.agent import AgentConfig
from llmgw.core.effects import Desire
from llmgw.core.events import Event, NodeRegistered, NodeReported, ShardChanged
from llmgw.core.node import NodeId
from llmgw.core.replica import ShardId
from llmgw.errors import LinkLost, LlmgwError
from llmgw.link.agent_trunk import AgentTrunk
from llmgw.link.control import LOOK_SECONDS, Control, Tap
from llmgw.link.dial import (
    Backoff,
    DialFailed,
    Pace,
    TlsStream,
    Way,
    dial_control,
    dial_trunk,
    explain_rejection,
    open_upgrade,
)
from llmgw.link.explain import check_own
from llmgw.link.tls import Credentials, client_contexts, hand_over
from llmgw.link.words import clean, trace
from llmgw.reactor.loop import Reactor
from llmgw.wire import (
    PROTOCOL,
    Desired,
    DesiredDelta,
    Goaway,
    Hello,
    NodeWord,
    Refused,
    Register,
    Resync,
    ShardWord,
    Welcome,
    WireError,
    decode_from_server,
    encode,
    patch,
)

log = logging.getLogger("llmgw.link")

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


class Session:
    """One control link that the server has welcomed."""

    __slots__ = ("asked_whole", "control", "desire", "ending", "given", "registered", "token", "why")

    def __init__(self, control: Control, token: str) -> None:
        self.control = control
        self.token = token
        self.registered = False
        # What is to run, as far as the server has said, and the revision that the tree was given last.
        self.desire: Desire | None = None
        self.given: int | None = None
        self.asked_whole = False
        # Set when another link is to be dialled: this one is over, or the server has asked for it.
        self.ending = trio.Event()
        self.why: str | None = None


class Dialer:
    """The way to the server: ``serve`` it, and give it to the agent's tree as its ``Link``."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        reactor: Reactor,
        find_port: Callable[[ShardId, int], int | str],
        version: str,
        pace: Pace | None = None,
        randomness: random.Random | None = None,
    ) -> None:
        """``find_port``: where the shard of that epoch listens on 127.0.0.1, or why there is none (``no_shard``,
        ``wrong_epoch``). ``reactor`` moves the trunks' bytes. Raises UsageError when the certificate files can't be
        used."""
        self._config = config
        self._reactor = reactor
        self._find_port = find_port
        self._version = version
        self._pace = pace or Pace()
        self._random = randomness or random.Random()  # noqa: S311 - it spreads dials, and hides nothing
        self._credentials = Credentials(config.tls, client_contexts)
        self._run = secrets.token_hex(8)
        self._dials = 0
        self._session: Session | None = None
        self._why = "it is not connected yet"
        # Whose desired set was handed out last: revisions count from anew with each server.
        self._told: Session | None = None
        self._changed = trio.Event()
        self._trunks: set[AgentTrunk] = set()
        self._leaving = False

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

    async def report(self, event: Event) -> None:
        """Hand an event up. A registration waits for a link; any other word raises LinkLost when its link is gone."""
        if isinstance(event, NodeRegistered):
            session = await self._wait(self._find_welcomed)
            session.control.send(encode(Register(node=event.node, running=event.running)))
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
                welcomed.control.send(encode(NodeWord(node=node, applied=known)))
            case ShardChanged(report=report):
                welcomed.control.send(encode(ShardWord(report=report)))
            case _:
                raise TypeError(f"{type(event).__name__} is no word of an agent")

    async def wait_lost(self) -> None:
        """Until the link that the node is registered over is gone: then it is to register again, at once."""
        session = await self._wait(self._find_registered)
        await self._wait(lambda: True if self._find_registered() is not session else None)

    def _find_welcomed(self) -> Session | None:
        session = self._session
        return session if session is not None and session.control.lost is None and session.why is None else None

    def _find_registered(self) -> Session | None:
        session = self._find_welcomed()
        return session if session is not None and session.registered else None

    def _prove_standing(self, session: Session) -> None:
        if self._find_welcomed() is not session:
            raise LinkLost(session.why or session.control.lost or "the link to the server was made anew")

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
                for _ in range(self._config.trunks):
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
        stream: TlsStream | None = None
        try:
            way = await self._prove_own()
            stream = await dial_control(way)
            async with trio.open_nursery() as nursery:
                session = await self._enter(nursery, way, stream)
                before, self._session = self._session, session
                self._tell_change()
                log.info("connected to the server at %s", way.name)
                task_status.started(session)
                if before is not None and before.why is None:
                    nursery.start_soon(before.control.close, "a later link has taken its place")
                await self._listen(session)
        except* ConnectionRejected as group:
            failure = DialFailed(explain_rejection(way, _first(group)))
        except* LocalProtocolError:
            # the websocket wants to answer a ping while the link is being closed
            failure = failure or LinkLost("it was closed")
        except* Exception as group:
            failure = failure or _first(group)
        finally:
            if session is not None:
                session.control.give_up()
                self._end(session, failure)
            if stream is not None:
                await trio.aclose_forcefully(stream)
        if failure is not None and not isinstance(failure, LlmgwError):
            log.error("the link to the server failed%s", trace(failure))
        if session is None and failure is not None:
            raise failure if isinstance(failure, LinkLost) else DialFailed(_words(failure))

    def _end(self, session: Session, failure: Exception | None) -> None:
        why = session.control.lost if isinstance(failure, LinkLost) else None
        session.why = why or (_words(failure) if failure is not None else "the agent ends")
        if self._session is session:
            self._why = session.why
        session.ending.set()
        self._tell_change()

    async def _prove_own(self) -> Way:
        """The server, and this node's certificate as it is on the disk now; DialFailed when that would be refused."""
        tls = self._config.tls
        now = datetime.datetime.now(datetime.UTC)
        problem = await trio.to_thread.run_sync(partial(check_own, tls, node=self._config.node, now=now))
        if problem is not None:
            raise DialFailed(problem)
        return self._way()

    def _way(self) -> Way:
        config = self._config
        return Way(server=config.server, ca=config.tls.ca, contexts=self._credentials.current, pace=self._pace)

    async def _enter(self, nursery: trio.Nursery, way: Way, stream: TlsStream) -> Session:
        tap = Tap(stream)
        ws = await open_upgrade(nursery, way, tap, self._config.node)
        control = Control(ws, tap, nursery, peer="the server")
        nursery.start_soon(self._watch, control)
        self._dials += 1
        hello = Hello(protocol=PROTOCOL, node=self._config.node, run=self._run, dial=self._dials, version=self._version)
        control.send(encode(hello))
        answer = None
        with trio.move_on_after(self._pace.welcome):
            answer = decode_from_server(await control.receive())
        match answer:
            case Welcome(protocol=protocol, session=token) if protocol == PROTOCOL:
                return Session(control, token)
            case Welcome(protocol=protocol):
                raise DialFailed(f"{way.name} speaks protocol {protocol}, this agent {PROTOCOL}: upgrade the older one")
            case Refused(code=code, reason=reason):
                raise DialFailed(f"{way.name} refuses this node ({code}): {clean(reason)}")
            case None:
                raise DialFailed(f"{way.name} gave no welcome within {self._pace.welcome:g} s")
        raise DialFailed(f"{way.name} said {type(answer).__name__} where a welcome was due")

    async def _watch(self, control: Control) -> None:
        while True:
            await trio.sleep(LOOK_SECONDS)
            control.look(ping_seconds=self._pace.ping)

    async def _listen(self, session: Session) -> None:
        """Take what the server says, to the link's end."""
        while True:
            message = decode_from_server(await session.control.receive())
            match message:
                case Desired() | DesiredDelta():
                    self._take(session, message)
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
            if spec.node != self._config.node:
                raise WireError(f"the server desires shard {clean(spec.id)} of node {clean(spec.node)} here")
        desire = patch(session.desire, message, node=NodeId(self._config.node))
        if desire is not None:
            session.desire, session.asked_whole = desire, False
            self._tell_change()
        elif not session.asked_whole:
            # Once: what else is under way does not fit either, and each would ask again.
            session.asked_whole = True
            session.control.send(encode(Resync()))

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
        way = self._way()
        done = trio.Event()

        def end(reason: str) -> None:
            self._trunks.discard(trunk)
            done.set()
            self._tell_change()

        trunk = AgentTrunk(
            self._reactor,
            node=self._config.node,
            session=token,
            find_port=self._find_port,
            ready=lambda: None,
            # It goes on with the streams it has, beside the one that is dialled next.
            goaway=lambda reason: done.set(),
            over=end,
        )
        stream = await dial_trunk(way)
        if self._leaving:
            # a trunk that comes now would be given new requests
            return await trio.aclose_forcefully(stream)
        try:
            transport = hand_over(self._reactor, stream, trunk.carrier)
        except OSError as error:
            await trio.aclose_forcefully(stream)
            raise DialFailed(f"the trunk to {way.name} can't be taken over: {error.strerror}") from error
        self._trunks.add(trunk)
        trunk.attach(transport)
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


def _first(group: BaseExceptionGroup[E]) -> E:
    """One of its errors: the others came of it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _words(error: Exception) -> str:
    return clean(error.message if isinstance(error, LlmgwError) else f"{type(error).__name__}: {error}")
