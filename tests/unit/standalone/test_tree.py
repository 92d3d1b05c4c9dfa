"""Both halves in one process: how they are joined, when they are ready, and what a failure says."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from llmgw.config.node import NodeConfig
from llmgw.core.events import CatalogChanged, NodeRegistered, ShardChanged, Wakeup
from llmgw.core.model import Model, ModelName, Profile, Scaling
from llmgw.core.node import EngineFound, Node
from llmgw.core.replica import Endpoint, ShardReport, ShardState
from llmgw.errors import EngineFailed, UsageError
from llmgw.server.tree import ServerHalf
from llmgw.standalone.tree import (
    NODE,
    MemoryLink,
    Visit,
    _attend,
    _raise_failure,
    _say_ready,
    _watch_signals,
    run,
)

TINY = Model(
    name=ModelName("tiny"),
    source="/tiny.gguf",
    scaling=Scaling(min=1, max=1),
    profiles=(Profile(name="p", engine="e", min_memory_gb=1.0),),
)


def a_node(memory_gb: float = 16.0) -> Node:
    return Node(
        id=NODE,
        cores=2,
        cpu_flags=frozenset(),
        memory_gb=memory_gb,
        memory_available_gb=memory_gb,
        engines=(EngineFound(engine="e", program=("e",)),),
    )


@pytest.fixture
def half() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield ServerHalf(config=NodeConfig(), engines={}, listening=listening, created=0, write_log=lambda text: None)


def move(half: ServerHalf, *events: Any) -> None:
    """Let things happen to the fleet, without a scheduler's task."""
    for event in events:
        half.scheduler._carry_out(half.scheduler.fleet.handle(event, 0.0))


def place(half: ServerHalf, node: Node | None = None) -> None:
    move(half, CatalogChanged(models=(TINY,)), NodeRegistered(node=node or a_node()), Wakeup(), Wakeup())


def report(half: ServerHalf, state: ShardState, **facts: Any) -> None:
    ((replica,),) = (each.replicas for each in half.scheduler.fleet.statistics().models)
    spec = replica.shard
    endpoint = Endpoint(host="127.0.0.1", port=1, served_name="tiny") if state is ShardState.READY else None
    told = ShardReport(shard=spec.id, replica=spec.replica, epoch=spec.epoch, state=state, endpoint=endpoint, **facts)
    move(half, ShardChanged(node=NODE, report=told))


async def test_the_link_carries_both_ways(half: ServerHalf, nursery: trio.Nursery) -> None:
    link = MemoryLink(half.scheduler, NODE)
    await nursery.start(half.scheduler.serve)
    await half.scheduler.post(CatalogChanged(models=(TINY,)))
    await link.report(NodeRegistered(node=a_node()))
    revision = 0
    with trio.fail_after(10):
        while not (desire := await link.desired(revision)).shards:
            revision = desire.revision
    assert desire.shards[0].model is TINY


# -- ready


async def test_ready_is_said_when_every_model_that_is_to_run_does(half: ServerHalf) -> None:
    place(half)
    said: list[str] = []
    asleep = Model(name=ModelName("asleep"), source="x", scaling=Scaling(min=0, max=1))
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_say_ready, Visit(question=None), half, (TINY, asleep), said.append)
            await trio.testing.wait_all_tasks_blocked()
            report(half, ShardState.LOADING)
            await trio.testing.wait_all_tasks_blocked()
            assert said == []
            report(half, ShardState.READY)
    assert said == [half.base_url]


def fail_loading(half: ServerHalf) -> None:
    place(half)
    report(half, ShardState.ENDED, cause="out of memory", lines=("one", "two"))


def fail_placing(half: ServerHalf) -> None:
    place(half, a_node(memory_gb=0.1))


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (fail_loading, "tiny (/tiny.gguf) can't be started: out of memory"),
        (fail_placing, "tiny can't be placed: "),
    ],
)
async def test_who_asks_one_question_hears_the_first_failure(
    half: ServerHalf, fail: Callable[[ServerHalf], None], words: str
) -> None:
    """And its last lines once: the log has them."""
    fail(half)
    with pytest.raises(EngineFailed) as caught, trio.fail_after(10):
        await _say_ready(Visit(question="Why?"), half, (TINY,), lambda url: None)
    assert words in caught.value.message
    assert caught.value.lines == ()


async def test_what_fails_while_attending_stops_the_program_in_good_order(half: ServerHalf) -> None:
    """An exception that left the nursery would cancel the agent, and leave its engines running."""
    fail_loading(half)
    visit, stopping = Visit(question="Why?"), trio.Event()
    await _attend(visit, half, (TINY,), lambda url: None, stopping)
    assert isinstance(visit.failure, EngineFailed)
    assert stopping.is_set()
    assert not visit.answered


async def test_nobody_who_reads_that_it_is_ready_is_no_failure(half: ServerHalf) -> None:
    def on_ready(url: str) -> None:
        raise BrokenPipeError

    place(half)
    report(half, ShardState.READY)
    visit, stopping = Visit(question=None), trio.Event()
    with trio.fail_after(10):
        await _attend(visit, half, (TINY,), on_ready, stopping)
    assert visit.failure is None
    assert not stopping.is_set()


async def test_a_reader_that_does_not_read_keeps_nobody_from_stopping(half: ServerHalf) -> None:
    blocked, release = trio.Event(), threading.Event()

    def on_ready(url: str) -> None:
        trio.from_thread.run_sync(blocked.set)
        release.wait(60)

    place(half)
    report(half, ShardState.READY)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_say_ready, Visit(question=None), half, (TINY,), on_ready)
            await blocked.wait()
            nursery.cancel_scope.cancel()
    release.set()


def test_a_model_that_only_waits_is_no_failure(half: ServerHalf) -> None:
    place(half)
    _raise_failure(half)


# -- the end


async def test_the_first_signal_stops_and_the_second_hurries(half: ServerHalf) -> None:
    hurried: list[bool] = []

    class Watched:
        def hurry(self) -> None:
            hurried.append(True)

    stopping = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_signals, stopping, Watched())
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(10):
            signal.raise_signal(signal.SIGTERM)
            await stopping.wait()
        assert hurried == []
        with trio.fail_after(10):
            signal.raise_signal(signal.SIGINT)
            while not hurried:  # noqa: ASYNC110 - the signal comes by its own way
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()


def test_a_port_that_is_taken_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = NodeConfig(port=taken.getsockname()[1])
        with pytest.raises(UsageError, match="--port"):
            run(config, (), on_ready=lambda url: None)


@pytest.mark.slow
def test_without_models_it_is_ready_at_once_and_stops_when_it_is_told(tmp_path: Path) -> None:
    said: list[str] = []

    def on_ready(url: str) -> None:
        said.append(url)
        signal.raise_signal(signal.SIGINT)

    thresholds = gc.get_threshold()
    try:
        run(NodeConfig(port=0, state=str(tmp_path / "s"), cache=str(tmp_path / "c")), (), on_ready=on_ready)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    assert len(said) == 1
    assert said[0].startswith("http://127.0.0.1:")
