from __future__ import annotations

import json
import re
from typing import Any

import pytest

TEXT = "name: qwen\nsource: /srv/q.gguf  # é\n"
FIRST = {"number": 1, "at": 1e9, "origin": "declared", "where": "server.yaml:4:3", "outcome": "proven", "text": TEXT}
SECOND = {"number": 2, "at": 1e9, "origin": "stored", "outcome": "failed", "why": "out of memory", "text": "name: q"}
THIRD = {"number": 3, "at": 1e9, "origin": "stored", "note": "returned to 1: 2 failed", "text": TEXT}
HISTORY = {
    "model": "qwen",
    "definitions": [
        {**THIRD, "current": True, "serving": True},
        {**SECOND, "current": False, "serving": False},
        {**FIRST, "current": False, "serving": False},
    ],
}


def test_definitions_are_a_table_with_what_became_of_each(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/history/qwen", HISTORY)
    told = re.sub(r"2001-09-\d\d \d\d:\d\d", "2001-09-09 03:46", ctl("model", "history", "qwen").out)
    assert told == (
        "NUMBER  SINCE             KEPT      NOW              OUTCOME  DETAIL\n"
        "3       2001-09-09 03:46  stored    current,serving  -        returned to 1: 2 failed\n"
        "2       2001-09-09 03:46  stored    -                failed   out of memory\n"
        "1       2001-09-09 03:46  declared  -                proven   server.yaml:4:3\n"
    )


def test_one_of_them_is_written_as_it_was(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/history/qwen", HISTORY)
    assert ctl("model", "history", "qwen", "--number", "1").out == TEXT
    assert ctl("model", "history", "qwen", "--number", "2").out == "name: q\n"
    assert json.loads(ctl("model", "history", "qwen", "--number", "2", "--json").out)["why"] == "out of memory"


def test_a_number_that_there_is_not_is_told_with_those_that_there_are(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/history/qwen", HISTORY)
    ended = ctl("model", "history", "qwen", "--number", "9")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == "llmgw: qwen has no definition 9; those that are kept: 1, 2, 3\n"


@pytest.mark.parametrize("words", [("--number", "0"), ("--number", "x"), ("--number", "1", "--watch")])
def test_what_is_written_wrong_is_told_before_anything_is_asked(port: Any, ctl: Any, words: tuple[str, ...]) -> None:
    assert (ctl("model", "history", "qwen", *words).status, port.heard) == (2, [])
