"""The drawing of what the core really explains."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from llmgw.admin.views import ExplanationView, encode
from llmgw.cli.ctl.drawing import plain
from llmgw.cli.ctl.verdicts import FIGURES, MANY, draw_decisions, draw_explanation
from llmgw.core.hosts import Host, Standing
from llmgw.core.learned import Figure, Kind, Learned
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import EngineFound, FabricFound, Gpu, Node, NodeId
from llmgw.core.placement import explain

ENGINES = (EngineFound(engine="e", program=("e",), version="1", checked=True),)
TP2 = Profile(name="tp2", engine="e", gpu_class="h100-80g", tp=2)


def host(name: str, gpus: int = 2, **facts: Any) -> Host:
    cards = tuple(
        Gpu(uuid=f"{name}-{n}", index=n, gpu_class="h100-80g", name="H100", memory_gb=85.0, memory_used_gb=0.0)
        for n in range(gpus)
    )
    node = Node(
        id=NodeId(name),
        cores=4,
        cpu_flags=frozenset(),
        memory_gb=64.0,
        memory_available_gb=60.0,
        engines=ENGINES,
        gpus=cards,
        fabrics=facts.pop("fabrics", ()),
    )
    return Host(node=node, **facts)


def answer(*hosts: Host, profile: Profile = TP2, **facts: Any) -> Any:
    """What the port answers where these are the nodes."""
    model = Model(name=ModelName("m"), source="hf:m", profiles=(profile,))
    view = ExplanationView(explanation=explain(model, hosts, {}, 0.0), wanted=1, most=2, **facts)
    return json.loads(encode(view))


def lines(told: Any, *, whole: bool = False) -> list[str]:
    return plain(draw_explanation(told, whole=whole)).splitlines()


def test_a_place_is_shown_with_what_it_costs_and_the_second_best() -> None:
    told = lines(answer(host("n1", cordoned=True), host("n2"), host("n3", replicas={ModelName("m"): 1})))
    assert told[0] == "m: 1 replica wanted, 2 at most"
    assert told[2:4] == [
        "one more would go to n2 by profile tp2, 2 GPUs: 600 s (600 s to fetch the weights)",
        "the second best is n3 by profile tp2, 2 GPUs: 660 s (600 s to fetch the weights, 60 s for replicas of the "
        "same model there)",
    ]
    assert told[5].split() == ["PROFILE", "NODE", "VERDICT", "DETAIL"]
    assert [line.split()[1:3] for line in told[6:]] == [["n1", "cordoned"], ["n2", "chosen"], ["n3", "second"]]


def test_a_refusal_names_every_reason_and_the_smallest_change() -> None:
    told = lines(answer(host("n1", gpus=1, cordoned=True), host("n2", gpus=0)))
    assert told[2] == "one more finds no place"
    assert told[3].startswith("the smallest change that would make one: ")
    verdicts = [line.split()[1:3] for line in told[6:]]
    assert ["n1", "cordoned"] in verdicts
    assert ["n1", "not_enough_gpus"] in verdicts
    assert ["n2", "no_gpu"] in verdicts


def test_nodes_that_do_together_are_one_line_with_their_fabric() -> None:
    fabrics = (FabricFound(name="ib-a", interface="ib0", address="10.1.0.1"),)
    hosts = (host("n1", fabrics=fabrics), host("n2", fabrics=fabrics), host("n3"))
    told = lines(answer(*hosts, profile=replace(TP2, tp=4, nodes=2)))
    assert told[2].startswith("one more would go to n1, n2 over ib-a by profile tp2, 4 GPUs: ")
    head, *rows = told[4:]
    assert head.split() == ["PROFILE", "NODE", "FABRIC", "VERDICT", "DETAIL"]
    assert rows[0].split()[:5] == ["tp2", "n1,", "n2", "ib-a", "chosen"]
    assert rows[1].split()[1:4] == ["n3", "-", "no_fabric"]


def test_many_nodes_are_counted_by_their_verdict_unless_all_are_asked_for() -> None:
    hosts = [host(f"n{number:03}", gpus=1 if number else 2) for number in range(MANY + 1)]
    told = answer(*hosts)
    head, *rows = lines(told)[4:]
    assert head.split()[:3] == ["PROFILE", "VERDICT", "NODES"]
    assert [row.split()[1:3] for row in rows] == [["chosen", "1"], ["not_enough_gpus", str(MANY)]]
    assert "n001, n002, n003 and 27 more" in rows[1]
    assert len(lines(told, whole=True)) == len(lines(told)[:4]) + 1 + MANY + 1


def test_a_node_with_several_reasons_is_counted_once() -> None:
    hosts = [host(f"n{number:03}", gpus=1, cordoned=True) for number in range(MANY + 1)]
    _, *rows = lines(answer(*hosts))[5:]
    assert [row.split()[1:3] for row in rows] == [["cordoned", str(MANY + 1)]]


def test_without_a_node_or_a_profile_there_is_no_table() -> None:
    assert lines(answer())[2:] == [
        "one more finds no place",
        "the smallest change that would make one: add a node with the engine e, 2 GPUs of class h100-80g",
    ]
    none = answer(host("n1"))
    none["explanation"] = {"model": "m", "candidates": []}
    assert lines(none)[2:] == ["one more finds no place", "it has no profile to run it by"]


REPLICA = {"replica": "rep-m-1", "state": "ready", "node": "n1", "profile": "tp2", "shards": []}


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({}, "  rep-m-1 is ready on n1 by profile tp2"),
        ({"state": "ended"}, "  rep-m-1 is failed on n1 by profile tp2"),
        ({"shards": [{"node": "n1"}, {"node": "n2"}]}, "  rep-m-1 is ready on n1, n2 by profile tp2"),
    ],
)
def test_where_its_replicas_are_now_is_said_first(facts: dict[str, Any], line: str) -> None:
    assert lines({**answer(host("n1")), "replicas": [{**REPLICA, **facts}]})[1] == line


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"most": 1}, "it has as many replicas as there may be: its scaling.max is 1"),
        ({"most": 0, "replicas": []}, "it is not to run: its scaling.max is 0"),
    ],
)
def test_where_there_can_be_no_more_nothing_is_said_of_a_place_for_one(facts: dict[str, Any], line: str) -> None:
    told = lines({**answer(host("n1"), evicts="rep-x-1 is idle"), "replicas": [REPLICA], "unfilled": True, **facts})
    assert line in told
    assert not any("one more" in each or "idle" in each or "measured" in each for each in told)


@pytest.mark.parametrize(
    ("facts", "says_where"),
    [({"state": "ended"}, True), ({"state": "stopping"}, True), ({"draining": "why"}, True), ({}, False)],
)
def test_one_that_goes_or_has_failed_leaves_room_for_one_more(facts: dict[str, Any], says_where: bool) -> None:
    told = lines({**answer(host("n1")), "replicas": [{**REPLICA, **facts}], "most": 1})
    assert any(each.startswith("one more would go to n1") for each in told) is says_where


def test_of_a_definition_that_is_only_written_it_is_said_what_would_make_way() -> None:
    told = {**answer(host("n1"), what_if=True, stops=("rep-m-1",)), "replicas": [REPLICA]}
    assert lines(told)[:2] == [
        "m as it is written: 1 replica wanted, 2 at most",
        "  rep-m-1 is ready on n1 by profile tp2, and would stop first",
    ]


def test_how_many_of_several_would_find_a_place_is_said() -> None:
    told = answer(host("n1"), what_if=True, missing=3, places=1)
    assert lines(told)[1] == "  1 of the 3 that it lacks find a place, one after the other"
    assert lines(answer(host("n1"), what_if=True, missing=1, places=1))[1] == "", "the place itself stands below"


def test_nodes_that_have_not_come_yet_are_in_the_table() -> None:
    model = Model(name=ModelName("m"), source="hf:m", profiles=(TP2,))
    found = explain(model, (), {}, 0.0, away={NodeId("n1"): Standing.SILENT, NodeId("n2"): Standing.LOST})
    told = lines(json.loads(encode(ExplanationView(explanation=found, wanted=1, most=2))))
    assert told[3].startswith("the smallest change that would make one: wait for n1, n2")
    assert [line.split()[1:3] for line in told[6:]] == [["n1", "node_silent"], ["n2", "node_lost"]]


def test_what_holds_everything_up_is_said() -> None:
    told = answer(host("n1"), held_up="the server has begun anew and waits for what n2 run")
    assert lines(told)[1] == "  the server has begun anew and waits for what n2 run"


def test_it_is_said_what_would_make_way() -> None:
    told = lines(answer(host("n1", gpus=1), evicts="rep-b-1 would make way: it is idle"))
    assert told[4] == "rep-b-1 would make way: it is idle"


def test_it_is_said_that_measured_figures_are_left_out() -> None:
    told = lines(answer(host("n1"), unfilled=True))
    assert "by the measured figures there is no place: they are left out, for nothing of it serves" in told


def test_each_number_says_where_it_comes_from() -> None:
    numbers = (
        Figure(name="gpu_memory", value=70.46, unit="GB", kind=Kind.MEASURED, profile="tp2"),
        Figure(name="memory", value=8.0, unit="GB", kind=Kind.DECLARED, profile="tp2"),
        Figure(name="load", value=5.0, unit="s", kind=Kind.ESTIMATED, profile=""),
    )
    told = plain(draw_explanation(answer(host("n1"), numbers=numbers), whole=False))
    assert told.split("\n\n")[2] == (
        "NUMBER              PROFILE  VALUE     IS\n"
        "memory of each GPU  tp2      70.46 GB  measured\n"
        "memory              tp2      8 GB      declared\n"
        "time to load        -        5 s       estimated"
    )


def test_every_number_that_there_is_has_a_name_of_its_own() -> None:
    profile = replace(TP2, gpu_memory_gb=70.0, min_memory_gb=8.0)
    model = Model(name=ModelName("m"), source="/m", profiles=(profile,))
    assert {figure.name for figure in Learned().figures(model, lambda engine: ())} == FIGURES.keys()


DECISIONS = [
    {
        "seconds_ago": 3.0,
        "model": "m",
        "why": "the least cost: 600 s",
        "replica": "rep-m-1",
        "profile": "tp2",
        "nodes": ["n1", "n2"],
    },
    {
        "seconds_ago": 90.0,
        "model": "m",
        "why": "1 cordoned, 2 no_gpu",
        "nodes": [],
        "reasons": {"cordoned": 1, "no_gpu": 2},
    },
]


def test_decisions_are_told_with_what_became_of_them() -> None:
    assert plain(draw_decisions({"decisions": DECISIONS})) == (
        "WHEN       MODEL  REPLICA  WHERE          WHY\n"
        "3s ago     m      rep-m-1  n1, n2 by tp2  the least cost: 600 s\n"
        "1m30s ago  m      -        no place       1 cordoned, 2 no_gpu"
    )


def test_the_decisions_about_one_model_do_not_name_it_again() -> None:
    told = {**answer(host("n1")), "decisions": DECISIONS}
    assert lines(told)[-4:-2] == ["decided before:", "WHEN       REPLICA  WHERE          WHY"]
