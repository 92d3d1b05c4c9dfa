"""What a decision costs: the fleet alone, without links or engines, at a size that few will have."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from llmgw.core.effects import WakeAt
from llmgw.core.events import CatalogChanged, Event, NodeRegistered, ShardChanged, Wakeup
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model, ModelName, Profile, Scaling
from llmgw.core.node import EngineFound, FabricFound, Gpu, Node, NodeId
from llmgw.core.replica import ShardReport, ShardState
from llmgw.server.tree import GC_THRESHOLDS

GPUS = 8
NODES_PER_FABRIC = 16
ENGINE = EngineFound(engine="vllm", program=("/opt/vllm",), checked=True)
# What operators have, in turn: one card, two, a whole node, two nodes, none.
PROFILES = (
    Profile(name="one", engine="vllm", gpu_class="h100-80g"),
    Profile(name="two", engine="vllm", gpu_class="h100-80g", tp=2),
    Profile(name="node", engine="vllm", gpu_class="h100-80g", tp=8),
    Profile(name="pair", engine="vllm", gpu_class="h100-80g", tp=8, pp=2, nodes=2),
    Profile(name="cpu", engine="vllm", min_memory_gb=8.0),
)
# Nobody has it: each node is looked at, down to its cards, and each says why not.
NOWHERE = Profile(name="nowhere", engine="vllm", gpu_class="h100-80g", gpu_memory_gb=100.0)


def make_node(number: int) -> Node:
    name = f"n{number:04}"
    uuids = [f"GPU-{name}-{index}" for index in range(GPUS)]
    return Node(
        id=NodeId(name),
        cores=128,
        cpu_flags=frozenset({"avx2"}),
        memory_gb=1000.0,
        memory_available_gb=900.0,
        engines=(ENGINE,),
        gpus=tuple(
            Gpu(
                uuid=uuid,
                index=index,
                gpu_class="h100-80g",
                name="NVIDIA H100 80GB HBM3",
                memory_gb=85.5,
                memory_used_gb=0.6,
                nvlink_peers=tuple(other for other in uuids if other != uuid),
            )
            for index, uuid in enumerate(uuids)
        ),
        fabrics=(FabricFound(name=f"ib-{number // NODES_PER_FABRIC}", interface="ib0", address=f"10.0.{number}.1"),),
    )


def make_model(number: int, profile: Profile, least: int = 1) -> Model:
    return Model(
        name=ModelName(f"m{number:03}"),
        source=f"org/m{number}",
        scaling=Scaling(min=least, max=least),
        profiles=(profile,),
    )


class Timed:
    """A fleet whose turns are timed, with a clock that stands: it is woken as often as it asks for it at once.

    By processor time: what neighbours take of the machine is no turn of this loop.
    """

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.turns: list[float] = []

    def handle(self, event: Event) -> None:
        """The event, and the turns that it asks for at once."""
        following: Event | None = event
        while following is not None:
            begin = time.thread_time()
            effects = self.fleet.handle(following, 0.0)
            self.turns.append(time.thread_time() - begin)
            asked = any(isinstance(effect, WakeAt) and effect.at <= 0.0 for effect in effects)
            following = Wakeup() if asked else None


def measure_fleet(*, nodes: int, models: int) -> dict[str, float]:
    """One decision that finds a place, one that finds none, and all models planned anew when none finds one."""
    timed = Timed()
    for number in range(nodes):
        timed.handle(NodeRegistered(node=make_node(number)))
    catalog = tuple(make_model(number, PROFILES[number % len(PROFILES)]) for number in range(models))
    # As the server does, once it is up.
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    begin = len(timed.turns)
    timed.handle(CatalogChanged(models=catalog))
    placed = timed.turns[begin:]
    failed = tuple(make_model(number, NOWHERE) for number in range(models))
    timed.handle(CatalogChanged(models=failed))
    begin = len(timed.turns)
    timed.handle(NodeRegistered(node=make_node(0)))
    anew = timed.turns[begin:]
    freed = _measure_freed(nodes)
    gc.unfreeze()
    gc.set_threshold(*usual)
    size = f"{nodes:,} nodes x {GPUS} GPUs, {models} models"
    return {
        f"{size}: one decision that finds a place, ms": sum(placed) / models * 1e3,
        f"{size}: one decision that finds none, ms": sum(anew) / models * 1e3,
        f"{size}: all planned anew, s": max(sum(placed), sum(anew)),
        f"{size}: the longest turn, ms": max(*placed, *anew) * 1e3,
        f"{size}: from a freed GPU to the word to launch, ms": freed * 1e3,
    }


def _measure_freed(nodes: int) -> float:
    """All cards are taken, one more model waits, and one replica ends."""
    timed = Timed()
    for number in range(nodes):
        timed.handle(NodeRegistered(node=make_node(number)))
    timed.handle(CatalogChanged(models=(make_model(0, PROFILES[2], least=min(nodes, 1000)),)))
    waiting = make_model(1, PROFILES[2])
    timed.handle(CatalogChanged(models=(*timed.fleet.catalog, waiting)))
    fewer = make_model(0, PROFILES[2], least=min(nodes, 1000) - 1)
    timed.handle(CatalogChanged(models=(fewer, waiting)))
    spec = next(
        replica.shard
        for each in timed.fleet.statistics().models
        for replica in each.replicas
        if replica.state is ShardState.STOPPING
    )
    report = ShardReport(shard=spec.id, replica=spec.replica, epoch=spec.epoch, state=ShardState.ENDED)

    def launched() -> bool:
        return any(each.model.name == waiting.name and each.replicas for each in timed.fleet.statistics().models)

    return _until(launched, lambda: timed.handle(ShardChanged(node=spec.node, report=report)))


def _until(done: Callable[[], bool], act: Callable[[], None]) -> float:
    begin = time.thread_time()
    act()
    seconds = time.thread_time() - begin
    if not done():
        raise AssertionError("what waited for the freed cards was not placed")
    return seconds
