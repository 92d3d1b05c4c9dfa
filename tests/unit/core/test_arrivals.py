from __future__ import annotations

from dataclasses import replace

from fleets import (
    N1,
    N2,
    M,
    a_fleet,
    a_gpu_node,
    a_group,
    a_model,
    a_node,
    a_restarted,
    a_running,
    a_word,
    announced,
    desires,
    found,
    lose_one,
    texts,
    the_replica,
    the_shard,
    wake,
    wakes,
)

from llmgw.core.arrivals import LOOK_SECONDS
from llmgw.core.effects import Desire
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    NodeLost,
    NodeMarked,
    NodeRegistered,
    NodeRemoved,
    NodeReported,
    NodeSilent,
    RulesChanged,
    Wakeup,
    WeightsReported,
)
from llmgw.core.lives import UNHEARD_SECONDS
from llmgw.core.model import ModelName
from llmgw.core.node import EngineFound, NodeId
from llmgw.core.placement import Rejected
from llmgw.core.rejection import Reason
from llmgw.core.replica import ShardState
from llmgw.core.state import FEW
from llmgw.core.weights import Cached, NodeWeights

# What nodes report


def test_a_report_with_more_room_is_used() -> None:
    fleet, _ = a_fleet(a_model(gb=99.0))
    assert the_shard(fleet.handle(NodeReported(node=a_node(memory_gb=100.0)), 5.0)).model.name == M


def test_what_waits_is_looked_at_again_when_a_node_offers_something_else_and_not_at_each_report() -> None:
    fleet, _ = a_fleet(a_model(gb=20.0))
    assert isinstance(fleet.verdict(M), Rejected)
    assert desires(fleet.handle(NodeReported(node=replace(a_node(), memory_available_gb=1.0)), 1.0)) == []
    assert the_shard(fleet.handle(NodeReported(node=a_node(memory_gb=32.0)), 2.0)).node == N1


def test_a_node_that_has_the_weights_needs_no_room_for_them() -> None:
    model = a_model()
    source = "hf:org/repo/x.gguf"
    needy = replace(model, source=source, profiles=(replace(model.profiles[0], min_disk_gb=50.0),))
    fleet, _ = a_fleet(needy)
    assert isinstance(fleet.verdict(M), Rejected)
    cached = Cached(source=source, commit="c", size_bytes=1, fetched_at=0.0)
    elsewhere = WeightsReported(node=N2, weights=NodeWeights(cached=(cached,)))
    assert desires(fleet.handle(elsewhere, 2.0)) == []
    assert the_shard(fleet.handle(replace(elsewhere, node=N1), 3.0)).node == N1


def test_weights_that_a_node_sees_count_as_there() -> None:
    fleet, _ = a_fleet(a_model())
    fleet.handle(WeightsReported(node=N1, weights=NodeWeights(seen=("/mnt/x.gguf",))), 1.0)
    assert fleet.hosts()[0].holds == {"/mnt/x.gguf"}


def test_a_report_of_a_stranger_is_ignored() -> None:
    fleet, _ = a_fleet(a_model(gb=99.0))
    assert fleet.handle(NodeReported(node=a_node("n9", memory_gb=100.0)), 5.0) == []


def test_a_node_whose_engine_turns_out_to_be_broken_is_given_nothing_more_and_mended_it_is() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    ailing = EngineFound(engine="e", program=("/opt/e",), checked=True, broken="libe.so.1 is missing")
    fleet.handle(NodeReported(node=replace(a_node(), engines=(ailing,))), 5.0)
    (announce,) = announced(fleet.handle(Demand(model=M, waiting=1), 6.0))
    assert announce.lines == ("n1, profile 'p': /opt/e can't run e: libe.so.1 is missing",)
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Rejected)
    assert [no.reason for no in verdict.rejections] == [Reason.ENGINE_BROKEN]
    mended = replace(ailing, broken=None, version="1.2")
    assert the_shard(fleet.handle(NodeReported(node=replace(a_node(), engines=(mended,))), 7.0)).node == N1


