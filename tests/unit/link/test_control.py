"""A control link, over streams in memory: what is said arrives, and no peer can hold it up for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock, memory_stream_pair
from trio_websocket import ConnectionRejected, WebSocketRequest

from llmgw.errors import LinkLost
from llmgw.link.control import (
    LOOK_SECONDS,
    NODE_HEADER,
    PATH,
    PING_SECONDS,
    PONG_SECONDS,
    QUEUE_BYTES,
    QUEUE_MESSAGES,
    STALL_SECONDS,
    Control,
    Tap,
    ask_upgrade,
    read_upgrade,
)
from llmgw.link.inlet import MESSAGE_FRAMES, TURN_FRAMES
from llmgw.wire import MAX_MESSAGE_BYTES


class Line(trio.abc.Stream):
    """A stream that can be cut as a cable is (nothing arrives any more), or jammed (nothing is taken any more)."""

    def __init__(self, below: trio.abc.Stream) -> None:
        self.below = below
        self.is_cut = False
        self.is_jammed = False
        self.written = 0
        self._reading = trio.CancelScope()

    async def send_all(self, data: Any) -> None:
        if self.is_jammed:
            await trio.sleep_forever()
        self.written += len(data)
        if not self.is_cut:
            await self.below.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        with trio.CancelScope() as self._reading:
            data = await self.below.receive_some(max_bytes)
            if self.is_cut:
                await trio.sleep_forever()
            return data
        raise trio.ClosedResourceError

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        if self.is_cut:
            self._reading.cancel()
            await trio.lowlevel.checkpoint()
        else:
            await self.below.aclose()


class Pair:
    """Two ends, a line each."""

    def __init__(self, server: Control, agent: Control, server_line: Line, agent_line: Line) -> None:
        self.server, self.agent = server, agent
        self.server_line, self.agent_line = server_line, agent_line
        self.nursery: trio.Nursery

    async def look(self) -> None:
        """As whoever has links does."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            self.server.look()
            self.agent.look()

    async def wait_ends(self) -> dict[str, str]:
        """Why each end says that the link is over, once it is for both."""
        return {"server": await self._wait_end(self.server), "agent": await self._wait_end(self.agent)}

    async def _wait_end(self, control: Control) -> str:
        while True:
            try:
                await control.receive()
            except LinkLost as lost:
                return lost.message


@asynccontextmanager
async def linked() -> AsyncIterator[Pair]:
    """Two ends with the upgrade done."""
    one, two = memory_stream_pair()
    lines = Line(one), Line(two)
    taps = Tap(lines[0]), Tap(lines[1])
    async with trio.open_nursery() as nursery:
        made: dict[str, Any] = {}

        async def accept() -> None:
            request = await read_upgrade(nursery, taps[0])
            made["server"] = await request.accept()

        async def ask() -> None:
            made["agent"] = await ask_upgrade(nursery, taps[1], host="server:7443", node="gpu-1")

        async with trio.open_nursery() as opening:
            opening.start_soon(accept)
            opening.start_soon(ask)
        pair = Pair(
            Control(made["server"], taps[0], nursery, peer="the agent"),
            Control(made["agent"], taps[1], nursery, peer="the server"),
            *lines,
        )
        pair.nursery = nursery
        nursery.start_soon(pair.look)
        yield pair
        nursery.cancel_scope.cancel()


async def test_what_is_sent_arrives_in_order_on_both_ends() -> None:
    async with linked() as pair:
        for number in range(300):
            pair.server.send(b"down %d" % number)
            pair.agent.send(b"up %d" % number)
        assert [await pair.agent.receive() for _ in range(300)] == [b"down %d" % number for number in range(300)]
        assert [await pair.server.receive() for _ in range(300)] == [b"up %d" % number for number in range(300)]


async def test_the_largest_message_passes() -> None:
    async with linked() as pair:
        largest = b"x" * MAX_MESSAGE_BYTES
        pair.agent.send(largest)
        assert await pair.server.receive() == largest


