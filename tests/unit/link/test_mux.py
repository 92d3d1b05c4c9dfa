"""The frames of a trunk: content exact and bounds kept under any schedule, and every broken rule noticed."""

from __future__ import annotations

import json
import random
from struct import pack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.link.mux import (
    CREDIT,
    DATA,
    FIN,
    GATHER,
    GOAWAY,
    HALF,
    HELLO,
    LAST_NUMBER,
    MAX_DATA,
    MAX_OTHER,
    OPEN,
    PING,
    PONG,
    REASONS,
    RST,
    TURN_FRAMES,
    VIOLATION,
    WINDOW,
    Channel,
    Mux,
    Opening,
)

STUFF = random.Random(3).randbytes(2 * WINDOW)
OPENING = Opening(shard="shd-tiny-1-0", epoch=2)


def frame(number: int, kind: int, payload: bytes = b"") -> bytes:
    return pack(">II", number, len(payload) << 8 | kind) + payload


def hello(**changed: Any) -> bytes:
    facts = {"protocol": 1, "window": WINDOW, "streams": 8} | changed
    return frame(0, HELLO, json.dumps(facts).encode())


class Side:
    """A mux and what a reader above it would do: it takes what comes unless the stream is paused."""

    def __init__(self, *, opener: bool, max_streams: int = 8) -> None:
        self.mux = Mux(opener=opener, max_streams=max_streams)
        self.channels: dict[int, Channel] = {}
        self.sent: dict[int, bytearray] = {}
        self.got: dict[int, bytearray] = {}
        self.held: dict[int, int] = {}
        self.paused: set[int] = set()
        self.ends: dict[int, list[str]] = {}
        self.said: dict[int, str] = {}
        self.stopped: set[int] = set()
        self.events: list[tuple[int, Any]] = []

    def add(self, channel: Channel) -> None:
        number = channel.number
        self.channels[number] = channel
        self.sent[number], self.got[number] = bytearray(), bytearray()
        self.held[number], self.ends[number] = 0, []

    def hear(self, data: bytes) -> None:
        for kind, channel, payload in self.mux.feed(data):
            assert kind != VIOLATION, payload
            if channel is None:
                self.events.append((kind, payload))
            elif kind == OPEN:
                self.add(channel)
                self.events.append((kind, payload))
            elif kind == DATA:
                assert not self.ends[channel.number]
                self.got[channel.number] += payload
                self.held[channel.number] += len(payload)
                assert self.held[channel.number] <= WINDOW
                self.take(channel)
            else:
                self.ends[channel.number].append(payload if kind == RST else {FIN: "fin", CREDIT: "stands"}[kind])

    def take(self, channel: Channel) -> None:
        if channel.number not in self.paused:
            self.held[channel.number] = 0
            if channel.room < HALF:
                self.mux.give_back(channel)

    def write(self, number: int, size: int) -> None:
        """As a well-behaved feeder: nothing more while the last word was False."""
        channel = self.channels[number]
        if number not in self.said and number not in self.stopped and not channel.gone:
            data = STUFF[len(self.sent[number]) % WINDOW :][:size]
            self.sent[number] += data
            if not self.mux.write(channel, data):
                self.stopped.add(number)
            assert (channel.waiting_bytes > 0) == (number in self.stopped)

    def out(self) -> bytes:
        if self.mux.blocked:
            return b""
        for channel in self.mux.collect():
            self.stopped.discard(channel.number)
        data = self.mux.take()
        assert len(data) <= GATHER + GATHER // 8
        return data


class Wire:
    """Two sides and the bytes between them."""

    def __init__(self, max_streams: int = 8) -> None:
        self.sides = Side(opener=True, max_streams=max_streams), Side(opener=False, max_streams=max_streams)
        self.way = bytearray(), bytearray()
        for side in self.sides:
            side.mux.say_hello(node="n1", session="s")
        self.flush()

    def open(self) -> Channel:
        channel = self.sides[0].mux.open(OPENING)
        self.sides[0].add(channel)
        return channel

    def send(self, index: int) -> None:
        self.way[index].extend(self.sides[index].out())

    def carry(self, index: int, size: int) -> None:
        piece = bytes(self.way[index][:size])
        if piece:
            del self.way[index][:size]
            self.sides[1 - index].hear(piece)

    def flush(self) -> None:
        """Until nobody has anything to say that may be said."""
        moved = True
        while moved:
            moved = False
            for index in (0, 1):
                self.send(index)
                moved = moved or bool(self.way[index])
                self.carry(index, len(self.way[index]))


