from __future__ import annotations

from dataclasses import replace

import pytest
from fleets import (
    M,
    a_fleet,
    a_model,
    a_node,
    a_ready,
    a_running,
    a_word,
    announced,
    desires,
    drained,
    drains,
    found,
    texts,
    the_shard,
    wake,
)

from llmgw.core.effects import Effect
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    ModelCalled,
    ModelsHeld,
    NodeRegistered,
    NodesExpected,
    ReplicaRecalled,
    Wakeup,
)
from llmgw.core.fleet import Fleet
from llmgw.core.model import ModelName
from llmgw.core.replica import ReplicaId, ShardState


def test_after_a_restart_those_that_have_served_before_are_placed_before_those_that_never_did() -> None:
    waiting, served = a_model("a", gb=10.0), a_model(gb=10.0)
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({a_node().id}), until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(waiting, served), served=frozenset({M})), 0.0)
    assert the_shard(fleet.handle(NodeRegistered(node=a_node()), 1.0)).model.name == M


def test_demand_by_an_alias_counts_for_the_model() -> None:
    fleet, _ = a_fleet(replace(a_model(least=0), aliases=("alias",)))
    assert the_shard(fleet.handle(Demand(model=ModelName("alias"), waiting=1), 10.0)).model.name == M


@pytest.mark.parametrize("name", ["nobody", "off"])
def test_demand_for_what_is_unknown_or_switched_off_starts_nothing(name: str) -> None:
    fleet, _ = a_fleet(a_model("off", least=0, most=0))
    effects = fleet.handle(Demand(model=ModelName(name), waiting=3, asked=True), 10.0)
    assert (desires(effects), announced(effects)) == ([], [])
    assert fleet.idle()


def test_a_changed_definition_is_tried_without_waiting_for_the_old_ones_failures() -> None:
    fleet, effects = a_fleet(a_model("other", least=0), a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED), 10.0)
    shard = the_shard(fleet.handle(CatalogChanged(models=(a_model(source="/mended.gguf"),)), 11.0))
    assert (shard.epoch, shard.model.source) == (2, "/mended.gguf")


def test_an_unchanged_catalog_changes_nothing() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED), 10.0)
    assert fleet.handle(CatalogChanged(models=(a_model(),)), 11.0) == []


def test_failures_of_other_models_survive_a_change() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED), 10.0)
    fleet.handle(CatalogChanged(models=(a_model(), a_model("b", least=0))), 11.0)
    fleet.handle(CatalogChanged(models=(a_model(), a_model("b", least=0, source="/c"))), 12.0)
    assert desires(fleet.handle(Wakeup(), 14.0)) == []
    assert the_shard(fleet.handle(Wakeup(), 15.0)).epoch == 2


# Models that are held at zero


def hold(fleet: Fleet, *names: str, now: float = 20.0) -> list[Effect]:
    return fleet.handle(ModelsHeld(models=frozenset(map(ModelName, names))), now)


def test_a_model_that_is_held_is_drained_and_comes_back_when_it_no_longer_is() -> None:
    fleet, shard = a_ready(a_model(least=1))
    effects = hold(fleet, "m")
    assert texts(effects) == [
        "an operator has stopped m",
        "rep-m-1 on n1 is to stop: an operator has stopped its model",
    ]
    assert (fleet.held(M), fleet.wanted(a_model(), 20.0)) == (True, 0)
    assert fleet.statistics().models[0].held
    (drain,) = drains(effects)
    fleet.handle(drained(drain), 21.0)
    assert desires(fleet.handle(a_word(shard, ShardState.ENDED), 22.0)) == []
    # whoever asks is told so by the door, and nothing is loaded for that
    assert desires(fleet.handle(Demand(model=M, waiting=1), 23.0)) == []
    assert desires(wake(fleet, until=5000.0)) == []
    effects = hold(fleet, now=5001.0)
    assert texts(effects)[0] == "m is no longer held at zero"
    assert the_shard(effects).epoch == 2


