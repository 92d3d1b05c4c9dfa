from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.asked import MOST_OF_ONE, PATIENCE_SECONDS, Run, Take
from llmgw.core.holders import MOST_HOLDERS
from llmgw.core.node import NodeId
from llmgw.core.pieces import (
    AWAY_SECONDS,
    MOST_OF_ALL,
    MOST_PASSED,
    MOST_RUN_PIECES,
    MOST_SWEPT,
    REST_SECONDS,
    SECOND_ASK_SECONDS,
    SUSPENDED_SECONDS,
    Pieces,
)
from llmgw.core.weights import RELAY, Member

ME = NodeId("me")
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def member(node: str, *, whole: bool = False, seed: str | None = "10.0.0.1:7000", **more: Any) -> Member:
    return Member(node=NodeId(node), seed=seed, whole=whole, **more)


def news(*pieces: int, file: int = 0, mark: str = "0") -> list[tuple[int, int, str]]:
    return [(file, piece, mark * 64) for piece in pieces]


def make(count: int, *members: Member, seeding: bool = True) -> Pieces:
    pieces = Pieces(ME, "salt", [count])
    if members:
        pieces.set_members([member("me", seed="10.0.0.9:7000" if seeding else None), *members], 0.0)
    return pieces


def read(pieces: Pieces, now: float = 0.0) -> set[int]:
    """All that is asked of the origin in one go, and comes."""
    found = set()
    while (run := pieces.next_run(now)) is not None:
        for piece in range(run.start, run.stop):
            if pieces.begin(run, piece, now):
                pieces.got(run.file, piece, None, now)
                found.add(piece)
        pieces.end_run(run)
    return found


def take(pieces: Pieces, now: float = 0.0) -> Take:
    found = pieces.next_take(now)
    assert found is not None
    return found


def bring(pieces: Pieces, now: float = 0.0) -> list[tuple[NodeId, int]]:
    """All that is asked of members in one go, and comes."""
    found = []
    while (each := pieces.next_take(now)) is not None:
        found.append((each.node, each.piece))
        pieces.got(each.file, each.piece, each.node, now)
        pieces.release(each)
    return found


def test_alone_everything_is_asked_of_the_origin_in_order() -> None:
    pieces = make(100)
    run = pieces.next_run(0.0)
    assert run == Run(file=0, start=0, stop=2)
    assert pieces.next_run(0.0) == Run(file=0, start=2, stop=4)
    pieces.end_run(run)
    assert read(pieces) == {0, 1} | set(range(4, 100))


def test_requests_are_short_at_first_and_at_the_end() -> None:
    pieces, lengths = make(1000), []
    while (run := pieces.next_run(0.0)) is not None:
        lengths.append(run.stop - run.start)
        for piece in range(run.start, run.stop):
            assert pieces.begin(run, piece, 0.0)
            pieces.got(0, piece)
        pieces.end_run(run)
    assert lengths[0] == 2
    assert max(lengths) == MOST_RUN_PIECES
    assert lengths[-1] == 1
    assert len(lengths) < 100


def test_what_is_there_is_not_asked_for() -> None:
    pieces = Pieces(ME, "salt", [4, 3], [(0, 1), (1, 0)])
    assert pieces.left == 5
    found = []
    while (run := pieces.next_run(0.0)) is not None:
        found += [(run.file, piece) for piece in range(run.start, run.stop)]
    assert found == [(0, 0), (0, 2), (0, 3), (1, 1), (1, 2)]


def test_no_piece_is_asked_of_the_origin_by_two_and_none_by_nobody() -> None:
    asked: list[int] = []
    nodes = ["a", "b", "c", "me"]
    for node in nodes:
        pieces = Pieces(NodeId(node), "salt", [500])
        pieces.set_members([member(each) for each in nodes], 0.0)
        asked += read(pieces)
    assert sorted(asked) == list(range(500))


def test_a_node_that_none_can_take_from_waits_for_those_that_fetch() -> None:
    pieces = make(10, member("a"), seeding=False)
    assert read(pieces) == set()
    pieces.hear(A, news(3), 0.0)
    assert bring(pieces) == [(A, 3)]
    pieces.leave(A, AWAY_SECONDS, 1.0)
    assert read(pieces, 1.0) == set(range(10)) - {3}


def test_a_node_that_is_not_listed_yet_waits_for_those_that_are() -> None:
    pieces = Pieces(ME, "salt", [10])
    pieces.set_members([member("a", fabrics=("ib1",))], 0.0)
    assert read(pieces) == set()


