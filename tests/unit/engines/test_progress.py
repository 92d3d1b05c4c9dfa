"""Progress in lines of a log."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from llmgw.engines import LogFact, read_progress

TABLE = (
    (re.compile(r"^loading (\S+)"), "loading {0}"),
    (re.compile(r"shards: (\d+)%"), "{0} %"),
    (re.compile(r"loading"), "never: the first counts"),
)
PREFIX = re.compile(r"\[\d+\] ")


def test_the_first_pattern_that_is_found_says_what_it_is() -> None:
    assert read_progress("loading m", TABLE) == LogFact(progress="loading m")
    assert read_progress("nothing", TABLE) is None


def test_the_prefix_is_taken_off_where_there_is_one() -> None:
    assert read_progress("[12] loading m", TABLE, PREFIX) == LogFact(progress="loading m")
    assert read_progress("loading m", TABLE, PREFIX) == LogFact(progress="loading m")


def test_the_last_state_of_a_bar_counts() -> None:
    assert read_progress("shards: 10%\rshards: 20%\r\n", TABLE) == LogFact(progress="20 %")
    assert read_progress("x" * 10**6 + "\rshards: 30%", TABLE) == LogFact(progress="30 %")


@given(st.text())
def test_any_line_will_do(line: str) -> None:
    assert read_progress(line, TABLE, PREFIX) is None or "loading" in line or "shards" in line
