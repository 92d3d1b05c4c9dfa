"""The agent's side against a server of the test's own, over TLS on loopback."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock
from wsproto.utilities import LocalProtocolError

from llmgw.config.agent import AgentConfig, NodeTls, ServerAddress
from llmgw.core.effects import Desire
from llmgw.core.events import NodeLost, NodeRegistered, NodeReported, ShardChanged, WeightsReported
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import ReplicaId, ShardAddress, ShardId, ShardReport, ShardSpec, ShardState
from llmgw.core.weights import NodeWeights, Pull, WeightsOrder
from llmgw.errors import LinkLost, UsageError
from llmgw.link.control import NODE_HEADER, Control, Tap, read_upgrade
from llmgw.link.dial import Pace, TlsServer
from llmgw.link.dialer import Complaints, Dialer
from llmgw.link.tls import CONTROL_ALPN, hand_over, server_context
from llmgw.link.trunk import Trunks
from llmgw.reactor.loop import Reactor
from llmgw.wire import (
    PROTOCOL,
    AgentMessage,
    Desired,
    DesiredDelta,
    Goaway,
    Hello,
    NodeWord,
    OrderWord,
    Refused,
    Register,
    Resync,
    ServerMessage,
    ShardWord,
    WeightsWord,
    Welcome,
    decode_from_agent,
    encode,
)

NODE = NodeId("gpu-1")
HAVE = Node(id=NODE, cores=4, cpu_flags=frozenset({"avx2"}), memory_gb=8.0, memory_available_gb=7.0)
# A hang is noticed by the test, not by whoever waits for it.
PATIENCE_SECONDS = 60
QUICK = Pace(first_wait=0.01, most_wait=0.05)


def a_spec(number: int = 1, *, node: str = NODE) -> ShardSpec:
    profile = Profile(name="cpu", engine="mill")
    return ShardSpec(
        id=ShardId(f"shd-tiny-{number}-0"),
        replica=ReplicaId(f"rep-tiny-{number}"),
        epoch=1,
        node=NodeId(node),
        model=Model(name=ModelName("tiny"), source="/models/tiny", profiles=(profile,)),
        profile=profile,
    )


def a_report(number: int = 1, state: ShardState = ShardState.READY) -> ShardReport:
    spec = a_spec(number)
    return ShardReport(shard=spec.id, replica=spec.replica, epoch=spec.epoch, state=state)


def a_desire(revision: int, *numbers: int) -> Desire:
    return Desire(node=NODE, revision=revision, shards=tuple(map(a_spec, numbers)))


def no_shard(shard: ShardId, epoch: int) -> str:
    return "no_shard"


async def wait_for(true: Callable[[], object]) -> None:
    """What it waits for happens in the reactor or in the log, which set no events."""
    while not true():  # noqa: ASYNC110
        await trio.sleep(0.01)


class Peer:
    """The server's end of one link."""

    def __init__(self, control: Control, hello: Hello, claimed: str, below: trio.abc.Stream) -> None:
        self.control = control
        self.below = below
        self.hello = hello
        self.claimed = claimed

    def say(self, message: ServerMessage) -> None:
        self.control.send(encode(message))

    async def hear(self) -> AgentMessage:
        return decode_from_agent(await self.control.receive(), PROTOCOL)


