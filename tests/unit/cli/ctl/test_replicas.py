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
