"""What the first page says of the fleet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmgw.core.events import CatalogChanged, NodeRegistered, ShardChanged, Stopping, Wakeup
from llmgw.core.fleet import Fleet
from llmgw.core.hosts import Host
from llmgw.core.picture import ModelStatistics
from llmgw.core.placement import Rejected
from llmgw.core.replica import ShardState
from llmgw.server.showing import show
from llmgw.web.snapshot import ModelShown, ModelState


@pytest.fixture
def fleet(a_model: Any, node: Any) -> Fleet:
    """One model, placed on one node."""
    fleet = Fleet()
    for event in (CatalogChanged(models=(a_model(),)), NodeRegistered(node=node), Wakeup(), Wakeup()):
        fleet.handle(event, 0.0)
    return fleet


def shown(fleet: Fleet) -> ModelShown:
    (model,) = show(fleet.statistics(), "http://x").models
    return model


def report(fleet: Fleet, a_report: Any, state: ShardState, **facts: object) -> None:
    ((replica,),) = (each.replicas for each in fleet.statistics().models)
    fleet.handle(ShardChanged(node=replica.shard.node, report=a_report(replica.shard, state, **facts)), 1.0)


def test_a_page_has_its_address_and_its_nodes(fleet: Fleet) -> None:
    snapshot = show(fleet.statistics(), "http://127.0.0.1:17434")
    assert snapshot.base_url == "http://127.0.0.1:17434/v1"
    (node,) = snapshot.nodes
    assert (node.id, node.cores, node.memory_gb, node.engines) == ("n1", 4, 16.0, ("e 1.2",))


def test_an_engine_without_a_version_is_shown_by_its_name(fleet: Fleet) -> None:
    statistics = fleet.statistics()
    (each,) = statistics.nodes
    unknown = replace(each.node, engines=(replace(each.node.engines[0], version=None),))
    nodes = (replace(each, host=Host(node=unknown)),)
    assert show(replace(statistics, nodes=nodes), "x").nodes[0].engines == ("e",)


def test_a_model_goes_from_loading_to_serving(fleet: Fleet, a_report: Any) -> None:
    model = shown(fleet)
    assert (model.name, model.aliases, model.state) == ("tiny", ("gpt",), ModelState.LOADING)
    assert (model.engine, model.node, model.detail) == ("e", "n1", "placed")
    report(fleet, a_report, ShardState.LOADING, progress="12 of 30 layers")
    assert shown(fleet).detail == "12 of 30 layers"
    report(fleet, a_report, ShardState.READY)
    assert (shown(fleet).state, shown(fleet).detail) == (ModelState.SERVING, None)


def test_a_model_that_failed_says_why(fleet: Fleet, a_report: Any) -> None:
    report(fleet, a_report, ShardState.ENDED, cause="out of memory", lines=("one", "two"))
    model = shown(fleet)
    assert model.state is ModelState.FAILED
    assert model.detail is not None
    assert "out of memory" in model.detail
    assert model.lines == ("one", "two")


def test_a_model_that_stops_is_not_running(fleet: Fleet, a_report: Any) -> None:
    report(fleet, a_report, ShardState.READY)
    fleet.handle(Stopping(), 2.0)
    assert shown(fleet).state is ModelState.STOPPED


def test_a_model_without_a_place_says_why(a_model: Any, node: Any) -> None:
    fleet = Fleet()
    for event in (CatalogChanged(models=(a_model(gb=500.0),)), NodeRegistered(node=node), Wakeup(), Wakeup()):
        fleet.handle(event, 0.0)
    model = shown(fleet)
    assert (model.state, model.engine, model.node) == (ModelState.WAITING, None, None)
    assert model.detail == "it can't be placed now: not enough free memory"


def test_a_model_without_a_node_says_so(fleet: Fleet, a_model: Any) -> None:
    nowhere = ModelStatistics(model=a_model(), replicas=(), verdict=Rejected())
    (model,) = show(replace(fleet.statistics(), models=(nowhere,)), "x").models
    assert (model.state, model.detail) == (
        ModelState.WAITING,
        "it can't be placed now: no machine that can run it is available",
    )


def test_a_model_whose_last_try_failed_and_that_has_no_room_now_waits_for_that(fleet: Fleet, a_report: Any) -> None:
    report(fleet, a_report, ShardState.ENDED, cause="out of memory")
    assert shown(fleet).state is ModelState.FAILED
    statistics = fleet.statistics()
    (each,) = statistics.models
    nowhere = replace(each, verdict=Rejected())
    (model,) = show(replace(statistics, models=(nowhere,)), "x").models
    assert (model.state, model.lines) == (ModelState.WAITING, ())
    assert model.detail == "it can't be placed now: no machine that can run it is available"


def test_of_several_replicas_the_nearest_to_serving_speaks(fleet: Fleet) -> None:
    statistics = fleet.statistics()
    (each,) = statistics.models
    ended = replace(each.replicas[0], state=ShardState.ENDED, cause="x")
    (shard,) = each.replicas[0].shards
    loading = replace(each.replicas[0], state=ShardState.LOADING, shards=(replace(shard, progress="half"),))
    models = (replace(each, replicas=(ended, loading)),)
    (model,) = show(replace(statistics, models=models), "x").models
    assert (model.state, model.detail) == (ModelState.LOADING, "half")


@pytest.mark.parametrize("state", [each for each in ShardState if each not in {ShardState.READY, ShardState.ENDED}])
def test_every_step_of_a_replica_has_its_place(fleet: Fleet, state: ShardState) -> None:
    statistics = fleet.statistics()
    (each,) = statistics.models
    ended, going = replace(each.replicas[0], state=ShardState.ENDED), replace(each.replicas[0], state=state)
    models = (replace(each, replicas=(ended, going)),)
    (model,) = show(replace(statistics, models=models), "x").models
    assert model.state is (ModelState.STOPPED if state is ShardState.STOPPING else ModelState.LOADING)


def test_a_model_that_is_to_go_or_is_held_is_not_running(fleet: Fleet) -> None:
    statistics = fleet.statistics()
    (each,) = statistics.models
    going = replace(each.replicas[0], state=ShardState.READY, draining="it is idle")
    held = replace(each, replicas=(), verdict=Rejected(), held=True)
    for changed in (replace(each, replicas=(going,)), held):
        (model,) = show(replace(statistics, models=(changed,)), "x").models
        assert (model.state, model.detail) == (ModelState.STOPPED, None)
