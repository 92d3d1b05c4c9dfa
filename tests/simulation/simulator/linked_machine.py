"""A node of the larger size: hands of memory, and the engines that run on them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import trio
from hands import Conduct, EngineProcess, SimulatedHands
from links import EngineClosed

from llmgw.core.node import FabricFound, ForeignUse, Gpu
from llmgw.core.replica import ShardId, ShardSpec
from llmgw.engines.registry import Engine, load_engines
from simulator.conduct import draw_conduct
from simulator.faults import (
    Mood,
)
from simulator.site import CARD_GB, Shape

if TYPE_CHECKING:
    from simulator.linked import LinkedWorld

FAKES = Path(__file__).parents[2] / "fakes"


def find_engine() -> Engine:
    """The plugin of the fake engine, which writes commands and reads answers as the simulated hands have them."""
    sys.path.append(str(FAKES))
    try:
        return load_engines({})["fake"]
    finally:
        # What other tests find installed is not to depend on whether this ran before.
        sys.path.remove(str(FAKES))


@dataclass(frozen=True, slots=True)
class Alive:
    """An engine that runs."""

    spec: ShardSpec
    pid: int
    ready: bool


class Machine:
    """A node as it really is, over its hands."""

    def __init__(self, shape: Shape, rng: Random, world: LinkedWorld) -> None:
        self.id = shape.id
        self.shape = shape
        self.moods: list[Mood] = []
        self.up = True
        self.full = 0
        self.down = 0
        self._rng = rng
        self._world = world
        self.hands = SimulatedHands(
            node=shape.id,
            cards=[_card(shape, index, name) for index, name in enumerate(self.gpu_names())],
            conduct=self._conduct,
            is_joined=world.is_joined,
            memory_gb=shape.memory_gb,
            origin=world.origin,
        )
        self.show_fabric()

    def _conduct(self, shard: ShardId, epoch: int) -> Conduct:
        spec = self._world.specs[self.id, shard, epoch]
        return Conduct(**asdict(draw_conduct(self._rng, self.moods, spec)), holds_gb=spec.profile.gpu_memory_gb)

    def spec(self, engine: EngineProcess) -> ShardSpec:
        return self._world.specs[self.id, engine.shard, engine.epoch]

    def alive(self) -> Iterator[Alive]:
        for engine in self.hands.running:
            yield Alive(self.spec(engine), engine.pid, self.hands.is_ready(engine))

    def gpu_names(self) -> tuple[str, ...]:
        return tuple(f"GPU-{self.id}-{index}" for index in range(self.shape.gpus or 0))

    def free_gb(self, name: str) -> float:
        foreign = sum(use.memory_gb for use in self.hands.foreign.get(name, ()))
        return CARD_GB[self.shape.gpu_class] - foreign - sum(self.hands.holds_gb(name).values())

    def has(self, source: str) -> bool:
        return self.hands.depot.has(source)

    def show_fabric(self) -> None:
        """What its agent sees of the network that it is on."""
        name = self.shape.fabric
        if name is not None:
            address = f"10.0.0.{int(self.id.lstrip('n')) % 250 + 1}"
            down = "mlx5_0: no port is active" if self.down else None
            found = FabricFound(name=name, interface="ib0", address=address, hcas=("mlx5_0",), down=down)
            self.hands.fabrics[name] = found

    def set_fabric(self, by: int) -> None:
        self.down += by
        self.show_fabric()

    def set_mood(self, mood: Mood) -> None:
        """What is wrong with what is launched from now on."""
        self.moods.append(mood)
        self._show_moods()

    def end_mood(self, mood: Mood) -> None:
        self.moods.remove(mood)
        self._show_moods()

    def _show_moods(self) -> None:
        self.hands.prepare_seconds = 300.0 if Mood.SLOW_TO_PREPARE in self.moods else 0.0

    def set_disk(self, by: int) -> None:
        self.full += by
        self.hands.state.full = self.full > 0

    def add_foreign(self, index: int, gb: float) -> None:
        names = self.gpu_names()
        if names:
            name = names[index % len(names)]
            use = ForeignUse(memory_gb=min(gb, self.free_gb(name)), pid=77, name="notebook")
            self.hands.foreign[name] = (*self.hands.foreign.get(name, ()), use)

    def end_foreign(self, index: int) -> None:
        names = self.gpu_names()
        if names:
            name = names[index % len(names)]
            self.hands.foreign[name] = self.hands.foreign.get(name, ())[1:]


def _card(shape: Shape, index: int, name: str) -> Gpu:
    names = [f"GPU-{shape.id}-{other}" for other in range(shape.gpus or 0)]
    near = names if (shape.gpus or 0) > 4 else names[index // 2 * 2 : index // 2 * 2 + 2]
    return Gpu(
        uuid=name,
        index=index,
        gpu_class=shape.gpu_class,
        name=shape.gpu_class.upper(),
        memory_gb=CARD_GB[shape.gpu_class],
        memory_used_gb=0.0,
        nvlink_peers=tuple(other for other in near if other != name),
    )


class Answering:
    """An engine as a request meets it."""

    def __init__(self, engine: EngineProcess, seconds: float) -> None:
        self._engine = engine
        self._seconds = seconds

    async def answer(self, request: Any) -> Any:
        with trio.move_on_after(math.inf if self._engine.is_hung else self._seconds):
            await self._engine.wait_end()
            raise EngineClosed("the engine closed the connection")
        return "answered"
