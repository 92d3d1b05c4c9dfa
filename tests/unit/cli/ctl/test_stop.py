from __future__ import annotations

from typing import Any

import pytest

STOPPED = {"model": "qwen", "running": ["rep-qwen-1"], "already": False}


def test_a_model_is_stopped_and_told_how_to_load_it(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/stop", STOPPED)
    ended = ctl("stop", "coder")
    assert (ended.status, ended.out) == (
        0,
        "qwen is stopped, until `llmgw ctl load qwen`\nthese go once their requests are answered: rep-qwen-1\n",
    )
    assert port.heard[0].body == {"name": "coder"}


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"already": True, "running": []}, "qwen was stopped already"),
        ({"replica": "rep-qwen-1"}, "rep-qwen-1 of qwen is replaced, by another one first where there is room"),
        (
            {"replica": "rep-qwen-1", "idle": True},
            "rep-qwen-1 of qwen is stopped; nothing takes its place before somebody asks for qwen",
        ),
        (
            {"running": [], "unscaled": True},
            "qwen is stopped, until `llmgw ctl load qwen`\n"
            "qwen: its scaling.max is 0, so that nothing of it is loaded before that is another number",
        ),
        ({"replica": "rep-qwen-1", "already": True}, "rep-qwen-1 of qwen is on its way out already"),
    ],
)
def test_it_is_said_what_was_stopped_and_what_was_so_before(
    port: Any, ctl: Any, facts: dict[str, Any], line: str
) -> None:
    port.will_answer("POST", "/stop", {**STOPPED, **facts})
    assert ctl("stop", "x").out == f"{line}\n"


def test_a_name_that_nobody_has_is_status_1(port: Any, ctl: Any) -> None:
    error = {"error": {"code": "unknown_name", "message": "there is no model or replica qwne; did you mean qwen?"}}
    port.will_answer("POST", "/stop", error, status=404)
    ended = ctl("stop", "qwne", "--watch")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == "llmgw: there is no model or replica qwne; did you mean qwen?\n"


def test_with_watch_a_model_is_shown_until_its_replicas_have_stopped(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/stop", STOPPED)
    port.will_answer("GET", "/replicas?model=qwen", {"replicas": []})
    assert ctl("stop", "coder", "--watch", "--json").out.splitlines()[-1] == '{"replicas": []}'
