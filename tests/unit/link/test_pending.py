"""Who gives way at a crowded port: whoever does nothing with the most places, and nobody who is at work."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import trio

from llmgw.link.pending import IDLE_SECONDS, MUTE_SECONDS, Pending, Visit


class Crowd:
    """Visits over real connections, each of an address that the test names."""

    def __init__(self, stack: ExitStack, places: int) -> None:
        self._stack = stack
        self._listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.pending = Pending(places)

    def come(self, address: str, at: float = 0.0) -> tuple[Visit, socket.socket]:
        client = self._stack.enter_context(socket.create_connection(self._listening.getsockname()))
        accepted, _ = self._listening.accept()
        self._stack.enter_context(accepted)
        accepted.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(accepted))
        visit = Visit(tcp=stream, peer=(address, 1), moved_at=at)
        self.pending.add(visit)
        return visit, client


@pytest.fixture
async def crowd() -> Iterator[Crowd]:
    with ExitStack() as stack:
        yield Crowd(stack, 4)


async def test_the_oldest_of_the_address_that_has_most_gives_way(crowd: Crowd) -> None:
    honest, _ = crowd.come("10.0.0.1")
    greedy = [crowd.come("10.0.0.66")[0] for _ in range(3)]
    assert crowd.pending.is_full
    assert crowd.pending.evict(MUTE_SECONDS) is greedy[0]
    assert greedy[0].scope.cancel_called
    assert not crowd.pending.is_full
    assert crowd.pending.evict(MUTE_SECONDS) is greedy[1]
    # one place each: the oldest
    assert crowd.pending.evict(MUTE_SECONDS) is honest


async def test_a_network_of_ipv6_is_one_address(crowd: Crowd) -> None:
    crowd.come("2001:db8:1::1")
    one, _ = crowd.come("2001:db8:2::1")
    crowd.come("2001:db8:2::ffff")
    crowd.come("an address that is gone")
    assert crowd.pending.evict(MUTE_SECONDS) is one


async def test_who_has_just_come_may_speak_first(crowd: Crowd) -> None:
    crowd.come("10.0.0.1", at=5.0)
    assert crowd.pending.evict(5.0 + MUTE_SECONDS - 0.01) is None


async def test_who_has_spoken_may_take_longer(crowd: Crowd) -> None:
    visit, client = crowd.come("10.0.0.1")
    client.send(b"hello")
    await visit.tcp.receive_some()
    assert crowd.pending.evict(IDLE_SECONDS - 0.01) is None
    assert crowd.pending.evict(IDLE_SECONDS) is visit


async def test_whose_words_we_have_not_read_keeps_its_place(crowd: Crowd) -> None:
    visit, client = crowd.come("10.0.0.1")
    client.send(b"hello")
    await trio.lowlevel.wait_readable(visit.tcp.socket)
    assert crowd.pending.evict(60.0) is None


async def test_a_place_that_is_freed_ends_the_wait(crowd: Crowd, autojump_clock: trio.testing.MockClock) -> None:
    visit, _ = crowd.come("10.0.0.1")

    async def free() -> None:
        await trio.sleep(1)
        crowd.pending.free(visit)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(free)
        await crowd.pending.wait_room(60)
    assert trio.current_time() == pytest.approx(1)
    await crowd.pending.wait_room(2)
    assert trio.current_time() == pytest.approx(3)
