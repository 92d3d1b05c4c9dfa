"""Which shard has which GPU: who comes second waits, and is told for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing

from llmgw.agent.taken import Taken


class Waiter:
    """A shard that takes its GPUs, and what it was told."""

    def __init__(self, spec):
        self.spec = spec
        self.told = []
        self.has = False
        self.scope = trio.CancelScope()

    async def take(self, taken):
        with self.scope:
            await taken.take(self.spec, self.told.append)
            self.has = True


@pytest.fixture
def begin(make_spec, nursery):
    """Let shard ``number`` take these GPUs, as far as it can."""

    async def begin(taken, number, *gpus):
        waiter = Waiter(replace(make_spec(number=number), gpus=gpus))
        nursery.start_soon(waiter.take, taken)
        await trio.testing.wait_all_tasks_blocked()
        return waiter

    return begin


async def test_one_that_is_free_is_taken_at_once(begin):
    taken = Taken()
    one, two = await begin(taken, 1, "GPU-a"), await begin(taken, 2, "GPU-b")
    assert (one.has, two.has, one.told, two.told) == (True, True, [None], [None])


async def test_who_comes_second_waits_for_each_of_its_gpus(begin):
    taken = Taken()
    one, two = await begin(taken, 1, "GPU-a"), await begin(taken, 2, "GPU-b")
    late = await begin(taken, 3, "GPU-c", "GPU-b", "GPU-a")
    taken.give_back(one.spec.id)
    await trio.testing.wait_all_tasks_blocked()
    assert late.told == [
        "waits for GPU-b that shd-m-2-0 still has, GPU-a that shd-m-1-0 still has",
        "waits for GPU-b that shd-m-2-0 still has",
    ]
    taken.give_back(two.spec.id)
    await trio.testing.wait_all_tasks_blocked()
    assert (late.has, late.told[2:]) == (True, [None])


async def test_one_that_waits_keeps_none_from_others(begin):
    taken = Taken()
    await begin(taken, 1, "GPU-a")
    late = await begin(taken, 2, "GPU-a", "GPU-b")
    other = await begin(taken, 3, "GPU-b")
    assert (late.has, other.has) == (False, True)


async def test_one_gpu_goes_to_one_of_those_that_wait(begin):
    taken = Taken()
    one = await begin(taken, 1, "GPU-a")
    waiting = [await begin(taken, number, "GPU-a") for number in (2, 3)]
    taken.give_back(one.spec.id)
    await trio.testing.wait_all_tasks_blocked()
    (first,) = (waiter for waiter in waiting if waiter.has)
    taken.give_back(first.spec.id)
    await trio.testing.wait_all_tasks_blocked()
    assert all(waiter.has for waiter in waiting)


async def test_two_that_were_found_on_one_hold_it_until_both_are_gone(make_spec, begin):
    taken = Taken()
    found = [replace(make_spec(number=number), gpus=("GPU-a",)) for number in (1, 2)]
    for spec in found:
        taken.hold(spec)
    late = await begin(taken, 3, "GPU-a")
    for spec in found:
        assert not late.has
        taken.give_back(spec.id)
        await trio.testing.wait_all_tasks_blocked()
    assert late.has


async def test_one_that_gives_up_waiting_holds_nothing(begin):
    taken = Taken()
    one = await begin(taken, 1, "GPU-a")
    late = await begin(taken, 2, "GPU-a")
    late.scope.cancel()
    taken.give_back(late.spec.id)
    taken.give_back(one.spec.id)
    assert (await begin(taken, 3, "GPU-a")).has


@pytest.mark.parametrize("gpus", [None, ()])
async def test_who_has_no_gpus_waits_for_nobody(make_spec, gpus):
    taken = Taken()
    specs = [replace(make_spec(number=number), gpus=gpus) for number in (1, 2)]
    for spec in specs:
        await taken.take(spec, lambda words: None)
        taken.give_back(spec.id)
