from __future__ import annotations

from dataclasses import replace

import pytest
from fleets import (
    N1,
    N2,
    M,
    a_fleet,
    a_gpu_node,
    a_launched_group,
    a_model,
    a_node,
    a_ready,
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

from llmgw.core.effects import Drain, Effect, Happening
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Drained,
    ModelsHeld,
    NodeLost,
    NodeMarked,
    NodeRegistered,
    NodeRemoved,
    NodeReported,
    Stopping,
)
from llmgw.core.fleet import Fleet
from llmgw.core.leaving import DRAIN_SECONDS
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.picture import Draining
from llmgw.core.placement import Rejected
from llmgw.core.replica import ReplicaId, ShardSpec, ShardState

GONE = CatalogChanged(models=())


# A replica that we have done with


def test_what_serves_is_out_of_what_is_ready_at_once_and_stops_when_nobody_is_answered_by_it() -> None:
    fleet, shard = a_ready(a_model())
    effects = fleet.handle(GONE, 20.0)
    assert drains(effects) == [Drain(replica=shard.replica, epoch=1, number=1)]
    assert (fleet.ready(M), desires(effects)) == ((), [])
    (replica,) = fleet.statistics().nodes[0].replicas
    assert (replica.state, replica.draining) == (ShardState.READY, "its model was removed")
    # it says how it is meanwhile, and gets no request for that
    assert fleet.handle(a_word(shard, ShardState.READY), 21.0) == []
    assert fleet.ready(M) == ()
    (desire,) = desires(fleet.handle(Drained(replica=shard.replica, epoch=1, number=1), 22.0))
    assert desire.shards == ()
    effects = fleet.handle(a_word(shard, ShardState.ENDED), 23.0)
    assert texts(effects) == ["rep-m-1 has stopped on n1"]
    assert fleet.idle()


def test_what_does_not_serve_yet_stops_at_once() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.LOADING), 1.0)
    effects = fleet.handle(GONE, 2.0)
    assert (drains(effects), [desire.shards for desire in desires(effects)]) == ([], [()])
    assert [(said.text, said.what) for said in announced(effects)] == [
        ("rep-m-1 on n1 is to stop: its model was removed", Happening.STOPPING)
    ]


@pytest.mark.parametrize(("epoch", "number"), [(2, 1), (1, 2), (1, 0)])
def test_the_word_of_another_drain_stops_nothing(epoch: int, number: int) -> None:
    fleet, shard = a_ready(a_model())
    fleet.handle(GONE, 20.0)
    assert desires(fleet.handle(Drained(replica=shard.replica, epoch=epoch, number=number), 21.0)) == []
    assert desires(fleet.handle(Drained(replica=ReplicaId("rep-x-1"), epoch=1, number=1), 21.0)) == []


def test_a_word_of_a_drain_that_comes_twice_is_no_news() -> None:
    fleet, _ = a_ready(a_model())
    (drain,) = drains(fleet.handle(GONE, 20.0))
    fleet.handle(drained(drain), 21.0)
    assert fleet.handle(drained(drain), 22.0) == []


def test_each_drain_has_a_number_of_its_own() -> None:
    fleet, effects = a_fleet(a_model(least=2, most=2))
    for shard in desires(effects)[-1].shards:
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    assert [drain.number for drain in drains(fleet.handle(GONE, 2.0))] == [1, 2]


def test_requests_that_do_not_end_are_cut_off_when_they_have_had_their_time() -> None:
    fleet, _ = a_ready(a_model())
    fleet.handle(GONE, 20.0)
    assert desires(wake(fleet, until=20.0 + DRAIN_SECONDS - 0.1)) == []
    effects = wake(fleet, until=20.0 + DRAIN_SECONDS)
    assert [desire.shards for desire in desires(effects)] == [()]
    (said,) = announced(effects)
    assert said.text == "rep-m-1 on n1 stops with all that runs there: its last requests have had 10m"
    assert said.warning


def test_an_engine_that_ends_while_it_is_drained_has_not_failed() -> None:
    fleet, shard = a_ready(a_model())
    (drain,) = drains(fleet.handle(GONE, 20.0))
    effects = fleet.handle(a_word(shard, ShardState.ENDED, cause="killed"), 21.0)
    assert texts(effects) == ["rep-m-1 has stopped on n1"]
    assert fleet.idle()
    assert fleet.handle(drained(drain), 22.0) == []
    assert fleet.failed(M, 22.0) == {}