@pytest.fixture
def wire() -> Wire:
    return Wire()


def greeted(*, opener: bool = False) -> Mux:
    mux = Mux(opener=opener, max_streams=8)
    mux.say_hello()
    mux.take()
    assert mux.feed(hello())[0][0] == HELLO
    return mux


END, STREAM = st.integers(0, 1), st.integers(0, 7)
SIZE = st.one_of(st.integers(1, 300), st.integers(1, WINDOW + MAX_DATA))
STEP = st.one_of(
    st.tuples(st.just("open")),
    st.tuples(st.just("write"), END, STREAM, SIZE),
    st.tuples(st.just("write"), END, STREAM, SIZE),
    st.tuples(st.just("send"), END),
    st.tuples(st.just("carry"), END, st.one_of(st.integers(1, 40), st.integers(1, 400_000))),
    st.tuples(st.just("carry"), END, st.one_of(st.integers(1, 40), st.integers(1, 400_000))),
    st.tuples(st.sampled_from(["pause", "resume", "block", "unblock"]), END, STREAM),
    st.tuples(st.sampled_from(["close", "break_off", "reset"]), END, STREAM, st.sampled_from(sorted(REASONS))),
)


def do(wire: Wire, step: tuple[Any, ...]) -> None:
    if step[0] == "open":
        if len(wire.sides[0].mux.channels) < wire.sides[0].mux.max_streams:
            wire.open()
        return
    side = wire.sides[step[1]]
    if step[0] == "send":
        wire.send(step[1])
    elif step[0] == "carry":
        wire.carry(step[1], step[2])
    elif step[0] == "block":
        side.mux.block()
    elif step[0] == "unblock":
        side.mux.unblock()
    elif side.channels:
        number = sorted(side.channels)[step[2] % len(side.channels)]
        channel = side.channels[number]
        if step[0] == "write":
            side.write(number, step[3])
        elif step[0] == "pause":
            side.paused.add(number)
        elif step[0] == "resume":
            side.paused.discard(number)
            side.take(channel)
        elif number not in side.said and not channel.gone:
            getattr(side.mux, step[0])(channel, step[3])
            side.said[number] = step[0]


@pytest.mark.slow
@given(st.lists(STEP, max_size=60), st.sets(STREAM))
def test_any_schedule_keeps_content_and_bounds(steps: list[tuple[Any, ...]], never_read: set[int]) -> None:
    wire = Wire()
    for step in steps:
        do(wire, step)
    deaf = {number for number in wire.sides[1].channels if number % 8 in never_read}
    for side in wire.sides:
        side.mux.unblock()
        side.paused -= side.paused - deaf
        for channel in side.channels.values():
            side.take(channel)
    wire.flush()
    for index in (0, 1):
        here, there = wire.sides[index], wire.sides[1 - index]
        for number, sent in here.sent.items():
            got, said, heard = there.got[number], here.said.get(number), there.ends[number]
            assert sent.startswith(got)
            # whoever has ended a stream hears no more of it
            if said != "reset" and number not in there.said and number not in there.paused:
                assert got == sent
            if number not in there.said and (said == "reset" or number not in there.paused):
                want = {None: [], "close": ["fin", "rst"], "break_off": ["rst"], "reset": ["rst"]}[said]
                assert len(heard) == len(want)
                assert ("fin" in heard) == ("fin" in want)


@pytest.mark.slow
@given(st.lists(st.integers(1, 30), min_size=1), st.booleans())
def test_however_the_bytes_are_cut_they_mean_the_same(cuts: list[int], byte_wise: bool) -> None:
    data = hello() + b"".join(
        (
            frame(1, OPEN, b'{"shard":"s","epoch":1,"later":[1]}'),
            frame(1, DATA, b"abc"),
            frame(0, PING, b"12345678"),
            frame(1, CREDIT, pack(">I", 0)),
            frame(5, OPEN, b'{"shard":"t","epoch":9}'),
            frame(5, DATA, b"x" * 100),
            frame(1, FIN),
            frame(1, RST, b"client_left"),
            frame(0, GOAWAY, b"enough"),
            frame(5, DATA, b"y"),
            frame(0, PONG),
        )
    )

    def told(pieces: list[bytes]) -> list[tuple[int, Any, Any]]:
        mux = Mux(opener=False)
        events = [event for piece in pieces for event in mux.feed(piece)]
        return [(kind, channel and channel.number, payload) for kind, channel, payload in events]

    sizes = [1] * len(data) if byte_wise else cuts * len(data)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    whole = told([data])
    assert told([piece for piece in pieces if piece]) == whole
    assert [kind for kind, _, _ in whole] == [HELLO, OPEN, DATA, CREDIT, OPEN, DATA, FIN, RST, GOAWAY, DATA]


