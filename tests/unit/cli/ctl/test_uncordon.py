from __future__ import annotations

from typing import Any


def test_a_node_takes_replicas_again(port: Any, ctl: Any) -> None:
    answer = {"node": "gpu01", "cordoned": False, "labels": {}, "known": True, "without": [], "running": ["rep-a-1"]}
    port.will_answer("POST", "/nodes/gpu01/cordon", answer)
    ended = ctl("uncordon", "gpu01")
    assert (ended.status, ended.out) == (0, "gpu01 takes new replicas\n")
    assert port.heard[0].body == {"cordoned": False}


def test_of_one_that_was_never_here_nothing_is_said_to_be_kept(port: Any, ctl: Any) -> None:
    answer = {"node": "gpu01", "cordoned": False, "labels": {}, "known": False, "without": [], "running": []}
    port.will_answer("POST", "/nodes/gpu01/cordon", answer)
    assert ctl("uncordon", "gpu01").out.splitlines()[1] == (
        "no node of this name has ever been here, and nothing is kept for it"
    )
