from __future__ import annotations

from fleets import (
    N1,
    N2,
    M,
    a_fleet,
    a_gpu_node,
    a_group,
    a_model,
    a_node,
    a_running,
    a_wide_model,
    a_word,
    announced,
    desires,
    found,
    lose_one,
    the_replica,
    the_shard,
    wake,
    wakes,
)

from llmgw.core.effects import Desire, WakeAt
from llmgw.core.events import CatalogChanged, Demand, NodeLost, NodeRegistered, NodeRemoved, NodesExpected, Wakeup
from llmgw.core.fleet import Fleet
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.planning import BACKSTOP_SECONDS
from llmgw.core.replica import ShardSpec, ShardState


def test_a_wakeup_that_comes_early_asks_again() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED), 10.0)
    assert fleet.handle(Wakeup(), 14.5) == [WakeAt(at=15.0)]


def test_nothing_is_placed_before_the_nodes_that_were_there_have_said_what_they_run() -> None:
    fleet = Fleet()
    assert wakes(fleet.handle(NodesExpected(nodes=frozenset({N1, N2}), until=15.0), 0.0)) == [15.0]
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    effects = fleet.handle(NodeRegistered(node=a_node("n1")), 1.0)
    assert desires(effects)[-1].shards == ()
    running = a_running(a_model(), node=N2)
    fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(running),)), 2.0)
    assert [replica.shard.node for replica in fleet.ready(M)] == [N2]
    assert the_replica(fleet).shard == running


def test_a_node_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({N1, N2}), until=15.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    fleet.handle(NodeRegistered(node=a_node("n1")), 1.0)
    assert the_shard(fleet.handle(Wakeup(), 15.0)).node == N1


def test_a_node_that_is_back_in_time_goes_on_with_what_it_runs() -> None:
    fleet, effects = a_fleet(a_model())
    old = lose_one(fleet, effects)
    effects = fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(old),)), 79.0)
    assert desires(effects) == [Desire(node=N1, revision=2, shards=(old,))]
    assert [replica.epoch for replica in fleet.ready(M)] == [1]
    assert desires(fleet.handle(Wakeup(), 81.0)) == []


def a_wide_fleet(nodes: int = 5) -> tuple[Fleet, list[ShardSpec]]:
    """A replica ready on each node."""
    names = [f"n{number}" for number in range(1, nodes + 1)]
    fleet, effects = a_fleet(a_model(least=nodes, most=nodes, gb=16.0), nodes=[a_node(name) for name in names])
    for _ in names:
        effects += fleet.handle(Wakeup(), 0.0)
    shards = {shard.node: shard for desire in desires(effects) for shard in desire.shards}
    for shard in shards.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    return fleet, [shards[NodeId(name)] for name in names]


def test_when_most_nodes_go_together_nothing_is_stopped_or_placed_anew() -> None:
    fleet, shards = a_wide_fleet()
    for name in ("n6", "n7"):
        fleet.handle(NodeRegistered(node=a_node(name)), 2.0)
    effects = [effect for n in range(4) for effect in fleet.handle(NodeLost(node=shards[n].node), 20.0 + n)]
    assert "the brake holds: 4 of 7 nodes were lost together" in announced(effects)[-1].text
    brake = fleet.brake(24.0)
    assert brake is not None
    assert brake.until == 620.0
    for now in (80.0, 300.0, 619.0):
        assert desires(fleet.handle(Wakeup(), now)) == []
        assert desires(fleet.handle(Demand(model=M, waiting=1), now)) == []
    assert "the brake holds" in str(fleet.held_up(300.0))
    assert fleet.statistics(300.0).brake == brake
    # they are all back, with what they run
    effects = []
    for n in range(4):
        effects += fleet.handle(NodeRegistered(node=a_node(f"n{n + 1}"), running=(found(shards[n]),)), 619.5)
    assert fleet.held_up(619.5) is None
    assert {desire.node: desire.shards for desire in desires(effects)} == {s.node: (s,) for s in shards[:4]}
    assert len(fleet.ready(M)) == 5


def test_the_brake_passes_and_what_is_lost_is_placed_anew() -> None:
    fleet, shards = a_wide_fleet(3)
    fleet.handle(NodeRegistered(node=a_node("n4")), 2.0)
    for shard in shards:
        fleet.handle(NodeLost(node=shard.node), 20.0)
    effects = fleet.handle(Wakeup(), 620.0)
    assert next(said.text for said in announced(effects)).startswith("the brake is off")
    assert NodeId("n4") in {desire.node for desire in desires(effects)}


def test_a_server_that_has_begun_anew_and_misses_most_nodes_places_nothing_that_they_may_run() -> None:
    fleet = Fleet()
    nodes = frozenset(NodeId(f"n{n}") for n in range(1, 6))
    fleet.handle(NodesExpected(nodes=nodes, until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(), a_model("b", least=0))), 0.0)
    fleet.handle(NodeRegistered(node=a_node("n1")), 1.0)
    assert "waits for what n2, n3, n4, n5 run" in str(fleet.held_up(2.0))
    effects = fleet.handle(Wakeup(), 30.0)
    assert [said.text.split(":")[0] for said in announced(effects)] == [
        "not back since the server has begun anew",
        "the brake holds",
    ]
    assert desires(effects) == []
    assert fleet.statistics().absent == ("n2", "n3", "n4", "n5")
    # but somebody who asks is served
    assert the_shard(fleet.handle(Demand(model=ModelName("b"), waiting=1), 40.0)).model.name == "b"
    # and one that is removed is missed no more
    fleet.handle(NodeRemoved(node=NodeId("n5")), 50.0)
    fleet.handle(NodeRemoved(node=NodeId("n4")), 50.0)
    # (the others get as long as any that is lost)
    effects = fleet.handle(Wakeup(), 110.0)
    assert [shard.model.name for shard in desires(effects)[-1].shards] == ["b", "m"]


