"""A trunk's connection: one flush a turn, time kept by the test's clock, and an end that everybody hears of."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from struct import pack
from typing import Any

import pytest

from llmgw.link.carrier import DEAD_SECONDS, HELLO_SECONDS, PING_SECONDS, WAITING_BYTES, Carrier
from llmgw.link.mux import (
    DATA,
    FIN,
    GOAWAY,
    HELLO,
    OPEN,
    PING,
    PONG,
    RST,
    TURN_FRAMES,
    WINDOW,
    Channel,
    Hello,
    Mux,
    Opening,
)
from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import Memory, memory_pair

GREETING = json.dumps({"protocol": 1, "window": WINDOW, "streams": 8}).encode()


def frame(number: int, kind: int, payload: bytes = b"") -> bytes:
    return pack(">II", number, len(payload) << 8 | kind) + payload


def opening(number: int) -> bytes:
    return frame(number, OPEN, b'{"shard":"s","epoch":1}')


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Upper:
    """Whom a stream belongs to."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.fails = False

    def take(self, data: bytes) -> None:
        self.heard.append(data.decode())
        if self.fails:
            raise ValueError("no such word")

    def settle(self) -> None:
        self.heard.append("settle")

    def peer_finished(self) -> None:
        self.heard.append("finished")

    def peer_reset(self, reason: str) -> None:
        self.heard.append(f"reset: {reason}")

    def peer_stands(self) -> None:
        self.heard.append("stands")

    def unblocked(self) -> None:
        self.heard.append("unblocked")

    def crash(self, error: Exception) -> None:
        self.heard.append(f"crashed: {error}")
        if self.fails:
            raise error

    def trunk_lost(self, reason: str) -> None:
        self.heard.append(f"lost: {reason}")


class Ends:
    """The role of an accepting end that hears all."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.uppers: dict[int, Upper] = {}
        self.channels: dict[int, Channel] = {}
        self.accepts = True

    def greeted(self, hello: Hello) -> None:
        self.heard.append("greeted")

    def opened(self, channel: Channel, opening: Opening) -> None:
        self.channels[channel.number] = channel
        if self.accepts:
            channel.above = self.uppers[channel.number] = Upper()

    def told_to_leave(self, reason: str) -> None:
        self.heard.append(f"leave: {reason}")

    def over(self, reason: str) -> None:
        self.heard.append(f"over: {reason}")


class Peer:
    """The far end, which says what the test wants; remembers each send of ours as one piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.heard: list[str] = []
        self.on_piece: Callable[[], object] = lambda: None

    def received(self, data: bytes) -> None:
        self.pieces.append(data)
        self.on_piece()

    def ended(self) -> None:
        self.heard.append("ended")

    def lost(self, reason: str) -> None:
        self.heard.append("lost")

    def drained(self) -> None: ...

    def on_crash(self, error: Exception) -> None:
        raise error

    def kinds(self) -> list[int]:
        kinds, data = [], b"".join(self.pieces)
        while data:
            kinds.append(data[7])
            data = data[8 + int.from_bytes(data[4:7], "big") :]
        return kinds


