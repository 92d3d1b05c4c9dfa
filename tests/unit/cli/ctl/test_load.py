from __future__ import annotations

from typing import Any

import click
import pytest

from llmgw.cli.ctl.load import follow
from llmgw.errors import LlmgwError

BEGUN = {"model": "qwen", "held": False, "retried": False, "running": [], "serving": [], "wanted": 1}


def model(status: str, *ended: tuple[int, str], **facts: Any) -> dict[str, Any]:
    """A model that stands so, with the epochs of its replica that have ended, and why."""
    view = {"name": "qwen", "status": status, "serving": status == "ready", "ready": 0, "wanted": 1}
    replicas = [{"replica": "rep-qwen-1", "epoch": epoch, "state": "ended", "cause": cause} for epoch, cause in ended]
    return {"model": {**view, **facts}, "replicas": replicas}


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ({}, ["qwen loads"]),
        ({"held": True}, ["qwen is no longer stopped", "qwen loads"]),
        ({"retried": True}, ["qwen: its definition, which had failed, is tried again", "qwen loads"]),
        ({"running": ["rep-qwen-1"]}, ["qwen loads: rep-qwen-1"]),
        ({"running": ["rep-qwen-1"], "serving": ["rep-qwen-1"]}, ["qwen is served by rep-qwen-1"]),
        (
            {"running": ["rep-qwen-1", "rep-qwen-2"], "serving": ["rep-qwen-1"], "wanted": 2},
            ["qwen is served by rep-qwen-1", "qwen loads: rep-qwen-2"],
        ),
        ({"waits": "n1: needs 99 GB"}, ["qwen waits for a place: n1: needs 99 GB"]),
        (
            {"makes_way": ["rep-b-1"], "waits": "n1: needs 99 GB"},
            ["qwen loads as soon as rep-b-1 has stopped, which makes way for it"],
        ),
        (
            {"running": ["rep-qwen-1"], "serving": ["rep-qwen-1"], "wanted": 2, "waits": "n1: needs 99 GB"},
            ["qwen is served by rep-qwen-1", "qwen waits for a place: n1: needs 99 GB"],
        ),
        # the one that is replaced is no load
        ({"running": ["rep-qwen-1", "rep-qwen-2"], "serving": ["rep-qwen-1"]}, ["qwen is served by rep-qwen-1"]),
    ],
)
def test_it_is_said_what_loading_it_changes(port: Any, ctl: Any, facts: dict[str, Any], lines: list[str]) -> None:
    port.will_answer("POST", "/load", {**BEGUN, **facts})
    ended = ctl("load", "coder")
    assert (ended.status, ended.out.splitlines()) == (0, lines)
    assert port.heard[0].body == {"model": "coder"}


def test_what_is_not_to_run_is_refused_with_the_reason(port: Any, ctl: Any) -> None:
    error = {"error": {"code": "not_scaled", "message": "qwen is not to run: its scaling.max is 0"}}
    port.will_answer("POST", "/load", error, status=409)
    ended = ctl("load", "qwen", "--wait")
    assert (ended.status, ended.out, ended.err) == (1, "", "llmgw: qwen is not to run: its scaling.max is 0\n")


def test_waiting_and_watching_end_differently(port: Any, ctl: Any) -> None:
    ended = ctl("load", "qwen", "--wait", "--watch")
    assert (ended.status, "give one of them" in ended.err, port.heard) == (2, True, [])


def test_waiting_ends_once_it_serves(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/load", BEGUN)
    port.will_answer("GET", "/models/qwen", model("ready", ready=1))
    assert ctl("load", "coder", "--wait").out == "qwen loads\nqwen: ready, 1/1 replicas ready\n\n"


def test_what_failed_before_does_not_end_the_waiting(asked_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = model("failed", (1, "out of memory"), detail="rep-qwen-1 ended on n1: out of memory")
    follow(asked_of(before, before, model("loading", detail="43 %"), model("ready", ready=1)), "qwen")
    assert capsys.readouterr().out.split("\n\n")[:-1] == [
        "qwen: failed, 0/1 replicas ready: rep-qwen-1 ended on n1: out of memory",
        "qwen: loading, 0/1 replicas ready: 43 %",
        "qwen: ready, 1/1 replicas ready",
    ]


ROLLING = "rolling: rep-qwen-1 runs by the earlier definition"


def test_waiting_goes_on_while_the_earlier_definition_serves(asked_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rolling = model("ready", ready=1, rolling=ROLLING, detail=ROLLING)
    follow(asked_of(rolling, rolling, model("ready", ready=1)), "qwen")
    assert capsys.readouterr().out.split("\n\n")[:-1] == [
        f"qwen: ready, 1/1 replicas ready: {ROLLING}",
        "qwen: ready, 1/1 replicas ready",
    ]


@pytest.mark.parametrize(
    ("later", "why"),
    [
        (model("ready", (2, "out of memory"), ready=1, rolling=ROLLING), r"has failed \(out of memory\) and is tried"),
        (model("ready", ready=1, failed="out of memory"), r"its definition has failed \(out of memory\)"),
        (model("ready", ready=1, held=True), "was stopped meanwhile"),
    ],
)
def test_what_the_earlier_definition_serves_is_no_success_of_the_try(asked_of: Any, later: Any, why: str) -> None:
    with pytest.raises(LlmgwError, match=why):
        follow(asked_of(model("ready", (1, "out of memory"), ready=1, rolling=ROLLING), later), "qwen")


@pytest.mark.parametrize(
    ("later", "why"),
    [
        (model("failed", (1, "x"), (2, "out of memory")), r"has failed \(out of memory\) and is tried again"),
        (model("failed", (2, "its engine is gone")), "its engine is gone"),
        (model("stopped", held=True), "was stopped meanwhile"),
    ],
)
def test_waiting_fails_when_it_will_not_serve(asked_of: Any, later: Any, why: str) -> None:
    with pytest.raises(LlmgwError, match=why):
        follow(asked_of(model("failed", (1, "x")), later), "qwen")


def test_ctrl_c_is_no_sign_that_it_serves(asked_of: Any) -> None:
    with pytest.raises(click.Abort):
        follow(asked_of(model("loading")), "qwen")


def test_weights_that_come_first_are_told_in_percent(asked_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fetch = {"phase": "fetching", "done_bytes": 42, "total_bytes": 100}
    follow(asked_of(model("loading", detail="fetches its weights", fetch=fetch), model("ready")), "qwen")
    assert capsys.readouterr().out.splitlines()[0] == "qwen: loading, 0/1 replicas ready: fetching 42 %"
