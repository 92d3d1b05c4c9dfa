"""A network of the simulation's own: control links and trunks between one server and its nodes, in memory.

The logic at both ends is the real one: ``link.presence`` and ``link.agentlink`` at the server, ``link.dialer`` on the
node. Time is trio's, chance is what is handed in; there are no threads, no sockets and no TLS. One network outlives
every server and agent of a world::

    network = MemoryNetwork(nursery, random.Random(f"{seed}:network"))

    # a server: cancelled, its process is dead, and every connection of it ends
    trunks = MemoryTrunks(network, opened=scheduler.stir)
    presence = Presence(agents, trunks=trunks, lease_seconds=15.0, pace=Pace(), make_token=tokens.__next__)
    await server.start(network.serve, presence, trunks)       # has presence.watch_leases and tell_silent in it
    FleetGateway(..., locate=locate_by_trunk, reaches=trunks.reaches)

    # an agent: cancelled, it is dead, and its engines are not its own
    dialer = Dialer(network.server_for(node, find_engine), node=node, trunks=1, version="0",
                    randomness=random.Random(f"{seed}:{node}"), run=f"{node}-{start}")
    await agent.start(dialer.serve)                            # and serve_node(dialer, ...) beside it

    # faults
    network.cut(node); network.heal(node); network.reset(node)
    network.slow(node, seconds); network.lose(node, chance)

    # a request: what the engine's ``answer`` gives, or a Failure as the door has it; OSError as of ``Trunks.open``
    await trunks.ask(ShardAddress(node=node, shard=shard, epoch=epoch), request)

It is as TCP is: what is sent arrives in order or not at all, and a byte that is lost on the way comes later. A
partition holds everything back; the node's kernel gives its connections up after ``LOST_SECONDS`` of it, and the
server's end goes on until it has asked in vain, or hears of it.
"""

from __future__ import annotations

import errno
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from llmgw.core.node import NodeId
from llmgw.core.replica import ShardAddress, ShardId
from llmgw.door.steps import Failure
from llmgw.errors import LinkLost
from llmgw.link.dial import DialFailed
from llmgw.link.handshake import Unwelcome
from llmgw.link.presence import Presence

# As LOST_NETWORK of link/dial.py has the kernel do it.
LOST_SECONDS = 15.0
CONNECT_SECONDS = 10.0
DELAY_SECONDS = (0.001, 0.02)
# Of a byte that was lost on the way: when it is sent again, doubling, and when the connection is given up for it.
AGAIN_SECONDS = 0.2
PATIENCE_SECONDS = 10.0
# As control.py has them: what may wait to be written; and what waits to be read before the writer has to.
QUEUE_MESSAGES = 1024
INBOX_MESSAGES = 4
RESET = "the connection broke: [Errno 104] Connection reset by peer"
WORDS = {
    "no_shard": "the node does not run this shard",
    "wrong_epoch": "the node runs another try of this shard",
}


class Path:
    """The way between the server and one node."""

    def __init__(self, rng: random.Random) -> None:
        self.slow_seconds = 0.0
        self.loss = 0.0
        # Counts partitions: odd while there is one.
        self.cuts = 0
        # The node's ends of its connections, in the order of their dials.
        self.lines: dict[MemoryLine, None] = {}
        self.trunks: dict[MemoryTrunk, None] = {}
        self._rng = rng
        self._healed = trio.Event()

    @property
    def is_cut(self) -> bool:
        return self.cuts % 2 == 1

    def cut(self) -> None:
        self.cuts += 1

    def heal(self) -> None:
        self.cuts += 1
        self._healed.set()
        self._healed = trio.Event()

    def draw(self) -> float:
        """How long a message takes now."""
        seconds = self._rng.uniform(*DELAY_SECONDS) + self.slow_seconds
        again = AGAIN_SECONDS
        while self.loss and again < PATIENCE_SECONDS and self._rng.random() < self.loss:
            seconds += again
            again *= 2
        return seconds

    async def wait_whole(self) -> None:
        while self.is_cut:
            await self._healed.wait()

    async def travel(self) -> None:
        """As long as a message does."""
        await trio.sleep(self.draw())
        await self.wait_whole()

    def drop(self, why: str) -> None:
        """The node's kernel gives up all that it has."""
        for line in [*self.lines]:
            line.lose(why)
        for trunk in [*self.trunks]:
            trunk.end(why)


@dataclass(frozen=True, slots=True)
class Frame:
    """What travels on a link: ``data``, ``ping``, ``pong``, or ``end`` with the reason."""

    kind: str
    data: bytes = b""
    number: int = 0
    reason: str = ""


