"""Weights that are fetched: once for all who wait on a node, on from where it was, and nothing is launched before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from depot import SIZE_BYTES
from simulator.faults import (
    AddModel,
    AgentCrash,
    DiskFull,
    EditModel,
    OriginDown,
    RemoveModel,
    Scenario,
    SpoiledWeights,
)
from simulator.linked import LinkedWorld, tell_linked
from simulator.site import MODELS
from simulator.stage import was_said

from llmgw.core.node import NodeId
from llmgw.core.replica import ShardState
from llmgw.core.weights import Fetch, Phase

pytestmark = pytest.mark.slow

NODE = NodeId("n00")
SOURCE = MODELS["single"].source
Tell = Callable[[Callable[[LinkedWorld], Iterator[float]]], None]


@pytest.fixture
def tell() -> Tell:
    """Play a story on one node of eight GPUs, whose agent has to fetch the only model's weights."""
    scenario = Scenario(seed=1, nodes=1, hours=12.0, models=("single",))
    return lambda story: tell_linked(story, scenario)


def fetches(world: LinkedWorld) -> list[Fetch]:
    """What the server knows of those that shards wait for."""
    found = [replica.fetch for replica in world.books().replicas]
    return [fetch for fetch in found if fetch is not None]


def sent(world: LinkedWorld) -> int:
    return world.origin.sent[NODE, SOURCE]


def test_eight_shards_on_one_node_make_one_fetch(tell: Tell) -> None:
    def story(world: LinkedWorld) -> Iterator[float]:
        world.strike(EditModel(at=world.now, model="single", min=8, max=8))
        yield 15.0
        replicas = world.books().replicas
        assert [replica.state for replica in replicas] == [ShardState.PREPARING] * 8
        assert [(fetch.source, fetch.phase) for fetch in fetches(world)] == [(SOURCE, Phase.FETCHING)] * 8
        assert all((replica.progress or "").startswith("fetching single.fake: ") for replica in replicas)
        assert world.engines() == []
        yield 200.0
        assert len(world.ready("single")) == 8
        assert world.origin.begun == [(NODE, SOURCE)]
        assert sent(world) == SIZE_BYTES

    tell(story)


def test_a_fetch_ends_with_the_last_who_waits_and_goes_on_with_the_next(tell: Tell) -> None:
    def story(world: LinkedWorld) -> Iterator[float]:
        yield 15.0
        (first, *_) = fetches(world)
        world.strike(RemoveModel(at=world.now, model="single"))
        yield 2.0
        come = sent(world)
        assert first.done_bytes <= come < SIZE_BYTES
        yield 100.0
        assert sent(world) == come
        assert world.books().replicas == ()
        world.strike(AddModel(at=world.now, model="single"))
        yield 5.0
        assert fetches(world)[0].done_bytes >= come
        yield 200.0
        assert len(world.ready("single")) == 2
        assert sent(world) == SIZE_BYTES
        assert len(world.origin.begun) == 2

    tell(story)


def test_an_agent_that_is_killed_while_it_fetches_goes_on_when_it_is_back(tell: Tell) -> None:
    def story(world: LinkedWorld) -> Iterator[float]:
        yield 15.0
        world.strike(AgentCrash(at=world.now, node=NODE, seconds=20.0))
        yield 10.0
        come = sent(world)
        assert 0 < come < SIZE_BYTES
        yield 200.0
        assert len(world.ready("single")) == 2
        assert sent(world) == SIZE_BYTES
        # What it runs by stays in use over the death of the agent.
        world.strike(AgentCrash(at=world.now, node=NODE, seconds=5.0))
        yield 30.0
        server = world.server
        assert server is not None
        (cached,) = server.weights.known[NODE].cached
        assert (cached.source, cached.in_use) == (SOURCE, True)

    tell(story)


def test_nobody_answers_where_weights_come_from_and_that_is_told_with_what_to_do(tell: Tell) -> None:
    def story(world: LinkedWorld) -> Iterator[float]:
        yield 12.0
        world.strike(OriginDown(at=world.now, seconds=100.0))
        yield 30.0
        assert all((fetch.stalled_seconds or 0) >= 20.0 for fetch in fetches(world))
        assert any("stalled for" in (replica.progress or "") for replica in world.books().replicas)
        yield 40.0
        assert was_said(world, "nobody answers for hf:org/single/single.fake")
        yield 400.0
        assert len(world.ready("single")) == 2
        assert sent(world) == SIZE_BYTES

    tell(story)


def test_what_is_not_as_its_origin_says_is_fetched_anew(tell: Tell) -> None:
    def story(world: LinkedWorld) -> Iterator[float]:
        world.strike(SpoiledWeights(at=world.now, node=NODE))
        yield 60.0
        assert was_said(world, "is not what its origin says")
        yield 250.0
        assert len(world.ready("single")) == 2
        assert sent(world) == 2 * SIZE_BYTES

    tell(story)


def test_a_full_disk_ends_a_fetch_and_loses_nothing_of_it(tell: Tell) -> None:
    def story(world: LinkedWorld) -> Iterator[float]:
        yield 12.0
        world.strike(DiskFull(at=world.now, node=NODE, seconds=60.0))
        yield 30.0
        assert was_said(world, "no room for hf:org/single/single.fake")
        yield 400.0
        assert len(world.ready("single")) == 2
        assert sent(world) == SIZE_BYTES

    tell(story)