@pytest.mark.parametrize("source", ["/m", "/new"])
def test_what_is_held_or_not_to_run_at_all_goes_for_that_whatever_it_was_launched_by(source: str) -> None:
    for end, why in (
        (ModelsHeld(models=frozenset({M})), "an operator has stopped its model"),
        (CatalogChanged(models=(a_model(least=0, most=0, gb=10_000, source=source),)), "no more than 0 may run"),
    ):
        fleet, _ = a_ready(a_model(source="/m"))
        # (nowhere is room for the new one, and the old one stays)
        stays = fleet.handle(CatalogChanged(models=(a_model(gb=10_000, source=source),)), 19.0)
        assert not drains(stays)
        effects = fleet.handle(end, 20.0)
        assert f"rep-m-1 on n1 is to stop: {why}" in texts(effects)


def test_a_load_of_a_model_that_is_held_is_cut_short() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.LOADING), 1.0)
    assert [desire.shards for desire in desires(hold(fleet, "m"))] == [()]


def test_a_model_that_is_held_does_not_run_after_a_restart() -> None:
    fleet = Fleet()
    fleet.handle(ModelsHeld(models=frozenset({M})), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(a_running(a_model())),)), 1.0)
    assert len(drains(effects)) == 1
    assert fleet.ready(M) == ()


def test_the_same_models_held_again_are_no_news() -> None:
    fleet, _ = a_fleet(a_model())
    hold(fleet, "m")
    assert hold(fleet, "m", now=21.0) == []


def test_of_a_model_that_nobody_knows_nothing_is_said() -> None:
    fleet, _ = a_fleet(a_model())
    assert announced(hold(fleet, "nobody")) == []


def test_what_failed_before_it_was_held_is_tried_at_once_afterwards() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED, cause="no"), 10.0)
    hold(fleet, "m", now=11.0)
    assert fleet.backing_off(M) == {}
    assert fleet.verdict(M) is None
    assert the_shard(hold(fleet, now=12.0)).epoch == 2


# Models that an operator calls for


def test_a_model_that_is_called_for_is_tried_as_if_somebody_had_asked() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    effects = fleet.handle(ModelCalled(model=M), 5.0)
    assert fleet.verdict(M) is not None
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED, cause="no"), 6.0)
    assert the_shard(wake(fleet, until=11.0)).epoch == 2


def test_the_call_for_a_model_that_runs_changes_nothing() -> None:
    fleet, _ = a_ready(a_model())
    assert fleet.handle(ModelCalled(model=M), 5.0) == []


def test_a_model_that_is_held_is_called_for_in_vain() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    hold(fleet, "m")
    assert desires(fleet.handle(ModelCalled(model=M), 21.0)) == []


# Replicas that an operator wants replaced


def test_a_replica_that_is_recalled_is_replaced_by_another_first_where_there_is_room() -> None:
    fleet, old = a_ready(a_model())
    wake(fleet, until=15.0)
    effects = fleet.handle(ReplicaRecalled(replica=old.replica, epoch=1), 20.0)
    assert drains(effects) == []
    new = desires(effects)[-1].shards[1]
    assert new.replica == "rep-m-2"
    fleet.handle(a_word(new, ShardState.READY), 21.0)
    effects = wake(fleet, until=31.0)
    assert "rep-m-1 on n1 is to stop: an operator wants it replaced" in texts(effects)
    (drain,) = drains(effects)
    fleet.handle(drained(drain), 32.0)
    fleet.handle(a_word(old, ShardState.ENDED), 33.0)
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-2"]
    # and its name is free for the next
    assert desires(wake(fleet, until=2000.0)) == []


def test_a_replica_that_is_recalled_on_a_full_node_is_replaced_in_place() -> None:
    fleet, old = a_ready(a_model(), nodes=[a_node(memory_gb=6.0)])
    effects = fleet.handle(ReplicaRecalled(replica=old.replica, epoch=1), 20.0)
    (drain,) = drains(effects)
    fleet.handle(drained(drain), 21.0)
    again = the_shard(fleet.handle(a_word(old, ShardState.ENDED), 22.0))
    assert (again.replica, again.epoch) == (old.replica, 2)


@pytest.mark.parametrize(("name", "epoch"), [("rep-m-1", 2), ("rep-m-1", 0), ("rep-x-1", 1)])
def test_a_word_of_what_is_not_there_recalls_nothing(name: str, epoch: int) -> None:
    fleet, _ = a_ready(a_model())
    assert fleet.handle(ReplicaRecalled(replica=ReplicaId(name), epoch=epoch), 5.0) == []


