from __future__ import annotations

import json
from typing import Any

VLLM = {
    "name": "vllm",
    "title": "vLLM",
    "binary": "vllm",
    "tasks": ["chat", "embed"],
    "cpu": False,
    "tp": True,
    "pp": True,
    "nodes": True,
    "loras": False,
    "mmproj": False,
    "tool_parser": True,
    "reasoning_parser": False,
    "origin": "distribution llmgw 0.1.0",
}
PLAIN = {
    **dict.fromkeys(VLLM, False),
    "name": "x",
    "title": "X",
    "binary": "x-server",
    "tasks": ["chat"],
    "origin": None,
}
FINE = {
    "engine": "vllm",
    "program": ["/opt/vllm"],
    "version": "0.32.0",
    "checked": True,
    "problems": [],
    "missing_libraries": [],
}
BROKEN = {
    **FINE,
    "engine": "x",
    "program": ["python", "-m", "x"],
    "version": None,
    "broken": "libx.so.1 can't be\x1b[2Kfound",
    "problems": ["llmgw passes --y: unknown"],
    "missing_libraries": ["libx.so.1", "liby.so"],
}
ANSWER = {
    "plugins": [VLLM, PLAIN],
    "left_out": [{"plugin": "engine z", "reason": "plugin z can't be imported: no module y"}],
    "nodes": [
        {"node": "n1", "state": "ready", "engines": [FINE, BROKEN]},
        {"node": "n2", "state": "ready", "engines": [{**FINE, "problems": ["--old is on its way out"]}]},
        {"node": "n3", "state": "ready", "engines": [{**FINE, "checked": False, "version": None}]},
        {"node": "n4", "state": "ready", "engines": []},
        {"node": "n5", "state": "joining"},
    ],
}


def test_plugins_then_nodes_then_what_is_the_matter(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/engines", ANSWER)
    ended = ctl("engines")
    plugins, nodes, troubles = ended.out.split("\n\n")
    assert ended.status == 0
    assert plugins.splitlines() == [
        "ENGINE  TITLE  TASKS       CAN                      BINARY    FROM",
        "vllm    vLLM   chat,embed  tp,pp,nodes,tool_parser  vllm      distribution llmgw 0.1.0",
        "x       X      chat        -                        x-server  -",
    ]
    assert nodes.splitlines() == [
        "NODE  ENGINE  VERSION  CHECK     BINARY",
        "n1    vllm    0.32.0   ok        /opt/vllm",
        "n1    x       -        broken    python -m x",
        "n2    vllm    0.32.0   problems  /opt/vllm",
        "n3    vllm    -        waiting   /opt/vllm",
        "n4    none    -        -         -",
        "n5    -       -        -         -",
    ]
    assert troubles.splitlines() == [
        "left out: engine z: plugin z can't be imported: no module y",
        "n1: x: it can't be used: libx.so.1 can't be\N{REPLACEMENT CHARACTER}[2Kfound",
        "n1: x: missing libraries: liby.so",
        "n1: x: llmgw passes --y: unknown",
        "n2: vllm: --old is on its way out",
    ]


def test_without_trouble_there_is_nothing_below(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/engines", {"plugins": [VLLM], "left_out": [], "nodes": []})
    assert len(ctl("engines").out.splitlines()) == 2


def test_json_is_what_the_server_said(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/engines", ANSWER)
    assert json.loads(ctl("engines", "--json").out) == ANSWER