def test_an_engine_that_says_that_it_is_stopping_while_it_is_drained_has_not_failed() -> None:
    fleet, shard = a_ready(a_model())
    fleet.handle(GONE, 20.0)
    fleet.handle(a_word(shard, ShardState.STOPPING), 21.0)
    assert texts(fleet.handle(a_word(shard, ShardState.ENDED), 22.0)) == ["rep-m-1 has stopped on n1"]
    assert fleet.failed(M, 22.0) == {}


def test_what_is_wanted_again_while_it_is_drained_stays() -> None:
    fleet, shard = a_ready(a_model())
    (first,) = drains(fleet.handle(ModelsHeld(models=frozenset({M})), 20.0))
    effects = fleet.handle(ModelsHeld(models=frozenset()), 21.0)
    assert texts(effects)[-1] == "rep-m-1 stays after all"
    assert [replica.draining for replica in fleet.ready(M)] == [None]
    assert desires(effects) == []
    # the door's late word of that drain is none of the next
    assert fleet.handle(drained(first), 22.0) == []
    (second,) = drains(fleet.handle(ModelsHeld(models=frozenset({M})), 23.0))
    assert second.number > first.number
    assert desires(fleet.handle(drained(first), 24.0)) == []
    assert len(desires(fleet.handle(drained(second), 25.0))) == 1
    assert desires(wake(fleet, until=2000.0)) == []
    assert fleet.failed(M, 2000.0) == {}
    assert shard.replica == second.replica


def test_what_is_asked_for_while_it_is_drained_for_want_of_use_stays() -> None:
    fleet, _ = a_ready(a_model(least=0))
    assert len(drains(wake(fleet, until=901.0))) == 1
    effects = fleet.handle(Demand(model=M, waiting=1), 902.0)
    assert texts(effects) == ["rep-m-1 stays after all"]
    assert desires(effects) == []
    assert len(fleet.ready(M)) == 1
    # and is not cut off when that drain would have had its time
    assert desires(wake(fleet, until=1700.0)) == []


def test_at_the_stop_of_everything_nothing_is_drained() -> None:
    fleet, _ = a_ready(a_model())
    effects = fleet.handle(Stopping(), 20.0)
    assert (drains(effects), [desire.shards for desire in desires(effects)]) == ([], [()])


def test_the_stop_of_everything_cuts_short_a_drain() -> None:
    fleet, _ = a_ready(a_model())
    fleet.handle(GONE, 20.0)
    assert [desire.shards for desire in desires(fleet.handle(Stopping(), 21.0))] == [()]


def test_a_group_is_drained_as_one() -> None:
    fleet, shards = a_launched_group()
    for shard in shards:
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    (drain,) = drains(fleet.handle(GONE, 2.0))
    effects = fleet.handle(drained(drain), 3.0)
    assert {desire.node: desire.shards for desire in desires(effects)} == {N1: (), N2: ()}


def test_a_drained_replica_whose_node_is_lost_stops_when_nobody_is_answered_by_it() -> None:
    fleet, shard = a_ready(a_model())
    (drain,) = drains(fleet.handle(GONE, 20.0))
    fleet.handle(NodeLost(node=N1), 21.0)
    fleet.handle(drained(drain), 22.0)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(shard),)), 30.0)
    assert [desire.shards for desire in desires(effects)] == [()]


def test_a_replica_that_was_drained_is_not_missed_when_its_node_registers_without_it() -> None:
    fleet, _ = a_ready(a_model())
    fleet.handle(GONE, 20.0)
    effects = fleet.handle(NodeRegistered(node=a_node()), 21.0)
    assert texts(effects) == ["rep-m-1 has stopped on n1"]
    assert fleet.idle()


# A node that is to be drained


def a_pair(memory_gb: float = 16.0) -> tuple[Fleet, ShardSpec]:
    """m is ready on n1 and proven; n2 is empty."""
    fleet, shard = a_ready(a_model())
    fleet.handle(NodeRegistered(node=a_node("n2", memory_gb=memory_gb)), 2.0)
    wake(fleet, until=15.0)
    return fleet, shard


