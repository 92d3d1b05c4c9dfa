from __future__ import annotations

from dataclasses import replace

from fleets import (
    ENDPOINT,
    PAIR,
    M,
    a_fleet,
    a_gpu_node,
    a_group,
    a_model,
    a_node,
    a_ready,
    a_running,
    a_wide_model,
    a_word,
    announced,
    desires,
    drained,
    drains,
    found,
    the_replica,
    wake,
)

from llmgw.core.events import (
    CatalogChanged,
    NodeRegistered,
)
from llmgw.core.model import ModelName
from llmgw.core.node import FabricFound
from llmgw.core.replica import ShardState
from llmgw.core.starting import RENDEZVOUS_PORTS


def test_a_replica_of_two_nodes_is_placed_whole_and_meets_at_rank_0() -> None:
    fleet, shards = a_group()
    assert [(s.node, s.rank, s.count, s.fabric, s.rendezvous) for s in shards] == [
        ("n1", 0, 2, "ib-a", "10.0.0.1:29500"),
        ("n2", 1, 2, "ib-a", "10.0.0.1:29500"),
    ]
    assert [s.id for s in shards] == ["shd-m-1-0", "shd-m-1-1"]
    assert [s.gpus for s in shards] == [tuple(f"GPU-{name}-{n}" for n in range(8)) for name in ("n1", "n2")]
    fleet.handle(a_word(shards[0], ShardState.READY), 5.0)
    assert fleet.ready(M) == ()
    effects = fleet.handle(a_word(shards[1], ShardState.READY, endpoint=None), 7.0)
    assert announced(effects)[0].text == "rep-m-1 is ready on n1, n2 after 7s"
    assert [replica.endpoint for replica in fleet.ready(M)] == [ENDPOINT]
    assert the_replica(fleet).progress is None


def test_two_replicas_of_two_nodes_meet_at_two_places() -> None:
    nodes = [a_gpu_node(name) for name in ("n1", "n2")]
    _, effects = a_fleet(a_wide_model(replace(PAIR, tp=4, pp=2), least=2, most=2), nodes=nodes)
    shards = {shard.id: shard for desire in desires(effects) for shard in desire.shards}
    assert sorted({str(shard.rendezvous) for shard in shards.values()}) == ["10.0.0.1:29500", "10.0.0.1:29501"]
    booked = [gpu for shard in shards.values() for gpu in shard.gpus or ()]
    assert len(booked) == len(set(booked)) == 16


def test_a_node_that_says_that_all_its_places_to_meet_are_taken_gets_one_all_the_same() -> None:
    fleet, effects = a_fleet(nodes=[a_gpu_node("n2")])
    pair = a_wide_model()
    other = replace(pair, name=ModelName("x"))
    liar = tuple(
        found(replace(a_running(other, number=number), rendezvous=f"10.0.0.1:{port}", count=2, gpus=()))
        for number, port in enumerate(RENDEZVOUS_PORTS)
    )
    fleet.handle(NodeRegistered(node=a_gpu_node("n1"), running=liar), 1.0)
    effects = fleet.handle(CatalogChanged(models=(pair,)), 2.0)
    assert {str(shard.rendezvous) for desire in desires(effects) for shard in desire.shards} == {"10.0.0.1:29500"}


def test_what_may_be_returned_from_is_on_trial() -> None:
    fleet, first = a_ready(a_model(), nodes=[a_node(memory_gb=64.0)])
    assert not first.on_trial
    wake(fleet, until=60.0)
    effects = fleet.handle(CatalogChanged(models=(a_model(source="/new"),)), 60.0)
    second = desires(effects)[-1].shards[-1]
    assert (second.model.source, second.on_trial) == ("/new", True)
    fleet.handle(a_word(second, ShardState.READY), 70.0)
    (drain,) = drains(wake(fleet, until=90.0))
    fleet.handle(drained(drain), 90.0)
    fleet.handle(a_word(first, ShardState.ENDED), 91.0)
    # it has served, and what takes its place after a crash is not
    effects = fleet.handle(a_word(second, ShardState.ENDED), 100.0) + wake(fleet, until=110.0)
    assert [shard.on_trial for shard in desires(effects)[-1].shards if shard.model.source == "/new"] == [False]


def test_an_address_with_colons_is_written_in_brackets() -> None:
    nodes = [
        replace(a_gpu_node(name), fabrics=(FabricFound(name="ib-a", interface="ib0", address=f"fd00::{name}"),))
        for name in ("n1", "n2")
    ]
    _, effects = a_fleet(a_wide_model(), nodes=nodes)
    assert desires(effects)[-1].shards[0].rendezvous == "[fd00::n1]:29500"