def test_an_engine_that_breaks_does_not_take_down_what_runs() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    ailing = EngineFound(engine="e", program=("/opt/e",), checked=True, broken="it is half replaced")
    assert fleet.handle(NodeReported(node=replace(a_node(), engines=(ailing,))), 2.0) == []
    assert len(fleet.ready(M)) == 1


def test_a_shard_that_its_node_never_saw_is_given_up_when_it_has_taken_a_later_set() -> None:
    full = a_node(memory_gb=6.0)
    fleet, _ = a_fleet(a_model(), nodes=[full])
    fleet.handle(CatalogChanged(models=(a_model(source="/new.gguf"),)), 1.0)
    fleet.handle(NodeReported(node=full, applied=1), 1.1)
    fleet.handle(NodeReported(node=a_node("n2"), applied=2), 1.1)
    assert not fleet.idle()
    shard = the_shard(fleet.handle(NodeReported(node=full, applied=2), 1.2))
    assert (shard.replica, shard.epoch) == ("rep-m-1", 2)


# Nodes that are lost


def test_no_request_goes_to_a_lost_node_until_it_is_back() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    effects = fleet.handle(NodeLost(node=N1), 20.0)
    assert texts(effects) == [
        "n1 is lost: it has been silent for longer than its lease",
        "rep-m-1 can't be reached: n1 is silent; no request goes there until it is back",
    ]
    assert fleet.ready(M) == ()
    assert fleet.silent_nodes(M) == (N1,)
    assert fleet.statistics().nodes[0].lost
    assert fleet.handle(NodeLost(node=N1), 21.0) == []
    assert desires(effects) == []
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(shard),)), 30.0)
    # (which is what requests wait for that were held meanwhile)
    assert [said.text for said in announced(effects)] == ["n1 is back", "rep-m-1 can be reached again: n1 is back"]
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-1"]
    assert fleet.silent_nodes(M) == ()
    assert not fleet.statistics().nodes[0].lost


def test_a_lost_node_that_is_unknown_is_no_news() -> None:
    fleet, _ = a_fleet(a_model())
    assert fleet.handle(NodeLost(node=N2), 1.0) == []


def test_what_runs_on_other_nodes_is_not_concerned() -> None:
    fleet, _ = a_fleet(a_model(), nodes=(a_node("n1"), a_node("n2")))
    assert the_replica(fleet).shard.node == N1
    assert texts(fleet.handle(NodeLost(node=N2), 1.0)) == ["n2 is lost: it has been silent for longer than its lease"]


# Nodes that say what is not so


def test_of_a_thousand_shards_at_once_the_log_gets_a_few_lines() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    gone = a_model("gone")
    running = tuple(found(a_running(gone, number=number)) for number in range(1000))
    said = announced(fleet.handle(NodeRegistered(node=a_node(), running=running), 1.0))
    assert len(said) == FEW + 1
    assert said[-1].text == f"and {1000 - FEW} more changes with the registration of n1"


# Nodes that come with something running


def test_what_still_runs_when_a_node_registers_again_goes_on() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.LOADING), 1.0)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(shard),)), 2.0)
    assert desires(effects) == [Desire(node=N1, revision=2, shards=(shard,))]
    assert len(fleet.ready(M)) == 1


def test_what_no_longer_runs_when_a_node_registers_again_has_failed() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    effects = fleet.handle(NodeRegistered(node=a_node()), 2.0)
    assert "it no longer ran when its node registered again" in announced(effects)[0].text
    assert wakes(effects) == [7.0]
    fleet.handle(NodeRegistered(node=a_node()), 3.0)
    assert the_replica(fleet).state is ShardState.ENDED