def test_members_that_none_can_take_from_have_no_share() -> None:
    pieces = make(10, member("a", seed=None))
    assert read(pieces) == set(range(10))


def test_while_one_near_has_all_of_it_the_origin_is_left_alone() -> None:
    pieces = make(10, member("a", whole=True), member("b"))
    assert read(pieces) == set()
    pieces.hear(A, news(*range(10)), 0.0)
    assert sorted(piece for _, piece in bring(pieces)) == list(range(10))


def test_one_far_is_asked_only_when_it_has_all_and_then_before_the_origin() -> None:
    pieces = make(6, member("a", fabrics=("ib2",)))
    pieces.hear(A, news(1, 2), 0.0)
    assert pieces.next_take(0.0) is None
    pieces.set_members([member("me"), member("a", fabrics=("ib2",), whole=True)], 0.0)
    assert read(pieces) == set()
    pieces.hear(A, news(*range(6)), 0.0)
    assert sorted(piece for _, piece in bring(pieces)) == list(range(6))


def test_of_one_far_each_takes_its_own_share_and_of_those_near_the_rest() -> None:
    far = member("far", fabrics=("ib2",), whole=True)
    taken: list[int] = []
    for node in ("me", "a"):
        pieces = Pieces(NodeId(node), "salt", [64])
        pieces.set_members([member("me"), member("a"), far], 0.0)
        pieces.hear(far.node, news(*range(64)), 0.0)
        taken += [piece for _, piece in bring(pieces)]
    assert sorted(taken) == list(range(64))


def test_the_rarest_piece_comes_first() -> None:
    pieces = make(6, member("a", whole=True), member("b"), member("c"))
    pieces.hear(B, news(0, 1, 2), 0.0)
    pieces.hear(C, news(0, 1, 4), 0.0)
    pieces.hear(A, news(*range(6)), 0.0)
    order = bring(pieces)
    for node, rare in ((A, {3, 5}), (B, {2}), (C, {4})):
        assert {piece for _, piece in [each for each in order if each[0] == node][: len(rare)]} == rare


def test_those_that_take_from_one_begin_with_different_pieces() -> None:
    first: list[int] = []
    for node in ("me", "b"):
        pieces = Pieces(NodeId(node), "salt", [64])
        pieces.set_members([member("me"), member("b"), member("a", whole=True)], 0.0)
        pieces.hear(A, news(*range(64)), 0.0)
        first += [piece for _, piece in bring(pieces)][:20]
    assert len(set(first)) == 40


def test_who_takes_alone_from_one_takes_in_order() -> None:
    pieces = make(32, member("a", whole=True))
    pieces.hear(A, news(*range(32)), 0.0)
    assert [piece for _, piece in bring(pieces)] == list(range(32))


def test_one_member_has_two_transfers_and_all_have_eight() -> None:
    names = [f"m{number}" for number in range(6)]
    pieces = make(100, *(member(name, whole=True) for name in names))
    for name in names:
        pieces.hear(NodeId(name), news(*range(100)), 0.0)
    taken = [take(pieces) for _ in range(MOST_OF_ALL)]
    assert pieces.next_take(0.0) is None
    assert max(sum(each.node == name for each in taken) for name in names) <= MOST_OF_ONE
    assert len({each.piece for each in taken}) == MOST_OF_ALL


def test_members_that_are_equally_good_are_asked_in_turn() -> None:
    names = [f"w{number:02}" for number in range(16)]
    pieces = make(2000, *(member(name, whole=True) for name in names))
    for name in names:
        pieces.hear(NodeId(name), news(*range(2000)), 0.0)
    asked: Counter[NodeId] = Counter()
    running = [take(pieces) for _ in range(MOST_OF_ALL)]
    for _ in range(160 - MOST_OF_ALL):
        done = running.pop(0)
        pieces.got(0, done.piece, done.node, 0.0)
        pieces.release(done)
        asked[done.node] += 1
        running.append(take(pieces))
    asked.update(each.node for each in running)
    assert set(asked.values()) == {10}


def test_nodes_that_begin_at_once_begin_with_different_members() -> None:
    names = [f"w{number:02}" for number in range(16)]
    first: Counter[NodeId] = Counter()
    for number in range(64):
        pieces = Pieces(NodeId(f"n{number}"), "salt", [MOST_OF_ALL])
        pieces.set_members([member(f"n{number}"), *(member(name, whole=True) for name in names)], 0.0)
        for name in names:
            pieces.hear(NodeId(name), news(*range(MOST_OF_ALL)), 0.0)
        first.update(take(pieces).node for _ in range(MOST_OF_ALL))
    assert len(first) == 16
    assert max(first.values()) < 64


