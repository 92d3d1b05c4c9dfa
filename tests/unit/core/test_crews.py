from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from fleets import (
    N1,
    N2,
    M,
    a_fleet,
    a_gpu_node,
    a_group,
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
    lose_one,
    texts,
    the_shard,
    wake,
)

from llmgw.core.crews import STOPPING_SECONDS
from llmgw.core.effects import Desire, Effect
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Drained,
    ModelsHeld,
    NodeLost,
    NodeMarked,
    NodeRegistered,
    NodeReported,
    NodesExpected,
    ReplicaRecalled,
    Wakeup,
)
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model, Scaling
from llmgw.core.node import Node, NodeId
from llmgw.core.placement import Rejected
from llmgw.core.replica import ReplicaId, ShardSpec, ShardState


def test_a_smaller_most_stops_the_replicas_that_serve_least() -> None:
    fleet, effects = a_fleet(a_model(least=3, most=3))
    one, two, three = desires(effects)[-1].shards
    fleet.handle(a_word(one, ShardState.LOADING), 1.0)
    fleet.handle(a_word(two, ShardState.READY), 1.0)
    fleet.handle(a_word(three, ShardState.ENDED), 1.0)
    effects = fleet.handle(CatalogChanged(models=(a_model(least=1, most=1),)), 2.0)
    assert the_shard(effects) == two
    assert announced(effects)[0].text == "rep-m-1 on n1 is to stop: no more than 1 may run"
    assert [replica.id for replica in fleet.statistics().models[0].replicas] == ["rep-m-1", "rep-m-2"]
    effects = fleet.handle(CatalogChanged(models=(a_model(least=0, most=0),)), 3.0)
    assert announced(effects)[0].text == "rep-m-2 on n1 is to stop: no more than 0 may run"
    (drain,) = drains(effects)
    assert desires(fleet.handle(drained(drain), 4.0))[-1].shards == ()


def test_a_stopping_replica_counts_against_the_most_there_may_be() -> None:
    fleet, effects = a_fleet(a_model(least=2, most=3, gb=None))
    for shard in desires(effects)[-1].shards:
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    for drain in drains(fleet.handle(CatalogChanged(models=()), 2.0)):
        fleet.handle(drained(drain), 2.0)
    effects = fleet.handle(CatalogChanged(models=(a_model(least=2, most=3, gb=None),)), 3.0)
    # two are about to end, and no more than one may run beside them
    assert [shard.replica for shard in desires(effects)[-1].shards] == ["rep-m-3"]


def test_what_ran_on_a_lost_node_is_placed_anew_after_a_while_with_the_next_epoch() -> None:
    fleet, effects = a_fleet(a_model())
    old = lose_one(fleet, effects)
    assert desires(fleet.handle(Wakeup(), 79.0)) == []
    effects = fleet.handle(Wakeup(), 80.0)
    told = {desire.node: desire.shards for desire in desires(effects)}
    (new,) = told[N2]
    assert (new.replica, new.id, new.epoch) == (old.replica, old.id, 2)
    # the lost node is told when it is back
    assert told[N1] == ()
    assert "n1 is lost, and another takes its place" in announced(effects)[0].text
    fleet.handle(a_word(new, ShardState.READY), 90.0)
    assert [replica.nodes for replica in fleet.ready(M)] == [(N2,)]
    assert fleet.silent_nodes(M) == ()
    # what it may still run there keeps its room
    assert [seen.booked_gb for seen in fleet.statistics().nodes] == [4.0, 4.0]
    effects = fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(old),)), 100.0)
    assert desires(effects)[0] == Desire(node=N1, revision=3, shards=())
    assert "it is to stop, another has its place" in announced(effects)[1].text
    assert [replica.epoch for replica in fleet.ready(M)] == [2]
    # it is lost once more before that is done
    assert texts(fleet.handle(NodeLost(node=N1), 101.0)) == ["n1 is lost: it has been silent for longer than its lease"]
    fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(old),)), 102.0)
    fleet.handle(a_word(old, ShardState.ENDED), 103.0)
    assert [seen.booked_gb for seen in fleet.statistics().nodes] == [0.0, 4.0]


