from __future__ import annotations

from dataclasses import replace

import pytest
from fleets import (
    ENDPOINT,
    N1,
    N2,
    M,
    a_fleet,
    a_gpu_node,
    a_group,
    a_launched_group,
    a_model,
    a_node,
    a_ready,
    a_restarted,
    a_running,
    a_word,
    announced,
    desires,
    found,
    the_replica,
    the_shard,
    wake,
)

from llmgw.core.effects import Desire, WakeAt
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    NodeMarked,
    NodeRegistered,
    NodeReported,
    NodesExpected,
    Stopping,
    Wakeup,
)
from llmgw.core.fleet import Fleet
from llmgw.core.model import Profile
from llmgw.core.node import NodeId
from llmgw.core.replica import Load, ReplicaId, ShardSpec, ShardState


def test_a_node_can_not_take_a_model_from_another_by_saying_that_it_runs_it() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    thief = replace(a_running(a_model(), epoch=9, number=0, node=N2), replica=ReplicaId("rep-m-0"))
    effects = fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(thief),)), 2.0)
    assert [replica.shard.node for replica in fleet.ready(M)] == [N1]
    assert all(desire.shards == () for desire in desires(effects))
    assert "is to stop" in announced(effects)[0].text


def test_a_shard_that_already_runs_is_taken_over_as_it_is() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(least=0),)), 0.0)
    spec = a_running(replace(a_model(least=1, most=1), aliases=("old",)))
    report = a_word(spec, ShardState.READY, load=Load(running=1)).report
    effects = fleet.handle(NodeRegistered(node=a_node(), running=((spec, report),)), 1.0)
    assert the_shard(effects) == spec
    assert announced(effects)[0].text == "rep-m-1 was already running on n1 and is taken over"
    (replica,) = fleet.ready(M)
    assert (replica.shard.epoch, replica.endpoint, replica.load) == (7, ENDPOINT, Load(running=1))
    fleet.handle(a_word(spec, ShardState.ENDED), 2.0)
    assert the_shard(fleet.handle(Demand(model=M, waiting=1), 10.0)).epoch == 8


@pytest.mark.parametrize("state", [ShardState.PREPARING, ShardState.PREPARED])
def test_of_one_without_an_engine_yet_it_is_not_said_that_it_ran(state: ShardState) -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(a_running(a_model()), state),)), 1.0)
    assert announced(effects)[0].text == "rep-m-1 was already being prepared on n1 and is taken over"


def test_an_adopted_shard_that_was_loading_becomes_ready() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    spec = a_running(a_model())
    fleet.handle(NodeRegistered(node=a_node(), running=(found(spec, ShardState.LOADING),)), 1.0)
    effects = fleet.handle(a_word(spec, ShardState.READY), 500.0)
    assert announced(effects)[0].text == "rep-m-1 is ready on n1"
    assert fleet.verdict(M) is None


@pytest.mark.parametrize("spec", [a_running(a_model("gone")), a_running(a_model(), node=N2)])
def test_a_shard_that_is_of_no_model_or_no_such_node_is_left_out_and_booked_until_its_end(spec: ShardSpec) -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(least=0),)), 0.0)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(spec),)), 1.0)
    assert desires(effects) == [Desire(node=N1, revision=1, shards=())]
    assert "is to stop" in announced(effects)[0].text
    assert fleet.ready(M) == ()
    assert fleet.statistics().nodes[0].booked_gb == 4.0
    fleet.handle(a_word(replace(spec, node=N1), ShardState.ENDED), 2.0)
    assert fleet.statistics().nodes[0].booked_gb == 0.0
    assert fleet.idle()


@pytest.mark.parametrize(
    "spec",
    [
        a_running(a_model(source="/other.gguf")),
        a_running(replace(a_model(), profiles=(Profile(name="p", engine="e", args=("-x",), min_memory_gb=4.0),))),
    ],
)
def test_a_shard_of_an_earlier_definition_is_taken_over_and_serves_until_a_new_one_is_proven(spec: ShardSpec) -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(spec),)), 1.0)
    assert announced(effects)[0].text == "rep-m-1 was already running on n1 and is taken over"
    old, new = desires(effects)[-1].shards
    assert (old, new.replica, new.model) == (spec, "rep-m-2", a_model())
    fleet.handle(a_word(new, ShardState.READY), 2.0)
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-1", "rep-m-2"]
    assert fleet.handle(Wakeup(), 11.9) == [WakeAt(at=12.0)]
    effects = fleet.handle(Wakeup(), 12.0)
    assert announced(effects)[-1].text == "rep-m-1 on n1 is to stop: its definition has changed"
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-2"]


