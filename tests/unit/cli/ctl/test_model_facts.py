from __future__ import annotations

import json
from typing import Any

CPU = {"profiles": ["cpu", "spare"], "engine": "llamacpp", "version": "0.1.0", "load_seconds": 95.2, "memory_gb": 3.512}
GPU = {"profiles": ["tp2"], "engine": "vllm", "gpu_class": "h100-80g", "gpu_gb": 71.25}
FACTS = {"model": "qwen", "facts": [CPU, GPU], "forgotten": False}
TABLE = (
    "PROFILE    ENGINE    VERSION  GPUS      LOAD   GPU MEMORY  MEMORY\n"
    "cpu,spare  llamacpp  0.1.0    -         1m35s  -           3.512 GB\n"
    "tp2        vllm      -        h100-80g  -      71.25 GB    -\n"
)


def test_what_launches_have_shown_is_a_table(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/facts/org%2Fm", FACTS)
    ended = ctl("model", "facts", "org/m")
    assert (ended.status, ended.out) == (0, TABLE)
    assert json.loads(ctl("model", "facts", "org/m", "--json").out) == FACTS


def test_it_is_forgotten_when_that_is_asked_for(port: Any, ctl: Any) -> None:
    port.will_answer("DELETE", "/facts/qwen", {**FACTS, "forgotten": True})
    ended = ctl("model", "facts", "qwen", "--forget")
    assert (ended.status, ended.out) == (0, "qwen: this is forgotten\n" + TABLE)
    assert [each.method for each in port.heard] == ["DELETE"]


def test_where_nothing_is_known_that_is_said(port: Any, ctl: Any) -> None:
    port.will_answer("GET", "/facts/qwen", {"model": "qwen", "facts": [], "forgotten": False})
    assert ctl("model", "facts", "qwen").out == "nothing is known of launches of qwen\n"


def test_what_is_forgotten_is_not_watched(port: Any, ctl: Any) -> None:
    assert (ctl("model", "facts", "qwen", "--forget", "--watch").status, port.heard) == (2, [])
