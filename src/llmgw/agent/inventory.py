"""What this node has, as it is reported every few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import trio

from llmgw.agent.devices import Devices, GpuSource, Ours
from llmgw.agent.held import Tools
from llmgw.agent.masking import Mask
from llmgw.agent.preflight import Preflight
from llmgw.agent.telling import WORDS_CHARS
from llmgw.agent.troubles import Troubles
from llmgw.agent.watch import Watch
from llmgw.core.node import Disk, EngineFound, FabricFound, FlagFound, ForeignUse, Gpu, Node
from llmgw.engines.check import FlagFinding, FlagState
from llmgw.engines.registry import Engine
from llmgw.errors import EngineFailed
from llmgw.host.cpu import Memory, count_cores, read_cpu_flags, read_memory, warn_of_cpu
from llmgw.host.disks import read_disks
from llmgw.host.gpus import GpusFound
from llmgw.host.inventory_file import FakeInventory, InventoryFile

log = logging.getLogger(__name__)

SHOWN_PROBLEMS = 20
SHOWN_FLAGS = 20
FLAG_CHARS = 100
DETAIL_CHARS = 300
SHOWN_USES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What engines that run on processors have here, and what a fake inventory says instead."""

    cores: int = 1
    cpu_flags: frozenset[str] = frozenset()
    memory: Memory = field(default_factory=lambda: Memory(total_gb=0.0, available_gb=0.0))
    said: FakeInventory | None = None


class Inventory:
    """What this machine has: each of its parts as it was seen last, for any of them may take its time to answer, and
    the report is the sign that the node lives.

    ``gpus`` stands in for what the settings say of GPUs; ``wall`` is the clock that people set.
    """

    __slots__ = ("_devices", "_disks", "_file", "_gpus", "_room", "_troubles", "_wall")

    def __init__(self, *, gpus: GpuSource | None = None, wall: Callable[[], float] = time.time) -> None:
        self._gpus = gpus
        self._wall = wall
        self._troubles = Troubles()
        self._file: InventoryFile | None = None
        self._devices: Devices | None = None
        self._room = Watch(Room())
        self._disks: Watch[tuple[Disk, ...]] = Watch(())

    def _open(self, tools: Tools) -> Devices:
        if self._devices is None:
            settings = tools.settings
            if settings.discovery is not None and settings.discovery.fake is not None:
                self._file = InventoryFile(settings.discovery.fake, settings.node_id)
            self._devices = Devices(
                settings,
                marker_prefix=tools.state.marker_prefix(),
                troubles=self._troubles,
                file=self._file,
                gpus=self._gpus,
            )
        return self._devices

    async def look_at_gpus(self, tools: Tools) -> GpusFound:
        """The GPUs as they are now."""
        return await self._open(tools).look_at_gpus()

    def recall_held_gb(self, tools: Tools, pids: Collection[int]) -> float | None:
        """The most that these processes held of any one GPU when they were last looked at; None where nobody knows."""
        return self._open(tools).recall_held_gb(pids)

    async def look_at_fabrics(self, tools: Tools) -> tuple[FabricFound, ...]:
        """The networks that this node was declared to be on, as they are now."""
        return await self._open(tools).look_at_fabrics()

    async def survey(self, tools: Tools) -> Node:
        """The node as it is now."""
        devices, settings = self._open(tools), tools.settings
        room = (await self._room.look(self._look_at_room)).value
        disks = (await self._disks.look(lambda: read_disks(settings.folders))).value
        ours = await devices.find_ours()
        gpus = await devices.look_at_gpus(ours) if devices.looks_for_gpus else None
        memory = _count_memory(room, ours)
        said = room.said or FakeInventory()
        flags = room.cpu_flags if said.cpu_flags is None else said.cpu_flags
        warnings = (warn_of_cpu(flags), None if gpus is None else gpus.problem)
        told = tuple(_cut(warning) for warning in warnings if warning is not None)
        self._troubles.warn(told)
        return Node(
            id=settings.node_id,
            cores=room.cores if said.cores is None else said.cores,
            cpu_flags=flags,
            memory_gb=memory.total_gb,
            memory_available_gb=memory.available_gb,
            memory_foreign_gb=memory.foreign_gb,
            disks=disks if said.disks is None else said.disks,
            engines=await _find_engines(tools),
            gpus=None if gpus is None else tuple(map(_gather_foreign, gpus.gpus)),
            gpu_driver=None if gpus is None else gpus.driver,
            fabrics=await devices.look_at_fabrics(),
            labels=settings.labels,
            warnings=told,
            clock=self._wall(),
        )

    def _look_at_room(self) -> Room:
        return Room(
            cores=count_cores(),
            cpu_flags=read_cpu_flags(),
            memory=read_memory(),
            said=None if self._file is None else self._file.read(),
        )


