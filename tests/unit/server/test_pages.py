from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
from quart import Response
from quart_trio import QuartTrio
from trio.testing import MockClock, wait_all_tasks_blocked

from llmgw.server.pages import (
    ACCEPTING,
    HEAD_SECONDS,
    KEEP_ALIVE_SECONDS,
    LINGER_SECONDS,
    LOG_RECORDS,
    SPARING,
    WRITE_SECONDS,
    serve_pages,
)

# What no socket buffer holds: a client that does not read stops the writer.
MANY_BYTES = 8 * 1024 * 1024
DRAIN_SECONDS = 30.0
TICK_SECONDS = 10.0
GET = b"GET %s HTTP/1.1\r\nHost: door\r\n\r\n"


class Site:
    """An app with a page for each way to behave, and what became of the ones that were cut."""

    def __init__(self) -> None:
        self.app = QuartTrio("site")
        self.release = trio.Event()
        self.entered = trio.Event()
        self.left = trio.Event()
        add: Callable[..., None] = self.app.add_url_rule
        add("/", "hello", self.hello)
        add("/slow", "slow", self.slow)
        add("/endless", "endless", self.endless)
        add("/ticking", "ticking", self.ticking)
        add("/large", "large", self.large)
        add("/broken", "broken", self.broken)
        add("/broken-later", "broken_later", self.broken_later)

    async def hello(self) -> str:
        return "hello"

    async def slow(self) -> str:
        self.entered.set()
        await self.release.wait()
        return "at last"

    async def endless(self) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                yield b"first"
                self.entered.set()
                await trio.sleep_forever()
            finally:
                self.left.set()

        return Response(parts())

    async def ticking(self) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"tick"
                    await trio.sleep(TICK_SECONDS)
            finally:
                self.left.set()

        return Response(parts())

    async def large(self) -> bytes:
        self.entered.set()
        return bytes(MANY_BYTES)

    async def broken(self) -> str:
        raise RuntimeError("a page that fails")

    async def broken_later(self) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            raise RuntimeError("a page that fails half-way")

        return Response(parts())


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
async def path(site: Site, tmp_path: Path, nursery: trio.Nursery) -> str:
    where = str(tmp_path / "pages.sock")
    # No drain: under a clock that stands still it would never be over.
    await nursery.start(partial(serve_pages, site.app, where, drain_seconds=0))
    return where


async def ask(path: str, target: bytes = b"/") -> trio.SocketStream:
    """A connection on which one request is under way."""
    stream = await trio.open_unix_socket(path)
    await stream.send_all(GET % target)
    return stream


async def read_until(stream: trio.SocketStream, mark: bytes) -> bytes:
    """What comes up to ``mark``, or up to the end."""
    got = b""
    while mark not in got:
        more = await stream.receive_some()
        if not more:
            break
        got += more
    return got


async def read_all(stream: trio.SocketStream) -> bytes:
    got = bytearray()
    try:
        while more := await stream.receive_some():
            got += more
    except trio.BrokenResourceError:
        pass
    return bytes(got)


async def check_it_answers(path: str) -> None:
    async with await ask(path) as stream:
        assert (await read_until(stream, b"hello")).startswith(b"HTTP/1.1 200")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_page_is_served_without_naming_the_server(path: str) -> None:
    async with await ask(path) as stream:
        answer = await read_until(stream, b"hello")
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"server:" not in answer.lower()


async def test_a_connection_carries_many_requests_and_ends_when_idle(path: str, mock_clock: MockClock) -> None:
    async with await ask(path) as stream:
        await read_until(stream, b"hello")
        await stream.send_all(GET % b"/")
        assert (await read_until(stream, b"hello")).startswith(b"HTTP/1.1 200")
        await wait_all_tasks_blocked()
        mock_clock.jump(KEEP_ALIVE_SECONDS + 1)
        assert await read_all(stream) == b""


async def test_a_connection_that_says_nothing_ends(path: str, mock_clock: MockClock) -> None:
    async with await trio.open_unix_socket(path) as stream:
        await wait_all_tasks_blocked(0.01)
        mock_clock.jump(KEEP_ALIVE_SECONDS + 1)
        assert await read_all(stream) == b""


@pytest.mark.parametrize("before", [0, 2])
async def test_a_head_that_has_begun_has_less_time_to_end(path: str, mock_clock: MockClock, before: int) -> None:
    async with await trio.open_unix_socket(path) as stream:
        for _ in range(before):
            await stream.send_all(GET % b"/")
            await read_until(stream, b"hello")
        # However long nothing was said, and however often a byte comes then.
        await wait_all_tasks_blocked(0.01)
        mock_clock.jump(KEEP_ALIVE_SECONDS - 2 * HEAD_SECONDS)
        for _ in range(2):
            await stream.send_all(b"GE")
            await wait_all_tasks_blocked(0.01)
            mock_clock.jump(HEAD_SECONDS / 2 + 0.1)
        assert await read_all(stream) == b""
    await check_it_answers(path)


