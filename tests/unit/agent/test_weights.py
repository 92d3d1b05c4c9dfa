"""The weights of a node: who waits for what, what is kept, and what is told of all that."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from llmgw.agent.weights import Weights
from llmgw.core.node import NodeId
from llmgw.core.weights import Collect, Fetch, Member, Phase, Pull, Swarm, WeightsOrder, key_of, parse_source
from llmgw.errors import EngineFailed, LlmgwError
from llmgw.host.weights.errors import FetchFailed, Kind

SOURCE = "hf:org/repo/m.fake"
OTHER = "https://host/o.fake?token=sekret"
SIZE = 20_000_000_000
SECONDS = 30


class Machine:
    """The hands that weights need, with a depot that a test may reach into."""

    def __init__(self, depot):
        self.depot = depot
        # for so long no other clock here has gone on
        self.asleep = 0.0

    async def run(self, work, *args):
        await trio.lowlevel.checkpoint()
        return work(*args)

    def boot_seconds(self):
        return trio.current_time() + self.asleep


@pytest.fixture
def depot(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "simulation"))
    import depot

    return depot.SimulatedDepot(node="n1", origin=depot.Origin())


@pytest.fixture
def told():
    """What was reported of the node."""
    return []


@pytest.fixture
def begin(depot, told, nursery):
    """A node's weights, served from now on."""

    async def begin(hands=None):
        weights = Weights(hands or Machine(depot))
        await nursery.start(partial(weights.serve, nursery, told.append, 60.0))
        return weights

    return begin


class Waiting:
    """A shard that wants a source: what it is told, and what comes of it."""

    def __init__(self, weights, engine, shard, source=SOURCE):
        self.told, self.got, self.failed = [], None, None
        self.scope = trio.CancelScope()
        self._obtain = partial(weights.obtain, source, engine, self.told.append, by=shard)

    async def run(self):
        with self.scope:
            try:
                self.got = await self._obtain()
            except EngineFailed as error:
                self.failed = error


@pytest.fixture
def want(nursery, engines):
    """Let a shard want a source."""

    def want(weights, shard="shd-1", source=SOURCE):
        waiting = Waiting(weights, engines["fake"], shard, source)
        nursery.start_soon(waiting.run)
        return waiting

    return want


def order(*pulls, swarms=(), collect=None):
    return WeightsOrder(swarms=swarms, pulls=pulls, collect=collect)


async def collect(weights, told, *items, number=1, seconds=50.0):
    """Have these removed, as a server does that is asked whether its order stands."""
    weights.order(order(collect=Collect(number=number, items=items)))
    await trio.sleep(2)
    answer = Collect(number=number, items=items, asked=told[-1].asks, seconds=seconds)
    weights.order(order(collect=answer))
    await trio.sleep(2)
    return told[-1].collected


async def test_what_is_not_fetched_is_left_as_it_is(begin, autojump_clock, want, depot):
    weights = await begin()
    waits = [want(weights, source=source) for source in ("/models/m.fake", "org/repo")]
    await trio.sleep(1)
    assert [each.got for each in waits] == ["/models/m.fake", "org/repo"]
    assert depot.origin.begun == []


async def test_all_who_want_a_source_wait_for_one_fetch(begin, autojump_clock, want, depot, told):
    weights = await begin()
    waits = [want(weights, f"shd-{number}") for number in range(8)]
    await trio.sleep(15)
    assert all(each.told[-1].phase is Phase.FETCHING for each in waits)
    waits.append(want(weights, "shd-late"))
    await trio.sleep(60)
    commit = depot.origin.commit_of(SOURCE)
    path = str(depot.folder / key_of(SOURCE) / commit / "m.fake")
    assert {each.got for each in waits} == {path}
    assert depot.origin.begun == [("n1", SOURCE)]
    assert [each.told[-1] for each in waits] == [None] * 9
    # About one word a second, and not one of them goes back.
    (done,) = ([fetch.done_bytes for fetch in each.told if fetch] for each in waits[:1])
    assert done == sorted(done)
    assert 10 < len(done) <= SECONDS + 5
    (cached,) = told[-1].cached
    assert (cached.commit, cached.size_bytes, cached.in_use, told[-1].fetches) == (commit, SIZE, True, ())