class MemoryLine:
    """One end of a control link: a ``link.line.Line``."""

    def __init__(self, path: Path, nursery: trio.Nursery, *, peer: str) -> None:
        self.peer = peer
        self.other: MemoryLine
        self.heard_at = trio.current_time()
        self.lost: str | None = None
        # Where what is done here now and then runs.
        self.nursery = nursery
        self._path = path
        self._inbox: deque[bytes] = deque()
        self._changed = trio.Event()
        self._on_way: deque[tuple[float, Frame]] = deque()
        self._put = trio.Event()
        self._due = 0.0
        self._pings = itertools.count(1)
        self._pong = 0
        self._asked = False
        self._carrying = trio.CancelScope()

    # -- Line

    def send(self, data: bytes) -> None:
        if self.lost is None:
            if len(self._on_way) >= QUEUE_MESSAGES:
                self._end(f"{self.peer} reads too slowly: {len(self._on_way)} messages wait for it")
            else:
                self._dispatch(Frame("data", data))

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._inbox:
            if self.lost is not None:
                raise LinkLost(self.lost)
            await self._changed.wait()
        data = self._inbox.popleft()
        self._tell_change()
        return data

    async def is_alive(self, seconds: float) -> bool:
        if self.lost is not None:
            return False
        asked, number = trio.current_time(), next(self._pings)
        self._dispatch(Frame("ping", number=number))
        with trio.move_on_after(seconds):
            while self._pong < number:
                if self.lost is not None:
                    return False
                await self._changed.wait()
        return self._pong >= number or self.heard_at > asked

    def look(self, *, ping_seconds: float, pong_seconds: float) -> None:
        if trio.current_time() - self.heard_at >= ping_seconds and not self._asked and self.lost is None:
            self._asked = True
            self.nursery.start_soon(self._ask, pong_seconds)

    async def _ask(self, pong_seconds: float) -> None:
        if not await self.is_alive(pong_seconds):
            self.lose(f"nothing was heard of {self.peer} for {trio.current_time() - self.heard_at:.0f} s")
        self._asked = False

    async def close(self, reason: str) -> None:
        self._end(reason)
        await trio.lowlevel.checkpoint()

    def give_up(self) -> None:
        self._end("the peer closed the connection")

    # -- what happens to it

    def lose(self, why: str) -> None:
        """It is over at this end; the other hears of it when it speaks, if ever."""
        if self.lost is None:
            self.lost = why
            self._path.lines.pop(self, None)
            self._carrying.cancel()
            self._tell_change()

    def _end(self, reason: str) -> None:
        """Over, in good order: what was sent before arrives before."""
        if self.lost is None:
            self.lost = reason
            self._path.lines.pop(self, None)
            self._dispatch(Frame("end", reason=reason))
            self._tell_change()

    def _dispatch(self, frame: Frame) -> None:
        self._due = max(self._due, trio.current_time() + self._path.draw())
        self._on_way.append((self._due, frame))
        self._put.set()

    async def carry(self) -> None:
        """Bring what is sent here to the other end, until that is over."""
        with self._carrying:
            while True:
                while not self._on_way:
                    self._put = trio.Event()
                    await self._put.wait()
                due, frame = self._on_way[0]
                if due > trio.current_time():
                    await trio.sleep_until(due)
                await self._path.wait_whole()
                await self.other.wait_room()
                self._on_way.popleft()
                if self.other.lost is not None and frame.kind != "end":
                    # nobody is there any more, and the kernel there says so
                    return self.lose(RESET)
                self.other.arrive(frame)
                if frame.kind == "end":
                    return

    async def wait_room(self) -> None:
        while len(self._inbox) >= INBOX_MESSAGES and self.lost is None:
            await self._changed.wait()

    def arrive(self, frame: Frame) -> None:
        """Something has come from the other end."""
        self.heard_at = trio.current_time()
        match frame.kind:
            case "data":
                self._inbox.append(frame.data)
            case "ping" if self.lost is None:
                self._dispatch(Frame("pong", number=frame.number))
            case "pong":
                self._pong = max(self._pong, frame.number)
            case "end":
                self.lose(frame.reason)
        self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class Engine(Protocol):
    """What answers requests on a node. Raises EngineClosed when it ends before it has; being cancelled, it stops."""

    async def answer(self, request: Any) -> Any: ...


class EngineClosed(Exception):  # noqa: N818 - named by what it is, like ours
    """An engine has closed its connections: how, in words."""


