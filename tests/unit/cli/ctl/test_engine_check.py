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
    "flags": [],
    "flags_ok": 14,
}
OLD = {"flag": "--old", "given_by": "llmgw", "state": "deprecated", "detail": "use --new"}
GONE = {"flag": "--x", "given_by": "llmgw", "state": "removed", "detail": "gone since 0.11: take it out"}


def answer(*engines: dict[str, Any], state: str = "ready", **more: Any) -> dict[str, Any]:
    node = {"node": "n1", "state": state, "engines": list(engines), **more}
    return {"plugins": [{"name": "sglang"}, {"name": "vllm"}], "left_out": [], "nodes": [node, {"node": "n2"}]}


def test_a_node_tells_what_its_agent_found(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/engines", answer(FINE))
    ended = ctl("engine-check", "vllm", "--node", "n1")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out == "vllm 0.32.0 at /opt/vllm on n1\n\n14 flags are ok\n\na launch on n1 would work\n"


def test_an_agent_that_tells_of_no_flags_is_understood(port: Any, ctl: Any) -> None:
    older = {key: value for key, value in FINE.items() if not key.startswith("flags")}
    port.will_answer("GET", "/engines", answer(older))
    ended = ctl("engine-check", "vllm", "--node", "n1")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out == "vllm 0.32.0 at /opt/vllm on n1\n\na launch on n1 would work\n"


def test_the_flags_that_are_not_ok_there_are_a_table(port: Any, ctl: Any) -> None:
    broken = "llmgw passes --x: gone since 0.11: take it out"
    unfit = {
        **FINE,
        "broken": f"{broken}; install another of either",
        "problems": [broken],
        "flags": [GONE, OLD],
        "flags_ok": 1,
    }
    port.will_answer("GET", "/engines", answer(unfit))
    ended = ctl("engine-check", "vllm", "--node", "n1")
    assert ended.status == 1
    assert ended.out == (
        "vllm 0.32.0 at /opt/vllm on n1\n"
        "\n"
        "FLAG   GIVEN BY  STATE       DETAIL\n"
        "--x    llmgw     removed     gone since 0.11: take it out\n"
        "--old  llmgw     deprecated  use --new\n"
        "\n"
        "1 other flag is ok\n"
        "\n"
        "what to do: install another of either\n"
        "\n"
        "a launch on n1 would fail over --x\n"
    )
    told = json.loads(ctl("engine-check", "vllm", "--node", "n1", "--json").out)
    assert (told["flags"], told["flags_ok"]) == ([GONE, OLD], 1)


def test_a_deprecated_flag_there_is_told_and_breaks_nothing(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/engines", answer({**FINE, "flags": [OLD]}))
    ended = ctl("engine-check", "vllm", "--node", "n1")
    assert ended.status == 0
    assert "--old  llmgw     deprecated  use --new\n\n14 other flags are ok\n" in ended.out
    assert ended.out.splitlines()[-1] == "a launch on n1 would work; a later release may not take --old"


def test_flags_that_nobody_could_check_there_prove_nothing(port: Any, ctl: Any) -> None:
    unread = {"flag": "--model", "given_by": "llmgw", "state": "unchecked"}
    port.will_answer("GET", "/engines", answer({**FINE, "flags": [unread], "flags_ok": 0}))
    ended = ctl("engine-check", "vllm", "--node", "n1")
    assert ended.status == 0
    assert "ok\n" not in ended.out
    assert ended.out.splitlines()[-1] == "nothing is known against a launch, but no flag could be checked"


def test_a_binary_that_can_not_start_there_is_told_with_what_it_lacks(port: Any, ctl: Any) -> None:
    broken = {
        **FINE,
        "version": None,
        "starts": False,
        "broken": "the shared library libx.so.1 is missing; apt install libx1",
        "missing_libraries": ["libx.so.1"],
        "flags_ok": 0,
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
        "fails": True,
        "starts": False,
        "broken": "the shared library libx.so.1 is missing; apt install libx1",
        "missing_libraries": ["libx.so.1"],
        "problems": [],
        "flags": [],
        "flags_ok": 0,
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
    assert told["problems"] == ["llmgw passes --x: unknown", "--help was not read whole"]
    assert told["remedy"] == "install another release"
    ended = ctl("engine-check", "vllm", "--node", "n1")
    assert (ended.status, ended.out.splitlines()[-1]) == (1, "a launch on n1 would fail: see above")


def test_what_breaks_it_is_told_where_it_is_no_problem_that_is_known(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/engines", answer({**FINE, "broken": "it is odd", "problems": ["odd"]}))
    told = json.loads(ctl("engine-check", "vllm", "--node", "n1", "--json").out)
    assert (told["problems"], told.get("remedy")) == (["it is odd"], None)


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


def test_a_binary_there_that_never_said_its_version_is_not_known_to_work(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/engines", answer({**FINE, "version": None}))
    ended = ctl("engine-check", "vllm", "--node", "n1")
    assert ended.status == 1
    last = "it is not known whether a launch on n1 would work: the binary has not said which release it is"
    assert ended.out.splitlines()[-1] == last
