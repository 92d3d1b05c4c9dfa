from __future__ import annotations

from fleets import (
    N1,
    N2,
    M,
    a_fleet,
    a_gpu_node,
    a_model,
    a_node,
    a_wide_model,
    a_word,
    announced,
    desires,
    the_replica,
    the_shard,
    wakes,
)

from llmgw.core.events import (
    CatalogChanged,
    Demand,
    NodeLost,
    NodeRegistered,
    NodeReported,
    Wakeup,
)
from llmgw.core.fleet import Fleet
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.placement import Placement, Rejected
from llmgw.core.planning import HOSTS_A_TURN
from llmgw.core.rejection import Reason
from llmgw.core.replica import ShardState
from llmgw.core.state import FEW


def test_a_turn_plans_one_model_and_asks_for_the_next_turn() -> None:
    fleet = Fleet()
    fleet.handle(NodeRegistered(node=a_node()), 0.0)
    effects = fleet.handle(CatalogChanged(models=(a_model("a"), a_model("b"), a_model("c"))), 5.0)
    assert [shard.model.name for shard in desires(effects)[-1].shards] == ["a"]
    assert wakes(effects) == [5.0]
    effects = fleet.handle(Wakeup(), 5.0)
    assert [shard.model.name for shard in desires(effects)[-1].shards] == ["a", "b"]
    assert wakes(effects) == [5.0]
    effects = fleet.handle(Wakeup(), 5.0)
    assert [shard.model.name for shard in desires(effects)[-1].shards] == ["a", "b", "c"]
    assert wakes(effects) == []


def test_every_replica_of_the_least_number_is_placed() -> None:
    fleet, effects = a_fleet(a_model(least=3, most=3), nodes=[a_node("n1", 16.0), a_node("n2", 15.0)])
    told = {desire.node: [shard.replica for shard in desire.shards] for desire in desires(effects)}
    assert told == {"n1": ["rep-m-1", "rep-m-2", "rep-m-3"], "n2": []} or sum(map(len, told.values())) == 3
    statistics = fleet.statistics()
    assert sum(node.booked_gb for node in statistics.nodes) == 12.0
    assert [replica.id for replica in statistics.models[0].replicas] == ["rep-m-1", "rep-m-2", "rep-m-3"]


# Demand


def test_a_model_on_demand_waits_for_somebody_who_asks() -> None:
    fleet, effects = a_fleet(a_model(least=0))
    assert desires(effects)[-1].shards == ()
    shard = the_shard(fleet.handle(Demand(model=M, waiting=1), 10.0))
    assert shard.replica == "rep-m-1"
    assert desires(fleet.handle(Demand(model=M, waiting=1), 11.0)) == []


def test_another_node_is_tried_at_once() -> None:
    fleet, effects = a_fleet(a_model(), nodes=[a_node("n1", 16.0), a_node("n2", 8.0)])
    shard = the_shard([effect for effect in desires(effects) if effect.shards])
    effects = fleet.handle(a_word(shard, ShardState.ENDED), 10.0)
    told = {desire.node: desire.shards for desire in desires(effects)}
    assert told[N1] == ()
    (again,) = told[N2]
    assert (again.replica, again.epoch) == ("rep-m-1", 2)


# Room


def test_a_model_that_fits_nowhere_says_why_once() -> None:
    fleet, effects = a_fleet(a_model(gb=99.0))
    (announce,) = announced(effects)
    assert announce.text == "no node can run m now"
    assert announce.lines == (
        "n1, profile 'p': needs 99 GB of memory; 16 of 16 GB are free, 0 GB are booked by replicas",
    )
    assert announce.warning
    assert fleet.handle(NodeReported(node=a_node(memory_gb=17.0)), 5.0) == []
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Rejected)
    assert "of 17 GB" in verdict.rejections[0].detail


def test_another_reason_is_news() -> None:
    fleet, _ = a_fleet(a_model(gb=99.0))
    (announce,) = announced(fleet.handle(NodeReported(node=a_node(engines=())), 5.0))
    assert "no binary of the engine 'e'" in announce.lines[0]


def test_room_that_an_end_gives_back_is_used_by_those_that_wait() -> None:
    fleet, _ = a_fleet(a_model("a", gb=10.0), a_model("b", gb=10.0))
    assert isinstance(fleet.verdict(ModelName("b")), Rejected)
    old = the_replica(fleet, ModelName("a")).shard
    fleet.handle(a_word(old, ShardState.LAUNCHING), 1.0)
    effects = fleet.handle(CatalogChanged(models=(a_model("b", gb=10.0),)), 2.0)
    assert desires(effects)[-1].shards == ()
    assert fleet.statistics().nodes[0].booked_gb == 10.0
    fleet.handle(a_word(old, ShardState.ENDED), 3.0)
    fleet.handle(Wakeup(), 3.0)
    assert the_replica(fleet, ModelName("b")).state is ShardState.PLACED


