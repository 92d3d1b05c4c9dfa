from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import NodeId
from llmgw.core.replica import (
    MAY_FOLLOW,
    Replica,
    ReplicaId,
    Shard,
    ShardAddress,
    ShardId,
    ShardSpec,
    ShardState,
    join_states,
    replica_id,
    shard_id,
)
from llmgw.core.weights import Fetch, Phase

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).map(ModelName)


def test_ids_carry_the_model_and_the_number() -> None:
    assert replica_id(ModelName("small-1.5b"), 2) == "rep-small-1.5b-2"
    assert shard_id(ModelName("small-1.5b"), 2, 0) == "shd-small-1.5b-2-0"


def test_an_address_is_named_as_in_a_sentence() -> None:
    assert str(ShardAddress(node=NodeId("n1"), shard=ShardId("shd-m-1-0"), epoch=3)) == "shd-m-1-0 on n1"


def test_a_name_with_a_slash_becomes_a_file_name() -> None:
    assert replica_id(ModelName("org/Small"), 1) == "rep-org~2fSmall-1"


@given(NAMES, st.integers(1, 99))
def test_an_id_is_always_safe_as_a_file_name(name: ModelName, number: int) -> None:
    assert re.fullmatch(r"rep-[A-Za-z0-9._~-]+-\d+", replica_id(name, number))


@given(NAMES, NAMES, st.integers(1, 99), st.integers(1, 99))
def test_two_models_never_share_an_id(one: ModelName, other: ModelName, a: int, b: int) -> None:
    assert (replica_id(one, a) == replica_id(other, b)) == ((one, a) == (other, b))


def test_every_state_may_end_and_none_follows_the_end() -> None:
    assert set(MAY_FOLLOW) == set(ShardState)
    for state, followers in MAY_FOLLOW.items():
        assert (ShardState.ENDED in followers) == (state is not ShardState.ENDED)
        assert ShardState.PLACED not in followers


def test_shards_together_are_as_far_as_the_one_behind_and_end_with_the_first_that_ends() -> None:
    placed, loading, ready = ShardState.PLACED, ShardState.LOADING, ShardState.READY
    stopping, ended = ShardState.STOPPING, ShardState.ENDED
    assert join_states([ready], 1) is ready
    assert join_states([ready, loading], 2) is loading
    assert join_states([ready, ready], 2) is ready
    # one that is not known yet may be anywhere
    assert join_states([ready], 2) is placed
    assert join_states([ready, ended], 2) is stopping
    assert join_states([ready, stopping], 2) is stopping
    assert join_states([ended, ended], 2) is ended


def a_fetching_replica(*fetches: Fetch | None) -> Replica:
    model, profile = Model(name=ModelName("m"), source="s"), Profile(name="p", engine="e")
    shards = []
    for rank, fetch in enumerate(fetches):
        spec = ShardSpec(
            id=shard_id(model.name, 1, rank),
            replica=ReplicaId("rep-m-1"),
            epoch=1,
            node=NodeId(f"n{rank}"),
            model=model,
            profile=profile,
        )
        shards.append(Shard(spec=spec, state=ShardState.PREPARING, since=0.0, fetch=fetch))
    return Replica(
        id=ReplicaId("rep-m-1"),
        model=model.name,
        profile="p",
        epoch=1,
        shards=tuple(shards),
        state=ShardState.PREPARING,
        since=0.0,
    )


def test_a_replica_waits_for_the_weights_that_take_the_longest() -> None:
    quick = Fetch(source="s", phase=Phase.FETCHING, left_seconds=1.0)
    slow = Fetch(source="s", phase=Phase.FETCHING, left_seconds=9.0)
    unknown = Fetch(source="s", phase=Phase.RESOLVING)
    assert a_fetching_replica(None).fetch is None
    assert a_fetching_replica(quick, None, slow).fetch == slow
    assert a_fetching_replica(unknown, slow).fetch == unknown
