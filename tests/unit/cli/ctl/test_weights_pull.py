from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
import pytest

from llmgw.cli.ctl import weights_pull
from llmgw.cli.ctl.asking import Asked
from llmgw.cli.ctl.client import NoAnswer, ToldNo
from llmgw.cli.progress import Bars

SOURCE = "hf:org/repo/a.gguf"


def fetch(phase: str, **facts: Any) -> dict[str, Any]:
    return {
        "source": SOURCE,
        "phase": phase,
        "done_bytes": 0,
        "total_bytes": 10**9,
        "origin_bytes": 0,
        "peer_bytes": 0,
        **facts,
    }


def pull(*nodes: dict[str, Any]) -> dict[str, Any]:
    named = [{"node": f"n{at}", "state": "ready", "ended": False, **node} for at, node in enumerate(nodes, start=1)]
    return {"number": 7, "source": SOURCE, "nodes": named}


READY = {"ended": True, "fetch": fetch("ready", done_bytes=10**9, origin_bytes=3 * 10**8, peer_bytes=7 * 10**8)}
HAD = {"ended": True, "fetch": fetch("ready", done_bytes=10**9)}
FAILED = {"ended": True, "fetch": fetch("failed", cause="the disk is full", remedy="free 3GB")}


def test_all_have_it(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/weights/pull", pull(READY, HAD))
    ended = ctl("weights", "pull", SOURCE, "--node", "n1", "--node", "n2")
    assert (ended.status, ended.out) == (
        0,
        "n1: ready, 1GB: 300MB from its origin and 700MB from other nodes\n"
        "n2: ready, it had the newest already, and all of it is right\n",
    )
    assert port.heard[0].body == {"source": SOURCE, "nodes": ["n1", "n2"]}


def test_what_was_damaged_is_told_with_how_much_of_it_came_anew(port: Any, ctl: Any) -> None:
    mended = {"ended": True, "fetch": {**READY["fetch"], "cause": "what lay here was damaged"}}
    here = {"ended": True, "fetch": {**HAD["fetch"], "cause": "what lay here was damaged"}}
    port.will_answer("POST", "/weights/pull", pull(mended, here))
    ended = ctl("weights", "pull", SOURCE)
    assert (ended.status, ended.out) == (
        0,
        "n1: ready, 1GB: 300MB from its origin and 700MB from other nodes; what lay here was damaged\n"
        "n2: ready, nothing had to come; what lay here was damaged\n",
    )


def test_a_failure_is_told_with_its_remedy_and_ends_with_1(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/weights/pull", pull(READY, FAILED))
    ended = ctl("weights", "pull", SOURCE)
    assert ended.status == 1
    assert ended.out.splitlines()[1:] == ["n2: failed: the disk is full", "n2: what to do: free 3GB"]


def test_the_last_answer_can_be_had_as_it_is(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/weights/pull", pull(FAILED))
    ended = ctl("weights", "pull", SOURCE, "--json")
    assert (ended.status, json.loads(ended.out)) == (1, pull(FAILED))


def test_what_is_refused_is_told(port: Any, ctl: Any) -> None:
    refused = {"error": {"code": "invalid_source", "message": "/m is a path: llmgw checks it and never copies it"}}
    port.will_answer("POST", "/weights/pull", refused, status=400)
    ended = ctl("weights", "pull", "/m")
    assert ended.status == 2
    assert "is a path" in ended.err
    asked = len(port.heard)
    assert ctl("weights", "pull", SOURCE, "--node", "no node").status == 2
    assert ctl("weights", "pull", " ").status == 2
    assert len(port.heard) == asked


Follow = Callable[..., tuple[bytes, list[str]]]


@pytest.fixture
def follow(asked_of: Callable[..., Asked]) -> Follow:
    """Follows a pull of these answers; the last one, and the lines in between."""

    def run(*answers: object) -> tuple[bytes, list[str]]:
        lines: list[str] = []
        with Bars(None, lines.append) as bars:
            return weights_pull.follow(asked_of(*answers), SOURCE, (), bars), lines

    return run


def test_each_node_is_shown_as_it_goes_on(follow: Follow) -> None:
    last, lines = follow(
        pull({}, {"state": "silent"}),
        pull({"fetch": fetch("fetching", done_bytes=10**8, left_seconds=9.0)}, {"state": "silent"}),
        pull({"fetch": fetch("fetching", done_bytes=15 * 10**7)}, READY),
        pull({"fetch": fetch("fetching", done_bytes=25 * 10**7)}, READY),
        pull({"fetch": fetch("verifying", done_bytes=99 * 10**7)}, READY),
        pull(READY, READY),
    )
    assert json.loads(last) == pull(READY, READY)
    assert lines == [
        "n1: has not begun",
        "n2: silent: it goes on once the node is back",
        "n1: fetching 10 %, 9s left",
        "n2: ready",
        "n1: fetching 25 %",
        "n1: verifying",
        "n1: ready",
    ]


def test_one_that_stands_still_is_told_with_its_cause_and_once(follow: Follow) -> None:
    cause = "h answers 503"
    _, lines = follow(
        pull({"fetch": fetch("fetching")}),
        pull({"fetch": fetch("fetching", stalled_seconds=10.0)}),
        pull({"fetch": fetch("fetching", stalled_seconds=11.0)}),
        pull({"fetch": fetch("fetching", stalled_seconds=12.0, cause=cause)}),
        pull({"fetch": fetch("fetching", stalled_seconds=13.0, cause=cause)}),
        pull({"fetch": fetch("fetching", done_bytes=10**7)}),
        pull(FAILED),
    )
    assert lines == [
        "n1: fetching 0 %",
        "n1: fetching 0 %, stalled for 10s",
        "n1: fetching 0 %, stalled for 12s: h answers 503",
        "n1: fetching 1 %",
        "n1: failed",
    ]


def test_how_often_it_is_tried_again_is_told_and_why_it_ends(port: Any, ctl: Any, follow: Follow) -> None:
    cause, remedy = "nobody listens on port 1 of h", "see whether curl -I https://h:1 answers"

    def tried(left: int, stalled: float | None = None) -> dict[str, Any]:
        told = f"{remedy}; it is tried again, {left} times more at most"
        facts = {} if stalled is None else {"stalled_seconds": stalled}
        return pull({"fetch": fetch("resolving", cause=cause, remedy=told, **facts)})

    failed = pull({"ended": True, "fetch": fetch("failed", cause=cause, remedy=remedy)})
    _, lines = follow(tried(9), tried(9), tried(8), tried(8, 12.0), tried(8, 13.0), failed)
    again = f"{remedy}; it is tried again,"
    assert lines == [
        f"n1: asks what there is to fetch: {cause}; {again} 9 times more at most",
        f"n1: asks what there is to fetch: {cause}; {again} 8 times more at most",
        f"n1: asks what there is to fetch, stalled for 12s: {cause}; {again} 8 times more at most",
        "n1: failed",
    ]
    port.will_answer("POST", "/weights/pull", failed)
    ended = ctl("weights", "pull", SOURCE)
    assert (ended.status, ended.out) == (1, f"n1: failed: {cause}\nn1: what to do: {remedy}\n")


def test_sizes_are_of_one_family(port: Any, ctl: Any) -> None:
    sizes = {"done_bytes": 65_000_000, "total_bytes": 65_000_000, "origin_bytes": 30 * 2**20, "peer_bytes": 33_542_720}
    port.will_answer("POST", "/weights/pull", pull({"ended": True, "fetch": fetch("ready", **sizes)}))
    assert ctl("weights", "pull", SOURCE).out == "n1: ready, 65MB: 31.5MB from its origin and 33.5MB from other nodes\n"


def test_an_empty_source_is_told_as_one(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/weights/pull", pull({"ended": True, "fetch": fetch("ready", total_bytes=0)}))
    assert ctl("weights", "pull", SOURCE).out == "n1: ready, 0B: it is empty\n"


def test_a_server_that_does_not_answer_is_waited_for(follow: Follow) -> None:
    silence = NoAnswer("nothing answers there")
    _, lines = follow(pull({}), silence, silence, pull(READY))
    assert lines == ["n1: has not begun", "nothing answers there; waiting for it", "n1: ready"]


def test_a_server_that_was_started_anew_knows_nothing_of_it(follow: Follow) -> None:
    with pytest.raises(ToldNo, match="llmgw ctl weights"):
        follow(pull({}), ToldNo("nothing is known of order 7: `llmgw ctl weights` shows more", "unknown_pull"))


def test_ctrl_c_leaves_the_fetches_going(follow: Follow, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.Abort):
        follow(pull({}))
    assert "the fetches go on: llmgw ctl weights --watch" in capfd.readouterr().err