async def test_a_fetch_ends_with_the_last_who_waits_and_the_next_goes_on(begin, autojump_clock, want, depot):
    weights = await begin()
    first, second = want(weights, "shd-1"), want(weights, "shd-2")
    await trio.sleep(10)
    first.scope.cancel()
    await trio.sleep(5)
    come = depot.origin.sent["n1", SOURCE]
    assert come > SIZE / 3
    second.scope.cancel()
    # Before the one that ends has ended.
    third = want(weights, "shd-3")
    await trio.sleep(1)
    assert depot.origin.begun == [("n1", SOURCE)] * 2
    await trio.sleep(60)
    assert third.got is not None
    assert depot.origin.sent["n1", SOURCE] == SIZE


async def test_what_is_whole_is_taken_without_asking_anybody(begin, autojump_clock, want, depot):
    weights = await begin()
    want(weights)
    await trio.sleep(60)
    depot.origin.publish(SOURCE)
    depot.origin.down = True
    again = want(weights, "shd-2")
    await trio.sleep(1)
    assert again.got is not None
    assert again.told == []


async def test_what_can_not_be_fetched_ends_all_who_wait_with_the_reason(begin, autojump_clock, want, depot, caplog):
    weights = await begin()
    depot.origin.down = True
    waits = [want(weights, f"shd-{number}") for number in range(2)]
    await trio.sleep(100)
    assert [each.failed.kind for each in waits] == [Kind.UNREACHABLE] * 2
    assert waits[0].failed.remedy == "see where it is"
    assert "can't be fetched" in caplog.text


async def test_a_fault_in_a_fetch_ends_that_one_only(begin, autojump_clock, want, depot, caplog):
    weights = await begin()

    async def fail(source, **given):
        raise ZeroDivisionError

    depot.fetch, fetch = fail, depot.fetch
    failed = want(weights)
    await trio.sleep(1)
    assert failed.failed.message == "a fault of llmgw itself: ZeroDivisionError: "
    depot.fetch = fetch
    again = want(weights, source=OTHER)
    await trio.sleep(60)
    assert again.got is not None
    assert "sekret" not in caplog.text


async def test_what_was_removed_in_the_last_moment_is_fetched_anew(begin, autojump_clock, want, depot):
    weights = await begin()
    want(weights)
    await trio.sleep(60)
    weights.give_back("shd-1")
    use, removed = depot.use, []

    def lose(manifest):
        if not removed:
            removed.append(depot.remove(manifest.source, manifest.commit))
        return use(manifest)

    depot.use = lose
    again = want(weights, "shd-2")
    await trio.sleep(60)
    assert removed == [SIZE]
    assert again.got is not None
    assert depot.origin.begun == [("n1", SOURCE)] * 2


async def test_what_a_look_finds_damaged_is_fetched_anew_before_a_launch(begin, autojump_clock, want, depot, told):
    weights = await begin()
    want(weights)
    await trio.sleep(60)
    weights.give_back("shd-1")
    commit = depot.origin.commit_of(SOURCE)
    depot.spoilt[SOURCE, commit] = "m.fake is an HTML page"
    again = [want(weights, f"shd-{number}") for number in (2, 3)]
    await trio.sleep(60)
    assert [each.got is not None for each in again] == [True, True]
    assert depot.origin.begun == [("n1", SOURCE)] * 2
    assert [(each.commit, each.why) for each in told[-1].set_aside] == [(commit, "m.fake is an HTML page")]
    (cached,) = told[-1].cached
    assert (cached.whole, cached.wrong) == (True, None)


