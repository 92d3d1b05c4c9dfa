from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llmgw.admin.following import Followers
from llmgw.admin.reading import Since
from llmgw.admin.views import EventsView

NOTHING = EventsView(events=(), last=0, began=1.0)


class Quiet:
    """A server where nothing happens: it answers once the time is over that may be waited."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def events(
        self, *, after: int, wait_seconds: float = 0.0, model: str | None = None, node: str | None = None
    ) -> EventsView:
        self.waits.append(wait_seconds)
        await trio.sleep(wait_seconds)
        return NOTHING


async def test_one_too_many_is_answered_at_once(mock_clock: MockClock) -> None:
    quiet = Quiet()
    followers = Followers(quiet, most=2)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(followers.look, Since(wait=20))
        await wait_all_tasks_blocked()
        assert await followers.look(Since(wait=20)) == NOTHING
        assert quiet.waits == [20, 20, 0]
        mock_clock.jump(20)
    await _look_for(mock_clock, followers)
    assert quiet.waits[3:] == [20], "their places are free again"


async def test_one_that_hangs_up_leaves_its_place(mock_clock: MockClock) -> None:
    quiet = Quiet()
    followers = Followers(quiet, most=1)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(followers.look, Since(wait=60))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    await _look_for(mock_clock, followers)
    assert quiet.waits == [60, 20]


async def test_who_does_not_wait_takes_no_place() -> None:
    quiet = Quiet()
    followers = Followers(quiet, most=0)  # type: ignore[arg-type]
    assert await followers.look(Since(after=3)) == NOTHING
    assert quiet.waits == [0]


async def _look_for(clock: MockClock, followers: Followers) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(followers.look, Since(wait=20))
        await wait_all_tasks_blocked()
        clock.jump(20)