def test_a_group_of_which_a_part_is_missing_ends_after_a_while() -> None:
    _, shards = a_group()
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_wide_model(),)), 0.0)
    fleet.handle(NodeRegistered(node=a_gpu_node("n1"), running=(found(shards[0]),)), 1.0)
    fleet.handle(NodeRegistered(node=a_gpu_node("n2")), 2.0)
    assert fleet.ready(M) == ()
    assert the_replica(fleet).state is ShardState.PLACED
    effects = fleet.handle(Wakeup(), 31.0)
    assert "is to stop: 1 of its 2 shards came back" in announced(effects)[0].text
    fleet.handle(a_word(shards[0], ShardState.ENDED), 32.0)
    fleet.handle(Wakeup(), 32.0)
    assert (the_replica(fleet).epoch, len(the_replica(fleet).shards)) == (2, 2)


def test_a_group_that_is_not_whole_when_the_brake_goes_off_has_its_time_again() -> None:
    _, shards = a_group()
    fleet = Fleet()
    nodes = frozenset(NodeId(f"n{n}") for n in range(1, 6))
    fleet.handle(NodesExpected(nodes=nodes, until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_wide_model(),)), 0.0)
    fleet.handle(NodeRegistered(node=a_gpu_node("n1"), running=(found(shards[0]),)), 1.0)
    fleet.handle(Wakeup(), 30.0)
    for n in range(3, 6):
        fleet.handle(NodeRegistered(node=a_gpu_node(f"n{n}")), 200.0)
    assert fleet.brake(200.0) is None
    assert the_replica(fleet).state is ShardState.PLACED
    fleet.handle(NodeRegistered(node=a_gpu_node("n2"), running=(found(shards[1]),)), 229.0)
    assert [replica.nodes for replica in fleet.ready(M)] == [("n1", "n2")]


def test_when_the_first_nodes_are_back_and_the_brake_goes_off_the_others_are_waited_for_a_while_more() -> None:
    fleet = Fleet()
    nodes = frozenset(NodeId(f"n{n}") for n in range(1, 5))
    fleet.handle(NodesExpected(nodes=nodes, until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(), a_model("b"))), 0.0)
    fleet.handle(NodeRegistered(node=a_node("n4")), 1.0)
    fleet.handle(Wakeup(), 30.0)
    assert fleet.brake(31.0) is not None
    # n1 is back, and runs one of the two
    running = found(a_running(a_model()))
    effects = fleet.handle(NodeRegistered(node=a_node("n1"), running=(running,)), 100.0)
    assert fleet.brake(100.0) is None
    assert "waits for what n2, n3 run" in str(fleet.held_up(100.0))
    effects += fleet.handle(Wakeup(), 105.0)
    assert [desire.node for desire in desires(effects)] == [N1]
    # n2 has the other one
    other = a_running(a_model("b"), node=N2)
    fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(other),)), 110.0)
    assert [replica.nodes for replica in fleet.ready(ModelName("b"))] == [(N2,)]
    # n3 does not come
    fleet.handle(Wakeup(), 160.0)
    assert fleet.held_up(160.0) is None
    assert fleet.statistics().absent == ("n3",)


def test_while_the_brake_holds_a_group_that_is_not_whole_is_not_stopped() -> None:
    _, shards = a_group()
    fleet = Fleet()
    nodes = frozenset(NodeId(f"n{n}") for n in range(1, 6))
    fleet.handle(NodesExpected(nodes=nodes, until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_wide_model(),)), 0.0)
    fleet.handle(NodeRegistered(node=a_gpu_node("n1"), running=(found(shards[0]),)), 1.0)
    assert desires(fleet.handle(Wakeup(), 30.0)) == []
    assert fleet.brake(31.0) is not None
    effects = [*fleet.handle(Wakeup(), 100.0), *wake(fleet, until=600.0)]
    assert (desires(effects), wakes(effects)[-1:]) == ([], [630.0])
    # the others are back in time
    for n in range(2, 6):
        running = (found(shards[1]),) if n == 2 else ()
        fleet.handle(NodeRegistered(node=a_gpu_node(f"n{n}"), running=running), 601.0)
    assert [replica.nodes for replica in fleet.ready(M)] == [("n1", "n2")]


def test_what_waits_is_looked_at_again_now_and_then_in_any_case() -> None:
    fleet, effects = a_fleet(a_model(gb=20.0))
    assert set(wakes(effects)) == {BACKSTOP_SECONDS}
    fleet.handle(Wakeup(), BACKSTOP_SECONDS)
    assert [seen.at for seen in fleet.trace.of(M)] == [BACKSTOP_SECONDS, 0.0]