# The engine of a shard's try, or why there is none (``no_shard``, ``wrong_epoch``).
FindEngine = Callable[[ShardId, int], Engine | str]


class MemoryTrunk:
    """One trunk, seen from both ends."""

    def __init__(
        self, path: Path, find_engine: FindEngine, *, leave: Callable[[], None], over: Callable[[str], None]
    ) -> None:
        self.path = path
        self.find_engine = find_engine
        self.leaving = False
        self.why: str | None = None
        self.streams: dict[trio.CancelScope, None] = {}
        self._leave = leave
        self._over = over

    @property
    def open_to_streams(self) -> bool:
        return not self.leaving and self.why is None

    def goaway(self, reason: str) -> None:
        """Said by either end: no new streams, and over with the last."""
        if self.open_to_streams:
            self.leaving = True
            self._leave()
            self.end_with_last(reason)

    def end_with_last(self, reason: str) -> None:
        if self.leaving and not self.streams:
            self.end(reason)

    def abort(self, reason: str) -> None:
        self.end(reason)

    def end(self, reason: str) -> None:
        """Over now, with all streams."""
        if self.why is None:
            self.why = reason
            self.path.trunks.pop(self, None)
            for scope in self.streams:
                scope.cancel()
            self._over(reason)


class MemoryTrunks:
    """All trunks of all nodes, as one server has them: what ``Presence`` needs of trunks, and requests."""

    def __init__(self, network: MemoryNetwork, *, opened: Callable[[], None] = lambda: None) -> None:
        """``opened`` is called when there is one more."""
        self._network = network
        self._opened = opened
        self._by_node: dict[NodeId, list[MemoryTrunk]] = {}

    def take_in(self, node: NodeId, trunk: MemoryTrunk) -> None:
        self._by_node.setdefault(node, []).append(trunk)
        self._opened()

    def _living(self, node: NodeId) -> list[MemoryTrunk]:
        living = [trunk for trunk in self._by_node.get(node, ()) if trunk.why is None]
        self._by_node[node] = living
        return living

    def count(self, node: NodeId) -> int:
        return sum(trunk.open_to_streams for trunk in self._living(node))

    def reaches(self, node: NodeId) -> bool:
        """Whether a request could be sent there now, as far as the server knows."""
        return self.count(node) > 0

    def close_node(self, node: NodeId, reason: str) -> None:
        for trunk in self._living(node):
            trunk.end(reason)

    def goaway(self) -> None:
        for node in [*self._by_node]:
            for trunk in self._living(node):
                trunk.goaway("the server is stopping")

    def close_all(self, reason: str) -> None:
        for node in [*self._by_node]:
            self.close_node(node, reason)

    async def ask(self, address: ShardAddress, request: Any) -> Any:
        """What the engine of this shard answers, or a Failure. OSError when its node has no trunk."""
        trunks = [trunk for trunk in self._living(address.node) if trunk.open_to_streams]
        if not trunks:
            raise OSError(errno.EHOSTUNREACH, f"node {address.node} has no trunk")
        trunk = min(trunks, key=lambda trunk: len(trunk.streams))
        scope, stands = trio.CancelScope(), False
        trunk.streams[scope] = None
        try:
            with scope:
                await trunk.path.travel()
                engine = trunk.find_engine(address.shard, address.epoch)
                stands = not isinstance(engine, str)
                answer = Failure(WORDS[engine], False) if isinstance(engine, str) else await _ask(engine, request)
                await trunk.path.travel()
                return answer
        finally:
            del trunk.streams[scope]
            trunk.end_with_last("its last stream has ended")
        return Failure(f"the connection to {address} was lost", stands)


