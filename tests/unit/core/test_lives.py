from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fleets import (
    ENDPOINT,
    N1,
    N2,
    PAIR,
    M,
    a_fleet,
    a_gpu_node,
    a_group,
    a_launched_group,
    a_model,
    a_node,
    a_restarted,
    a_wide_model,
    a_word,
    announced,
    desires,
    drained,
    drains,
    found,
    the_replica,
    the_shard,
    wake,
    wakes,
)

from llmgw.core.effects import Desire, Effect
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Drained,
    NodeLost,
    NodeRegistered,
    NodeRemoved,
    NodeReported,
    NodesExpected,
    ReplicaRecalled,
    Stopping,
    Wakeup,
)
from llmgw.core.fleet import Fleet
from llmgw.core.lives import UNHEARD_SECONDS
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.placement import Rejected
from llmgw.core.rejection import Reason
from llmgw.core.replica import Load, Measured, ReplicaId, ShardState


def test_a_replica_is_routable_from_ready_on() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    for state in (ShardState.LAUNCHING, ShardState.LOADING):
        fleet.handle(a_word(shard, state, progress="half"), 3.0)
        assert fleet.ready(M) == ()
    effects = fleet.handle(a_word(shard, ShardState.READY), 12.0)
    (replica,) = fleet.ready(M)
    assert (replica.id, replica.endpoint, replica.since) == ("rep-m-1", ENDPOINT, 12.0)
    assert [announce.text for announce in announced(effects)] == ["rep-m-1 is ready on n1 after 12s"]
    assert fleet.ready(M) is fleet.ready(M)


def test_one_that_gives_no_sign_of_life_is_asked_for_nothing_while_another_is_well() -> None:
    fleet, effects = a_fleet(a_model(least=2, most=2), nodes=[a_node(), a_node("n2")])
    wake(fleet, 1.0)
    first, second = {shard.id: shard for effect in [*effects] for shard in getattr(effect, "shards", ())}.values()
    for shard in (first, second):
        fleet.handle(a_word(shard, ShardState.READY), 2.0)
    assert len(fleet.ready(M)) == 2
    silent = "its health check had no good answer for 30 s"
    fleet.handle(a_word(first, ShardState.READY, progress=silent), 40.0)
    assert [replica.shard.id for replica in fleet.ready(M)] == [second.id]
    # better than nothing
    fleet.handle(a_word(second, ShardState.READY, progress=silent), 41.0)
    assert len(fleet.ready(M)) == 2
    fleet.handle(a_word(first, ShardState.READY), 42.0)
    assert [replica.shard.id for replica in fleet.ready(M)] == [first.id]


def test_progress_and_load_are_kept_and_announce_nothing() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.LOADING, progress="10 %"), 1.0)
    fleet.handle(a_word(shard, ShardState.LOADING, progress="60 %"), 2.0)
    replica = the_replica(fleet)
    assert (replica.progress, replica.since) == ("60 %", 1.0)
    fleet.handle(a_word(shard, ShardState.READY), 3.0)
    load = Load(running=2, waiting=1, cache_used=0.25, prompt_tokens=90, cached_tokens=60, steps=7)
    assert fleet.handle(a_word(shard, ShardState.READY, load=load), 9.0) == []
    (replica,) = fleet.ready(M)
    assert (replica.load, replica.since, replica.endpoint) == (load, 3.0, ENDPOINT)
    # An engine that said it once and does not any more is not as busy as it was: nobody knows.
    fleet.handle(a_word(shard, ShardState.READY), 11.0)
    assert fleet.ready(M)[0].load == Load()


def test_a_failed_replica_tells_its_cause_and_is_tried_again_with_the_next_epoch() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    effects = fleet.handle(a_word(shard, ShardState.ENDED, cause="out of memory", lines=("l1", "l2")), 10.0)
    (announce,) = announced(effects)
    assert announce.text == "rep-m-1 ended on n1: out of memory (failure 1 in a row; not tried there for 5s)"
    assert announce.lines == ("l1", "l2")
    assert announce.warning
    assert desires(effects)[-1].shards == ()
    assert wakes(effects) == [15.0]
    replica = the_replica(fleet)
    assert (replica.state, replica.cause, replica.lines) == (ShardState.ENDED, "out of memory", ("l1", "l2"))
    assert fleet.idle()
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Rejected)
    assert [rejection.reason for rejection in verdict.rejections] == [Reason.BACKING_OFF]
    shard = the_shard(fleet.handle(Wakeup(), 15.0))
    assert (shard.replica, shard.epoch) == ("rep-m-1", 2)
    assert the_replica(fleet).state is ShardState.PLACED


