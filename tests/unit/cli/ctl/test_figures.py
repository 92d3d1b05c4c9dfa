from __future__ import annotations

import pytest

from llmgw.cli.ctl.figures import ago, free_of, lasted, percent, share_gb


@pytest.mark.parametrize(
    ("free", "total", "cell"),
    [(97.12, 128.4, "97.1/128GB"), (0.0, 1900.0, "0.0/1900GB"), (None, 1.0, "-"), (1.0, None, "-")],
)
def test_a_share_has_as_many_digits_as_one_reads(free: float | None, total: float | None, cell: str) -> None:
    assert share_gb(free, total) == cell


def test_durations_are_in_whole_seconds() -> None:
    assert (lasted(61.4), lasted(0.0), lasted(None)) == ("1m1s", "0s", "-")


def test_how_long_ago_begins_with_now() -> None:
    assert (ago(0.2), ago(2.0), ago(7200.0), ago(None)) == ("now", "2s ago", "2h ago", "-")


@pytest.mark.parametrize(
    ("part", "whole", "cell"),
    [
        (0.254, 1.0, "25%"),
        (60, 90, "67%"),
        (0, 90, "0%"),
        (0, 0, "-"),
        (None, 90, "-"),
        (60, None, "-"),
        (1.0, 1.0, "100%"),
    ],
)
def test_a_part_of_nothing_is_no_percentage(part: float | None, whole: float | None, cell: str) -> None:
    assert percent(part, whole) == cell


def test_of_some_things_the_free_ones_come_first() -> None:
    assert (free_of(8, 8), free_of(0, 16)) == ("8/8 free", "0/16 free")
