"""What a node found, and how any answer is drawn; what is found of a binary here is in test_binaries.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

FINE = {
    "engine": "vllm",
    "program": ["/opt/vllm"],
    "version": "0.32.0",
    "checked": True,
    "starts": True,
    "problems": [],
    "missing_libraries": [],
}


def answer(*engines: dict[str, Any], state: str = "ready", **more: Any) -> dict[str, Any]:
    node = {"node": "n1", "state": state, "engines": list(engines), **more}
    return {"plugins": [{"name": "sglang"}, {"name": "vllm"}], "left_out": [], "nodes": [node, {"node": "n2"}]}


def test_a_node_tells_what_its_agent_found(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/engines", answer(FINE))
    ended = ctl("engine-check", "vllm", "--node", "n1")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out == "vllm 0.32.0 at /opt/vllm on n1\n\na launch on n1 would work\n"


def test_a_binary_that_can_not_start_there_is_told_with_what_it_lacks(port: Any, ctl: Any) -> None:
    broken = {
        **FINE,
        "version": None,
        "starts": False,
        "broken": "the shared library libx.so.1 is missing; apt install libx1",
        "missing_libraries": ["libx.so.1"],
    }
    port.will_answer("GET", "/engines", answer(broken))
    ended = ctl("engine-check", "vllm", "--node", "n1")
    assert ended.status == 1
    assert ended.out == (
        "vllm at /opt/vllm on n1\n"
        "\n"
        "it can't start: the shared library libx.so.1 is missing; apt install libx1\n"
        "\n"
        "a launch on n1 would fail: the binary can't start, whatever its flags\n"
    )
    ended = ctl("engine-check", "vllm", "--node", "n1", "--json")
    assert ended.status == 1
    assert json.loads(ended.out) == {
        "engine": "vllm",
        "node": "n1",
        "node_state": "ready",
        "program": ["/opt/vllm"],
        "works": False,
        "starts": False,
        "broken": "the shared library libx.so.1 is missing; apt install libx1",
        "missing_libraries": ["libx.so.1"],
        "problems": [],
    }


def test_flags_that_it_does_not_know_are_no_failure_to_start(port: Any, ctl: Any) -> None:
    unfit = {
        **FINE,
        "broken": "llmgw passes --x: unknown; install another release",
        "problems": ["llmgw passes --x: unknown", "--help was not read whole"],
    }
    port.will_answer("GET", "/engines", answer(unfit))
    told = json.loads(ctl("engine-check", "vllm", "--node", "n1", "--json").out)
    assert (told["works"], told["starts"], told.get("broken")) == (False, True, None)
    assert told["problems"] == ["llmgw passes --x: unknown; install another release", "--help was not read whole"]
    ended = ctl("engine-check", "vllm", "--node", "n1")
    assert (ended.status, ended.out.splitlines()[-1]) == (1, "a launch on n1 would fail: see above")


def test_what_a_lost_node_said_is_told_as_old(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/engines", answer({**FINE, "problems": ["--x is odd"]}, state="lost"))
    ended = ctl("engine-check", "vllm", "--node", "n1")
    # It is odd, and breaks nothing.
    assert ended.status == 0
    assert ended.out.splitlines()[1] == "n1 is lost: this is what it said last"
    assert "--x is odd" in ended.out


@pytest.mark.parametrize(
    ("told", "words", "said"),
    [
        (answer(FINE), ("vllm", "--node", "n3"), "there is no node n3; there is n1, n2"),
        ({**answer(), "nodes": []}, ("vllm", "--node", "n3"), "there is no node n3; there is none"),
        (answer(FINE), ("sglang", "--node", "n1"), "n1 has no binary for sglang: install it there where PATH finds it"),
        (answer(FINE), ("trt", "--node", "n1"), "no engine 'trt' is installed at the server; there is sglang, vllm"),
        (
            {**answer(FINE), "left_out": [{"plugin": "engine trt", "reason": "plugin trt lacks engine_describe"}]},
            ("trt", "--node", "n1"),
            "there is sglang, vllm\nplugin trt lacks engine_describe",
        ),
        (
            answer(state="joining", engines=None),
            ("vllm", "--node", "n1"),
            "n1 is joining and has not said yet what it has",
        ),
        (
            answer({**FINE, "checked": False}),
            ("vllm", "--node", "n1"),
            "n1 has not tried /opt/vllm yet: ask again in a few seconds",
        ),
    ],
    ids=["unknown node", "no node", "no binary", "no plugin", "left out", "joining", "not checked"],
)
def test_what_the_server_does_not_know_is_told(
    port: Any, ctl: Any, told: dict[str, Any], words: tuple[str, ...], said: str
) -> None:
    port.will_answer("GET", "/engines", told)
    ended = ctl("engine-check", *words)
    assert (ended.status, ended.out) == (1, "")
    assert said in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give one of --bin PATH"),
        (("--bin", "x", "--node", "n1"), "give one of --bin PATH"),
        (("--node", "n1", "--profile", "m.yaml"), "--profile goes with --bin"),
        (("--bin", "x", "--server", "http://127.0.0.1:1"), "--server and --config go with --node"),
        (("--bin", "x", "--config", "server.yaml"), "--server and --config go with --node"),
    ],
)
def test_options_that_do_not_go_together_are_refused(port: Any, ctl: Any, words: tuple[str, ...], said: str) -> None:
    ended = ctl("engine-check", "vllm", *words)
    assert (ended.status, ended.out) == (2, "")
    assert said in ended.err
    assert port.heard == []


def test_nothing_that_answers_is_told(ctl: Any) -> None:
    ended = ctl("engine-check", "vllm", "--node", "n1", "--server", "http://127.0.0.1:1")
    assert (ended.status, ended.out) == (1, "")
    assert "nothing answers at http://127.0.0.1:1" in ended.err