def drain_node(fleet: Fleet, now: float = 20.0, until: float | None = None) -> list[Effect]:
    return fleet.handle(NodeMarked(node=N1, draining=True, drain_until=until), now)


def test_what_runs_on_a_node_to_be_drained_is_replaced_elsewhere_first() -> None:
    fleet, old = a_pair()
    effects = drain_node(fleet)
    assert texts(effects) == [
        "n1 is to be drained: what runs there is placed elsewhere, then it stops",
        "rep-m-2 goes to n2 by profile 'p' (epoch 1): the least cost: 30 s",
    ]
    assert [said.node for said in announced(effects)] == [N1, N2]
    (new,) = next(desire.shards for desire in desires(effects) if desire.node == N2)
    fleet.handle(a_word(new, ShardState.READY), 30.0)
    assert len(fleet.ready(M)) == 2
    # (it may fail with its first requests)
    effects = wake(fleet, until=40.0)
    assert texts(effects) == ["rep-m-1 on n1 is to stop: n1 is to be drained"]
    assert [replica.nodes for replica in fleet.ready(M)] == [(N2,)]
    (drain,) = drains(effects)
    fleet.handle(drained(drain), 41.0)
    effects = fleet.handle(a_word(old, ShardState.ENDED), 42.0)
    assert sorted(texts(effects)) == ["n1 is drained: nothing runs there", "rep-m-1 has stopped on n1"]
    assert fleet.statistics().draining == {N1: Draining(until=None, left=())}
    assert desires(wake(fleet, until=2000.0)) == []


def test_a_node_that_runs_nothing_is_drained_at_once_and_takes_nothing_new() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    assert texts(drain_node(fleet)) == [
        "n1 is to be drained: what runs there is placed elsewhere, then it stops",
        "n1 is drained: nothing runs there",
    ]
    assert desires(fleet.handle(Demand(model=M, waiting=1), 21.0)) == []
    assert isinstance(fleet.verdict(M), Rejected)


def test_the_same_word_again_is_told_once() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    drain_node(fleet)
    assert texts(drain_node(fleet, 21.0)) == []


def test_without_room_elsewhere_it_says_so_and_waits() -> None:
    fleet, _ = a_pair(memory_gb=2.0)
    effects = drain_node(fleet)
    said = announced(effects)[-1]
    assert said.text == (
        "rep-m-1 stays until there is room for another: n1 is to be drained, and no node can run m now "
        "(1 cordoned, 1 not_enough_memory)"
    )
    assert (said.what, said.warning) == (Happening.WAITING, True)
    assert drains(wake(fleet, until=5000.0)) == []
    assert fleet.statistics().draining == {N1: Draining(until=None, left=(ReplicaId("rep-m-1"),))}
    assert len(fleet.ready(M)) == 1
    # room comes
    effects = fleet.handle(NodeReported(node=a_node("n2", memory_gb=16.0)), 5001.0)
    assert [desire.node for desire in desires(effects)] == [N2]


def test_of_several_that_stay_each_is_told_with_its_own_node() -> None:
    fleet, effects = a_fleet(a_model(least=2, most=2), nodes=(a_node(memory_gb=4.0), a_node("n2", memory_gb=4.0)))
    for shard in (shard for desire in desires(effects) for shard in desire.shards):
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=80.0)
    effects = drain_node(fleet, 90.0)
    effects += fleet.handle(NodeMarked(node=N2, cordoned=True, draining=True), 91.0)
    effects += wake(fleet, until=100.0)
    told = [text for text in texts(effects) if "until there is room" in text]
    assert "rep-m-1 stays until there is room for another: n1 is to be drained; " in told[-1]
    assert "rep-m-2 stays until there is room for another: n2 is to be drained, and no" in told[-1]


def test_at_its_deadline_what_is_left_on_the_node_stops_all_the_same() -> None:
    fleet, _ = a_pair(memory_gb=2.0)
    effects = drain_node(fleet, until=320.0)
    assert texts(effects)[0] == (
        "n1 is to be drained: what runs there is placed elsewhere, then it stops; what is left in 5m stops all the same"
    )
    assert drains(wake(fleet, until=319.0)) == []
    effects = wake(fleet, until=320.0)
    assert texts(effects)[0] == (
        "rep-m-1 on n1 stops with all that runs there: n1 is to be drained, and its time is over"
    )
    assert announced(effects)[0].warning
    assert fleet.ready(M) == ()
    # (at that moment, and not when its last requests have had theirs)
    assert drains(effects) == []
    assert [desire.shards for desire in desires(effects)] == [()]


