from __future__ import annotations

from typing import Any

import pytest

CORDONED = {"node": "gpu01", "cordoned": True, "labels": {}, "known": True, "without": [], "running": []}


def test_a_node_is_cordoned_and_what_runs_there_is_said_to_stay(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/nodes/gpu01/cordon", {**CORDONED, "running": ["rep-a-1", "rep-b-1"]})
    ended = ctl("cordon", "gpu01")
    assert (ended.status, ended.out) == (
        0,
        "gpu01 is cordoned: nothing new is placed there\nwhat runs there stays: rep-a-1, rep-b-1\n",
    )
    (heard,) = port.heard
    assert (heard.body, heard.headers["Content-Type"]) == ({"cordoned": True}, "application/json")


@pytest.mark.parametrize(("close", "meant"), [(None, ""), ("gpu01", "; did you mean gpu01?")])
def test_one_that_was_never_here_is_told_so(port: Any, ctl: Any, close: str | None, meant: str) -> None:
    answer = {**CORDONED, "node": "gpu1", "known": False, "close": close}
    port.will_answer("POST", "/nodes/gpu1/cordon", answer)
    assert ctl("cordon", "gpu1").out.splitlines()[1] == (
        f"no node of this name has ever been here, and it is kept for when one comes{meant}"
    )


def test_with_watch_the_node_is_shown_afterwards(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/nodes/ab/cordon", {"error": {"code": "invalid_node", "message": "no"}}, status=400)
    ended = ctl("cordon", "ab", "--watch")
    assert (ended.status, ended.out, ended.err) == (2, "", "llmgw: no\n")
    assert len(port.heard) == 1, "what was refused is not watched"


def test_one_that_drains_keeps_nothing(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/nodes/gpu01/cordon", {**CORDONED, "draining": True, "running": ["rep-a-1"]})
    assert ctl("cordon", "gpu01").out.splitlines()[1:] == [
        "it drains: what runs there goes once it runs elsewhere (llmgw ctl uncordon gpu01 ends that)"
    ]
