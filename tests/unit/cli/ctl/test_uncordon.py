from __future__ import annotations

from typing import Any


def test_a_node_takes_replicas_again(port: Any, ctl: Any) -> None:
    answer = {"node": "gpu01", "cordoned": False, "labels": {}, "known": True, "without": [], "running": ["rep-a-1"]}
    port.will_answer("POST", "/nodes/gpu01/cordon", answer)
    ended = ctl("uncordon", "gpu01")
    assert (ended.status, ended.out) == (0, "gpu01 takes new replicas\n")
    assert port.heard[0].body == {"cordoned": False}
