from __future__ import annotations

from dataclasses import replace

from fleets import N1, M, a_fleet, a_model, a_word, desires, the_replica, the_shard

from llmgw.core.demand import DEMAND_SECONDS
from llmgw.core.events import CatalogChanged, Demand, NodesExpected, Wakeup
from llmgw.core.fleet import Fleet
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.placement import Rejected, explain
from llmgw.core.rejection import Reason
from llmgw.core.replica import ShardState


def test_a_model_that_fails_is_not_tried_for_ever_when_nobody_asks_any_more() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    shard = the_shard(fleet.handle(Demand(model=M, waiting=1), 0.0))
    fleet.handle(Demand(model=M, asked=True), 0.0)
    at = DEMAND_SECONDS - 1.0
    fleet.handle(a_word(shard, ShardState.ENDED), at)
    assert isinstance(fleet.verdict(M), Rejected)
    assert fleet.backing_off(M) == {N1: at + 5.0}
    assert desires(fleet.handle(Wakeup(), at + 5.0)) == []
    assert fleet.verdict(M) is None
    assert the_replica(fleet).state is ShardState.ENDED
    shard = the_shard(fleet.handle(Demand(model=M, waiting=1), at + 50.0))
    assert (shard.replica, shard.epoch) == ("rep-m-1", 2)


def test_what_an_engine_never_sees_may_change_while_it_runs() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    changed = replace(a_model(most=2), aliases=("alias",))
    assert fleet.handle(CatalogChanged(models=(changed,)), 2.0) == []
    assert len(fleet.ready(M)) == 1


def test_an_answer_can_be_explained_somewhere_else() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED, cause="no"), 10.0)
    assert fleet.backing_off(M) == {N1: 15.0}
    assert fleet.backing_off(ModelName("other")) == {}
    told = explain(a_model(), fleet.hosts(), fleet.backing_off(M), 11.0)
    assert [no.reason for each in told.candidates for no in each.rejections] == [Reason.BACKING_OFF]
    assert fleet.wanted(a_model(), 11.0) == 1
    assert fleet.held_up(11.0) is None


def test_many_names_are_cut_short() -> None:
    fleet = Fleet()
    nodes = frozenset(NodeId(f"n{n:02}") for n in range(20))
    fleet.handle(NodesExpected(nodes=nodes, until=30.0), 0.0)
    assert "n15 and 4 more run" in str(fleet.held_up(0.0))