async def test_a_message_that_is_too_large_ends_the_link(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        pair.agent.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        with pytest.raises(LinkLost, match="maximum message size"):
            await pair.server.receive()
        with pytest.raises(LinkLost, match="maximum message size"):
            await pair.agent.receive()


async def test_the_upgrade_says_which_node_asks_and_for_what() -> None:
    one, two = memory_stream_pair()
    seen: list[WebSocketRequest] = []
    async with trio.open_nursery() as nursery:

        async def accept() -> None:
            seen.append(await read_upgrade(nursery, Tap(one)))
            await seen[0].accept()

        nursery.start_soon(accept)
        await ask_upgrade(nursery, Tap(two), host="server:7443", node="gpu-1")
        nursery.cancel_scope.cancel()
    assert seen[0].path == PATH
    assert dict(seen[0].headers)[NODE_HEADER.encode()] == b"gpu-1"


async def test_a_refused_upgrade_comes_with_its_words() -> None:
    one, two = memory_stream_pair()

    async def refuse(nursery: trio.Nursery) -> None:
        await (await read_upgrade(nursery, Tap(one))).reject(403, body=b"no")

    async def ask() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse, nursery)
            await _ask(nursery, Tap(two))

    with pytest.raises(BaseExceptionGroup) as caught:
        await ask()
    [rejected] = caught.value.exceptions
    assert isinstance(rejected, ConnectionRejected)
    assert (rejected.status_code, rejected.body) == (403, b"no")


async def test_a_peer_that_goes_before_the_upgrade_is_noticed_at_either_end() -> None:
    for upgrade in (read_upgrade, _ask):
        one, two = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            await two.aclose()
            with trio.fail_after(10), pytest.raises(LinkLost):
                await upgrade(nursery, Tap(one))
            nursery.cancel_scope.cancel()


async def _ask(nursery: trio.Nursery, tap: Tap) -> Any:
    return await ask_upgrade(nursery, tap, host="server:7443", node="gpu-1")


# -- silence