@given(st.binary(max_size=200), st.booleans(), st.integers(0, 3))
def test_garbage_is_a_violation_or_waits_for_more(data: bytes, opener: bool, after: int) -> None:
    mux = Mux(opener=opener)
    if after:
        mux.feed(hello())
    if after > 1 and not opener:
        mux.feed(frame(1, OPEN, b'{"shard":"s","epoch":1}'))
    for kind, _, payload in mux.feed(data):
        assert kind != VIOLATION or payload
    assert sum(map(len, mux._parts)) <= len(data)


OPENED = frame(1, OPEN, b'{"shard":"s","epoch":1}')


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(1, 0), "unknown kind 0"),
        (frame(1, 10), "unknown kind 10"),
        (hello(), "HELLO frame after the HELLO"),
        (frame(1, DATA, b"x"), "stream 1, which was never opened"),
        (frame(0, DATA, b"x"), "stream 0, which was never opened"),
        (frame(3, RST), "RST frame for stream 3, which was never opened"),
        (frame(0, RST), "RST frame for stream 0"),
        (frame(1, PING), "PING frame for stream 1"),
        (frame(0, PING, b"123456789"), "PING frame of 9 bytes"),
        (OPENED + frame(1, DATA), "DATA frame of 0 bytes"),
        (OPENED + pack(">II", 1, (MAX_DATA + 1) << 8 | DATA), f"DATA frame of {MAX_DATA + 1} bytes"),
        (pack(">II", 0, (MAX_OTHER + 1) << 8 | GOAWAY), f"GOAWAY frame of {MAX_OTHER + 1} bytes"),
        (OPENED + frame(1, FIN, b"x"), "FIN frame of 1 bytes"),
        (OPENED + frame(1, CREDIT, b"123"), "CREDIT frame of 3 bytes"),
        (OPENED + frame(1, CREDIT, pack(">I", 1)), "more credit than the window"),
        (OPENED + frame(1, FIN) + frame(1, FIN), "a second FIN on stream 1"),
        (OPENED + frame(1, FIN) + frame(1, DATA, b"x"), "more than its credit, or after its FIN"),
        (OPENED + frame(1, DATA, b"x" * MAX_DATA) * 16 + frame(1, DATA, b"x"), "more than its credit"),
        (OPENED + OPENED, "stream 1 was opened after stream 1"),
        (OPENED + frame(1, RST) + OPENED, "stream 1 was opened after stream 1"),
        (b"".join(frame(n, OPEN, b'{"shard":"s","epoch":1}') for n in range(1, 10)), "more than 8 streams"),
        (frame(1, OPEN, b"{}"), "OPEN frame that can't be read"),
        (frame(1, OPEN, b'{"shard":"s","epoch":"1"}'), "OPEN frame that can't be read"),
        (frame(1, OPEN, b"\xff\xff"), "OPEN frame that can't be read"),
    ],
)
def test_a_broken_rule_is_named(data: bytes, words: str) -> None:
    events = greeted().feed(data)
    assert events[-1][0] == VIOLATION
    assert words in events[-1][2]
    assert [kind for kind, _, _ in events].count(VIOLATION) == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(0, PING), "PING frame before the HELLO"),
        (frame(1, OPEN, b"{}"), "OPEN frame before the HELLO"),
        (frame(1, DATA, b"x"), "never opened"),
        (hello(protocol=0), "protocol 0"),
        (hello(window=100), "window 100"),
        (hello(window=2**33), "window 8589934592"),
        (hello(streams=0), "streams 0"),
        (frame(0, HELLO, b"[]"), "HELLO frame that can't be read"),
        (b"GET / HTTP/1.1\r\n", "unknown kind"),
    ],
)
def test_a_bad_greeting_is_named(data: bytes, words: str) -> None:
    [(kind, _, reason)] = Mux(opener=False).feed(data)
    assert kind == VIOLATION
    assert words in reason


