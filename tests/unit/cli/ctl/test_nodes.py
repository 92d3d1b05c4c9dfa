from __future__ import annotations

from typing import Any

N1 = {
    "node": "gpu01",
    "state": "ready",
    "connected": True,
    "heard_seconds_ago": 2.1,
    "memory_gb": 128.4,
    "memory_available_gb": 97.12,
    "disks": [
        {"path": "/", "free_gb": 50.0, "total_gb": 100.0},
        {"path": "/m", "free_gb": 1.4, "total_gb": 900.0},
    ],
    "replicas": ["rep-m-1", "rep-n-1"],
}
N2 = {"node": "n2", "state": "lost", "connected": False, "replicas": []}


def test_nodes_are_a_table_with_what_is_known(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/nodes", {"nodes": [N1, N2]})
    ended = ctl("nodes")
    assert ended.status == 0
    assert ended.out == (
        "NODE   STATE  GPUS  MEM         DISK         CLASSES  FABRICS  REPLICAS  LAST SEEN\n"
        "gpu01  ready  -     97.1/128GB  51.4/1000GB  -        -        2         2s ago\n"
        "n2     lost   -     -           -            -        -        0         -\n"
    )


def test_without_nodes_there_is_the_head(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/nodes", {"nodes": []})
    assert ctl("nodes").out.split()[0] == "NODE"
