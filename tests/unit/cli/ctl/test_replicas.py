from __future__ import annotations

from typing import Any

READY = {
    "replica": "rep-m-1",
    "model": "m",
    "profile": "cpu",
    "engine": "e",
    "node": "n1",
    "shard": "shd-m-1-0",
    "epoch": 1,
    "state": "ready",
    "seconds_in_state": 3600.2,
    "running": 2,
    "waiting": 0,
}
FAILED = {
    **READY,
    "replica": "rep-n-1",
    "model": "n",
    "state": "ended",
    "seconds_in_state": 4.0,
    "running": None,
    "waiting": None,
    "cause": "out of memory",
    "lines": ["loading", "\x1b[31merror\x1b[0m: failed to allocate"],
}
LOADING = {**READY, "replica": "rep-o-1", "model": "o", "state": "loading", "progress": "43 %", "running": None}


def test_replicas_show_since_when_how_far_and_why(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/replicas", {"replicas": [READY, FAILED, LOADING]})
    table, below = ctl("replicas").out.split("\n\n")
    assert table.splitlines() == [
        "REPLICA  MODEL  NODE  STATE    SINCE   RUNNING  WAITING  DETAIL",
        "rep-m-1  m      n1    ready    1h ago  2        0",
        "rep-n-1  n      n1    failed   4s ago  -        -        out of memory",
        "rep-o-1  o      n1    loading  1h ago  -        0        43 %",
    ]
    assert below.splitlines() == [
        "the last lines of rep-n-1 on n1:",
        "  loading",
        "  error: failed to allocate",
    ]