async def _ask(engine: Engine, request: Any) -> Any:
    try:
        return await engine.answer(request)
    except EngineClosed as gone:
        return Failure(str(gone), sent=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who dials, as a certificate would prove it."""

    node: NodeId
    serial: int
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The server that is there now."""

    nursery: trio.Nursery
    presence: Presence
    trunks: MemoryTrunks


class MemoryNetwork:
    """All ways between the server and its nodes; ``nursery`` lasts as long as the world."""

    def __init__(self, nursery: trio.Nursery, rng: random.Random) -> None:
        self._nursery = nursery
        self._rng = rng
        self._paths: dict[NodeId, Path] = {}
        self.listening: Listening | None = None
        # Why agents were not let in, in order.
        self.turned: list[str] = []

    # -- faults

    def path(self, node: NodeId) -> Path:
        """The way to a node, which it keeps."""
        if node not in self._paths:
            self._paths[node] = Path(self._rng)
        return self._paths[node]

    def cut(self, node: NodeId) -> None:
        """Nothing gets through, from now on until ``heal``."""
        path = self.path(node)
        if not path.is_cut:
            path.cut()
            self._nursery.start_soon(self._give_up, path, path.cuts)

    def heal(self, node: NodeId) -> None:
        path = self.path(node)
        if path.is_cut:
            path.heal()

    async def _give_up(self, path: Path, cuts: int) -> None:
        await trio.sleep(LOST_SECONDS)
        if path.cuts == cuts:
            path.drop("the connection broke: [Errno 110] Connection timed out")

    def reset(self, node: NodeId) -> None:
        """All connections of a node break, at both ends at once; what was on its way is gone."""
        path = self.path(node)
        others = [line.other for line in path.lines]
        path.drop(RESET)
        for line in others:
            line.lose(RESET)

    def slow(self, node: NodeId, seconds: float) -> None:
        """Each message takes so much longer from now on."""
        self.path(node).slow_seconds = seconds

    def lose(self, node: NodeId, chance: float) -> None:
        """Each message is lost on its way with this chance from now on, each time it is sent."""
        self.path(node).loss = chance

    # -- the two ends

    async def serve(
        self, presence: Presence, trunks: MemoryTrunks, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """A server, until it is cancelled: then its process is dead."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(presence.watch_leases)
                nursery.start_soon(presence.tell_silent)
                self.listening = Listening(nursery=nursery, presence=presence, trunks=trunks)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.listening = None
            trunks.close_all("the server has ended")

    def server_for(self, node: NodeId, find_engine: FindEngine = lambda shard, epoch: "no_shard") -> MemoryServer:
        """The server, as this node's agent dials it."""
        return MemoryServer(self, node, find_engine)

    async def connect(self, node: NodeId) -> Listening:
        """The server that answers. Raises DialFailed."""
        path = self.path(node)
        with trio.move_on_after(CONNECT_SECONDS):
            await path.travel()
            if self.listening is None:
                raise DialFailed("the server refuses connections")
            return self.listening
        raise DialFailed(f"the server does not answer within {CONNECT_SECONDS:g} s")

    def pair(self, node: NodeId, here: trio.Nursery, listening: Listening) -> MemoryLine:
        """A new link: the node's end of it. The other is given to the server."""
        path = self.path(node)
        mine, theirs = MemoryLine(path, here, peer="the server"), MemoryLine(path, here, peer=f"node {node}")
        mine.other, theirs.other = theirs, mine
        path.lines[mine] = None
        for line in (mine, theirs):
            self._nursery.start_soon(line.carry)
        listening.nursery.start_soon(self._serve_link, theirs, Caller(node=node, serial=1, peer=node), listening)
        return mine

    async def _serve_link(self, line: MemoryLine, caller: Caller, listening: Listening) -> None:
        async with trio.open_nursery() as nursery:
            line.nursery = nursery
            try:
                await listening.presence.serve_link(line, caller)
            except Unwelcome as no:
                self.turned.append(no.message)
            finally:
                line.give_up()
            nursery.cancel_scope.cancel()


class MemoryServer:
    """A ``link.dialer.Server``."""

    name = "the server of this world"

    def __init__(self, network: MemoryNetwork, node: NodeId, find_engine: FindEngine) -> None:
        self._network = network
        self._node = node
        self._find_engine = find_engine

    async def open_link(self, nursery: trio.Nursery) -> MemoryLine:
        listening = await self._network.connect(self._node)
        line = self._network.pair(self._node, nursery, listening)
        nursery.start_soon(_give_up_at_end, line)
        return line

    async def open_trunk(self, token: str, *, leave: Callable[[], None], over: Callable[[str], None]) -> MemoryTrunk:
        listening = await self._network.connect(self._node)
        path = self._network.path(self._node)
        trunk = MemoryTrunk(path, self._find_engine, leave=leave, over=over)
        problem = listening.presence.refuse_token(self._node, token)
        if problem is not None:
            trunk.end(problem)
        else:
            path.trunks[trunk] = None
            listening.trunks.take_in(self._node, trunk)
        return trunk

    def explain(self, errors: tuple[Exception, ...]) -> Exception:
        return errors[0]


async def _give_up_at_end(line: MemoryLine) -> None:
    """The agent's process is over: its kernel closes what it had."""
    try:
        await trio.sleep_forever()
    finally:
        line.give_up()
