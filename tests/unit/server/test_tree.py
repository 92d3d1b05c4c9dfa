"""The control plane's tree: what stands when it says that it does, and how it ends."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator

import pytest
import trio

from llmgw.config.node import NodeConfig, Timeouts
from llmgw.core.effects import Drain, Effect, Proven
from llmgw.core.events import CatalogChanged, Demand, Drained, Event, Wakeup
from llmgw.core.fleet import Fleet
from llmgw.core.learned import Fact
from llmgw.core.model import Model
from llmgw.core.node import NodeId
from llmgw.core.replica import Replica, Shard, ShardSpec, ShardState, replica_id, shard_id
from llmgw.door.listener import bind
from llmgw.server.tree import ServerHalf, serve_server


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    sock = bind("127.0.0.1", 0)
    yield sock
    sock.close()


@pytest.fixture
def half(listening: socket.socket) -> Iterator[ServerHalf]:
    """A server half to be served; what it does to the collector is undone."""
    thresholds = gc.get_threshold()
    lines: list[str] = []
    config = NodeConfig(timeouts=Timeouts(drain=5))
    yield ServerHalf(config=config, engines={}, listening=listening, created=17, write_log=lines.append)
    gc.unfreeze()
    gc.set_threshold(*thresholds)


async def ask(half: ServerHalf, path: str) -> bytes:
    stream = await trio.open_tcp_stream(*half.listening.getsockname())
    async with stream:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return b"".join([data async for data in stream])


@pytest.mark.slow
async def test_a_started_tree_answers_and_a_drained_one_ends(half: ServerHalf, a_model: object) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_server, half)
            assert (await ask(half, "/health")).startswith(b"HTTP/1.1 200 OK\r\n")
            await half.scheduler.post(CatalogChanged(models=(a_model(),)))  # type: ignore[operator]
            page = await ask(half, "/")
            assert b"text/html" in page
            assert b"tiny" in page
            assert b'"tiny"' in await ask(half, "/v1/models")
            assert half.base_url == f"http://127.0.0.1:{half.listening.getsockname()[1]}"
            await half.drain(30)
            half.hurry()
            with pytest.raises(OSError, match="all attempts to connect"):
                await ask(half, "/health")
            nursery.cancel_scope.cancel()
    # the listening socket was closed with the door
    assert len(os.listdir("/proc/self/fd")) <= descriptors


class Shelf:
    """What a later server would find."""

    def __init__(self) -> None:
        self.kept: list[object] = []

    async def proven(self, model: Model) -> None:
        self.kept.append(("proven", model.name))

    async def reverted(self, model: Model, by: Model, why: str) -> None:
        self.kept.append(("reverted", model.name, by.name, why))

    async def learn(self, fact: Fact) -> None:
        self.kept.append(fact)


class Asking(Fleet):
    """Hears everything, and asks for what the test has written down for the next event."""

    def __init__(self) -> None:
        super().__init__()
        self.next: list[Effect] = []
        self.heard: list[Event] = []
        self.answered = trio.Event()

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.heard.append(event)
        if isinstance(event, Demand) and event.answered:
            self.answered.set()
        effects, self.next = self.next, []
        return effects


@pytest.mark.slow
async def test_a_started_tree_drains_tells_of_demand_and_keeps_what_is_to_be_known(
    half: ServerHalf, a_model: Callable[..., Model]
) -> None:
    model, shelf, fleet = a_model(), Shelf(), Asking()
    half.scheduler.fleet, half.keeper = fleet, shelf
    with half.counted(a_replica(model)):
        # nobody has come in yet, and nothing can be in flight
        pass
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_server, half)
            replica = a_replica(model)
            with half.counted(replica):
                fleet.next = [Drain(replica=replica.id, epoch=1, number=3), Proven(model=model)]
                await half.scheduler.settle(Wakeup())
                await half.scheduler.settle(Wakeup())
                assert not any(isinstance(event, Drained) for event in fleet.heard)
            await half.scheduler.settle(Wakeup())
            assert Drained(replica=replica.id, epoch=1, number=3) in fleet.heard
            await fleet.answered.wait()
            nursery.cancel_scope.cancel()
    assert shelf.kept == [("proven", model.name)]


def a_replica(model: Model) -> Replica:
    spec = ShardSpec(
        id=shard_id(model.name, 1, 0),
        replica=replica_id(model.name, 1),
        epoch=1,
        node=NodeId("n1"),
        model=model,
        profile=model.profiles[0],
    )
    shard = Shard(spec=spec, state=ShardState.READY, since=0.0)
    return Replica(
        id=spec.replica,
        model=model.name,
        profile=spec.profile.name,
        epoch=1,
        shards=(shard,),
        state=ShardState.READY,
        since=0.0,
    )


def test_what_is_announced_is_counted_with_the_rest(half: ServerHalf) -> None:
    assert "llmgw_fleet_events_total" in half.counters.by_name


async def test_a_half_that_never_started_can_be_drained(half: ServerHalf) -> None:
    half.hurry()
    with trio.fail_after(10):
        await half.drain(30)


def test_the_base_url_of_an_address_of_the_sixth_version_has_brackets() -> None:
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")
        half = ServerHalf(config=NodeConfig(), engines={}, listening=sock, created=0, write_log=print)
        assert half.base_url == f"http://[::1]:{sock.getsockname()[1]}"
