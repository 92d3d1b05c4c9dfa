from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fleets import (
    N1,
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
    the_replica,
    the_shard,
    wake,
    wakes,
)
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.demand import DEMAND_SECONDS, DOWN_SECONDS, STEP_SECONDS, UP_SECONDS, Demands
from llmgw.core.events import CatalogChanged, Demand, ModelCalled, NodeRegistered, NodeReported, NodesExpected, Wakeup
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model, ModelName, Scaling
from llmgw.core.node import NodeId
from llmgw.core.placement import Rejected
from llmgw.core.replica import ReplicaId, ShardSpec, ShardState

ONE, TWO = ReplicaId("rep-m-1"), ReplicaId("rep-m-2")
WIDE = replace(a_model(gb=1.0), scaling=Scaling(min=0, max=3, target=2))


def noted(*words: tuple[float, int], ready: bool = True) -> Demands:
    """Told at these times that so many requests are answered."""
    demands = Demands()
    for at, count in words:
        demands.note(WIDE, Demand(model=M, in_flight={ONE: count}), at, ready=ready)
    return demands


# What was said


def test_of_a_model_that_nobody_has_asked_for_nothing_is_known() -> None:
    demands = Demands()
    demands.note_ready(M)
    demands.forget(M)
    assert (demands.waiting(M), demands.in_flight(M, ONE), demands.asked_at(M, 5.0)) == (0, 0, -math.inf)
    assert not demands.is_answered(M)
    assert not demands.is_owed(M, 5.0)
    assert (demands.settled(M, 3, 5.0), demands.settles_at(M, 5.0)) == (0, math.inf)


def test_a_word_replaces_all_that_was_said_before() -> None:
    demands = Demands()
    demands.note(WIDE, Demand(model=M, waiting=3, in_flight={ONE: 2}), 1.0, ready=True)
    demands.note(WIDE, Demand(model=M, waiting=1, in_flight={TWO: 4, ONE: 0}), 2.0, ready=True)
    assert (demands.waiting(M), demands.in_flight(M, ONE), demands.in_flight(M, TWO)) == (1, 0, 4)


def test_it_is_asked_for_until_the_last_answer_has_ended() -> None:
    demands = noted((1.0, 2))
    assert demands.asked_at(M, 50.0) == 50.0
    demands.note(WIDE, Demand(model=M), 51.0, ready=True)
    assert demands.asked_at(M, 60.0) == 51.0
    demands.note(WIDE, Demand(model=M, asked=True), 52.0, ready=True)
    assert demands.asked_at(M, 60.0) == 52.0


def test_who_waits_and_hangs_up_has_not_asked() -> None:
    demands = Demands()
    demands.note(WIDE, Demand(model=M, waiting=1), 1.0, ready=False)
    demands.note(WIDE, Demand(model=M), 2.0, ready=False)
    assert (demands.asked_at(M, 3.0), demands.is_owed(M, 3.0)) == (-math.inf, False)


def test_who_was_told_to_come_back_is_waited_for_until_it_is_ready_or_for_five_minutes() -> None:
    demands = Demands()
    demands.note(WIDE, Demand(model=M, asked=True), 1.0, ready=False)
    assert demands.owed_until(M) == 1.0 + DEMAND_SECONDS == 301.0
    assert demands.is_owed(M, 300.9)
    assert not demands.is_owed(M, 301.0)
    demands.note_ready(M)
    assert not demands.is_owed(M, 2.0)
    # (it was asked for all the same)
    assert demands.asked_at(M, 2.0) == 1.0


def test_somebody_waits_since_the_first_who_asked_in_vain_until_it_is_ready() -> None:
    demands = Demands()
    assert demands.since(M) == math.inf
    demands.note(WIDE, Demand(model=M, waiting=1), 1.0, ready=False)
    demands.note(WIDE, Demand(model=M, asked=True), 21.0, ready=False)
    demands.note(WIDE, Demand(model=M, waiting=1), 60.0, ready=False)
    demands.note_call(M, 61.0)
    assert demands.since(M) == 1.0
    demands.note_ready(M)
    assert demands.since(M) == math.inf
    # who has hung up, or has not come back for long, is not who waits now
    demands.note(WIDE, Demand(model=M, waiting=1), 70.0, ready=False)
    demands.note(WIDE, Demand(model=M), 71.0, ready=False)
    demands.note(WIDE, Demand(model=M, waiting=1), 80.0, ready=False)
    assert demands.since(M) == 80.0
    demands.note(WIDE, Demand(model=M, waiting=1), 90.0, ready=True)
    assert demands.since(M) == math.inf
    demands.note_call(M, 100.0)
    assert demands.since(M) == 100.0