async def test_what_is_damaged_while_a_shard_runs_by_it_stays_and_is_told(begin, autojump_clock, want, depot, told):
    weights = await begin()
    want(weights)
    await trio.sleep(60)
    commit = depot.origin.commit_of(SOURCE)
    depot.spoilt[SOURCE, commit] = "m.fake is an HTML page"
    second = want(weights, "shd-2")
    await trio.sleep(60)
    assert "('shd-1',) run by it" in second.failed.message
    (cached,) = told[-1].cached
    assert (cached.in_use, cached.whole, cached.wrong) == (True, False, "m.fake is an HTML page")
    assert (SOURCE, commit) in depot.kept
    weights.give_back("shd-1")
    third = want(weights, "shd-3")
    await trio.sleep(60)
    assert third.got is not None


async def test_that_a_pull_has_failed_is_not_told_before_what_it_has_found(begin, autojump_clock, want, depot, told):
    weights = await begin()
    want(weights)
    await trio.sleep(60)
    commit = depot.origin.commit_of(SOURCE)
    depot.spoilt[SOURCE, commit] = "m.fake is not what was fetched"
    await trio.sleep(5)
    depot.look(depot.kept[SOURCE, commit])
    told.clear()
    weights.order(order(Pull(number=1, source=SOURCE)))
    await trio.sleep(60)
    failed = [each for each in told if any(fetch.pull and fetch.phase is Phase.FAILED for fetch in each.fetches)]
    assert failed
    assert all([cached.wrong for cached in each.cached] == ["m.fake is not what was fetched"] for each in failed)


async def test_of_the_newest_that_is_damaged_an_older_one_takes_the_place_only_where_it_can_not_be_mended(
    begin, autojump_clock, want, depot
):
    weights = await begin()
    want(weights)
    await trio.sleep(60)
    older = depot.origin.commit_of(SOURCE)
    depot.origin.publish(SOURCE)
    weights.order(order(Pull(number=1, source=SOURCE)))
    await trio.sleep(60)
    newest = depot.origin.commit_of(SOURCE)
    depot.spoilt[SOURCE, newest] = "m.fake is an HTML page"
    depot.origin.down = True
    again = want(weights, "shd-2")
    await trio.sleep(10)
    assert again.got is None
    await trio.sleep(60)
    assert f"/{older}/" in again.got
    depot.origin.down = False
    third = want(weights, "shd-3")
    await trio.sleep(60)
    assert f"/{newest}/" in third.got


async def test_what_has_just_come_and_is_damaged_is_not_fetched_for_ever(begin, autojump_clock, want, depot):
    weights = await begin()
    depot.look = lambda manifest: "m.fake is an HTML page"
    waiting = want(weights)
    await trio.sleep(100)
    assert waiting.failed.kind is Kind.CORRUPT
    assert "has just come, and is damaged: m.fake is an HTML page" in waiting.failed.message
    assert depot.origin.begun == [("n1", SOURCE)]


async def test_what_is_gone_under_a_shard_that_runs_by_it_is_told(begin, autojump_clock, want, depot, told):
    weights = await begin()
    want(weights)
    await trio.sleep(60)
    depot.kept.clear()
    await trio.sleep(70)
    (cached,) = told[-1].cached
    assert (cached.source, cached.in_use, cached.whole, cached.size_bytes) == (SOURCE, True, False, 0)
    assert cached.wrong == "its files are gone, or its manifest can't be read"
    weights.give_back("shd-1")
    await trio.sleep(2)
    assert told[-1].cached == ()


async def test_what_a_shard_that_was_found_running_runs_by_is_held_though_it_is_damaged(
    begin, autojump_clock, want, depot, told
):
    weights = await begin()
    manifest = await depot.fetch(
        parse_source(SOURCE), swarm=lambda: None, tell=lambda fetch: None, newest=False, users=lambda commit: ()
    )
    depot.spoilt[SOURCE, manifest.commit] = "m.fake is an HTML page"
    depot.look(manifest)
    await weights.resume("shd-1", [(SOURCE, manifest.commit)])
    await trio.sleep(70)
    (cached,) = told[-1].cached
    assert (cached.in_use, cached.wrong) == (True, "m.fake is an HTML page")
    with pytest.raises(LlmgwError, match="in use"):
        depot.remove(SOURCE, manifest.commit)