def test_what_to_do_about_a_failure_is_kept_with_its_cause_and_announced() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY, load=Load(running=3, steps=9)), 1.0)
    facts = {"cause": "CUDA out of memory", "kind": "gpu_memory", "remedy": "give it a larger card"}
    (announce,) = announced(fleet.handle(a_word(shard, ShardState.ENDED, **facts), 10.0))
    assert announce.text == (
        "rep-m-1 ended on n1: CUDA out of memory (failure 1 in a row; not tried there for 5s); give it a larger card"
    )
    replica = the_replica(fleet)
    assert (replica.cause, replica.remedy) == ("CUDA out of memory", "give it a larger card")
    assert replica.kind == "gpu_memory"
    assert replica.load == Load()


@pytest.mark.parametrize(
    ("takes", "more"),
    [
        (1024, "; it takes 1024 tokens a request, and its model promises context_length 4096"),
        (4096, ""),
        (None, ""),
    ],
)
def test_an_engine_that_takes_less_than_its_model_promises_is_told(takes: int | None, more: str) -> None:
    fleet, effects = a_fleet(replace(a_model(), context_length=4096))
    shard = the_shard(effects)
    (announce,) = announced(fleet.handle(a_word(shard, ShardState.READY, context_length=takes), 1.0))
    assert announce.text == f"rep-m-1 is ready on n1 after 1s{more}"
    assert the_replica(fleet).context_length == takes


def test_a_model_that_promises_nothing_is_not_compared() -> None:
    fleet, effects = a_fleet(a_model())
    (announce,) = announced(fleet.handle(a_word(the_shard(effects), ShardState.READY, context_length=8), 1.0))
    assert announce.text == "rep-m-1 is ready on n1 after 1s"


def test_what_to_do_about_the_last_try_is_not_told_of_the_next() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED, cause="a", remedy="do b"), 10.0)
    shard = the_shard(fleet.handle(Wakeup(), 15.0))
    assert (the_replica(fleet).cause, the_replica(fleet).remedy) == (None, None)
    fleet.handle(a_word(shard, ShardState.ENDED, cause="c"), 16.0)
    assert (the_replica(fleet).cause, the_replica(fleet).remedy) == ("c", None)


def test_the_last_words_of_a_failure_are_for_the_log_when_its_cause_is_new() -> None:
    fleet, effects = a_fleet(a_model())
    now, told = 10.0, []
    for cause in ("a", "a", "b", "b", "a"):
        shard = the_shard(effects)
        effects = fleet.handle(a_word(shard, ShardState.ENDED, cause=cause, lines=("words",)), now)
        assert announced(effects)[-1].lines == ("words",)
        told.append(announced(effects)[-1].again)
        # (longer than any wait)
        now += 600.0
        effects = wake(fleet, until=now)
    assert told == [False, True, False, True, False]


def test_an_end_without_a_cause_is_still_told() -> None:
    fleet, effects = a_fleet(a_model())
    effects = fleet.handle(a_word(the_shard(effects), ShardState.ENDED), 10.0)
    assert "it gave no cause" in announced(effects)[0].text


def test_failures_in_a_row_wait_longer_and_health_begins_anew() -> None:
    fleet, effects = a_fleet(a_model())
    now, waits = 0.0, []
    for ready_seconds in (None, 1.0, 599.0, 600.0, None):
        shard = the_shard(effects)
        if ready_seconds is not None:
            fleet.handle(a_word(shard, ShardState.READY), now)
            now += ready_seconds
        fleet.handle(a_word(shard, ShardState.ENDED), now)
        at = fleet.backing_off(M)[N1]
        waits.append(at - now)
        now = at
        effects = fleet.handle(Wakeup(), now)
    assert waits == [5.0, 10.0, 20.0, 5.0, 10.0]