def test_who_asks_a_model_that_is_ready_is_owed_nothing() -> None:
    demands = noted((1.0, 1))
    assert not demands.is_owed(M, 1.0)


# How much that is worth


def test_more_load_has_to_last_before_it_counts() -> None:
    demands = noted((0.0, 2), (20.0, 5))
    assert [demands.settled(M, 1, now) for now in (20.0, 29.9, 30.0)] == [1, 1, 3]
    assert demands.settles_at(M, 20.0) == 20.0 + UP_SECONDS


def test_of_a_load_that_moves_the_least_of_the_last_seconds_counts_upwards() -> None:
    demands = noted((0.0, 2), (20.0, 6), (25.0, 4), (29.0, 6))
    assert [demands.settled(M, 1, now) for now in (30.0, 35.0, 38.9, 39.0)] == [2, 2, 2, 3]


def test_what_moves_within_a_second_counts_from_when_it_began() -> None:
    demands = noted((10.0, 2), (10.5, 4))
    assert [demands.settled(WIDE.name, 0, at) for at in (19.9, 10.0 + UP_SECONDS)] == [0, 2]


def test_less_load_has_to_last_before_it_counts() -> None:
    demands = noted((0.0, 6), (100.0, 2), (250.0, 4), (260.0, 1))
    # (three at 99, two at 259)
    assert [demands.settled(M, 3, now) for now in (399.9, 400.0, 559.9, 560.0)] == [3, 2, 2, 1]
    assert demands.settles_at(M, 300.0) == 100.0 + DOWN_SECONDS


def test_what_was_loaded_before_anybody_asked_stays_no_longer_than_the_load_is_worth() -> None:
    demands = noted((0.0, 2))
    # nothing was said before: it was not worth more then
    assert demands.settled(M, 3, 5.0) == 1


def test_a_target_of_nothing_is_one() -> None:
    demands = Demands()
    model = replace(WIDE, scaling=Scaling(max=9, target=0))
    demands.note(model, Demand(model=M, waiting=2, in_flight={ONE: 1}), 0.0, ready=True)
    assert demands.settled(M, 0, 50.0) == 3


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 9)), max_size=30), st.integers(0, 5))
def test_a_load_that_stays_settles_at_what_it_is_worth(words: list[tuple[float, int]], running: int) -> None:
    demands, now = Demands(), 0.0
    for seconds, count in [*words, (1.0, 4)]:
        now += seconds
        demands.note(WIDE, Demand(model=M, in_flight={ONE: count}), now, ready=True)
        assert 0 <= demands.settled(M, running, now) <= 5
    for _ in range(1000):
        at = demands.settles_at(M, now)
        if at == math.inf:
            break
        assert at > now
        now = at
    assert demands.settled(M, running, now) == 2


# Models that load when somebody asks


def test_what_loads_on_demand_is_stopped_when_nobody_has_asked_for_its_idle_timeout() -> None:
    fleet, shard = a_ready(a_model(least=0))
    fleet.handle(Demand(model=M, in_flight={shard.replica: 1}), 50.0)
    # an answer may take its time
    assert drains(fleet.handle(Wakeup(), 2000.0)) == []
    fleet.handle(Demand(model=M, asked=True), 2000.0)
    assert drains(fleet.handle(Wakeup(), 2899.0)) == []
    effects = fleet.handle(Wakeup(), 2900.0)
    assert texts(effects) == ["rep-m-1 on n1 is to stop: nobody has asked for it for 15m"]
    (drain,) = drains(effects)
    (desire,) = desires(fleet.handle(drained(drain), 2901.0))
    assert desire.shards == ()
    # nobody minds, and nothing is loaded again
    assert desires(fleet.handle(a_word(shard, ShardState.ENDED), 2902.0)) == []
    assert desires(fleet.handle(Wakeup(), 9000.0)) == []
    # until somebody asks
    assert the_shard(fleet.handle(Demand(model=M, waiting=1), 9001.0)).epoch == 2