@pytest.mark.slow
async def test_a_quiet_link_lives_on(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        await trio.sleep(3600)
        assert pair.server.lost is None
        assert pair.agent.lost is None
        assert trio.current_time() - pair.server.heard_at <= PING_SECONDS + LOOK_SECONDS
        pair.server.send(b"still here")
        assert await pair.agent.receive() == b"still here"


@pytest.mark.parametrize("which", ["server_line", "agent_line"])
async def test_a_cut_cable_is_noticed_at_both_ends(autojump_clock: MockClock, which: str) -> None:
    async with linked() as pair:
        await trio.sleep(60)
        getattr(pair, which).is_cut = True
        began = trio.current_time()
        ends = await pair.wait_ends()
        assert trio.current_time() - began <= PING_SECONDS + LOOK_SECONDS + PONG_SECONDS < 15
        assert ends["server"].startswith("nothing was heard of the agent for 1")
        assert ends["agent"].startswith("nothing was heard of the server for 1")


async def test_who_hears_of_its_peer_does_not_ping(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        before = pair.server_line.written
        for _ in range(100):
            await trio.sleep(PING_SECONDS / 2)
            pair.agent.send(b"word")
            await pair.server.receive()
        # the answers to the pings of the agent, which hears nothing else
        assert pair.server_line.written - before < 100 * 6


async def test_a_peer_is_asked_whether_it_lives(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        assert await pair.server.is_alive(5)
        pair.agent_line.is_cut = True
        assert not await pair.server.is_alive(5)


async def test_a_link_that_is_over_is_not_alive(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        await pair.agent.close("enough")
        await pair.wait_ends()
        assert not await pair.server.is_alive(5)


async def test_a_pause_of_our_own_is_not_taken_for_the_peers_silence(mock_clock: MockClock) -> None:
    async with linked() as pair:
        pair.agent_line.is_cut = True
        answers: list[bool] = []

        async def ask() -> None:
            answers.append(await pair.server.is_alive(5))

        pair.nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        # as after a stopped machine: the limit is long over before anything could be read
        mock_clock.jump(60)
        await trio.testing.wait_all_tasks_blocked()
        assert answers == []
        pair.agent_line.is_cut = False
        mock_clock.jump(0.1)
        pair.agent.send(b"here")
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(5)
        await trio.testing.wait_all_tasks_blocked()
        assert answers == [True]


# -- what a peer makes of its frames


def piece(first: int, payload: bytes = b"") -> bytes:
    """A frame of an agent, with a mask that changes nothing."""
    return bytes([first, 0x80 | len(payload)]) + bytes(4) + payload


@asynccontextmanager
async def raw() -> AsyncIterator[tuple[Control, trio.abc.Stream]]:
    """The server's end, and the bare line to it of an agent that was let in."""
    one, two = memory_stream_pair()
    tap = Tap(one)
    async with trio.open_nursery() as nursery:
        lines = ("Host: x", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
        head = "\r\n".join((f"GET {PATH} HTTP/1.1", *lines, "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "", ""))
        await two.send_all(head.encode())
        ws = await (await read_upgrade(nursery, tap)).accept()
        assert b" 101 " in await two.receive_some(65536)
        yield Control(ws, tap, nursery, peer="the agent"), two
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("part", [b"", b"x", b"xy"])
async def test_a_message_in_endless_pieces_ends_the_link(part: bytes) -> None:
    async with raw() as (control, line):
        await line.send_all(piece(0x02, part) + piece(0x00, part) * 5000)
        with trio.fail_after(60), pytest.raises(LinkLost, match="a message in more than 256 frames"):
            await control.receive()


async def test_a_message_may_come_in_some_pieces_with_words_between() -> None:
    async with raw() as (control, line):
        middle = (piece(0x00, b"b") + piece(0x8A)) * (MESSAGE_FRAMES - 2)
        await line.send_all((piece(0x02, b"a") + middle + piece(0x80, b"c")) * 2)
        for _ in range(2):
            assert await control.receive() == b"a" + b"b" * (MESSAGE_FRAMES - 2) + b"c"


async def test_many_small_frames_in_one_piece_do_not_hold_the_loop() -> None:
    async with raw() as (control, line):
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            # unasked pongs: nobody hears of them, and each is work
            await line.send_all(piece(0x8A) * 2000 + piece(0x82, b"done"))
            before = turns
            assert await control.receive() == b"done"
            assert turns - before >= 2000 / (2 * TURN_FRAMES)
            nursery.cancel_scope.cancel()


# -- writes


async def test_a_write_that_is_not_taken_ends_the_link(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        pair.server_line.is_jammed = True
        began = trio.current_time()
        pair.server.send(b"word")
        with pytest.raises(LinkLost):
            await pair.server.receive()
        assert "took nothing for 10 s" in (pair.server.lost or "")
        assert trio.current_time() - began <= STALL_SECONDS + 1


@pytest.mark.parametrize(("size", "count"), [(1, QUEUE_MESSAGES), (QUEUE_BYTES // 8, 9)])
async def test_what_waits_for_a_slow_reader_is_bounded(autojump_clock: MockClock, size: int, count: int) -> None:
    async with linked() as pair:
        pair.server_line.is_jammed = True
        for _ in range(count):
            pair.server.send(b"x" * size)
        assert pair.server.lost is None
        pair.server.send(b"one more")
        assert pair.server.lost == f"the agent reads too slowly: {count} messages wait for it"
        pair.server.send(b"and after its end")
        with pytest.raises(LinkLost, match="reads too slowly"):
            await pair.server.receive()


async def test_a_torn_write_is_the_last_one() -> None:
    one, _ = memory_stream_pair()
    line = Line(one)
    tap = Tap(line)
    line.is_jammed = True
    with trio.move_on_after(0.01):
        await tap.send_all(b"half of this")
    line.is_jammed = False
    with pytest.raises(trio.BrokenResourceError, match="not finished"):
        await tap.send_all(b"and more")


# -- ends


async def test_close_sends_what_waits_and_says_why(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        for number in range(200):
            pair.server.send(b"word %d" % number)
        pair.nursery.start_soon(pair.server.close, "it was revoked")
        for number in range(200):
            assert await pair.agent.receive() == b"word %d" % number
        with pytest.raises(LinkLost, match=r"^it was revoked$"):
            await pair.agent.receive()
        assert await pair.wait_ends() == {"server": "it was revoked", "agent": "it was revoked"}


async def test_a_long_goodbye_is_cut_to_what_a_frame_holds(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        pair.nursery.start_soon(pair.agent.close, "ü" * 500)
        with pytest.raises(LinkLost) as caught:
            await pair.server.receive()
        assert caught.value.message == "ü" * 60


async def test_closing_before_a_dead_peer_ends(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        pair.server_line.is_jammed = pair.agent_line.is_cut = True
        pair.server.send(b"word")
        began = trio.current_time()
        await pair.server.close("enough")
        assert trio.current_time() - began < 10


async def test_closing_twice_is_closing_once(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        pair.nursery.start_soon(pair.server.close, "first")
        pair.nursery.start_soon(pair.server.close, "second")
        with pytest.raises(LinkLost, match=r"first|second"):
            await pair.agent.receive()
        await pair.server.close("third")
        ends = await pair.wait_ends()
        assert ends["server"] == ends["agent"] != "third"


async def test_a_connection_that_breaks_ends_both_tasks(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        await pair.agent_line.below.aclose()
        with pytest.raises(LinkLost, match="the peer closed the connection"):
            await pair.server.receive()
        assert "server" in await pair.wait_ends()


async def test_what_came_before_the_end_is_received_first(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        pair.agent.send(b"last words")
        await pair.agent.close("bye")
        await trio.sleep(1)
        assert await pair.server.receive() == b"last words"
        with pytest.raises(LinkLost, match="bye"):
            await pair.server.receive()


async def test_an_end_is_noticed_while_nobody_receives(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        await pair.agent.close("bye")
        assert pair.server.lost is None
        await trio.sleep(PING_SECONDS + LOOK_SECONDS)
        assert pair.server.lost == "bye"


async def test_a_word_to_a_peer_that_has_closed_ends_the_link(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        await pair.agent.close("bye")
        pair.server.send(b"too late")
        assert (await pair.wait_ends())["server"] == "bye"


async def test_a_goodbye_without_words_has_some_of_ours(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        await pair.agent.close("")
        with pytest.raises(LinkLost, match=r"^the agent closed the link \(normal_closure\)$"):
            await pair.server.receive()


@pytest.mark.parametrize("garbage", [b"\xff" * 40, b"\x81\x05hello", b"\x88\x01x", b"GET / HTTP/1.1\r\n\r\n"])
async def test_garbage_below_the_websocket_ends_the_link(autojump_clock: MockClock, garbage: bytes) -> None:
    async with linked() as pair:
        await pair.agent_line.below.send_all(garbage)
        with pytest.raises(LinkLost) as caught:
            await pair.server.receive()
        assert caught.value.message
        assert "server" in await pair.wait_ends()


async def test_a_message_of_text_is_taken_as_its_bytes() -> None:
    async with linked() as pair:
        await pair.agent._ws.send_message("läuft")
        assert await pair.server.receive() == "läuft".encode()


async def test_a_link_that_is_given_up_takes_and_sends_nothing_more() -> None:
    async with linked() as pair:
        pair.nursery.cancel_scope.cancel()
    pair.server.give_up()
    pair.server.send(b"word")
    pair.server.look(ping_seconds=0)
    assert pair.server.lost == "the link was given up here"


async def test_an_idle_link_has_no_task_but_the_readers(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        idle = len(pair.nursery.child_tasks)
        pair.server_line.is_jammed = True
        for _ in range(10):
            pair.server.send(b"word")
        await trio.testing.wait_all_tasks_blocked()
        assert len(pair.nursery.child_tasks) == idle + 1
        await trio.sleep(STALL_SECONDS / 2)
        pair.server_line.is_jammed = False
    async with linked() as pair:
        pair.server.send(b"word")
        await pair.agent.receive()
        await trio.testing.wait_all_tasks_blocked()
        assert len(pair.nursery.child_tasks) == idle