def test_one_that_was_busy_long_is_asked_at_once_though_most_has_come_from_elsewhere() -> None:
    pieces = make(4 * MOST_PASSED, member("a", whole=True), member("b", whole=True))
    for node in (A, B):
        pieces.hear(node, news(*range(4 * MOST_PASSED)), 0.0)
    pieces.rest(A, 0.0)
    for _ in range(3 * MOST_PASSED):
        each = take(pieces)
        assert each.node == B
        pieces.got(0, each.piece, B, 0.0)
        pieces.release(each)
    taken = [take(pieces, REST_SECONDS) for _ in range(2 * MOST_OF_ONE)]
    assert {each.node for each in taken} == {A, B}
    assert len({each.piece for each in taken}) == len(taken)
    for each in taken:
        pieces.got(0, each.piece, each.node, REST_SECONDS)
        pieces.release(each)
    assert len(bring(pieces, REST_SECONDS)) == MOST_PASSED - len(taken)
    assert pieces.left == 0


@pytest.mark.slow
def test_what_all_told_is_forgotten_when_they_go_however_much_it_was() -> None:
    count = 3 * MOST_SWEPT // 2
    pieces = make(count, member("a", whole=True), member("b", whole=True))
    for node in (A, B):
        pieces.hear(node, news(*range(count)), 0.0)
    pieces.set_members([member("me")], 0.0)
    assert [pieces.next_take(0.0) for _ in range(5)] == [None] * 5
    pieces.set_members([member("me"), member("a", whole=True)], 0.0)
    pieces.hear(A, news(7), 0.0)
    assert bring(pieces) == [(A, 7)]
    pieces.set_members([member("me")], 0.0)
    assert read(pieces) == set(range(count)) - {7}


def test_more_members_than_can_be_counted_do_no_harm() -> None:
    names = [NodeId(f"n{number:03}") for number in range(MOST_HOLDERS + 10)]
    pieces = make(2, *map(member, names))
    for name in names:
        pieces.hear(name, news(0), 0.0)
    assert len(pieces.list_there(0.0)) == MOST_HOLDERS
    assert [piece for _, piece in bring(pieces)] == [0]


def test_of_those_far_away_whoever_has_told_of_something_is_asked() -> None:
    far = [member(name, fabrics=("ib2",), whole=True) for name in ("a", "b")]
    pieces = make(6, *far)
    pieces.hear(A, news(4, 5), 0.0)
    pieces.hear(B, news(1, 4), 0.0)
    taken = [take(pieces) for _ in range(3)]
    assert sorted(each.piece for each in taken) == [1, 4, 5]
    assert pieces.next_take(0.0) is None
    pieces.release(taken[0])
    assert take(pieces).piece == taken[0].piece


def test_a_piece_that_failed_is_asked_for_again() -> None:
    pieces = make(1, member("a", whole=True))
    pieces.hear(A, news(0), 0.0)
    first = take(pieces)
    assert pieces.next_take(0.0) is None
    pieces.release(first)
    assert take(pieces) == first


def test_what_a_member_does_not_have_after_all_is_had_elsewhere() -> None:
    pieces = make(2, member("a"))
    pieces.hear(A, news(0, 1), 0.0)
    first = take(pieces)
    pieces.lacks(first)
    pieces.release(first)
    assert take(pieces).piece != first.piece


def test_one_with_too_much_to_do_is_left_in_peace_and_then_alone() -> None:
    pieces = make(1, member("a", whole=True))
    pieces.hear(A, news(0), 0.0)
    now = 0.0
    while now <= PATIENCE_SECONDS:
        each = take(pieces, now)
        pieces.rest(A, now)
        pieces.release(each)
        assert pieces.next_take(now) is None
        now += REST_SECONDS
    each = take(pieces, now)
    pieces.rest(A, now)
    pieces.release(each)
    assert pieces.list_there(now) == ()
    assert read(pieces, now) == {0}


def test_one_that_left_is_believed_anew_when_it_is_back() -> None:
    pieces = make(4, member("a", whole=True))
    pieces.hear(A, news(0, 1, 2, 3), 0.0)
    pieces.leave(A, AWAY_SECONDS, 0.0)
    pieces.hear(A, news(0), 1.0)
    assert pieces.next_take(1.0) is None
    assert pieces.list_there(1.0) == ()
    assert [each.node for each in pieces.list_there(AWAY_SECONDS)] == [A]
    pieces.hear(A, news(2), AWAY_SECONDS)
    assert bring(pieces, AWAY_SECONDS) == [(A, 2)]


