from __future__ import annotations

from typing import Any

import pytest

from llmgw.cli.ctl.drawing import plain
from llmgw.cli.ctl.weights import draw, draw_collected

SOURCE = "hf:org/repo/a.gguf"
STORED: dict[str, Any] = {
    "source": SOURCE,
    "commit": "3f2a9c1b04d2ffff",
    "size_bytes": 2_100_000_000,
    "state": "in use",
    "fetched_at": 1.0,
    "models": ["m"],
}
DAMAGED = {**STORED, "whole": False, "wrong": "a.gguf is missing", "remedy": "stop it, and pull"}
N1: dict[str, Any] = {
    "node": "n1",
    "state": "ready",
    "stored": [STORED, {**STORED, "commit": "0123", "size_bytes": 10**9, "state": "can be freed"}],
    "fetches": [],
    "free_bytes": 10**9,
    "shared": False,
    "seen": [],
}
FETCH: dict[str, Any] = {"source": SOURCE, "phase": "fetching", "done_bytes": 0, "origin_bytes": 0, "peer_bytes": 0}
NOTHING = {"state": "ready", "fetches": [], "free_bytes": 0, "shared": False, "seen": []}


def test_weights_are_a_table_with_what_can_be_freed_below(port: Any, ctl: Any) -> None:
    fetching = {**NOTHING, "node": "n2", "stored": [], "fetches": [FETCH, {**FETCH, "total_bytes": 5 * 10**9}]}
    port.will_answer("GET", "/weights", {"nodes": [N1, fetching]})
    assert ctl("weights").out == (
        "NODE  SOURCE              COMMIT        SIZE   STATE\n"
        "n1    hf:org/repo/a.gguf  3f2a9c1b04d2  2.1GB  in use\n"
        "n1    hf:org/repo/a.gguf  0123          1GB    can be freed\n"
        "n2    hf:org/repo/a.gguf  -             -      fetching\n"
        "n2    hf:org/repo/a.gguf  -             5GB    fetching 0 %\n"
        "\n"
        "n1: 1GB can be freed\n"
        "\n"
        "to delete what can be freed: llmgw ctl weights --collect\n"
    )


def test_what_is_the_matter_stands_below() -> None:
    failed = {**FETCH, "phase": "failed", "cause": "the disk is full", "remedy": "free 3GB"}
    nodes = [
        {**NOTHING, "node": "old"},
        {**N1, "node": "away", "state": "lost", "shared": True},
        {**N1, "node": "both", "shared": True, "shared_with": ["n4", "n5"]},
        {**N1, "node": "twin", "shared_with": ["n6"]},
        {**NOTHING, "node": "gone", "state": "lost"},
        {**NOTHING, "node": "bad", "stored": [], "fetches": [failed]},
        {**NOTHING, "node": "torn", "stored": [DAMAGED, {**DAMAGED, "remedy": None}]},
        {**NOTHING, "node": "slow", "stored": [], "fetches": [{**FETCH, "cause": "h answers 503"}]},
    ]
    assert plain(draw({"nodes": nodes})).split("\n\n")[1].splitlines() == [
        "old: it has not said what it has: its agent has just begun, or is of an earlier version",
        "away: it is lost: this is what it said last",
        "away: 1GB can be freed, in a folder shared with other machines",
        "both: 1GB can be freed, in a folder shared with n4, n5",
        "twin: 1GB can be freed, in a folder shared with n6",
        "bad: hf:org/repo/a.gguf: the disk is full",
        "bad: what to do: free 3GB",
        "torn: hf:org/repo/a.gguf (3f2a9c1b04d2) is damaged: a.gguf is missing",
        "torn: what to do: stop it, and pull",
        "torn: hf:org/repo/a.gguf (3f2a9c1b04d2) is damaged: a.gguf is missing",
        "slow: hf:org/repo/a.gguf: h answers 503",
    ]
    assert "torn  hf:org/repo/a.gguf  3f2a9c1b04d2  2.1GB  damaged, in use\n" in plain(draw({"nodes": nodes}))


def test_what_stands_still_says_for_how_long_in_any_phase() -> None:
    fetches = [{**FETCH, "phase": phase, "stalled_seconds": 70.0} for phase in ("resolving", "verifying", "fetching")]
    rows = plain(draw({"nodes": [{**NOTHING, "node": "n1", "stored": [], "fetches": fetches}]})).splitlines()[1:]
    assert all(row.endswith(", stalled for 1m10s") for row in rows)
    assert len(rows) == 3


def test_where_nothing_is_there_is_only_the_head() -> None:
    assert plain(draw({"nodes": [{**NOTHING, "node": "n1", "stored": []}]})) == "NODE  SOURCE  COMMIT  SIZE  STATE"


DONE: dict[str, Any] = {"node": "n1", "items": 2, "bytes": 3 * 10**9, "freed_bytes": 10**9, "kept": ["a.gguf: in use"]}


def test_what_was_removed_is_told_with_what_was_kept(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/weights/collect", {"nodes": [DONE]})
    ended = ctl("weights", "--collect")
    assert (ended.status, ended.out) == (0, "n1: 1GB are free again\nn1: kept a.gguf: in use\n")
    assert port.heard[0].body == {}


def test_a_node_that_did_not_do_it_is_no_success(port: Any, ctl: Any) -> None:
    silent = {**DONE, "node": "n2", "why": "it is lost: nothing is removed there"}
    port.will_answer("POST", "/weights/collect", {"nodes": [DONE, silent]})
    ended = ctl("weights", "--collect")
    assert ended.status == 1
    assert ended.out.splitlines()[-1] == "n2: 3GB are still there: it is lost: nothing is removed there"


def test_what_a_node_has_removed_that_gives_no_answer_is_not_told_as_a_figure() -> None:
    unknown = {name: value for name, value in DONE.items() if name != "freed_bytes"}
    lines = draw_collected({"nodes": [{**unknown, "why": "it is lost"}]})
    assert lines == ["n1: 3GB could be freed, and what it has removed is not known: it is lost"]


def test_nothing_to_remove_is_told() -> None:
    assert draw_collected({"nodes": []}) == ["nothing can be freed"]


def test_the_answers_can_be_had_as_they_are(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/weights", {"nodes": []})
    port.will_answer("POST", "/weights/collect", {"nodes": []})
    assert ctl("weights", "--json").out == ctl("weights", "--collect", "--json").out == '{"nodes": []}\n'


@pytest.mark.parametrize("option", [("--collect",), ("--json",), ("--server", "http://127.0.0.1:1")])
def test_options_before_the_command_are_refused(ctl: Any, option: tuple[str, ...]) -> None:
    ended = ctl("weights", *option, "pull", SOURCE)
    assert ended.status == 2
    assert "write the options of pull behind it" in ended.err
