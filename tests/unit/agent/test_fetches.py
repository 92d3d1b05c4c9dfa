"""One fetch for all who wait, and its end with the last of them."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import pytest
import trio
import trio.testing

from llmgw.agent.fetches import MOST_FAILED, Fetches
from llmgw.core.weights import Fetch, Manifest, Phase, Pull, parse_source
from llmgw.errors import EngineFailed

SOURCE = parse_source("hf:org/repo/m.fake")
MANIFEST = Manifest(source=SOURCE.text, commit="a" * 40, files=(), fetched_at=1.0)


class Depot:
    """Fetches that go on until a test ends them."""

    def __init__(self):
        self.begun, self.ended, self.tells = [], [], []
        self.go, self.stays = trio.Event(), 0.0

    async def fetch(self, source, *, swarm, tell, newest, users):
        self.begun.append((source.text, newest, swarm()))
        assert users("c1") == (f"shd of {source.text} c1",)
        self.tells.append(tell)
        try:
            await self.go.wait()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + self.stays):
                await trio.sleep(self.stays)
            self.ended.append(source.text)
        return MANIFEST


@pytest.fixture
def depot():
    return Depot()


@pytest.fixture
def kept():
    return []


@pytest.fixture
def turns():
    return []


@pytest.fixture
def overs():
    return []


@pytest.fixture
def fetches(depot, kept, turns, overs, nursery):
    return Fetches(
        depot,
        begin=nursery.start_soon,
        find_swarm=lambda source: f"swarm of {source}",
        find_users=lambda source, commit: (f"shd of {source} {commit}",),
        changed=lambda: None,
        turned=lambda: turns.append(trio.current_time()),
        kept=kept.append,
        spoilt=trio.lowlevel.checkpoint,
        over=lambda: overs.append(trio.current_time()),
    )


@pytest.fixture
def wait(fetches, nursery):
    """Let somebody wait; what ends that, and a list that what came of it is put into."""

    async def run(who, scope, ends, told, newest):
        with scope:
            ends.append(await fetches.wait(SOURCE, who, told.append, newest=newest))

    def wait(who, *, newest=False, told=None):
        scope, ends = trio.CancelScope(), []
        nursery.start_soon(run, who, scope, ends, [] if told is None else told, newest)
        return scope, ends

    return wait


async def test_all_who_wait_have_one_fetch_and_are_told_alike(fetches, wait, depot, kept):
    told = [], []
    ends = [wait(who, told=said)[1] for who, said in enumerate(told)]
    await trio.testing.wait_all_tasks_blocked()
    assert depot.begun == [(SOURCE.text, False, f"swarm of {SOURCE.text}")]
    fetch = Fetch(source=SOURCE.text, phase=Phase.FETCHING, done_bytes=5)
    depot.tells[0](fetch)
    assert [each.told for each in fetches] == [fetch]
    fetches.tell()
    assert told == ([fetch], [fetch])
    depot.go.set()
    await trio.testing.wait_all_tasks_blocked()
    assert [end.read() for (end,) in ends] == [MANIFEST] * 2
    assert kept == [MANIFEST]
    assert not fetches


async def test_nobody_left_ends_it_and_the_next_waits_for_that_end(fetches, wait, depot, autojump_clock):
    depot.stays = 5.0
    (first, _), (second, _) = wait("a"), wait("b")
    await trio.sleep(1)
    first.cancel()
    await trio.sleep(1)
    assert depot.ended == []
    second.cancel()
    await trio.sleep(1)
    _, ends = wait("c")
    await trio.sleep(1)
    assert len(depot.begun) == 1
    await trio.sleep(5)
    assert (len(depot.begun), len(depot.ended)) == (2, 1)
    depot.go.set()
    await trio.sleep(6)
    assert ends[0].read() == MANIFEST


async def test_who_wants_the_newest_has_a_fetch_that_was_begun_for_it(wait, depot):
    _, plain = wait("a")
    await trio.testing.wait_all_tasks_blocked()
    _, newest = wait("b", newest=True)
    await trio.testing.wait_all_tasks_blocked()
    assert len(depot.begun) == 1
    depot.go.set()
    await trio.testing.wait_all_tasks_blocked()
    assert [newest for _, newest, _ in depot.begun] == [False, True]
    assert plain[0].read() == newest[0].read() == MANIFEST


async def test_who_wants_any_takes_part_in_one_for_the_newest(wait, depot):
    wait("a", newest=True)
    await trio.testing.wait_all_tasks_blocked()
    wait("b")
    await trio.testing.wait_all_tasks_blocked()
    assert len(depot.begun) == 1
    depot.go.set()


async def test_a_failure_is_that_of_all_who_wait(wait, depot, fetches, overs):
    async def fail(*args, **given):
        raise EngineFailed("no such file", remedy="mend it")

    depot.fetch = partial(fail)
    pulls = [Pull(number=number, source=SOURCE.text) for number in (3, 4)]
    ends = [wait(who)[1] for who in ("a", *pulls)]
    await trio.testing.wait_all_tasks_blocked()
    for (end,) in ends:
        with pytest.raises(EngineFailed, match="no such file"):
            end.read()
    (failed,) = fetches.list_failed()
    assert (failed.phase, failed.cause, failed.remedy, failed.pull) == (Phase.FAILED, "no such file", "mend it", 4)
    assert len(overs) == 1
    fetches.forget_failed(SOURCE.text)
    assert fetches.list_failed() == ()


async def test_of_many_failures_the_last_ones_are_told(depot, fetches):
    async def fail(*args, **given):
        raise EngineFailed("no such file")

    depot.fetch = fail
    sources = [parse_source(f"hf:org/repo/{number}.fake") for number in range(MOST_FAILED + 5)]
    for source in sources:
        await fetches.wait(source, "a", lambda fetch: None)
    assert [failed.source for failed in fetches.list_failed()] == [source.text for source in sources[5:]]


async def test_what_holds_a_fetch_up_is_logged(wait, depot, fetches, autojump_clock, caplog):
    caplog.set_level(logging.INFO)
    wait("a")
    await trio.sleep(20)
    depot.tells[0](Fetch(source=SOURCE.text, phase=Phase.FETCHING, stalled_seconds=12.0, cause="h answers 503"))
    assert "stalled for 12s: h answers 503" in caplog.text
    depot.go.set()


async def test_what_others_wait_for_is_told_at_once(wait, depot, turns):
    wait("a")
    await trio.testing.wait_all_tasks_blocked()
    assert len(turns) == 1
    fetch = Fetch(source=SOURCE.text, phase=Phase.RESOLVING)
    steps = [
        replace(fetch, commit="a" * 40),
        replace(fetch, commit="a" * 40, phase=Phase.FETCHING),
        replace(fetch, commit="a" * 40, phase=Phase.FETCHING, done_bytes=5),
    ]
    for step in steps:
        depot.tells[0](step)
    assert len(turns) == 3
    depot.go.set()
    await trio.testing.wait_all_tasks_blocked()
    assert len(turns) == 4