def test_health_counts_though_a_dying_engine_is_first_said_to_be_stopping() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED), 0.0)
    shard = the_shard(fleet.handle(Wakeup(), 5.0))
    fleet.handle(a_word(shard, ShardState.READY), 10.0)
    fleet.handle(a_word(shard, ShardState.STOPPING), 610.0)
    fleet.handle(a_word(shard, ShardState.ENDED), 612.0)
    assert fleet.backing_off(M) == {N1: 617.0}


def test_late_words_of_an_old_epoch_and_of_strangers_move_nothing() -> None:
    fleet, effects = a_fleet(a_model())
    old = the_shard(effects)
    fleet.handle(a_word(old, ShardState.ENDED), 0.0)
    new = the_shard(fleet.handle(Wakeup(), 5.0))
    fleet.handle(a_word(new, ShardState.READY), 6.0)
    for late in (old, replace(new, epoch=9), replace(new, node=N2), replace(new, replica=ReplicaId("rep-x-1"))):
        assert fleet.handle(a_word(late, ShardState.ENDED), 7.0) == []
    assert len(fleet.ready(M)) == 1


def test_a_step_back_is_ignored() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    assert fleet.handle(a_word(shard, ShardState.LOADING), 2.0) == []
    assert len(fleet.ready(M)) == 1


def test_a_replica_that_its_node_stops_by_itself_is_not_routable_and_comes_again() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    fleet.handle(a_word(shard, ShardState.STOPPING), 2.0)
    assert fleet.ready(M) == ()
    assert wakes(fleet.handle(a_word(shard, ShardState.ENDED), 3.0)) == [8.0]


def test_a_removed_model_is_stopped_and_booked_until_its_end() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    effects = fleet.handle(CatalogChanged(models=()), 2.0)
    assert announced(effects)[0].text == "rep-m-1 on n1 is to stop: its model was removed"
    (drain,) = drains(effects)
    assert (desires(effects), fleet.ready(M)) == ([], ())
    # what it answers ends first
    effects = fleet.handle(drained(drain), 2.5)
    assert desires(effects) == [Desire(node=N1, revision=2, shards=())]
    assert announced(effects) == []
    assert not fleet.idle()
    (replica,) = fleet.statistics().nodes[0].replicas
    assert replica.state is ShardState.STOPPING
    effects = fleet.handle(a_word(shard, ShardState.ENDED), 3.0)
    assert announced(effects)[0].text == "rep-m-1 has stopped on n1"
    assert not announced(effects)[0].warning
    assert fleet.idle()
    assert fleet.statistics().nodes[0].replicas == ()


def test_a_shard_that_its_node_never_saw_is_given_up_after_a_while() -> None:
    fleet, _ = a_fleet(a_model(), nodes=[a_node(memory_gb=6.0)])
    effects = fleet.handle(CatalogChanged(models=(a_model(source="/new.gguf"),)), 1.0)
    assert wakes(effects) == [1.0 + UNHEARD_SECONDS]
    assert not fleet.idle()
    shard = the_shard(fleet.handle(Wakeup(), 1.0 + UNHEARD_SECONDS))
    assert (shard.replica, shard.epoch) == ("rep-m-1", 2)


def test_a_shard_that_its_node_did_see_is_waited_for() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(CatalogChanged(models=()), 1.0)
    fleet.handle(a_word(shard, ShardState.LAUNCHING), 2.0)
    fleet.handle(Wakeup(), 100.0)
    assert not fleet.idle()
    fleet.handle(a_word(shard, ShardState.ENDED), 101.0)
    assert fleet.idle()


def test_at_the_stop_everything_runs_down_and_nothing_starts() -> None:
    fleet, effects = a_fleet(a_model(least=2, most=2), a_model("b"))
    one, two, three = desires(effects)[-1].shards
    for shard in (one, two):
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    fleet.handle(a_word(three, ShardState.ENDED), 1.0)
    effects = fleet.handle(Stopping(), 2.0)
    assert desires(effects)[-1].shards == ()
    assert not fleet.idle()
    for event in (
        Demand(model=M, waiting=1),
        Wakeup(),
        NodeReported(node=a_node()),
        CatalogChanged(models=(a_model("c"),)),
    ):
        assert desires(fleet.handle(event, 10.0)) == []
    fleet.handle(a_word(one, ShardState.ENDED), 11.0)
    assert not fleet.idle()
    assert desires(fleet.handle(a_word(two, ShardState.ENDED), 12.0)) == []
    assert fleet.idle()


