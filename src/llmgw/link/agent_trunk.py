"""The agent's end of a trunk: each stream that the server opens becomes a connection to an engine of this node.

The server names a shard, never a host or a port; and no HTTP is read here, so an engine's bytes arrive as it sent them.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

from llmgw.core.replica import ShardId
from llmgw.link.carrier import Carrier
from llmgw.link.mux import HALF, MAX_STREAMS, Channel, Hello, Mux, Opening
from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import Plain, Transport

_RESET = os.strerror(errno.ECONNRESET)


class EngineStream:
    """One stream and its connection. Each side is stopped while the other does not keep up."""

    __slots__ = ("_carrier", "_channel", "_finished", "_mux", "_stands", "engine")

    engine: Transport

    def __init__(self, carrier: Carrier, channel: Channel) -> None:
        self._carrier = carrier
        self._mux = carrier.mux
        self._channel = channel
        self._stands = self._finished = False

    # -- from the trunk

    def take(self, data: bytes) -> None:
        if self.engine.send(data) and self._channel.room < HALF:
            self._carrier.settle_soon(self)

    def settle(self) -> None:
        # what waits for the engine is bounded by the credit that is not given back
        if not self.engine.pending:
            self._mux.give_back(self._channel)

    def peer_finished(self) -> None:
        self._finished = True

    def peer_reset(self, reason: str) -> None:
        if self._finished:
            self.engine.close()
        else:
            # the client left: an engine stops only when its connection closes
            self.engine.abort()

    def peer_stands(self) -> None:
        """The server's end always stands."""

    def unblocked(self) -> None:
        self.engine.resume()

    def crash(self, error: Exception) -> None:
        self.engine.abort()
        self._mux.reset(self._channel, "crashed")
        self._carrier.schedule()

    def trunk_lost(self, reason: str) -> None:
        self.engine.abort()

    # -- from the engine's connection

    def connected(self) -> None:
        self._stands = True
        self._mux.acknowledge(self._channel)
        self._carrier.schedule()

    def received(self, data: bytes) -> None:
        if not self._mux.write(self._channel, data):
            self.engine.pause()
        self._carrier.schedule()

    def drained(self) -> None:
        if self._channel.room < HALF:
            self._carrier.settle_soon(self)

    def ended(self) -> None:
        self.engine.abort()
        self._mux.close(self._channel, "engine_closed")
        self._carrier.schedule()

    def lost(self, reason: str) -> None:
        broke = "engine_reset" if reason == _RESET else "engine_closed"
        self._mux.break_off(self._channel, broke if self._stands else "connect_failed")
        self._carrier.schedule()

    def on_crash(self, error: Exception) -> None:
        self.crash(error)


class AgentTrunk:
    """One trunk that this agent has dialled."""

    __slots__ = ("_find_port", "_node", "_on_goaway", "_on_over", "_on_ready", "_reactor", "_session", "carrier")

    def __init__(
        self,
        reactor: Reactor,
        *,
        node: str,
        session: str,
        find_port: Callable[[ShardId, int], int | str],
        ready: Callable[[], None],
        goaway: Callable[[str], None],
        over: Callable[[str], None],
        max_streams: int = MAX_STREAMS,
    ) -> None:
        """``find_port``: the port of a shard's try on 127.0.0.1, or why there is none (``no_shard``, ``wrong_epoch``).

        ``ready`` is called when the server has greeted, ``goaway`` when another trunk is to be dialled in place of this
        one, and ``over`` once, with the reason, when it has ended; ``attach`` begins.
        """
        self._reactor = reactor
        self._node = node
        self._session = session
        self._find_port = find_port
        self._on_ready = ready
        self._on_goaway = goaway
        self._on_over = over
        self.carrier = Carrier(reactor, Mux(opener=False, max_streams=max_streams), self, name="trunk to the server")

    def attach(self, transport: Transport) -> None:
        """Begin over a connection that stands. Its owner is ``carrier`` from now on, or was already."""
        self.carrier.attach(transport, node=self._node, session=self._session)

    @property
    def streams(self) -> int:
        return len(self.carrier.mux.channels)

    def goaway(self, reason: str) -> None:
        """Take no new streams; the server closes the trunk when the last one has ended."""
        self.carrier.go_away(reason)

    def abort(self, reason: str) -> None:
        """End now, with all streams and their connections to engines."""
        self.carrier.fail(reason)

    # -- from the carrier

    def greeted(self, hello: Hello) -> None:
        self._on_ready()

    def opened(self, channel: Channel, opening: Opening) -> None:
        try:
            refusal = "going_away" if self.carrier.leaving else self._connect(channel, opening)
        except Exception as fault:
            self.carrier.say(logging.ERROR, f"opening a stream to {opening.shard[:200]!r} failed", fault)
            refusal = "crashed"
        if refusal:
            self.carrier.mux.reset(channel, refusal)

    def _connect(self, channel: Channel, opening: Opening) -> str:
        """Dial the engine; why not, or ""."""
        port = self._find_port(ShardId(opening.shard), opening.epoch)
        if isinstance(port, str):
            return port
        stream = EngineStream(self.carrier, channel)
        try:
            stream.engine = Plain.connect(self._reactor, ("127.0.0.1", port), stream, connected=stream.connected)
        except OSError as error:
            reason = error.strerror or error
            self.carrier.say(logging.WARNING, f"no connection to the engine of {opening.shard[:200]!r}: {reason}")
            return "connect_failed"
        channel.above = stream
        return ""

    def told_to_leave(self, reason: str) -> None:
        self.carrier.say(logging.INFO, f"{self.carrier.name}: the server takes it out of use: {reason}")
        self._on_goaway(reason)

    def over(self, reason: str) -> None:
        self._on_over(reason)