# The catalog changes


# Nodes that are lost


def test_nothing_is_placed_on_a_lost_node() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    fleet.handle(NodeLost(node=N1), 1.0)
    fleet.handle(Demand(model=M, waiting=1), 2.0)
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Rejected)
    assert [no.reason for no in verdict.rejections] == [Reason.NODE_LOST]
    assert the_shard(fleet.handle(NodeRegistered(node=a_node()), 3.0)).node == N1


# Replicas of several nodes


def test_without_a_second_node_none_of_it_is_placed() -> None:
    fleet, effects = a_fleet(a_wide_model(), nodes=[a_gpu_node("n1"), a_gpu_node("n2", fabric="ib-b")])
    assert all(desire.shards == () for desire in desires(effects))
    assert isinstance(fleet.verdict(M), Rejected)


# Where to, and why not


def test_where_it_failed_of_late_it_is_tried_last() -> None:
    fleet, effects = a_fleet(a_model(), nodes=[a_node(f"n{n}") for n in (1, 2, 3)])
    tried = []
    now = 0.0
    for _ in range(3):
        shard = next(shard for desire in desires(effects) for shard in desire.shards)
        tried.append(shard.node)
        # (longer than any wait)
        now += 600.0
        effects = fleet.handle(a_word(shard, ShardState.ENDED, cause="never ready"), now)
    assert tried == ["n1", "n2", "n3"]
    assert fleet.failed(M, now) == {"n1": 1, "n2": 1, "n3": 1}
    assert fleet.failed(M, now + 3700.0) == {}


def test_an_answer_is_kept_without_the_nodes_that_it_was_found_for() -> None:
    fleet, _ = a_fleet(a_model(gb=99.0), nodes=[a_node(f"n{n:02}") for n in range(40)])
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Rejected)
    assert verdict.reasons() == {Reason.NOT_ENOUGH_MEMORY: 40}
    assert len(verdict.rejections) == FEW
    assert [no.node for no in verdict.first(2)] == ["n00", "n01"]
    fleet.handle(NodeRegistered(node=a_node("big", memory_gb=200.0)), 1.0)
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Placement)
    assert verdict.rejections == ()


def test_each_answer_is_kept_with_its_reason() -> None:
    fleet, _ = a_fleet(a_model(), a_model("b", gb=99.0))
    placed, nowhere = fleet.trace.of(M)
    assert (nowhere.replica, nowhere.why, nowhere.reasons) == (None, "there is no node, or no profile", {})
    assert (placed.replica, placed.profile, placed.nodes) == ("rep-m-1", "p", (N1,))
    refused, _ = fleet.trace.of(ModelName("b"))
    assert (refused.replica, refused.reasons, refused.why) == (
        None,
        {"not_enough_memory": 1},
        "1 not_enough_memory",
    )


def test_a_refusal_by_many_nodes_is_told_in_a_few_lines() -> None:
    nodes = [a_node(f"n{n}", memory_gb=1.0) for n in range(40)]
    _, effects = a_fleet(a_model(), nodes=nodes)
    said = announced(effects)[-1]
    assert len(said.lines) == FEW + 1
    assert said.lines[-1] == f"and {40 - FEW} more; llmgw ctl explain-placement m shows all"


def test_when_very_many_nodes_have_changed_at_once_the_plan_waits_for_the_next_turn() -> None:
    fleet = Fleet()
    for n in range(HOSTS_A_TURN * 2):
        fleet.handle(NodeRegistered(node=a_node(f"n{n:03}")), 0.0)
    effects = fleet.handle(CatalogChanged(models=(a_model(),)), 1.0)
    turns = 1
    while fleet.verdict(M) is None:
        assert wakes(effects) == [1.0]
        effects = fleet.handle(Wakeup(), 1.0)
        turns += 1
    assert turns == 2
    assert isinstance(fleet.verdict(M), Placement)


def test_while_the_brake_holds_a_new_model_is_placed_all_the_same() -> None:
    nodes = [a_node(f"n{number}") for number in range(1, 5)]
    fleet, effects = a_fleet(a_model(least=3, most=3, gb=12.0), nodes=nodes)
    for number in (1, 2, 3):
        fleet.handle(NodeLost(node=NodeId(f"n{number}")), 20.0)
    assert fleet.brake(20.0) is not None
    # (this server has seen all that there is)
    effects = fleet.handle(CatalogChanged(models=(a_model(least=3, most=3, gb=12.0), a_model("b"))), 21.0)
    assert [shard.model.name for desire in desires(effects) for shard in desire.shards] == ["b"]