class Head:
    """A server: welcomes whoever says hello, unless ``answers`` has something else to say first."""

    def __init__(self, files: Any, reactor: Reactor) -> None:
        self.files = files
        self.trunks = Trunks(reactor)
        self.reactor = reactor
        self.answers: list[ServerMessage | bytes | None] = []
        self.rejection: bytes | None = None
        self.refused_tokens: set[str] = set()
        self.connections = 0
        self.peers_in, self._peers = trio.open_memory_channel[Peer](100)
        # Until it listens on it, the port refuses.
        self.socket = trio.socket.socket()

    async def next_peer(self) -> Peer:
        return await self._peers.receive()

    async def wait_trunks(self, count: int) -> None:
        await wait_for(lambda: self.trunks.count(NODE) == count)

    async def serve(self) -> None:
        self.socket.listen(50)
        await trio.serve_listeners(self._guard, [trio.SocketListener(self.socket)])

    async def _guard(self, tcp: trio.SocketStream) -> None:
        self.connections += 1
        try:
            await self._take(tcp)
        except* (LinkLost, trio.BrokenResourceError):
            pass
        finally:
            tcp.socket.close()

    async def _take(self, tcp: trio.SocketStream) -> None:
        stream = trio.SSLStream(tcp, server_context(self.files), server_side=True, https_compatible=True)
        await stream.do_handshake()
        if stream.selected_alpn_protocol() != CONTROL_ALPN:
            self.trunks.admit(
                NODE,
                lambda owner: hand_over(self.reactor, stream, owner),
                refuse=lambda token: "void" if token in self.refused_tokens else None,
            )
            return
        tap = Tap(stream)
        async with trio.open_nursery() as nursery:
            request = await read_upgrade(nursery, tap)
            if self.rejection is not None:
                await request.reject(403, body=self.rejection)
                nursery.cancel_scope.cancel()
                return
            claimed = dict(request.headers)[NODE_HEADER.encode()].decode()
            control = Control(await request.accept(), tap, nursery, peer="the agent")
            hello = decode_from_agent(await control.receive(), PROTOCOL)
            assert isinstance(hello, Hello)
            if self.answers:
                answer = self.answers.pop(0)
                if answer is not None:
                    control.send(answer if isinstance(answer, bytes) else encode(answer))
            else:
                token = f"token-{hello.dial}"
                control.send(encode(Welcome(protocol=PROTOCOL, session=token, lease_seconds=15.0)))
                await self.peers_in.send(Peer(control, hello, claimed, stream))
            await tap.gone.wait()


class Rig:
    """A head and a dialer."""

    def __init__(self, head: Head, dialer: Dialer, nursery: trio.Nursery) -> None:
        self.head = head
        self.dialer = dialer
        self.nursery = nursery

    async def register(self) -> Peer:
        """The server's end, once the node has registered over it."""
        peer = await self.head.next_peer()
        self.nursery.start_soon(self.dialer.report, NodeRegistered(node=HAVE, running=()))
        assert isinstance(await peer.hear(), Register)
        return peer

    async def desired_when(self, peer: Peer, message: ServerMessage, after: int = -1) -> Desire:
        """What the tree is given once the server has said ``message``."""
        peer.say(message)
        return await self.dialer.desired(after)


MakeRig = Callable[..., Any]


@pytest.fixture
def rig(authority: Any) -> MakeRig:
    @asynccontextmanager
    async def make(
        *,
        find_port: Callable[[ShardId, int], int | str] = no_shard,
        files: Any = None,
        trunks: int = 0,
        pace: Pace = QUICK,
        listens: bool = True,
    ) -> AsyncIterator[Rig]:
        mine = files or authority.issue("gpu-1")
        reactor = Reactor()
        head = Head(authority.issue("server", hosts=("127.0.0.1",)), reactor)
        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as outer:
                await outer.start(reactor.serve)
                async with trio.open_nursery() as nursery:
                    await head.socket.bind(("127.0.0.1", 0))
                    if listens:
                        nursery.start_soon(head.serve)
                    config = AgentConfig(
                        node=NODE,
                        server=ServerAddress(host="127.0.0.1", port=head.socket.getsockname()[1]),
                        tls=NodeTls(ca=mine.ca, cert=mine.cert, key=mine.key),
                        trunks=trunks,
                    )
                    dialer = Dialer(
                        TlsServer(config, reactor=reactor, find_port=find_port, pace=pace),
                        node=NODE,
                        trunks=trunks,
                        version="9.9",
                        pace=pace,
                        randomness=random.Random(7),
                    )
                    await nursery.start(dialer.serve)
                    yield Rig(head, dialer, nursery)
                    nursery.cancel_scope.cancel()
                head.socket.close()
                head.trunks.close_node(NODE, "the test ends")
                outer.cancel_scope.cancel()

    return make


# -- the link


async def test_an_agent_says_who_it_is(rig: MakeRig) -> None:
    async with rig() as bench:
        peer = await bench.head.next_peer()
        assert peer.claimed == NODE
        hello = peer.hello
        assert (hello.protocol, hello.node, hello.dial, hello.version) == (PROTOCOL, NODE, 1, "9.9")


