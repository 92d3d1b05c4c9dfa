from __future__ import annotations

from typing import Any

import pytest

from llmgw.cli.ctl.node_rm import draw


def test_a_node_is_removed_and_its_certificate_is_not_forgotten(port: Any, ctl: Any) -> None:
    port.will_answer("DELETE", "/nodes/gpu01", {"node": "gpu01", "connected": False, "known": True, "running": []})
    ended = ctl("node", "rm", "gpu01")
    assert (ended.status, ended.out) == (
        0,
        "gpu01 is removed\nits certificate is valid until you revoke it: llmgw ctl cert revoke gpu01 --dir DIR\n",
    )


def test_an_agent_that_is_still_there_is_said_to_come_back() -> None:
    _, line, _ = draw({"node": "gpu01", "connected": True, "known": True, "running": []})
    assert line == "its agent runs and comes back as a new node: stop it there"


def test_what_a_lost_node_may_run_still_is_named() -> None:
    _, line, _ = draw({"node": "gpu01", "connected": False, "known": True, "running": ["rep-a-1", "rep-b-1"]})
    assert str(line).startswith("it was lost with rep-a-1, rep-b-1, which may run there still")


def test_one_that_was_never_here_has_no_certificate_to_revoke() -> None:
    assert draw({"node": "ghost", "connected": False, "known": False, "running": []}) == [
        "ghost is removed",
        "no node of this name has ever been here: what you said of it is forgotten",
    ]


BRAKE = {"lost": 3, "nodes": 4, "seconds_left": 57.0, "who": ["a", "b", "c"], "held": []}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (BRAKE, None, "with that the brake is over: what ran on nodes that are lost is placed anew elsewhere"),
        (
            {**BRAKE, "held": [f"rep-m-{number}" for number in range(9)]},
            None,
            "with that the brake is over: what ran on nodes that are lost (rep-m-0, rep-m-1, rep-m-2, rep-m-3, "
            "rep-m-4, rep-m-5, rep-m-6, rep-m-7 and 1 more) is placed anew elsewhere",
        ),
        (
            {**BRAKE, "lost": 4, "nodes": 5},
            BRAKE,
            "the brake still holds without it, for 57s: 3 of 4 nodes were lost together",
        ),
    ],
)
def test_a_brake_that_ends_or_shrinks_with_it_is_told(before: Any, after: Any, said: str) -> None:
    """One lost node was removed in silence, and what the brake had held was stopped at once."""
    answer = {"node": "gpu01", "connected": False, "known": True, "running": [], "brake_before": before}
    assert draw({**answer, "brake": after})[:2] == ["gpu01 is removed", said]


@pytest.mark.parametrize(
    "words", [("node", "rm", "a/b"), ("cordon", ""), ("uncordon", "../../x"), ("label", "G1", "a=b")]
)
def test_a_name_that_no_node_can_have_is_told_before_anybody_is_asked(
    port: Any, ctl: Any, words: tuple[str, ...]
) -> None:
    ended = ctl(*words)
    assert ended.status == 2
    assert "is not a DNS name in lower case" in ended.err
    assert port.heard == []


def test_a_no_is_status_1(port: Any, ctl: Any) -> None:
    error = {"error": {"code": "node_in_use", "message": "gpu01 is ready, with rep-a-1: cordon it"}}
    port.will_answer("DELETE", "/nodes/gpu01", error, status=409)
    ended = ctl("node", "rm", "gpu01")
    assert (ended.status, ended.out, ended.err) == (1, "", "llmgw: gpu01 is ready, with rep-a-1: cordon it\n")