def test_what_holds_up_an_end_is_told() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.LAUNCHING), 1.0)
    fleet.handle(a_word(shard, ShardState.LAUNCHING, progress="/opt/e is being checked"), 2.0)
    assert the_replica(fleet).progress == "/opt/e is being checked"
    fleet.handle(CatalogChanged(models=()), 3.0)
    fleet.handle(a_word(shard, ShardState.STOPPING, progress="can't be killed: processes 7"), 4.0)
    (replica,) = fleet.statistics().nodes[0].replicas
    assert (replica.state, replica.since, replica.progress) == (
        ShardState.STOPPING,
        3.0,
        "can't be killed: processes 7",
    )


def test_progress_of_several_nodes_names_the_node() -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[1], ShardState.LOADING, progress="10 %"), 5.0)
    assert the_replica(fleet).progress == "n2: 10 %"


def test_the_end_of_one_shard_ends_the_epoch_everywhere_before_another_begins() -> None:
    fleet, shards = a_group()
    for shard in shards:
        fleet.handle(a_word(shard, ShardState.READY), 5.0)
    effects = fleet.handle(a_word(shards[1], ShardState.ENDED, cause="CUDA error", kind="gpu_fault"), 9.0)
    assert [(desire.node, desire.shards) for desire in desires(effects)] == [(N1, ()), (N2, ())]
    assert "rep-m-1 ended on n2: CUDA error (failure 1 in a row" in announced(effects)[0].text
    replica = the_replica(fleet)
    assert (replica.state, replica.cause, replica.kind) == (ShardState.STOPPING, "CUDA error", "gpu_fault")
    assert fleet.ready(M) == ()
    # the time of the next try comes before the other shard has ended
    assert desires(fleet.handle(Wakeup(), 15.0)) == []
    assert len(fleet.statistics().nodes[0].host.booked) == 8
    fleet.handle(a_word(shards[0], ShardState.ENDED), 16.0)
    effects = fleet.handle(Wakeup(), 16.0)
    again = [shard for seen in fleet.statistics().models for r in seen.replicas for shard in (r.shard,)]
    assert [(shard.epoch, shard.rendezvous) for shard in again] == [(2, "10.0.0.1:29501")]


def test_a_failed_group_is_shown_until_its_next_try() -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[0], ShardState.ENDED, cause="no"), 9.0)
    # the other was never launched, as far as anybody has said
    fleet.handle(NodeReported(node=a_gpu_node("n2"), applied=2), 9.1)
    replica = the_replica(fleet)
    assert (replica.state, replica.cause, [shard.state for shard in replica.shards]) == (
        ShardState.ENDED,
        "no",
        [ShardState.ENDED] * 2,
    )


def test_a_group_that_was_taken_over_and_dies_at_once_begins_anew() -> None:
    _, shards = a_group()
    fleet, _ = a_restarted((a_gpu_node("n1"), shards[0]), (a_gpu_node("n2"), shards[1]))
    fleet.handle(a_word(shards[1], ShardState.ENDED, cause="no"), 2.0)
    fleet.handle(a_word(shards[0], ShardState.ENDED), 3.0)
    fleet.handle(Wakeup(), 8.0)
    assert the_replica(fleet).epoch == 2
    # the time at which the first one was to be whole
    fleet.handle(Wakeup(), 60.0)
    assert the_replica(fleet).epoch == 2


def test_a_new_epoch_takes_the_place_of_one_that_ended_and_of_no_other() -> None:
    fleet, effects = a_fleet(a_model())
    now = 0.0
    for _ in range(3):
        fleet.handle(a_word(the_shard(effects), ShardState.ENDED, cause="no"), now)
        now = fleet.backing_off(M)[N1]
        effects = fleet.handle(Wakeup(), now)
    assert [replica.epoch for replica in fleet.statistics().models[0].replicas] == [4]
    # one that may live on a lost node is none that has ended
    fleet.handle(a_word(the_shard(effects), ShardState.READY), now)
    fleet.handle(NodeRegistered(node=a_node("n2")), now)
    fleet.handle(NodeLost(node=N1), now + 20.0)
    wake(fleet, until=now + 80.0)
    assert [replica.epoch for replica in fleet.statistics().models[0].replicas] == [4, 5]


