from __future__ import annotations

from typing import Any

from llmgw.cli.ctl.drawing import plain
from llmgw.cli.ctl.status import draw

STATUS: dict[str, Any] = {
    "version": "1.2.3",
    "up_seconds": 3723.4,
    "nodes": {"lost": 1, "ready": 3},
    "models": {"failed": 1, "ready": 2},
    "replicas": {"ended": 1, "ready": 3},
    "memory_gb": 512.0,
    "memory_booked_gb": 64.0,
    "classes": {"a100-40g": {"free": 0, "total": 4}, "h100-80g": {"free": 12, "total": 16}},
    "fabrics": {
        "ib-a": {"whole_free": 1, "down": 0, "total": 2},
        "ib-b": {"whole_free": 0, "down": 1, "total": 1},
    },
    "store": {"kind": "sqlite", "where": "/var/lib/llmgw/llmgw.db", "size_bytes": 1_228_800},
    "concerns": [
        {"kind": "node", "name": "n4", "message": "lost: not heard for longer than its lease"},
        {"kind": "model", "name": "m", "message": "failed: rep-m-1 ended on n1: out of memory"},
    ],
}
NOTHING = {"nodes": {}, "models": {}, "replicas": {}, "memory_gb": 0.0, "memory_booked_gb": 0.0, "concerns": []}
NOTHING |= {"classes": {}, "fabrics": {}}


def drawn(**facts: Any) -> list[str]:
    return plain(draw({**STATUS, **NOTHING, **facts}, "here")).splitlines()


def test_the_whole_is_a_few_lines_and_what_needs_somebody(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/status", STATUS)
    assert ctl("status").out == (
        f"llmgw 1.2.3 at {port.url}, up 1h2m3s\n"
        "nodes     1 lost, 3 ready\n"
        "models    1 failed, 2 ready\n"
        "replicas  1 failed, 3 ready\n"
        "memory    64.0/512GB booked\n"
        "gpus      a100-40g 0/4 free\n"
        "gpus      h100-80g 12/16 free\n"
        "fabric    ib-a 1/2 nodes whole and free\n"
        "fabric    ib-b 0/1 nodes whole and free, 1 out of service\n"
        "store     sqlite /var/lib/llmgw/llmgw.db, 1.2MB\n"
        "\n"
        "node n4: lost: not heard for longer than its lease\n"
        "model m: failed: rep-m-1 ended on n1: out of memory\n"
    )


def test_a_server_with_nothing_says_none() -> None:
    assert drawn(store={"kind": "sqlite", "where": "/x.db"})[1:] == [
        "nodes     none",
        "models    none",
        "replicas  none",
        "store     sqlite /x.db",
    ]


def test_the_brake_says_who_is_lost_what_is_held_and_for_how_long() -> None:
    brake = {"lost": 3, "nodes": 4, "seconds_left": 421.0, "who": ["n1", "n2", "n3"], "held": ["rep-a-1"]}
    assert drawn(brake=brake, held_up="3 of 4 nodes were lost together")[-4:] == [
        "",
        "the brake holds for 7m1s: 3 of 4 nodes were lost together; until they are back nothing is stopped or placed "
        "anew for it",
        "  lost: n1, n2, n3",
        "  held: rep-a-1",
    ]


def test_of_many_that_are_lost_the_first_are_named() -> None:
    brake = {"lost": 600, "nodes": 1000, "seconds_left": 1.0, "who": [f"n{n}" for n in range(600)], "held": []}
    assert drawn(brake=brake)[-1] == "  lost: n0, n1, n2, n3, n4, n5, n6, n7 and 592 more"


def test_what_holds_all_placing_up_is_told_without_a_brake_too() -> None:
    assert drawn(held_up="the server waits for n1")[-1] == "nothing is placed: the server waits for n1"


def test_a_store_that_can_not_be_written_is_told() -> None:
    line = drawn(store={"kind": "sqlite", "where": "/x.db", "failing": "its disk is full"})[4]
    assert line == "store     sqlite /x.db, FAILING"


def test_what_each_fabric_holds_and_what_is_on_its_way_are_told() -> None:
    holdings = {
        "": {"nodes": 1, "models": {"m": 1}, "none": []},
        "ib-a": {"nodes": 4, "models": {"m": 4, "n": 1}, "none": ["o"]},
        "ib-b": {"nodes": 2, "models": {}, "none": ["m", "n"]},
        "ib-c": {"nodes": 2, "models": {}, "none": []},
    }
    fetching = [{"source": "hf:o/r/f", "nodes": 2, "done_bytes": 1, "total_bytes": 2, "stalled": 1}]
    assert drawn(store={"kind": "sqlite", "where": "/x.db"}, holdings=holdings, fetching=fetching)[4:] == [
        "weights   m 1/1",
        "weights   ib-a m 4/4, n 1/4; on no node o",
        "weights   ib-b on no node m, n",
        "fetching  hf:o/r/f on 2 nodes, 50% of 2B, 1 stalled",
        "store     sqlite /x.db",
    ]
