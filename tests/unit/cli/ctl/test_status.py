from __future__ import annotations

from typing import Any

STATUS = {
    "version": "1.2.3",
    "up_seconds": 3723.4,
    "nodes": {"lost": 1, "ready": 3},
    "models": {"failed": 1, "ready": 2},
    "replicas": {"ended": 1, "ready": 3},
    "memory_gb": 512.0,
    "memory_booked_gb": 64.0,
    "concerns": [
        {"kind": "node", "name": "n4", "message": "lost: not heard for longer than its lease"},
        {"kind": "model", "name": "m", "message": "failed: rep-m-1 ended on n1: out of memory"},
    ],
}


def test_the_whole_is_a_few_lines_and_what_needs_somebody(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/status", STATUS)
    assert ctl("status").out == (
        f"llmgw 1.2.3 at {port.url}, up 1h2m3s\n"
        "nodes     1 lost, 3 ready\n"
        "models    1 failed, 2 ready\n"
        "replicas  1 failed, 3 ready\n"
        "memory    64.0/512GB booked\n"
        "\n"
        "node n4: lost: not heard for longer than its lease\n"
        "model m: failed: rep-m-1 ended on n1: out of memory\n"
    )


def test_a_server_with_nothing_says_none(port: Any, ctl: Any) -> None:
    nothing = {"nodes": {}, "models": {}, "replicas": {}, "memory_gb": 0.0, "memory_booked_gb": 0.0, "concerns": []}
    port.will_answer("GET", "/status", {**STATUS, **nothing})
    assert ctl("status").out.splitlines()[1:] == ["nodes     none", "models    none", "replicas  none"]