def test_the_idle_timeout_is_what_the_model_says_and_the_fleet_asks_to_be_woken_for_it() -> None:
    model = replace(a_model(), scaling=Scaling(min=0, max=1, idle_timeout_seconds=40.0))
    fleet, _ = a_ready(model, now=100.0)
    assert wakes(fleet.handle(Wakeup(), 110.0)) == [140.0]
    assert texts(fleet.handle(Wakeup(), 140.0)) == ["rep-m-1 on n1 is to stop: nobody has asked for it for 40s"]


def test_who_was_answered_for_long_has_asked_until_its_end() -> None:
    model = replace(a_model(), scaling=Scaling(min=0, max=1, idle_timeout_seconds=40.0))
    fleet, shard = a_ready(model, now=100.0)
    fleet.handle(Demand(model=M, in_flight={shard.replica: 1}), 101.0)
    assert drains(wake(fleet, until=400.0)) == []
    fleet.handle(Demand(model=M), 400.0)
    assert drains(wake(fleet, until=439.0)) == []
    assert len(drains(wake(fleet, until=440.0))) == 1


def test_a_load_is_not_idle_however_long_it_takes() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    shard = the_shard(fleet.handle(Demand(model=M, waiting=1), 0.0))
    fleet.handle(a_word(shard, ShardState.LOADING), 1.0)
    fleet.handle(Demand(model=M, asked=True), 2.0)
    assert announced(fleet.handle(Wakeup(), 5000.0)) == []
    fleet.handle(a_word(shard, ShardState.READY), 5001.0)
    assert len(fleet.ready(M)) == 1


def test_who_hangs_up_before_there_is_room_is_not_loaded_for() -> None:
    fleet, _ = a_fleet(a_model(least=0, gb=20.0))
    fleet.handle(Demand(model=M, waiting=1), 1.0)
    assert fleet.verdict(M) is not None
    fleet.handle(Demand(model=M), 2.0)
    assert fleet.verdict(M) is None
    assert desires(fleet.handle(NodeReported(node=a_node(memory_gb=32.0)), 3.0)) == []


def test_who_was_told_to_come_back_finds_it_loaded_when_there_is_room_in_time() -> None:
    fleet, _ = a_fleet(a_model(least=0, gb=20.0))
    fleet.handle(Demand(model=M, waiting=1), 1.0)
    fleet.handle(Demand(model=M, asked=True), 2.0)
    assert the_shard(fleet.handle(NodeReported(node=a_node(memory_gb=32.0)), 301.0)).model.name == M


def test_who_was_told_to_come_back_long_ago_is_not_loaded_for() -> None:
    fleet, _ = a_fleet(a_model(least=0, gb=20.0))
    fleet.handle(Demand(model=M, waiting=1), 1.0)
    fleet.handle(Demand(model=M, asked=True), 2.0)
    assert desires(fleet.handle(Wakeup(), 302.0)) == []
    assert fleet.verdict(M) is None
    assert desires(fleet.handle(NodeReported(node=a_node(memory_gb=32.0)), 303.0)) == []


def test_what_fails_for_nobody_is_not_tried_for_ever() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    effects = fleet.handle(Demand(model=M, waiting=1), 0.0)
    fleet.handle(Demand(model=M, asked=True), 0.0)
    tries, now = 0, 0.0
    while desires(effects) and desires(effects)[-1].shards:
        tries += 1
        fleet.handle(a_word(the_shard(effects), ShardState.ENDED), now)
        now = fleet.backing_off(M)[N1]
        effects = fleet.handle(Wakeup(), now)
    # at 0, 5, 15, 35, 75, 155, and not at 315
    assert (tries, now) == (6, 315.0)
    assert the_replica(fleet).state is ShardState.ENDED


def test_a_request_that_comes_while_the_server_waits_for_its_nodes_is_loaded_for_when_they_are_here() -> None:
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({N1}), until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(least=0),)), 0.0)
    assert desires(fleet.handle(Demand(model=M, waiting=1), 1.0)) == []
    assert the_shard(fleet.handle(NodeRegistered(node=a_node()), 2.0)).model.name == M


def test_a_request_that_comes_while_the_server_waits_is_answered_by_what_a_node_still_runs() -> None:
    _, shard = a_ready(a_model(least=0))
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({N1}), until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(least=0),)), 0.0)
    fleet.handle(Demand(model=M, waiting=1), 1.0)
    assert the_shard(fleet.handle(NodeRegistered(node=a_node(), running=(found(shard),)), 2.0)) == shard
    assert [replica.epoch for replica in fleet.ready(M)] == [shard.epoch]