def test_what_finds_no_other_place_is_what_its_node_goes_on_with() -> None:
    fleet, effects = a_fleet(a_model(gb=4.0))
    old = the_shard(effects)
    fleet.handle(a_word(old, ShardState.READY), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2", memory_gb=2.0)), 2.0)
    fleet.handle(NodeLost(node=N1), 20.0)
    assert desires(fleet.handle(Wakeup(), 80.0)) == []
    assert isinstance(fleet.verdict(M), Rejected)
    effects = fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(old),)), 500.0)
    assert desires(effects) == [Desire(node=N1, revision=2, shards=(old,))]
    assert [replica.epoch for replica in fleet.ready(M)] == [1]
    assert not isinstance(fleet.verdict(M), Rejected)


def test_a_model_that_nobody_wants_any_more_is_not_placed_anew_when_its_node_is_lost() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    shard = the_shard(fleet.handle(Demand(model=M, waiting=1), 1.0))
    fleet.handle(a_word(shard, ShardState.READY), 2.0)
    fleet.handle(Demand(model=M), 2.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 3.0)
    fleet.handle(NodeLost(node=N1), 850.0)
    (drain,) = drains(fleet.handle(Wakeup(), 902.0))
    assert [desire.shards for desire in desires(fleet.handle(drained(drain), 902.0))] == [()]
    assert desires(fleet.handle(Wakeup(), 910.0)) == []
    # somebody asks
    assert the_shard(fleet.handle(Demand(model=M, waiting=1), 911.0)).node == N2


def test_a_group_that_loses_a_node_ends_where_it_can_be_reached_and_is_placed_elsewhere() -> None:
    fleet, shards = a_group(nodes=3)
    for shard in shards:
        fleet.handle(a_word(shard, ShardState.READY), 5.0)
    fleet.handle(NodeLost(node=N2), 20.0)
    assert fleet.ready(M) == ()
    effects = fleet.handle(Wakeup(), 80.0)
    assert {desire.node: desire.shards for desire in desires(effects)} == {N1: (), N2: ()}
    fleet.handle(a_word(shards[0], ShardState.ENDED), 85.0)
    effects = fleet.handle(Wakeup(), 85.0)
    live = [r for r in fleet.statistics().models[0].replicas if r.epoch == 2]
    assert [replica.nodes for replica in live] == [("n1", "n3")]
    # and back: what it runs there ends
    effects = fleet.handle(NodeRegistered(node=a_gpu_node("n2"), running=(found(shards[1]),)), 90.0)
    assert desires(effects)[0] == Desire(node=N2, revision=4, shards=())
    fleet.handle(a_word(shards[1], ShardState.ENDED), 91.0)
    assert [r.epoch for r in fleet.statistics().models[0].replicas] == [2]


def test_what_was_to_stop_on_a_node_that_is_lost_then_does_not_count_for_ever() -> None:
    fleet, effects = a_fleet(a_model())
    old = the_shard(effects)
    fleet.handle(a_word(old, ShardState.READY), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    # it is told, and nobody hears what comes of it
    fleet.handle(NodeMarked(node=N2, cordoned=True), 3.0)
    fleet.handle(CatalogChanged(models=()), 3.0)
    changed = a_model(source="/new.gguf")
    fleet.handle(Drained(replica=old.replica, epoch=1, number=1), 4.0)
    fleet.handle(CatalogChanged(models=(changed,)), 5.0)
    assert fleet.statistics().models[0].replicas[0].state is ShardState.STOPPING
    effects = fleet.handle(NodeMarked(node=N2), 6.0)
    assert desires(effects) == []
    effects = fleet.handle(NodeLost(node=N1), 20.0)
    effects += fleet.handle(Wakeup(), 80.0)
    new = next(shard for desire in desires(effects) for shard in desire.shards)
    assert (new.node, new.model) == (N2, changed)


def test_of_those_that_are_one_too_many_the_proven_and_the_busy_stay() -> None:
    model = replace(a_model(gb=1.0), scaling=Scaling(min=4, max=4))
    fleet, effects = a_fleet(model)
    one, two, three, four = desires(effects)[-1].shards
    for shard in (two, three, four):
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=11.0)
    fleet.handle(a_word(one, ShardState.READY), 12.0)
    fleet.handle(Demand(model=M, in_flight={three.replica: 1, four.replica: 5}), 13.0)
    fleet.handle(CatalogChanged(models=(replace(model, scaling=Scaling(min=3, max=3)),)), 14.0)
    assert {replica.id for replica in fleet.ready(M)} == {two.replica, three.replica, four.replica}
    fleet.handle(CatalogChanged(models=(replace(model, scaling=Scaling(min=1, max=1)),)), 15.0)
    assert {replica.id for replica in fleet.ready(M)} == {four.replica}