class World:
    def __init__(
        self, *, opener: bool = False, greet: bool = True, capacity: int = 65536, idle_seconds: float = 0.0
    ) -> None:
        self.clock = Clock()
        self.reactor = Reactor(clock=self.clock)
        self.role, self.peer = Ends(), Peer()
        self.mux = Mux(opener=opener, max_streams=8)
        self.carrier = Carrier(self.reactor, self.mux, self.role, name="trunk of node n1")
        self.far: Memory
        below, self.far = memory_pair(self.reactor, self.carrier, self.peer, capacity=capacity)
        self.clock.now += idle_seconds
        self.carrier.attach(below)
        self.say(frame(0, HELLO, GREETING) if greet else b"")
        assert self.peer.kinds() == [HELLO]
        self.peer.pieces.clear()

    def turn(self) -> None:
        while self.reactor.turn():
            pass

    def say(self, *frames: bytes) -> None:
        if any(frames):
            self.far.send(b"".join(frames))
        self.turn()

    def wait(self, seconds: float) -> None:
        """Let time pass in small steps, as the loop does."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 0.25
            self.turn()


@pytest.fixture
def make(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., World]]:
    caplog.set_level(logging.DEBUG, "llmgw.link")
    made: list[World] = []

    def build(**facts: Any) -> World:
        made.append(World(**facts))
        return made[-1]

    yield build
    for world in made:
        world.reactor.close()


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make()


def test_what_all_streams_say_in_a_turn_leaves_as_one_piece(world: World) -> None:
    world.say(opening(1), opening(2))
    for channel in world.role.channels.values():
        assert world.mux.write(channel, b"token")
        world.carrier.schedule()
    world.turn()
    assert world.peer.pieces == [frame(1, DATA, b"token") + frame(2, DATA, b"token")]


def test_each_stream_hears_its_own(world: World) -> None:
    world.say(opening(1), opening(2), frame(1, DATA, b"one"), frame(2, DATA, b"two"), frame(1, FIN), frame(2, RST))
    assert world.role.uppers[1].heard == ["one", "finished"]
    assert world.role.uppers[2].heard == ["two", "reset: unknown"]


def test_a_stream_that_raises_ends_alone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.say(opening(1), opening(2))
    world.role.uppers[1].fails = True
    world.say(frame(1, DATA, b"one"), frame(2, DATA, b"two"))
    assert world.role.uppers[1].heard == ["one", "crashed: no such word"]
    assert world.role.uppers[2].heard == ["two"]
    assert not world.carrier.over
    assert "a callback of Upper failed" in caplog.text


def test_a_refused_stream_may_have_brought_frames_along(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.role.accepts = False
    world.say(opening(1), frame(1, DATA, b"one"), frame(1, FIN), frame(1, RST))
    assert not world.carrier.over
    assert "failed" not in caplog.text


def test_a_violation_ends_the_trunk_and_its_streams_and_tells_the_peer(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.say(opening(1), opening(2), frame(2, DATA, b"two"), frame(2, RST, b"client_left"), frame(7, DATA, b"x"))
    reason = "a DATA frame for stream 7, which was never opened"
    assert world.role.uppers[1].heard == [f"lost: {reason}"]
    assert world.role.uppers[2].heard == ["two", "reset: client_left"]
    assert world.role.heard == ["greeted", f"over: {reason}"]
    assert world.peer.pieces == [frame(0, GOAWAY, reason.encode())]
    assert world.peer.heard == ["ended"]
    assert f"trunk of node n1: closed: {reason}" in caplog.text


def test_nothing_is_opened_after_the_end(world: World) -> None:
    world.say(frame(3, DATA, b"x"), opening(5))
    world.carrier.received(opening(5))
    assert world.role.channels == {}


def test_no_hello_in_time_ends_the_trunk(make: Callable[..., World]) -> None:
    world = make(greet=False)
    world.wait(HELLO_SECONDS - 0.25)
    assert not world.carrier.over
    world.wait(0.75)
    assert world.role.heard == ["over: no HELLO within 5 s"]


def test_a_loop_that_had_nothing_to_do_takes_no_time_off_the_limit(make: Callable[..., World]) -> None:
    world = make(greet=False, idle_seconds=60)
    world.wait(HELLO_SECONDS - 0.25)
    assert not world.carrier.over


def test_silence_is_asked_about_and_then_ends_all_streams(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.say(opening(1))
    world.wait(PING_SECONDS - 0.25)
    assert world.peer.kinds() == []
    world.wait(0.75)
    assert world.peer.kinds() == [PING]
    world.wait(DEAD_SECONDS - PING_SECONDS - 1)
    assert world.role.uppers[1].heard == []
    world.wait(1)
    assert world.role.uppers[1].heard == ["lost: nothing heard for 15 s"]
    assert world.peer.heard == ["ended"]
    assert "lost: nothing heard for 15 s" in caplog.text


def test_an_answer_to_a_ping_keeps_the_trunk(world: World) -> None:
    for _ in range(6):
        world.wait(PING_SECONDS + 1)
        world.say(frame(0, PONG))
    assert not world.carrier.over
    assert world.peer.kinds().count(PING) >= 3


def test_a_ping_is_answered(world: World) -> None:
    world.say(frame(0, PING, b"tick"))
    assert world.peer.pieces == [frame(0, PONG, b"tick")]


def test_a_peer_that_reads_nothing_stops_the_streams_and_then_the_trunk(make: Callable[..., World]) -> None:
    world = make(capacity=1000)
    world.say(opening(1))
    channel = world.role.channels[1]
    world.far.pause()
    assert world.mux.write(channel, b"x" * 5000)
    world.carrier.schedule()
    world.turn()
    assert not world.mux.write(channel, b"more")
    for _ in range(4):
        world.wait(PING_SECONDS)
        world.say(frame(0, PONG))
    assert world.role.uppers[1].heard == ["lost: the other end has taken nothing for 15 s"]


def test_a_peer_that_reads_slowly_keeps_the_trunk(make: Callable[..., World]) -> None:
    world = make(capacity=1000)
    world.say(opening(1))
    world.far.pause()
    world.peer.on_piece = world.far.pause
    for size in (900, 5000):
        world.mux.write(world.role.channels[1], b"x" * size)
        world.carrier.schedule()
        world.turn()

    def talk(seconds: float) -> None:
        for _ in range(int(seconds)):
            world.wait(1)
            world.say(frame(0, PONG))

    talk(8)
    world.far.resume()
    talk(12)
    assert len(world.peer.pieces) == 1
    assert not world.carrier.over
    assert not world.mux.write(world.role.channels[1], b"y")
    world.far.resume()
    world.turn()
    assert world.role.uppers[1].heard == ["unblocked"]
    world.far.resume()
    world.turn()
    assert world.peer.pieces[-1] == frame(1, DATA, b"y")


def test_what_is_too_much_for_one_piece_leaves_with_the_next(make: Callable[..., World]) -> None:
    world = make(capacity=1 << 20)
    world.say(opening(1), opening(2), opening(3))
    for channel in world.role.channels.values():
        world.mux.write(channel, b"x" * WINDOW)
        world.carrier.schedule()
    world.turn()
    assert len(world.peer.pieces) > 1
    assert b"".join(world.peer.pieces).count(b"x") == 3 * WINDOW


def test_words_that_a_deaf_peer_asks_for_do_not_grow(make: Callable[..., World]) -> None:
    world = make(capacity=1000)
    world.far.pause()
    world.say(frame(0, PING, b"12345678") * 1000)
    for _ in range(WAITING_BYTES // 16_000 + 2):
        world.say(frame(0, PING, b"12345678") * 1000)
    assert world.role.heard == ["greeted", "over: the other end takes nothing"]
    assert world.far.owner is world.peer


def test_a_connection_that_ends_fails_the_streams(world: World) -> None:
    world.say(opening(1))
    world.far.close()
    world.turn()
    assert world.role.uppers[1].heard == ["lost: the other end closed the trunk"]


def test_a_connection_that_breaks_fails_the_streams(world: World) -> None:
    world.say(opening(1))
    world.far.reset()
    world.turn()
    assert world.role.uppers[1].heard == ["lost: the peer reset the connection"]


def test_an_opener_that_leaves_lets_its_last_stream_end_and_closes(make: Callable[..., World]) -> None:
    world = make(opener=True)
    channel = world.mux.open(Opening(shard="s", epoch=1))
    channel.above = upper = Upper()
    world.carrier.go_away("enough")
    world.carrier.go_away("said once")
    world.turn()
    assert world.peer.kinds() == [OPEN, GOAWAY]
    world.say(frame(1, DATA, b"last"))
    assert not world.carrier.over
    world.say(frame(1, RST, b"engine_closed"))
    assert upper.heard == ["last", "reset: engine_closed"]
    assert world.role.heard == ["greeted", "over: it was taken out of use, and its last stream has ended"]
    assert world.peer.heard == ["ended"]


def test_an_accepting_end_that_leaves_waits_for_the_opener(world: World) -> None:
    world.carrier.go_away("renewed")
    world.turn()
    assert not world.carrier.over
    # what was opened before the opener heard of it
    world.say(opening(1))
    assert 1 in world.role.channels
    world.say(frame(1, RST, b"client_left"), frame(0, GOAWAY, b"as you say"))
    assert world.role.heard == [
        "greeted",
        "leave: as you say",
        "over: it was taken out of use, and its last stream has ended (as you say)",
    ]


def test_a_trunk_that_was_to_leave_may_be_closed_by_the_peer(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.carrier.go_away("renewed")
    world.turn()
    world.far.close()
    world.turn()
    assert world.role.heard == ["greeted", "over: the other end closed the trunk"]
    assert "WARNING" not in caplog.text


def test_a_fault_of_our_own_ends_the_trunk(world: World) -> None:
    world.say(opening(1))
    world.carrier.on_crash(ValueError("odd"))
    assert world.role.uppers[1].heard == ["lost: a fault of our own: ValueError('odd')"]


def test_a_blocked_trunk_that_is_refused_is_cut_at_once(make: Callable[..., World]) -> None:
    world = make(capacity=100)
    world.say(opening(1))
    world.far.pause()
    world.mux.write(world.role.channels[1], b"x" * 500)
    world.carrier.schedule()
    world.turn()
    world.carrier.refuse("revoked")
    assert world.carrier.below.closed
    assert world.role.heard == ["greeted", "over: revoked"]


def test_a_peer_that_said_why_it_closes_is_quoted(world: World) -> None:
    world.say(opening(1), frame(0, GOAWAY, b"revoked"))
    world.far.close()
    world.turn()
    assert world.role.uppers[1].heard == ["lost: the other end closed the trunk (revoked)"]


@pytest.mark.parametrize("end", [Carrier.go_away, Carrier.fail])
def test_a_trunk_that_ended_before_it_began_takes_no_connection(
    world: World, end: Callable[[Carrier, str], None]
) -> None:
    role = Ends()
    carrier = Carrier(world.reactor, Mux(opener=False), role, name="trunk of node n2")
    end(carrier, "the agent stops")
    below, _ = memory_pair(world.reactor, carrier, Peer())
    carrier.attach(below)
    assert below.closed
    assert role.heard == ["over: the agent stops"]


# -- a peer that means ill


def test_many_frames_in_one_piece_let_others_have_their_turn(world: World) -> None:
    world.say(opening(1), opening(2))
    upper = world.role.uppers[1]
    order: list[int] = []
    world.far.send(b"".join(frame(1, DATA, b"x") for _ in range(3000)) + frame(2, DATA, b"end"))
    world.reactor.call_soon(world.carrier, lambda: order.append(len(upper.heard)))
    world.turn()
    assert order[0] <= TURN_FRAMES
    assert len([word for word in upper.heard if word == "x"]) == 3000
    assert world.role.uppers[2].heard == ["end"]
    world.say(frame(1, DATA, b"more"))
    assert upper.heard[-1] == "more"


def test_what_came_before_the_end_of_the_connection_is_heard(world: World) -> None:
    world.say(opening(1))
    world.far.send(b"".join(frame(1, DATA, b"x") for _ in range(3000)) + frame(1, RST, b"client_left"))
    world.far.close()
    world.turn()
    upper = world.role.uppers[1]
    assert upper.heard.count("x") == 3000
    assert upper.heard[-1] == "reset: client_left"
    assert world.role.heard[-1] == "over: the other end closed the trunk"


def test_what_came_before_a_connection_broke_is_heard(world: World) -> None:
    world.say(opening(1))
    world.carrier.received(b"".join(frame(1, DATA, b"x") for _ in range(1000)))
    world.carrier.lost("it broke")
    assert world.role.uppers[1].heard.count("x") == 1000
    assert world.role.uppers[1].heard[-1] == "lost: it broke"


def test_the_peers_words_make_no_lines_of_their_own(world: World, caplog: pytest.LogCaptureFixture) -> None:
    forged = "bye\n2026-11-29 WARNING llmgw: node01 is lost \x1b[31m"
    world.say(opening(1))
    world.say(frame(0, GOAWAY, forged.encode()))
    world.carrier.fail(forged)
    assert "bye" in caplog.text
    assert all(message.isprintable() for message in caplog.messages)
    assert all(word.isprintable() for word in world.role.heard)


def test_what_a_stream_raises_makes_no_lines_of_its_own(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.say(opening(1))
    upper = world.role.uppers[1]
    upper.fails = True

    world.say(frame(1, DATA, b"x"))
    [message] = [message for message in caplog.messages if "a callback of Upper failed" in message]
    assert "no such word" in message
    assert all(line.startswith("  | ") for line in message.splitlines()[1:])


# -- a loop that stood still


def test_silence_that_we_slept_through_is_asked_about_first(world: World) -> None:
    world.say(opening(1))
    world.clock.now += 60
    world.turn()
    assert not world.carrier.over
    assert world.peer.kinds() == [PING]
    world.say(frame(0, PONG))
    world.wait(3)
    assert not world.carrier.over
    world.wait(DEAD_SECONDS)
    world.wait(DEAD_SECONDS)
    assert world.role.heard[-1] == "over: nothing heard for 15 s"


def test_a_hello_that_we_slept_through_gets_its_time_again(make: Callable[..., World]) -> None:
    world = make(greet=False)
    world.clock.now += 60
    world.turn()
    assert not world.carrier.over
    world.wait(HELLO_SECONDS + 0.5)
    assert world.role.heard == ["over: no HELLO within 5 s"]