def test_one_that_is_busy_behind_the_server_is_left_alone_for_a_moment_only() -> None:
    pieces = make(1, member("a", whole=True, seed=RELAY))
    pieces.hear(A, news(0), 0.0)
    pieces.rest(A, 0.0)
    pieces.rest(A, PATIENCE_SECONDS + 1)
    assert pieces.list_there(PATIENCE_SECONDS + 1) == ()
    assert pieces.list_there(2 * PATIENCE_SECONDS + 1) != ()


def test_one_that_is_missed_is_not_asked_and_keeps_its_share_until_patience_is_over() -> None:
    pieces = make(100, member("a", seed=RELAY))
    pieces.hear(A, news(*range(100)), 0.0)
    assert not pieces.miss(A, 0.0)
    assert pieces.next_take(0.0) is None
    assert pieces.next_run(PATIENCE_SECONDS - 0.1) is None
    assert not pieces.miss(A, PATIENCE_SECONDS - 0.1)
    assert pieces.has_others(PATIENCE_SECONDS - 0.1)
    assert pieces.miss(A, PATIENCE_SECONDS)
    assert pieces.miss(A, PATIENCE_SECONDS + 1)
    assert not pieces.has_others(PATIENCE_SECONDS)
    assert pieces.list_there(PATIENCE_SECONDS) != (), "it is asked what it has, and nothing else"
    assert read(pieces, PATIENCE_SECONDS) == set(range(100))


def test_one_that_was_missed_is_trusted_again_with_its_first_word() -> None:
    pieces = make(100, member("a", seed=RELAY))
    ours = read(pieces, 0.0)
    pieces.miss(A, 1.0)
    assert pieces.suspend_silent(PATIENCE_SECONDS + 0.1) == (A,)
    assert pieces.miss(A, 20.0)
    pieces.met(A, 21.0)
    assert pieces.next_run(21.0) is None, "its share is its own again"
    assert pieces.suspend_silent(20.9 + PATIENCE_SECONDS) == ()
    assert pieces.suspend_silent(21.1 + PATIENCE_SECONDS) == (A,)
    pieces.met(A, 32.0)
    assert pieces.next_run(32.0) is not None, "who was silent by itself stays so"
    missing = sorted(set(range(100)) - ours)
    pieces.hear(A, news(missing[0]), 33.0)
    pieces.miss(A, 33.0)
    assert pieces.next_take(33.0) is None
    pieces.met(A, 34.0)
    assert bring(pieces, 34.0) == [(A, missing[0])]


def test_one_that_was_silent_for_as_long_already_is_passed_over_at_once() -> None:
    pieces = make(4, member("a", seed=RELAY))
    pieces.hear(A, news(0, 1, 2, 3), 50.0)
    assert pieces.miss(A, 60.0, silent_seconds=PATIENCE_SECONDS)
    assert read(pieces, 60.0) == {0, 1, 2, 3}


def test_refusals_of_the_time_when_one_was_missed_do_not_count() -> None:
    pieces = make(1, member("a", seed=RELAY))
    pieces.hear(A, news(0), 0.0)
    pieces.rest(A, 0.0)
    pieces.miss(A, 1.0)
    pieces.rest(A, 2.0)
    pieces.met(A, 9.0)
    pieces.rest(A, PATIENCE_SECONDS + 3)
    assert pieces.list_there(PATIENCE_SECONDS + 3) != ()


def test_nobody_misses_one_that_is_no_member() -> None:
    pieces = make(1, member("a"))
    assert not pieces.miss(B, 0.0)
    pieces.met(B, 0.0)
    pieces.met(A, 0.0)
    assert [each.node for each in pieces.list_there(0.0)] == [A]


def test_the_slow_one_of_several_is_not_waited_for_at_the_end() -> None:
    pieces = make(1, member("a"), member("b"))
    pieces.hear(A, news(0), 0.0)
    pieces.hear(B, news(0), 0.0)
    first = take(pieces)
    assert pieces.next_take(SECOND_ASK_SECONDS - 0.1) is None
    second = take(pieces, SECOND_ASK_SECONDS)
    assert {first.node, second.node} == {A, B}
    assert pieces.next_take(100.0) is None


def test_who_has_something_else_is_not_asked_for_what_a_slow_one_brings() -> None:
    pieces = make(2, member("a"), member("b"))
    pieces.hear(A, news(0), 0.0)
    pieces.hear(B, news(1), 0.0)
    assert len([take(pieces), take(pieces)]) == 2
    assert pieces.next_take(SECOND_ASK_SECONDS) is None