def test_of_those_that_are_drained_as_many_stay_as_are_wanted_again() -> None:
    model = replace(a_model(gb=1.0), scaling=Scaling(min=3, max=3))
    fleet, effects = a_fleet(model)
    for shard in desires(effects)[-1].shards:
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=11.0)
    fleet.handle(CatalogChanged(models=(replace(model, scaling=Scaling(min=1, max=1)),)), 14.0)
    assert len(fleet.ready(M)) == 1
    effects = fleet.handle(CatalogChanged(models=(replace(model, scaling=Scaling(min=2, max=2)),)), 15.0)
    assert texts(effects) == ["rep-m-2 stays after all"]
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-1", "rep-m-2"]
    assert desires(effects) == []


def test_one_that_fails_while_others_are_drained_is_made_up_for_by_one_of_them() -> None:
    model = replace(a_model(gb=1.0), scaling=Scaling(min=2, max=2))
    fleet, effects = a_fleet(model)
    one, two = desires(effects)[-1].shards
    for shard in (one, two):
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=11.0)
    fleet.handle(CatalogChanged(models=(replace(model, scaling=Scaling(min=1, max=1)),)), 14.0)
    (left,) = fleet.ready(M)
    effects = fleet.handle(a_word(left.shard, ShardState.ENDED, cause="no"), 15.0)
    assert texts(effects)[-1] == "rep-m-2 stays after all"
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-2"]


def test_no_more_is_started_than_may_run_while_others_are_answered_out() -> None:
    model = replace(a_model(gb=1.0), scaling=Scaling(min=1, max=1))
    fleet, old = a_ready(model)
    fleet.handle(CatalogChanged(models=()), 14.0)
    effects = fleet.handle(CatalogChanged(models=(replace(model, source="/new"),)), 15.0)
    assert desires(effects) == []
    # (it is looked at when that has ended, or should have)
    fleet.handle(Drained(replica=old.replica, epoch=1, number=1), 16.0)
    effects = fleet.handle(a_word(old, ShardState.ENDED), 17.0)
    assert the_shard(effects).model.source == "/new"


def test_what_does_not_end_holds_up_the_next_for_two_minutes_and_no_longer() -> None:
    model = replace(a_model(gb=1.0), scaling=Scaling(min=1, max=1))
    fleet, old = a_ready(model)
    fleet.handle(CatalogChanged(models=()), 14.0)
    fleet.handle(Drained(replica=old.replica, epoch=1, number=1), 16.0)
    fleet.handle(CatalogChanged(models=(model,)), 17.0)
    assert desires(wake(fleet, until=16.0 + STOPPING_SECONDS - 0.1)) == []
    effects = wake(fleet, until=16.0 + STOPPING_SECONDS)
    assert [shard.replica for shard in desires(effects)[-1].shards] == ["rep-m-2"]


def test_while_the_brake_holds_nobody_is_given_up() -> None:
    nodes = [a_node(f"n{number}") for number in range(1, 5)]
    fleet, effects = a_fleet(replace(a_model(gb=12.0), scaling=Scaling(min=3, max=3)), nodes=nodes)
    for shard in {shard.id: shard for desire in desires(effects) for shard in desire.shards}.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    for number in (1, 2, 3):
        fleet.handle(NodeLost(node=NodeId(f"n{number}")), 20.0)
    assert fleet.brake(20.0) is not None
    assert desires(wake(fleet, until=300.0)) == []
    assert {replica.epoch for replica in fleet.statistics().models[0].replicas} == {1}


def test_one_that_is_drained_and_can_not_be_reached_is_not_what_is_wanted_again() -> None:
    fleet, _ = a_ready(a_model(gb=1.0))
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    fleet.handle(CatalogChanged(models=()), 14.0)
    fleet.handle(NodeLost(node=N1), 15.0)
    assert fleet.ready(M) == ()
    effects = fleet.handle(CatalogChanged(models=(a_model(gb=1.0),)), 16.0)
    assert announced(effects) == []
    # it is as good as gone when nobody is answered by it any more
    effects = fleet.handle(Drained(replica=ReplicaId("rep-m-1"), epoch=1, number=1), 17.0)
    assert [desire.node for desire in desires(effects) if desire.shards] == [N2]


