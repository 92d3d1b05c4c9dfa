"""How much one node may have written in our log."""

from __future__ import annotations

import logging

import pytest

from llmgw.link.sparing import NODE_LINES, WINDOW_SECONDS, SparingLog


def test_a_node_gets_some_lines_and_then_a_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llmgw.link")
    words = SparingLog()
    for number in range(700):
        words.say("gpu-01", logging.WARNING if number == 300 else logging.INFO, f"line {number}", number / 100)
    words.say("gpu-02", logging.INFO, "another", 1.0)
    assert caplog.messages == [*(f"line {number}" for number in range(NODE_LINES)), "another"]
    caplog.clear()
    words.sweep(WINDOW_SECONDS)
    assert caplog.messages == [f"{700 - NODE_LINES} more lines about gpu-01 within 60 s; the last: line 699"]
    # as loud as the loudest that it stands for
    assert caplog.records[0].levelno == logging.WARNING


def test_what_is_not_logged_anyway_takes_no_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "llmgw.link")
    words = SparingLog(lines=1)
    words.say("gpu-01", logging.INFO, "it is open", 0.0)
    words.say("gpu-01", logging.WARNING, "it broke", 0.0)
    assert caplog.messages == ["it broke"]


def test_each_line_is_cleaned(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llmgw.link")
    words = SparingLog(lines=1)
    for _ in range(2):
        words.say("a\nb", logging.INFO, "one\ntwo", 0.0)
    words.sweep(WINDOW_SECONDS)
    assert caplog.messages == ["one\\ntwo", "1 more lines about a\\nb within 60 s; the last: one\\ntwo"]