def test_the_opening_end_accepts_no_opening() -> None:
    [(kind, _, reason)] = greeted(opener=True).feed(OPENED)
    assert (kind, reason) == (VIOLATION, "an OPEN frame from the end that opens nothing")


def test_what_came_before_a_violation_still_counts() -> None:
    events = greeted().feed(OPENED + frame(1, DATA, b"x") + frame(1, RST, b"client_left") + frame(9, 99))
    assert [kind for kind, _, _ in events] == [OPEN, DATA, RST, VIOLATION]


def test_a_hello_says_who_dials(wire: Wire) -> None:
    [(kind, word)] = wire.sides[0].events
    assert (kind, word.node, word.session, word.window, word.streams) == (HELLO, "n1", "s", WINDOW, 8)


def test_the_opening_end_heeds_the_limit_of_the_other() -> None:
    mux = Mux(opener=True, max_streams=100)
    mux.feed(hello(streams=3))
    assert mux.max_streams == 3


def test_an_opening_brings_its_first_bytes_along(wire: Wire) -> None:
    channel = wire.open()
    assert wire.sides[0].mux.write(channel, b"hello")
    wire.flush()
    assert wire.sides[1].events[-1] == (OPEN, OPENING)
    assert wire.sides[1].got[1] == b"hello"


def test_a_made_connection_is_acknowledged_with_no_credit(wire: Wire) -> None:
    channel = wire.open()
    wire.flush()
    wire.sides[1].mux.acknowledge(wire.sides[1].channels[1])
    wire.flush()
    assert wire.sides[0].ends[1] == ["stands"]
    assert channel.credit == WINDOW


def test_a_reader_that_stops_stops_its_writer_and_nobody_else(wire: Wire) -> None:
    slow, quick = wire.open(), wire.open()
    wire.flush()
    wire.sides[1].paused.add(slow.number)
    for channel in (slow, quick):
        assert wire.sides[0].mux.write(channel, STUFF[:WINDOW]) is (channel is slow)
    wire.flush()
    assert not wire.sides[0].mux.write(slow, b"more")
    assert wire.sides[0].mux.write(quick, b"more")
    wire.flush()
    assert slow.waiting_bytes == 4
    assert wire.sides[1].got[quick.number] == STUFF[:WINDOW] + b"more"
    wire.sides[1].paused.clear()
    wire.sides[1].take(wire.sides[1].channels[slow.number])
    wire.flush()
    assert wire.sides[1].got[slow.number] == STUFF[:WINDOW] + b"more"


def test_credit_comes_back_in_halves(wire: Wire) -> None:
    channel = wire.open()
    wire.sides[0].mux.write(channel, STUFF[:HALF])
    wire.flush()
    assert channel.credit == HALF
    wire.sides[0].mux.write(channel, b"x")
    wire.flush()
    assert channel.credit == WINDOW


def test_streams_take_turns_where_not_all_can_go_at_once(wire: Wire) -> None:
    mux = wire.sides[0].mux
    bulk, small = wire.open(), wire.open()
    wire.flush()
    mux.block()
    assert not mux.write(bulk, STUFF[:WINDOW])
    assert not mux.write(small, b"tok")
    assert not mux.write(small, b"en")
    mux.unblock()
    assert mux.collect() == [small, bulk]
    data = mux.take()
    # small pieces that waited are one frame, after one frame of the stream that came first
    assert data[8 + MAX_DATA :].startswith(frame(small.number, DATA, b"token"))


def test_credit_that_comes_in_pieces_counts_once(wire: Wire) -> None:
    mux = wire.sides[0].mux
    channel = wire.open()
    wire.flush()
    wire.sides[1].paused.add(1)
    mux.write(channel, STUFF[: WINDOW + 3])
    wire.flush()
    mux.feed(frame(1, CREDIT, pack(">I", 1)) + frame(1, CREDIT, pack(">I", 2)))
    assert mux.collect() == [channel]
    assert mux.take() == frame(1, DATA, STUFF[WINDOW : WINDOW + 3])