async def test_a_registration_waits_for_the_link_and_tells_what_runs(rig: MakeRig) -> None:
    async with rig() as bench:
        running = ((a_spec(), a_report()),)
        await bench.dialer.report(NodeRegistered(node=HAVE, running=running))
        peer = await bench.head.next_peer()
        assert await peer.hear() == Register(node=HAVE, running=running)


async def test_words_arrive_in_order(rig: MakeRig) -> None:
    async with rig() as bench:
        peer = await bench.register()
        await bench.dialer.report(ShardChanged(node=NODE, report=a_report(1, ShardState.LOADING)))
        await bench.dialer.report(NodeReported(node=HAVE))
        await bench.dialer.report(ShardChanged(node=NODE, report=a_report(1)))
        assert [await peer.hear() for _ in range(3)] == [
            ShardWord(report=a_report(1, ShardState.LOADING)),
            NodeWord(node=HAVE, applied=None),
            ShardWord(report=a_report(1)),
        ]


async def test_what_is_said_of_weights_goes_both_ways(rig: MakeRig) -> None:
    async with rig() as bench:
        peer = await bench.register()
        weights = NodeWeights(seen=("/m.gguf",))
        await bench.dialer.report(WeightsReported(node=NODE, weights=weights))
        assert await peer.hear() == WeightsWord(weights=weights)
        first, second = (WeightsOrder(pulls=(Pull(number=number, source="hf:o/r/f.gguf"),)) for number in (1, 2))
        peer.say(OrderWord(order=first))
        assert await bench.dialer.order(None) == first
        async with trio.open_nursery() as nursery:
            heard: list[WeightsOrder] = []

            async def wait_newer() -> None:
                heard.append(await bench.dialer.order(first))

            nursery.start_soon(wait_newer)
            await trio.testing.wait_all_tasks_blocked()
            assert not heard
            # an order holds over the link's loss, until there is another one
            await peer.below.aclose()
            again = await bench.register()
            again.say(OrderWord(order=second))
        assert heard == [second]


async def test_a_word_without_a_link_is_not_taken(authority: Any) -> None:
    files = authority.issue("gpu-1")
    config = AgentConfig(
        node=NODE,
        server=ServerAddress(host="127.0.0.1", port=1),
        tls=NodeTls(ca=files.ca, cert=files.cert, key=files.key),
    )
    reactor = Reactor()
    dialer = Dialer(TlsServer(config, reactor=reactor, find_port=no_shard), node=NODE, trunks=0, version="1")
    with pytest.raises(LinkLost, match="not connected yet"):
        await dialer.report(NodeReported(node=HAVE))
    reactor.close()


