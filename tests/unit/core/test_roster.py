from __future__ import annotations

from dataclasses import replace

from llmgw.core.effects import Desire
from llmgw.core.events import NodeMarked
from llmgw.core.hosts import Standing
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import Gpu, Node, NodeId
from llmgw.core.replica import Endpoint, Replica, Shard, ShardSpec, ShardState, replica_id, shard_id
from llmgw.core.roster import Life, Roster

NAME = ModelName("m")
N1, N2 = NodeId("n1"), NodeId("n2")
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
    shard = Shard(spec=spec, state=state, since=0.0, endpoint=endpoint)
    return Life(Replica(id=name, model=NAME, profile="p", epoch=epoch, shards=(shard,), state=state, since=0.0))


def a_pair(epoch: int = 1, gpus: tuple[str, ...] = ("GPU-1",)) -> Life:
    """A replica of two nodes."""
    name = replica_id(NAME, 1)
    profile = Profile(name="p", engine="e", tp=2, nodes=2, min_memory_gb=3.0)
    model = Model(name=NAME, source="/m.gguf", profiles=(profile,))
    specs = [
        ShardSpec(
            id=shard_id(NAME, 1, rank),
            replica=name,
            epoch=epoch,
            node=node,
            model=model,
            profile=profile,
            rank=rank,
            count=2,
            gpus=gpus,
        )
        for rank, node in enumerate((N1, N2))
    ]
    shards = tuple(Shard(spec=spec, state=ShardState.PLACED, since=0.0) for spec in specs)
    replica = Replica(id=name, model=NAME, profile="p", epoch=epoch, shards=shards, state=ShardState.PLACED, since=0.0)
    return Life(replica, count=2)


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
    roster.enrol(NODE)
    roster.put(a_life(1, state=ShardState.STOPPING))
    roster.put(a_life(2, state=ShardState.READY))
    roster.put(a_life(3, state=ShardState.ENDED))
    (host,) = roster.hosts()
    assert (host.booked_gb, host.free_gb, host.replicas) == (6.0, 10.0, {NAME: 2})
    assert [roster.is_alive(replica_id(NAME, number)) for number in (1, 2, 3, 4)] == [True, True, False, False]
    assert not roster.idle()


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
    roster.set_standing(member, Standing.SILENT)
    assert roster.ready[NAME] == (life.replica,)
    roster.set_standing(member, Standing.LOST, 7.0)
    assert roster.ready == {}
    assert roster.lost_at == {N1: 7.0}
    assert roster.host(member).booked_gb == 3.0
    roster.enrol(NODE)
    assert roster.ready[NAME] == (life.replica,)
    assert roster.lost_at == {}


def test_a_replica_of_two_nodes_is_as_far_as_the_one_behind() -> None:
    roster = Roster()
    for node in (NODE, replace(NODE, id=N2)):
        roster.enrol(node)
    life = a_pair()
    roster.put(life)
    one, two = life.replica.shards
    life.set_shard(replace(one, state=ShardState.READY, endpoint=ENDPOINT), 1.0)
    roster.put(life)
    assert (life.replica.state, life.replica.since, roster.ready) == (ShardState.PLACED, 0.0, {})
    life.set_shard(replace(two, state=ShardState.READY), 2.0)
    roster.put(life)
    assert (life.replica.state, life.replica.since) == (ShardState.READY, 2.0)
    assert roster.ready[NAME] == (life.replica,)
    roster.set_standing(roster.members[N2], Standing.LOST, 3.0)
    assert roster.ready == {}


def test_the_gpus_of_each_shard_are_booked_on_its_own_node_until_it_has_ended() -> None:
    roster = Roster()
    for node in (NODE, replace(NODE, id=N2)):
        roster.enrol(node)
    life = a_pair()
    roster.put(life)
    assert [host.booked for host in roster.hosts()] == [{"GPU-1": "rep-m-1"}] * 2
    assert roster.is_running(life)
    life.set_shard(replace(life.shard_on(N1), state=ShardState.ENDED), 1.0)
    roster.put(life)
    assert [host.booked for host in roster.hosts()] == [{}, {"GPU-1": "rep-m-1"}]
    roster.set_standing(roster.members[N2], Standing.LOST, 2.0)
    assert not roster.is_running(life)


def test_what_runs_on_gpus_that_nobody_named_has_all_of_its_node() -> None:
    cards = tuple(
        Gpu(uuid=f"GPU-{n}", index=n, gpu_class="h100-80g", name="H100", memory_gb=85.0, memory_used_gb=0.0)
        for n in range(2)
    )
    roster = Roster()
    roster.enrol(replace(NODE, gpus=cards))
    life = a_life()
    spec = replace(life.replica.shard, profile=replace(life.replica.shard.profile, tp=2))
    life.set_shard(replace(life.shard_on(N1), spec=spec), 0.0)
    roster.put(life)
    assert roster.hosts()[0].booked == {"GPU-0": "rep-m-1", "GPU-1": "rep-m-1"}


