from __future__ import annotations

from typing import Any

import click
import pytest

from llmgw.cli.ctl.drain import follow
from llmgw.errors import LlmgwError

MARKS: dict[str, Any] = {
    "node": "gpu01",
    "cordoned": True,
    "draining": True,
    "labels": {},
    "known": True,
    "without": [],
    "running": ["rep-a-1", "rep-b-1"],
}
WAITS = "rep-a-1 answers its last requests; rep-b-1 waits for room elsewhere: 1 not_enough_gpus"


def nodes(*replicas: str, **facts: Any) -> dict[str, Any]:
    node = {"node": "gpu01", "state": "ready", "connected": True, "cordoned": True, "draining": True}
    return {"nodes": [{"node": "other", "state": "ready"}, {**node, "replicas": list(replicas), **facts}]}


def test_a_drain_says_what_runs_there_and_what_it_waits_for(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/nodes/gpu01/drain", {**MARKS, "drain_seconds_left": 600.0})
    port.will_answer("GET", "/nodes", nodes("rep-a-1", "rep-b-1", drain_waits_for=WAITS, drain_seconds_left=599.8))
    ended = ctl("drain", "gpu01", "--deadline", "10m")
    assert ended.status == 0
    assert ended.out.splitlines() == [
        "gpu01 drains: nothing new is placed there, and what runs there goes once it runs elsewhere",
        f"still there: {WAITS}",
        "what is left in 10m stops in any case",
        "to end it: llmgw ctl uncordon gpu01",
    ]
    assert port.heard[0].body == {"deadline_seconds": 600.0}


def test_without_a_deadline_none_is_sent_and_an_empty_node_is_told_so(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/nodes/gpu01/drain", {**MARKS, "running": []})
    port.will_answer("GET", "/nodes", nodes())
    assert ctl("drain", "gpu01").out.splitlines()[1:] == [
        "nothing runs there: llmgw ctl node rm gpu01 forgets it, llmgw ctl uncordon gpu01 uses it again"
    ]
    assert port.heard[0].body == {"deadline_seconds": None}


def test_of_a_node_that_is_away_nobody_says_that_it_is_empty(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/nodes/gpu01/drain", {**MARKS, "running": []})
    port.will_answer("GET", "/nodes", nodes(state="silent"))
    assert ctl("drain", "gpu01").out.splitlines()[1:] == ["gpu01 is silent: what runs there is not known"]


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ({"state": "lost"}, ["gpu01 is lost: rep-a-1"]),
        (
            {"state": "lost", "drain_waits_for": "rep-a-1 can't be reached and may run there still"},
            ["gpu01 is lost: rep-a-1 can't be reached and may run there still"],
        ),
        (
            {"state": "silent", "drain_waits_for": "rep-a-1 is stopping"},
            ["still there: rep-a-1 is stopping", "gpu01 is silent"],
        ),
    ],
)
def test_of_a_node_that_is_away_nobody_says_that_a_deadline_stops_anything(
    port: Any, ctl: Any, facts: dict[str, Any], lines: list[str]
) -> None:
    port.will_answer("POST", "/nodes/gpu01/drain", {**MARKS, "running": ["rep-a-1"]})
    port.will_answer("GET", "/nodes", nodes("rep-a-1", drain_seconds_left=0.0, **facts))
    told = ctl("drain", "gpu01", "--deadline", "1s").out.splitlines()
    assert told[1:] == [*lines, "to end it: llmgw ctl uncordon gpu01"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gpu01", "--deadline", "soon"), "--deadline: 'soon' is not a duration"),
        (("gpu01", "--wait", "--watch"), "give one of them"),
        (("gpu 01",), "node 'gpu 01'"),
    ],
)
def test_what_is_written_wrong_is_told_before_anything_is_done(
    port: Any, ctl: Any, words: tuple[str, ...], said: str
) -> None:
    ended = ctl("drain", *words)
    assert (ended.status, said in ended.err, port.heard) == (2, True, [])


def test_waiting_ends_once_nothing_runs_there(asked_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    left = nodes("rep-b-1", drain_waits_for="rep-b-1 answers its last requests", drain_seconds_left=70.0)
    less = nodes("rep-b-1", drain_waits_for="rep-b-1 answers its last requests", drain_seconds_left=68.0)
    silent = nodes(state="silent")
    asked = asked_of(nodes("rep-a-1", "rep-b-1", drain_waits_for=WAITS), left, less, silent, nodes())
    follow(asked, "gpu01")
    assert capsys.readouterr().out.split("\n\n")[:-1] == [
        f"still there: {WAITS}\nto end it: llmgw ctl uncordon gpu01",
        "still there: rep-b-1 answers its last requests\nwhat is left in 1m10s stops in any case\n"
        "to end it: llmgw ctl uncordon gpu01",
        "gpu01 is silent: what runs there is not known",
        "nothing runs there: llmgw ctl node rm gpu01 forgets it, llmgw ctl uncordon gpu01 uses it again",
    ]


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (nodes("rep-a-1", draining=False), "somebody has ended the drain of gpu01"),
        (nodes(state="lost"), "gpu01 is lost, and may still run what it ran before: switch it off"),
        (nodes("rep-a-1", "rep-b-1", state="lost"), "gpu01 is lost, and may still run rep-a-1, rep-b-1: switch it off"),
    ],
)
def test_waiting_fails_where_the_node_is_not_known_to_be_empty(asked_of: Any, last: Any, why: str) -> None:
    with pytest.raises(LlmgwError, match=why):
        follow(asked_of(nodes("rep-a-1"), last), "gpu01")


def test_a_node_that_is_removed_meanwhile_needs_no_more_waiting(
    asked_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    follow(asked_of(nodes("rep-a-1"), {"nodes": []}), "gpu01")
    assert capsys.readouterr().out.endswith("gpu01 is removed\n\n")


def test_ctrl_c_is_no_sign_that_the_node_is_empty(asked_of: Any) -> None:
    with pytest.raises(click.Abort):
        follow(asked_of(nodes("rep-a-1")), "gpu01")


def test_waiting_goes_on_from_what_was_said(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/nodes/gpu01/drain", MARKS)
    port.will_answer("GET", "/nodes", nodes())
    ended = ctl("drain", "gpu01", "--wait")
    assert ended.status == 0
    assert [line.split()[0] for line in ended.out.splitlines() if line] == ["gpu01", "nothing"]