async def test_what_a_shard_runs_by_stays_until_it_is_given_back(begin, autojump_clock, want, depot, told):
    weights = await begin()
    want(weights)
    await trio.sleep(60)
    commit = depot.origin.commit_of(SOURCE)
    assert weights.find_used("shd-1") == ((SOURCE, commit),)
    items = ((SOURCE, commit), (SOURCE, "0" * 40))
    collected = await collect(weights, told, *items, number=7)
    assert (collected.number, collected.freed_bytes) == (7, 0)
    assert collected.kept == (f"m.fake ({commit[:12]}): in use by shd-1", "m.fake (000000000000): it is not here")
    weights.give_back("shd-1")
    await trio.sleep(2)
    assert not told[-1].cached[0].in_use
    # The same one is told again with each link.
    weights.order(order(collect=Collect(number=7, items=items)))
    await trio.sleep(2)
    assert len(told[-1].cached) == 1
    collected = await collect(weights, told, *items[:1], number=8)
    assert (told[-1].cached, collected.freed_bytes, collected.kept) == ((), SIZE, ())


async def test_what_is_left_of_a_fetch_is_told_and_can_be_removed(begin, autojump_clock, want, depot, told):
    weights = await begin()
    first = want(weights)
    await trio.sleep(10)
    # (while it is fetched the fetch itself says how much there is)
    assert told[-1].cached == ()
    first.scope.cancel()
    await trio.sleep(70)
    (left,) = told[-1].cached
    assert (left.source, left.whole, left.in_use) == (SOURCE, False, False)
    assert 0 < left.size_bytes < SIZE
    assert told[-1].whole == ()
    collected = await collect(weights, told, (SOURCE, left.commit))
    assert (told[-1].cached, collected.freed_bytes) == ((), left.size_bytes)


async def test_an_order_to_remove_that_is_taken_back_goes_no_further(begin, autojump_clock, want, depot, told):
    weights = await begin()
    removed = []

    def remove(source, commit, stands):
        if not stands():
            raise LlmgwError("taken back")
        removed.append(commit)
        # meanwhile: somebody has added the model again
        weights.order(order())
        return 5

    depot.remove = remove
    collected = await collect(weights, told, *((SOURCE, letter * 40) for letter in "abc"))
    assert removed == ["a" * 40]
    assert (collected.freed_bytes, len(collected.kept)) == (5, 2)
    assert all("taken back" in each for each in collected.kept)


async def fetch_one(weights, want, depot):
    want(weights)
    await trio.sleep(60)
    weights.give_back("shd-1")
    await trio.sleep(2)
    return SOURCE, depot.origin.commit_of(SOURCE)


async def test_nothing_is_removed_before_the_server_says_that_the_order_stands(
    begin, autojump_clock, want, depot, told
):
    weights = await begin()
    name = await fetch_one(weights, want, depot)
    stands = Collect(number=1, items=(name,), asked="what an earlier agent has asked", seconds=50.0)
    for said in (replace(stands, asked=None), stands):
        # (it is told again with each link, and may have lain there for long)
        weights.order(order(collect=said))
        await trio.sleep(30)
        assert name in depot.kept
    assert told[-1].asks is not None
    weights.order(order())
    await trio.sleep(2)
    assert name in depot.kept
    assert told[-1].asks is None
    assert "before its turn came" in told[-1].collected.kept[0]
    # The next order is asked for by itself.
    assert (await collect(weights, told, name, number=2)).freed_bytes == SIZE
    assert name not in depot.kept


