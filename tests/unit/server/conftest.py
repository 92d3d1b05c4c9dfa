"""A small fleet: one model of a fake engine, on one node that reports as it is told; and a server that is operated, on
a node that does as it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from llmgw.config.definition import Definition, parse_definitions
from llmgw.core.events import NodeRegistered, ShardChanged
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model, ModelName, Profile, Scaling
from llmgw.core.node import EngineFound, Node, NodeId
from llmgw.core.replica import Endpoint, ShardReport, ShardSpec, ShardState
from llmgw.engines import READY, Command, EngineInfo, Health, Launch, SourceKind, hookimpl
from llmgw.engines.registry import open_engine
from llmgw.server.defining import Defining, Reread
from llmgw.server.history import Histories
from llmgw.server.holding import Holding
from llmgw.server.keeping import Keeping
from llmgw.server.returning import Returning
from llmgw.server.scheduler import Scheduler
from llmgw.store import Store, open_store
from llmgw.store.lanes import Inline

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
async def a_store(tmp_path: Path) -> AsyncIterator[Store]:
    """A real one, whose work is done on the spot."""
    async with open_store(str(tmp_path / "llmgw.db"), lanes=Inline()) as store:
        yield store


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


class Toy:
    """An engine that reads .gguf files."""

    @hookimpl
    def engine_describe(self) -> EngineInfo:
        return EngineInfo(
            title="E",
            default_binary="e",
            sources=frozenset({SourceKind.FILE}),
            file_suffixes=(".gguf",),
            cpu=True,
            loras=True,
        )

    @hookimpl
    def engine_build_command(self, launch: Launch) -> Command:
        return Command(argv=launch.program)

    @hookimpl
    def engine_read_health(self, status: int, body: str) -> Health:
        return READY


ENGINES = {"e": open_engine("e", Toy())}


class Operated:
    """A server from its start to its end, and one node whose engines serve at once; they fail where their weights are
    said to be bad, and never come to serve where they are slow."""

    def __init__(self, store: Store, written: str, holds: Any) -> None:
        self.store = store
        self.holds = store.holds if holds is None else holds(store.holds)
        self.wall = 1_700_000_000.0
        self.scheduler = Scheduler(Fleet())
        self.histories = Histories(store.history, wall=self.tell_time)
        self.written = written
        self.defining = Defining(
            self.scheduler,
            engines=ENGINES,
            store=store.models,
            histories=self.histories,
            declared=self._declared(),
            reread=self._reread,
            wall=self.tell_time,
        )
        self.holding = Holding(
            self.scheduler, self.holds, defining=self.defining, histories=self.histories, wall=self.tell_time
        )
        self.returning = Returning(
            self.scheduler,
            defining=self.defining,
            histories=self.histories,
            facts=store.facts,
            wall=self.tell_time,
        )

    def tell_time(self) -> float:
        """Each look is a second later."""
        self.wall += 1.0
        return self.wall

    async def begin(self, nursery: trio.Nursery) -> None:
        keeping = Keeping(self.returning)
        self.scheduler.entrust(keeping.keep)
        nursery.start_soon(keeping.serve)
        await nursery.start(self.scheduler.serve)
        await self.holding.begin()
        await self.defining.load()
        await self.scheduler.settle(NodeRegistered(node=NODE))
        nursery.start_soon(self._run_node)
        await self.settled()

    async def settled(self) -> None:
        """What follows at once has followed."""
        await wait_all_tasks_blocked()

    def running(self, name: str) -> list[tuple[str, str]]:
        """The ready replicas of a model, and the weights that they run with."""
        return [(each.id, each.shard.model.source) for each in self.scheduler.fleet.ready(ModelName(name))]

    def texts(self) -> list[str]:
        return [each.text for each in self.scheduler.chronicle.since(0).happened]

    async def outcomes(self, name: str) -> list[tuple[int, str, str, str | None]]:
        """Of each definition, the oldest first: its number, its weights, what became of it, and what brought it."""
        found = await self.store.history.list(ModelName(name))
        return [(each.number, each.model.source, each.outcome, each.note) for each in reversed(found)]

    def _declared(self) -> tuple[Definition, ...]:
        return parse_definitions(self.written, "server.yaml", ENGINES) if self.written else ()

    async def _reread(self) -> Reread:
        async def apply() -> None:
            await trio.lowlevel.checkpoint()

        await trio.lowlevel.checkpoint()
        return Reread(file="server.yaml", declared=self._declared(), changed=(), needs_restart=(), apply=apply)

    async def _run_node(self) -> None:
        known: dict[tuple[str, int], ShardSpec] = {}
        revision = 0
        while True:
            desire = await self.scheduler.desired(NODE.id, revision)
            revision, wanted = desire.revision, {(each.id, each.epoch): each for each in desire.shards}
            for key in known.keys() - wanted.keys():
                await self._report(known.pop(key), ShardState.ENDED)
            for key in wanted.keys() - known.keys():
                known[key] = spec = wanted[key]
                await self._report(spec, ShardState.LAUNCHING)
                if "bad" in spec.model.source:
                    await self._report(spec, ShardState.ENDED, cause="no such file")
                elif "slow" not in spec.model.source:
                    endpoint = Endpoint(host="127.0.0.1", port=18000, served_name=spec.model.name)
                    await self._report(spec, ShardState.READY, endpoint=endpoint)

    async def _report(self, spec: ShardSpec, state: ShardState, **facts: Any) -> None:
        report = ShardReport(shard=spec.id, replica=spec.replica, epoch=spec.epoch, state=state, **facts)
        await self.scheduler.post(ShardChanged(node=NODE.id, report=report))


@pytest.fixture
def operate(tmp_path: Path) -> Callable[[str], Any]:
    """Starts a server, with this in its server.yaml, on the same store each time; ``holds`` puts something before the
    holds of that."""

    @asynccontextmanager
    async def starting(written: str = "", *, holds: Any = None) -> AsyncIterator[Operated]:
        async with open_store(str(tmp_path / "llmgw.db"), lanes=Inline()) as store, trio.open_nursery() as nursery:
            server = Operated(store, written, holds)
            await server.begin(nursery)
            yield server
            nursery.cancel_scope.cancel()

    return starting


@pytest.fixture
def text_of() -> Callable[..., str]:
    """A definition as somebody writes it."""

    def write(
        source: str = "/good.gguf",
        *,
        name: str = "m",
        alias: str | None = None,
        scaling: str = "{min: 1, max: 1}",
        more: str = "",
    ) -> str:
        aliases = f"aliases: [{alias}]\n" if alias else ""
        profile = "profiles:\n- name: p\n  engine: e\n  min_memory_gb: 1\n"
        return f"name: {name}\n{aliases}source: {source}\nscaling: {scaling}\n{profile}{more}"

    return write