def test_a_shard_that_is_stopping_or_has_ended_is_not_taken_over() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(least=0),)), 0.0)
    mended = a_running(a_model(), number=3)
    running = (
        found(a_running(a_model(), number=1), ShardState.STOPPING),
        found(a_running(a_model(), number=2), ShardState.ENDED),
        (mended, a_word(mended, ShardState.ENDED, cause="no room", remedy="make some", lines=("last",)).report),
    )
    effects = fleet.handle(NodeRegistered(node=a_node(), running=running), 1.0)
    (replica,) = fleet.statistics().nodes[0].replicas
    assert (replica.id, replica.state) == ("rep-m-1", ShardState.STOPPING)
    assert [announce.text for announce in announced(effects)] == [
        "rep-m-1 was already running on n1 and is to stop: it isn't what the catalog asks for",
        "rep-m-2 had ended on n1: it gave no cause",
        "rep-m-3 had ended on n1: no room; make some",
    ]
    assert announced(effects)[-1].lines == ("last",)


def test_the_epoch_of_what_had_ended_before_is_not_given_again() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    ended = found(a_running(a_model()), ShardState.ENDED)
    assert the_shard(fleet.handle(NodeRegistered(node=a_node(), running=(ended,)), 1.0)).epoch == 8


def test_of_two_epochs_of_a_replica_the_newest_is_kept() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(most=2),)), 0.0)
    old, new = a_running(a_model(most=2), epoch=3), a_running(a_model(most=2), epoch=4)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(old), found(new))), 1.0)
    assert the_shard(effects) == new
    assert fleet.statistics().nodes[0].booked_gb == 8.0


def test_more_than_may_run_are_taken_over_and_stopped() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    running = tuple(found(a_running(a_model(), number=number)) for number in (1, 2))
    effects = fleet.handle(NodeRegistered(node=a_node(), running=running), 1.0)
    assert the_shard(effects).replica == "rep-m-1"
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-1"]


def test_a_node_that_comes_while_everything_stops_is_told_to_run_nothing() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    fleet.handle(Stopping(), 0.0)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(a_running(a_model())),)), 1.0)
    assert desires(effects) == [Desire(node=N1, revision=1, shards=())]


def test_a_group_is_taken_over_by_a_server_that_has_begun_anew() -> None:
    _, shards = a_launched_group()
    nodes = [a_gpu_node("n1"), a_gpu_node("n2")]
    fleet, effects = a_restarted((nodes[1], shards[1]), (nodes[0], shards[0]))
    assert {desire.node: desire.shards for desire in desires(effects)} == {N1: (shards[0],), N2: (shards[1],)}
    (replica,) = fleet.ready(M)
    assert (replica.nodes, replica.epoch) == (("n1", "n2"), 1)
    assert desires(fleet.handle(Wakeup(), 70.0)) == []
    assert [replica.state for replica in fleet.ready(M)] == [ShardState.READY]


def test_a_second_node_with_the_same_rank_of_a_group_is_to_stop_it() -> None:
    _, shards = a_group()
    thief = replace(shards[0], node=NodeId("n3"))
    _, effects = a_restarted((a_gpu_node("n1"), shards[0]), (a_gpu_node("n3"), thief), (a_gpu_node("n2"), shards[1]))
    assert {desire.node: len(desire.shards) for desire in desires(effects)} == {"n1": 1, "n2": 1, "n3": 0}


def test_an_older_epoch_that_comes_late_is_to_stop() -> None:
    fleet, effects = a_fleet(a_model(most=2))
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.ENDED, cause="no"), 1.0)
    fleet.handle(Wakeup(), 7.0)
    assert the_replica(fleet).epoch == 2
    late = replace(shard, node=N2)
    effects = fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(late),)), 8.0)
    assert "is to stop" in announced(effects)[0].text


def test_what_was_taken_for_gone_and_runs_after_all_is_to_stop_and_books_its_room() -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[0], ShardState.LOADING), 1.0)
    # n2 never spoke of its part, and is thought to have never seen it
    fleet.handle(a_word(shards[0], ShardState.ENDED, cause="no"), 2.0)
    fleet.handle(NodeReported(node=a_gpu_node("n2"), applied=2), 2.1)
    assert [shard.state for shard in the_replica(fleet).shards] == [ShardState.ENDED, ShardState.ENDED]
    fleet.handle(NodeRegistered(node=a_gpu_node("n2"), running=(found(shards[1], ShardState.LOADING),)), 3.0)
    assert len(fleet.statistics().nodes[1].host.booked) == 8
    # so that its cards are given to nobody meanwhile
    assert desires(fleet.handle(Wakeup(), 10.0)) == []
    fleet.handle(a_word(shards[1], ShardState.ENDED), 11.0)
    effects = fleet.handle(Wakeup(), 11.0)
    assert [shard.epoch for desire in desires(effects) for shard in desire.shards] in ([], [2, 2])
    assert the_replica(fleet).epoch == 2