async def test_a_report_that_cant_be_sent_is_told_once_and_costs_no_link(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig() as bench:
        peer = await bench.register()
        for _ in range(3):
            await bench.dialer.report(NodeReported(node=replace(HAVE, memory_foreign_gb=-1.0)))
        await bench.dialer.report(NodeReported(node=HAVE))
        assert await peer.hear() == NodeWord(node=HAVE, applied=None)
    told = [message for message in caplog.messages if "the server can't be told" in message]
    assert len(told) == 1
    assert "$.node.memory_foreign_gb" in told[0]


async def test_a_node_that_cant_be_registered_is_told_and_may_try_again(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig() as bench:
        peer = await bench.head.next_peer()
        with pytest.raises(LinkLost, match=r"can't be registered: Register: .*\$\.node\.clock"):
            await bench.dialer.report(NodeRegistered(node=replace(HAVE, clock=-1.0), running=()))
        assert "$.node.clock" in caplog.text
        await bench.dialer.report(NodeRegistered(node=HAVE, running=()))
        assert await peer.hear() == Register(node=HAVE, running=())


async def test_what_no_agent_says_is_a_fault(rig: MakeRig) -> None:
    async with rig() as bench:
        await bench.register()
        with pytest.raises(TypeError, match="NodeLost"):
            await bench.dialer.report(NodeLost(node=NODE))


# -- what is desired


async def test_changes_of_the_desired_set_are_put_together(rig: MakeRig) -> None:
    async with rig() as bench:
        peer = await bench.register()
        first = await bench.desired_when(peer, Desired(revision=4, shards=(a_spec(1), a_spec(2))))
        assert first == a_desire(4, 1, 2)
        change = DesiredDelta(revision=7, base=4, put=(a_spec(3),), drop=(a_spec(1).id,))
        assert await bench.desired_when(peer, change, after=4) == a_desire(7, 2, 3)


async def test_a_change_that_does_not_fit_asks_for_the_whole_once(rig: MakeRig) -> None:
    async with rig() as bench:
        peer = await bench.register()
        peer.say(DesiredDelta(revision=3, base=2, put=(), drop=()))
        peer.say(DesiredDelta(revision=4, base=3, put=(), drop=()))
        assert await peer.hear() == Resync()
        assert await bench.desired_when(peer, Desired(revision=4, shards=(a_spec(1),))) == a_desire(4, 1)
        # asked once: the next word is another
        await bench.dialer.report(NodeReported(node=HAVE))
        assert isinstance(await peer.hear(), NodeWord)
        peer.say(DesiredDelta(revision=9, base=8, put=(), drop=()))
        assert await peer.hear() == Resync()


async def test_what_was_applied_is_told_if_this_server_gave_it(rig: MakeRig) -> None:
    async with rig() as bench:
        peer = await bench.register()
        await bench.dialer.report(NodeReported(node=HAVE, applied=4))
        await bench.desired_when(peer, Desired(revision=4, shards=()))
        await bench.dialer.report(NodeReported(node=HAVE, applied=4))
        await bench.dialer.report(NodeReported(node=HAVE, applied=3))
        assert [(await peer.hear()).applied for _ in range(3)] == [None, 4, None]


async def test_a_server_that_counts_from_anew_is_followed(rig: MakeRig) -> None:
    async with rig() as bench:
        peer = await bench.register()
        await bench.desired_when(peer, Desired(revision=900, shards=(a_spec(1),)))
        await peer.control.close("the server restarts")
        peer = await bench.register()
        # the tree may ask by the old number still
        assert await bench.desired_when(peer, Desired(revision=1, shards=(a_spec(2),)), after=900) == a_desire(1, 2)


@pytest.mark.parametrize(
    "message",
    [
        Desired(revision=1, shards=(a_spec(node="gpu-2"),)),
        DesiredDelta(revision=1, base=0, put=(a_spec(node="gpu-2"),), drop=()),
    ],
)
async def test_a_shard_of_another_node_is_not_taken(
    rig: MakeRig, caplog: pytest.LogCaptureFixture, message: ServerMessage
) -> None:
    async with rig() as bench:
        peer = await bench.register()
        peer.say(message)
        await bench.register()
    assert "shard shd-tiny-1-0 of node gpu-2" in caplog.text


# -- losses


async def test_a_lost_link_is_heard_by_all_who_wait_on_it(rig: MakeRig) -> None:
    async with rig() as bench:
        peer = await bench.register()
        heard: list[str] = []

        async def listen() -> None:
            with pytest.raises(LinkLost, match="the server stops"):
                await bench.dialer.desired(-1)
            heard.append("desired")

        async def watch() -> None:
            await bench.dialer.wait_lost()
            heard.append("lost")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            nursery.start_soon(watch)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await peer.control.close("the server stops")
        assert sorted(heard) == ["desired", "lost"]


async def test_a_lost_link_is_dialled_again_by_the_same_run(rig: MakeRig) -> None:
    async with rig() as bench:
        hellos = []
        for _ in range(4):
            peer = await bench.head.next_peer()
            hellos.append(peer.hello)
            await peer.control.close("enough")
        assert [hello.dial for hello in hellos] == [1, 2, 3, 4]
        assert len({hello.run for hello in hellos}) == 1


async def test_two_agents_are_two_runs(rig: MakeRig) -> None:
    runs = set()
    for _ in range(2):
        async with rig() as bench:
            runs.add((await bench.head.next_peer()).hello.run)
    assert len(runs) == 2


async def test_a_server_that_was_not_there_is_found_when_it_is(rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    async with rig(listens=False) as bench:
        await wait_for(lambda: "refuses connections" in caplog.text)
        bench.nursery.start_soon(bench.head.serve)
        await bench.register()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            Refused(code="connected", reason="node gpu-1 is already connected from 10.0.0.7:4242"),
            "(connected): node gpu-1 is",
        ),
        (Refused(code="protocol", reason="\x1b[2J"), "(protocol): \\x1b[2J"),
        (Welcome(protocol=PROTOCOL + 1, session="t", lease_seconds=1.0), f"speaks protocol {PROTOCOL + 1}, this agent"),
        (Goaway(reason="x"), "said Goaway where a welcome was due"),
        (b"\xff", "a message that can't be read"),
    ],
    ids=["connected", "unsafe words", "protocol", "another word", "garbage"],
)
async def test_what_is_no_welcome_is_told_and_tried_again(
    rig: MakeRig, caplog: pytest.LogCaptureFixture, answer: Any, words: str
) -> None:
    async with rig(pace=replace(QUICK, first_wait=0.05)) as bench:
        bench.head.answers += [answer] * 3
        await bench.register()
    told = [record.message for record in caplog.records if words in record.message]
    assert len(told) == 1
    assert told[0].startswith("no link to the server: ")
    assert told[0].isprintable()


