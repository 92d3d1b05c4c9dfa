from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from llmgw.cli.ctl.address import Address
from llmgw.cli.ctl.asking import Asked, show
from llmgw.cli.ctl.client import NoAnswer, Operator
from llmgw.cli.ctl.drawing import Block

READY = {"state": "ready", "heard_seconds_ago": 1.0}
LATER = {"state": "ready", "heard_seconds_ago": 3.0}
LOST = {"state": "lost", "heard_seconds_ago": 20.0}
PATIENCE_SECONDS = 60


class Script(Operator):
    """Answers in their order, then Ctrl-C."""

    def __init__(self, *answers: object) -> None:
        super().__init__(Address(host="127.0.0.1", port=1, source="a test"))
        self.answers = list(answers)

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        if not self.answers:
            raise KeyboardInterrupt
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer).encode()


def draw(answer: Any) -> list[Block]:
    return [f"it is {answer['state']}"]


def watch(*answers: object, as_json: bool = False, until: Callable[[Any], bool] = lambda answer: False) -> Script:
    script = Script(*answers)
    asked = Asked(operator=script, as_json=as_json, watch=True, sleep=lambda seconds: None)
    show(asked, "/nodes", draw, until=until)
    return script


def test_an_answer_is_drawn_once(capsys: pytest.CaptureFixture[str]) -> None:
    show(Asked(operator=Script(READY)), "/nodes", draw)
    assert capsys.readouterr().out == "it is ready\n"


def test_json_is_the_answer_as_it_came(port: Any, ctl: Any) -> None:
    port.will_say("GET", "/nodes", 200, "application/json", b'{"nodes":  [], "n\\u00e9w": 1}')
    assert ctl("nodes", "--json").out == '{"nodes":  [], "n\\u00e9w": 1}\n'


def test_behind_a_pipe_each_change_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    watch(READY, READY, LATER, LOST, READY)
    assert capsys.readouterr().out == "it is ready\n\nit is lost\n\nit is ready\n\n"


def test_json_behind_a_pipe_is_a_line_for_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    watch(READY, LATER, LOST, as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [READY, LOST]


def test_what_an_engine_counts_while_it_works_is_no_change(capsys: pytest.CaptureFixture[str]) -> None:
    busy = {**READY, "replicas": [{"running": 1, "waiting": 0, "cache_used": 0.1, "steps": 5, "cached_tokens": 1}]}
    busier = {**READY, "replicas": [{"running": 2, "waiting": 9, "cache_used": 0.9, "steps": 6, "prompt_tokens": 7}]}
    watch(busy, busier)
    assert capsys.readouterr().out == "it is ready\n\n"


def test_a_server_that_is_started_anew_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    silence = NoAnswer("nothing answers at http://127.0.0.1:1")
    watch(READY, silence, silence, READY)
    said = capsys.readouterr()
    assert said.out == "it is ready\n\nit is ready\n\n"
    assert said.err == "llmgw: nothing answers at http://127.0.0.1:1\n"


def test_a_server_that_never_was_there_is_not_waited_for() -> None:
    with pytest.raises(NoAnswer):
        watch(NoAnswer("nothing answers"))


def test_watching_ends_when_there_is_nothing_more_to_see(capsys: pytest.CaptureFixture[str]) -> None:
    script = watch(READY, LOST, READY, until=lambda answer: answer["state"] == "lost")
    assert len(script.answers) == 1
    assert capsys.readouterr().out == "it is ready\n\nit is lost\n\n"


def ctl_program(port: Any, *words: str, out: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "llmgw", "ctl", *words, "--server", port.url],
        stdout=out,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )


def read_until(descriptor: int, mark: bytes) -> bytes:
    got = b""
    while mark not in got:
        ready, _, _ = select.select([descriptor], [], [], PATIENCE_SECONDS)
        assert ready, f"{mark!r} did not come, only {got!r}"
        more = os.read(descriptor, 65536)
        assert more, f"it ended after {got!r}"
        got += more
    return got


def node(state: str) -> dict[str, Any]:
    return {"nodes": [{"node": "n1", "state": state, "connected": True, "replicas": []}]}


@pytest.mark.slow
def test_a_terminal_is_redrawn_until_ctrl_c(port: Any) -> None:
    port.will_answer("GET", "/nodes", node("ready"), node("silent"))
    ours, theirs = pty.openpty()
    try:
        program = ctl_program(port, "nodes", "--watch", out=theirs)
        os.close(theirs)
        read_until(ours, b"ready")
        screen = read_until(ours, b"silent")
        assert re.search(rb"\x1b\[\d*A", screen), "it is drawn over what was there"
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=PATIENCE_SECONDS)
    finally:
        os.close(ours)
    assert (program.returncode, err) == (0, b"")


@pytest.mark.slow
def test_a_pipe_gets_plain_text_until_ctrl_c(port: Any) -> None:
    port.will_answer("GET", "/nodes", node("ready"), node("lost"))
    program = ctl_program(port, "nodes", "--watch", out=subprocess.PIPE)
    assert program.stdout is not None
    got = read_until(program.stdout.fileno(), b"ready") + read_until(program.stdout.fileno(), b"lost")
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=PATIENCE_SECONDS)
    assert (program.returncode, err) == (0, b"")
    assert b"\x1b" not in got


ODD = [
    b"[]",
    b"5",
    b"null",
    b'"x"',
    b"not json",
    b"\xff",
    b"[" * 100_000,
    b'{"nodes": 5, "models": 5, "replicas": 5, "plugins": 5, "left_out": 5}',
    b'{"nodes": [5], "models": [5], "replicas": [5], "plugins": [5], "left_out": [5]}',
    b'{"nodes": [{"node": "n", "state": "ready", "replicas": [], "heard_seconds_ago": NaN}], "models": [{}]}',
]


@pytest.mark.parametrize("body", ODD, ids=lambda body: body[:12].decode("latin-1"))
@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("status", "GET /status"),
        ("nodes", "GET /nodes"),
        ("nodes --watch", "GET /nodes"),
        ("models --json", "GET /models"),
        ("replicas", "GET /replicas"),
        ("engines", "GET /engines"),
        ("engine-check e --node n", "GET /engines"),
        ("model show m", "GET /models/m"),
        ("model rm m --watch", "DELETE /models/m"),
        ("reload", "POST /reload"),
    ],
)
def test_a_server_that_is_another_is_told_and_is_no_traceback(
    port: Any, ctl: Any, words: str, path: str, body: bytes
) -> None:
    port.will_say(*path.split(), 200, "application/json", body)
    ended = ctl(*words.split())
    assert (ended.status, ended.out) == (1, "")
    assert "is no operator port of llmgw" in ended.err
    assert "Traceback" not in ended.err


def test_nothing_that_a_server_says_moves_the_cursor(port: Any, ctl: Any) -> None:
    model = {"name": "m\x1b[2J", "serving": True, "ready": "\x1b[2J", "wanted": 1, "status": "ready", "aliases": []}
    port.will_answer("GET", "/models", {"models": [model]})
    ended = ctl("models")
    assert ended.status == 0
    assert "\x1b" not in ended.out
