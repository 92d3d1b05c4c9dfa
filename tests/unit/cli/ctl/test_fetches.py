from __future__ import annotations

from typing import Any

import pytest

from llmgw.cli.ctl.fetches import tell_doing, tell_fetch, tell_pace, tell_sources, tell_sum, tell_whole

FETCH: dict[str, Any] = {
    "source": "hf:org/repo/a.gguf",
    "phase": "fetching",
    "done_bytes": 999_999_999,
    "total_bytes": 1_000_000_000,
    "origin_bytes": 400_000_000,
    "peer_bytes": 600_000_000,
}


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        # (all but one byte is not all)
        ({}, "fetching 99 %"),
        ({"left_seconds": 34.4}, "fetching 99 %, 34s left"),
        ({"stalled_seconds": 65.0, "left_seconds": 3.0}, "fetching 99 %, stalled for 1m5s"),
        (
            {"stalled_seconds": 9.0, "cause": "h answers\n503"},
            "fetching 99 %, stalled for 9s: h answers\N{REPLACEMENT CHARACTER}503",
        ),
        ({"total_bytes": None}, "fetching"),
        ({"phase": "queued"}, "waits for another program there that fetches it"),
        ({"phase": "resolving"}, "asks what there is to fetch"),
        (
            {"phase": "resolving", "stalled_seconds": 70.0, "cause": "nobody listens"},
            "asks what there is to fetch, stalled for 1m10s: nobody listens",
        ),
        (
            {"phase": "queued", "stalled_seconds": 61.0},
            "waits for another program there that fetches it, stalled for 1m1s",
        ),
        ({"phase": "verifying"}, "verifying"),
        ({"phase": "verifying", "stalled_seconds": 10.0, "left_seconds": 2.0}, "verifying, stalled for 10s"),
        ({"phase": "ready"}, "ready"),
        ({"phase": "failed"}, "failed"),
        ({"phase": "of a later\nversion"}, "of a later\N{REPLACEMENT CHARACTER}version"),
    ],
)
def test_how_far_it_is_takes_a_few_words(facts: dict[str, Any], says: str) -> None:
    assert tell_fetch({**FETCH, **facts}) == says


def test_what_always_moves_is_no_news() -> None:
    stalled = {**FETCH, "stalled_seconds": 9.0, "cause": "h answers 503"}
    assert tell_doing(FETCH) == tell_doing({**FETCH, "done_bytes": 5, "left_seconds": 4.0}) == "fetching"
    assert tell_doing(stalled) == "fetching, stalled: h answers 503"
    assert tell_pace(stalled) == "fetching 99 %, stalled for 9s"


def test_all_that_is_known_is_one_line() -> None:
    assert tell_whole({**FETCH, "rate": 35_000_000.4, "left_seconds": 2.0}) == (
        "hf:org/repo/a.gguf: fetching 99 %, 2s left, 1GB of 1GB, 35MB/s, 400MB from its origin and 600MB from other "
        "nodes"
    )
    assert tell_whole({**FETCH, "total_bytes": None, "done_bytes": 0}) == (
        "hf:org/repo/a.gguf: fetching, 0B, 400MB from its origin and 600MB from other nodes"
    )
    assert tell_whole({**FETCH, "stalled_seconds": 9.0, "cause": "h answers 503"}).endswith(
        "stalled for 9s, 1GB of 1GB, 400MB from its origin and 600MB from other nodes: h answers 503"
    )
    assert tell_sources(FETCH) == "400MB from its origin and 600MB from other nodes"


def test_many_nodes_are_one_line() -> None:
    one = {"source": "hf:org/repo/a.gguf", "nodes": 1, "done_bytes": 0, "stalled": 0}
    assert tell_sum(one) == "hf:org/repo/a.gguf on 1 node"
    many = {**one, "nodes": 8, "done_bytes": 42, "total_bytes": 100, "left_seconds": 80.0, "stalled": 2}
    assert tell_sum(many) == "hf:org/repo/a.gguf on 8 nodes, 42% of 100B, 1m20s left, 2 stalled"
