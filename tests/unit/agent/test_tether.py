"""How long a node has been without a server, by a clock that jumps."""

from __future__ import annotations

import pytest
import trio

from llmgw.agent.tether import Tether


@pytest.fixture
async def watched(autojump_clock, nursery):
    """A tether, and when it was given up, for a limit of 75 seconds."""
    tether, given_up = Tether(), []
    limit = lambda: 75.0  # noqa: E731
    nursery.start_soon(tether.watch, limit, lambda seconds: given_up.append((trio.current_time(), seconds)))
    return tether, given_up


async def test_a_loss_is_given_up_once(autojump_clock, watched):
    tether, given_up = watched
    with tether.holding():
        await trio.sleep(1000)
    assert not tether.overdue
    await trio.sleep(10_000)
    assert given_up == [(1075, 75)]
    assert tether.overdue


async def test_nothing_is_given_up_before_there_was_a_link(autojump_clock, watched):
    tether, given_up = watched
    await trio.sleep(10_000)
    assert (given_up, tether.overdue) == ([], False)


async def test_each_loss_counts_from_its_own_beginning(autojump_clock, watched):
    tether, given_up = watched
    for _ in range(3):
        with tether.holding():
            await trio.sleep(1)
        await trio.sleep(74)
    with tether.holding():
        assert given_up == []
    await trio.sleep(200)
    with tether.holding():
        assert not tether.overdue
    await trio.sleep(200)
    assert given_up == [(300, 75), (500, 75)]


async def test_a_link_that_fails_is_lost_as_well(autojump_clock, watched):
    tether, given_up = watched
    with pytest.raises(ZeroDivisionError), tether.holding():
        raise ZeroDivisionError
    await trio.sleep(100)
    assert given_up == [(75, 75)]


@pytest.mark.parametrize("seed", range(8))
async def test_a_link_that_is_back_in_the_very_moment_is_back(autojump_clock, watched, seed):
    tether, given_up = watched
    with tether.holding():
        await trio.sleep(1)
    await trio.sleep(75)
    # either it was given up first, and is over, or it never was
    with tether.holding():
        before = list(given_up)
        await trio.sleep(1000)
        assert given_up == before
        assert not tether.overdue


async def test_what_has_no_limit_lasts(autojump_clock, nursery):
    tether, limits = Tether(), [None, 5.0]
    given_up = []
    nursery.start_soon(tether.watch, lambda: limits.pop(0), given_up.append)
    with tether.holding():
        await trio.sleep(1)
    await trio.sleep(1000)
    assert given_up == []
    with tether.holding():
        await trio.sleep(1)
    await trio.sleep(6)
    assert given_up == [5.0]
