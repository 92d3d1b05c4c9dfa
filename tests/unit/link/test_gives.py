"""Who is lent a connection to a node, and what becomes of it; over real TLS it is test_relay.py."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from llmgw.core.node import NodeId
from llmgw.link.gives import Gives

A = NodeId("gpu-a")


class Toy:
    """A connection that rests until it is taken, as a ``Give`` does."""

    def __init__(self, name: str, node: NodeId = A) -> None:
        self.name = name
        self.node = node
        self.fit = True
        self.rests = 0
        self._renew()

    def _renew(self) -> None:
        self.free, self._back, self._taken, self.gone = trio.Event(), trio.Event(), trio.Event(), trio.Event()

    async def rest(self) -> None:
        self._renew()
        self.rests += 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_by, self._taken, nursery.cancel_scope)
            nursery.start_soon(self._end_by, self.gone, nursery.cancel_scope)
        if not self._taken.is_set():
            self.fit = False
            return
        self.free.set()
        await self._back.wait()

    async def _end_by(self, event: trio.Event, scope: trio.CancelScope) -> None:
        await event.wait()
        scope.cancel()

    def take(self) -> None:
        self._taken.set()

    def give_back(self) -> None:
        self._back.set()

    def close(self) -> None:
        self.fit = False
        self.free.set()


@pytest.fixture
def gives() -> Gives:
    return Gives()


async def keep(nursery: trio.Nursery, gives: Gives, *toys: Any) -> None:
    for toy in toys:
        nursery.start_soon(gives.keep, toy)
        await trio.testing.wait_all_tasks_blocked()


async def test_the_one_that_was_used_last_is_lent_first(gives: Gives, autojump_clock: MockClock) -> None:
    one, two = Toy("one"), Toy("two")
    async with trio.open_nursery() as nursery:
        await keep(nursery, gives, one, two)
        for _ in range(3):
            async with gives.borrow(A, seconds=1) as give:
                assert give is two
            await trio.sleep(0.01)
        async with gives.borrow(A, seconds=1) as first, gives.borrow(A, seconds=1) as second:
            assert [first, second] == [two, one]
            async with gives.borrow(A, seconds=1) as third:
                assert third is None
        nursery.cancel_scope.cancel()


async def test_nobody_is_lent_what_is_of_another_node(gives: Gives, autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        await keep(nursery, gives, Toy("one", NodeId("gpu-b")))
        async with gives.borrow(A, seconds=5) as give:
            assert give is None
        assert trio.current_time() == 5.0
        nursery.cancel_scope.cancel()


async def test_all_who_wait_get_theirs_one_after_the_other(gives: Gives, autojump_clock: MockClock) -> None:
    """Of many that are woken one has it, and the others go on waiting."""
    got: list[int] = []

    async def borrow(number: int) -> None:
        async with gives.borrow(A, seconds=100) as give:
            assert give is not None
            await trio.sleep(1)
            got.append(number)

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as borrowers:
            for number in range(20):
                borrowers.start_soon(borrow, number)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await keep(nursery, gives, Toy("one"))
        assert sorted(got) == list(range(20))
        assert 19 < trio.current_time() < 22
        nursery.cancel_scope.cancel()


async def test_what_is_not_fit_any_more_is_lent_to_nobody(gives: Gives, autojump_clock: MockClock) -> None:
    toy = Toy("one")
    async with trio.open_nursery() as nursery:
        await keep(nursery, gives, toy)
        async with gives.borrow(A, seconds=1) as give:
            assert give is not None
            give.fit = False
        async with gives.borrow(A, seconds=1) as give:
            assert give is None
        # its task has ended
        assert toy.rests == 1
        assert not nursery.child_tasks


async def test_one_that_goes_while_it_rests_is_lent_to_nobody(gives: Gives, autojump_clock: MockClock) -> None:
    toy = Toy("one")
    async with trio.open_nursery() as nursery:
        await keep(nursery, gives, toy)
        toy.gone.set()
        await trio.sleep(0.1)
        async with gives.borrow(A, seconds=1) as give:
            assert give is None


async def test_one_that_is_ended_while_it_is_lent_is_told_so(gives: Gives, autojump_clock: MockClock) -> None:
    toy: Any = Toy("one")
    scope = trio.CancelScope()

    async def end_early() -> None:
        with scope:
            await gives.keep(toy)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_early)
        await trio.testing.wait_all_tasks_blocked()
        async with gives.borrow(A, seconds=1) as give:
            assert give is toy
            scope.cancel()
            await trio.sleep(0.1)
            assert not toy.fit
        async with gives.borrow(A, seconds=1) as give:
            assert give is None
