from __future__ import annotations

import json

from llmgw.admin.views import (
    GpuView,
    ModelDetail,
    ModelStatus,
    ModelView,
    NodeEngines,
    NodeMarks,
    NodeState,
    NodeView,
    Origin,
    encode,
)
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import Disk, EngineFound, FlagFound

MODEL = ModelView(
    name="m", status=ModelStatus.ON_DEMAND, serving=False, ready=0, wanted=0, origin=Origin.STORED, aliases=("a",)
)


def test_what_is_not_known_is_absent() -> None:
    view = NodeView(node="n1", state=NodeState.SILENT, connected=False, memory_gb=1.5)
    assert json.loads(encode(view)) == {
        "node": "n1",
        "state": "silent",
        "connected": False,
        "cordoned": False,
        "draining": False,
        "memory_gb": 1.5,
        "replicas": [],
    }


def test_nothing_deeper_inside_is_null_either() -> None:
    detail = ModelDetail(
        model=MODEL,
        definition=Model(name=ModelName("m"), source="/m", profiles=(Profile(name="p", engine="e"),)),
    )
    text = encode({"models": (detail,)}).decode()
    assert "null" not in text
    (told,) = json.loads(text)["models"]
    assert told["model"] == {
        "name": "m",
        "status": "on-demand",
        "serving": False,
        "ready": 0,
        "wanted": 0,
        "origin": "stored",
        "aliases": ["a"],
        "held": False,
    }
    assert "gpu_class" not in told["definition"]["profiles"][0]


def test_nothing_and_none_of_them_are_told_apart_from_not_known() -> None:
    view = NodeView(node="n1", state=NodeState.READY, connected=True, trunks=0, memory_booked_gb=0.0)
    told = json.loads(encode(view))
    assert (told["trunks"], told["memory_booked_gb"]) == (0, 0.0)


def test_facts_of_the_core_are_told_as_they_are() -> None:
    view = NodeView(
        node="n1", state=NodeState.READY, connected=True, disks=(Disk(path="/", free_gb=1.0, total_gb=2.0),)
    )
    assert json.loads(encode(view))["disks"] == [{"path": "/", "free_gb": 1.0, "total_gb": 2.0}]


def test_what_came_of_trying_a_binary_is_told_whole() -> None:
    found = EngineFound(
        engine="e",
        program=("/opt/e", "-x"),
        checked=True,
        broken="libe.so.1 is missing",
        missing_libraries=("libe.so.1",),
        flags=(FlagFound(flag="--x", given_by="llmgw", state="unchecked"),),
        flags_ok=3,
    )
    told = json.loads(encode(NodeEngines(node="n1", state=NodeState.READY, engines=(found,))))
    assert told["engines"] == [
        {
            "engine": "e",
            "program": ["/opt/e", "-x"],
            "checked": True,
            "starts": True,
            "broken": "libe.so.1 is missing",
            "problems": [],
            "missing_libraries": ["libe.so.1"],
            "flags": [{"flag": "--x", "given_by": "llmgw", "state": "unchecked"}],
            "flags_ok": 3,
        }
    ]


def test_peers_that_are_not_known_are_absent_and_none_of_them_is_none() -> None:
    gpus = tuple(
        GpuView(
            uuid=f"GPU-{n}",
            index=n,
            gpu_class="h100-80g",
            name="H100",
            memory_gb=85.0,
            memory_used_gb=0.0,
            nvlink_peers=peers,
        )
        for n, peers in enumerate((None, ()))
    )
    told = json.loads(encode(NodeView(node="n1", state=NodeState.READY, connected=True, gpus=gpus)))
    assert ["nvlink_peers" in gpu for gpu in told["gpus"]] == [False, True]
    assert told["gpus"][1]["nvlink_peers"] == []


def test_labels_that_are_taken_away_are_told_by_name() -> None:
    marks = NodeMarks(node="n1", cordoned=False, labels={"zone": "a"}, known=True, without=("rack",))
    told = json.loads(encode(marks))
    assert (told["labels"], told["without"]) == ({"zone": "a"}, ["rack"])
