from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.brake import Brake, find_brake


def test_it_holds_when_more_than_half_of_the_nodes_and_three_of_them_go_together() -> None:
    assert find_brake([10.0, 11.0, 12.0], 5, 600.0, 20.0) == Brake(lost=3, nodes=5, until=610.0)
    assert find_brake([10.0, 11.0, 12.0], 6, 600.0, 20.0) is None
    assert find_brake([10.0, 11.0], 2, 600.0, 20.0) is None
    assert find_brake([], 0, 600.0, 20.0) is None


def test_who_has_been_lost_for_long_counts_on_neither_side() -> None:
    long_gone = [0.0] * 7
    assert find_brake([*long_gone, 1000.0, 1001.0, 1002.0], 12, 600.0, 1010.0) == Brake(lost=3, nodes=5, until=1600.0)
    assert find_brake([*long_gone, 1000.0, 1001.0], 12, 600.0, 1010.0) is None


def test_it_lasts_until_so_many_have_aged_out_that_the_rest_is_no_majority() -> None:
    brake = find_brake([10.0, 11.0, 12.0, 13.0, 14.0], 6, 600.0, 20.0)
    assert brake == Brake(lost=5, nodes=6, until=612.0)


def test_a_brake_of_no_time_never_holds() -> None:
    assert find_brake([10.0] * 9, 9, 0.0, 10.0) is None


@given(st.lists(st.integers(0, 100), max_size=12), st.integers(0, 8), st.integers(0, 60), st.integers(0, 120))
def test_it_is_over_exactly_when_it_says(lost: list[int], there: int, seconds: int, now: int) -> None:
    lost_at = [float(at) for at in lost if at <= now]
    brake = find_brake(lost_at, len(lost_at) + there, float(seconds), float(now))
    if brake is not None:
        assert brake.until > now
        for later in range(now, 200):
            held = find_brake(lost_at, len(lost_at) + there, float(seconds), float(later)) is not None
            assert held is (later < brake.until)


def test_it_is_over_at_the_very_moment_that_it_names() -> None:
    # (a + 600) - a is a little less than 600 here
    at = 3943.616755677566
    brake = find_brake([at] * 3, 3, 600.0, at)
    assert brake is not None
    assert find_brake([at] * 3, 3, 600.0, brake.until) is None