async def test_a_head_in_pieces_is_taken_and_its_body_has_its_own_time(
    path: str, site: Site, mock_clock: MockClock
) -> None:
    async with await trio.open_unix_socket(path) as stream:
        for piece in (b"GET /slow HTTP/1.1\r\n", b"Host: door\r\nContent-Length: 2\r\n\r\n", b"x"):
            await stream.send_all(piece)
            await wait_all_tasks_blocked(0.01)
            mock_clock.jump(HEAD_SECONDS - 1)
        await site.entered.wait()
        mock_clock.jump(KEEP_ALIVE_SECONDS)
        await stream.send_all(b"y")
        site.release.set()
        assert (await read_until(stream, b"at last")).startswith(b"HTTP/1.1 200")


async def test_more_connections_than_are_kept_are_closed_at_once(site: Site, tmp_path: Path) -> None:
    where = str(tmp_path / "pages.sock")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_pages, site.app, where, drain_seconds=0, max_connections=2))
        async with await ask(where) as first, await ask(where) as second:
            await read_until(first, b"hello")
            await read_until(second, b"hello")
            async with await trio.open_unix_socket(where) as third:
                assert await read_all(third) == b""
            await second.aclose()
            await wait_all_tasks_blocked(0.05)
            await check_it_answers(where)
        nursery.cancel_scope.cancel()


async def test_a_client_that_asks_for_the_end_gets_it(path: str) -> None:
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: door\r\nConnection: close\r\n\r\n")
        assert (await read_all(stream)).endswith(b"hello")


async def test_a_head_as_large_as_the_door_lets_through_is_taken(path: str) -> None:
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: door\r\nX: " + b"x" * (64 * 1024) + b"\r\n\r\n")
        assert (await read_until(stream, b"hello")).startswith(b"HTTP/1.1 200")


async def test_an_answer_may_be_late(path: str, site: Site, mock_clock: MockClock) -> None:
    async with await ask(path, b"/slow") as stream:
        await site.entered.wait()
        mock_clock.jump(600)
        site.release.set()
        assert (await read_until(stream, b"at last")).startswith(b"HTTP/1.1 200")


async def test_an_answer_may_take_long(path: str, mock_clock: MockClock) -> None:
    async with await ask(path, b"/ticking") as stream:
        for _ in range(30):
            assert b"tick" in await read_until(stream, b"tick")
            await wait_all_tasks_blocked(0.001)
            mock_clock.jump(TICK_SECONDS)


async def test_a_client_that_leaves_ends_its_page(path: str, site: Site) -> None:
    async with await ask(path, b"/endless") as stream:
        await read_until(stream, b"first")
        await site.entered.wait()
    await site.left.wait()
    await check_it_answers(path)


async def test_a_page_that_fails_is_a_500_and_ends_nothing(path: str) -> None:
    async with await ask(path, b"/broken") as stream:
        assert (await read_until(stream, b"\r\n\r\n")).startswith(b"HTTP/1.1 500")
    await check_it_answers(path)


async def test_a_page_that_fails_half_way_is_cut_and_ends_nothing(path: str) -> None:
    async with await ask(path, b"/broken-later") as stream:
        answer = await read_all(stream)
    assert b"first" in answer
    assert not answer.endswith(b"0\r\n\r\n")
    await check_it_answers(path)


async def test_an_upgrade_with_bytes_behind_it_ends_only_itself(path: str) -> None:
    upgrade = (
        b"GET /nothing HTTP/1.1\r\nHost: door\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\ntrailing bytes"
    )
    for _ in range(10):
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(upgrade)
            await read_all(stream)
    await check_it_answers(path)


@pytest.mark.slow
async def test_nothing_odd_ends_the_pages_or_stays_behind(path: str, mock_clock: MockClock) -> None:
    chance = random.Random(20)
    seeds = [
        GET % b"/",
        b"POST / HTTP/1.1\r\nHost: door\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost:a\r\nConnection: upgrade, http2-settings\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
        (GET % b"/") * 3,
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\nx",
    ]
    await check_it_answers(path)
    before = open_descriptors()
    for _ in range(300):
        request = bytearray(chance.choice(seeds))
        for _ in range(chance.randrange(4)):
            request[chance.randrange(len(request))] = chance.randrange(256)
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(bytes(request))
            if chance.random() < 0.5:
                await stream.send_eof()
            await wait_all_tasks_blocked()
    mock_clock.jump(LINGER_SECONDS + 1)
    await wait_all_tasks_blocked(0.05)
    await check_it_answers(path)
    await wait_all_tasks_blocked(0.05)
    assert open_descriptors() <= before


