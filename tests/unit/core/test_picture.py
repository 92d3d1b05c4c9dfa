from __future__ import annotations

from llmgw.core.brake import Brake
from llmgw.core.catalog import Catalog
from llmgw.core.hosts import Standing
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import Node, NodeId
from llmgw.core.picture import picture
from llmgw.core.placement import Rejected
from llmgw.core.replica import Replica, Shard, ShardSpec, ShardState, replica_id, shard_id
from llmgw.core.roster import Life, Roster

M = ModelName("m")
PROFILE = Profile(name="p", engine="e", tp=2, nodes=2, min_memory_gb=3.0)
MODEL = Model(name=M, source="/m", profiles=(PROFILE,))
N1, N2 = NodeId("n1"), NodeId("n2")


def a_life(number: int, *nodes: NodeId, state: ShardState = ShardState.READY) -> Life:
    name = replica_id(M, number)
    shards = tuple(
        Shard(
            spec=ShardSpec(
                id=shard_id(M, number, rank),
                replica=name,
                epoch=1,
                node=node,
                model=MODEL,
                profile=PROFILE,
                rank=rank,
                count=len(nodes),
            ),
            state=state,
            since=0.0,
        )
        for rank, node in enumerate(nodes)
    )
    return Life(
        Replica(id=name, model=M, profile="p", epoch=1, shards=shards, state=state, since=0.0), count=len(nodes)
    )


def a_roster() -> Roster:
    roster = Roster()
    for name in (N2, N1):
        roster.enrol(Node(id=name, cores=4, cpu_flags=frozenset(), memory_gb=16.0, memory_available_gb=8.0))
    return roster


def test_a_replica_of_two_nodes_is_shown_on_both_and_once_with_its_model() -> None:
    roster = a_roster()
    wide, one = a_life(2, N1, N2), a_life(1, N2)
    for life in (wide, one):
        roster.put(life)
    seen = picture(roster, Catalog([MODEL]), {}, (), None)
    assert [(node.node.id, node.replicas) for node in seen.nodes] == [
        (N1, (wide.replica,)),
        (N2, (one.replica, wide.replica)),
    ]
    assert [node.booked_gb for node in seen.nodes] == [3.0, 6.0]
    (model,) = seen.models
    assert (model.model, model.replicas, model.verdict) == (MODEL, (one.replica, wide.replica), None)


def test_it_tells_who_is_lost_who_is_absent_and_what_was_answered() -> None:
    roster = a_roster()
    roster.set_standing(roster.members[N1], Standing.LOST, 7.0)
    brake = Brake(lost=3, nodes=4, until=9.0)
    seen = picture(roster, Catalog([MODEL]), {M: Rejected()}, (NodeId("n9"),), brake)
    assert [(node.lost, node.lost_at) for node in seen.nodes] == [(True, 7.0), (False, None)]
    assert (seen.absent, seen.brake, seen.models[0].verdict) == (("n9",), brake, Rejected())