async def test_an_order_ends_by_itself_also_while_this_process_or_machine_stood_still(
    begin, autojump_clock, want, depot, told
):
    hands = Machine(depot)
    weights = await begin(hands)
    name = await fetch_one(weights, want, depot)
    for number, asleep in ((1, 51.0), (2, 49.0)):
        assert name in depot.kept
        weights.order(order(collect=Collect(number=number, items=(name,))))
        await trio.sleep(0.5)
        hands.asleep += asleep
        weights.order(order(collect=Collect(number=number, items=(name,), asked=told[-1].asks, seconds=50.0)))
        await trio.sleep(2)
    assert name not in depot.kept


async def test_what_is_named_again_when_it_is_asked_stays(begin, autojump_clock, want, depot, told):
    weights = await begin()
    name = await fetch_one(weights, want, depot)
    weights.order(order(collect=Collect(number=1, items=(name,))))
    await trio.sleep(0.5)
    weights.order(order(collect=Collect(number=1, items=(), asked=told[-1].asks, seconds=50.0)))
    await trio.sleep(2)
    assert name in depot.kept
    assert len(told[-1].collected.kept) == 1


async def test_what_another_program_has_fetched_is_told_as_what_it_is_when_a_shard_runs_by_it(
    begin, autojump_clock, want, depot, told
):
    weights = await begin()
    await fetch_one(weights, want, depot)
    # (when this agent looked last it was not there)
    weights._kept = ()
    want(weights)
    await trio.sleep(2)
    (cached,) = told[-1].cached
    assert (cached.whole, cached.in_use, cached.size_bytes) == (True, True, SIZE)


async def test_a_folder_that_can_not_be_listed_after_a_removal_ends_nothing(begin, autojump_clock, want, depot, told):
    weights = await begin()
    await trio.sleep(2)
    depot.remove = lambda source, commit, stands: 5
    listing, depot.list = depot.list, None
    collected = await collect(weights, told, (SOURCE, "a" * 40))
    depot.list = listing
    assert collected.freed_bytes == 5


async def test_a_removal_with_a_fault_is_told_and_harms_nothing(begin, autojump_clock, want, depot, told):
    weights = await begin()
    depot.remove = lambda source, commit, stands: 1 // 0
    collected = await collect(weights, told, (OTHER, "a" * 40))
    assert collected.kept == ("o.fake (aaaaaaaaaaaa): a fault of llmgw itself: ZeroDivisionError",)


async def test_a_shard_that_is_taken_over_keeps_what_it_runs_by(begin, autojump_clock, want, depot, told):
    weights = await begin()
    want(weights)
    await trio.sleep(60)
    used = weights.find_used("shd-1")
    weights.give_back("shd-1")
    await weights.resume("shd-1", (*used, ("hf:org/repo/gone.fake", "b" * 40)))
    await trio.sleep(2)
    assert told[-1].cached[0].in_use
    assert dict(weights.find_used("shd-1")) == {SOURCE: used[0][1], "hf:org/repo/gone.fake": "b" * 40}
    with pytest.raises(LlmgwError, match="in use"):
        depot.remove(*used[0])


async def test_what_can_not_be_held_is_in_use_all_the_same(begin, autojump_clock, want, depot, caplog):
    weights = await begin()
    want(weights)
    await trio.sleep(60)

    def fail(manifest):
        raise FetchFailed("nothing can be locked there", Kind.DISK)

    depot.use = fail
    await weights.resume("shd-2", weights.find_used("shd-1"))
    assert weights.find_used("shd-2") == weights.find_used("shd-1")
    assert "nothing can be locked there" in caplog.text
    weights.give_back("shd-2")


