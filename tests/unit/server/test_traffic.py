"""What is counted, and what is told of it while the fleet's inbox is full; the rest is in test_gateway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import trio
import trio.testing

from llmgw.core.events import Demand, Drained, Event, Wakeup
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import Replica, Shard, ShardSpec, ShardState, replica_id, shard_id
from llmgw.server.scheduler import INBOX_EVENTS, Scheduler
from llmgw.server.traffic import Traffic

M = ModelName("tiny")


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(Fleet())


@pytest.fixture
def traffic(scheduler: Scheduler) -> Traffic:
    return Traffic(scheduler)


@pytest.fixture
def replica(a_model: Callable[..., Model]) -> Replica:
    """The first replica, of epoch 1."""
    model = a_model()
    spec = ShardSpec(
        id=shard_id(M, 1, 0),
        replica=replica_id(M, 1),
        epoch=1,
        node=NodeId("n1"),
        model=model,
        profile=model.profiles[0],
    )
    shard = Shard(spec=spec, state=ShardState.READY, since=0.0)
    return Replica(id=spec.replica, model=M, profile="p", epoch=1, shards=(shard,), state=ShardState.READY, since=0.0)


def taken(scheduler: Scheduler) -> list[Event]:
    """What the fleet is handed, in its order."""
    found: list[Event] = []
    while True:
        try:
            item = scheduler._outbox.receive_nowait()
        except trio.WouldBlock:
            return found
        scheduler._make_room()
        found += [] if isinstance(item, trio.Event | Wakeup) else [item]


async def fill(scheduler: Scheduler) -> None:
    for _ in range(INBOX_EVENTS):
        await scheduler.post(Wakeup())


def test_only_the_newest_epoch_counts_as_load(traffic: Traffic, replica: Replica) -> None:
    first = traffic.open(replica)
    traffic.begin(first)
    second = traffic.open(replace(replica, epoch=2))
    assert traffic.in_flight == {}
    traffic.begin(second)
    traffic.begin(second)
    traffic.end(first, answered=False)
    assert traffic.in_flight == {replica.id: 2}
    # one that another has taken the place of may be asked by its name all the same
    again = traffic.open(replica)
    assert again is not second
    traffic.begin(again)
    assert traffic.open(replica) is again
    assert traffic.in_flight == {replica.id: 2}
    traffic.end(again, answered=False)
    assert traffic._earlier == {}


def test_an_earlier_epoch_is_drained_by_its_own_requests(
    traffic: Traffic, replica: Replica, scheduler: Scheduler
) -> None:
    first = traffic.open(replica)
    traffic.begin(first)
    traffic.begin(first)
    second = traffic.open(replace(replica, epoch=2))
    traffic.begin(second)
    traffic.drain(replica.id, 1, 3)
    traffic.end(second, answered=False)
    traffic.end(first, answered=False)
    assert taken(scheduler) == []
    traffic.end(first, answered=False)
    assert taken(scheduler) == [Drained(replica=replica.id, epoch=1, number=3)]
    # an epoch that nobody has asked yet
    traffic.drain(replica.id, 3, 4)
    assert taken(scheduler) == [Drained(replica=replica.id, epoch=3, number=4)]


async def test_many_who_come_at_once_are_one_word(traffic: Traffic, scheduler: Scheduler) -> None:
    await fill(scheduler)
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            traffic.join(M)
            nursery.start_soon(traffic.tell_waiting, M)
        await trio.testing.wait_all_tasks_blocked()
        words = taken(scheduler)
        await trio.testing.wait_all_tasks_blocked()
        words += taken(scheduler)
    assert words == [Demand(model=M, waiting=100)]


async def test_a_word_that_came_late_is_put_right(traffic: Traffic, scheduler: Scheduler, replica: Replica) -> None:
    await fill(scheduler)
    traffic.join(M)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(traffic.tell_waiting, M)
        await trio.testing.wait_all_tasks_blocked()
        flight = traffic.open(replica)
        traffic.begin(flight)
        traffic.tell_changes()
        words = taken(scheduler)
        await trio.testing.wait_all_tasks_blocked()
        words += taken(scheduler)
    now = Demand(model=M, waiting=1, in_flight={replica.id: 1}, answered=True)
    # the older word arrives after the newer one
    assert words == [now, Demand(model=M, waiting=1)]
    traffic.tell_changes()
    assert taken(scheduler) == [replace(now, answered=False)]
    traffic.tell_changes()
    assert taken(scheduler) == []


async def test_a_word_that_was_never_sent_is_not_taken_for_told(traffic: Traffic, scheduler: Scheduler) -> None:
    await fill(scheduler)
    traffic.join(M)
    traffic.join(M)
    with trio.move_on_after(0):
        await traffic.tell_waiting(M)
    # its client has left; the other one waits
    traffic.leave(M, asked=False)
    assert taken(scheduler) == []
    traffic.tell_changes()
    assert taken(scheduler) == [Demand(model=M, waiting=1)]
    traffic.leave(M, asked=False)
    assert taken(scheduler) == [Demand(model=M)]
    traffic.tell_changes()
    assert taken(scheduler) == []
    assert traffic._told == {}


def test_a_model_that_is_gone_is_forgotten_replica_by_replica(traffic: Traffic, replica: Replica) -> None:
    other = replace(replica, id=replica_id(M, 2))
    flight = traffic.open(replica)
    traffic.begin(flight)
    traffic.open(other)
    assert traffic.models() == [M]
    assert traffic.forget(M) == [other.id]
    traffic.end(flight, answered=False)
    assert traffic.forget(M) == [replica.id]
    assert traffic.models() == []
    assert traffic.forget(M) == []
