"""The server's trunks: streams to engines on nodes that must not be dialled, as transports for the door.

A stream is one connection to one engine; the agent at the other end makes it (agent_trunk.py).
"""

from __future__ import annotations

import errno
import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from llmgw.core.node import NodeId
from llmgw.core.replica import ShardAddress
from llmgw.counters import Counters
from llmgw.link.carrier import Carrier
from llmgw.link.mux import HALF, MAX_STREAMS, Channel, Hello, Mux, Opening
from llmgw.link.sparing import SparingLog
from llmgw.reactor.loop import Deadline, Reactor
from llmgw.reactor.transports import FLUSH_SECONDS, NOBODY, Receiver, Transport

_WORDS = {
    "client_left": "the other end gave the stream up",
    "no_shard": "the node does not run this shard",
    "wrong_epoch": "the node runs another try of this shard",
    "connect_failed": "the node's agent got no connection to the engine",
    "engine_closed": "the engine closed the connection",
    "engine_reset": "the engine reset the connection",
    "crashed": "the node's agent failed at this stream",
    "going_away": "the node's agent opens nothing on this trunk any more",
    "unknown": "the node's agent ended the stream",
}


class Stream:
    """A Transport over a trunk.

    What comes goes straight to the owner while it wants it (``_flowing``); else it is held, and no credit is given
    back, which in the end stops the engine and nobody else.
    """

    __slots__ = (
        "_broke",
        "_carrier",
        "_channel",
        "_closing",
        "_connected",
        "_end_told",
        "_ended",
        "_flowing",
        "_held",
        "_last_wait",
        "_mux",
        "_paused",
        "closed",
        "owner",
        "peer",
    )

    def __init__(
        self, carrier: Carrier, channel: Channel, owner: Receiver, peer: str, connected: Callable[[], None]
    ) -> None:
        self._carrier = carrier
        self._mux = carrier.mux
        self._channel = channel
        self.owner = owner
        self.peer = peer
        self.closed = False
        self._connected: Callable[[], None] | None = connected
        self._flowing = True
        self._paused = self._closing = self._ended = self._end_told = False
        self._held: deque[bytes] | None = None
        # why it broke, while what came before that is still to be handed over
        self._broke: str | None = None
        self._last_wait: Deadline | None = None

    @property
    def pending(self) -> int:
        return self._channel.waiting_bytes

    # -- from the trunk

    def take(self, data: bytes) -> None:
        if self._flowing:
            self.owner.received(data)
            if self._channel.room < HALF:
                self._carrier.settle_soon(self)
        elif not self.closed and not self._closing:
            if self._held is None:
                self._held = deque()
            self._held.append(data)

    def settle(self) -> None:
        if self._flowing:
            self._mux.give_back(self._channel)

    def peer_finished(self) -> None:
        self._ended = True
        if self._flowing:
            self._tell_end()

    def peer_reset(self, reason: str) -> None:
        # after its FIN there was nothing more to say: what is held is complete
        if not self.closed and not self._ended:
            words = _WORDS[reason]
            if self._held:
                self._broke = words
            else:
                self._lose(words)
        elif self._closing:
            self._shut()

    def peer_stands(self) -> None:
        call, self._connected = self._connected, None
        if call is not None and not self.closed:
            call()

    def unblocked(self) -> None:
        if self._closing:
            self._shut()
        elif not self.closed:
            self.owner.drained()

    def crash(self, error: Exception) -> None:
        owner = self.owner
        self._give_up("crashed")
        owner.on_crash(error)

    def trunk_lost(self, reason: str) -> None:
        # what is here to its end needs no trunk
        if not self.closed and (not self._ended or self._end_told):
            # clients get to read this; the reason is the log's, and may speak of certificates
            self._lose(f"the connection to {self.peer} was lost")

    # -- from the run-queue

    def on_crash(self, error: Exception) -> None:
        self.crash(error)

    def _hand_over(self) -> None:
        held = self._held
        while held and not (self._paused or self.closed or self._closing):
            self.owner.received(held.popleft())
        if self._paused or self.closed or self._closing:
            return
        self._held = None
        if self._broke is not None:
            self._lose(self._broke)
        elif self._ended:
            self._tell_end()
        else:
            self._flow()

    def _flow(self) -> None:
        self._flowing = True
        if self._channel.room < HALF:
            self._carrier.settle_soon(self)

    def _tell_end(self) -> None:
        self._flowing = False
        if not self._end_told:
            self._end_told = True
            self.owner.ended()

    def _lose(self, reason: str) -> None:
        silent, owner = self._closing, self.owner
        self._shut()
        if not silent:
            owner.lost(reason)

    # -- from the owner

    def send(self, data: bytes) -> bool:
        if self.closed or self._closing or not data:
            return True
        took = self._mux.write(self._channel, data)
        self._carrier.schedule()
        return took

    def pause(self) -> None:
        self._paused = True
        self._flowing = False

    def resume(self) -> None:
        if not self._paused or self.closed or self._closing:
            return
        self._paused = False
        if self._held or self._ended or self._broke is not None:
            self._carrier.call_soon(self, self._hand_over)
        else:
            self._flow()

    def close(self, *, linger: bool = False) -> None:
        # the trunk outlives the stream, so last words need no time of their own to be read
        if self.closed or self._closing:
            return
        self._closing = True
        self._flowing = False
        self._held = None
        self._mux.close(self._channel, "client_left")
        self._carrier.schedule()
        if self._channel.gone:
            self._shut()
        else:
            self._last_wait = self._carrier.deadline(self, self.abort, FLUSH_SECONDS)

    def abort(self) -> None:
        if not self.closed:
            self._give_up("client_left")

    def reset(self) -> None:
        self.abort()

    def _give_up(self, reason: str) -> None:
        self._mux.reset(self._channel, reason)
        self._carrier.schedule()
        self._shut()

    def _shut(self) -> None:
        self.closed = True
        self._flowing = False
        self._held = None
        if self._last_wait is not None:
            self._last_wait.drop()
        # they hold each other: left so, each would wait for the garbage collector
        self.owner = NOBODY


