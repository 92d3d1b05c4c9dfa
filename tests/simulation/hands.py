"""The hands of a simulated agent: a node whose engines, GPUs, disk and ports are objects.

All of the agent runs over them as it is, with no thread, process, socket or file, and no clock and no chance but those
of the run (``clock.run_simulated``). Nothing here has a task of its own: what an engine is at any moment follows from
its conduct and the time.

One ``SimulatedHands`` is one machine, and outlives the agents on it:

- An agent is ``serve_node(link, engines=..., settings=..., hands=hands)``. Cancelling it is the crash of the agent, and
  serving again with the same hands its next start, which adopts what runs.
- The engines' plugins have to write ``--port`` into a command, and to take a health of 200 for ready and of 503 for
  loading: ``fake`` of tests/fakes does. Which GPUs an engine holds is read from CUDA_VISIBLE_DEVICES of its command.
- ``conduct`` is asked at each start, by shard and epoch, what becomes of that engine: slow, never ready, deaf to
  TERM, dead after so long, late to give its memory back. Of those that run, ``die`` ends one, ``reboot`` all.
- ``is_joined`` is asked of every engine: one of a group is not ready before the others of it are there.
- ``prepare_seconds`` is how long it takes to find the weights of what is to be launched, where they are not fetched;
  ``depot`` are those that are (``depot.SimulatedDepot``). An engine that is started without its weights is a fault.
- ``cards``, ``foreign``, ``fabrics``, ``state.full`` (the disk), ``skew`` and ``oom_kills`` may be changed at any time.
  The order of ``cards`` is that of their indices; what ``gpus`` of a report says of their use follows from the engines.
- ``running`` are the engines that are alive, ``find_listening`` is the one at a port, ``is_ready`` whether it would
  answer, and ``holds_gb`` what engines hold of a GPU: those that have ended too, until they have given it back. The
  port of a shard is what ``Places`` of its agent says, as it is for a trunk; ``wait_end`` of an engine returns when it
  has ended.
"""

from __future__ import annotations

import errno
import itertools
import math
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import trio
from depot import Origin, SimulatedDepot

from llmgw.agent.held import Tools
from llmgw.agent.preflight import Preflight
from llmgw.core.effects import Desire
from llmgw.core.model import Model
from llmgw.core.node import Disk, EngineFound, FabricFound, ForeignUse, Gpu, Node
from llmgw.core.replica import ShardId, ShardSpec
from llmgw.engines.registry import Engine
from llmgw.engines.types import Command, Version
from llmgw.errors import UsageError
from llmgw.host.gpus import GpusFound
from llmgw.host.http import REFUSED, Reply
from llmgw.host.process import Stat
from llmgw.host.state import ShardRecord
from llmgw.host.usage import Usage

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

