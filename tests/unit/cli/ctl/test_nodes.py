from __future__ import annotations

import json
from typing import Any

import pytest

from llmgw.cli.ctl.drawing import plain
from llmgw.cli.ctl.nodes import draw, draw_only

N1: dict[str, Any] = {
    "node": "gpu01",
    "state": "ready",
    "connected": True,
    "heard_seconds_ago": 2.1,
    "memory_gb": 128.4,
    "memory_available_gb": 120.0,
    "memory_free_gb": 97.12,
    "disks": [
        {"path": "/", "free_gb": 50.0, "total_gb": 100.0},
        {"path": "/m", "free_gb": 1.4, "total_gb": 900.0},
    ],
    "gpus": [{"uuid": "GPU-0"}, {"uuid": "GPU-1"}],
    "gpus_free": 1,
    "classes": ["h100-80g"],
    "fabrics": [{"name": "ib-a", "hcas": []}, {"name": "ib-b", "hcas": [], "down": "mlx5_1 has no ACTIVE port"}],
    "replicas": ["rep-m-1", "rep-n-1"],
}
N2 = {"node": "n2", "state": "lost", "connected": False, "replicas": []}


def row_of(**facts: Any) -> list[str]:
    """The cells of a node with these facts, by its line in the table."""
    line = plain(draw({"nodes": [{**N2, **facts}]})).splitlines()[1]
    return [cell.strip() for cell in line.split("  ")]


def test_nodes_are_a_table_with_what_is_known(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/nodes", {"nodes": [N1, N2]})
    ended = ctl("nodes")
    assert ended.status == 0
    assert ended.out == (
        "NODE   STATE  GPUS      MEM         DISK         CLASSES   FABRICS          REPLICAS  LAST SEEN\n"
        "gpu01  ready  1/2 free  97.1/128GB  51.4/1000GB  h100-80g  ib-a,ib-b(down)  2         2s ago\n"
        "n2     lost   -         -           -            -         -                0         -\n"
    )


def test_what_is_the_matter_with_a_machine_stands_below_the_table(port: Any, ctl: Any) -> None:
    ailing = {**N1, "warnings": ["the processor has no AVX2", "fabric ib-b is out of service: mlx5_1 has no port"]}
    port.will_answer("GET", "/nodes", {"nodes": [N2, ailing]})
    assert ctl("nodes").out.splitlines()[3:] == [
        "",
        "gpu01: the processor has no AVX2",
        "gpu01: fabric ib-b is out of service: mlx5_1 has no port",
    ]


@pytest.mark.parametrize(
    ("facts", "cell"),
    [
        ({}, "-"),
        ({"gpus": [], "gpus_free": 0}, "0"),
        ({"gpus": [{}] * 8, "gpus_free": 8}, "8/8 free"),
        ({"gpus": [{}] * 8, "gpus_free": 0}, "0/8 free"),
    ],
)
def test_gpus_that_nobody_counted_are_not_taken_for_none(facts: dict[str, Any], cell: str) -> None:
    assert cell in row_of(**facts)


def test_a_cordon_is_part_of_the_state(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/nodes", {"nodes": [{**N1, "cordoned": True}]})
    assert ctl("nodes").out.splitlines()[1].split()[:2] == ["gpu01", "ready,cordoned"]


def test_room_that_is_kept_for_a_model_stands_below(port: Any, ctl: Any) -> None:
    kept = [
        {"model": "a", "gpus": ["GPU-1", "GPU-2"], "memory_gb": 64.0},
        {"model": "b", "gpus": ["GPU-3"], "memory_gb": 0.0},
        {"model": "c", "gpus": [], "memory_gb": 1.5},
    ]
    port.will_answer("GET", "/nodes", {"nodes": [{**N1, "kept": kept}]})
    assert ctl("nodes").out.splitlines()[-3:] == [
        "gpu01: 2 GPUs and 64 GB of memory kept for a until it runs again, for a minute at most",
        "gpu01: 1 GPU kept for b until it runs again, for a minute at most",
        "gpu01: 1.5 GB of memory kept for c until it runs again, for a minute at most",
    ]


def test_a_drain_is_part_of_the_state_and_what_it_waits_for_stands_below(port: Any, ctl: Any) -> None:
    going = {**N1, "cordoned": True, "draining": True, "drain_waits_for": "rep-m-1 is stopping"}
    timed = {**going, "node": "gpu02", "drain_seconds_left": 61.0}
    done = {**N1, "node": "gpu03", "cordoned": True, "draining": True, "replicas": []}
    away = {**timed, "node": "gpu04", "state": "lost", "drain_waits_for": "rep-m-1 can't be reached"}
    port.will_answer("GET", "/nodes", {"nodes": [going, timed, done, away]})
    told = ctl("nodes").out.splitlines()
    assert [line.split()[1] for line in told[1:5]] == [*["ready,draining"] * 3, "lost,draining"]
    assert told[6:] == [
        "gpu01: it drains: rep-m-1 is stopping",
        "gpu02: it drains: rep-m-1 is stopping; what is left in 1m1s stops in any case",
        "gpu04: it drains: rep-m-1 can't be reached",
    ]


def test_json_has_the_nvlink_peers_that_are_known(port: Any, ctl: Any) -> None:
    gpus = [{"uuid": "GPU-0", "nvlink_peers": []}, {"uuid": "GPU-1"}]
    port.will_answer("GET", "/nodes", {"nodes": [{**N1, "gpus": gpus}]})
    (node,) = json.loads(ctl("nodes", "--json").out)["nodes"]
    assert [gpu.get("nvlink_peers") for gpu in node["gpus"]] == [[], None]


@pytest.mark.parametrize(
    ("facts", "cell"),
    [
        ({"heard_seconds_ago": 194.0}, "3m14s ago"),
        ({"heard_seconds_ago": 194.0, "heard_before_start": True}, "<3m14s ago"),
        ({"heard_seconds_ago": 0.1, "heard_before_start": True}, "now"),
        ({}, "-"),
    ],
)
def test_what_the_store_remembers_of_a_node_may_have_been_later(facts: dict[str, Any], cell: str) -> None:
    """A node that was heard four seconds before the server's end was "3m14s ago"."""
    assert row_of(**facts)[-1] == cell


def test_without_nodes_there_is_the_head(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/nodes", {"nodes": []})
    assert ctl("nodes").out.split()[0] == "NODE"


def test_one_of_them_can_be_drawn_alone() -> None:
    assert plain(draw_only({"nodes": [N1, N2]}, "n2")).splitlines()[1:] == [
        "n2    lost   -     -    -     -        -        0         -"
    ]