@pytest.mark.slow
async def test_a_server_that_gives_no_welcome_is_left(rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    async with rig(pace=replace(QUICK, welcome=0.3)) as bench:
        bench.head.answers.append(None)
        await bench.register()
    assert "gave no welcome within 0.3 s" in caplog.text


async def test_a_rejected_upgrade_is_told_in_the_servers_words(rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as bench:
        peer = await bench.head.next_peer()
        bench.head.rejection = b'{"error": {"message": "the certificate 4f is revoked"}}'
        await peer.control.close("enough")
        await wait_for(lambda: "is revoked" in caplog.text)
        bench.head.rejection = None
        await bench.register()
    assert "refuses this node (status 403): the certificate 4f is revoked" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("data", [b"\xff\xfe", b'{"type":"register"}', b'{"type":"desired","revision":-1,"shards":[]}'])
async def test_garbage_from_the_server_ends_the_link_and_not_the_agent(
    rig: MakeRig, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    async with rig() as bench:
        peer = await bench.register()
        peer.control.send(data)
        await bench.register()
    assert "a message that can't be read" in caplog.text


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            Refused(code="revoked", reason="the certificate is revoked"),
            "ended the link (revoked): the certificate is revoked",
        ),
        (Welcome(protocol=PROTOCOL, session="t", lease_seconds=1.0), "said welcome twice"),
    ],
)
async def test_a_word_that_ends_the_link_is_told(
    rig: MakeRig, caplog: pytest.LogCaptureFixture, message: ServerMessage, words: str
) -> None:
    async with rig() as bench:
        peer = await bench.register()
        peer.say(message)
        await bench.register()
    assert words in caplog.text


async def test_a_link_is_made_anew_before_the_old_one_ends(rig: MakeRig) -> None:
    async with rig() as bench:
        old = await bench.register()
        old.say(Goaway(reason="the certificate was renewed"))
        new = await bench.head.next_peer()
        assert (new.hello.dial, new.hello.run) == (old.hello.dial + 1, old.hello.run)
        with pytest.raises(LinkLost, match="a later link has taken its place"):
            await old.hear()
        with pytest.raises(LinkLost, match="registers again"):
            await bench.dialer.report(NodeReported(node=HAVE))
        await bench.dialer.report(NodeRegistered(node=HAVE))
        assert isinstance(await new.hear(), Register)
        await bench.dialer.report(NodeReported(node=HAVE))
        assert isinstance(await new.hear(), NodeWord)


async def test_a_server_that_stops_keeps_its_link_until_it_ends_it(rig: MakeRig) -> None:
    async with rig() as bench:
        old = await bench.register()
        bench.head.answers += [Refused(code="stopping", reason="the server stops")] * 3
        old.say(Goaway(reason="the server stops"))
        while bench.head.answers:
            await trio.sleep(0.01)
            await bench.dialer.report(NodeReported(node=HAVE))
            assert isinstance(await old.hear(), NodeWord)


# -- certificates