def test_a_deadline_that_has_passed_already_counts_at_once() -> None:
    fleet, _ = a_pair(memory_gb=2.0)
    effects = drain_node(fleet, until=3.0)
    assert "what is left in 0s stops all the same" in texts(effects)[0]
    assert [desire.shards for desire in desires(effects)] == [()]


def test_a_deadline_that_is_taken_back_does_not_count() -> None:
    fleet, _ = a_pair(memory_gb=2.0)
    drain_node(fleet, until=320.0)
    drain_node(fleet, 30.0)
    assert drains(wake(fleet, until=1000.0)) == []


def test_uncordon_ends_the_drain_of_a_node() -> None:
    fleet, old = a_pair(memory_gb=2.0)
    drain_node(fleet, until=320.0)
    fleet.handle(NodeMarked(node=N1), 30.0)
    assert fleet.statistics().draining == {}
    assert not isinstance(fleet.verdict(M), Rejected)
    assert drains(wake(fleet, until=1000.0)) == []
    assert [replica.shard for replica in fleet.ready(M)] == [old]


def test_when_a_drain_is_ended_in_its_middle_the_one_too_many_stops() -> None:
    fleet, old = a_pair()
    (new,) = next(desire.shards for desire in desires(drain_node(fleet)) if desire.node == N2)
    effects = fleet.handle(NodeMarked(node=N1), 21.0)
    assert texts(effects) == ["rep-m-2 on n2 is to stop: no more than 1 may run"]
    fleet.handle(a_word(new, ShardState.ENDED), 22.0)
    assert [replica.shard for replica in fleet.ready(M)] == [old]


def test_what_loads_on_demand_and_is_idle_is_not_placed_elsewhere() -> None:
    fleet, _ = a_ready(a_model(least=0))
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    effects = drain_node(fleet)
    assert [drain.replica for drain in drains(effects)] == ["rep-m-1"]
    assert desires(effects) == []


def test_what_loads_on_demand_and_is_in_use_is_placed_elsewhere() -> None:
    fleet, old = a_ready(a_model(least=0))
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    fleet.handle(Demand(model=M, in_flight={old.replica: 1}), 19.0)
    effects = drain_node(fleet)
    assert drains(effects) == []
    assert [desire.node for desire in desires(effects)] == [N2]


def test_what_loads_on_a_node_to_be_drained_goes_on_until_another_serves() -> None:
    fleet, effects = a_fleet(a_model())
    old = the_shard(effects)
    fleet.handle(a_word(old, ShardState.LOADING), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    effects = drain_node(fleet)
    assert [desire.node for desire in desires(effects)] == [N2]
    new = the_shard(effects)
    # it is there first, and serves
    fleet.handle(a_word(old, ShardState.READY), 21.0)
    fleet.handle(a_word(new, ShardState.READY), 22.0)
    assert [replica.nodes for replica in fleet.ready(M)] == [(N1,), (N2,)]
    assert [drain.replica for drain in drains(wake(fleet, until=32.0))] == [old.replica]


def test_what_still_loads_on_a_node_to_be_drained_stops_when_another_serves() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.LOADING), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    fleet.handle(a_word(the_shard(drain_node(fleet)), ShardState.READY), 21.0)
    effects = wake(fleet, until=31.0)
    assert "rep-m-1 on n1 is to stop: n1 is to be drained" in texts(effects)
    assert drains(effects) == []


def test_what_loads_on_a_node_to_be_drained_stops_at_its_deadline() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.LOADING), 1.0)
    drain_node(fleet, until=60.0)
    assert desires(wake(fleet, until=59.0)) == []
    assert [desire.shards for desire in desires(wake(fleet, until=60.0))] == [()]


def test_a_drain_is_as_good_when_the_node_comes_later() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    drain_node(fleet, 0.0)
    _, shard = a_ready(a_model())
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(shard),)), 1.0)
    assert the_shard(effects) == shard
    assert fleet.statistics().draining == {N1: Draining(until=None, left=(shard.replica,))}
    effects = fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    assert [desire.node for desire in desires(effects) if desire.shards] == [N2]


