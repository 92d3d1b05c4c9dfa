"""A small fleet: one model of a fake engine, on one node that reports as it is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmgw.core.model import Model, ModelName, Profile, Scaling
from llmgw.core.node import EngineFound, Node, NodeId
from llmgw.core.replica import Endpoint, ShardReport, ShardSpec, ShardState

NODE = Node(
    id=NodeId("n1"),
    cores=4,
    cpu_flags=frozenset(),
    memory_gb=16.0,
    memory_available_gb=12.0,
    engines=(EngineFound(engine="e", program=("e",), version="1.2"),),
)


@pytest.fixture
def node() -> Node:
    return NODE


@pytest.fixture
def a_model() -> Callable[..., Model]:
    """A model that one replica of engine ``e`` serves; ``max`` replicas of it may run."""

    def make(name: str = "tiny", *, most: int = 1, least: int = 1, gb: float = 1.0, engine: str = "e") -> Model:
        return Model(
            name=ModelName(name),
            source="/tiny.gguf",
            aliases=("gpt",),
            scaling=Scaling(min=least, max=most),
            profiles=(Profile(name="p", engine=engine, min_memory_gb=gb),),
        )

    return make


@pytest.fixture
def a_report() -> Callable[..., ShardReport]:
    """What the node says of a shard that it was told to run."""

    def make(spec: ShardSpec, state: ShardState, **facts: object) -> ShardReport:
        endpoint = Endpoint(host="127.0.0.1", port=18000, served_name=spec.model.name)
        ready = endpoint if state is ShardState.READY else None
        return ShardReport(shard=spec.id, replica=spec.replica, epoch=spec.epoch, state=state, endpoint=ready, **facts)

    return make