async def test_a_certificate_that_would_be_refused_is_not_shown_to_the_server(
    rig: MakeRig, authority: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(files=authority.issue("gpu-2"), trunks=2) as bench:
        await wait_for(lambda: "gpu-2" in caplog.text)
        await trio.sleep(0.2)
        assert bench.head.connections == 0
    told = [
        record for record in caplog.records if "was issued to gpu-2, but this node is called gpu-1" in record.message
    ]
    assert len(told) == 1


async def test_a_certificate_that_was_mended_is_used_at_the_next_dial(
    rig: MakeRig, authority: Any, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue("gpu-2")
    async with rig(files=files) as bench:
        await wait_for(lambda: "gpu-2" in caplog.text)
        authority.issue("gpu-1", into=files)
        await bench.register()


def test_files_that_can_not_be_used_stop_the_agent_at_its_start(authority: Any) -> None:
    files = authority.issue("gpu-1")
    files.key.write_text("nonsense")
    config = AgentConfig(
        node=NODE,
        server=ServerAddress(host="127.0.0.1", port=1),
        tls=NodeTls(ca=files.ca, cert=files.cert, key=files.key),
    )
    reactor = Reactor()
    with pytest.raises(UsageError, match="no certificate and its key"):
        TlsServer(config, reactor=reactor, find_port=no_shard)
    reactor.close()


def test_what_ended_a_link_is_what_came_first_and_no_pong_that_was_too_late(authority: Any) -> None:
    files = authority.issue("gpu-1")
    config = AgentConfig(
        node=NODE,
        server=ServerAddress(host="127.0.0.1", port=1),
        tls=NodeTls(ca=files.ca, cert=files.cert, key=files.key),
    )
    reactor = Reactor()
    server = TlsServer(config, reactor=reactor, find_port=no_shard)
    late, first, second = LocalProtocolError("it is closing"), LinkLost("it broke"), ZeroDivisionError("of ours")
    assert server.explain((late, first, second)) is first
    assert str(server.explain((late,))) == "it was closed"
    reactor.close()


# -- trunks


class Client:
    """The owner of a stream: remembers what comes."""

    def __init__(self) -> None:
        self.got = b""
        self.over: str | None = None
        self.stands = False

    def connected(self) -> None:
        self.stands = True

    def received(self, data: bytes) -> None:
        self.got += data

    def ended(self) -> None:
        self.over = "ended"

    def lost(self, reason: str) -> None:
        self.over = reason

    def drained(self) -> None:
        """It feeds nothing that would have to wait."""

    def on_crash(self, error: Exception) -> None:
        self.over = repr(error)


@asynccontextmanager
async def an_engine() -> AsyncIterator[int]:
    """Sends back what comes; gives its port."""

    async def echo(stream: trio.SocketStream) -> None:
        async with stream:
            async for data in stream:
                await stream.send_all(data)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, echo, 0)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


def at(shard: str = "shd-tiny-1-0", epoch: int = 1) -> ShardAddress:
    return ShardAddress(node=NODE, shard=ShardId(shard), epoch=epoch)


async def test_requests_reach_the_engine_over_a_trunk(rig: MakeRig) -> None:
    async with an_engine() as port:
        ports = {("shd-tiny-1-0", 1): port}

        def find_port(shard: ShardId, epoch: int) -> int | str:
            return ports.get((shard, epoch), "wrong_epoch" if shard == "shd-tiny-1-0" else "no_shard")

        async with rig(find_port=find_port, trunks=2) as bench:
            await bench.head.wait_trunks(2)
            client = Client()
            stream = bench.head.trunks.open(at(), client, connected=client.connected)
            big = os.urandom(300_000)
            stream.send(b"hello " + big)
            await wait_for(lambda: len(client.got) == len(big) + 6)
            assert client.stands
            assert client.got == b"hello " + big
            stream.abort()
            for address, words in ((at(epoch=2), "another try"), (at("shd-other-1-0"), "does not run this shard")):
                client = Client()
                bench.head.trunks.open(address, client, connected=client.connected)
                await wait_for(lambda client=client: client.over)
                assert words in (client.over or "")
                assert not client.stands


async def test_trunks_outlive_the_control_link(rig: MakeRig) -> None:
    async with an_engine() as port, rig(find_port=lambda shard, epoch: port, trunks=1) as bench:
        peer = await bench.register()
        await bench.head.wait_trunks(1)
        client = Client()
        stream = bench.head.trunks.open(at(), client, connected=client.connected)
        await wait_for(lambda: client.stands)
        await peer.control.close("lost")
        await bench.register()
        stream.send(b"still here")
        await wait_for(lambda: client.got)
        assert (client.got, client.over) == (b"still here", None)
        stream.abort()


async def test_a_trunk_that_is_to_leave_is_replaced_and_ends_with_its_last_stream(rig: MakeRig) -> None:
    async with an_engine() as port, rig(find_port=lambda shard, epoch: port, trunks=1) as bench:
        await bench.head.wait_trunks(1)
        client = Client()
        stream = bench.head.trunks.open(at(), client, connected=client.connected)
        await wait_for(lambda: client.stands)
        bench.head.trunks.goaway(NODE, reason="renewal")
        await bench.head.wait_trunks(1)
        stream.send(b"on the old one")
        await wait_for(lambda: client.got)
        assert client.got == b"on the old one"
        stream.abort()


async def test_a_trunk_that_was_cut_is_dialled_again_with_the_newest_session(
    rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(trunks=1) as bench:
        peer = await bench.register()
        await bench.head.wait_trunks(1)
        bench.head.refused_tokens.add("token-1")
        bench.head.trunks.close_node(NODE, "its lease is over")
        await bench.head.wait_trunks(0)
        # refused for as long as the session is the old one
        await wait_for(lambda: bench.head.connections >= 4)
        await peer.control.close("lost")
        await bench.head.wait_trunks(1)


async def test_a_drained_agent_takes_no_new_streams_and_waits_for_those_it_has(rig: MakeRig) -> None:
    async with an_engine() as port, rig(find_port=lambda shard, epoch: port, trunks=2) as bench:
        await bench.head.wait_trunks(2)
        client = Client()
        stream = bench.head.trunks.open(at(), client, connected=client.connected)
        await wait_for(lambda: client.stands)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.dialer.drain)
            await bench.head.wait_trunks(0)
            with pytest.raises(OSError, match="no trunk"):
                bench.head.trunks.open(at(), Client(), connected=lambda: None)
            stream.send(b"still served")
            await wait_for(lambda: client.got)
            stream.abort()
        # nothing is dialled in the place of those that left
        assert bench.head.trunks.count(NODE) == 0


async def test_the_end_of_the_agent_ends_its_trunks(rig: MakeRig) -> None:
    before = set(os.listdir("/proc/self/fd"))
    async with rig(trunks=2) as bench:
        await bench.head.wait_trunks(2)
        await bench.register()
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_an_agent_whose_reactor_ends_with_it_ends_in_peace(authority: Any, rig: MakeRig) -> None:
    files = authority.issue("gpu-1")
    async with rig() as bench:
        await bench.register()
        before = set(os.listdir("/proc/self/fd"))
        reactor = Reactor()
        config = AgentConfig(
            node=NODE,
            server=ServerAddress(host="127.0.0.1", port=bench.head.socket.getsockname()[1]),
            tls=NodeTls(ca=files.ca, cert=files.cert, key=files.key),
        )
        server = TlsServer(config, reactor=reactor, find_port=no_shard, pace=QUICK)
        dialer = Dialer(server, node=NODE, trunks=2, version="1", pace=QUICK)
        async with trio.open_nursery() as root:
            await root.start(reactor.serve)
            await root.start(dialer.serve)
            await bench.head.wait_trunks(2)
            root.cancel_scope.cancel()
        await bench.head.wait_trunks(0)
        await wait_for(lambda: set(os.listdir("/proc/self/fd")) <= before)


# -- what is logged


def test_a_trouble_is_told_when_it_changes_and_else_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        complaints = Complaints("no server", 60)
        for seconds, text in ((0, "a"), (1, "a"), (1, "b"), (30, "b"), (29, "b"), (1, "b"), (1, "a")):
            await trio.sleep(seconds)
            complaints.say(text)
        complaints.forget()
        complaints.say("a")

    clock = MockClock(autojump_threshold=0)
    trio.run(run, clock=clock)
    assert [record.message for record in caplog.records] == [f"no server: {text}" for text in "abbaa"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
