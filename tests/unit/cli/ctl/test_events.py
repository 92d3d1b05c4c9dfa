from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from llmgw.cli.ctl.client import NoAnswer
from llmgw.cli.ctl.events import Following, shape_text

PATIENCE_SECONDS = 60
WHEN = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ")
SILENCE = NoAnswer("nothing answers at http://127.0.0.1:1")


def event(number: int, **facts: Any) -> dict[str, Any]:
    usual = {"number": number, "at": 1e9, "what": "ready", "text": f"thing {number}", "lines": [], "warning": False}
    return {**usual, **facts}


def answer(*numbers: int, last: int | None = None, began: float = 5.0, missed: int = 0) -> dict[str, Any]:
    newest = last if last is not None else numbers[-1]
    return {"events": [event(number) for number in numbers], "last": newest, "began": began, "missed": missed}


FAILED = event(
    2,
    what="failed",
    model="qwen",
    node="gpu01",
    text="rep-qwen-1 ended: \x1b[31mout of memory",
    lines=["loading", "CUDA error"],
    warning=True,
)
TOLD = {"events": [event(1, node="gpu01", what="node"), FAILED, event(3, what="brake")], "last": 3, "began": 5.0}
TOLD["missed"] = 0


def lines_of(out: str) -> list[str]:
    """What was written, without when it happened."""
    return [WHEN.sub("", line) for line in out.splitlines()]