def test_a_group_leaves_a_node_to_be_drained_as_one() -> None:
    fleet, shards = a_launched_group()
    for shard in shards:
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    for name in ("n3", "n4"):
        fleet.handle(NodeRegistered(node=a_gpu_node(name)), 2.0)
    wake(fleet, until=15.0)
    effects = drain_node(fleet)
    assert [desire.node for desire in desires(effects)] == ["n3", "n4"]
    assert fleet.statistics().draining[N1].left == ("rep-m-1",)


def test_two_nodes_that_are_drained_together_do_not_hand_each_other_what_they_run() -> None:
    fleet, _ = a_pair()
    fleet.handle(NodeMarked(node=N2, draining=True), 19.0)
    drain_node(fleet)
    assert isinstance(fleet.verdict(M), Rejected)
    assert [replica.nodes for replica in fleet.ready(M)] == [(N1,)]


def test_each_model_of_a_node_to_be_drained_is_dealt_with() -> None:
    fleet, effects = a_fleet(a_model("a"), a_model("b"), a_model("c"))
    for shard in desires(effects)[-1].shards:
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    wake(fleet, until=15.0)
    effects = drain_node(fleet)
    effects += wake(fleet, until=20.0)
    shards = [desire.shards for desire in desires(effects) if desire.node == N2][-1]
    assert [shard.model.name for shard in shards] == ["a", "b", "c"]
    for shard in shards:
        fleet.handle(a_word(shard, ShardState.READY), 21.0)
    assert sorted(drain.replica for drain in drains(wake(fleet, until=31.0))) == ["rep-a-1", "rep-b-1", "rep-c-1"]
    assert {fleet.ready(ModelName(name))[0].nodes for name in "abc"} == {(N2,)}


def test_the_end_of_one_part_of_a_group_that_is_drained_ends_it_all_and_is_no_failure() -> None:
    fleet, shards = a_launched_group()
    for shard in shards:
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    fleet.handle(GONE, 2.0)
    effects = fleet.handle(a_word(shards[1], ShardState.ENDED, cause="its mate is gone"), 3.0)
    assert {desire.node: desire.shards for desire in desires(effects)} == {N1: (), N2: ()}
    effects = fleet.handle(a_word(shards[0], ShardState.ENDED), 4.0)
    assert texts(effects) == ["rep-m-1 has stopped on n1, n2"]
    assert fleet.failed(M, 4.0) == {}
    assert fleet.idle()


def test_a_group_on_a_node_to_be_drained_does_not_go_first_though_that_would_make_room_for_another() -> None:
    fleet, shards = a_launched_group(nodes=3)
    for shard in shards:
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=15.0)
    # (n2 and n3 would do)
    effects = drain_node(fleet)
    assert drains(effects) == []
    assert "rep-m-1 stays until there is room for another" in texts(effects)[-1]
    assert drains(wake(fleet, until=2000.0)) == []


def test_what_is_stopping_already_is_not_told_again_at_the_stop_of_everything() -> None:
    fleet, _ = a_ready(a_model())
    (drain,) = drains(fleet.handle(GONE, 20.0))
    fleet.handle(drained(drain), 21.0)
    assert fleet.handle(Stopping(), 22.0) == []
    assert not fleet.idle()


