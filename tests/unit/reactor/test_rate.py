from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from llmgw.reactor.rate import BURST_SECONDS, Rate


async def test_bytes_come_at_the_rate_whoever_takes_them(autojump_clock: MockClock) -> None:
    rate = Rate(1000)

    async def take() -> None:
        for _ in range(50):
            await rate.take(100)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        nursery.start_soon(take)
    assert trio.current_time() == pytest.approx(10.0 - BURST_SECONDS)


async def test_what_nobody_took_is_not_saved_up(autojump_clock: MockClock) -> None:
    rate = Rate(1000)
    await rate.take(100)
    await trio.sleep(1000)
    began = trio.current_time()
    await rate.take(2000)
    assert trio.current_time() - began == pytest.approx(2.0 - BURST_SECONDS)


async def test_without_a_rate_nobody_waits(autojump_clock: MockClock) -> None:
    await Rate(None).take(10**15)
    assert trio.current_time() == 0.0
