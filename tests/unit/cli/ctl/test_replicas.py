from __future__ import annotations

import re
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
    "cache_used": 0.254,
    "prompt_tokens": 90,
    "cached_tokens": 60,
    "steps": 12,
}
FAILED = {
    **READY,
    "replica": "rep-n-1",
    "model": "n",
    "state": "ended",
    "seconds_in_state": 4.0,
    "running": None,
    "waiting": None,
    "cache_used": None,
    "prompt_tokens": None,
    "cause": "out of memory",
    "remedy": "lower its \x1b[1m--ctx-size",
    "lines": ["loading", "\x1b[31merror\x1b[0m: failed to allocate"],
}
LOADING = {
    **READY,
    "replica": "rep-o-1",
    "model": "o",
    "state": "loading",
    "progress": "43 %",
    "running": None,
    "cached_tokens": None,
}


def test_replicas_show_since_when_how_far_and_why(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/replicas", {"replicas": [READY, FAILED, LOADING]})
    table, below = ctl("replicas").out.split("\n\n")
    assert table.splitlines() == [
        "REPLICA  MODEL  NODE  STATE    SINCE   RUNNING  WAITING  CACHE  HITS  DETAIL",
        "rep-m-1  m      n1    ready    1h ago  2        0        25%    67%",
        "rep-n-1  n      n1    failed   4s ago  -        -        -      -     out of memory",
        "rep-o-1  o      n1    loading  1h ago  -        0        25%    -     43 %",
    ]
    assert below.splitlines() == [
        "rep-n-1 on n1:",
        "cause   out of memory",
        "remedy  lower its --ctx-size",
        "the last lines of its engine:",
        "  loading",
        "  error: failed to allocate",
    ]


def test_a_cause_is_told_though_the_engine_said_nothing_and_nobody_knows_a_remedy(port: Any, ctl: Any) -> None:
    silent = {key: value for key, value in FAILED.items() if key not in {"lines", "remedy"}}
    port.will_answer("GET", "/replicas", {"replicas": [silent]})
    _, below = ctl("replicas").out.split("\n\n")
    assert below.splitlines() == ["rep-n-1 on n1:", "cause   out of memory"]


def test_one_that_takes_less_than_its_model_promises_is_named(port: Any, ctl: Any) -> None:
    short = {**READY, "context_length": 2048, "context_promised": 4096}
    fits = {**READY, "replica": "rep-m-2", "context_length": 4096, "context_promised": 4096}
    port.will_answer("GET", "/replicas", {"replicas": [short, fits]})
    _, below = ctl("replicas").out.split("\n\n")
    assert below.splitlines() == ["rep-m-1 takes 2048 tokens a request, and m promises context_length 4096"]


def test_each_that_failed_has_its_own_words(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/replicas", {"replicas": [FAILED, {**FAILED, "replica": "rep-n-2", "cause": "its port"}]})
    _, first, second = ctl("replicas").out.split("\n\n")
    assert first.splitlines()[:2] == ["rep-n-1 on n1:", "cause   out of memory"]
    assert second.splitlines()[:2] == ["rep-n-2 on n1:", "cause   its port"]


def shard(rank: int, node: str, state: str, **facts: Any) -> dict[str, Any]:
    return {"shard": f"shd-g-1-{rank}", "node": node, "rank": rank, "state": state, "seconds_in_state": 2.0, **facts}


GROUP = {
    **LOADING,
    "replica": "rep-g-1",
    "state": "ended",
    "cause": "n2: it ended",
    "lines": ["no NCCL"],
    "shards": [
        shard(0, "n1", "stopping", gpus=["GPU-0", "GPU-1"]),
        shard(1, "n2", "ended", cause="it ended", lines=["no NCCL"]),
        shard(2, "n3", "ended", lines=["lost rank 1"]),
    ],
}


def test_the_shards_of_one_that_spans_nodes_have_a_table(port: Any, ctl: Any) -> None:
    alone = {**READY, "shards": [shard(0, "n1", "ready")]}
    port.will_answer("GET", "/replicas", {"replicas": [alone, GROUP]})
    _, shards, *below = ctl("replicas").out.split("\n\n")
    assert shards.splitlines() == [
        "REPLICA  RANK  NODE  STATE     SINCE   GPUS         DETAIL",
        "rep-g-1  0     n1    stopping  2s ago  GPU-0,GPU-1",
        "rep-g-1  1     n2    failed    2s ago  -            it ended",
        # (told to end, for another had failed)
        "rep-g-1  2     n3    ended     2s ago  -",
    ]
    assert [block.splitlines()[0] for block in below] == ["rep-g-1 on n1:"]


def test_verbose_has_every_shard_and_the_last_lines_of_each(port: Any, ctl: Any) -> None:
    alone = {**READY, "shards": [shard(0, "n1", "ready")]}
    port.will_answer("GET", "/replicas", {"replicas": [alone, GROUP]})
    _, shards, *below = ctl("replicas", "--verbose").out.split("\n\n")
    assert [line.split()[:2] for line in shards.splitlines()[1:]] == [
        ["rep-m-1", "0"],
        ["rep-g-1", "0"],
        ["rep-g-1", "1"],
        ["rep-g-1", "2"],
    ]
    assert [block.splitlines() for block in below[1:]] == [
        ["shd-g-1-2 on n3:", "the last lines of its engine:", "  lost rank 1"]
    ]


def test_one_that_drains_says_why_and_how_many_requests_it_still_answers(port: Any, ctl: Any) -> None:
    going = {**READY, "draining": "n1 is to be drained", "in_flight": 1}
    gone = {**going, "state": "stopping", "progress": "SIGTERM"}
    port.will_answer("GET", "/replicas", {"replicas": [going, gone]})
    rows = [re.split("  +", line) for line in ctl("replicas").out.splitlines()[1:]]
    assert [(row[3], row[-1]) for row in rows] == [
        ("draining", "n1 is to be drained; 1 request in flight"),
        ("stopping", "SIGTERM"),
    ]


def test_those_of_one_model_are_asked_for_by_any_of_its_names(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/models/coder", {"model": {"name": "org/m"}})
    port.will_answer("GET", "/replicas?model=org%2Fm", {"replicas": [READY]})
    assert "rep-m-1" in ctl("replicas", "coder").out


UNKNOWN = {"error": {"code": "unknown_model", "message": "there is no model m; did you mean n?"}}


def test_what_is_left_of_a_model_that_was_removed_is_shown(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/models/m", UNKNOWN, status=404)
    port.will_answer("GET", "/replicas?model=m", {"replicas": [READY]})
    assert "rep-m-1" in ctl("replicas", "m").out


def test_a_model_that_nobody_knows_is_no_empty_table(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/models/m", UNKNOWN, status=404)
    port.will_answer("GET", "/replicas?model=m", {"replicas": []})
    ended = ctl("replicas", "m")
    assert (ended.status, ended.out, ended.err) == (1, "", "llmgw: there is no model m; did you mean n?\n")


FETCH = {
    "source": "hf:o/r/f.gguf",
    "phase": "fetching",
    "done_bytes": 42,
    "total_bytes": 100,
    "origin_bytes": 30,
    "peer_bytes": 12,
    "rate": 6.0,
}
FETCHING = {
    **LOADING,
    "state": "preparing",
    "progress": "fetches the weights",
    "fetch": FETCH,
    "shards": [
        {"rank": 0, "node": "n1", "state": "preparing", "seconds_in_state": 1.0, "fetch": FETCH},
        {"rank": 1, "node": "n2", "state": "prepared", "seconds_in_state": 1.0, "progress": "waits"},
    ],
}


def test_weights_on_their_way_are_told_in_percent(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/replicas", {"replicas": [FETCHING]})
    table, shards = ctl("replicas").out.split("\n\n")
    assert table.splitlines()[1].endswith("fetching 42 %")
    assert [line.split("  ")[-1].strip() for line in shards.splitlines()[1:]] == ["fetching 42 %", "waits"]


def test_verbose_tells_all_of_weights_on_their_way(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/replicas", {"replicas": [FETCHING]})
    assert ctl("replicas", "--verbose").out.split("\n\n")[2].splitlines() == [
        "rep-o-1 on n1: hf:o/r/f.gguf: fetching 42 %, 42B of 100B, 6B/s, 30B from its origin and 12B from other nodes"
    ]


def test_a_cause_says_more_than_a_fetch(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/replicas", {"replicas": [{**FAILED, "fetch": FETCH}]})
    assert ctl("replicas").out.splitlines()[1].endswith("out of memory")