async def test_a_request_behind_an_answer_that_is_cut_goes_with_its_client(
    path: str, site: Site, mock_clock: MockClock
) -> None:
    before = open_descriptors()
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all((GET % b"/ticking") + (GET % b"/"))
        await read_until(stream, b"tick")
    await wait_all_tasks_blocked(0.01)
    # The reader waits for its turn and does not see the end: the next write does.
    mock_clock.jump(TICK_SECONDS)
    await site.left.wait()
    await wait_all_tasks_blocked(0.01)
    mock_clock.jump(LINGER_SECONDS + 0.1)
    await wait_all_tasks_blocked(0.01)
    assert open_descriptors() <= before


async def test_a_client_that_never_reads_is_cut(path: str, site: Site, mock_clock: MockClock) -> None:
    async with await ask(path, b"/large") as stream:
        await site.entered.wait()
        await wait_all_tasks_blocked(0.05)
        mock_clock.jump(WRITE_SECONDS + 1)
        assert len(await read_all(stream)) < MANY_BYTES


async def test_a_running_answer_ends_before_the_pages_do(site: Site, tmp_path: Path) -> None:
    where = str(tmp_path / "pages.sock")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_pages, site.app, where, drain_seconds=DRAIN_SECONDS))
        idle = await ask(where)
        await read_until(idle, b"hello")
        running = await ask(where, b"/slow")
        await site.entered.wait()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            async with idle, running:
                assert await read_all(idle) == b""
                with pytest.raises(OSError, match=r"refused|No such file"):
                    await trio.open_unix_socket(where)
                site.release.set()
                assert b"at last" in await read_all(running)
    assert not await trio.Path(where).exists()


async def ask_port(port: int, target: bytes = b"/") -> trio.SocketStream:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    await stream.send_all(GET % target)
    return stream


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


async def test_a_port_is_served_under_the_same_guards(
    site: Site, listening: socket.socket, nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    port = listening.getsockname()[1]
    await nursery.start(partial(serve_pages, site.app, listening, drain_seconds=0))
    async with await ask_port(port, b"/broken-later") as stream:
        assert not (await read_all(stream)).endswith(b"0\r\n\r\n")
    for odd in (b"\0\xff\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", GET[:9]):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(odd)
            await wait_all_tasks_blocked(0.01)
    async with await ask_port(port) as stream:
        answer = await read_until(stream, b"hello")
        assert answer.startswith(b"HTTP/1.1 200")
        await wait_all_tasks_blocked(0.01)
        mock_clock.jump(KEEP_ALIVE_SECONDS + 1)
        assert await read_all(stream) == b""


async def test_a_port_is_closed_at_the_end_and_its_answers_end_first(site: Site, listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_pages, site.app, listening, drain_seconds=DRAIN_SECONDS))
        running = await ask_port(port, b"/slow")
        await site.entered.wait()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            async with running:
                await wait_all_tasks_blocked(0.01)
                with pytest.raises(OSError, match=r"refused|all attempts"):
                    await trio.open_tcp_stream("127.0.0.1", port)
                site.release.set()
                assert b"at last" in await read_all(running)
    assert listening.fileno() == -1


@pytest.mark.parametrize("target", [b"/large", b"/endless"])
async def test_an_answer_that_does_not_end_is_cut_after_the_drain(
    site: Site, tmp_path: Path, mock_clock: MockClock, target: bytes
) -> None:
    where = str(tmp_path / "pages.sock")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_pages, site.app, where, drain_seconds=DRAIN_SECONDS))
        stream = await ask(where, target)
        await site.entered.wait()
        await wait_all_tasks_blocked(0.05)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked(0.05)
            mock_clock.jump(DRAIN_SECONDS + 0.1)
            async with stream:
                answer = await read_all(stream)
    # It also came this far: the shielded write of /large has WRITE_SECONDS, and nobody has jumped over those.
    assert len(answer) < MANY_BYTES
    assert not answer.endswith(b"0\r\n\r\n")


def test_a_flood_of_failures_is_not_a_flood_of_records() -> None:
    record = logging.makeLogRecord({"created": 5_000_000_000.0})
    passed = sum(SPARING.filter(record) for _ in range(10 * LOG_RECORDS))
    assert passed == LOG_RECORDS
    later = logging.makeLogRecord({"created": 5_000_000_100.0})
    assert SPARING.filter(later)
    SPARING.window, SPARING.passed = 0.0, 0


def test_a_loop_that_cannot_accept_says_so_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("trio.serve_listeners")
    logger.addFilter(ACCEPTING)
    ACCEPTING.window, ACCEPTING.passed = 0.0, 0
    for _ in range(10):
        try:
            raise OSError(24, "Too many open files")
        except OSError:
            logger.exception("accept returned EMFILE")
    (record,) = (record for record in caplog.records if record.name == logger.name)
    assert record.exc_info is None
    ACCEPTING.window, ACCEPTING.passed = 0.0, 0
