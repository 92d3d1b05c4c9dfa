"""Explanations of a real fleet."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llmgw.admin.views import DecisionView, ExplanationView, encode
from llmgw.config.definition import Definition, parse_definitions
from llmgw.core.crews import STOPPING_SECONDS
from llmgw.core.effects import Desire, Drain
from llmgw.core.events import (
    CatalogChanged,
    Drained,
    FactsKnown,
    NodeRegistered,
    NodesExpected,
    ShardChanged,
    Wakeup,
)
from llmgw.core.fleet import Fleet
from llmgw.core.hosts import Standing
from llmgw.core.learned import Fact, make_key
from llmgw.core.model import Model, ModelName
from llmgw.core.node import Gpu, Node, NodeId
from llmgw.core.replica import Measured, ReplicaId, ShardState
from llmgw.core.trace import Decision
from llmgw.server.explaining import (
    Question,
    explain_written,
    find_away,
    is_served,
    see_hosts,
    view_decisions,
)
from llmgw.server.explaining import explain_model as view_model

NOW = 1000.0
N2 = NodeId("n2")
TINY = ModelName("tiny")


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(uuid=f"GPU-{n}", index=n, gpu_class="h100-80g", name="H100", memory_gb=85.0, memory_used_gb=0.0)
        for n in range(count)
    )


def written(name: str = "tiny", *, source: str = "/tiny.gguf", more: str = "", least: int = 1) -> Definition:
    text = (
        f"name: {name}\nsource: {source}\nscaling: {{min: {least}, max: 2}}\nprofiles:\n- name: p\n  engine: e\n{more}"
    )
    (definition,) = parse_definitions(text, "m.yaml", {"e"})
    return definition


@pytest.fixture
def running(node: Node, a_report: Any) -> Callable[..., Fleet]:
    """A fleet of one node with so many GPUs, where these models run."""

    def run(*definitions: Definition, count: int = 0, state: ShardState = ShardState.READY) -> Fleet:
        fleet = Fleet()
        fleet.handle(NodeRegistered(node=replace(node, gpus=gpus(count) if count else None)), NOW)
        effects = fleet.handle(CatalogChanged(models=tuple(each.model for each in definitions)), NOW)
        shards = {shard.id: shard for each in effects if isinstance(each, Desire) for shard in each.shards}
        for shard in shards.values():
            fleet.handle(ShardChanged(node=node.id, report=a_report(shard, state)), NOW + 5.0)
        return fleet

    return run


Running = Callable[..., Fleet]


def explain_model(fleet: Fleet, model: Model, now: float) -> ExplanationView:
    """As the server does."""
    return view_model(fleet, model, ask(fleet, model, now).explain(), now)


def ask(fleet: Fleet, model: Model, now: float) -> Question:
    picture = fleet.statistics(now)
    return Question(
        model=model,
        filled=fleet.filled(model),
        hosts=see_hosts(picture, model.name, now),
        now=now,
        backing_off=fleet.backing_off(model.name),
        serves=is_served(picture, model.name),
    )


def test_a_model_is_explained_with_where_it_is_and_what_was_decided(running: Running) -> None:
    definition = written()
    fleet = running(definition)
    view = explain_model(fleet, definition.model, NOW + 65.0)
    assert (view.wanted, view.most, view.what_if, view.stops, view.held_up) == (1, 2, False, (), None)
    assert [(each.replica, each.node, each.state) for each in view.replicas] == [("rep-tiny-1", "n1", "ready")]
    assert [(each.replica, each.nodes, each.seconds_ago) for each in view.decisions] == [("rep-tiny-1", ("n1",), 65.0)]
    assert view.explanation.placement is not None
    assert view.explanation.placement.node == "n1"


def test_an_explanation_is_json_as_it_is(running: Running) -> None:
    definition = written(more="  gpu_class: h100-80g\n  tp: 2\n")
    for count in (1, 4):
        fleet = running(definition, count=count)
        told = json.loads(encode(explain_model(fleet, definition.model, NOW)))
        assert told["explanation"]["model"] == "tiny"
        assert told["explanation"]["candidates"][0]["nodes"] == ["n1"]
        assert ("unlock" in told["explanation"]) is (count == 1)


def test_what_holds_the_fleet_up_is_part_of_it(running: Running) -> None:
    definition = written()
    fleet = running(definition)
    fleet.handle(NodesExpected(nodes=frozenset({N2}), until=NOW + 30.0), NOW)
    assert "waits for what n2 run" in str(explain_model(fleet, definition.model, NOW).held_up)


def explained(definition: Definition, fleet: Fleet) -> ExplanationView:
    (view,) = explained_all(fleet, definition)
    return view


def explained_all(fleet: Fleet, *definitions: Definition) -> tuple[ExplanationView, ...]:
    models = [definition.model for definition in definitions]
    return explain_written(models, fleet.statistics(NOW), NOW, held_up=fleet.held_up(NOW))


def test_one_that_is_only_written_is_explained_beside_what_runs(running: Running) -> None:
    fleet = running(written("other", more="  min_memory_gb: 10\n"))
    view = explained(written("new", more="  min_memory_gb: 10\n"), fleet)
    assert (view.what_if, view.replicas, view.stops, view.decisions) == (True, (), (), ())
    assert view.explanation.placement is None
    assert view.explanation.unlock is not None
    assert fleet.catalog.resolve("new") is None


def test_one_of_a_name_that_exists_is_explained_as_if_it_were_replaced(running: Running) -> None:
    """What the earlier definition runs gives its room back first: its memory, and its GPUs."""
    fleet = running(written(more="  min_memory_gb: 10\n  gpu_class: h100-80g\n  tp: 2\n"), count=2)
    more = "  min_memory_gb: 12\n  gpu_class: h100-80g\n  tp: 2\n  pp: 1\n"
    view = explained(written(more=more, source="/other.gguf"), fleet)
    assert (view.stops, [each.replica for each in view.replicas]) == (("rep-tiny-1",), ["rep-tiny-1"])
    assert view.explanation.placement is not None
    assert view.explanation.placement.score.crowding_seconds == 0.0


def test_what_the_definition_would_launch_itself_goes_on(running: Running) -> None:
    fleet = running(written(more="  gpu_class: h100-80g\n  tp: 2\n"), count=2)
    view = explained(written(more="  gpu_class: h100-80g\n  tp: 2\n", least=2), fleet)
    assert (view.stops, view.wanted) == ((), 2)
    assert view.explanation.placement is None, "one more finds no GPU"


def test_of_several_each_comes_after_those_before_it_have_their_replicas(running: Running) -> None:
    """Each was told to find a place, and only the first did."""
    fleet = running(count=8)
    first = written("first", more="  gpu_class: h100-80g\n  tp: 4\n  min_memory_gb: 6\n", least=2)
    second = written("second", more="  gpu_class: h100-80g\n  min_memory_gb: 1\n")
    third = written("third", more="  min_memory_gb: 5\n", least=1)
    views = explained_all(fleet, first, second, third)
    assert [(view.missing, view.places) for view in views] == [(2, 2), (1, 0), (1, 0)]
    assert [view.explanation.placement is not None for view in views] == [True, False, False]
    assert views[1].explanation.unlock is not None
    assert "rep-first-1 holds 4" in views[1].explanation.candidates[0].rejections[0].detail
    assert [view.places for view in explained_all(fleet, second, first)] == [1, 1]
    assert fleet.statistics(NOW).nodes[0].host.booked == {}, "nothing has changed"


def test_of_one_that_needs_several_replicas_it_is_told_how_many_find_a_place(running: Running) -> None:
    fleet = running(written(more="  gpu_class: h100-80g\n  tp: 2\n"), count=5)
    view = explained(written(more="  gpu_class: h100-80g\n  tp: 2\n", least=2), fleet)
    assert (view.missing, view.places) == (1, 1), "one of them is running already"
    view = explained(written("new", more="  gpu_class: h100-80g\n  tp: 2\n", least=2), fleet)
    assert (view.missing, view.places) == (2, 1)
    assert explained(written("new", least=0), fleet).missing == 0


def test_what_is_on_its_way_out_is_seen_as_such_for_a_while(running: Running) -> None:
    definition = written(more="  gpu_class: h100-80g\n  tp: 2\n  min_memory_gb: 3\n")
    fleet = running(definition, count=2)
    assert see_hosts(fleet.statistics(NOW), TINY, NOW)[0].leaving == {}
    effects = fleet.handle(CatalogChanged(models=()), NOW + 9.0)
    assert see_hosts(fleet.statistics(NOW), TINY, NOW + 9.0)[0].leaving == {"rep-tiny-1": 3.0}, (
        "it answers its last requests"
    )
    (drain,) = (effect for effect in effects if isinstance(effect, Drain))
    fleet.handle(Drained(replica=drain.replica, epoch=drain.epoch, number=drain.number), NOW + 10.0)
    (host,) = see_hosts(fleet.statistics(NOW), TINY, NOW + 20.0)
    assert host.leaving == {"rep-tiny-1": 3.0}
    assert see_hosts(fleet.statistics(NOW), TINY, NOW + 10.0 + STOPPING_SECONDS)[0].leaving == {}, "it may never stop"
    after = written("after", more="  gpu_class: h100-80g\n  tp: 2\n")
    view = explained(after, fleet)
    assert view.explanation.unlock is not None
    assert view.explanation.unlock.text == "wait until rep-tiny-1 has stopped"
    assert view.explanation.candidates[0].rejections[0].detail.endswith("rep-tiny-1 holds 2 and is stopping")


def test_nodes_that_were_here_before_and_have_not_come_are_away(running: Running) -> None:
    fleet = running()
    names = [NodeId(name) for name in ("n1", "n2", "n3")]
    picture = replace(fleet.statistics(NOW), absent=(NodeId("n3"),))
    assert find_away(picture, names) == {"n2": Standing.SILENT, "n3": Standing.LOST}


def test_what_failed_before_says_nothing_of_another_definition(running: Running) -> None:
    definition = written()
    fleet = running(definition, state=ShardState.ENDED)
    assert explain_model(fleet, definition.model, NOW + 5.0).explanation.placement is None
    assert explained(definition, fleet).explanation.placement is not None


def test_decisions_are_told_by_their_age() -> None:
    decisions = (
        Decision(at=NOW - 2.0, model=ModelName("m"), why="it holds the weights", replica="rep-m-1", nodes=(N2,)),
        Decision(at=NOW + 1.0, model=ModelName("m"), why="bring n1 back", reasons={"node_lost": 2}),
    )
    assert view_decisions(decisions, NOW) == (
        DecisionView(seconds_ago=2.0, model="m", why="it holds the weights", replica="rep-m-1", nodes=("n2",)),
        DecisionView(seconds_ago=0.0, model="m", why="bring n1 back", reasons={"node_lost": 2}),
    )


# -- what was measured


def learn(fleet: Fleet, model: Model, gb: float) -> None:
    """Launches have shown that it takes so much memory."""
    fleet.handle(FactsKnown(facts=(Fact(key=make_key(model, model.profiles[0], "1.2", ""), memory_gb=gb),)), NOW)


def test_measured_figures_that_leave_no_place_are_left_out_where_nothing_serves(running: Running) -> None:
    definition = written()
    fleet = running(definition, state=ShardState.ENDED)
    later = NOW + 20.0
    learn(fleet, definition.model, 12.0)
    view = explain_model(fleet, definition.model, later)
    assert (view.unfilled, view.explanation.placement.profile.min_memory_gb) == (False, 12.0)
    learn(fleet, definition.model, 900.0)
    view = explain_model(fleet, definition.model, later)
    assert (view.unfilled, view.explanation.placement is not None) == (True, True)
    assert view.numbers[0].value == 900.0
    # It goes there indeed.
    effects = fleet.handle(Wakeup(), later)
    assert any(isinstance(each, Desire) and each.shards for each in effects)


def test_of_what_serves_or_has_only_to_wait_the_measured_figures_count(running: Running) -> None:
    definition = written()
    fleet = running(definition)
    learn(fleet, definition.model, 900.0)
    view = explain_model(fleet, definition.model, NOW + 6.0)
    assert (view.unfilled, view.explanation.placement) == (False, None)
    question = replace(ask(fleet, definition.model, NOW + 6.0), serves=False)
    assert question.explain().unfilled is not None
    # it would fit by the figures in a moment
    learn(fleet, definition.model, 2.0)
    question = replace(ask(fleet, definition.model, NOW), serves=False, backing_off={NodeId("n1"): NOW + 5.0})
    assert question.explain().unfilled is None
    silent = [replace(host, standing=Standing.SILENT) for host in question.hosts]
    assert replace(question, hosts=silent, backing_off={}).explain().unfilled is None


class Evicting:
    """A fleet that has somebody to send away."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def would_evict(self, model: Model, now: float) -> ReplicaId:
        return ReplicaId("rep-lazy-1")


