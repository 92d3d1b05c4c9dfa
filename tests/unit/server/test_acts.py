from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from llmgw.admin.management import Refused
from llmgw.errors import LlmgwError
from llmgw.server.acts import carry_through


async def test_what_an_act_returns_is_its_answer() -> None:
    async def act() -> int:
        await trio.lowlevel.checkpoint()
        return 7

    assert await carry_through(act) == 7


async def test_an_act_that_fails_is_told_as_it_is() -> None:
    async def act() -> None:
        await trio.lowlevel.checkpoint()
        raise LlmgwError("the disk is full")

    with pytest.raises(LlmgwError, match="the disk is full"):
        await carry_through(act)


async def test_an_act_that_has_begun_is_carried_through_though_nobody_waits_any_more() -> None:
    done = False

    async def act() -> None:
        nonlocal done
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        done = True

    with trio.CancelScope() as asker:
        asker.cancel()
        await carry_through(act)
    assert done


async def test_a_store_that_hangs_is_not_waited_for(autojump_clock: MockClock) -> None:
    with pytest.raises(Refused) as caught:
        await carry_through(trio.sleep_forever)
    assert (caught.value.status, caught.value.code) == (503, "store_unavailable")
    assert "did not answer within 15 s" in caught.value.message