def grow(pieces: Pieces, least: int) -> Run:
    """A request of so many pieces: as long as they are after a while."""
    while (run := pieces.next_run(0.0)) is not None and run.stop - run.start < least:
        for piece in range(run.start, run.stop):
            assert pieces.begin(run, piece, 0.0)
            pieces.got(0, piece, None, 0.0)
        pieces.end_run(run)
    assert run is not None
    return run


def test_what_a_slow_line_has_not_begun_is_asked_for_by_others_in_halves() -> None:
    pieces = make(1000)
    slow = grow(pieces, 32)
    assert pieces.begin(slow, slow.start, 0.0)
    read(pieces)
    left = slow.stop - slow.start
    assert pieces.left == left
    # It may only just have begun.
    assert pieces.next_run(0.0) is None
    half = pieces.next_run(5.0)
    assert half == Run(file=0, start=slow.stop - left // 2, stop=slow.stop)
    assert not pieces.begin(slow, half.start, 5.0, underway=True)
    assert pieces.begin(half, half.start, 5.0)
    pieces.got(0, half.start, None, 5.0)
    pieces.end_run(half)
    # All but what it has begun, however often somebody asks.
    assert read(pieces, 20.0) == set(range(slow.start + 1, slow.stop)) - {half.start}
    assert pieces.next_run(1000.0) is None
    pieces.got(0, slow.start, None, 1000.0)
    assert not pieces.begin(slow, slow.start + 1, 1000.0)
    pieces.end_run(slow)
    assert pieces.left == 0


def test_what_a_slow_line_has_not_begun_is_left_to_those_that_have_it() -> None:
    pieces = make(100)
    slow = pieces.next_run(0.0)
    assert slow == Run(file=0, start=0, stop=2)
    assert pieces.begin(slow, 0, 0.0)
    pieces.set_members([member("me"), member("a", whole=True)], 0.0)
    assert pieces.next_run(5.0) is None
    pieces.hear(A, news(*range(100)), 5.0)
    assert sorted(piece for _, piece in bring(pieces, 5.0)) == list(range(100))


def test_what_was_taken_over_stays_with_whoever_did_that() -> None:
    pieces = make(1000)
    slow = grow(pieces, 32)
    assert pieces.begin(slow, slow.start, 0.0)
    read(pieces)
    half = pieces.next_run(5.0)
    assert half is not None
    assert pieces.begin(half, half.start, 5.0)
    pieces.end_run(slow)
    assert read(pieces, 5.0) == set(range(slow.start, half.start))


def test_a_line_that_is_far_slower_than_the_others_ends_after_its_piece() -> None:
    pieces = make(10_000)
    runs = [grow(pieces, 64), pieces.next_run(0.0)]
    slow, other = runs
    assert other is not None
    assert pieces.begin(slow, slow.start, 0.0)
    for number in range(20):
        now = (number + 1) * PATIENCE_SECONDS / 20
        assert pieces.begin(other, other.start + number, now)
        pieces.got(0, other.start + number, None, now)
    pieces.got(0, slow.start, None, PATIENCE_SECONDS)
    assert not pieces.begin(slow, slow.start + 1, PATIENCE_SECONDS, underway=True)
    assert pieces.begin(other, other.start + 20, PATIENCE_SECONDS)
    pieces.end_run(slow)
    again = pieces.next_run(PATIENCE_SECONDS)
    assert again is not None
    assert again.start == slow.start + 1
    assert pieces.begin(again, again.start, PATIENCE_SECONDS)


def test_slow_members_keep_nobody_from_being_asked() -> None:
    names = [f"m{number:02}" for number in range(12)]
    pieces = make(100, *(member(name) for name in names))
    for name in names:
        pieces.hear(NodeId(name), news(*range(100)), 0.0)
    slow = [take(pieces).node for _ in range(MOST_OF_ALL)]
    assert len(set(slow)) == MOST_OF_ALL
    assert pieces.next_take(PATIENCE_SECONDS - 0.1) is None
    others = [take(pieces, PATIENCE_SECONDS).node for _ in range(MOST_OF_ALL)]
    assert set(others) == set(map(NodeId, names)) - set(slow)
    # No more than that, however slow all are.
    assert pieces.next_take(10 * PATIENCE_SECONDS) is None


def test_who_was_far_slower_than_others_is_asked_when_nobody_else_is_free() -> None:
    pieces = make(100, member("a"), member("b"))
    pieces.hear(A, news(*range(100)), 0.0)
    pieces.hear(B, news(*range(100)), 0.0)
    both = {each.node: each for each in (take(pieces), take(pieces))}
    for node, now in ((B, 0.1), (A, 9.0)):
        pieces.got(0, both[node].piece, node, now)
        pieces.release(both[node])
    again = [take(pieces, 9.0) for _ in range(3)]
    assert [each.node for each in again] == [B, B, A]
    for each in again:
        pieces.release(each)
    assert {take(pieces, 9.0 + SUSPENDED_SECONDS).node for _ in range(2)} == {A, B}


def test_what_one_brings_that_went_meanwhile_says_nothing_of_how_quick_it_is() -> None:
    pieces = make(100, member("a"), member("b"))
    pieces.hear(A, news(*range(100)), 0.0)
    old = take(pieces)
    pieces.set_members([member("me"), member("b")], 0.0)
    pieces.set_members([member("me"), member("a"), member("b")], 0.0)
    pieces.got(0, old.piece, A, 100.0)
    pieces.release(old)
    pieces.hear(A, news(*range(100)), 100.0)
    pieces.hear(B, news(*range(100)), 100.0)
    assert {take(pieces, 100.0).node for _ in range(2)} == {A, B}


def test_who_is_silent_is_asked_when_nobody_else_is_free() -> None:
    pieces = make(100, member("a", whole=True), member("b"))
    pieces.hear(A, news(*range(50)), 0.0)
    pieces.hear(B, news(*range(50)), PATIENCE_SECONDS)
    assert pieces.suspend_silent(PATIENCE_SECONDS + 1) == (A,)
    assert [take(pieces, PATIENCE_SECONDS + 1).node for _ in range(3)] == [B, B, A]


def test_who_brings_nothing_loses_its_share_for_a_while() -> None:
    pieces = make(100, member("a"))
    ours = read(pieces, 0.0)
    assert 0 < len(ours) < 100
    assert pieces.suspend_silent(PATIENCE_SECONDS) == ()
    assert pieces.suspend_silent(PATIENCE_SECONDS + 0.1) == (A,)
    assert pieces.list_there(11.0) != ()
    run = pieces.next_run(11.0)
    assert run is not None
    pieces.end_run(run)
    assert pieces.next_run(PATIENCE_SECONDS + 0.1 + SUSPENDED_SECONDS) is None


def test_who_brings_something_keeps_its_share() -> None:
    pieces = make(100, member("a"))
    read(pieces)
    for now in range(1, 60):
        pieces.hear(A, news(now), float(now))
        assert pieces.suspend_silent(float(now)) == ()


def test_where_the_origin_stalls_nobody_is_called_silent() -> None:
    pieces = make(100, member("a"))
    run = pieces.next_run(0.0)
    assert run is not None
    assert pieces.begin(run, run.start, 0.0)
    assert pieces.suspend_silent(1000.0) == ()
    pieces.got(run.file, run.start, None, 1000.0)
    pieces.end_run(run)
    # Now that it gives again, all have their time.
    read(pieces, 1001.0)
    assert pieces.suspend_silent(1001.0) == ()
    assert pieces.suspend_silent(1001.0 + PATIENCE_SECONDS) == (A,)


def test_who_was_stopped_itself_calls_nobody_silent() -> None:
    pieces = make(100, member("a"))
    read(pieces, 0.0)
    pieces.excuse_all(1000.0)
    assert pieces.suspend_silent(1000.0 + PATIENCE_SECONDS) == ()
    assert pieces.suspend_silent(1000.1 + PATIENCE_SECONDS) == (A,)


def test_who_was_stopped_itself_holds_no_refusal_against_anybody() -> None:
    pieces = make(100, member("a"))
    pieces.hear(A, news(*range(100)), 0.0)
    pieces.rest(A, 1.0)
    pieces.excuse_all(1000.0)
    pieces.rest(A, 1000.1)
    assert pieces.list_there(1001.0) != ()
    pieces.rest(A, 1001.0 + PATIENCE_SECONDS)
    assert pieces.list_there(1002.0 + PATIENCE_SECONDS) == ()


def test_where_pieces_come_slowly_members_have_as_much_time() -> None:
    pieces = make(100, member("a"))
    run = pieces.next_run(0.0)
    assert run is not None
    assert pieces.begin(run, run.start, 0.0)
    pieces.got(run.file, run.start, None, 20.0)
    pieces.end_run(run)
    assert pieces.suspend_silent(59.0) == ()
    read(pieces, 59.0)
    assert pieces.suspend_silent(59.0) == ()
    assert pieces.suspend_silent(59.0 + 79.0) == (A,)


def test_a_whole_one_that_does_not_tell_of_all_is_not_waited_for_for_ever() -> None:
    pieces = make(4, member("a", whole=True))
    pieces.hear(A, news(0, 1), 0.0)
    assert sorted(piece for _, piece in bring(pieces)) == [0, 1]
    assert pieces.suspend_silent(PATIENCE_SECONDS + 0.1) == (A,)
    assert read(pieces, 11.0) == {2, 3}


def test_a_whole_one_that_has_told_of_all_is_never_called_silent() -> None:
    pieces = make(2, member("a", whole=True))
    pieces.hear(A, news(0, 1), 0.0)
    assert pieces.suspend_silent(1000.0) == ()


def test_a_run_gives_way_where_a_piece_came_to_somebody_near() -> None:
    pieces = make(100, member("a"))
    pieces.leave(A, 1.0, 0.0)
    run = pieces.next_run(0.5)
    assert run is not None
    assert pieces.begin(run, run.start, 0.5)
    pieces.hear(A, news(run.start + 1), 1.5)
    assert not pieces.begin(run, run.start + 1, 1.5)
    # (unless it is as good as here)
    assert pieces.begin(run, run.start + 1, 1.5, underway=True)
    pieces.end_run(Run(file=0, start=run.start, stop=run.start + 2))
    assert take(pieces, 1.5).piece == run.start + 1
    assert not pieces.begin(run, run.start + 1, 1.5, underway=True)


def test_a_piece_that_two_tell_otherwise_is_had_from_the_origin_and_the_liar_is_found() -> None:
    pieces = make(4, member("a", whole=True), member("b", whole=True))
    pieces.hear(A, news(0, 1, 2, 3), 0.0)
    pieces.hear(B, [*news(0, 1, 3), *news(2, mark="f")], 0.0)
    assert sorted(piece for _, piece in bring(pieces)) == [0, 1, 3]
    assert pieces.compare(0, 2, "0" * 64) == (B,)
    assert pieces.compare(0, 2, "f" * 64) == (A,)
    assert read(pieces) == {2}


def test_a_distrusted_file_comes_from_the_origin_alone() -> None:
    pieces = make(8, member("a", whole=True))
    pieces.hear(A, news(*range(8)), 0.0)
    assert len(bring(pieces)) == 8
    for piece in range(8):
        pieces.lost(0, piece)
    pieces.hear(A, news(*range(8)), 1.0)
    assert pieces.next_take(1.0) is None
    assert pieces.suspend_silent(100.0) == ()
    assert pieces.compare(0, 0, "f" * 64) == (A,)
    assert read(pieces, 1.0) == set(range(8))
    assert pieces.left == 0


def test_a_file_that_is_read_in_order_is_one_request_for_all_of_it() -> None:
    pieces = Pieces(ME, "salt", [100], [(0, 7)])
    first = pieces.next_run(0.0)
    assert first is not None
    pieces.read_in_order(0)
    assert pieces.next_run(0.0) is None
    pieces.end_run(first)
    run = pieces.next_run(0.0)
    assert run == Run(file=0, start=0, stop=100, ordered=True)
    assert pieces.next_run(0.0) is None
    assert [piece for piece in range(100) if not pieces.begin(run, piece, 0.0)] == [7]
    pieces.lost(0, 7)
    assert pieces.next_run(0.0) is None
    assert pieces.goes_on(0, 99)
    pieces.got(0, 99)
    assert not pieces.goes_on(0, 99)


def test_nonsense_of_a_member_is_passed_over() -> None:
    pieces = make(2, member("a", whole=True))
    pieces.hear(A, [(0, 2, "0" * 64), (1, 0, "0" * 64), (-1, 0, "0" * 64), (0, -1, "0" * 64)], 0.0)
    pieces.hear(NodeId("stranger"), news(0), 0.0)
    assert pieces.next_take(0.0) is None


def test_what_comes_twice_or_from_one_that_is_gone_counts_once() -> None:
    pieces = make(3, member("a", whole=True))
    pieces.hear(A, news(0, 1, 2), 0.0)
    gone = take(pieces)
    pieces.set_members([member("me")], 0.0)
    for _ in range(2):
        pieces.got(0, gone.piece, A, 1.0)
    pieces.got(0, gone.piece)
    pieces.lacks(gone)
    pieces.rest(A, 1.0)
    pieces.leave(A, AWAY_SECONDS, 1.0)
    pieces.release(gone)
    assert pieces.left == 2
    assert pieces.compare(0, gone.piece, "f" * 64) == ()
    assert read(pieces, 1.0) == {0, 1, 2} - {gone.piece}


def test_what_is_wrong_before_it_is_here_comes_from_the_origin_too() -> None:
    pieces = make(2, member("a", fabrics=("ib2",), whole=True))
    pieces.hear(A, news(0, 1), 0.0)
    pieces.lost(0, 1)
    assert [piece for _, piece in bring(pieces)] == [0]
    assert pieces.left == 1
    assert read(pieces) == {1}


def test_a_run_gives_way_to_one_near_that_has_all_of_it() -> None:
    pieces = make(10)
    run = pieces.next_run(0.0)
    assert run is not None
    assert not pieces.is_in_order(0)
    pieces.set_members([member("me"), member("a", whole=True)], 0.0)
    assert not pieces.begin(run, run.start, 0.0)


def test_a_member_that_goes_takes_its_transfers_along() -> None:
    pieces = make(4, member("a", whole=True))
    pieces.hear(A, news(0, 1, 2, 3), 0.0)
    old = [take(pieces), take(pieces)]
    pieces.set_members([member("me"), member("b", whole=True)], 0.0)
    pieces.hear(B, news(0, 1, 2, 3), 0.0)
    for each in old:
        pieces.release(each)
    assert len(bring(pieces)) == 4


EVENTS = st.lists(
    st.tuples(st.sampled_from(["hear", "leave", "fail", "lack", "go", "come"]), st.integers(0, 3), st.integers(0, 39)),
    max_size=60,
)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=3), EVENTS, st.booleans())
def test_every_piece_comes_in_the_end_whatever_happens_on_the_way(
    counts: list[int], events: list[tuple[str, int, int]], seeding: bool
) -> None:
    """Where the origin gives, nothing that members do keeps a piece from coming; and nothing is asked for that is
    there, nor of one that does not say that it has it."""
    pieces = Pieces(ME, "salt", counts)
    names = [f"m{number}" for number in range(4)]
    present = set(names)
    own = member("me", seed="10.0.0.9:7000" if seeding else None)
    running: list[Take] = []
    now = 0.0
    places = [(file, piece) for file, count in enumerate(counts) for piece in range(count)]

    def tell() -> None:
        listed = [member(name, whole=name == "m0", fabrics=("x",) if name == "m3" else ()) for name in sorted(present)]
        pieces.set_members([own, *listed], now)

    tell()
    for what, who, which in events:
        now += 0.5
        node = NodeId(names[who])
        if what == "hear" and places:
            file, piece = places[which % len(places)]
            pieces.hear(node, [(file, piece, "0" * 64)], now)
        elif what == "leave":
            pieces.leave(node, AWAY_SECONDS, now)
        elif what in ("go", "come"):
            (present.discard if what == "go" else present.add)(names[who])
            tell()
        elif running:
            each = running.pop(which % len(running))
            if what == "lack":
                pieces.lacks(each)
            pieces.release(each)
        while (found := pieces.next_take(now)) is not None:
            assert not pieces.is_done(found.file, found.piece)
            assert found.node in present
            running.append(found)
        assert len(running) <= MOST_OF_ALL + 8
    for each in running:
        pieces.release(each)
    for _ in range(200):
        now += 1.0
        pieces.suspend_silent(now)
        while (run := pieces.next_run(now)) is not None:
            for piece in range(run.start, run.stop):
                if pieces.begin(run, piece, now):
                    pieces.got(run.file, piece, None, now)
            pieces.end_run(run)
        while (found := pieces.next_take(now)) is not None:
            pieces.got(found.file, found.piece, found.node, now)
            pieces.release(found)
    assert pieces.left == 0
    assert pieces.next_take(now) is None
    assert pieces.next_run(now) is None


@pytest.mark.parametrize("seeding", [True, False])
@given(st.integers(1, 30), st.data())
def test_what_somebody_has_comes_without_the_origin(seeding: bool, count: int, data: st.DataObject) -> None:
    pieces = make(count, member("a"), member("b"), member("c"), seeding=seeding)
    for piece in range(count):
        holders = data.draw(st.sets(st.sampled_from([A, B, C]), min_size=1))
        for node in sorted(holders):
            pieces.hear(node, news(piece), 0.0)
    assert read(pieces) == set()
    assert sorted(piece for _, piece in bring(pieces)) == list(range(count))