def test_what_a_node_was_told_and_never_spoke_of_is_told_again_with_the_next_epoch() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    effects = fleet.handle(NodeRegistered(node=a_node()), 2.0)
    assert the_shard(effects) == replace(shard, epoch=2)
    assert [announce.warning for announce in announced(effects)] == [False]


def test_what_a_node_never_saw_and_is_no_longer_to_run_is_forgotten() -> None:
    fleet, _ = a_fleet(a_model())
    fleet.handle(CatalogChanged(models=()), 1.0)
    fleet.handle(NodeRegistered(node=a_node()), 2.0)
    assert fleet.idle()


def test_one_node_says_nothing_of_another() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    assert len(fleet.ready(M)) == 1


# Nodes that an operator speaks of


def test_a_node_whose_link_is_down_gets_nothing_new_and_keeps_what_it_has() -> None:
    fleet, effects = a_fleet(a_model(), a_model("b", least=0))
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    assert fleet.handle(NodeSilent(node=N1), 2.0) == []
    assert fleet.handle(NodeSilent(node=N2), 2.0) == []
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-1"]
    fleet.handle(Demand(model=ModelName("b"), waiting=1), 3.0)
    verdict = fleet.verdict(ModelName("b"))
    assert isinstance(verdict, Rejected)
    assert verdict.reasons() == {Reason.NODE_SILENT: 1}
    running = (found(the_replica(fleet).shard),)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=running), 4.0)
    effects += fleet.handle(Wakeup(), 4.0)
    assert [shard.model.name for shard in desires(effects)[-1].shards] == ["b", "m"]


def test_a_lost_node_does_not_fall_silent() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    fleet.handle(NodeLost(node=N1), 1.0)
    fleet.handle(NodeSilent(node=N1), 2.0)
    assert fleet.statistics().nodes[0].lost


def test_a_cordoned_node_keeps_its_replicas_and_gets_no_other() -> None:
    fleet, effects = a_fleet(a_model(), a_model("b", least=0))
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    fleet.handle(NodeMarked(node=N1, cordoned=True), 2.0)
    fleet.handle(Demand(model=ModelName("b"), waiting=1), 3.0)
    verdict = fleet.verdict(ModelName("b"))
    assert isinstance(verdict, Rejected)
    assert verdict.reasons() == {Reason.CORDONED: 1}
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-1"]
    # what waits is placed at once
    effects = fleet.handle(NodeMarked(node=N1), 4.0)
    effects += fleet.handle(Wakeup(), 4.0)
    assert [shard.model.name for shard in desires(effects)[-1].shards] == ["b", "m"]


def test_a_node_is_removed_only_when_it_is_lost_or_empty() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    (said,) = announced(fleet.handle(NodeRemoved(node=N1), 2.0))
    assert said.text == "n1 is not removed: rep-m-1 runs there"
    assert len(fleet.statistics().nodes) == 1
    fleet.handle(NodeLost(node=N1), 3.0)
    fleet.handle(NodeRemoved(node=N1), 4.0)
    assert fleet.statistics().nodes == ()
    assert fleet.statistics().models[0].replicas == ()
    assert fleet.verdict(M) == Rejected()
    # a word of it, or its second removal, is no news
    assert fleet.handle(NodeReported(node=a_node()), 5.0) == []
    assert fleet.handle(a_word(shard, ShardState.READY), 5.0) == []
    assert fleet.handle(NodeRemoved(node=N1), 6.0) == []


def test_a_removed_node_is_told_nothing_old_when_it_comes_back() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    fleet.handle(NodeLost(node=N1), 2.0)
    # whoever keeps what it was told last, keeps this
    assert desires(fleet.handle(NodeRemoved(node=N1), 3.0)) == [Desire(node=N1, revision=2, shards=())]
    effects = fleet.handle(NodeRegistered(node=a_node()), 4.0)
    assert [desire.revision for desire in desires(effects)] == [3]
    assert the_shard(effects).epoch == 2