async def test_a_pull_has_the_newest_and_is_told_until_the_server_knows(begin, autojump_clock, want, depot, told):
    weights = await begin()
    want(weights)
    await trio.sleep(60)
    depot.origin.publish(SOURCE)
    pulls = (Pull(number=3, source=SOURCE), Pull(number=4, source="/models/m.fake"))
    weights.order(order(*pulls))
    await trio.sleep(10)
    assert [(fetch.phase, fetch.pull) for fetch in told[-1].fetches] == [(Phase.FETCHING, 3), (Phase.FAILED, 4)]
    assert "is nothing that llmgw fetches" in told[-1].fetches[1].cause
    # With each link all is told again, and nothing is done again.
    weights.order(order(*pulls))
    await trio.sleep(60)
    done = told[-1].fetches[0]
    assert (done.phase, done.pull, done.commit) == (Phase.READY, 3, depot.origin.commit_of(SOURCE))
    assert (done.done_bytes, done.total_bytes, done.rate) == (SIZE, SIZE, None)
    assert len(told[-1].cached) == 2
    weights.order(order())
    await trio.sleep(2)
    assert told[-1].fetches == ()
    assert len(depot.origin.begun) == 2


async def test_a_pull_waits_for_the_fetch_that_a_shard_has_begun(begin, autojump_clock, want, depot, told):
    weights = await begin()
    waiting = want(weights)
    await trio.sleep(5)
    weights.order(order(Pull(number=1, source=SOURCE)))
    await trio.sleep(5)
    (fetch,) = told[-1].fetches
    assert (fetch.phase, fetch.pull) == (Phase.FETCHING, 1)
    assert waiting.told[-1].pull is None
    await trio.sleep(60)
    assert told[-1].fetches[0].phase is Phase.READY
    assert depot.origin.begun == [("n1", SOURCE)] * 2
    assert depot.origin.sent["n1", SOURCE] == SIZE


async def test_a_pull_goes_on_though_a_new_server_does_not_know_of_it(begin, autojump_clock, depot, told):
    weights = await begin()
    weights.order(order(Pull(number=1, source=SOURCE)))
    await trio.sleep(5)
    weights.order(order())
    await trio.sleep(60)
    assert len(told[-1].cached) == 1
    assert told[-1].fetches == ()


async def test_a_pull_that_fails_says_why(begin, autojump_clock, depot, told):
    weights = await begin()
    depot.spoil = 1
    weights.order(order(Pull(number=1, source=OTHER)))
    await trio.sleep(60)
    (fetch,) = told[-1].fetches
    assert (fetch.phase, fetch.remedy, fetch.left_seconds) == (Phase.FAILED, "try again", None)
    assert "is not what its origin says" in fetch.cause


async def test_a_pull_that_failed_is_told_on_once_the_server_knows(begin, autojump_clock, depot, told):
    weights = await begin()
    depot.spoil = 1
    weights.order(order(Pull(number=1, source=OTHER)))
    await trio.sleep(60)
    before = told[-1].fetches
    weights.order(order())
    await trio.sleep(5)
    # (the very same: a server that has told it once is not to tell it again)
    assert told[-1].fetches == before
    assert before[0].pull == 1


async def test_a_failure_is_told_until_the_next_try(begin, autojump_clock, want, depot, told):
    weights = await begin()
    depot.spoil = 1
    waiting = want(weights)
    await trio.sleep(100)
    assert waiting.failed is not None
    (fetch,) = told[-1].fetches
    assert (fetch.phase, fetch.remedy, fetch.pull) == (Phase.FAILED, "try again", None)
    assert "is not what its origin says" in fetch.cause
    assert (fetch.rate, fetch.left_seconds, fetch.origin_bytes) == (None, None, SIZE)
    want(weights)
    await trio.sleep(5)
    assert [fetch.phase for fetch in told[-1].fetches] == [Phase.FETCHING]
    await trio.sleep(60)
    assert told[-1].fetches == ()


async def test_a_failure_that_nobody_tries_again_is_told_for_an_hour(begin, autojump_clock, want, depot, told):
    weights = await begin()
    depot.spoil = 1
    want(weights)
    await trio.sleep(3500)
    assert len(told[-1].fetches) == 1
    await trio.sleep(300)
    assert told[-1].fetches == ()