def test_what_was_taken_over_at_a_restart_is_idle_from_then_on() -> None:
    _, shard = a_ready(a_model(least=0))
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(least=0),)), 0.0)
    fleet.handle(NodeRegistered(node=a_node(), running=(found(shard),)), 2.0)
    assert drains(fleet.handle(Wakeup(), 901.0)) == []
    assert len(drains(fleet.handle(Wakeup(), 902.0))) == 1


def test_a_model_that_is_called_for_loads_and_is_idle_from_ready_on() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    shard = the_shard(fleet.handle(ModelCalled(model=M), 5.0))
    fleet.handle(a_word(shard, ShardState.READY), 10.0)
    assert drains(fleet.handle(Wakeup(), 909.0)) == []
    assert len(drains(fleet.handle(Wakeup(), 910.0))) == 1


@pytest.mark.parametrize("model", [a_model(least=0, most=0), a_model("other")])
def test_a_model_that_may_not_run_is_called_for_in_vain(model: Model) -> None:
    fleet, _ = a_fleet(model)
    assert desires(fleet.handle(ModelCalled(model=M), 5.0)) == []


# Between min and max


def a_busy(count: int, now: float = 20.0) -> Fleet:
    """One replica of up to three is ready, and so many requests are answered by it."""
    fleet, shard = a_ready(WIDE)
    fleet.handle(Wakeup(), 11.0)
    fleet.handle(Demand(model=M, in_flight={shard.replica: count}), now)
    return fleet


def test_more_load_than_the_target_has_more_replicas_once_it_has_lasted() -> None:
    fleet = a_busy(5)
    assert desires(fleet.handle(Wakeup(), 29.9)) == []
    (desire,) = desires(fleet.handle(Wakeup(), 30.0))
    assert [shard.replica for shard in desire.shards] == ["rep-m-1", "rep-m-2", "rep-m-3"]


def test_who_waits_is_load_too() -> None:
    fleet, shard = a_ready(WIDE)
    fleet.handle(Demand(model=M, in_flight={shard.replica: 2}, waiting=1), 20.0)
    (desire,) = desires(fleet.handle(Wakeup(), 30.0))
    assert [spec.replica for spec in desire.shards] == ["rep-m-1", "rep-m-2"]


def test_a_burst_loads_nothing() -> None:
    fleet = a_busy(5)
    fleet.handle(Demand(model=M, in_flight={ONE: 2}), 25.0)
    assert desires(fleet.handle(Wakeup(), 40.0)) == []


def test_no_load_has_more_replicas_than_may_run() -> None:
    fleet = a_busy(500)
    (desire,) = desires(fleet.handle(Wakeup(), 30.0))
    assert len(desire.shards) == 3


def test_when_the_load_is_less_for_long_enough_the_idle_ones_are_drained() -> None:
    fleet = a_busy(5)
    (desire,) = desires(fleet.handle(Wakeup(), 30.0))
    for spec in desire.shards[1:]:
        fleet.handle(a_word(spec, ShardState.READY), 31.0)
    fleet.handle(Demand(model=M, in_flight={TWO: 2}), 100.0)
    assert drains(fleet.handle(Wakeup(), 399.0)) == []
    effects = fleet.handle(Wakeup(), 400.0)
    assert texts(effects) == [
        "rep-m-1 on n1 is to stop: its load needs no more than 1",
        "rep-m-3 on n1 is to stop: its load needs no more than 1",
    ]
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-2"]


def a_taken_over(*models: Model, last: ShardState = ShardState.READY) -> tuple[Fleet, list[ShardSpec]]:
    """A server that has begun anew finds a replica of each of these definitions of WIDE running, on nodes that come one
    after the other; the last one in this state."""
    fleet = Fleet()
    names = [f"n{number}" for number in range(1, len(models) + 1)]
    fleet.handle(NodesExpected(nodes=frozenset(map(NodeId, names)), until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(WIDE,)), 0.0)
    specs = [a_running(model, number=at + 1, node=NodeId(names[at])) for at, model in enumerate(models)]
    for spec in specs:
        state = last if spec is specs[-1] else ShardState.READY
        fleet.handle(NodeRegistered(node=a_node(spec.node), running=(found(spec, state),)), 1.0)
    return fleet, specs