def test_one_that_still_loads_on_a_node_to_be_drained_does_not_count_as_one_that_serves() -> None:
    fleet, effects = a_fleet(a_model(least=2, most=2))
    one, two = desires(effects)[-1].shards
    fleet.handle(a_word(one, ShardState.READY), 1.0)
    fleet.handle(a_word(two, ShardState.LOADING), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    wake(fleet, until=15.0)
    effects = drain_node(fleet)
    new = next(desire.shards[0] for desire in desires(effects) if desire.node == N2)
    fleet.handle(a_word(new, ShardState.READY), 21.0)
    assert drains(wake(fleet, until=60.0)) == []
    assert [replica.id for replica in fleet.ready(M)] == [one.replica, new.replica]


def test_the_drain_of_a_node_that_was_cordoned_is_told() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    fleet.handle(NodeMarked(node=N1, cordoned=True), 19.0)
    assert texts(drain_node(fleet))[-1] == "n1 is drained: nothing runs there"


def test_requests_that_do_not_end_are_cut_off_at_the_deadline_of_their_node_and_not_later() -> None:
    fleet, old = a_pair(memory_gb=2.0)
    fleet.handle(Demand(model=M, in_flight={old.replica: 1}), 19.0)
    drain_node(fleet, until=620.0)
    assert desires(wake(fleet, until=619.0)) == []
    (desire,) = desires(wake(fleet, until=620.0))
    assert (desire.node, desire.shards) == (N1, ())


def test_what_is_drained_already_is_cut_off_at_the_deadline_of_its_node() -> None:
    fleet, old = a_pair()
    (new,) = next(desire.shards for desire in desires(drain_node(fleet, until=60.0)) if desire.node == N2)
    fleet.handle(a_word(new, ShardState.READY), 21.0)
    fleet.handle(Demand(model=M, in_flight={old.replica: 1}), 22.0)
    assert len(drains(wake(fleet, until=31.0))) == 1
    effects = wake(fleet, until=60.0)
    assert texts(effects) == ["rep-m-1 on n1 stops with all that runs there: n1 is to be empty by now"]
    assert [desire.shards for desire in desires(effects)] == [()]


@pytest.mark.parametrize("in_flight", [0, 1])
def test_at_a_deadline_that_has_passed_another_is_started_at_once_where_there_is_room(in_flight: int) -> None:
    fleet, old = a_pair()
    fleet.handle(Demand(model=M, in_flight={old.replica: in_flight}), 19.0)
    effects = drain_node(fleet, until=20.0)
    effects += wake(fleet, until=20.0)
    assert {desire.node: len(desire.shards) for desire in desires(effects)} == {N1: 0, N2: 1}


def test_one_that_still_answers_and_makes_room_does_not_hold_up_another_elsewhere() -> None:
    # (it has no room beside it, and then it has)
    fleet, old = a_ready(a_model(gb=10.0))
    wake(fleet, until=15.0)
    fleet.handle(Demand(model=M, in_flight={old.replica: 1}), 16.0)
    assert len(drains(fleet.handle(CatalogChanged(models=(a_model(gb=10.0, source="/new"),)), 20.0))) == 1
    effects = fleet.handle(NodeRegistered(node=a_node("n2")), 25.0)
    assert [desire.node for desire in desires(effects) if desire.shards] == [N1, N2] or [
        desire.node for desire in desires(effects) if desire.shards
    ] == [N2]


def test_one_that_stays_after_all_owes_nobody_anything() -> None:
    model = a_model(least=0)
    fleet, shard = a_ready(replace(model, scaling=replace(model.scaling, idle_timeout_seconds=30.0)))
    assert len(drains(wake(fleet, until=31.0))) == 1
    # somebody asks at that moment, and is told to come back; it stays
    fleet.handle(Demand(model=M, asked=True), 31.5)
    assert [replica.shard for replica in fleet.ready(M)] == [shard]
    # and goes when nobody has asked for its idle timeout
    assert drains(wake(fleet, until=61.0)) == []
    assert [drain.replica for drain in drains(wake(fleet, until=61.5))] == [shard.replica]


@pytest.mark.parametrize("known", [True, False])
def test_of_a_node_that_can_not_be_reached_nobody_says_that_it_is_drained(known: bool) -> None:
    fleet, old = a_pair()
    if not known:
        effects = fleet.handle(NodeMarked(node=NodeId("n9"), draining=True), 20.0)
    else:
        fleet.handle(NodeLost(node=N1), 20.0)
        effects = wake(fleet, until=200.0)
        effects += drain_node(fleet, 201.0, until=202.0)
        effects += wake(fleet, until=400.0)
        effects += fleet.handle(NodeRemoved(node=N1), 401.0)
    assert not any("is drained" in text for text in texts(effects))
    assert old.node == N1


def test_at_the_deadline_of_a_node_that_is_lost_what_may_run_there_is_to_stop_when_it_is_back() -> None:
    fleet, _ = a_ready(a_model())
    drain_node(fleet, until=60.0)
    fleet.handle(NodeLost(node=N1), 40.0)
    effects = wake(fleet, until=60.0)
    assert texts(effects)[0] == (
        "rep-m-1 on n1 is to stop: n1 is to be drained; on a node that is lost, once that is back"
    )
    assert [desire.shards for desire in desires(effects)] == [()]