def _gather_foreign(gpu: Gpu) -> Gpu:
    """Of very many that use it those that use the most, and all others as one that has no name."""
    if len(gpu.foreign) <= SHOWN_USES:
        return gpu
    uses = sorted(gpu.foreign, key=lambda use: -use.memory_gb)
    rest = ForeignUse(memory_gb=sum(use.memory_gb for use in uses[SHOWN_USES - 1 :]))
    return replace(gpu, foreign=(*uses[: SHOWN_USES - 1], rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Memory in GB of 10^9 bytes: all, what is free, and what is neither free nor our engines'."""

    total_gb: float
    available_gb: float
    foreign_gb: float


def _count_memory(room: Room, ours: Ours) -> Counted:
    said = room.said or FakeInventory()
    if said.memory_gb is None:
        total_gb, available_gb = room.memory.total_gb, room.memory.available_gb
        # What the kernel itself needs is foreign too. Of what our engines hold some is not seen (host/memory.py), and
        # looks foreign; what several of them share is counted for each, and hides as much of others'.
        foreign_gb = max(0.0, total_gb - available_gb - ours.held_gb)
        foreign_gb = foreign_gb if said.memory_foreign_gb is None else said.memory_foreign_gb
        return Counted(total_gb=total_gb, available_gb=available_gb, foreign_gb=foreign_gb)
    foreign_gb = said.memory_foreign_gb or 0.0
    available_gb = max(0.0, said.memory_gb - foreign_gb - ours.held_gb)
    return Counted(total_gb=said.memory_gb, available_gb=available_gb, foreign_gb=foreign_gb)


async def _find_engines(tools: Tools) -> tuple[EngineFound, ...]:
    """The engines that there is a program for, or that one is configured for."""
    found = []
    for name, engine in sorted(tools.engines.items()):
        try:
            program = await _find(tools, engine)
            if isinstance(program, EngineFailed):
                configured = tools.settings.binaries.get(name)
                if configured is not None:
                    found.append(tell_unusable(name, configured, program))
            else:
                found.append(tell_engine(name, program, await tools.programs.find(engine, program)))
        except Exception:
            # The node has the others all the same; whoever tries the programs tells of this, once.
            log.debug("engine %s is not reported", name, exc_info=True)
    return tuple(found)


async def _find(tools: Tools, engine: Engine) -> tuple[str, ...] | EngineFailed:
    """What is run for the engine, or why there is nothing."""
    try:
        return await tools.hands.run(tools.hands.find_program, engine, tools.settings.binaries)
    except EngineFailed as absent:
        return absent


def tell_unusable(name: str, configured: str, why: EngineFailed) -> EngineFound:
    """A configured binary that is no program: whoever set it expects it to run, so it does not just go missing."""
    # Bytes that are no text can't be told to the server.
    path = configured.encode("utf-8", "replace").decode()
    return EngineFound(engine=name, program=(path,), checked=True, starts=False, broken=_cut(_words(why)))


def _words(why: EngineFailed) -> str:
    return f"{why.message}; {why.remedy}" if why.remedy is not None else why.message


def tell_engine(name: str, program: tuple[str, ...], tried: Preflight | None) -> EngineFound:
    if tried is None:
        return EngineFound(engine=name, program=program)
    remedy = f"; {tried.remedy}" if tried.remedy is not None else ""
    hide = Mask({}).hide
    wanting = sorted((each for each in tried.findings if each.state is not FlagState.OK), key=_weigh)
    return EngineFound(
        engine=name,
        program=program,
        version=None if tried.version is None else _cut(hide(tried.version.number)),
        checked=True,
        starts=tried.starts,
        broken=None if tried.broken is None else _cut(tried.broken + remedy),
        problems=tuple(map(_cut, tried.problems[:SHOWN_PROBLEMS])),
        missing_libraries=tuple(map(_cut, tried.missing_libraries[:SHOWN_PROBLEMS])),
        # This goes out every few seconds, and of most flags there is nothing to tell.
        flags=tuple(map(_tell_flag, wanting[:SHOWN_FLAGS])),
        flags_ok=len(tried.findings) - len(wanting),
    )


def _weigh(finding: FlagFinding) -> int:
    """What breaks a launch first, and last what nobody knows."""
    return 0 if finding.breaks else 2 if finding.state is FlagState.UNCHECKED else 1


def _tell_flag(finding: FlagFinding) -> FlagFound:
    return FlagFound(
        flag=_cut(finding.flag, FLAG_CHARS),
        given_by=finding.given_by,
        state=str(finding.state),
        detail=None if finding.detail is None else _cut(finding.detail, DETAIL_CHARS),
    )


def _cut(words: str, chars: int = WORDS_CHARS) -> str:
    return words if len(words) <= chars else words[:chars] + "…"


async def serve_checks(tools: Tools) -> None:
    """Try the engines' programs for ever, one after the other: at the start, and whenever one may be another."""
    # said once of each, for this looks every few seconds: what is wrong with it, "" for a fault of ours
    troubled: dict[str, str] = {}
    while True:
        try:
            for name, engine in sorted(tools.engines.items()):
                await _check(tools, name, engine, troubled)
        except Exception:
            log.exception("the engines' programs can't be listed; trying again")
        await trio.sleep(tools.settings.pace.inventory)


async def _check(tools: Tools, name: str, engine: Engine, troubled: dict[str, str]) -> None:
    try:
        program = await _find(tools, engine)
        if not isinstance(program, EngineFailed):
            await tools.programs.check(engine, program, again=True)
    except Exception:
        # The others are tried all the same.
        if troubled.get(name) != "":
            log.exception("engine %s can't be tried, by a fault of its plugin or of llmgw; trying again", name)
        troubled[name] = ""
        return
    trouble = _words(program) if isinstance(program, EngineFailed) and name in tools.settings.binaries else None
    if trouble is None:
        troubled.pop(name, None)
    elif troubled.get(name) != trouble:
        log.warning("engine %s can't be used: %s", name, trouble)
        troubled[name] = trouble


async def serve_inventory(tools: Tools, report: Callable[[Node], None]) -> None:
    """Report for ever, and at once when there is news of a program. A look that fails is logged and the next one is
    tried."""
    # What was tried before this may have come too late for the registration.
    told = 0
    while True:
        with trio.move_on_after(tools.settings.pace.inventory):
            await tools.programs.wait_changed(told)
        told = tools.programs.changes
        try:
            node = await tools.hands.survey(tools)
        except Exception:
            log.exception("what this node has can't be told; trying again")
        else:
            report(node)
