"""What the other end says can't write lines of our log, or steer a terminal."""

from __future__ import annotations

import pytest

from llmgw.link.words import clean, trace


@pytest.mark.parametrize(
    ("said", "logged"),
    [
        ("plain words, é and 模型", "plain words, é and 模型"),
        ("bye\n2026 WARNING forged", "bye\\n2026 WARNING forged"),
        ("\x1b[31mred\x07\r\t", "\\x1b[31mred\\x07\\r\\t"),
        ("\u202eturned \u2028\x85\udc80", "\\u202eturned \\u2028\\x85\\udc80"),
    ],
)
def test_what_is_not_printable_is_escaped(said: str, logged: str) -> None:
    assert clean(said) == logged
    assert clean(clean(said)) == logged


def test_what_is_long_is_cut() -> None:
    assert clean("x" * 5000, 100) == "x" * 99 + "…"


def test_a_message_in_a_trace_begins_no_line() -> None:
    try:
        raise ValueError("first\nsecond\x1b[0m")
    except ValueError as error:
        lines = trace(error).split("\n")
    assert lines[0] == ""
    assert all(line.startswith("  | ") and line.isprintable() for line in lines[1:])
    assert lines[-1].startswith("  | second")