def test_what_an_operator_says_lies_over_what_a_node_says() -> None:
    roster = Roster()
    roster.mark(NodeMarked(node=N1, cordoned=True, labels={"a": "2", "b": None}))
    roster.enrol(replace(NODE, labels={"a": "1", "b": "1", "c": "1"}))
    (host,) = roster.hosts()
    assert host.cordoned
    assert host.labels == {"a": "2", "c": "1"}
    roster.mark(NodeMarked(node=N1))
    (host,) = roster.hosts()
    assert not host.cordoned
    assert host.labels == {"a": "1", "b": "1", "c": "1"}


def test_a_node_that_loaded_a_source_holds_it_while_the_catalog_has_it() -> None:
    roster = Roster()
    roster.enrol(NODE)
    for _ in range(2):
        roster.note_held(N1, "/m.gguf")
    roster.note_held(N1, "/n.gguf")
    roster.forget_held(["/m.gguf", "/n.gguf"])
    assert roster.hosts()[0].holds == {"/m.gguf", "/n.gguf"}
    roster.forget_held(["/m.gguf"])
    assert roster.hosts()[0].holds == {"/m.gguf"}


def test_a_node_that_says_what_it_has_holds_of_fetched_sources_those_and_no_others() -> None:
    roster = Roster()
    assert not roster.note_stored(N1, frozenset({"hf:o/r/f.gguf"}), {})
    roster.enrol(NODE)
    for source in ("/m.gguf", "hf:o/r/old.gguf"):
        roster.note_held(N1, source)
    assert roster.hosts()[0].holds == {"/m.gguf", "hf:o/r/old.gguf"}
    stored = frozenset({"hf:o/r/f.gguf", "/mnt/n.gguf"})
    assert roster.note_stored(N1, stored, {})
    assert not roster.note_stored(N1, stored, {})
    assert roster.hosts()[0].holds == {"/m.gguf", "hf:o/r/f.gguf", "/mnt/n.gguf"}
    assert roster.note_stored(N1, stored, {"hf:o/r/g.gguf": 5.0})
    assert roster.hosts()[0].begun == {"hf:o/r/g.gguf": 5.0}
    roster.remove(N1)
    roster.enrol(NODE)
    assert (roster.hosts()[0].holds, roster.hosts()[0].begun) == (frozenset(), {})


def test_a_node_that_is_removed_is_forgotten_with_all_that_was_said_of_it() -> None:
    roster = Roster()
    roster.enrol(NODE)
    roster.mark(NodeMarked(node=N1, cordoned=True))
    life = a_life()
    roster.put(life)
    assert roster.remove(N1) == (Desire(node=N1, revision=1, shards=()), [life])
    assert (roster.hosts(), roster.is_lost(N1), roster.is_desired(life)) == ((), True, False)
    roster.withdraw(life)
    roster.enrol(NODE)
    assert not roster.hosts()[0].cordoned


# Room that is kept

OTHER = ModelName("other")


def enrolled() -> Roster:
    roster = Roster()
    for name in (N1, N2):
        roster.enrol(replace(NODE, id=name))
    return roster


def free_gb(roster: Roster, asker: ModelName) -> list[float]:
    """Of each node, as this model finds it."""
    return [host.free_gb for host in roster.hosts_for(asker)]


def test_room_that_is_kept_is_free_for_its_model_and_for_no_other() -> None:
    roster = enrolled()
    roster.reserve(NAME, a_pair().replica.shards)
    assert (free_gb(roster, NAME), free_gb(roster, OTHER)) == ([16.0, 16.0], [13.0, 13.0])
    assert [host.booked for host in roster.hosts_for(OTHER)] == [{"GPU-1": "rep-m-1"}] * 2
    assert [host.booked for host in roster.hosts_for(NAME)] == [{}, {}]
    assert roster.release(NAME)
    assert not roster.release(NAME)
    assert free_gb(roster, OTHER) == [16.0, 16.0]


def test_the_room_of_two_that_have_ended_is_kept_and_that_of_one_only_where_it_was_last() -> None:
    roster = enrolled()
    one, two = a_life(1).replica.shard, a_life(2).replica.shard
    for spec in (one, two):
        roster.reserve(NAME, (Shard(spec=spec, state=ShardState.ENDED, since=0.0),))
    assert free_gb(roster, OTHER) == [10.0, 16.0]
    roster.reserve(NAME, (Shard(spec=replace(one, epoch=2, node=N2), state=ShardState.ENDED, since=0.0),))
    assert free_gb(roster, OTHER) == [13.0, 13.0]


def test_a_card_is_kept_once_and_what_runs_on_it_is_named() -> None:
    roster = enrolled()
    roster.reserve(NAME, a_pair().replica.shards)
    # (one that had made way had the same card)
    spec = replace(a_life(7).replica.shard, gpus=("GPU-1",))
    roster.reserve(NAME, (Shard(spec=spec, state=ShardState.ENDED, since=0.0),))
    assert free_gb(roster, OTHER) == [13.0, 13.0]
    roster.put(a_pair(epoch=2))
    assert [dict(host.booked) for host in roster.hosts_for(OTHER)] == [{"GPU-1": "rep-m-1"}] * 2


def test_room_is_kept_on_a_node_that_is_removed_for_nobody() -> None:
    roster = enrolled()
    roster.reserve(NAME, a_pair().replica.shards)
    roster.remove(N2)
    assert free_gb(roster, OTHER) == [13.0]
    assert roster.release(NAME)
    assert free_gb(roster, OTHER) == [16.0]