def test_a_removed_node_that_comes_back_is_told_to_stop_what_has_its_place_elsewhere() -> None:
    fleet, effects = a_fleet(a_model())
    old = the_shard(effects)
    fleet.handle(a_word(old, ShardState.READY), 1.0)
    fleet.handle(NodeLost(node=N1), 2.0)
    fleet.handle(NodeRemoved(node=N1), 3.0)
    new = the_shard(fleet.handle(NodeRegistered(node=a_node("n2")), 4.0))
    assert (new.replica, new.epoch) == ("rep-m-1", 2)
    effects = fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(old),)), 5.0)
    assert desires(effects) == [Desire(node=N1, revision=3, shards=())]
    assert {replica.epoch: replica.state for replica in fleet.statistics().models[0].replicas} == {
        1: ShardState.STOPPING,
        2: ShardState.PLACED,
    }
    # it books its room until it is gone
    assert [seen.booked_gb for seen in fleet.statistics().nodes] == [4.0, 4.0]
    fleet.handle(a_word(old, ShardState.ENDED), 6.0)
    assert [seen.booked_gb for seen in fleet.statistics().nodes] == [0.0, 4.0]


def test_an_empty_node_is_removed_whatever_had_failed_there() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED, cause="no"), 1.0)
    fleet.handle(NodeRemoved(node=N1), 2.0)
    assert fleet.statistics().models[0].replicas == ()


def test_another_patience_counts_from_the_same_loss() -> None:
    fleet, effects = a_fleet(a_model())
    lose_one(fleet, effects)
    effects = fleet.handle(RulesChanged(replace_after=10.0, brake=600.0), 25.0)
    assert wakes(effects) == [30.0]
    assert [desire.node for desire in desires(fleet.handle(Wakeup(), 30.0))] == [N1, N2]


# Replicas of several nodes


def test_a_group_whose_node_registers_without_its_part_is_begun_anew() -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[0], ShardState.LOADING), 1.0)
    effects = fleet.handle(NodeRegistered(node=a_gpu_node("n2")), 2.0)
    assert "n2 never launched its part" in announced(effects)[0].text
    assert {desire.node: desire.shards for desire in desires(effects)} == {N1: (), N2: ()}
    fleet.handle(a_word(shards[0], ShardState.ENDED), 3.0)
    fleet.handle(Wakeup(), 3.0)
    assert the_replica(fleet).epoch == 2


def test_a_removed_node_takes_its_group_along() -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[0], ShardState.READY), 1.0)
    fleet.handle(a_word(shards[1], ShardState.READY), 1.0)
    fleet.handle(NodeLost(node=N2), 20.0)
    fleet.handle(NodeRemoved(node=N2), 21.0)
    assert the_replica(fleet).state is ShardState.STOPPING
    fleet.handle(a_word(shards[0], ShardState.ENDED), 22.0)
    assert fleet.statistics().models[0].replicas == ()


def test_a_group_of_which_a_part_is_on_no_node_ends_when_all_have_said_what_they_run() -> None:
    _, shards = a_group()
    fleet, _ = a_restarted((a_gpu_node("n1"), shards[0]))
    assert the_replica(fleet).state is ShardState.STOPPING


# What a node has not spoken of


def test_an_agent_that_tells_what_it_took_is_waited_for_until_it_has_taken_the_end() -> None:
    fleet, _ = a_fleet(a_model())
    fleet.handle(NodeReported(node=a_node(), applied=0), 1.0)
    fleet.handle(CatalogChanged(models=()), 2.0)
    assert wakes(fleet.handle(Wakeup(), 2.0)) == []
    fleet.handle(Wakeup(), 500.0)
    # it may be launching it just now
    assert not fleet.idle()
    fleet.handle(NodeReported(node=a_node(), applied=2), 501.0)
    assert fleet.idle()


