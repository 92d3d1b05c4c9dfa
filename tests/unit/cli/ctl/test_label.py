from __future__ import annotations

from typing import Any

import pytest

LABELLED = {"node": "gpu01", "cordoned": False, "labels": {}, "known": True, "without": [], "running": []}


def test_labels_are_given_and_taken_in_one_go(port: Any, ctl: Any) -> None:
    answer = {**LABELLED, "labels": {"zone": "a", "note": "x=y"}, "without": ["rack"]}
    port.will_answer("POST", "/nodes/gpu01/labels", answer)
    ended = ctl("label", "gpu01", "zone=a", "note=x=y", "empty=", "rack-")
    assert (ended.status, ended.out) == (0, "gpu01 has zone=a note=x=y rack- from here\n")
    assert port.heard[0].body == {"labels": {"zone": "a", "note": "x=y", "empty": "", "rack": None}}


def test_a_node_without_any_has_its_own(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/nodes/gpu01/labels", LABELLED)
    assert ctl("label", "gpu01", "zone-").out == "gpu01 has only the labels of its own agent.yaml\n"


def test_one_that_was_never_here_is_told_so(port: Any, ctl: Any) -> None:
    port.will_answer("POST", "/nodes/gpu01/labels", {**LABELLED, "known": False, "without": ["zone"]})
    assert (
        "no node of this name has ever been here, and it is kept for when one comes"
        in ctl("label", "gpu01", "zone-").out
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["zone"], "'zone' is no label: write NAME=VALUE, or NAME- to take one away"),
        (["=a"], "'=a' is no label: write NAME=VALUE, or NAME- to take one away"),
        (["zone=a", "zone-"], "label 'zone' is given twice"),
    ],
)
def test_what_is_no_label_is_told_before_anybody_is_asked(port: Any, ctl: Any, words: list[str], said: str) -> None:
    ended = ctl("label", "gpu01", *words)
    assert ended.status == 2
    assert said in ended.err
    assert port.heard == []


def test_without_a_label_there_is_nothing_to_do(port: Any, ctl: Any) -> None:
    assert ctl("label", "gpu01").status == 2
    assert port.heard == []
