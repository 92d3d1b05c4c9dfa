from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing

from llmgw.store.faults import StoreBusy, StoreFailed
from llmgw.store.lanes import MAX_TOGETHER, Inline, Lanes, Threads
from llmgw.store.writing import Write


def nothing(connection: sqlite3.Connection) -> Any:
    return connection


class Disk:
    """Commits when it is let, and notes how many at a time, and on which thread."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.ready.set()
        self.batches: list[int] = []
        self.written: list[Write] = []
        self.threads: set[int] = set()
        self.ends: list[int] = []

    def end(self) -> None:
        self.ends.append(len(self.written))

    def commit(self, writes: Sequence[Write]) -> None:
        assert self.ready.wait(60)
        self.threads.add(threading.get_ident())
        self.batches.append(len(writes))
        self.written += writes
        for write in writes:
            write.value = "written"


@pytest.fixture(params=["threads", "inline"])
def lanes(request: pytest.FixtureRequest) -> Lanes:
    return Threads() if request.param == "threads" else Inline()


async def test_a_write_is_done_when_its_caller_goes_on(lanes: Lanes) -> None:
    disk = Disk()
    writer = lanes.start_writer(disk.commit, disk.end)
    write = Write(nothing)
    await writer.put(write)
    assert write.value == "written"
    await writer.close()


async def test_a_closed_writer_takes_nothing_more(lanes: Lanes) -> None:
    disk = Disk()
    writer = lanes.start_writer(disk.commit, disk.end)
    await writer.close()
    await writer.close()
    with pytest.raises(StoreFailed, match="is closed"):
        await writer.put(Write(nothing))
    assert disk.written == []
    assert disk.ends == [0]


async def test_what_is_cancelled_before_it_is_taken_on_is_not_written(lanes: Lanes) -> None:
    disk = Disk()
    writer = lanes.start_writer(disk.commit, disk.end)
    with trio.CancelScope() as scope:
        scope.cancel()
        await writer.put(Write(nothing))
    await writer.close()
    assert scope.cancelled_caught
    assert disk.written == []


async def test_work_gives_its_value_and_its_error(lanes: Lanes) -> None:
    assert await lanes.run(lambda: 7) == 7
    with pytest.raises(KeyError):
        await lanes.run(lambda: {}["x"])


async def test_inline_is_on_the_spot() -> None:
    disk = Disk()
    writer = Inline().start_writer(disk.commit, disk.end)
    await writer.put(Write(nothing))
    await Inline().run(lambda: disk.threads.add(threading.get_ident()))
    assert disk.threads == {threading.get_ident()}


async def test_all_that_waits_is_committed_together_on_one_thread() -> None:
    disk = Disk()
    writer = Threads().start_writer(disk.commit, disk.end)
    disk.ready.clear()
    async with trio.open_nursery() as nursery:
        for _ in range(MAX_TOGETHER + 50):
            nursery.start_soon(writer.put, Write(nothing))
        await trio.testing.wait_all_tasks_blocked()
        disk.ready.set()
    await writer.close()
    assert sum(disk.batches) == MAX_TOGETHER + 50
    # The first batch may have begun with a few of them; the rest came in as few as could be.
    assert len(disk.batches) <= 3
    assert max(disk.batches) <= MAX_TOGETHER
    assert len(disk.threads) == 1
    assert threading.get_ident() not in disk.threads


async def test_a_caller_that_is_cancelled_loses_nothing() -> None:
    disk = Disk()
    writer = Threads().start_writer(disk.commit, disk.end)
    disk.ready.clear()
    write = Write(nothing)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.put, write)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    disk.ready.set()
    await writer.close()
    assert disk.written == [write]
    assert write.value == "written"


async def test_closing_writes_what_was_taken_on_first() -> None:
    disk = Disk()
    writer = Threads().start_writer(disk.commit, disk.end)
    disk.ready.clear()
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(writer.put, Write(nothing))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(writer.close)
        await trio.testing.wait_all_tasks_blocked()
        disk.ready.set()
    assert len(disk.written) == 10
    assert disk.ends == [10]


async def test_too_much_that_waits_is_refused_at_once_and_taken_later() -> None:
    disk = Disk()
    writer = Threads(max_waiting=3).start_writer(disk.commit, disk.end)
    disk.ready.clear()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(writer.put, Write(nothing))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(StoreBusy, match="3 writes wait for the disk of the store already: try again later"):
            await writer.put(Write(nothing))
        disk.ready.set()
    await writer.put(Write(nothing))
    await writer.close()
    assert len(disk.written) == 4


async def test_work_that_may_be_left_goes_on_by_itself_and_keeps_the_next_waiting() -> None:
    lanes, ready, done = Threads(), threading.Event(), threading.Event()

    def work() -> None:
        assert ready.wait(60)
        done.set()

    with trio.move_on_after(0.01) as scope:
        await lanes.run(work, may_leave=True)
    assert scope.cancelled_caught
    assert not done.is_set()
    ready.set()
    assert await lanes.run(done.is_set)


def test_a_thread_that_outlives_trio_ends_quietly() -> None:
    disk = Disk()

    async def leave() -> None:
        writer = Threads().start_writer(disk.commit, disk.end)
        disk.ready.clear()
        with trio.move_on_after(0.01):
            await writer.put(Write(nothing))

    before = set(threading.enumerate())
    trio.run(leave)
    (thread,) = (each for each in set(threading.enumerate()) - before if each.name == "store")
    assert thread.daemon
    disk.ready.set()
    for _ in range(6000):
        if disk.written:
            break
        thread.join(0.01)
    assert len(disk.written) == 1
