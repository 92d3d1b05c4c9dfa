"""The agent's end of a trunk, with engines that listen on real ports of 127.0.0.1."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.core.node import NodeId
from llmgw.core.replica import ShardAddress, ShardId
from llmgw.link.agent_trunk import AgentTrunk
from llmgw.link.mux import WINDOW
from llmgw.link.trunk import Stream, Trunks
from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import Memory, memory_pair

STUFF = random.Random(5).randbytes(3_000_000)
NODE = NodeId("n1")
SHARD = ShardId("shd-tiny-1-0")


class Ear:
    """The door's end of a stream."""

    def __init__(self) -> None:
        self.stream: Stream
        self.got = bytearray()
        self.heard: list[str] = []

    def received(self, data: bytes) -> None:
        self.got += data

    def ended(self) -> None:
        self.heard.append("ended")

    def lost(self, reason: str) -> None:
        self.heard.append(f"lost: {reason}")

    def drained(self) -> None:
        self.heard.append("drained")

    def connected(self) -> None:
        self.heard.append("connected")

    def on_crash(self, error: Exception) -> None:
        raise error


class World:
    """The server's trunks and an agent's trunk in one reactor, and an engine that is a socket of the test's."""

    def __init__(self, *, capacity: int = 65536, streams: int = 64) -> None:
        self.reactor = Reactor()
        self.trunks = Trunks(self.reactor)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(10)
        self.engines: list[socket.socket] = []
        self.ports: dict[tuple[str, int], int | str | Exception] = {(SHARD, 1): self.listening.getsockname()[1]}
        self.said: list[str] = []
        self.agent = AgentTrunk(
            self.reactor,
            node=NODE,
            session="s",
            find_port=self.find_port,
            ready=lambda: self.said.append("ready"),
            goaway=lambda reason: self.said.append(f"goaway: {reason}"),
            over=lambda reason: self.said.append(f"over: {reason}"),
            max_streams=streams,
        )
        self.near: Memory

        def hand_over(owner: Any) -> Memory:
            self.near, far = memory_pair(self.reactor, owner, self.agent.carrier, capacity=capacity)
            self.agent.attach(far)
            return self.near

        self.trunks.admit(NODE, hand_over, refuse=lambda session: None)
        self.turn()

    def find_port(self, shard: ShardId, epoch: int) -> int | str:
        found = self.ports.get((shard, epoch), "no_shard")
        if isinstance(found, Exception):
            raise found
        return found

    def turn(self) -> None:
        while self.reactor.turn():
            pass

    def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not holds():
            self.turn()
            self.reactor._epoll.poll(0.001)
            assert time.monotonic() < deadline

    def rest(self) -> None:
        """Until the kernel has nothing more to say."""
        quiet = 0
        while quiet < 5:
            quiet = 0 if self.reactor._epoll.poll(0.002) else quiet + 1
            self.turn()

    def open(self, epoch: int = 1) -> Ear:
        ear = Ear()
        address = ShardAddress(node=NODE, shard=SHARD, epoch=epoch)
        ear.stream = self.trunks.open(address, ear, connected=ear.connected)
        return ear

    def accept(self) -> socket.socket:
        self.turn()
        engine = self.listening.accept()[0]
        engine.settimeout(10)
        self.engines.append(engine)
        return engine

    def reach(self) -> tuple[Ear, socket.socket]:
        ear = self.open()
        engine = self.accept()
        self.until(lambda: ear.heard == ["connected"])
        return ear, engine

    def read(self, engine: socket.socket, size: int) -> bytes:
        engine.setblocking(False)
        got = bytearray()

        def enough() -> bool:
            try:
                data = engine.recv(1 << 20)
            except BlockingIOError:
                return False
            got.extend(data)
            return not data or len(got) >= size

        self.until(enough)
        return bytes(got)

    def fill(self, engine: socket.socket) -> int:
        """Send until nobody takes more."""
        engine.setblocking(False)
        sent = tries = 0
        while tries < 5:
            try:
                sent += engine.send(STUFF[:65536])
                tries = 0
            except BlockingIOError:
                tries += 1
                self.rest()
        return sent

    def close(self) -> None:
        self.near.abort()
        self.turn()
        for sock in (self.listening, *self.engines):
            sock.close()
        self.reactor.close()


@pytest.fixture
def make(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., World]]:
    caplog.set_level(logging.DEBUG, "llmgw.link")
    made: list[World] = []

    def build(**facts: Any) -> World:
        made.append(World(**facts))
        return made[-1]

    yield build
    for world in made:
        world.close()


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make()