# The wall clock when a simulation begins, in seconds since 1970.
WALL = 1_800_000_000.0
# What an engine takes of a GPU where its conduct does not say.
TAKEN_SHARE = 0.9
OUT_OF_MEMORY = "fatal: CUDA out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """What an engine will do, in seconds: until it is ``ready`` and until it ends by itself, both from its start, until
    it heeds TERM (``deaf``: it never does), from its end until the device has its memory back, and from its start until
    it answers nobody any more.

    ``code`` and ``lines`` are what it ends with by itself. ``holds_gb`` is what it takes of each GPU.
    """

    load_seconds: float = 20.0
    ready: bool = True
    lives_seconds: float = math.inf
    code: int = 1
    lines: tuple[str, ...] = ()
    exit_seconds: float = 0.5
    deaf: bool = False
    frees_seconds: float = 0.5
    hangs_seconds: float = math.inf
    holds_gb: float | None = None


class EngineProcess:
    """An engine that was started here. ``holds_gb`` is what it takes of each of its GPUs, by UUID."""

    def __init__(self, pid: int, port: int, marker: str, conduct: Conduct, holds_gb: Mapping[str, float]) -> None:
        self.pid = pid
        self.port = port
        self.marker = marker
        self.shard, self.epoch = _whose(marker)
        self.conduct = conduct
        self.holds_gb = holds_gb
        self.began_at = trio.current_time()
        self.ends_at = self.began_at + conduct.lives_seconds
        self.frees_at = self.ends_at + conduct.frees_seconds
        self.code = conduct.code
        self.lines = conduct.lines
        self._changed = trio.Event()

    @property
    def alive(self) -> bool:
        return trio.current_time() < self.ends_at

    @property
    def loaded(self) -> bool:
        """It has all that it needs of this machine to serve."""
        return self.alive and self.conduct.ready and trio.current_time() >= self.began_at + self.conduct.load_seconds

    def end(self, seconds: float, code: int, lines: Sequence[str] = (), *, frees_seconds: float | None = None) -> None:
        """It ends so many seconds from now, unless it does before."""
        at = trio.current_time() + seconds
        if at < self.ends_at:
            self.ends_at, self.code, self.lines = at, code, tuple(lines)
            self.frees_at = at + (self.conduct.frees_seconds if frees_seconds is None else frees_seconds)
            self._changed.set()
            self._changed = trio.Event()

    @property
    def is_hung(self) -> bool:
        """It is alive, and nothing comes of it any more."""
        return trio.current_time() >= self.began_at + self.conduct.hangs_seconds

    async def wait_end(self) -> None:
        while self.alive:
            with trio.move_on_at(self.ends_at):
                await self._changed.wait()

    def printed(self) -> list[str]:
        """What stands in its log."""
        return ["loading", *([] if self.alive else self.lines)]


class Watched:
    """One agent's hold on an engine; only the one that started it is told its exit code."""

    def __init__(self, engine: EngineProcess, *, is_child: bool) -> None:
        self.engine = engine
        self.pid = engine.pid
        self.start_time = engine.pid
        self._is_child = is_child

    async def wait_exit(self) -> int | None:
        await self.engine.wait_end()
        return self.engine.code if self._is_child else None

    async def stop(self, first: signal.Signals, grace_seconds: float) -> bool:
        if not self.engine.conduct.deaf:
            self.engine.end(self.engine.conduct.exit_seconds, -first)
        with trio.move_on_after(grace_seconds):
            await self.engine.wait_end()
        self.engine.end(0.0, -signal.SIGKILL)
        return True

    async def find_alive(self) -> Collection[int]:
        await trio.lowlevel.checkpoint()
        return {self.pid} if self.engine.alive else ()

    def close(self) -> None: ...


class SimulatedLog:
    """What the engine printed that was last started on a path."""

    def __init__(self, path: Path, engines: Mapping[Path, EngineProcess], hide: Callable[[str], str]) -> None:
        self.path = path
        self._engines = engines
        self._hide = hide
        self._read = 0

    def _lines(self) -> list[str]:
        engine = self._engines.get(self.path)
        return [] if engine is None else [*map(self._hide, engine.printed())]

    def read_new(self) -> list[str]:
        lines = self._lines()[self._read :]
        self._read += len(lines)
        return lines

    def cap(self) -> None: ...

    def read_last(self, count: int) -> tuple[str, ...]:
        return tuple(self._lines()[-count:])


class SimulatedState:
    """A state folder that no disk has. ``full``: nothing more can be written."""

    def __init__(self, node: str) -> None:
        self.path = Path("/simulated") / node
        self.cache = self.path / "cache"
        self.records: dict[ShardId, ShardRecord] = {}
        self.desired: Desire | None = None
        self.engines: dict[Path, EngineProcess] = {}
        self.full = False
        self._held = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        if self._held:
            raise UsageError(f"another agent works with {self.path}")
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def make(self) -> None: ...

    def make_cache(self) -> Path:
        return self.cache

    def marker(self, spec: ShardSpec) -> str:
        return f"{self.marker_prefix()}{spec.id}:{spec.epoch}"

    def marker_prefix(self) -> str:
        return f"{self.path}:"

    def write(self, record: ShardRecord) -> None:
        self._fill(f"{record.spec.id}.json")
        self.records[record.spec.id] = record

    def write_desired(self, desire: Desire) -> None:
        self._fill("desired.json")
        self.desired = desire

    def _fill(self, name: str) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path / name))

    def remove(self, shard: ShardId) -> None:
        self.records.pop(shard, None)

    def read(self) -> list[ShardRecord]:
        return [self.records[shard] for shard in sorted(self.records)]

    def log_path(self, shard: ShardId) -> Path:
        return self.path / "logs" / f"{shard}.log"

    def open_log(self, path: Path, hide: Callable[[str], str]) -> SimulatedLog:
        return SimulatedLog(path, self.engines, hide)

    def prune_logs(self, in_use: set[Path]) -> None: ...


def is_always_joined(engine: EngineProcess) -> bool:
    """The others of its group are there."""
    return True


