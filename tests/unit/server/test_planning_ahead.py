"""Places for models that nobody has written, in a real fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from llmgw.admin.views import PlanFit, PlanPlace, PlanView
from llmgw.config.definition import parse_definitions
from llmgw.core.events import CatalogChanged, NodeMarked, NodeRegistered
from llmgw.core.fleet import Fleet
from llmgw.core.node import EngineFound, ForeignUse, Gpu, Node, NodeId
from llmgw.core.rejection import Reason
from llmgw.core.sizing import Format, GpuNeed, Needs
from llmgw.engines import EngineInfo, SourceKind
from llmgw.engines.registry import load_engines
from llmgw.server.planning_ahead import find_engines, plan_ahead

NOW = 1000.0
H100, A100 = "h100-80g", "a100-40g"
SIZES = {H100: 85.0, A100: 42.0}
FILES = EngineInfo(
    title="F", default_binary="f", sources=frozenset({SourceKind.FILE}), file_suffixes=(".gguf",), cpu=True
)
REPOSITORIES = EngineInfo(
    title="R", default_binary="r", sources=frozenset({SourceKind.REPOSITORY}), tensor_parallel=True
)
Plan = Callable[..., PlanView]


def gpus(name: str, count: int, gpu_class: str, **facts: Any) -> tuple[Gpu, ...]:
    usual = {"gpu_class": gpu_class, "name": gpu_class, "memory_gb": SIZES[gpu_class], "memory_used_gb": 0.0}
    return tuple(Gpu(**{"uuid": f"GPU-{name}-{n}", "index": n, **usual, **facts}) for n in range(count))


def engine(name: str) -> EngineFound:
    return EngineFound(engine=name, program=(name,))


@pytest.fixture
def a_node(node: Node) -> Callable[..., Node]:
    def make(name: str, *engines: str, **facts: Any) -> Node:
        return replace(node, id=NodeId(name), engines=tuple(map(engine, engines or ("f", "r"))), **facts)

    return make


@pytest.fixture
def plan() -> Plan:
    def ask(fleet: Fleet, engines: Sequence[str] = ("f", "r"), away: Sequence[NodeId] = (), **facts: Any) -> PlanView:
        known = {"f": FILES, "r": REPOSITORIES, "q": REPOSITORIES}
        needs = Needs(**{"source": "org/m", "gpus": (GpuNeed(tp=1, memory_gb=50.0),), **facts})
        chosen = {name: known[name] for name in engines}
        return plan_ahead(needs, chosen, fleet.statistics(NOW), NOW, away=away, held_up="it holds")

    return ask


def fleet_of(*nodes: Node) -> Fleet:
    fleet = Fleet()
    for node in nodes:
        fleet.handle(NodeRegistered(node=node), NOW)
    return fleet


def test_engines_are_those_that_read_the_format() -> None:
    known = load_engines({})
    assert set(find_engines(Format.GGUF, known)) == {"llamacpp"}
    assert set(find_engines(Format.SAFETENSORS, known)) == {"sglang", "vllm"}
    assert set(find_engines(None, known)) == set(known)


def test_each_class_is_told_with_the_nodes_that_have_it(plan: Plan, a_node: Any) -> None:
    fleet = fleet_of(
        a_node("n1", "r", gpus=gpus("n1", 2, H100)),
        a_node("n2", "r", gpus=gpus("n2", 4, A100)),
        a_node("n3", "r", gpus=()),
    )
    view = plan(fleet, ["r"], gpus=(GpuNeed(tp=1, memory_gb=50.0), GpuNeed(tp=2, memory_gb=30.0)))
    assert [(place.gpu_class, place.tp, [fit.node for fit in place.fits]) for place in view.places] == [
        (A100, 1, []),
        (A100, 2, ["n2"]),
        (H100, 1, ["n1"]),
        (H100, 2, ["n1"]),
    ]
    assert view.places[1].fits == (PlanFit(node="n2", engine="r", gpus=4),)
    (against,) = view.places[0].others
    assert (against.node, against.reason) == ("n2", Reason.NOT_ENOUGH_GPU_MEMORY)
    assert view.held_up == "it holds"


def test_what_a_way_needs_more_gpus_for_than_there_are_is_left_out(plan: Plan, a_node: Any) -> None:
    fleet = fleet_of(a_node("n1", "r", gpus=gpus("n1", 2, H100)))
    assert [place.tp for place in plan(fleet, ["r"], gpus=(GpuNeed(tp=4, memory_gb=1.0),)).places] == []
    # (no engine of its kind shares a model)
    fleet = fleet_of(a_node("n1", "f", gpus=gpus("n1", 2, H100)))
    assert plan(fleet, ["f"], gpus=(GpuNeed(tp=2, memory_gb=1.0),)).places == ()


def test_a_class_that_was_asked_for_is_answered_by_every_node(plan: Plan, a_node: Any) -> None:
    fleet = fleet_of(a_node("n1", "r", gpus=gpus("n1", 1, H100)), a_node("n2", "r", gpus=()))
    (place,) = plan(fleet, ["r"], gpu_class=A100, memory_gb=1.0).places
    assert [(each.node, each.reason) for each in place.others] == [
        ("n1", Reason.WRONG_CLASS),
        ("n2", Reason.NO_GPU),
    ]


def test_memory_that_others_hold_and_gpus_that_are_booked_are_not_free(plan: Plan, a_node: Any, a_report: Any) -> None:
    held = gpus("n1", 1, H100, foreign=(ForeignUse(memory_gb=60.0, pid=7, name="python"),))
    fleet = fleet_of(a_node("n1", "r", gpus=held), a_node("n2", "r", gpus=gpus("n2", 1, H100)))
    text = (
        f"name: m\nsource: org/m\nscaling: {{min: 1, max: 1}}\nprofiles:\n- {{name: p, engine: r, gpu_class: {H100}}}"
    )
    (definition,) = parse_definitions(text, "m.yaml", {"r"})
    fleet.handle(CatalogChanged(models=(definition.model,)), NOW)
    (place,) = plan(fleet, ["r"]).places
    assert place.fits == ()
    details = {each.node: each.detail for each in place.others}
    assert "pid 7 python holds 60 GB" in details["n1"]
    assert "rep-m-1 holds 1" in details["n2"]


def test_of_several_engines_the_one_that_is_there_counts(plan: Plan, a_node: Any) -> None:
    fleet = fleet_of(
        a_node("n1", "q", gpus=gpus("n1", 1, H100)),
        a_node("n2", "r", gpus=gpus("n2", 1, H100)),
        a_node("n3", "x", gpus=gpus("n3", 1, H100)),
    )
    (place,) = plan(fleet, ["q", "r"]).places
    assert [(fit.node, fit.engine) for fit in place.fits] == [("n1", "q"), ("n2", "r")]
    (against,) = place.others
    assert against.detail == "no binary of q or r was found there"


def test_without_gpus_it_is_the_memory_of_the_machine(plan: Plan, a_node: Any) -> None:
    fleet = fleet_of(a_node("n1", "f"), a_node("n2", "f", memory_gb=4.0))
    (place,) = plan(fleet, ["f", "r"], memory_gb=8.0).places
    assert (place.gpu_class, place.tp, place.memory_gb) == (None, 1, 8.0)
    assert place.fits == (PlanFit(node="n1", engine="f"),)
    assert [(each.node, each.reason) for each in place.others] == [("n2", Reason.NOT_ENOUGH_MEMORY)]
    assert plan(fleet, ["r"], memory_gb=8.0).places == ()
    assert plan(fleet, ["f"]).places == ()


def test_a_node_that_takes_nothing_new_is_told_so(plan: Plan, a_node: Any) -> None:
    fleet = fleet_of(a_node("n1", "f"))
    fleet.handle(NodeMarked(node=NodeId("n1"), cordoned=True), NOW)
    (place,) = plan(fleet, ["f"], memory_gb=1.0, disk_gb=1e6).places
    assert [each.reason for each in place.others] == [Reason.CORDONED, Reason.NOT_ENOUGH_DISK]


def test_nothing_is_said_where_no_engine_reads_it_and_nobody_is_there(plan: Plan, a_node: Any) -> None:
    away = [NodeId("n9")]
    assert plan(fleet_of(a_node("n1")), [], away=away) == PlanView(engines=(), unseen=("n9",), held_up="it holds")
    empty = plan(fleet_of(), ["f"], gpu_class=H100)
    assert empty.places == (PlanPlace(tp=1, memory_gb=50.0, gpu_class=H100),)