def test_a_replica_that_is_lost_and_no_longer_wanted_is_to_stop_when_its_node_is_back() -> None:
    fleet, shard = a_ready(a_model())
    fleet.handle(NodeLost(node=N1), 20.0)
    # there is no other place, so it counts
    assert desires(wake(fleet, until=100.0)) == []
    effects = fleet.handle(ModelsHeld(models=frozenset({M})), 101.0)
    assert texts(effects)[-1] == "rep-m-1 on n1 is to stop: no more than 0 are to run"
    assert [desire.shards for desire in desires(effects)] == [()]
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(shard),)), 102.0)
    assert [desire.shards for desire in desires(effects)] == [()]


def cut_off_and_idle() -> tuple[Fleet, ShardSpec]:
    """A model that loads on demand is ready; three of four nodes are lost at 800 with it, and the brake holds."""
    fleet, shard = a_ready(a_model(least=0), nodes=[a_node(f"n{number}") for number in range(1, 5)])
    wake(fleet, until=799.0)
    for name in sorted({shard.node, NodeId("n2"), NodeId("n3"), NodeId("n4")})[:3]:
        fleet.handle(NodeLost(node=name), 800.0)
    assert fleet.brake(800.0) is not None
    return fleet, shard


def test_what_is_cut_off_with_others_is_not_stopped_for_want_of_use() -> None:
    fleet, shard = cut_off_and_idle()
    # (nobody here sees whom it answers)
    effects = wake(fleet, until=1399.0)
    assert (drains(effects), desires(effects)) == ([], [])
    # and when it can be seen, it is
    effects = fleet.handle(NodeRegistered(node=a_node(shard.node), running=(found(shard),)), 1399.5)
    assert [drain.replica for drain in drains(effects)] == [shard.replica]


@pytest.mark.parametrize("what", ["an operator stops it", "fewer may run"])
def test_what_is_cut_off_with_others_is_stopped_when_somebody_says_so(what: str) -> None:
    fleet, shard = cut_off_and_idle()
    fewer = CatalogChanged(models=(a_model(least=0, most=0),))
    effects = fleet.handle(ModelsHeld(models=frozenset({M})) if what == "an operator stops it" else fewer, 810.0)
    assert [drain.replica for drain in drains(effects)] == [shard.replica]


# One that runs by an earlier definition and can't stay, while the new one has no place


def nowhere(model: Model) -> Model:
    """Another definition of it that no node can run."""
    return replace(model, source="/new", profiles=(replace(model.profiles[0], engine="nosuch"),))


def a_late_one(model: Model, nodes: Sequence[Node], at: NodeId = N1) -> tuple[Fleet, dict[ReplicaId, ShardSpec]]:
    """All replicas of it serve on ``at``, proven, by a definition of before 20: no node can run that of now."""
    fleet, effects = a_fleet(model, nodes=[node for node in nodes if node.id == at])
    shards = {shard.replica: shard for shard in desires(effects)[-1].shards}
    for shard in shards.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=15.0)
    for node in nodes:
        if node.id != at:
            fleet.handle(NodeRegistered(node=node), 16.0)
    fleet.handle(CatalogChanged(models=(nowhere(model),)), 20.0)
    wake(fleet, until=25.0)
    return fleet, shards


def leave(fleet: Fleet, how: str, shard: ShardSpec, now: float = 30.0) -> list[Effect]:
    """It can't stay."""
    drain = NodeMarked(node=shard.node, draining=True)
    event = drain if how == "drained" else ReplicaRecalled(replica=shard.replica, epoch=shard.epoch)
    return fleet.handle(event, now) + wake(fleet, until=now + 1.0)


def begun(effects: Sequence[Effect], known: Iterable[ShardSpec] = ()) -> list[ShardSpec]:
    """What was launched, and was not known before."""
    found = {(shard.id, shard.epoch): shard for desire in desires(effects) for shard in desire.shards}
    return [shard for shard in found.values() if shard not in known]


WHYS = {"drained": "n1 is to be drained", "recalled": "an operator wants it replaced"}