async def test_a_failure_is_over_when_others_have_brought_it(begin, autojump_clock, want, depot, told):
    weights = await begin()
    want(weights)
    await trio.sleep(60)
    ((name, manifest),) = depot.kept.items()
    weights.give_back("shd-1")
    del depot.kept[name]
    await trio.sleep(60)
    depot.spoil = 1
    want(weights, "shd-2")
    await trio.sleep(60)
    assert [fetch.phase for fetch in told[-1].fetches] == [Phase.FAILED]
    # As another program on the same folder does.
    depot.kept[name] = manifest
    await trio.sleep(60)
    assert (told[-1].fetches, len(told[-1].cached)) == ((), 1)


async def test_of_a_fetch_that_is_whole_nothing_is_left(begin, autojump_clock, want, depot, told):
    weights = await begin()
    # A folder that is looked at while it is fetched into, and a disk that takes its time.
    want(weights)
    await trio.sleep(10)
    left = depot.list_unfinished()
    assert len(left) == 1
    depot.list_unfinished = lambda: left
    await trio.sleep(60)
    assert [each.whole for each in told[-1].cached] == [True]


async def test_what_is_left_of_a_fetch_is_told_when_it_ends(begin, autojump_clock, want, depot, told):
    full = False
    depot.is_full = lambda: full
    weights = await begin()
    failing = want(weights)
    cancelled = want(weights, "shd-2", source=OTHER)
    await trio.sleep(10)
    cancelled.scope.cancel()
    await trio.sleep(2)
    full = True
    await trio.sleep(3)
    assert failing.failed is not None
    assert {(each.source, each.whole) for each in told[-1].cached} == {(SOURCE, False), (OTHER, False)}
    assert [(each.source, each.phase) for each in told[-1].fetches] == [(SOURCE, Phase.FAILED)]


async def test_what_can_not_be_looked_at_after_a_fetch_is_later(begin, autojump_clock, want, depot, told):
    weights = await begin()
    waiting = want(weights)
    await trio.sleep(10)
    listing, depot.list_unfinished = depot.list_unfinished, lambda: 1 // 0
    waiting.scope.cancel()
    await trio.sleep(3)
    depot.list_unfinished = listing
    assert told[-1].cached == ()
    await trio.sleep(60)
    assert len(told[-1].cached) == 1


async def test_only_who_the_server_names_may_take_pieces(begin, autojump_clock):
    weights = await begin()
    members = tuple(Member(node=NodeId(name)) for name in ("n2", "n3"))
    swarms = (Swarm(source=SOURCE, commit="a" * 40, members=members[:1]), Swarm(source=SOURCE, members=members))
    weights.order(order(swarms=swarms))
    assert weights.is_allowed(NodeId("n3"), key_of(SOURCE))
    assert not weights.is_allowed(NodeId("n4"), key_of(SOURCE))
    assert not weights.is_allowed(NodeId("n2"), key_of(OTHER))
    weights.order(order())
    assert not weights.is_allowed(NodeId("n2"), key_of(SOURCE))


async def test_a_fetch_sees_its_swarm_and_the_same_one_while_it_is_the_same(begin, autojump_clock, want, depot):
    weights = await begin()
    seen = []

    async def fetch(source, *, swarm, tell, newest, users):
        while True:
            seen.append(swarm())
            await trio.sleep(1)

    depot.fetch = fetch
    first = Swarm(source=SOURCE, commit="a" * 40, members=(Member(node=NodeId("n2")),))
    waiting = want(weights)
    for swarms in ((), (first, replace(first, commit="b" * 40)), (replace(first),), (replace(first, members=()),)):
        weights.order(order(swarms=swarms))
        await trio.sleep(2)
    waiting.scope.cancel()
    assert seen[0] is None
    assert first in seen
    assert len({id(swarm) for swarm in seen if swarm == first}) == 1
    assert seen[-1] == replace(first, members=())