def test_an_idle_replica_makes_way_before_measured_figures_are_left_out(running: Running) -> None:
    definition = written()
    fleet = running(definition, state=ShardState.ENDED)
    later = NOW + 20.0
    learn(fleet, definition.model, 900.0)
    answer = ask(fleet, definition.model, later).explain()
    assert answer.unfilled is not None
    view = view_model(Evicting(fleet), definition.model, answer, later)
    assert (view.unfilled, view.explanation.placement) == (False, None)
    assert view.evicts == "rep-lazy-1 is idle, and would make way for it"


def test_what_is_only_written_is_explained_by_what_was_measured_of_it(running: Running) -> None:
    fleet = running()
    model = written("new").model
    for gb, unfilled in ((12.0, False), (900.0, True)):
        filled = {model.name: replace(model, profiles=(replace(model.profiles[0], min_memory_gb=gb),))}
        (view,) = explain_written([model], fleet.statistics(NOW), NOW, filled=filled)
        assert (view.unfilled, view.places) == (unfilled, 1)
        assert view.explanation.placement is not None


def test_what_is_not_declared_is_booked_as_it_was_measured(running: Running, a_report: Any) -> None:
    definition = written()
    fleet = running(definition)
    (replica,) = fleet.ready(TINY)
    seen = Measured(memory_gb=10.0, version="1.2")
    report = replace(a_report(replica.shard, ShardState.READY), measured=seen)
    fleet.handle(ShardChanged(node=NodeId("n1"), report=report), NOW + 6.0)
    assert fleet.statistics(NOW).nodes[0].host.free_gb == 6.0
    # another definition of its name gets all of that back
    view = explained(written(source="/other.gguf", more="  min_memory_gb: 16\n"), fleet)
    assert (view.stops, view.explanation.placement is not None) == (("rep-tiny-1",), True)
    fleet.handle(CatalogChanged(models=()), NOW + 9.0)
    assert see_hosts(fleet.statistics(NOW), TINY, NOW + 9.0)[0].leaving == {"rep-tiny-1": 10.0}


def test_room_that_is_kept_for_a_model_is_free_for_it_alone(running: Running) -> None:
    fleet = running(written(more="  min_memory_gb: 10\n  gpu_class: h100-80g\n"), count=1)
    (each,) = fleet.statistics(NOW).nodes
    # it has ended, and its room is kept for it
    host = replace(each.host, kept=dict.fromkeys(each.host.booked, TINY), kept_gb={TINY: 10.0})
    picture = replace(fleet.statistics(NOW), nodes=(replace(each, replicas=(), host=host),))
    (own,), (other,) = (see_hosts(picture, ModelName(name), NOW) for name in ("tiny", "other"))
    assert (own.free_gb, len(own.free)) == (16.0, 1)
    assert (other.free_gb, len(other.free)) == (6.0, 0)
    assert (own.kept, own.kept_gb) == ({}, {})
    view, beside = (
        explain_written([written(name, more="  min_memory_gb: 10\n").model], picture, NOW)[0]
        for name in ("tiny", "other")
    )
    assert (view.explanation.placement is not None, beside.explanation.placement) == (True, None)