@pytest.mark.parametrize("how", WHYS)
def test_another_of_the_earlier_definition_takes_the_place_of_one_that_can_not_stay(how: str) -> None:
    fleet, shards = a_late_one(a_model(gb=10.0), [a_node("n1"), a_node("n2")])
    (old,) = shards.values()
    (new,) = begun(leave(fleet, how, old), [old])
    assert (new.node, new.model.source) == (N2, "/m.gguf")
    fleet.handle(a_word(new, ShardState.LOADING), 32.0)
    # the one that loads stays, however long that takes, and so does the one that serves
    assert begun(wake(fleet, until=900.0), [old, new]) == []
    assert [replica.shard for replica in fleet.ready(M)] == [old]
    fleet.handle(a_word(new, ShardState.READY), 901.0)
    assert drains(wake(fleet, until=910.0)) == []
    effects = wake(fleet, until=911.0)
    assert texts(effects)[0] == f"{old.replica} on n1 is to stop: {WHYS[how]}"
    fleet.handle(drained(drains(effects)[0]), 912.0)
    fleet.handle(a_word(old, ShardState.ENDED), 913.0)
    assert begun(wake(fleet, until=9000.0), [new]) == []
    assert [replica.shard for replica in fleet.ready(M)] == [new]


def test_of_several_that_can_not_stay_one_is_replaced_at_a_time() -> None:
    fleet, shards = a_late_one(a_model(least=2, most=2), [a_node("n1"), a_node("n2")])
    one, two = shards.values()
    (third,) = begun(leave(fleet, "drained", one), [one, two])
    assert begun(wake(fleet, until=90.0), [one, two, third]) == []
    fleet.handle(a_word(third, ShardState.READY), 91.0)
    effects = wake(fleet, until=101.0)
    assert [drain.replica for drain in drains(effects)] == [two.replica]
    (fourth,) = begun(effects, [one, two, third])
    fleet.handle(drained(drains(effects)[0]), 102.0)
    fleet.handle(a_word(two, ShardState.ENDED), 103.0)
    fleet.handle(a_word(fourth, ShardState.READY), 104.0)
    effects = wake(fleet, until=2000.0)
    assert [drain.replica for drain in drains(effects)] == [one.replica]
    assert begun(effects, [one, two, third, fourth]) == []
    assert [replica.nodes for replica in fleet.ready(M)] == [(N2,)] * 2


def test_where_enough_may_stay_the_one_that_can_not_goes_and_none_stands_in_for_it() -> None:
    model = a_model(gb=10.0, least=2, most=2)
    fleet, effects = a_fleet(model, nodes=[a_node("n1"), a_node("n2")])
    shards = {shard.node: shard for desire in desires(effects) for shard in desire.shards}
    for shard in shards.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=15.0)
    fleet.handle(CatalogChanged(models=(nowhere(model),)), 20.0)
    # (it ranks before the other, and there is no room for a third)
    first = min(shards.values(), key=lambda shard: shard.replica)
    assert drains(leave(fleet, "drained", first)) == []
    fewer = replace(nowhere(model), scaling=Scaling(min=1, max=2))
    fleet.handle(NodeRegistered(node=a_node("n3", memory_gb=6.0)), 40.0)
    effects = fleet.handle(CatalogChanged(models=(fewer,)), 41.0) + wake(fleet, until=2000.0)
    assert [drain.replica for drain in drains(effects)] == [first.replica]
    assert begun(effects, list(shards.values())) == []
    assert [replica.id for replica in fleet.ready(M)] == [max(shard.replica for shard in shards.values())]


def test_one_that_stands_in_and_whose_node_is_drained_in_its_turn_goes_first() -> None:
    fleet, shards = a_late_one(a_model(gb=10.0), [a_node("n1"), a_node("n2"), a_node("n3")])
    (old,) = shards.values()
    (second,) = begun(leave(fleet, "drained", old), [old])
    fleet.handle(a_word(second, ShardState.LOADING), 32.0)
    effects = leave(fleet, "drained", second, 40.0)
    assert f"{second.replica} on {second.node} is to stop: {second.node} is to be drained" in texts(effects)
    effects += fleet.handle(a_word(second, ShardState.ENDED), 42.0) + wake(fleet, until=43.0)
    (third,) = begun(effects, [old, second])
    assert {second.node, third.node} == {"n2", "n3"}
    assert [replica.shard for replica in fleet.ready(M)] == [old]