def test_a_replica_that_is_about_to_stop_is_not_recalled() -> None:
    fleet, old = a_ready(a_model())
    hold(fleet, "m")
    assert fleet.handle(ReplicaRecalled(replica=old.replica, epoch=1), 21.0) == []
    # nor when it may stay after all
    assert texts(hold(fleet, now=22.0))[-1] == "rep-m-1 stays after all"
    assert drains(wake(fleet, until=2000.0)) == []


def test_a_recalled_replica_that_loads_on_demand_and_is_idle_just_stops() -> None:
    fleet, old = a_ready(a_model(least=0))
    effects = fleet.handle(ReplicaRecalled(replica=old.replica, epoch=1), 20.0)
    assert (len(drains(effects)), desires(effects)) == (1, [])


# What is asked for


def test_when_a_model_has_answered_its_last_request_those_that_wait_for_its_room_are_looked_at() -> None:
    one, other = a_model("a", least=0, gb=10.0), a_model("b", least=0, gb=10.0)
    fleet, _ = a_fleet(one, other)
    shard = the_shard(fleet.handle(Demand(model=one.name, waiting=1), 0.0))
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    fleet.handle(Demand(model=one.name, in_flight={shard.replica: 1}), 1.0)
    assert drains(fleet.handle(Demand(model=other.name, waiting=1), 200.0)) == []
    effects = fleet.handle(Demand(model=one.name, asked=True), 201.0)
    effects += wake(fleet, until=201.0)
    assert len(drains(effects)) == 1


def test_sources_that_no_definition_has_any_more_are_forgotten() -> None:
    fleet, _ = a_ready(a_model(source="/old"))
    assert fleet.hosts()[0].holds == {"/old"}
    fleet.handle(CatalogChanged(models=(a_model(source="/new"),)), 2.0)
    assert fleet.hosts()[0].holds == set()


def test_what_had_failed_of_a_model_that_is_removed_is_shown_no_more() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED, cause="no"), 10.0)
    assert len(fleet.statistics().nodes[0].replicas) == 1
    fleet.handle(CatalogChanged(models=()), 11.0)
    assert fleet.statistics().nodes[0].replicas == ()


def test_the_models_are_those_that_are_written() -> None:
    fleet, _ = a_fleet(a_model())
    fleet.handle(CatalogChanged(models=(a_model(source="/new"), a_model("b"))), 11.0)
    assert [(model.name, model.source) for model in fleet.catalog] == [("m", "/new"), ("b", "/m.gguf")]


def test_a_replica_that_loads_and_is_recalled_goes_as_soon_as_another_is_on_its_way() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.LOADING), 1.0)
    effects = fleet.handle(ReplicaRecalled(replica=shard.replica, epoch=1), 2.0)
    assert drains(effects) == []
    # (not both at once, nor neither)
    assert [[spec.replica for spec in desire.shards] for desire in desires(effects)] == [["rep-m-2"]]
    assert texts(effects)[-1] == "rep-m-1 on n1 is to stop: an operator wants it replaced"


def test_a_replica_that_loads_and_is_recalled_goes_first_where_there_is_room_for_one() -> None:
    fleet, effects = a_fleet(a_model(gb=10.0))
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.LOADING), 1.0)
    effects = fleet.handle(ReplicaRecalled(replica=shard.replica, epoch=1), 2.0)
    assert (drains(effects), [desire.shards for desire in desires(effects)]) == ([], [()])
    assert the_shard(fleet.handle(a_word(shard, ShardState.ENDED), 3.0)).epoch == 2


def test_a_model_that_is_removed_while_it_is_drained_is_not_drained_again() -> None:
    fleet, _ = a_ready(a_model())
    (drain,) = drains(hold(fleet, "m"))
    effects = fleet.handle(CatalogChanged(models=()), 21.0)
    assert (announced(effects), drains(effects)) == ([], [])
    # (and neither when it is stopping)
    fleet.handle(CatalogChanged(models=(a_model(),)), 22.0)
    assert len(desires(fleet.handle(drained(drain), 23.0))) == 1
    assert announced(fleet.handle(CatalogChanged(models=()), 24.0)) == []


def test_the_new_definition_of_a_model_that_is_held_replaces_nothing() -> None:
    fleet, _ = a_ready(a_model())
    hold(fleet, "m")
    assert announced(fleet.handle(CatalogChanged(models=(a_model(source="/new"),)), 21.0)) == []