def test_a_request_and_its_answer_pass_byte_for_byte(world: World) -> None:
    ear = world.open()
    ear.stream.send(STUFF)
    engine = world.accept()
    assert world.read(engine, len(STUFF)) == STUFF
    engine.settimeout(0)
    at = 0
    while at < len(STUFF):
        try:
            at += engine.send(STUFF[at : at + 100_000])
        except BlockingIOError:
            world.rest()
    engine.close()
    world.until(lambda: "ended" in ear.heard)
    assert ear.got == STUFF
    assert ear.heard == ["connected", "drained", "ended"]
    assert world.agent.streams == 0


def test_a_stream_can_be_used_again(world: World) -> None:
    ear, engine = world.reach()
    for _ in range(3):
        ear.stream.send(b"ask")
        assert world.read(engine, 3) == b"ask"
        engine.send(b"answer")
        world.until(lambda: ear.got == b"answer")
        ear.got.clear()
    assert ear.heard == ["connected"]


def test_a_shard_that_does_not_run_is_refused_with_its_reason(world: World) -> None:
    world.ports[SHARD, 2] = "wrong_epoch"
    ears = [world.open(epoch=2), world.open(epoch=3)]
    for ear in ears:
        # the first bytes come along with the opening
        ear.stream.send(b"POST /")
    world.turn()
    assert ears[0].heard == ["lost: the node runs another try of this shard"]
    assert ears[1].heard == ["lost: the node does not run this shard"]
    assert world.agent.streams == 0


def test_an_engine_that_listens_no_more_was_never_reached(world: World) -> None:
    world.listening.close()
    ear = world.open()
    ear.stream.send(b"POST /")
    world.until(lambda: ear.heard)
    assert ear.heard == ["lost: the node's agent got no connection to the engine"]


def test_a_fault_in_finding_the_port_ends_one_stream(world: World, caplog: pytest.LogCaptureFixture) -> None:
    ear, _ = world.reach()
    world.ports[SHARD, 2] = ValueError("odd")
    other = world.open(epoch=2)
    world.turn()
    assert other.heard == ["lost: the node's agent failed at this stream"]
    assert ear.heard == ["connected"]
    assert "opening a stream to 'shd-tiny-1-0' failed" in caplog.text


def test_a_client_that_leaves_closes_the_connection_to_the_engine(world: World) -> None:
    ear, engine = world.reach()
    ear.stream.abort()
    world.turn()
    assert engine.recv(1) == b""
    assert world.agent.streams == 0


def test_a_client_that_leaves_while_the_engine_is_dialled_leaves_nothing(world: World) -> None:
    ear = world.open()
    ear.stream.send(b"POST /")
    ear.stream.abort()
    world.turn()
    assert world.agent.streams == 0
    assert ear.heard == []


def test_a_closed_stream_still_brings_its_last_bytes_to_the_engine(world: World) -> None:
    ear, engine = world.reach()
    stream = next(iter(world.agent.carrier.mux.channels.values())).above
    sent = 0
    while not stream.engine.pending:
        ear.stream.send(STUFF[:65536])
        sent += 65536
        world.turn()
    ear.stream.close()
    world.turn()
    assert world.agent.streams == 0
    assert len(world.read(engine, sent + 1)) == sent


def test_an_engine_that_dies_in_its_answer_is_no_end_in_good_order(world: World) -> None:
    ear, engine = world.reach()
    engine.send(b"half an ans")
    world.until(lambda: ear.got == b"half an ans")
    engine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    engine.close()
    world.until(lambda: len(ear.heard) > 1)
    assert ear.heard == ["connected", "lost: the engine reset the connection"]
    assert world.agent.streams == 0


def test_a_broken_connection_comes_after_what_the_engine_said(world: World) -> None:
    ear, engine = world.reach()
    ear.stream.pause()
    sent = world.fill(engine)
    assert sent > WINDOW
    engine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    engine.close()
    world.rest()
    assert ear.heard == ["connected"]
    ear.stream.resume()
    world.until(lambda: len(ear.heard) > 1)
    assert ear.heard == ["connected", "lost: the engine reset the connection"]
    assert len(ear.got) >= WINDOW


@pytest.mark.slow
def test_a_stream_that_nobody_reads_stops_its_engine_and_no_other(world: World) -> None:
    slow, slow_engine = world.reach()
    quick, quick_engine = world.reach()
    slow.stream.pause()
    sent = world.fill(slow_engine)
    assert sent > WINDOW
    # nothing more moves for the slow one; the other goes on for as long as it likes
    for _ in range(20):
        before = len(quick.got)
        quick_engine.sendall(STUFF[:100_000])
        world.until(lambda: len(quick.got) == before + 100_000)  # noqa: B023
    assert sum(map(len, slow.stream._held or ())) <= WINDOW
    assert slow.got == b""
    slow.stream.resume()
    world.until(lambda: len(slow.got) == sent)


