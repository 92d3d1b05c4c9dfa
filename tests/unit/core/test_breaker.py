"""Who is passed over after a connection failed, and for how long."""

from __future__ import annotations

from llmgw.core.breaker import FORGET_SECONDS, Breaker
from llmgw.core.replica import ReplicaId

ONE, TWO = ReplicaId("rep-m-1"), ReplicaId("rep-m-2")


def test_nobody_rests_before_something_failed() -> None:
    breaker = Breaker()
    assert not breaker
    assert not breaker.rests(ONE, 0.0)


def test_a_failure_lets_that_replica_rest_for_two_seconds() -> None:
    breaker = Breaker()
    assert breaker.fail(ONE, 10.0) == 2.0
    assert breaker
    assert breaker.rests(ONE, 11.9)
    assert not breaker.rests(ONE, 12.0)
    assert not breaker.rests(TWO, 11.0)


def test_each_failure_in_a_row_doubles_the_rest_up_to_half_a_minute() -> None:
    breaker, now, rests = Breaker(), 0.0, []
    for _ in range(7):
        seconds = breaker.fail(ONE, now)
        assert seconds is not None
        rests.append(seconds)
        now += seconds
    assert rests == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_requests_that_one_crash_ends_are_one_failure() -> None:
    breaker = Breaker()
    assert [breaker.fail(ONE, now) for now in (0.0, 0.1, 1.9)] == [2.0, None, None]
    assert not breaker.rests(ONE, 2.0)


def test_a_success_ends_the_rest_and_the_row() -> None:
    breaker = Breaker()
    breaker.fail(ONE, 0.0)
    breaker.fail(ONE, 2.0)
    breaker.clear(ONE)
    breaker.clear(TWO)
    assert not breaker
    assert breaker.fail(ONE, 3.0) == 2.0


def test_a_failure_long_after_the_last_is_the_first_again_and_the_gone_are_forgotten() -> None:
    breaker = Breaker()
    breaker.fail(ONE, 0.0)
    breaker.fail(TWO, 1.0)
    assert breaker.fail(TWO, 2.0 + FORGET_SECONDS) == 4.0
    assert len(breaker) == 1
    breaker.fail(ONE, 2.0 + FORGET_SECONDS)
    assert breaker.fail(ONE, 4.0 + 2 * FORGET_SECONDS) == 2.0
