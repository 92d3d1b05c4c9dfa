from __future__ import annotations

from dataclasses import replace

from llmgw.core.brake import Brake
from llmgw.core.catalog import Catalog
from llmgw.core.events import NodeMarked
from llmgw.core.hosts import Standing
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import Node, NodeId
from llmgw.core.picture import Draining, picture
from llmgw.core.placement import Rejected, place
from llmgw.core.replica import Replica, Shard, ShardSpec, ShardState, replica_id, shard_id
from llmgw.core.rolling import Failed, Rollout
from llmgw.core.roster import Life, Roster
from llmgw.core.state import State

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


def a_state(roster: Roster) -> State:
    state = State()
    state.roster, state.catalog = roster, Catalog([MODEL])
    state.rolls.change(state.catalog, {}, frozenset())
    return state


def test_a_replica_of_two_nodes_is_shown_on_both_and_once_with_its_model() -> None:
    roster = a_roster()
    wide, one = a_life(2, N1, N2), a_life(1, N2)
    for life in (wide, one):
        roster.put(life)
    seen = picture(a_state(roster), None)
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
    state = a_state(roster)
    state.verdicts[M] = Rejected()
    state.absent = {NodeId("n9"): 3.0}
    seen = picture(state, brake)
    assert [(node.lost, node.lost_at) for node in seen.nodes] == [(True, 7.0), (False, None)]
    assert (seen.absent, seen.brake, seen.models[0].verdict) == (("n9",), brake, Rejected())


def test_it_tells_which_models_are_held_which_roll_and_which_have_failed() -> None:
    state = a_state(a_roster())
    old = a_life(1, N1)
    old.count = 1
    state.roster.desire(old.replica.shard)
    state.roster.put(old)
    state.roster.put(a_life(2, N2, state=ShardState.ENDED))
    state.held = frozenset({M})
    (model,) = picture(state, None).models
    assert (model.held, model.rollout, model.failed) == (True, None, None)
    written = replace(MODEL, source="/new")
    state.catalog = Catalog([written])
    state.rolls.change(state.catalog, {}, frozenset())
    assert picture(state, None).models[0].rollout == Rollout(outdated=(old.replica.id,))
    state.verdicts[M] = place(written, state.roster.hosts(), {}, 0.0)
    assert picture(state, None).models[0].rollout == Rollout(outdated=(old.replica.id,), waits="2 no_engine")
    state.rolls.change(Catalog([MODEL]), {}, frozenset())
    state.rolls.change(state.catalog, {M: MODEL}, frozenset({M}))
    (model,) = picture(state, None).models
    assert model.failed == Failed(model=written, by=MODEL, why="it failed before this server began")
    # (what runs is as it is to be)
    assert model.rollout is None


def test_it_tells_what_is_left_on_nodes_that_are_drained() -> None:
    roster = a_roster()
    for life in (a_life(1, N1), a_life(2, N1, N2), a_life(3, N1, state=ShardState.ENDED)):
        roster.put(life)
    roster.mark(NodeMarked(node=N1, draining=True, drain_until=70.0))
    roster.mark(NodeMarked(node=N2, cordoned=True))
    roster.mark(NodeMarked(node=NodeId("n9"), draining=True))
    assert picture(a_state(roster), None).draining == {
        N1: Draining(until=70.0, left=(replica_id(M, 1), replica_id(M, 2)))
    }
