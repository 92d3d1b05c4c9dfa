"""The fake engine by the strangers' door, a link in memory, and specs to run."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio

from llmgw.agent.held import Tools
from llmgw.agent.machine import Machine
from llmgw.agent.programs import Programs
from llmgw.agent.settings import AgentSettings, Pace, WeightsSettings
from llmgw.agent.weights import Weights
from llmgw.core.effects import Desire
from llmgw.core.events import Event, NodeRegistered, NodeReported, ShardChanged, WeightsReported
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import NodeId
from llmgw.core.replica import ReplicaId, ShardId, ShardReport, ShardSpec, ShardState
from llmgw.core.weights import NodeWeights, WeightsOrder
from llmgw.engines.registry import Engine, load_engines
from llmgw.errors import LinkLost
from llmgw.host.ports import Ports, is_free
from llmgw.host.process import find_marked
from llmgw.host.state import StateFolder

FAKES = Path(__file__).parents[2] / "fakes"
PACE = Pace(inventory=0.2, health=0.1, health_limit=1000, loading_first=0.02, loading=0.1, link_retry=0.05)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Engine]:
    """Every installed engine, and ``fake``."""
    monkeypatch.syspath_prepend(str(FAKES))
    return load_engines()


class Altered:
    """An engine, or hands, of which some methods do something else."""

    def __init__(self, whole: object, **methods: object) -> None:
        self._whole = whole
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> object:
        return getattr(self._whole, name)


@pytest.fixture
def alter(tools: Tools) -> Callable[..., Tools]:
    """The tools, with a fake engine of which some methods do something else."""
    return lambda **methods: replace(tools, engines={"fake": Altered(tools.engines["fake"], **methods)})


@pytest.fixture
def with_hands(tools: Tools) -> Callable[..., Tools]:
    """The tools, with hands of which some methods do something else."""
    return lambda **methods: replace(tools, hands=Altered(tools.hands, **methods))


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[AgentSettings]:
    """An agent of its own folder and ports; engines that a test leaves behind are killed."""
    state = tmp_path / "state"
    weights = WeightsSettings(cache=tmp_path / "weights")
    ports = find_range(8)
    yield AgentSettings(node_id=NodeId("n1"), state=state, weights=weights, engine_ports=ports, pace=PACE)
    for stat in find_marked(StateFolder(state).marker_prefix()):
        with suppress(ProcessLookupError):
            os.kill(stat.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(stat.pid, 0)


def find_range(count: int) -> tuple[int, int]:
    """A stretch of free ports, another one for each process of tests."""
    for first in range(21000 + os.getpid() % 199 * 20, 25000, count):
        if all(is_free(port) for port in range(first, first + count)):
            return first, first + count - 1
    raise AssertionError("no free ports on this machine")


@pytest.fixture
def tools(engines: Mapping[str, Engine], settings: AgentSettings) -> Tools:
    """What a shard works with."""
    hands = Machine(settings)
    hands.state.make()
    return Tools(
        engines=engines,
        settings=settings,
        hands=hands,
        programs=Programs(hands),
        weights=Weights(hands),
        ports=Ports(*settings.engine_ports),
    )


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[..., ShardSpec]:
    """A shard of the fake engine, with these flags."""

    def make_spec(
        *args: str,
        number: int = 1,
        epoch: int = 1,
        startup: float = 100,
        env: Mapping[str, str] | None = None,
        **model: object,
    ) -> ShardSpec:
        source = tmp_path / "model.fake"
        source.touch()
        profile = Profile(name="p", engine="fake", args=args, startup_timeout_seconds=startup, env=env or {})
        return ShardSpec(
            id=ShardId(f"shd-m-{number}-0"),
            replica=ReplicaId(f"rep-m-{number}"),
            epoch=epoch,
            node=NodeId("n1"),
            model=replace(Model(name=ModelName("m"), source=str(source), profiles=(profile,)), **model),
            profile=profile,
        )

    return make_spec


@dataclass
class MemoryLink:
    """The server's side of a link: what it desires, and every event that came up."""

    events: list[Event] = field(default_factory=list)
    lost: bool = False
    give_up_seconds: float | None = None
    told: WeightsOrder | None = None
    _desire: Desire = field(default_factory=lambda: Desire(node=NodeId("n1"), revision=0, shards=()))
    _changed: trio.Event = field(default_factory=trio.Event)
    _noticed: trio.Event = field(default_factory=trio.Event)

    def desire(self, *shards: ShardSpec) -> None:
        self._desire = replace(self._desire, revision=self._desire.revision + 1, shards=shards)
        self._stir()

    def tell_of_weights(self, order: WeightsOrder) -> None:
        self.told = order
        self._stir()

    def lose(self, lost: bool) -> None:
        self.lost = lost
        self._stir()

    def _stir(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def desired(self, after: int) -> Desire:
        while self._desire.revision <= max(after, 0):
            await self._changed.wait()
            if self.lost:
                raise LinkLost("the test cut the link")
        return self._desire

    async def order(self, after: WeightsOrder | None) -> WeightsOrder:
        while self.told is None or self.told == after:
            await self._changed.wait()
        return self.told

    def weights(self) -> list[NodeWeights]:
        return [event.weights for event in self.events if isinstance(event, WeightsReported)]

    async def report(self, event: Event) -> None:
        await trio.lowlevel.checkpoint()
        if self.lost:
            raise LinkLost("the test cut the link")
        self.events.append(event)
        self._stir()

    async def wait_open(self) -> None:
        while self.lost:
            await self._changed.wait()

    async def wait_lost(self) -> None:
        while not self.lost:
            await self._changed.wait()
        self._noticed.set()

    async def wait_applied(self) -> None:
        """The agent says that it has taken what is desired now."""
        wanted = self._desire.revision
        await self.wait(
            lambda: any(isinstance(event, NodeReported) and event.applied == wanted for event in self.events)
        )

    async def wait_lost_by_agent(self) -> None:
        """Lose the link for as long as it takes to be noticed."""
        self._noticed = trio.Event()
        self.lose(True)
        with trio.fail_after(100):
            await self._noticed.wait()
        self.lose(False)

    def reports(self, spec: ShardSpec) -> list[ShardReport]:
        said = [event.report for event in self.events if isinstance(event, ShardChanged)]
        return [report for report in said if (report.shard, report.epoch) == (spec.id, spec.epoch)]

    def registrations(self) -> list[NodeRegistered]:
        return [event for event in self.events if isinstance(event, NodeRegistered)]

    async def wait(self, is_so: Callable[[], object]) -> object:
        """Wait until this holds, looking again after each event, and return what it says."""
        with trio.fail_after(100):
            while not (found := is_so()):
                await self._changed.wait()
            return found

    async def wait_state(self, spec: ShardSpec, state: ShardState) -> ShardReport:
        def find() -> ShardReport | None:
            return next((report for report in self.reports(spec) if report.state is state), None)

        return await self.wait(find)  # type: ignore[return-value]


@pytest.fixture
def link() -> MemoryLink:
    return MemoryLink()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A stranger who answers nothing, on a port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener
