"""When an agent keeps connections to give weights over, how many, and what it does where it gets none."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw.link.dial import DialFailed, Pace
from llmgw.link.giving import KEPT_SECONDS, MOST, SPARE, Giving


class Side:
    """What the agent dials, and how it answers: until a test says that a connection ends."""

    def __init__(self) -> None:
        self.dialled: list[float] = []
        self.open: list[Callable[[bool], None]] = []
        self.failure: Exception | None = None
        self.is_turned_away = False
        self.fault: Exception | None = None
        self.closed = 0
        self._ends: dict[Any, trio.Event] = {}

    async def dial(self) -> Any:
        await trio.sleep(0.01)
        self.dialled.append(trio.current_time())
        if self.failure is not None:
            raise self.failure
        socket = SimpleNamespace(close=self._close)
        return SimpleNamespace(transport_stream=SimpleNamespace(socket=socket))

    def _close(self) -> None:
        self.closed += 1

    async def answer(self, stream: Any, busy: Callable[[bool], None]) -> None:
        if self.is_turned_away:
            return
        end = self._ends[busy] = trio.Event()
        self.open.append(busy)
        try:
            await end.wait()
            if self.fault is not None:
                raise self.fault
        finally:
            self.open.remove(busy)

    def end(self, busy: Callable[[bool], None]) -> None:
        self._ends[busy].set()


@pytest.fixture
def side() -> Side:
    return Side()


@asynccontextmanager
async def giving(side: Side) -> AsyncIterator[Giving]:
    keeps = Giving(side.dial, side.answer, pace=Pace(), randomness=random.Random(1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeps.serve)
        yield keeps
        nursery.cancel_scope.cancel()


async def test_nothing_is_dialled_while_nobody_takes(side: Side, autojump_clock: MockClock) -> None:
    async with giving(side):
        await trio.sleep(1000)
    assert side.dialled == []


async def test_two_wait_and_one_more_is_dialled_for_each_that_is_asked(side: Side, autojump_clock: MockClock) -> None:
    async with giving(side) as keeps:
        keeps.want(True)
        await trio.sleep(5)
        assert len(side.open) == SPARE
        side.open[0](True)
        side.open[1](True)
        await trio.sleep(5)
        assert len(side.open) == 2 + SPARE
        # and those that are too many by then stay until they end by themselves
        side.open[0](False)
        await trio.sleep(5)
        assert len(side.open) == 2 + SPARE
        assert len(side.dialled) == 2 + SPARE


async def test_there_are_never_more_than_so_many(side: Side, autojump_clock: MockClock) -> None:
    async with giving(side) as keeps:
        keeps.want(True)
        for _ in range(3):
            await trio.sleep(5)
            for busy in side.open:
                busy(True)
        await trio.sleep(5)
        while len(side.open) < MOST:
            for busy in tuple(side.open):
                busy(True)
            await trio.sleep(5)
        for busy in side.open:
            busy(True)
        await trio.sleep(50)
        assert len(side.open) == MOST


async def test_what_ends_is_dialled_anew(side: Side, autojump_clock: MockClock) -> None:
    async with giving(side) as keeps:
        keeps.want(True)
        await trio.sleep(20)
        side.end(side.open[0])
        await trio.sleep(0.1)
        assert (len(side.open), len(side.dialled), side.closed) == (SPARE, SPARE + 1, 1)


async def test_all_end_a_while_after_nobody_takes_any_more(side: Side, autojump_clock: MockClock) -> None:
    async with giving(side) as keeps:
        keeps.want(True)
        await trio.sleep(5)
        keeps.want(False)
        await trio.sleep(KEPT_SECONDS - 1)
        keeps.want(True)
        await trio.sleep(KEPT_SECONDS + 1)
        assert (len(side.open), len(side.dialled)) == (SPARE, SPARE)
        keeps.want(False)
        await trio.sleep(KEPT_SECONDS + 1)
        assert (len(side.open), side.closed) == (0, SPARE)
        keeps.want(True)
        await trio.sleep(1)
        assert len(side.open) == SPARE


async def test_a_server_that_is_not_there_is_dialled_ever_more_rarely_and_told_once_a_minute(
    side: Side, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    side.failure = DialFailed("10.0.0.1:7443 refuses connections")
    async with giving(side) as keeps:
        keeps.want(True)
        await trio.sleep(90)
        assert 10 < len(side.dialled) < 30
        assert caplog.text.count("weights can't be given by way of the server: 10.0.0.1:7443 refuses connections") == 2
        side.failure = None
        await trio.sleep(20)
        assert len(side.open) == SPARE


async def test_a_server_that_turns_connections_away_is_not_dialled_at_once_again(
    side: Side, autojump_clock: MockClock
) -> None:
    side.is_turned_away = True
    async with giving(side) as keeps:
        keeps.want(True)
        await trio.sleep(90)
    assert len(side.dialled) < 40


async def test_a_fault_ends_one_connection_and_is_told(
    side: Side, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    side.fault = ValueError("what a fault")
    async with giving(side) as keeps:
        keeps.want(True)
        await trio.sleep(20)
        side.open[0](True)
        await trio.sleep(1)
        side.end(side.open[0])
        await trio.sleep(1)
        assert "ValueError: what a fault" in caplog.text
        assert len(side.open) == SPARE