class ServerTrunk:
    """One trunk that an agent dialled. It is used once the agent has proved the session that it registered with."""

    __slots__ = ("_refuse", "_trunks", "carrier", "node")

    def __init__(self, trunks: Trunks, node: NodeId, refuse: Callable[[str], str | None]) -> None:
        self._trunks = trunks
        self._refuse = refuse
        self.node = node
        mux = Mux(opener=True, max_streams=trunks.max_streams)
        self.carrier = Carrier(
            trunks.reactor, mux, self, name=f"trunk of node {node}", say=functools.partial(trunks.say, node)
        )

    @property
    def streams(self) -> int:
        return len(self.carrier.mux.channels)

    @property
    def open_to_streams(self) -> bool:
        mux = self.carrier.mux
        return not self.carrier.leaving and not mux.spent and len(mux.channels) < mux.max_streams

    def open(self, address: ShardAddress, owner: Receiver, connected: Callable[[], None]) -> Stream:
        """A new stream; what is sent goes along at once."""
        carrier = self.carrier
        channel = carrier.mux.open(Opening(shard=address.shard, epoch=address.epoch))
        stream = channel.above = Stream(carrier, channel, owner, f"{address.shard} on {address.node}", connected)
        carrier.schedule()
        if carrier.mux.spent:
            carrier.go_away("its stream numbers are used up")
        return stream

    # -- from the carrier

    def greeted(self, hello: Hello) -> None:
        if hello.node != self.node:
            return self.carrier.refuse(f"its HELLO names node {hello.node[:64]!r}, and its certificate does not")
        problem = self._refuse(hello.session)
        if problem is not None:
            return self.carrier.refuse(problem)
        self._trunks.take_in(self)

    def opened(self, channel: Channel, opening: Opening) -> NoReturn:
        raise RuntimeError("only the server opens streams")

    def told_to_leave(self, reason: str) -> None:
        self.carrier.say(logging.INFO, f"{self.carrier.name}: no new streams: {reason}")

    def over(self, reason: str) -> None:
        self._trunks.forget(self)


