"""The server's trunks: streams that behave as the door's other transports do, whatever the far end says and when."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.node import NodeId
from llmgw.core.replica import ShardAddress, ShardId
from llmgw.link.carrier import DEAD_SECONDS
from llmgw.link.mux import CREDIT, DATA, FIN, GOAWAY, HALF, HELLO, LAST_NUMBER, OPEN, WINDOW, Channel, Mux
from llmgw.link.sparing import NODE_LINES, WINDOW_SECONDS
from llmgw.link.trunk import ServerTrunk, Stream, Trunks
from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import FLUSH_SECONDS, Memory, memory_pair

STUFF = random.Random(4).randbytes(2 * WINDOW)
NODE = NodeId("n1")
SHARD = ShardAddress(node=NODE, shard=ShardId("shd-tiny-1-0"), epoch=3)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Ear:
    """The owner of a stream: remembers all it hears. ``on`` may do something at a call."""

    def __init__(self) -> None:
        self.stream: Stream
        self.got = bytearray()
        self.heard: list[str] = []
        self.inside = False
        self.on: Callable[[str], object] = lambda word: None

    def _hear(self, word: str) -> None:
        assert not self.inside, "called from inside a call of its own"
        self.inside = True
        try:
            self.on(word)
        finally:
            self.inside = False

    def received(self, data: bytes) -> None:
        assert data
        self.got += data
        self._hear("received")

    def ended(self) -> None:
        self.heard.append("ended")
        self._hear("ended")

    def lost(self, reason: str) -> None:
        assert self.stream.closed
        self.heard.append(f"lost: {reason}")
        self._hear("lost")

    def drained(self) -> None:
        self.heard.append("drained")
        self._hear("drained")

    def connected(self) -> None:
        self.heard.append("connected")

    def on_crash(self, error: Exception) -> None:
        self.heard.append(f"crashed: {error}")


class Far:
    """The agent's end by hand: a mux over its end of the wire."""

    def __init__(self, *, node: str, session: str, streams: int) -> None:
        self.mux = Mux(opener=False, max_streams=streams)
        self.node, self.session = node, session
        self.wire: Memory
        self.channels: dict[int, Channel] = {}
        self.got: dict[int, bytearray] = {}
        self.heard: dict[int, list[str]] = {}
        self.words: list[tuple[int, Any]] = []
        self.ended_at_all = False
        self.gives = True

    def received(self, data: bytes) -> None:
        for kind, channel, payload in self.mux.feed(data):
            if channel is None:
                self.words.append((kind, payload))
            elif kind == OPEN:
                self.channels[channel.number] = channel
                self.got[channel.number] = bytearray()
                self.heard[channel.number] = [f"open {payload.shard} {payload.epoch}"]
            elif kind == DATA:
                self.got[channel.number] += payload
                if self.gives:
                    self.mux.give_back(channel)
            else:
                self.heard[channel.number].append({FIN: "fin", CREDIT: "stands"}.get(kind) or payload)
        self.flush()

    def flush(self) -> None:
        self.mux.collect()
        data = self.mux.take()
        if data:
            self.wire.send(data)

    def ended(self) -> None:
        self.ended_at_all = True

    def lost(self, reason: str) -> None:
        self.ended_at_all = True

    def drained(self) -> None: ...

    def on_crash(self, error: Exception) -> None:
        raise error


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.reactor = Reactor(clock=self.clock)
        self.opened = 0
        self.trunks = Trunks(self.reactor, opened=self.note_opened)
        self.fars: list[Far] = []
        self.asked: list[str] = []

    def note_opened(self) -> None:
        self.opened += 1

    def turn(self) -> None:
        while self.reactor.turn():
            pass

    def dial(
        self, *, node: str = NODE, session: str = "right", streams: int = 8, claims: str | None = None
    ) -> tuple[ServerTrunk, Far]:
        """An agent dials."""
        far = Far(node=claims or node, session=session, streams=streams)

        def hand_over(owner: Any) -> Memory:
            near, far.wire = memory_pair(self.reactor, owner, far, capacity=1 << 22)
            near.peer = "192.0.2.7:4711"
            return near

        def refuse(session: str) -> str | None:
            self.asked.append(session)
            return None if session == "right" else "the session is not one of this node"

        trunk = self.trunks.admit(NodeId(node), hand_over, refuse=refuse)
        far.mux.say_hello(node=far.node, session=far.session)
        far.flush()
        self.turn()
        self.fars.append(far)
        return trunk, far

    def open(self, address: ShardAddress = SHARD) -> Ear:
        ear = Ear()
        ear.stream = self.trunks.open(address, ear, connected=ear.connected)
        return ear

    def wait(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 0.25
            self.turn()


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> Iterator[World]:
    caplog.set_level(logging.DEBUG, "llmgw.link")
    world = World()
    yield world
    world.reactor.close()


def test_a_stream_opens_with_its_first_bytes(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    assert ear.stream.send(b"POST /")
    assert ear.stream.peer == "shd-tiny-1-0 on n1"
    world.turn()
    assert far.heard == {1: ["open shd-tiny-1-0 3"]}
    assert far.got[1] == b"POST /"


def test_a_made_connection_and_an_answer_are_heard(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    world.turn()
    far.mux.acknowledge(far.channels[1])
    far.mux.write(far.channels[1], b"HTTP/1.1 200 OK")
    far.mux.close(far.channels[1], "engine_closed")
    far.flush()
    world.turn()
    assert ear.heard == ["connected", "ended"]
    assert ear.got == b"HTTP/1.1 200 OK"


def test_a_node_is_reached_from_its_first_trunk_to_the_last_that_takes_streams(world: World) -> None:
    assert not world.trunks.reaches(NodeId(NODE))
    world.dial(session="wrong")
    assert (world.trunks.reaches(NodeId(NODE)), world.opened) == (False, 0)
    world.dial()
    assert (world.trunks.reaches(NodeId(NODE)), world.opened) == (True, 1)
    assert not world.trunks.reaches(NodeId("other"))
    world.open()
    world.trunks.goaway(NodeId(NODE))
    world.turn()
    # it is there for its stream, and for no other
    assert not world.trunks.reaches(NodeId(NODE))


def test_an_acknowledgement_counts_once(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    world.turn()
    far.mux.acknowledge(far.channels[1])
    far.mux.acknowledge(far.channels[1])
    far.flush()
    world.turn()
    assert ear.heard == ["connected"]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("no_shard", "the node does not run this shard"),
        ("wrong_epoch", "the node runs another try of this shard"),
        ("connect_failed", "the node's agent got no connection to the engine"),
        ("engine_reset", "the engine reset the connection"),
    ],
)
def test_a_refused_stream_is_lost_without_having_stood(world: World, reason: str, words: str) -> None:
    _, far = world.dial()
    ear = world.open()
    world.turn()
    far.mux.reset(far.channels[1], reason)
    far.flush()
    world.turn()
    assert ear.heard == [f"lost: {words}"]
    assert ear.stream.closed


def test_a_client_that_leaves_resets_the_stream(world: World) -> None:
    trunk, far = world.dial()
    ear = world.open()
    world.turn()
    ear.stream.abort()
    ear.stream.abort()
    world.turn()
    assert far.heard[1] == ["open shd-tiny-1-0 3", "client_left"]
    assert ear.heard == []
    assert ear.stream.send(b"nobody hears it")
    assert trunk.streams == 0


def test_a_paused_stream_holds_all_and_gives_no_credit_back(world: World) -> None:
    _, far = world.dial()
    slow, quick = world.open(), world.open()
    world.turn()
    slow.stream.pause()
    for number in (1, 2):
        far.mux.write(far.channels[number], STUFF)
    far.flush()
    for _ in range(8):
        world.turn()
        far.flush()
    assert slow.got == b""
    assert quick.got == STUFF
    assert far.channels[1].waiting_bytes == WINDOW
    slow.stream.resume()
    for _ in range(8):
        world.turn()
        far.flush()
    assert slow.got == STUFF


def test_a_stream_that_pauses_while_it_takes_gives_no_credit_back(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    world.turn()
    ear.on = lambda word: ear.stream.pause() if len(ear.got) > HALF else None
    far.mux.write(far.channels[1], STUFF[: WINDOW + 1])
    far.flush()
    world.turn()
    assert HALF < len(ear.got) < WINDOW
    assert far.channels[1].credit == 0
    ear.on = lambda word: None
    ear.stream.resume()
    world.turn()
    assert ear.got == STUFF[: WINDOW + 1]


def test_an_end_behind_held_bytes_comes_after_them(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    world.turn()
    ear.stream.pause()
    far.mux.write(far.channels[1], b"the end")
    far.mux.close(far.channels[1], "engine_closed")
    far.flush()
    world.turn()
    assert (ear.heard, ear.got) == ([], b"")
    ear.stream.resume()
    assert ear.got == b""
    world.turn()
    assert (ear.heard, ear.got) == (["ended"], b"the end")
    ear.stream.pause()
    ear.stream.resume()
    world.turn()
    assert ear.heard == ["ended"]


def test_a_break_behind_held_bytes_comes_after_them(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    world.turn()
    ear.stream.pause()
    far.mux.write(far.channels[1], b"so far")
    far.mux.break_off(far.channels[1], "engine_closed")
    far.flush()
    world.turn()
    assert ear.heard == []
    ear.stream.resume()
    world.turn()
    assert (ear.heard, ear.got) == (["lost: the engine closed the connection"], b"so far")


def test_what_is_here_to_its_end_outlives_the_trunk(world: World) -> None:
    _, far = world.dial()
    whole, cut = world.open(), world.open()
    world.turn()
    for ear in (whole, cut):
        ear.stream.pause()
    far.mux.write(far.channels[1], b"whole")
    far.mux.write(far.channels[2], b"cu")
    far.flush()
    far.wire.send(b"\0\0\0\x01\0\0\0" + bytes([FIN]))
    world.turn()
    far.wire.reset()
    world.turn()
    assert cut.heard == ["lost: the connection to shd-tiny-1-0 on n1 was lost"]
    whole.stream.resume()
    world.turn()
    assert (whole.heard, whole.got) == (["ended"], b"whole")


def test_a_pause_in_the_midst_of_what_was_held_holds_the_rest(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    world.turn()
    ear.stream.pause()
    for word in (b"one", b"two"):
        far.mux.write(far.channels[1], word)
        far.flush()
        world.turn()
    ear.on = lambda word: ear.stream.pause()
    ear.stream.resume()
    world.turn()
    assert ear.got == b"one"
    far.mux.write(far.channels[1], b"three")
    far.flush()
    ear.on = lambda word: None
    ear.stream.resume()
    world.turn()
    assert ear.got == b"onetwothree"


def test_a_big_request_waits_for_credit_and_says_when_it_has_left(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    assert not ear.stream.send(STUFF)
    assert ear.stream.pending >= WINDOW
    for _ in range(8):
        world.turn()
    assert far.got[1] == STUFF
    assert ear.stream.pending == 0
    assert ear.heard == ["drained"]


def test_closing_sends_what_waits_first(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    ear.stream.send(STUFF)
    ear.stream.close()
    ear.stream.close()
    ear.stream.pause()
    ear.stream.resume()
    assert not ear.stream.closed
    for _ in range(8):
        world.turn()
    assert far.got[1] == STUFF
    assert far.heard[1] == ["open shd-tiny-1-0 3", "fin", "client_left"]
    assert ear.stream.closed
    assert ear.heard == []


def test_closing_with_nothing_left_to_send_is_done_at_once(world: World) -> None:
    world.dial()
    ear = world.open()
    ear.stream.close(linger=True)
    assert ear.stream.closed


def test_a_peer_that_takes_nothing_does_not_hold_a_closed_stream(world: World) -> None:
    trunk, far = world.dial()
    ear = world.open()
    world.turn()
    far.gives = False
    ear.stream.send(STUFF)
    ear.stream.close()
    for _ in range(int(FLUSH_SECONDS) // 5 + 1):
        world.wait(5)
        far.mux.ping()
        far.flush()
    assert ear.stream.closed
    assert trunk.streams == 0
    assert far.heard[1][-1] == "client_left"


def test_a_closing_stream_that_the_peer_resets_is_closed(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    world.turn()
    far.gives = False
    ear.stream.send(STUFF)
    ear.stream.close()
    far.mux.write(far.channels[1], b"unheard")
    far.mux.reset(far.channels[1], "engine_reset")
    far.flush()
    world.turn()
    assert ear.stream.closed
    assert (ear.heard, ear.got) == ([], b"")


def test_an_owner_that_raises_ends_its_stream_and_no_other(world: World, caplog: pytest.LogCaptureFixture) -> None:
    _, far = world.dial()
    ear, other = world.open(), world.open()
    world.turn()

    def fail(word: str) -> None:
        raise ValueError("no such model")

    ear.on = fail
    for number in (1, 2):
        far.mux.write(far.channels[number], b"x")
    far.flush()
    world.turn()
    assert ear.heard == ["crashed: no such model"]
    assert far.heard[1][-1] == "crashed"
    assert other.got == b"x"
    other.stream.pause()
    far.mux.write(far.channels[2], b"y")
    far.flush()
    world.turn()
    other.on = fail
    other.stream.resume()
    world.turn()
    assert other.heard == ["crashed: no such model"]
    assert far.heard[2][-1] == "crashed"
    assert not far.ended_at_all


def test_an_owner_may_open_and_end_streams_from_its_calls(world: World) -> None:
    _, far = world.dial()
    first = world.open()
    world.turn()
    opened: list[Ear] = []

    def again(word: str) -> None:
        opened.append(world.open())
        opened[-1].stream.send(b"again")
        first.stream.abort()

    first.on = again
    far.mux.write(far.channels[1], b"one")
    far.mux.write(far.channels[1], b"two")
    far.flush()
    world.turn()
    assert first.got == b"one"
    assert far.got[2] == b"again"


def test_streams_go_to_the_trunk_with_the_fewest(world: World) -> None:
    one, _ = world.dial()
    ears = [world.open() for _ in range(3)]
    two, _ = world.dial()
    world.open()
    world.open()
    assert (one.streams, two.streams) == (3, 2)
    for ear in ears:
        ear.stream.abort()
    world.open()
    assert (one.streams, two.streams) == (1, 2)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"session": "stale"}, "the session is not one of this node"),
        ({"claims": "n2"}, "its HELLO names node 'n2', and its certificate does not"),
    ],
)
def test_a_trunk_that_proves_nothing_carries_nothing(
    world: World, facts: dict[str, str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, far = world.dial(**facts)
    assert far.words[-1] == (GOAWAY, words)
    assert far.ended_at_all
    assert f"trunk of node n1 from 192.0.2.7:4711: closed: {words}" in caplog.text
    with pytest.raises(OSError, match="node n1 has no trunk"):
        world.open()


def test_no_stream_is_opened_before_the_greeting(world: World) -> None:
    def hand_over(owner: Any) -> Memory:
        far = Far(node=NODE, session="right", streams=8)
        near, far.wire = memory_pair(world.reactor, owner, far)
        return near

    world.trunks.admit(NODE, hand_over, refuse=lambda session: None)
    world.turn()
    assert world.trunks.count(NODE) == 0
    with pytest.raises(OSError, match="no trunk"):
        world.open()


def test_a_connection_that_can_not_be_taken_over_leaves_nothing(world: World) -> None:
    def hand_over(owner: Any) -> Memory:
        raise OSError(24, "Too many open files")

    with pytest.raises(OSError, match="Too many"):
        world.trunks.admit(NODE, hand_over, refuse=lambda session: None)
    world.trunks.close_node(NODE, "nothing to close")


def test_a_full_node_is_said_to_be_full(world: World) -> None:
    world.dial(streams=1)
    world.open()
    with pytest.raises(OSError, match="no room on its trunks") as caught:
        world.open()
    assert caught.value.strerror == "node n1 has no room on its trunks"


def test_a_dead_trunk_fails_its_streams_and_the_others_go_on(world: World) -> None:
    world.dial()
    dead = world.open()
    _, far = world.dial(node="n2")
    alive = world.open(ShardAddress(node=NodeId("n2"), shard=SHARD.shard, epoch=1))
    world.turn()
    # the first far end answers nothing any more
    world.fars[0].wire.pause()
    for _ in range(int(DEAD_SECONDS) + 1):
        world.wait(1)
    assert dead.heard == ["lost: the connection to shd-tiny-1-0 on n1 was lost"]
    assert world.trunks.count(NODE) == 0
    assert alive.heard == []
    assert not far.ended_at_all


def test_a_violation_fails_its_own_streams_only(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    world.dial()
    other = world.open()
    world.turn()
    far.wire.send(b"\0\0\0\x09\0\0\x01\x03x")
    world.turn()
    assert ear.heard == ["lost: the connection to shd-tiny-1-0 on n1 was lost"]
    assert other.heard == []
    assert world.trunks.count(NODE) == 1


def test_goaway_lets_running_streams_end(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    world.turn()
    world.trunks.goaway(NODE, reason="renewed")
    world.turn()
    assert far.words[-1] == (GOAWAY, "renewed")
    assert world.trunks.count(NODE) == 0
    with pytest.raises(OSError, match="has no trunk"):
        world.open()
    far.mux.write(far.channels[1], b"to its end")
    far.mux.close(far.channels[1], "engine_closed")
    far.flush()
    world.turn()
    assert (ear.got, ear.heard) == (b"to its end", ["ended"])
    assert far.ended_at_all


def test_goaway_for_all_leaves_out_none(world: World) -> None:
    fars = [world.dial()[1], world.dial(node="n2")[1]]
    world.trunks.goaway()
    world.turn()
    assert [far.words[-1] for far in fars] == [(GOAWAY, "the server is stopping")] * 2
    assert all(far.ended_at_all for far in fars)


def test_an_agent_that_leaves_gets_no_new_streams(world: World, caplog: pytest.LogCaptureFixture) -> None:
    _, far = world.dial()
    ear = world.open()
    world.turn()
    far.mux.go_away("the agent stops")
    far.flush()
    world.turn()
    assert world.trunks.count(NODE) == 0
    assert "no new streams: the agent stops" in caplog.text
    ear.stream.abort()
    world.turn()
    assert far.ended_at_all


def test_closing_a_node_ends_its_trunks_at_once(world: World) -> None:
    _, far = world.dial()
    ear = world.open()
    world.turn()
    world.trunks.close_node(NODE, "node n1 is revoked")
    assert ear.heard == ["lost: the connection to shd-tiny-1-0 on n1 was lost"]
    world.turn()
    assert far.words[-1] == (GOAWAY, "node n1 is revoked")
    assert far.ended_at_all


def test_a_trunk_whose_numbers_are_used_up_asks_for_another(world: World) -> None:
    trunk, far = world.dial()
    trunk.carrier.mux._last = LAST_NUMBER - 1
    world.open()
    world.turn()
    assert far.words[-1] == (GOAWAY, "its stream numbers are used up")
    assert list(far.channels) == [LAST_NUMBER]
    assert world.trunks.count(NODE) == 0


def test_the_greeting_is_the_first_word(world: World) -> None:
    _, far = world.dial()
    assert far.words[0][0] == HELLO
    assert world.asked == ["right"]


STEP = st.one_of(
    st.tuples(st.just("open"), st.just(0), st.just(0)),
    st.tuples(st.sampled_from(["write", "answer"]), st.integers(0, 5), st.integers(1, WINDOW + 20_000)),
    st.tuples(st.sampled_from(["write", "answer"]), st.integers(0, 5), st.integers(1, 300)),
    st.tuples(st.sampled_from(["pause", "resume", "turn", "flush"]), st.integers(0, 5), st.just(0)),
    st.tuples(st.sampled_from(["abort", "close", "end", "break"]), st.integers(0, 5), st.just(0)),
)


@pytest.mark.slow
@given(st.lists(STEP, max_size=50), st.booleans())
def test_any_schedule_keeps_content_bounds_and_the_order_of_calls(
    steps: list[tuple[str, int, int]], dies: bool
) -> None:
    world = World()
    _, far = world.dial()
    ears: list[Ear] = []
    sent: dict[int, bytearray] = {}
    answered: dict[int, bytearray] = {}
    last: dict[int, str] = {}
    mine: dict[int, str] = {}
    until_then: dict[int, tuple[list[str], bytes]] = {}
    for what, which, size in steps:
        if what == "open" and len(far.mux.channels) < 8 and len(ears) < 8:
            ears.append(world.open())
            sent[len(ears)], answered[len(ears)] = bytearray(), bytearray()
            world.turn()
        elif what == "turn":
            world.turn()
        elif what == "flush":
            far.flush()
        elif ears:
            number = which % len(ears) + 1
            stream, channel = ears[number - 1].stream, far.channels[number]
            if what == "write" and not stream.closed and number not in mine and number not in last:
                sent[number] += STUFF[:size]
                stream.send(STUFF[:size])
            elif what == "answer" and not channel.gone and number not in last:
                answered[number] += STUFF[:size]
                far.mux.write(channel, STUFF[:size])
            elif what in ("pause", "resume"):
                getattr(stream, what)()
            elif what in ("abort", "close") and number not in mine:
                mine[number] = what
                getattr(stream, what)()
                until_then[number] = list(ears[number - 1].heard), bytes(ears[number - 1].got)
            elif what in ("end", "break") and number not in last and not channel.gone:
                last[number] = what
                call = far.mux.close if what == "end" else far.mux.break_off
                call(channel, "engine_closed")
    for _ in range(60):
        far.flush()
        world.turn()
        for number, ear in enumerate(ears, 1):
            held = ear.stream._held
            assert held is None or sum(map(len, held)) <= WINDOW
            if ear.stream._paused and number not in mine:
                ear.stream.resume()
    if dies:
        far.wire.reset()
        world.turn()
    for number, ear in enumerate(ears, 1):
        words = [word.split(":")[0] for word in ear.heard if word != "drained"]
        assert answered[number].startswith(ear.got)
        assert sent[number].startswith(far.got[number])
        if number in mine:
            assert (ear.heard, bytes(ear.got)) == until_then[number]
        else:
            assert ear.got == answered[number]
            want = {"end": ["ended"], "break": ["lost"], None: ["lost"] if dies else []}[last.get(number)]
            assert words[:1] == want[:1]
        if mine.get(number) != "abort" and number not in last:
            assert far.got[number] == sent[number]
    world.reactor.close()


# -- an agent that means ill


def test_every_connection_of_a_node_counts_until_it_is_closed(world: World) -> None:
    node = NodeId(NODE)
    _, far = world.dial()
    world.dial(session="wrong")
    silent = world.trunks.admit(
        node, lambda owner: memory_pair(world.reactor, owner, far, capacity=1 << 22)[0], refuse=str
    )
    assert world.trunks.hold(node) >= 2
    assert world.trunks.count(node) == 1
    silent.carrier.fail("enough")
    world.turn()
    for each in world.fars:
        each.wire.close()
    world.turn()
    world.trunks.sweep()
    assert world.trunks.hold(node) == 0


def test_one_that_lingers_at_its_close_counts(world: World) -> None:
    class Lingering:
        owner: Any = None
        peer = ""
        pending = 0
        closed = False

        def send(self, data: bytes) -> bool:
            return True

        def close(self, *, linger: bool = False) -> None: ...

        def abort(self) -> None: ...

    below = Lingering()
    node = NodeId(NODE)
    trunk = world.trunks.admit(node, lambda owner: cast("Any", below), refuse=str)
    trunk.carrier.refuse("no")
    world.trunks.sweep()
    assert world.trunks.hold(node) == 1
    below.closed = True
    assert world.trunks.hold(node) == 0


def test_trunks_of_one_node_do_not_fill_the_log(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(200):
        world.dial(session="wrong")
    world.dial(node="n2")
    assert len(caplog.messages) == NODE_LINES + 1
    world.clock.now += WINDOW_SECONDS
    caplog.clear()
    world.trunks.sweep()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(
        f"{200 - NODE_LINES} more lines about trunks of node n1 within 60 s; the last:"
    )