# Replicas of several nodes are launched in two steps


def goes(effects: Sequence[Effect]) -> dict[NodeId, list[bool]]:
    return {desire.node: [shard.go for shard in desire.shards] for desire in desires(effects)}


def test_a_group_is_told_to_launch_when_all_is_there_on_each_of_its_nodes() -> None:
    fleet, shards = a_group()
    assert [shard.go for shard in shards] == [False, False]
    for shard in shards:
        assert desires(fleet.handle(a_word(shard, ShardState.PREPARING, progress="2 of 9 GB"), 1.0)) == []
    assert the_replica(fleet).state is ShardState.PREPARING
    assert desires(fleet.handle(a_word(shards[0], ShardState.PREPARED), 5.0)) == []
    # a slow one delays, for as long as it takes
    assert desires(wake(fleet, until=5000.0)) == []
    effects = fleet.handle(a_word(shards[1], ShardState.PREPARED), 5000.0)
    assert goes(effects) == {N1: [True], N2: [True]}
    told = [shard for desire in desires(effects) for shard in desire.shards]
    assert told == [replace(shard, go=True) for shard in shards]
    assert the_replica(fleet).state is ShardState.PREPARED
    # once
    assert desires(fleet.handle(a_word(shards[0], ShardState.LAUNCHING), 5001.0)) == []
    assert desires(fleet.handle(a_word(shards[1], ShardState.LAUNCHING), 5001.0)) == []


def test_an_agent_that_knows_of_no_two_steps_counts_as_prepared_when_it_launches() -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[0], ShardState.LAUNCHING), 1.0)
    assert goes(fleet.handle(a_word(shards[1], ShardState.PREPARED), 2.0)) == {N1: [True], N2: [True]}


def test_a_replica_of_one_node_launches_as_soon_as_it_can() -> None:
    _, effects = a_fleet(a_model())
    assert the_shard(effects).go


@pytest.mark.parametrize("state", [ShardState.PREPARING, ShardState.PREPARED, ShardState.LAUNCHING])
def test_a_part_that_ends_before_the_launch_ends_the_epoch_everywhere(state: ShardState) -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[0], ShardState.PREPARED), 1.0)
    fleet.handle(a_word(shards[1], state), 1.0)
    effects = fleet.handle(a_word(shards[1], ShardState.ENDED, cause="no port is free"), 2.0)
    assert goes(effects) == {N1: [], N2: []}
    # the other one is prepared, and too late
    assert desires(fleet.handle(a_word(shards[0], ShardState.PREPARED), 3.0)) == []
    fleet.handle(a_word(shards[0], ShardState.ENDED), 4.0)
    again = [shard for desire in desires(wake(fleet, until=10.0)) for shard in desire.shards]
    assert [(shard.epoch, shard.go) for shard in again] == [(2, False), (2, False)]


def test_a_word_of_an_earlier_epoch_launches_nothing_of_the_next() -> None:
    fleet, shards = a_group()
    for shard in shards:
        fleet.handle(a_word(shard, ShardState.PREPARING), 1.0)
    fleet.handle(a_word(shards[1], ShardState.ENDED, cause="no"), 2.0)
    fleet.handle(a_word(shards[0], ShardState.ENDED), 2.0)
    again = [shard for desire in desires(wake(fleet, until=10.0)) for shard in desire.shards]
    fleet.handle(a_word(again[0], ShardState.PREPARED), 11.0)
    assert desires(fleet.handle(a_word(shards[1], ShardState.PREPARED), 12.0)) == []
    assert goes(fleet.handle(a_word(again[1], ShardState.PREPARED), 13.0)) == {N1: [True], N2: [True]}


def test_a_group_that_was_taken_over_before_its_launch_is_launched_when_it_is_whole() -> None:
    _, shards = a_group()
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({N1, N2}), until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_wide_model(),)), 0.0)
    for name, shard in zip(("n1", "n2"), shards, strict=True):
        running = (found(shard, ShardState.PREPARED),)
        effects = fleet.handle(NodeRegistered(node=a_gpu_node(name), running=running), 1.0)
    assert goes(effects) == {N1: [True], N2: [True]}


