from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.units import format_decimal, format_duration, format_size, parse_duration, parse_size, printable


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("15s", 15.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1h1ms", 3600.001),
        ("2d", 172_800.0),
        ("1.5s", 1.5),
        ("0s", 0.0),
        (" 5m ", 300.0),
        ("30", 30.0),
        ("0.25", 0.25),
        (0, 0.0),
        (7, 7.0),
        (0.5, 0.5),
    ],
)
def test_a_duration_is_read_as_seconds(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", " ", "5x", "m", "-5s", "5 m", "30m1h", "1h1h", "5M", "٣s", "1e3", -1, -0.5, True, None, float("nan")]
)
def test_what_is_no_duration_is_named_together_with_what_would_be(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a duration: write it like") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


def test_an_endless_duration_is_refused() -> None:
    with pytest.raises(ValueError, match="inf"):
        parse_duration(float("inf"))


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("80GB", 80_000_000_000),
        ("64MiB", 67_108_864),
        ("64mib", 67_108_864),
        ("1.5 kB", 1_500),
        ("10B", 10),
        ("2TiB", 2_199_023_255_552),
        ("1PB", 10**15),
        ("9007199254740993B", 9_007_199_254_740_993),
        ("512", 512),
        (0, 0),
        (4096, 4096),
    ],
)
def test_a_size_is_read_as_bytes(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "80G", "-1GB", "1..5GB", "80GB free", "٣GB", "²", -1, True, None, 1.5])
def test_what_is_no_size_is_named_together_with_what_would_be(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a size: write it like") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "0s"),
        (0.25, "250ms"),
        (0.9996, "1s"),
        (1.5, "1.5s"),
        (15, "15s"),
        (59.9999, "1m"),
        (60, "1m"),
        (90.4, "1m30s"),
        (5400, "1h30m"),
        (90_000, "1d1h"),
    ],
)
def test_a_duration_is_written_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0B"),
        (999, "999B"),
        (80_000_000_000, "80GB"),
        (1_500_000, "1.5MB"),
        (67_108_864, "64MiB"),
        (1_536, "1.5KiB"),
        (67_200_001, "67.2MB"),
        (999_999, "1MB"),
        (999_999_999_999_999_999, "1000PB"),
    ],
)
def test_a_size_is_written_in_the_unit_that_fits(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(min_value=0, max_value=10**8))
def test_whole_seconds_survive_being_written_and_read(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(min_value=0, max_value=59_999))
def test_milliseconds_below_a_minute_survive_being_written_and_read(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == milliseconds / 1000


@given(st.integers(min_value=0, max_value=2**60))
def test_a_size_is_written_within_a_twentieth_of_itself(size_bytes: int) -> None:
    assert abs(parse_size(format_size(size_bytes)) - size_bytes) <= size_bytes / 20


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0B"), (999, "999B"), (30 * 2**20, "31.5MB"), (2**20, "1MB"), (999_960, "1MB"), (4_700_000_000, "4.7GB")],
)
def test_figures_that_are_compared_are_of_one_family(size_bytes: int, text: str) -> None:
    assert format_decimal(size_bytes) == text


def test_what_is_printed_makes_no_line_of_its_own() -> None:
    assert printable("a line, and äöü") == "a line, and äöü"
    assert printable("Köln\n") == "Köln\\n"
    assert printable("bye\n2026 forged \x1b[31m") == "bye\\n2026 forged \\x1b[31m"
