from __future__ import annotations

from llmgw.core.asked import MOST_OF_ONE, PATIENCE_SECONDS, Line, Peer
from llmgw.core.node import NodeId
from llmgw.core.weights import Member


def a_peer() -> Peer:
    return Peer(member=Member(node=NodeId("a"), seed="a:1"), near=True, brought_at=0.0, asked=0, held=bytes(4))


def test_who_is_at_as_many_as_it_may_is_not_free() -> None:
    peer = a_peer()
    assert peer.is_free(0.0)
    peer.takes = dict.fromkeys(range(MOST_OF_ONE), 0.0)
    assert not peer.is_free(0.0)


def test_who_is_at_one_for_long_is_not_free() -> None:
    peer = a_peer()
    peer.takes = {1: 0.0}
    assert peer.is_free(PATIENCE_SECONDS - 0.1)
    assert (peer.is_free(PATIENCE_SECONDS), peer.count_long(PATIENCE_SECONDS)) == (False, 1)


def test_who_rests_is_not_asked_and_waited_for_all_the_same() -> None:
    peer = a_peer()
    peer.rests_until = 5.0
    assert [(peer.is_free(now), peer.is_trusted(now)) for now in (4.0, 5.0)] == [(False, True), (True, True)]


def test_who_is_away_is_neither_asked_nor_waited_for() -> None:
    peer = a_peer()
    peer.away_until = 5.0
    told = [(peer.is_there(now), peer.is_free(now), peer.is_trusted(now)) for now in (4.0, 5.0)]
    assert told == [(False, False, False), (True, True, True)]


def test_who_is_slow_or_suspended_is_asked_last() -> None:
    slow, suspended = a_peer(), a_peer()
    slow.slow_until = suspended.suspended_until = 5.0
    assert [(each.is_second_choice(4.0), each.is_trusted(4.0)) for each in (slow, suspended)] == [
        (True, True),
        (True, False),
    ]
    assert not slow.is_second_choice(5.0)


def test_a_line_has_taken_so_long_for_each_piece_at_least() -> None:
    line = Line(start=10, next=10, stop=20, since=0.0)
    assert line.measure(6.0) == 6.0
    line.next = 13
    assert line.measure(6.0) == 2.0