def test_events_are_lines_with_the_newest_last(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/events?after=0&wait=0", TOLD)
    ended = ctl("events")
    assert (ended.status, ended.err) == (0, "")
    assert all(WHEN.match(line) for line in ended.out.splitlines())
    assert lines_of(ended.out) == [
        "node       gpu01             thing 1",
        "failed     qwen, gpu01       rep-qwen-1 ended: out of memory",
        "brake      -                 thing 3",
    ]


def test_the_last_lines_of_an_engine_stand_below_when_they_are_asked_for(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/events?after=0&wait=0", TOLD)
    assert ctl("events", "--verbose", "--lines", "2").out.splitlines()[1:3] == ["    loading", "    CUDA error"]


def test_json_is_an_object_in_each_line(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/events?after=0&wait=0", TOLD)
    told = [json.loads(line) for line in ctl("events", "--json", "--lines", "2").out.splitlines()]
    assert told == [FAILED, event(3, what="brake")]


def test_only_what_is_about_a_model_and_a_node_is_asked_for(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/events?after=0&wait=0&model=org%2Fm&node=gpu01", answer(last=7))
    assert (ctl("events", "--model", "org/m", "--node", "gpu01").status, len(port.heard)) == (0, 1)


NOPE = "there is no model nope; did you mean note?"


def test_a_wrong_name_is_told_with_the_one_that_may_be_meant(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/events?after=0&wait=0&model=nope", {**answer(last=7), "unknown": [NOPE]})
    ended = ctl("events", "--model", "nope")
    assert (ended.status, ended.out, ended.err) == (1, "", f"llmgw: {NOPE}\n")


def test_of_what_is_gone_its_events_are_shown_and_that_it_is(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/events?after=0&wait=0&model=nope", {**answer(1), "unknown": [NOPE]})
    for words in ((), ("--lines", "0")):
        ended = ctl("events", "--model", "nope", *words)
        assert (ended.status, len(ended.out.splitlines()), ended.err) == (0, 0 if words else 1, f"llmgw: {NOPE}\n")


def test_what_is_still_to_come_can_be_followed(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    reader = Reader(scripted({**answer(last=3), "unknown": [NOPE]}, {**answer(4), "unknown": [NOPE]}, answer(5)))
    assert reader.read == ["4", "5"]
    assert capsys.readouterr().err == f"llmgw: {NOPE}\n", "once"


@pytest.mark.parametrize("lines", ["-1", "1001", "all"])
def test_a_number_of_lines_that_can_not_be_is_told(port: Any, ctl: Any, lines: str) -> None:
    ended = ctl("events", "--lines", lines)
    assert (ended.status, "--lines" in ended.err, port.heard) == (2, True, [])


def test_an_answer_of_another_shape_is_no_traceback(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/events?after=0&wait=0", {**TOLD, "events": [5]})
    ended = ctl("events")
    assert (ended.status, ended.out) == (1, "")
    assert "is no operator port of llmgw" in ended.err


class Reader:
    """Somebody who follows a server that gives these answers until Ctrl-C, and what they read."""

    def __init__(self, operator: Any, **facts: Any) -> None:
        self.operator = operator
        self.naps: list[float] = []
        self.following = Following(
            operator=operator, filters={}, shape=lambda event: str(event["number"]), sleep=self.naps.append
        )
        self.read = list(self._read(**facts))

    def _read(self, lines: int = 30) -> Iterator[str]:
        try:
            yield from self.following.read(lines, follow=True)
        except KeyboardInterrupt:
            return


def test_following_goes_on_after_the_last_number(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    # (of some other model there may have been more)
    reader = Reader(scripted(answer(1, 2, 3, last=5), answer(last=6), answer(7)), lines=2)
    assert reader.read == ["2", "3", "7"]
    assert reader.operator.paths == [
        "/events?after=0&wait=0",
        "/events?after=5&wait=20",
        "/events?after=6&wait=20",
        "/events?after=7&wait=20",
    ]
    assert len(reader.naps) == 1, "only where there was nothing"
    assert capsys.readouterr().err == ""


def test_a_server_that_comes_back_is_gone_on_with(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    reader = Reader(scripted(answer(1), SILENCE, SILENCE, SILENCE, answer(2), answer(3)))
    assert reader.read == ["1", "2", "3"]
    assert capsys.readouterr().err.splitlines() == [
        "llmgw: nothing answers at http://127.0.0.1:1; waiting for it",
        "llmgw: it answers again",
    ]


@pytest.mark.parametrize("first", [answer(1, last=1, began=9.0), answer(9, began=9.0)], ids=["fewer", "more"])
def test_a_server_that_was_started_anew_is_read_from_its_first_event(
    scripted: Any, capsys: pytest.CaptureFixture[str], first: dict[str, Any]
) -> None:
    """Also where it has more events than its forerunner by now: of those the first would be missing."""
    reader = Reader(scripted(answer(1, 2, 8), SILENCE, first, answer(1, 2, began=9.0), answer(3, began=9.0)))
    assert reader.read == ["1", "2", "8", "1", "2", "3"]
    silence, anew = capsys.readouterr().err.splitlines()
    assert silence.endswith("; waiting for it")
    assert anew.startswith("llmgw: the server was started anew ")


def test_events_that_were_not_kept_for_so_long_are_said_to_be_missing(
    scripted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Reader(scripted(answer(1500, missed=500), answer(3000, missed=499)))
    assert capsys.readouterr().err == "llmgw: 499 events are missing here: the server did not keep them for so long\n"


def test_a_server_that_never_was_there_is_not_waited_for(scripted: Any) -> None:
    with pytest.raises(NoAnswer):
        Reader(scripted(SILENCE))


def test_a_warning_has_a_colour_and_its_words_have_none() -> None:
    told = partial(shape_text, verbose=False)(FAILED)
    assert told.startswith("\x1b[33m")
    assert "\x1b[31m" not in told


def follow(port: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "llmgw", "ctl", "events", "--follow", "--server", port.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ},
    )


@pytest.mark.slow
def test_following_ends_well_at_ctrl_c(port: Any) -> None:
    port.will_answer("GET", "/events?after=0&wait=0", answer(1))
    port.will_answer("GET", "/events?after=1&wait=20", answer(last=1))
    program = follow(port)
    assert program.stdout is not None
    assert b"thing 1" in program.stdout.readline()
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=PATIENCE_SECONDS)
    assert (program.returncode, err) == (0, b"")


@pytest.mark.slow
def test_following_ends_when_nobody_reads_though_nothing_happens(port: Any) -> None:
    port.will_answer("GET", "/events?after=0&wait=0", answer(1))
    port.will_answer("GET", "/events?after=1&wait=20", answer(last=1))
    program = follow(port)
    assert program.stdout is not None
    assert program.stderr is not None
    assert b"thing 1" in program.stdout.readline()
    program.stdout.close()
    try:
        assert program.wait(PATIENCE_SECONDS) == 1
        assert program.stderr.read() == b""
    finally:
        program.stderr.close()