@dataclass(kw_only=True)
class SimulatedHands:
    """One machine (``agent.hands.Hands``); see the head of this file. ``memory_gb`` of its RAM are there, and others
    hold ``memory_foreign_gb`` of them."""

    node: str
    cards: list[Gpu] = field(default_factory=list)
    conduct: Callable[[ShardId, int], Conduct] = lambda shard, epoch: Conduct()
    is_joined: Callable[[EngineProcess], bool] = is_always_joined
    foreign: dict[str, tuple[ForeignUse, ...]] = field(default_factory=dict)
    fabrics: dict[str, FabricFound] = field(default_factory=dict)
    memory_gb: float = 512.0
    memory_foreign_gb: float = 0.0
    skew: float = 0.0
    prepare_seconds: float = 0.0
    oom_kills: int = 0
    origin: Origin = field(default_factory=Origin)
    state: SimulatedState = field(init=False)
    depot: SimulatedDepot = field(init=False)
    engines: list[EngineProcess] = field(init=False, default_factory=list)
    boots: int = field(init=False, default=1)
    _pids: Iterator[int] = field(init=False, default_factory=lambda: itertools.count(1000))

    def __post_init__(self) -> None:
        self.state = SimulatedState(self.node)
        self.depot = SimulatedDepot(node=self.node, origin=self.origin, is_full=lambda: self.state.full, wall=WALL)

    # What may be done to it

    @property
    def running(self) -> list[EngineProcess]:
        """The engines that are alive, in the order of their starts."""
        return [engine for engine in self.engines if engine.alive]

    def die(self, pid: int, code: int, lines: Sequence[str] = ()) -> None:
        """An engine ends now."""
        for engine in self.running:
            if engine.pid == pid:
                engine.end(0.0, code, lines)

    def reboot(self) -> None:
        """All that ran is gone, and so is what it held. The agent is to be cancelled before."""
        self.boots += 1
        for engine in self.engines:
            engine.end(0.0, -signal.SIGKILL, frees_seconds=0.0)
            engine.frees_at = min(engine.frees_at, trio.current_time())

    def find_listening(self, port: int) -> EngineProcess | None:
        """The engine that has a port."""
        return next((engine for engine in self.running if engine.port == port), None)

    def is_ready(self, engine: EngineProcess) -> bool:
        """Whether it would answer a request."""
        return engine.loaded and self.is_joined(engine)

    def holds_gb(self, uuid: str) -> dict[int, float]:
        """What engines hold of a GPU, by pid: those that have ended too, until they have given it back."""
        now = trio.current_time()
        return {
            engine.pid: engine.holds_gb[uuid]
            for engine in self.engines
            if uuid in engine.holds_gb and now < engine.frees_at
        }

    # What an agent sees of it

    def boot_seconds(self) -> float:
        return trio.current_time()

    async def run(self, work: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        await trio.sleep(self.prepare_seconds if work.__name__ == "check_sources" else 0.0)
        return work(*args)

    async def survey(self, tools: Tools) -> Node:
        found = await self.look_at_gpus(tools)
        return Node(
            id=tools.settings.node_id,
            cores=64,
            cpu_flags=frozenset({"avx2"}),
            memory_gb=self.memory_gb,
            memory_available_gb=self.memory_gb - self.memory_foreign_gb,
            memory_foreign_gb=self.memory_foreign_gb,
            disks=(Disk(path="/simulated", free_gb=0.0 if self.state.full else 900.0, total_gb=1000.0),),
            engines=tuple(
                EngineFound(engine=name, program=_program(name), version="1.0", checked=True)
                for name in sorted(tools.engines)
            ),
            gpus=found.gpus,
            fabrics=await self.look_at_fabrics(tools),
            labels=tools.settings.labels,
            clock=WALL + trio.current_time() + self.skew,
        )

    async def look_at_gpus(self, tools: Tools) -> GpusFound:
        await trio.lowlevel.checkpoint()
        return GpusFound(gpus=tuple(self._see(index, card) for index, card in enumerate(self.cards)))

    def _see(self, index: int, card: Gpu) -> Gpu:
        alive = {engine.pid for engine in self.running}
        held = self.holds_gb(card.uuid)
        foreign = self.foreign.get(card.uuid, ())
        used_gb = sum(held.values()) + sum(use.memory_gb for use in foreign)
        left_gb = sum(gb for pid, gb in held.items() if pid not in alive)
        if left_gb:
            foreign = (*foreign, ForeignUse(memory_gb=left_gb))
        return replace(card, index=index, memory_used_gb=used_gb, foreign=foreign)

    async def measure(self, tools: Tools, process: Watched) -> Usage:
        await trio.lowlevel.checkpoint()
        engine = process.engine
        pids = frozenset({engine.pid} if engine.alive else ())
        return Usage(pids=pids, gpu_gb=max(engine.holds_gb.values(), default=None) if pids else None)

    async def look_at_fabrics(self, tools: Tools) -> tuple[FabricFound, ...]:
        await trio.lowlevel.checkpoint()
        return tuple(self.fabrics.values())

    def find_program(self, engine: Engine, binaries: Mapping[str, str]) -> tuple[str, ...]:
        return _program(engine.name)

    def stamp_program(self, engine: Engine, program: tuple[str, ...]) -> tuple[int, ...]:
        return (1,)

    async def examine(self, engine: Engine, program: tuple[str, ...], *, marker: str) -> Preflight:
        await trio.lowlevel.checkpoint()
        return Preflight(
            engine=engine.name,
            program=program,
            version=Version(number="1.0"),
            broken=None,
            remedy=None,
            problems=(),
            missing_libraries=(),
            findings=(),
        )

    def check_sources(self, model: Model, engine: Engine) -> None: ...

    def choose_threads(self) -> int | None:
        return None

    def start(self, command: Command, *, log: Path, marker: str) -> Watched:
        for word in command.argv:
            if word.startswith("hf:") or not self.depot.is_whole(word):
                raise AssertionError(f"{marker} is launched by {word}, which is not whole on {self.node}")
        port = int(command.argv[command.argv.index("--port") + 1])
        indices = command.env.get("CUDA_VISIBLE_DEVICES", "")
        cards = [self.cards[int(index)] for index in indices.split(",") if index]
        conduct = self.conduct(*_whose(marker))
        holds_gb = {c.uuid: c.memory_gb * TAKEN_SHARE if conduct.holds_gb is None else conduct.holds_gb for c in cards}
        if any(gb > self._find_free_gb(uuid) for uuid, gb in holds_gb.items()):
            # As CUDA has it: it comes up, asks for the memory, and ends.
            holds_gb = {}
            conduct = replace(conduct, lives_seconds=conduct.load_seconds / 2, code=1, lines=(OUT_OF_MEMORY,))
        engine = EngineProcess(next(self._pids), port, marker, conduct, holds_gb)
        # Those that nothing is left of would be looked through at every look.
        self.engines = [each for each in self.engines if trio.current_time() < each.frees_at]
        self.engines.append(engine)
        self.state.engines[log] = engine
        return Watched(engine, is_child=True)

    def _find_free_gb(self, uuid: str) -> float:
        (card,) = (card for card in self.cards if card.uuid == uuid)
        others_gb = sum(use.memory_gb for use in self.foreign.get(uuid, ()))
        return card.memory_gb - others_gb - sum(self.holds_gb(uuid).values())

    def take_over(self, pid: int, start_time: int, marker: str) -> Watched | None:
        found = (
            engine for engine in self.running if (engine.pid, engine.pid, engine.marker) == (pid, start_time, marker)
        )
        return next((Watched(engine, is_child=False) for engine in found), None)

    def find_marked(self, prefix: str) -> Mapping[Stat, str]:
        return {_stat(engine.pid): engine.marker for engine in self.running if engine.marker.startswith(prefix)}

    def read_boot_id(self) -> str:
        return f"boot {self.boots}"

    def count_oom_kills(self) -> int | None:
        return self.oom_kills

    def is_free(self, port: int) -> bool:
        return self.find_listening(port) is None

    def is_taken(self, address: str) -> bool:
        return False

    def is_foreign(self, port: int, tree: set[int]) -> bool:
        engine = self.find_listening(port)
        return engine is not None and engine.pid not in tree

    async def get(self, port: int, path: str) -> Reply | None:
        await trio.lowlevel.checkpoint()
        engine = self.find_listening(port)
        if engine is None:
            return REFUSED
        if engine.is_hung:
            await trio.sleep_forever()
        return Reply(status=200, body="") if self.is_ready(engine) else Reply(status=503, body="loading")

    async def post(self, port: int, path: str, body: object) -> Reply | None:
        return await self.get(port, path)


def _whose(marker: str) -> tuple[ShardId, int]:
    _, shard, epoch = marker.split(":")
    return ShardId(shard), int(epoch)


def _program(engine: str) -> tuple[str, ...]:
    return (f"/simulated/{engine}",)


def _stat(pid: int) -> Stat:
    return Stat(pid=pid, state="S", parent=1, group=pid, session=pid, threads=1, start_time=pid)