def test_a_blocked_connection_makes_data_wait_but_no_words(wire: Wire) -> None:
    mux = wire.sides[0].mux
    channel = wire.open()
    wire.flush()
    mux.block()
    assert not mux.write(channel, b"data")
    mux.ping()
    assert mux.take() == frame(0, PING)


def test_last_words_wait_for_what_was_written(wire: Wire) -> None:
    mux = wire.sides[1].mux
    wire.open()
    wire.flush()
    wire.sides[0].paused.add(1)
    channel = wire.sides[1].channels[1]
    mux.write(channel, STUFF[: WINDOW + 5])
    mux.close(channel, "engine_closed")
    mux.break_off(channel, "crashed")
    assert mux.write(channel, b"too late")
    wire.flush()
    assert wire.sides[0].ends[1] == []
    wire.sides[0].paused.clear()
    wire.sides[0].take(wire.sides[0].channels[1])
    wire.flush()
    assert wire.sides[0].got[1] == STUFF[: WINDOW + 5]
    assert wire.sides[0].ends[1] == ["fin", "engine_closed"]
    assert not mux.channels
    assert not wire.sides[0].mux.channels


def test_a_reset_drops_what_waits(wire: Wire) -> None:
    channel = wire.open()
    wire.flush()
    wire.sides[0].mux.write(channel, STUFF)
    wire.sides[0].mux.reset(channel, "client_left")
    wire.flush()
    assert wire.sides[1].ends[1] == ["client_left"]
    assert channel.waiting_bytes == 0
    assert wire.sides[0].mux.write(channel, b"nobody hears it")
    assert wire.sides[0].mux.idle


def test_what_is_on_its_way_to_an_ended_stream_is_passed_over(wire: Wire) -> None:
    channel = wire.open()
    wire.flush()
    far = wire.sides[1]
    far.mux.write(far.channels[1], b"late")
    far.mux.acknowledge(far.channels[1])
    far.mux.close(far.channels[1], "engine_closed")
    wire.sides[0].mux.reset(channel, "client_left")
    wire.flush()
    assert wire.sides[0].got[1] == b""
    assert wire.sides[0].ends[1] == []


def test_an_unknown_reason_is_no_violation() -> None:
    mux = greeted()
    events = mux.feed(OPENED + frame(1, RST, b"\xffsomething new"))
    assert events[-1][0] == RST
    assert events[-1][2] == "unknown"


def test_a_ping_is_answered_with_its_own_words() -> None:
    mux = greeted()
    assert mux.feed(frame(0, PING, b"tick")) == []
    assert mux.take() == frame(0, PONG, b"tick")


def test_numbers_end() -> None:
    mux = greeted(opener=True)
    mux._last = LAST_NUMBER - 1
    assert not mux.spent
    assert mux.open(OPENING).number == LAST_NUMBER
    assert mux.spent


SPOKEN = hello() + OPENED + frame(1, DATA, b"x" * 40) + frame(1, CREDIT, pack(">I", 0)) + frame(0, PING, b"tick")
SPOKEN += frame(2, OPEN, b'{"shard":"t","epoch":9}') + frame(2, DATA, b"y") + frame(1, FIN) + frame(1, RST, b"crashed")


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, len(SPOKEN) - 1), st.integers(0, 255)), max_size=6), st.booleans())
def test_mutated_frames_end_at_worst_in_a_violation(changes: list[tuple[int, int]], opener: bool) -> None:
    data = bytearray(SPOKEN)
    for at, value in changes:
        data[at] = value
    mux = Mux(opener=opener, max_streams=8)
    kinds = [kind for kind, _, _ in mux.feed(bytes(data))]
    assert VIOLATION not in kinds[:-1]
    assert all(0 <= channel.room <= WINDOW for channel in mux.channels.values())


def test_a_piece_of_many_frames_is_read_in_turns() -> None:
    mux = Mux(opener=False)
    mux.feed(hello() + frame(1, OPEN, b'{"shard":"s","epoch":1}'))
    words = [frame(1, DATA, b"%d" % number) for number in range(2 * TURN_FRAMES + 10)]
    whole = b"".join(words)
    got = [mux.feed(whole[:-1])]
    while mux.behind:
        got.append(mux.feed(b""))
    assert [len(events) for events in got] == [TURN_FRAMES, TURN_FRAMES, 9]
    got.append(mux.feed(whole[-1:]))
    assert [payload for events in got for _, _, payload in events] == [word[8:] for word in words]