def test_a_node_that_says_nothing_of_what_it_was_told_to_launch_is_not_waited_for_for_ever() -> None:
    fleet, effects = a_fleet(a_model())
    old = the_shard(effects)
    fleet.handle(NodeRegistered(node=a_node("n2")), 1.0)
    assert desires(fleet.handle(NodeReported(node=a_node(), applied=1), 59.0)) == []
    effects = fleet.handle(NodeReported(node=a_node(), applied=1), 60.0)
    assert "its node was told to launch it and says nothing of it" in announced(effects)[0].text
    assert [desire.shards for desire in desires(effects) if desire.node == N1] == [()]
    # it may launch it still: its room is booked until it has taken the set without it
    assert [seen.booked_gb for seen in fleet.statistics().nodes] == [4.0, 0.0]
    fleet.handle(NodeReported(node=a_node(), applied=2), 65.0)
    effects = fleet.handle(Wakeup(), 65.0)
    assert [replica.nodes for replica in fleet.statistics().models[0].replicas] == [(N2,)]
    # a late word of it, and what came of one that did speak
    fleet.handle(a_word(old, ShardState.LAUNCHING), 66.0)
    fleet.handle(a_word(the_replica(fleet).shard, ShardState.LAUNCHING), 67.0)
    assert desires(fleet.handle(NodeReported(node=a_node("n2"), applied=9), 200.0)) == []


def test_what_is_taken_back_in_time_need_not_be_launched() -> None:
    fleet, _ = a_fleet(a_model())
    fleet.handle(CatalogChanged(models=()), 2.0)
    assert announced(fleet.handle(NodeReported(node=a_node(), applied=1), 61.0)) == []


# Epochs and names that were never given


def test_what_failed_on_a_node_that_was_removed_is_forgotten() -> None:
    fleet, _ = a_fleet(a_model(), a_model("b", gb=99.0), nodes=[])
    for number in range(3, 9):
        now, name = number * 1000.0, NodeId(f"n{number}")
        fleet.handle(NodeRegistered(node=a_node(name)), now)
        wake(fleet, until=now)
        fleet.handle(a_word(the_replica(fleet).shard, ShardState.ENDED, cause="no"), now + 1.0)
        fleet.handle(NodeLost(node=name), now + 2.0)
        fleet.handle(NodeRemoved(node=name), now + 3.0)
        wake(fleet, until=now + 900.0)
    assert fleet.backing_off(M) == {}
    assert fleet.failed(M, now) == {}


def test_figures_of_nodes_that_move_all_the_time_have_what_waits_looked_at_once_a_second() -> None:
    fleet, _ = a_fleet(a_model(gb=99.0), nodes=[a_node(f"n{number}") for number in range(1, 5)])
    wake(fleet, until=5.0)
    looked_at, now = set(), 5.0
    for step in range(100):
        now = 5.0 + step / 25
        name = f"n{step % 4 + 1}"
        fleet.handle(NodeReported(node=replace(a_node(name), memory_foreign_gb=0.4 + 0.2 * (step // 4 % 2))), now)
        wake(fleet, until=now)
        looked_at.add(fleet.trace.of(M)[0].at)
    # (in 4 s)
    assert 4 <= len(looked_at) <= 6
    # none of them is missed
    fleet.handle(NodeReported(node=a_node("n1", memory_gb=100.0)), now)
    wake(fleet, until=now + LOOK_SECONDS)
    assert the_replica(fleet).nodes == (N1,)


def test_what_was_prepared_when_its_agent_began_anew_has_not_failed() -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[0], ShardState.PREPARED), 1.0)
    fleet.handle(NodeRegistered(node=a_gpu_node("n1")), 2.0)
    fleet.handle(a_word(shards[1], ShardState.ENDED), 3.0)
    wake(fleet, until=3.0 + UNHEARD_SECONDS)
    assert (the_replica(fleet).epoch, fleet.failed(M, 10.0)) == (2, {})
