"""One dial of an agent to its server: TCP, TLS and the protocol agreed on, each in its time, or the reason in words."""

from __future__ import annotations

import datetime
import json
import random
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio
from trio_websocket import ConnectionRejected, WebSocketConnection
from wsproto.utilities import LocalProtocolError

from llmgw.config.agent import AgentConfig, ServerAddress
from llmgw.core.replica import ShardId
from llmgw.errors import LinkLost
from llmgw.link.agent_trunk import AgentTrunk
from llmgw.link.control import Control, Tap, ask_upgrade
from llmgw.link.explain import check_own, explain_dial, is_wrong_name, list_names, name_address
from llmgw.link.tls import CONTROL_ALPN, GIVE_ALPN, TRUNK_ALPN, ClientContexts, client_contexts, hand_over
from llmgw.link.words import clean
from llmgw.reactor.credentials import Credentials
from llmgw.reactor.loop import Reactor

TlsStream = trio.SSLStream[trio.SocketStream]


# A network that is gone is found by the kernel, within 15 s: what an agent says every 5 s stays unacknowledged, and
# when it says nothing the kernel asks. Pings would have to be answered by the server's program, a thousand agents'.
LOST_NETWORK = {
    socket.TCP_USER_TIMEOUT: 8000,  # milliseconds
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 2,
}


class DialFailed(LinkLost):
    """The server was not reached, or did not let this node in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long each step of a dial may take, and how long the next dial waits, in seconds.

    Waits double from ``first_wait`` to ``most_wait``, and are drawn from half to one and a half of that: a server that
    begins anew waits some time for the nodes that it knew (``server/program.py``). A connection that stood for ``good``
    begins them anew: what ends it is news, not the next of a row. ``welcome`` leaves the server time to ask another
    agent of this name whether it lives. A trouble that lasts is told each ``repeat``. ``ping``: of silence, before the
    server is asked whether it hangs; it says nothing by itself, and a network that is gone is found without
    (``LOST_NETWORK``).
    """

    connect: float = 10.0
    tls: float = 10.0
    upgrade: float = 10.0
    welcome: float = 20.0
    first_wait: float = 0.5
    most_wait: float = 8.0
    good: float = 10.0
    repeat: float = 60.0
    ping: float = 60.0


