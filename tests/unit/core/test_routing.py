from __future__ import annotations

from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import NodeId
from llmgw.core.replica import Replica, ReplicaId, Shard, ShardSpec, ShardState, replica_id, shard_id
from llmgw.core.routing import choose

NAME = ModelName("m")
PROFILE = Profile(name="p", engine="e")


def a_replica(number: int) -> Replica:
    name = replica_id(NAME, number)
    spec = ShardSpec(
        id=shard_id(NAME, number, 0),
        replica=name,
        epoch=1,
        node=NodeId("n1"),
        model=Model(name=NAME, source="/m.gguf"),
        profile=PROFILE,
    )
    shard = Shard(spec=spec, state=ShardState.READY, since=0.0)
    return Replica(id=name, model=NAME, profile="p", epoch=1, shards=(shard,), state=ShardState.READY, since=0.0)


ONE, TWO, THREE = a_replica(1), a_replica(2), a_replica(3)


def test_no_replica_serves_when_there_is_none() -> None:
    assert choose((), {}) is None


def test_the_only_replica_serves() -> None:
    assert choose((ONE,), {ONE.id: 7}) is ONE


def test_the_replica_with_the_fewest_requests_serves() -> None:
    assert choose((ONE, TWO, THREE), {ONE.id: 2, TWO.id: 1, THREE.id: 3}) is TWO


def test_a_replica_without_an_entry_has_no_requests() -> None:
    assert choose((ONE, TWO), {ONE.id: 1}) is TWO


def test_of_equal_replicas_the_first_serves() -> None:
    assert choose((ONE, TWO), {ONE.id: 1, TWO.id: 1}) is ONE


def test_a_replica_that_failed_this_request_is_passed_over() -> None:
    assert choose((ONE, TWO), {TWO.id: 9}, {ONE.id}) is TWO
    assert choose((ONE,), {}, {ReplicaId(ONE.id)}) is None
