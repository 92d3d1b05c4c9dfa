from __future__ import annotations

from llmgw.host.weights.retries import MOST_REST_SECONDS, MOST_TRIES, Retries


def test_each_rest_is_twice_as_long_up_to_half_a_minute() -> None:
    retries, rests, now = Retries(), [], 0.0
    for _ in range(7):
        assert retries.note(retries.number, 0.0, now)
        rests.append(retries.rest_until - now)
        now = retries.rest_until
    assert rests == [1, 2, 4, 8, 16, MOST_REST_SECONDS, MOST_REST_SECONDS]


def test_the_tenth_try_in_vain_is_the_last() -> None:
    retries = Retries()
    assert [retries.note(retries.number, 0.0, 0.0) for _ in range(MOST_TRIES)] == [True] * 9 + [False]


def test_what_came_between_makes_it_the_first_again() -> None:
    retries = Retries()
    for _ in range(50):
        assert retries.note(retries.number, 0.0, 10.0)
        retries.clear()
    assert retries.rest_until == 11.0


def test_it_says_how_many_tries_are_left() -> None:
    retries, said = Retries(), []
    for _ in range(MOST_TRIES):
        retries.note(retries.number, 0.0, 0.0)
        said.append(retries.describe())
    assert said[0] == "it is tried again, 9 times more at most"
    assert said[-2:] == ["it is tried again, 1 time more at most", "it was the last try"]
    assert retries.describe("set HF_TOKEN") == "set HF_TOKEN; it was the last try"


def test_lines_that_break_together_are_one_try() -> None:
    retries = Retries()
    number = retries.number
    assert all(retries.note(number, 0.0, 10.0) for _ in range(4 * MOST_TRIES))
    assert retries.rest_until == 11.0


def test_a_server_that_says_how_long_is_heard() -> None:
    retries = Retries()
    number = retries.number
    retries.note(number, 0.0, 10.0)
    retries.note(number, 25.0, 10.0)
    assert retries.rest_until == 35.0