def test_what_may_stay_after_all_makes_the_one_that_loads_in_its_place_needless() -> None:
    fleet, shards = a_late_one(a_model(gb=10.0), [a_node("n1"), a_node("n2")])
    (old,) = shards.values()
    (new,) = begun(leave(fleet, "drained", old), [old])
    fleet.handle(a_word(new, ShardState.LOADING), 32.0)
    effects = fleet.handle(NodeMarked(node=N1), 33.0)
    assert texts(effects) == [f"{new.replica} on n2 is to stop: its definition has changed"]
    assert [replica.shard for replica in fleet.ready(M)] == [old]


def test_one_that_loads_and_can_not_stay_goes_as_soon_as_another_stands_in_for_it() -> None:
    fleet, shards = a_late_one(a_model(gb=10.0), [a_node("n1"), a_node("n2")])
    (old,) = shards.values()
    (again,) = begun(fleet.handle(a_word(old, ShardState.ENDED, cause="killed"), 26.0), [old])
    fleet.handle(a_word(again, ShardState.LOADING), 41.0)
    effects = leave(fleet, "recalled", again, 42.0)
    (new,) = begun(effects, [old, again])
    assert (again.node, new.node) == (N2, N1)
    assert f"{again.replica} on n2 is to stop: an operator wants it replaced" in texts(effects)


@pytest.mark.parametrize("most", [1, 2])
def test_what_is_recalled_and_has_room_nowhere_else_is_replaced_in_place_as_it_was(most: int) -> None:
    model, other = a_model(most=most, gb=10.0), a_model("w", gb=10.0)
    fleet, shards = a_late_one(model, [a_node("n1")])
    (old,) = shards.values()
    fleet.handle(CatalogChanged(models=(nowhere(model), other)), 26.0)
    effects = leave(fleet, "recalled", old)
    assert texts(effects)[-1] == (
        "rep-m-1 on n1 is to stop: an operator wants it replaced, and there is no room for another beside it"
    )
    fleet.handle(drained(drains(effects)[0]), 32.0)
    # (it waits for its own room, and nobody else does better)
    effects = wake(fleet, until=33.0)
    assert (texts(effects), begun(effects)) == ([], [])
    effects = fleet.handle(a_word(old, ShardState.ENDED), 34.0) + wake(fleet, until=35.0)
    (new,) = begun(effects, [old])
    assert (new.node, new.model.source) == (N1, "/m.gguf")
    fleet.handle(a_word(new, ShardState.READY), 36.0)
    effects = wake(fleet, until=2000.0)
    assert (drains(effects), begun(effects, [new])) == ([], [])


def test_what_is_drained_and_has_room_nowhere_else_stays() -> None:
    fleet, shards = a_late_one(a_model(gb=10.0), [a_node("n1"), a_node("n2", memory_gb=8.0)])
    (old,) = shards.values()
    effects = leave(fleet, "drained", old) + wake(fleet, until=2000.0)
    assert (drains(effects), begun(effects, [old])) == ([], [])
    assert texts(effects)[-1].startswith("rep-m-1 stays until there is room for another: n1 is to be drained, and no")
    # as soon as there is some
    effects = fleet.handle(NodeReported(node=a_node("n2")), 2001.0)
    assert [shard.node for shard in begun(effects, [old])] == [N2]


@pytest.mark.parametrize("state", [ShardState.LOADING, ShardState.READY])
def test_what_stands_in_does_so_for_the_next_server_too(state: ShardState) -> None:
    model = a_model(gb=10.0)
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({N1, N2}), until=60.0), 0.0)
    fleet.handle(CatalogChanged(models=(nowhere(model),), proven={M: model}), 0.0)
    fleet.handle(NodeMarked(node=N1, draining=True), 0.0)
    old, new = a_running(model), a_running(model, number=2, node=N2)
    effects = fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(old),)), 1.0)
    effects += fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(new, state),)), 2.0)
    effects += wake(fleet, until=10.0)
    assert (drains(effects), begun(effects, [old, new])) == ([], [])
    fleet.handle(a_word(new, ShardState.READY), 11.0)
    effects = wake(fleet, until=2000.0)
    assert [drain.replica for drain in drains(effects)] == [old.replica]
    assert begun(effects, [old, new]) == []
