"""A node as it really is: its GPUs and who holds their memory, its disk, its clock, and the engines that run on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from random import Random
from typing import Protocol

from llmgw.core.node import Disk, EngineFound, FabricFound, ForeignUse, Gpu, Node, NodeId
from llmgw.core.replica import ShardId, ShardSpec
from simulator.conduct import Conduct, draw_conduct
from simulator.faults import Mood
from simulator.loop import Loop
from simulator.site import CARD_GB, ENGINE, Shape

# The wall clock at the beginning of every simulation, in seconds since 1970.
WALL = 1_800_000_000.0

# What a card is called is told by where it is, so that a story can name it.
GpuName = str


class Process:
    """An engine. ``holds_gb`` is what it takes of each of its GPUs; ``freed`` once that has been given back. ``hung``:
    it is ready as far as anybody sees, and answers nobody."""

    __slots__ = ("alive", "asked_to_end", "cause", "conduct", "freed", "holds_gb", "hung", "pid", "ready", "spec")

    def __init__(self, pid: int, spec: ShardSpec, conduct: Conduct, holds_gb: dict[GpuName, float]) -> None:
        self.pid = pid
        self.spec = spec
        self.conduct = conduct
        self.holds_gb = holds_gb
        self.alive = True
        self.ready = False
        self.hung = False
        self.freed = False
        self.asked_to_end = False
        self.cause = ""


class Watcher(Protocol):
    """Whoever launched it is told what becomes of an engine."""

    def on_ready(self, process: Process) -> None: ...

    def on_hung(self, process: Process) -> None: ...

    def on_exit(self, process: Process) -> None: ...

    def on_freed(self, process: Process) -> None: ...


class Machine:
    """One node. ``records`` is what its disk keeps of the engines that an agent launched; ``moved`` is called whenever
    what runs has changed."""

    def __init__(
        self,
        shape: Shape,
        loop: Loop,
        rng: Random,
        *,
        is_group_there: Callable[[ShardSpec], bool],
        moved: Callable[[], None],
    ) -> None:
        self.id: NodeId = shape.id
        self.shape = shape
        self.up = True
        self.watcher: Watcher | None = None
        self.processes: dict[int, Process] = {}
        self.records: dict[ShardId, Process] = {}
        self.moods: list[Mood] = []
        self.disk_full = 0
        self.fabric_down = 0
        self.skew = 0.0
        self._loop = loop
        self._rng = rng
        self._is_group_there = is_group_there
        self._moved = moved
        self._pids = count(1000)
        self._foreign: dict[GpuName, list[float]] = {}
        self._node: Node | None = None

    # -- what it has

    def gpu_names(self) -> tuple[GpuName, ...]:
        return tuple(f"GPU-{self.id}-{index}" for index in range(self.shape.gpus or 0))

    def has(self, source: str) -> bool:
        """Weights are no matter of this size."""
        return True

    def look(self) -> Node:
        """What its agent sees now."""
        if self._node is None:
            self._node = self._survey()
        return replace(self._node, clock=WALL + self._loop.now + self.skew)

    def _survey(self) -> Node:
        shape = self.shape
        fabrics: tuple[FabricFound, ...] = ()
        if shape.fabric is not None:
            down = "mlx5_0: no port is active" if self.fabric_down else None
            address = f"10.0.0.{int(self.id.lstrip('n')) % 250 + 1}"
            fabrics = (FabricFound(name=shape.fabric, interface="ib0", address=address, hcas=("mlx5_0",), down=down),)
        return Node(
            id=self.id,
            cores=64,
            cpu_flags=frozenset({"avx2"}),
            memory_gb=shape.memory_gb,
            memory_available_gb=shape.memory_gb,
            disks=(Disk(path="/models", free_gb=0.0 if self.disk_full else 900.0, total_gb=1000.0),),
            engines=(EngineFound(engine=ENGINE, program=("pretend",), checked=True, flags_ok=1),),
            gpus=None if shape.gpus is None else tuple(map(self._see_gpu, range(shape.gpus), self.gpu_names())),
            fabrics=fabrics,
            labels=shape.labels,
        )

    def _see_gpu(self, index: int, name: GpuName) -> Gpu:
        others = tuple(ForeignUse(memory_gb=gb, pid=77, name="notebook") for gb in self._foreign.get(name, ()))
        # What an engine left behind is nobody's, once its agent has said that it ended.
        left = sum(p.holds_gb[name] for p in self.processes.values() if name in p.holds_gb and not self._is_ours(p))
        if left:
            others += (ForeignUse(memory_gb=left),)
        # A switch joins all of a large machine; a small one has bridges from each card to one other.
        near = self.gpu_names() if (self.shape.gpus or 0) > 4 else self.gpu_names()[index // 2 * 2 : index // 2 * 2 + 2]
        return Gpu(
            uuid=name,
            index=index,
            gpu_class=self.shape.gpu_class,
            name=self.shape.gpu_class.upper(),
            memory_gb=CARD_GB[self.shape.gpu_class],
            memory_used_gb=self._used_gb(name),
            nvlink_peers=tuple(other for other in near if other != name),
            foreign=others,
        )

    def _is_ours(self, process: Process) -> bool:
        return process.alive or self.records.get(process.spec.id) is process

    def _used_gb(self, name: GpuName) -> float:
        ours = sum(process.holds_gb.get(name, 0.0) for process in self.processes.values())
        return ours + sum(self._foreign.get(name, ()))

    def free_gb(self, name: GpuName) -> float:
        """What of a card nobody holds at all."""
        return CARD_GB[self.shape.gpu_class] - self._used_gb(name)

    def foreign_gb(self, name: GpuName) -> float:
        """What of a card nobody of ours holds."""
        return sum(self._foreign.get(name, ()))

    def add_foreign(self, index: int, gb: float) -> None:
        """Somebody else takes memory of a card, as far as there is some."""
        names = self.gpu_names()
        if names:
            name = names[index % len(names)]
            self._foreign.setdefault(name, []).append(min(gb, self.free_gb(name)))
            self._changed()

    def end_foreign(self, index: int) -> None:
        """Whoever came first gives it back."""
        names = self.gpu_names()
        if names:
            taken = self._foreign.get(names[index % len(names)])
            if taken:
                taken.pop(0)
                self._changed()

    def note_change(self) -> None:
        """Something in what an agent sees is not as it was."""
        self._node = None

    # -- engines

    def alive(self) -> Iterator[Process]:
        """The engines that run, in the order of their starts."""
        return (process for process in self.processes.values() if process.alive)

    def launch(self, spec: ShardSpec) -> Process | str:
        """Start an engine; or why that can't be done."""
        if self.disk_full:
            return "the log file can't be written: no space left on device"
        process = Process(next(self._pids), spec, draw_conduct(self._rng, self.moods, spec), {})
        for name in spec.gpus or ():
            wants_gb = spec.profile.gpu_memory_gb or 0.9 * CARD_GB[self.shape.gpu_class]
            if self.free_gb(name) < wants_gb:
                return f"CUDA out of memory: {name} has {self.free_gb(name):.1f} GB free, and {wants_gb:.1f} are needed"
            process.holds_gb[name] = wants_gb
        self.processes[process.pid] = process
        self.records[spec.id] = process
        self._changed()
        self._loop.after(process.conduct.load_seconds, self._come_up, process)
        if process.conduct.lives_seconds < math.inf:
            self._loop.after(process.conduct.lives_seconds, self.die, process, "exited with code 1")
        if process.conduct.hangs_seconds < math.inf:
            self._loop.after(process.conduct.hangs_seconds, self._hang, process)
        return process

    def _come_up(self, process: Process) -> None:
        if not process.alive or not process.conduct.ready:
            return
        if not self._is_group_there(process.spec):
            # It waits for the others of its group, as long as it takes.
            self._loop.after(5.0, self._come_up, process)
            return
        process.ready = True
        if self.watcher is not None:
            self.watcher.on_ready(process)

    def _hang(self, process: Process) -> None:
        process.hung = True
        if self.watcher is not None and process.alive:
            self.watcher.on_hung(process)

    def end(self, process: Process) -> None:
        """Ask an engine to end, as TERM does."""
        if process.alive and not process.asked_to_end:
            process.asked_to_end = True
            if not process.conduct.deaf:
                self._loop.after(process.conduct.exit_seconds, self.die, process, "ended by TERM")

    def die(self, process: Process, cause: str) -> None:
        """An engine is gone; its memory may not be."""
        if not process.alive:
            return
        process.alive = process.ready = False
        process.cause = cause
        self._changed()
        if self.watcher is not None:
            self.watcher.on_exit(process)
        self._loop.after(process.conduct.frees_seconds, self._free, process)

    def _free(self, process: Process) -> None:
        if process.freed:
            return
        process.freed = True
        del self.processes[process.pid]
        self._changed()
        if self.watcher is not None:
            self.watcher.on_freed(process)

    def forget(self, process: Process) -> None:
        """The agent is done with it, and its file is removed."""
        if self.records.get(process.spec.id) is process:
            del self.records[process.spec.id]
            self.note_change()

    def power_off(self) -> None:
        """Everything ends at once, and its memory is free when the power is back."""
        self.up = False
        for process in self.processes.values():
            process.alive = process.ready = False
            process.freed = True
            process.cause = "ended while no agent was watching it"
        self.processes.clear()
        self._changed()

    def _changed(self) -> None:
        self._node = None
        self._moved()