class Trunks:
    """All trunks of all nodes."""

    def __init__(
        self,
        reactor: Reactor,
        *,
        max_streams: int = MAX_STREAMS,
        counters: Counters | None = None,
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        """``max_streams``: of one trunk; the agent may set less. ``opened`` is called when there is one more."""
        self.reactor = reactor
        self._tell_opened = opened
        counters = counters or Counters()
        self._opened = counters.counter(
            "llmgw_trunk_streams_total", "Connections to engines that were opened over trunks, by node.", ("node",)
        )
        self._lacked = counters.counter(
            "llmgw_trunk_lacks_total", "Connections that found no trunk of their node with room, by node.", ("node",)
        )
        self.max_streams = max_streams
        # greeted, by node: what streams may be opened on
        self._by_node: dict[NodeId, list[ServerTrunk]] = {}
        self._all: set[ServerTrunk] = set()
        # ended, while their connections are still being closed
        self._closing: dict[NodeId, list[Transport]] = {}
        self._words = SparingLog(summary="%d more lines about trunks of node %s within %g s; the last: %s")

    def admit(
        self, node: NodeId, hand_over: Callable[[Receiver], Transport], *, refuse: Callable[[str], str | None]
    ) -> ServerTrunk:
        """Take a connection whose certificate names ``node``, as ``hand_over`` gives it to its owner.

        ``refuse`` tells of a session why it is not that node's, or None; until it was asked no stream is opened.
        What ``hand_over`` raises leaves nothing behind.
        """
        trunk = ServerTrunk(self, node, refuse)
        transport = hand_over(trunk.carrier)
        if transport.peer:
            trunk.carrier.name += f" from {transport.peer}"
        self._all.add(trunk)
        trunk.carrier.attach(transport)
        return trunk

    def open(self, address: ShardAddress, owner: Receiver, *, connected: Callable[[], None]) -> Stream:
        """A stream to the engine of a shard, on the trunk of its node that has the fewest.

        ``connected`` is called when the agent has reached the engine; ``lost`` without it means that the engine has not
        seen a byte, or that the trunk was lost. OSError when the node has no trunk with room.
        """
        best: ServerTrunk | None = None
        for trunk in self._by_node.get(address.node, ()):
            if trunk.open_to_streams and (best is None or trunk.streams < best.streams):
                best = trunk
        if best is None:
            self._lacked.add((address.node,), 1)
            reason = "has no trunk" if not self.count(address.node) else "has no room on its trunks"
            raise OSError(errno.EHOSTUNREACH, f"node {address.node} {reason}")
        self._opened.add((address.node,), 1)
        return best.open(address, owner, connected)

    def reaches(self, node: NodeId) -> bool:
        """Whether a stream could be opened to it now."""
        return any(trunk.open_to_streams for trunk in self._by_node.get(node, ()))

    def take_in(self, trunk: ServerTrunk) -> None:
        """It has proved itself: streams may be opened."""
        self._by_node.setdefault(trunk.node, []).append(trunk)
        trunk.carrier.say(logging.INFO, f"{trunk.carrier.name}: open")
        self._tell_opened()

    def forget(self, trunk: ServerTrunk) -> None:
        """It has ended."""
        self._all.discard(trunk)
        if trunk.carrier.attached:
            self._closing.setdefault(trunk.node, []).append(trunk.carrier.below)
        of_node = self._by_node.get(trunk.node)
        if of_node is not None and trunk in of_node:
            of_node.remove(trunk)
            if not of_node:
                del self._by_node[trunk.node]

    def close_node(self, node: NodeId, reason: str) -> None:
        """End all trunks of a node at once, and with them their streams."""
        for trunk in [trunk for trunk in self._all if trunk.node == node]:
            trunk.carrier.refuse(reason)

    def goaway(self, node: NodeId | None = None, *, reason: str = "the server is stopping") -> None:
        """No new streams, on all trunks or on those of a node; each ends with its last stream."""
        for trunk in [trunk for trunk in self._all if node is None or trunk.node == node]:
            trunk.carrier.go_away(reason)

    def say(self, node: NodeId, level: int, text: str, fault: Exception | None = None) -> None:
        """Log what happened to a trunk of a node, unless that would be too much about this node."""
        self._words.say(node, level, text, self.reactor.clock(), fault=fault)

    def sweep(self) -> None:
        """Tell how much was withheld; call it now and then."""
        self._words.sweep(self.reactor.clock())
        for node in [*self._closing]:
            self._find_closing(node)

    def _find_closing(self, node: NodeId) -> int:
        left = [transport for transport in self._closing.pop(node, ()) if not transport.closed]
        if left:
            self._closing[node] = left
        return len(left)

    def hold(self, node: NodeId) -> int:
        """How many connections a node's trunks hold, from the first moment of the first to the close of the last."""
        return sum(trunk.node == node for trunk in self._all) + self._find_closing(node)

    def count(self, node: NodeId) -> int:
        """How many trunks of a node take new streams."""
        return sum(not trunk.carrier.leaving for trunk in self._by_node.get(node, ()))