def test_a_group_that_was_taken_over_in_the_middle_of_its_launch_is_launched_on_the_rest_of_its_nodes() -> None:
    _, shards = a_group()
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({N1, N2}), until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_wide_model(),)), 0.0)
    launched = found(replace(shards[0], go=True), ShardState.LAUNCHING)
    fleet.handle(NodeRegistered(node=a_gpu_node("n1"), running=(launched,)), 1.0)
    waits = found(shards[1], ShardState.PREPARED)
    effects = fleet.handle(NodeRegistered(node=a_gpu_node("n2"), running=(waits,)), 2.0)
    assert goes(effects) == {N2: [True]}


def test_a_group_with_a_node_that_is_lost_before_the_launch_is_placed_elsewhere() -> None:
    fleet, shards = a_group(nodes=3)
    fleet.handle(a_word(shards[0], ShardState.PREPARED), 1.0)
    fleet.handle(NodeLost(node=N2), 20.0)
    assert goes(wake(fleet, until=80.0)) == {N1: [], N2: []}
    fleet.handle(a_word(shards[0], ShardState.ENDED), 81.0)
    live = [replica for replica in fleet.statistics().models[0].replicas if replica.epoch == 2]
    assert [replica.nodes for replica in live] == [("n1", "n3")]


def test_what_was_measured_on_a_node_that_is_gone_is_of_no_class() -> None:
    fleet, shards = a_launched_group()
    fleet.handle(NodeLost(node=N2), 1.0)
    fleet.handle(NodeRemoved(node=N2), 2.0)
    assert fleet.handle(a_word(shards[1], ShardState.LOADING, measured=Measured(gpu_gb=9.0)), 3.0) is not None
    assert [fact.gpu_gb for fact in fleet._state.learned] == []


def test_of_a_group_only_the_first_rank_says_where_it_is_reached() -> None:
    fleet, shards = a_launched_group()
    fleet.handle(a_word(shards[1], ShardState.READY, endpoint=None), 1.0)
    fleet.handle(a_word(shards[0], ShardState.READY), 2.0)
    assert [replica.endpoint for replica in fleet.ready(M)] == [ENDPOINT]


@pytest.mark.parametrize("why", ["roll", "recall", "crash"])
def test_a_group_on_a_full_cluster_keeps_all_of_its_room_from_its_first_end_on(why: str) -> None:
    nodes = [a_gpu_node("n1"), a_gpu_node("n2")]
    single = replace(PAIR, nodes=1, pp=1)
    waiting = replace(a_wide_model(single), name=ModelName("w"), source="/w")
    group = a_wide_model()
    fleet, effects = a_fleet(group, nodes=nodes)
    shards = [shard for desire in desires(effects) for shard in desire.shards]
    for state in (ShardState.PREPARED, ShardState.READY):
        for shard in shards:
            fleet.handle(a_word(shard, state), 1.0)
    wake(fleet, 20.0)
    fleet.handle(CatalogChanged(models=(group, waiting)), 30.0)
    wake(fleet, 30.0)
    assert isinstance(fleet.verdict(ModelName("w")), Rejected)
    if why == "roll":
        effects = fleet.handle(CatalogChanged(models=(replace(group, context_length=99), waiting)), 40.0)
    elif why == "recall":
        effects = fleet.handle(ReplicaRecalled(replica=shards[0].replica, epoch=shards[0].epoch), 40.0)
    else:
        effects = []
    effects += wake(fleet, 40.0)
    for drain in drains(effects):
        fleet.handle(Drained(replica=drain.replica, epoch=drain.epoch, number=drain.number), 41.0)
    # the end of the first shard, and only some time later that of the second
    begun = []
    for at, shard in ((42.0, shards[1]), (44.0, shards[0])):
        begun += desires(fleet.handle(a_word(shard, ShardState.ENDED, cause="it was stopped"), at))
        begun += desires(wake(fleet, at))
    begun += desires(wake(fleet, 50.0))
    assert {shard.model.name for desire in begun for shard in desire.shards} == {M}
    assert the_replica(fleet).state is ShardState.PLACED