def test_what_was_loaded_for_a_load_that_an_earlier_server_saw_stays_until_this_one_knows_better() -> None:
    fleet, specs = a_taken_over(WIDE, WIDE, WIDE)
    # (as a request or two come in, before all who ask have connected again)
    fleet.handle(Demand(model=M, in_flight={specs[0].replica: 1}), 2.0)
    assert drains(wake(fleet, until=300.9)) == []
    assert fleet.wanted(WIDE, 300.9) == 3
    assert len(drains(wake(fleet, until=302.0))) == 2


def test_a_load_that_goes_on_after_a_restart_keeps_what_it_is_worth() -> None:
    fleet, specs = a_taken_over(WIDE, WIDE, WIDE)
    fleet.handle(Demand(model=M, in_flight={spec.replica: 2 for spec in specs}), 12.0)
    assert drains(wake(fleet, until=5000.0)) == []


def test_of_a_roll_that_an_earlier_server_began_none_that_serves_is_one_too_many() -> None:
    fleet, _ = a_taken_over(replace(WIDE, source="/old.gguf"), replace(WIDE, source="/old.gguf"), WIDE)
    assert fleet.wanted(WIDE, 2.0) == 3


def test_one_that_loads_to_take_the_place_of_another_is_no_sign_of_load() -> None:
    fleet, _ = a_taken_over(replace(WIDE, source="/old.gguf"), WIDE, last=ShardState.LOADING)
    assert fleet.wanted(WIDE, 2.0) == 1


def test_the_least_number_stays_however_little_is_asked() -> None:
    model = replace(WIDE, scaling=Scaling(min=2, max=3, target=2))
    fleet, effects = a_fleet(model)
    for spec in desires(effects)[-1].shards:
        fleet.handle(a_word(spec, ShardState.READY), 1.0)
    fleet.handle(Demand(model=M), 2.0)
    assert drains(fleet.handle(Wakeup(), 5000.0)) == []
    assert fleet.wanted(model, 5000.0) == 2


def test_the_demand_of_a_model_that_was_removed_is_forgotten() -> None:
    fleet, _ = a_fleet(a_model(least=0, gb=99.0))
    fleet.handle(Demand(model=M, waiting=1), 1.0)
    fleet.handle(CatalogChanged(models=()), 2.0)
    assert desires(fleet.handle(CatalogChanged(models=(a_model(least=0),)), 3.0)) == []
    assert fleet.verdict(ModelName("m")) is None


def test_when_nobody_is_waited_for_any_more_there_is_nothing_to_tell_of_a_place() -> None:
    fleet, _ = a_fleet(a_model(least=0), nodes=[])
    fleet.handle(Demand(model=M, waiting=1), 1.0)
    fleet.handle(Demand(model=M, asked=True), 2.0)
    wake(fleet, until=301.9)
    assert fleet.verdict(M) == Rejected()
    wake(fleet, until=302.0)
    assert fleet.verdict(M) is None


def test_whoever_was_told_to_come_back_keeps_it_no_longer_than_its_idle_timeout_once_it_is_ready() -> None:
    model = replace(a_model(), scaling=Scaling(min=0, max=1, idle_timeout_seconds=40.0))
    fleet, _ = a_fleet(model)
    shard = the_shard(fleet.handle(Demand(model=M, waiting=1), 0.0))
    fleet.handle(Demand(model=M, asked=True), 1.0)
    fleet.handle(a_word(shard, ShardState.READY), 10.0)
    assert drains(wake(fleet, until=49.9)) == []
    assert len(drains(wake(fleet, until=50.0))) == 1


def test_however_many_come_and_go_in_a_second_as_much_is_remembered() -> None:
    demands = Demands()
    for number in range(40_000):
        demands.note(WIDE, Demand(model=M, waiting=number % 2), 10.0 + number / 100, ready=False)
    assert len(demands._asked[M].steps) <= DOWN_SECONDS / STEP_SECONDS + 2
    # and what lasts counts as it does for anybody
    demands.note(WIDE, Demand(model=M, waiting=4), 500.0, ready=False)
    assert (demands.settled(M, 0, 500.0), demands.settled(M, 0, 500.0 + UP_SECONDS)) == (1, 2)
