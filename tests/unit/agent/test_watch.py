"""Looks that hang, in real threads: a thread can't be run on a clock that jumps."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import trio

from llmgw.agent.watch import Seen, Watch

# No test waits for so long.
NEVER = 1000.0


class Stuck:
    """Something that answers when it is let go, and counts who asks."""

    def __init__(self):
        self.asked = 0
        self.free = threading.Event()
        self.done = threading.Event()

    def read(self):
        self.asked += 1
        self.free.wait()
        self.done.set()
        return f"answer {self.asked}"


@contextmanager
def stuck():
    found = Stuck()
    try:
        yield found
    finally:
        # The thread would outlive the tests.
        found.free.set()


async def wait_back(watch):
    """Until the thread that hung has come back to its pool."""
    async with watch._limiter:
        pass


async def wait_silent(watch, driver):
    """Until it has hung for too long; before, its thread may not even have begun."""
    while not (seen := await watch.look(driver.read)).silent_seconds:
        pass
    return seen


async def test_what_answers_is_seen_each_time():
    watch = Watch("nothing", patience_seconds=NEVER, slow_seconds=NEVER)
    assert await watch.look(lambda: "one") == Seen(value="one")
    assert await watch.look(lambda: "two") == Seen(value="two")


async def test_what_hangs_is_what_it_was_and_for_how_long_is_told():
    watch = Watch("nothing", patience_seconds=0.01, slow_seconds=0.01)
    with trio.fail_after(60):
        while (await watch.look(lambda: "seen")).value != "seen":
            pass
    with stuck() as driver, trio.fail_after(60):
        first = await wait_silent(watch, driver)
        assert first.value == "seen"
        assert first.silent_seconds >= 0.01
        assert (await watch.look(driver.read)).silent_seconds >= first.silent_seconds


async def test_while_it_hangs_there_is_one_thread_and_nobody_waits():
    watch = Watch("nothing", patience_seconds=0.01, slow_seconds=0.01)
    with stuck() as driver, trio.fail_after(60):
        await wait_silent(watch, driver)
        for _ in range(1000):
            assert (await watch.look(driver.read)).value == "nothing"
        assert driver.asked == 1


async def test_when_it_comes_back_it_is_looked_at_again():
    watch = Watch("nothing", patience_seconds=0.01, slow_seconds=0.01)
    with stuck() as driver, trio.fail_after(60):
        await wait_silent(watch, driver)
    with trio.fail_after(60):
        await wait_back(watch)
    watch._patience_seconds = NEVER
    assert await watch.look(driver.read) == Seen(value="answer 2")


async def test_what_is_slow_is_not_dead_and_its_answer_is_kept():
    watch = Watch("nothing", patience_seconds=0.01, slow_seconds=NEVER)
    await watch.look(lambda: "seen")
    with stuck() as driver:
        assert await watch.look(driver.read) == Seen(value="seen")
        driver.free.set()
        with trio.fail_after(60):
            await wait_back(watch)
        driver.free.clear()
        assert await watch.look(driver.read) == Seen(value="answer 1")


@pytest.mark.parametrize("patient", [True, False])
async def test_the_first_look_waits_as_long_as_an_answer_may_take_and_others_when_they_are_told_to(nursery, patient):
    watch = Watch("nothing", patience_seconds=0.0, slow_seconds=NEVER)
    if patient:
        # (a look that does not wait may see nothing yet)
        while not watch._was_seen:
            await watch.look(lambda: "seen")
    with stuck() as driver:

        async def let_go():
            await trio.sleep(0.05)
            driver.free.set()

        nursery.start_soon(let_go)
        with trio.fail_after(60):
            assert await watch.look(driver.read, patient=patient) == Seen(value="answer 1")


async def test_what_it_raises_is_raised_and_it_is_looked_at_again():
    def fail():
        raise OSError("the test made it fail")

    watch = Watch("nothing", patience_seconds=NEVER, slow_seconds=NEVER)
    with pytest.raises(OSError, match="made it fail"):
        await watch.look(fail)
    assert await watch.look(lambda: "one") == Seen(value="one")
