from __future__ import annotations

from llmgw.core.effects import Desire
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import Endpoint, Replica, ShardSpec, ShardState, replica_id, shard_id
from llmgw.core.roster import Life, Roster

NAME = ModelName("m")
N1 = NodeId("n1")
NODE = Node(id=N1, cores=4, cpu_flags=frozenset(), memory_gb=16.0, memory_available_gb=8.0)
ENDPOINT = Endpoint(host="127.0.0.1", port=18000, served_name="m")


def a_life(
    number: int = 1, epoch: int = 1, state: ShardState = ShardState.PLACED, endpoint: Endpoint | None = None
) -> Life:
    name = replica_id(NAME, number)
    spec = ShardSpec(
        id=shard_id(NAME, number, 0),
        replica=name,
        epoch=epoch,
        node=N1,
        model=Model(name=NAME, source="/m.gguf"),
        profile=Profile(name="p", engine="e", min_memory_gb=3.0),
    )
    return Life(Replica(id=name, model=NAME, profile="p", shard=spec, state=state, since=0.0, endpoint=endpoint))


def test_an_enrolled_node_is_told_its_set_even_when_that_is_empty() -> None:
    roster = Roster()
    roster.enrol(NODE)
    assert roster.changed_desires() == [Desire(node=N1, revision=1, shards=())]
    assert roster.changed_desires() == []
    roster.enrol(NODE)
    assert roster.changed_desires() == [Desire(node=N1, revision=2, shards=())]


def test_a_set_that_is_what_it_was_is_not_told_again() -> None:
    roster = Roster()
    roster.enrol(NODE)
    roster.changed_desires()
    life = a_life()
    roster.desire(life.replica.shard)
    roster.withdraw(life)
    assert roster.changed_desires() == []


def test_only_its_own_epoch_is_desired() -> None:
    roster = Roster()
    roster.enrol(NODE)
    roster.desire(a_life(epoch=2).replica.shard)
    assert roster.is_desired(a_life(epoch=2))
    assert not roster.is_desired(a_life(epoch=1))


def test_room_is_booked_until_the_end() -> None:
    roster = Roster()
    roster.put(a_life(1, state=ShardState.STOPPING))
    roster.put(a_life(2, state=ShardState.READY))
    roster.put(a_life(3, state=ShardState.ENDED))
    assert roster.bookings() == {N1: 6.0}
    assert [roster.is_alive(replica_id(NAME, number)) for number in (1, 2, 3, 4)] == [True, True, False, False]
    assert not roster.idle()


def test_a_new_epoch_takes_the_place_of_one_that_ended_and_of_no_other() -> None:
    roster = Roster()
    roster.put(a_life(1, epoch=1, state=ShardState.ENDED))
    roster.put(a_life(1, epoch=2, state=ShardState.STOPPING))
    roster.put(a_life(1, epoch=3))
    assert [life.key[2] for life in roster.of(NAME)] == [2, 3]


def test_epochs_go_on_from_the_highest_that_was_seen() -> None:
    roster = Roster()
    name = replica_id(NAME, 1)
    assert roster.next_epoch(name) == 1
    roster.see_epoch(name, 7)
    roster.see_epoch(name, 3)
    assert roster.next_epoch(name) == 8


def test_only_ready_replicas_with_an_endpoint_are_routable_and_they_are_sorted() -> None:
    roster = Roster()
    roster.enrol(NODE)
    two = a_life(2, state=ShardState.READY, endpoint=ENDPOINT)
    one = a_life(1, state=ShardState.READY, endpoint=ENDPOINT)
    for life in (two, one, a_life(3, state=ShardState.READY), a_life(4, state=ShardState.LOADING, endpoint=ENDPOINT)):
        roster.put(life)
    assert roster.ready[NAME] == (one.replica, two.replica)
    roster.forget(one)
    roster.forget(two)
    assert roster.ready == {}


def test_what_runs_on_a_lost_node_is_not_routable_and_stays_booked() -> None:
    roster = Roster()
    member = roster.enrol(NODE)
    life = a_life(1, state=ShardState.READY, endpoint=ENDPOINT)
    roster.put(life)
    roster.mark_lost(member, lost=True)
    assert roster.ready == {}
    assert roster.lost() == {N1}
    assert roster.bookings() == {N1: 3.0}
    roster.enrol(NODE)
    assert roster.ready[NAME] == (life.replica,)
    assert roster.lost() == frozenset()