@pytest.mark.slow
def test_an_engine_that_reads_nothing_stops_its_request_and_no_other(world: World) -> None:
    ear, engine = world.reach()
    other, other_engine = world.reach()
    engine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    big = STUFF * 4
    ear.stream.send(big)
    world.rest()
    assert ear.stream.pending > 0
    other.stream.send(b"ask")
    assert world.read(other_engine, 3) == b"ask"
    assert world.read(engine, len(big)) == big
    world.until(lambda: "drained" in ear.heard)


def test_no_credit_is_given_back_while_bytes_wait_for_the_engine(world: World) -> None:
    world.reach()
    [channel] = world.agent.carrier.mux.channels.values()
    channel.above.engine.send(STUFF * 4)
    channel.room = 0
    channel.above.settle()
    assert channel.room == 0


def test_a_lost_trunk_closes_the_connections_to_engines(world: World) -> None:
    ear, engine = world.reach()
    world.near.reset()
    world.turn()
    assert engine.recv(1) == b""
    assert world.said == ["ready", "over: the peer reset the connection"]
    assert ear.heard == ["connected"]


def test_an_agent_that_ends_its_trunk_fails_the_streams(world: World) -> None:
    ear, engine = world.reach()
    world.agent.abort("the agent stops")
    world.turn()
    assert ear.heard == ["connected", "lost: the connection to shd-tiny-1-0 on n1 was lost"]
    assert engine.recv(1) == b""
    assert world.said == ["ready", "over: the agent stops"]


def test_the_server_takes_a_trunk_out_of_use_and_running_streams_end_well(world: World) -> None:
    ear, engine = world.reach()
    world.trunks.goaway()
    world.turn()
    assert world.said == ["ready", "goaway: the server is stopping"]
    engine.send(b"to its end")
    engine.close()
    world.until(lambda: "ended" in ear.heard)
    assert ear.got == b"to its end"
    world.until(lambda: len(world.said) == 3)
    assert world.said[2].startswith("over: ")
    assert world.trunks.count(NODE) == 0


def test_an_agent_that_leaves_refuses_what_was_on_its_way(world: World) -> None:
    ear, engine = world.reach()
    world.agent.goaway("the certificate is renewed")
    late = world.open()
    late.stream.send(b"POST /")
    world.turn()
    assert late.heard == ["lost: the node's agent opens nothing on this trunk any more"]
    engine.send(b"to its end")
    engine.close()
    world.until(lambda: len(world.said) == 2)
    assert (ear.heard, ear.got) == (["connected", "ended"], b"to its end")


def test_a_stream_whose_agent_side_raises_ends_alone(world: World) -> None:
    ear, engine = world.reach()
    other, _ = world.reach()
    stream = next(iter(world.agent.carrier.mux.channels.values())).above
    stream.on_crash(ValueError("odd"))
    world.turn()
    assert ear.heard == ["connected", "lost: the node's agent failed at this stream"]
    assert engine.recv(1) == b""
    assert other.heard == ["connected"]


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400_000), st.booleans()), max_size=25))
def test_many_streams_over_a_narrow_trunk_keep_their_content(steps: list[tuple[int, int, bool]]) -> None:
    world = World(capacity=10_000)
    try:
        pairs = [world.reach() for _ in range(3)]
        asked, answered = [bytearray() for _ in pairs], [bytearray() for _ in pairs]
        read = [bytearray() for _ in pairs]
        to_send = [bytearray() for _ in pairs]
        for _, engine in pairs:
            engine.setblocking(False)

        def move() -> bool:
            for index, (_, engine) in enumerate(pairs):
                with contextlib.suppress(BlockingIOError):
                    read[index] += engine.recv(1 << 20)
                with contextlib.suppress(BlockingIOError):
                    del to_send[index][: engine.send(to_send[index]) if to_send[index] else 0]
            return read == asked and [ear.got for ear, _ in pairs] == answered

        for index, size, down in steps:
            ear, _ = pairs[index]
            if down:
                answered[index] += STUFF[:size]
                to_send[index] += STUFF[:size]
            else:
                asked[index] += STUFF[:size]
                ear.stream.send(STUFF[:size])
            if size % 3 == 0:
                ear.stream.pause()
            elif size % 3 == 1:
                ear.stream.resume()
            world.turn()
            move()
        for ear, _ in pairs:
            ear.stream.resume()
        world.until(move)
    finally:
        world.close()