class Backoff:
    """How long to wait before the next dial: doubling, and never in step with a thousand other agents."""

    __slots__ = ("_next", "_pace", "_random")

    def __init__(self, pace: Pace, randomness: random.Random) -> None:
        self._pace = pace
        self._random = randomness
        self._next = pace.first_wait

    def draw(self, *, lived_seconds: float) -> float:
        """Seconds to wait after an attempt that lived so long, counted from its beginning."""
        if lived_seconds >= self._pace.good:
            self._next = self._pace.first_wait
        wait, self._next = self._next, min(2 * self._next, self._pace.most_wait)
        return wait * self._random.uniform(0.5, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Where the server is, and what this node proves itself with there."""

    server: ServerAddress
    ca: Path
    contexts: ClientContexts
    pace: Pace = Pace()

    @property
    def name(self) -> str:
        """``host:port``"""
        return name_address(self.server.host, self.server.port)

    def explain(self, error: BaseException, names: tuple[str, ...] = ()) -> str:
        """What failed on the way to the open link."""
        return explain_dial(error, host=self.server.host, port=self.server.port, ca=self.ca, names=names)


async def dial_control(way: Way) -> TlsStream:
    """A connection for the control link, its handshake done. Raises DialFailed."""
    stream = await _dial(way, way.contexts.control, CONTROL_ALPN)
    _notice_loss(stream)
    return stream


async def dial_trunk(way: Way) -> TlsStream:
    """A connection for a trunk, its handshake done. Raises DialFailed."""
    return await _dial(way, way.contexts.trunk, TRUNK_ALPN)


async def dial_give(way: Way) -> TlsStream:
    """A connection over which the server asks this node for weights, its handshake done. Raises DialFailed."""
    stream = await _dial(way, way.contexts.give, GIVE_ALPN)
    _notice_loss(stream)
    return stream


def _notice_loss(stream: TlsStream) -> None:
    tcp = stream.transport_stream
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in LOST_NETWORK.items():
        tcp.setsockopt(socket.IPPROTO_TCP, option, value)


async def _dial(way: Way, context: ssl.SSLContext, alpn: str) -> TlsStream:
    try:
        stream = await _connect(way, context)
    except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
        names = await _read_names(way) if is_wrong_name(error) else ()
        raise DialFailed(way.explain(error, names)) from error
    if stream.selected_alpn_protocol() != alpn:
        await trio.aclose_forcefully(stream)
        raise DialFailed(f"{way.name} does not speak {alpn}; is that the server's agent_listen, and is it as new?")
    return stream


async def _connect(way: Way, context: ssl.SSLContext) -> TlsStream:
    with trio.fail_after(way.pace.connect):
        tcp = await trio.open_tcp_stream(way.server.host, way.server.port)
    try:
        stream = trio.SSLStream(tcp, context, server_hostname=way.server.host, https_compatible=True)
        with trio.fail_after(way.pace.tls):
            await stream.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(tcp)
        raise
    return stream


async def _read_names(way: Way) -> tuple[str, ...]:
    """The names in the server's certificate, by a second look that says nothing; none when that fails."""
    try:
        stream = await _connect(way, way.contexts.look)
    except (OSError, trio.BrokenResourceError, trio.TooSlowError):
        return ()
    names = list_names(stream.getpeercert())
    await trio.aclose_forcefully(stream)
    return names


async def open_upgrade(nursery: trio.Nursery, way: Way, tap: Tap, node: str) -> WebSocketConnection:
    """The websocket over a dialled connection. Raises DialFailed, or ConnectionRejected out of ``nursery``."""
    try:
        with trio.fail_after(way.pace.upgrade):
            return await ask_upgrade(nursery, tap, host=way.name, node=node)
    except (LinkLost, trio.TooSlowError) as error:
        # A refused certificate shows only here: by then the handshake is over for this end.
        lost = tap.fault or (ConnectionResetError() if tap.gone.is_set() else error)
        raise DialFailed(way.explain(lost)) from error


def explain_rejection(way: Way, rejected: ConnectionRejected) -> str:
    """What the server answered instead of a websocket, in its own words if it gave any."""
    try:
        said = str(json.loads(rejected.body or b"")["error"]["message"])
    except (ValueError, TypeError, KeyError, LookupError):
        said = "it gave no reason"
    return f"{way.name} refuses this node (status {rejected.status_code}): {clean(said, 500)}"


class TlsServer:
    """The server by TLS over TCP: what ``dialer.Dialer`` dials."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        reactor: Reactor,
        find_port: Callable[[ShardId, int], int | str],
        pace: Pace | None = None,
    ) -> None:
        """``find_port``: where the shard of that epoch listens on 127.0.0.1, or why there is none (``no_shard``,
        ``wrong_epoch``). ``reactor`` moves the trunks' bytes. Raises UsageError when the certificate files can't be
        used."""
        self._config = config
        self._reactor = reactor
        self._find_port = find_port
        self._pace = pace or Pace()
        self._credentials = Credentials(config.tls, client_contexts)

    @property
    def name(self) -> str:
        """``host:port``"""
        return name_address(self._config.server.host, self._config.server.port)

    def _way(self) -> Way:
        config = self._config
        return Way(server=config.server, ca=config.tls.ca, contexts=self._credentials.current, pace=self._pace)

    async def open_link(self, nursery: trio.Nursery) -> Control:
        """The control link, its upgrade done. Raises DialFailed, or ConnectionRejected out of ``nursery``."""
        await self._prove_own()
        way = self._way()
        stream = await dial_control(way)
        nursery.start_soon(_close_at_end, stream)
        tap = Tap(stream)
        ws = await open_upgrade(nursery, way, tap, self._config.node)
        return Control(ws, tap, nursery, peer="the server")

    async def _prove_own(self) -> None:
        """DialFailed when this node's certificate, as it is on the disk now, would be refused."""
        tls = self._config.tls
        now = datetime.datetime.now(datetime.UTC)
        problem = await trio.to_thread.run_sync(partial(check_own, tls, node=self._config.node, now=now))
        if problem is not None:
            raise DialFailed(problem)

    async def open_trunk(self, token: str, *, leave: Callable[[], None], over: Callable[[str], None]) -> AgentTrunk:
        """A trunk whose handshake is done. Raises DialFailed."""
        way = self._way()
        trunk = AgentTrunk(
            self._reactor,
            node=self._config.node,
            session=token,
            find_port=self._find_port,
            ready=lambda: None,
            goaway=lambda reason: leave(),
            over=over,
        )
        stream = await dial_trunk(way)
        try:
            transport = hand_over(self._reactor, stream, trunk.carrier)
        except OSError as error:
            await trio.aclose_forcefully(stream)
            raise DialFailed(f"the trunk to {way.name} can't be taken over: {error.strerror}") from error
        trunk.attach(transport)
        return trunk

    async def open_give(self) -> TlsStream:
        """A connection over which the server asks for weights. Raises DialFailed."""
        return await dial_give(self._way())

    def explain(self, errors: tuple[Exception, ...]) -> Exception:
        """A rejection is the reason, and the rest came of it; an answer to a ping while the link is closed is none."""
        for error in errors:
            if isinstance(error, ConnectionRejected):
                return DialFailed(explain_rejection(self._way(), error))
        reasons = [error for error in errors if not isinstance(error, LocalProtocolError)]
        return reasons[0] if reasons else LinkLost("it was closed")


async def _close_at_end(stream: TlsStream) -> None:
    """The stream goes with the nursery that this runs in."""
    try:
        await trio.sleep_forever()
    finally:
        await trio.aclose_forcefully(stream)
