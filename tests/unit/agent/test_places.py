from __future__ import annotations

from llmgw.agent.places import Places
from llmgw.core.replica import Endpoint, ReplicaId, ShardId, ShardReport, ShardState

SHARD = ShardId("shd-m-1-0")


def a_word(state: ShardState, epoch: int = 1, port: int | None = 18000) -> ShardReport:
    endpoint = None if port is None else Endpoint(host="127.0.0.1", port=port, served_name="m")
    return ShardReport(shard=SHARD, replica=ReplicaId("rep-m-1"), epoch=epoch, state=state, endpoint=endpoint)


def test_a_shard_is_found_where_it_said_last() -> None:
    places = Places()
    places.note(a_word(ShardState.LOADING, port=18000))
    places.note(a_word(ShardState.READY, port=18001))
    assert places.find(SHARD, 1) == 18001


def test_what_does_not_run_here_or_has_no_port_yet_is_not_found() -> None:
    places = Places()
    assert places.find(SHARD, 1) == "no_shard"
    places.note(a_word(ShardState.LAUNCHING, port=None))
    assert places.find(SHARD, 1) == "no_shard"


def test_another_try_of_a_shard_is_not_the_one_that_was_meant() -> None:
    places = Places()
    places.note(a_word(ShardState.READY, epoch=2))
    assert places.find(SHARD, 1) == "wrong_epoch"


def test_what_has_ended_is_not_found_and_its_late_end_takes_nothing_from_the_next_try() -> None:
    places = Places()
    places.note(a_word(ShardState.READY, epoch=1))
    places.note(a_word(ShardState.READY, epoch=2))
    places.note(a_word(ShardState.ENDED, epoch=1, port=None))
    assert places.find(SHARD, 2) == 18000
    places.note(a_word(ShardState.ENDED, epoch=2, port=None))
    assert places.find(SHARD, 2) == "no_shard"