def test_an_epoch_that_nobody_gave_is_not_counted_on_from() -> None:
    fleet, _ = a_fleet(a_model(least=0), a_model("b"))
    liar = a_running(a_model(least=0), epoch=2**40)
    effects = fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(liar),)), 1.0)
    assert "is to stop" in announced(effects)[0].text
    # (nor does a node that claims it and never ends it keep it from the others)
    effects = fleet.handle(Demand(model=M, waiting=1), 2.0)
    effects += wake(fleet, until=2.0)
    assert {s.epoch for e in desires(effects) for s in e.shards if s.model.name == M} == {1}


def test_a_node_that_says_that_a_later_epoch_has_ended_stops_none_on_another() -> None:
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({N1, N2}), until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    running = a_running(a_model(), epoch=1)
    liar = (replace(running, node=N2, epoch=5), a_word(replace(running, epoch=5), ShardState.ENDED).report)
    fleet.handle(NodeRegistered(node=a_node("n2"), running=(liar,)), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(running),)), 2.0)
    assert [replica.epoch for replica in fleet.ready(M)] == [1]


def test_a_name_that_this_fleet_never_gives_is_not_remembered() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    names = ("rep-m-12345", "rep-m-x", "rep-m-²", "other")
    liar = tuple(found(replace(a_running(a_model(), epoch=9), replica=ReplicaId(name))) for name in names)
    liar += (found(a_running(a_model("gone"), epoch=9)),)
    fleet.handle(NodeRegistered(node=a_node(), running=liar), 1.0)
    assert fleet._state.roster._epochs == {}


def test_an_older_epoch_that_comes_late_is_to_stop_though_no_other_is_alive() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    for epoch, now in ((1, 1.0), (2, 7.0)):
        fleet.handle(a_word(replace(shard, epoch=epoch), ShardState.ENDED, cause="no"), now)
        fleet.handle(Wakeup(), now + 5.0)
    late = replace(shard, node=N2)
    effects = fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(late),)), 8.0)
    assert "is to stop" in announced(effects)[0].text


def test_a_replica_beside_another_is_taken_over_only_while_something_is_to_be_replaced() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    fleet.handle(NodeMarked(node=N1, draining=True), 2.0)
    mate = a_running(a_model(), number=2, node=N2)
    effects = fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(mate),)), 3.0)
    assert announced(effects)[0].text == "rep-m-2 was already running on n2 and is taken over"
    third = a_running(a_model(), number=3, node=NodeId("n3"))
    effects = fleet.handle(NodeRegistered(node=a_node("n3"), running=(found(third),)), 4.0)
    assert "is to stop" in announced(effects)[0].text


def test_two_of_a_rollout_are_both_taken_over_whichever_comes_first() -> None:
    for order in ((0, 1), (1, 0)):
        old, new = a_running(a_model(source="/old"), epoch=1), a_running(a_model(), epoch=1, number=2, node=N2)
        running = [(a_node("n1"), old), (a_node("n2"), new)]
        fleet = Fleet()
        fleet.handle(NodesExpected(nodes=frozenset({N1, N2}), until=30.0), 0.0)
        fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
        for at in order:
            node, spec = running[at]
            fleet.handle(NodeRegistered(node=node, running=(found(spec),)), 1.0)
        assert [replica.id for replica in fleet.ready(M)] == ["rep-m-1", "rep-m-2"]


def test_a_node_that_claims_what_is_not_its_own_again_and_again_keeps_the_model_from_no_other() -> None:
    fleet, shard = a_ready(a_model(), nodes=[a_node("n1"), a_node("n3")])
    for step in range(20):
        now = 2.0 + step * 100.0
        liar = a_running(a_model(), epoch=51 + step, node=N2)
        fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(liar),)), now)
        wake(fleet, until=now)
        if step == 0:
            fleet.handle(a_word(shard, ShardState.ENDED, cause="no"), 3.0)
            wake(fleet, until=3.0)
    mine = [life.replica for life in fleet._state.roster.of(M) if fleet._state.roster.is_desired(life)]
    assert [replica.nodes for replica in mine] in ([(NodeId("n3"),)], [(N1,)])
    # (what it claims books its room there all the same)
    (claimed,) = [seen.booked_gb for seen in fleet.statistics().nodes if seen.host.id == N2]
    assert claimed >= 4.0