async def test_what_lies_here_is_told_once_somebody_has_looked(begin, autojump_clock, want, depot, told):
    weights = Weights(Machine(depot))
    assert weights.tell() is None
    depot.seen, depot.seed = ("/models/a.gguf",), "10.0.0.1:7444"
    await begin()
    await trio.sleep(2)
    assert (told[-1].seen, told[-1].seed, told[-1].shared) == (("/models/a.gguf",), "10.0.0.1:7444", False)
    before = len(told)
    await trio.sleep(30)
    assert len(told) == before
    depot.seen = ("/models/b.gguf",)
    await trio.sleep(60)
    assert told[-1].seen == ("/models/b.gguf",)


async def test_a_look_that_fails_is_tried_again(begin, autojump_clock, depot, told, caplog):
    depot.look_around, look = (lambda: 1 // 0), depot.look_around
    await begin()
    await trio.sleep(2)
    assert told[-1].seen == ()
    assert "trying again" in caplog.text
    depot.look_around, depot.seen = look, ("org/repo",)
    await trio.sleep(60)
    assert told[-1].seen == ("org/repo",)


async def test_what_others_wait_for_is_told_at_once_and_all_else_once_a_second(
    begin, autojump_clock, want, depot, told
):
    weights = await begin()
    await trio.sleep(10)
    depot_tell = []

    async def fetch(source, *, swarm, tell, newest, users):
        depot_tell.append(tell)
        await trio.sleep_forever()

    depot.fetch = fetch
    want(weights)
    await trio.sleep(0.01)
    assert told[-1].fetches[0].phase is Phase.RESOLVING
    fetch = Fetch(source=SOURCE, phase=Phase.FETCHING, commit="a" * 40)
    depot_tell[0](fetch)
    await trio.sleep(0.01)
    assert told[-1].fetches == (fetch,)
    depot_tell[0](replace(fetch, done_bytes=5))
    await trio.sleep(0.5)
    assert told[-1].fetches == (fetch,)
    await trio.sleep(0.5)
    assert told[-1].fetches[0].done_bytes == 5


async def test_what_has_come_while_somebody_looked_is_not_forgotten(begin, autojump_clock, want, depot, told):
    weights = await begin()
    want(weights)
    await trio.sleep(20)
    slow = depot.list

    async def list_slowly():
        found = await slow()
        await trio.sleep(20)
        return found

    depot.list = list_slowly
    weights.order(order(collect=Collect(number=1, items=())))
    await trio.sleep(50)
    assert [cached.source for cached in told[-1].cached] == [SOURCE]


async def test_a_fetch_that_seems_to_stand_is_told_all_the_same(begin, autojump_clock, want, depot, told):
    weights = await begin()

    async def fetch(source, *, swarm, tell, newest, users):
        tell(Fetch(source=source.text, phase=Phase.QUEUED))
        await trio.sleep_forever()

    depot.fetch = fetch
    want(weights)
    await trio.sleep(31)
    assert 5 <= len([each for each in told if each.fetches]) <= 9


async def test_the_log_says_now_and_then_how_far_it_is(begin, autojump_clock, want, caplog):
    caplog.set_level(logging.INFO, "llmgw.agent")
    weights = await begin()
    want(weights, source=OTHER)
    await trio.sleep(60)
    lines = [record.getMessage() for record in caplog.records if record.name == "llmgw.agent.fetches"]
    assert lines[0] == "fetching https://host/o.fake"
    assert [line.split(",")[0] for line in lines[1:-1]] == [f"fetching o.fake: {part} % of 20GB" for part in (50, 99)]
    assert lines[-1].startswith("https://host/o.fake is here (")


def test_nothing_begins_before_it_is_served(depot):
    weights = Weights(Machine(depot))
    with pytest.raises(RuntimeError, match="before the node is served"):
        weights.order(order(Pull(number=1, source=SOURCE)))


async def test_the_depot_hears_of_all_swarms(begin, autojump_clock, depot):
    weights = await begin()
    swarms = (Swarm(source=SOURCE, commit="c1"), Swarm(source=SOURCE, commit="c2"))
    weights.order(order(swarms=swarms))
    assert depot.swarms == swarms
    weights.order(order())
    assert depot.swarms == ()
