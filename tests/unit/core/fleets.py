"""Small fleets, nodes and models for the tests of the core's machine, and what is to be seen of its effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmgw.core.effects import Announce, Desire, Drain, Effect, WakeAt
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Drained,
    NodeLost,
    NodeRegistered,
    NodesExpected,
    ShardChanged,
    Wakeup,
)
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model, ModelName, Profile, Scaling
from llmgw.core.node import EngineFound, FabricFound, Gpu, Node, NodeId
from llmgw.core.replica import Endpoint, Replica, ReplicaId, ShardId, ShardReport, ShardSpec, ShardState

M = ModelName("m")
N1, N2 = NodeId("n1"), NodeId("n2")
ENDPOINT = Endpoint(host="127.0.0.1", port=18000, served_name="m")


def a_model(name: str = "m", least: int = 1, most: int = 1, gb: float | None = 4.0, source: str = "/m.gguf") -> Model:
    profile = Profile(name="p", engine="e", min_memory_gb=gb)
    return Model(name=ModelName(name), source=source, scaling=Scaling(min=least, max=most), profiles=(profile,))


def a_node(name: str = "n1", memory_gb: float = 16.0, engines: Sequence[str] = ("e",)) -> Node:
    return Node(
        id=NodeId(name),
        cores=4,
        cpu_flags=frozenset(),
        memory_gb=memory_gb,
        memory_available_gb=memory_gb,
        engines=tuple(EngineFound(engine=engine, program=(engine,)) for engine in engines),
    )


def a_fleet(*models: Model, nodes: Sequence[Node] = (a_node(),), now: float = 0.0) -> tuple[Fleet, list[Effect]]:
    """A fleet that has planned all its models; the effects are those since the nodes came."""
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=models), now)
    fleet.handle(Wakeup(), now)
    effects = [effect for node in nodes for effect in fleet.handle(NodeRegistered(node=node), now)]
    for _ in models:
        effects += fleet.handle(Wakeup(), now)
    return fleet, effects


def a_ready(model: Model, nodes: Sequence[Node] = (a_node(),), now: float = 1.0) -> tuple[Fleet, ShardSpec]:
    """One replica of it is ready since then, whether anybody asks for it or not."""
    fleet, effects = a_fleet(model, nodes=nodes)
    if model.scaling.on_demand:
        effects += fleet.handle(Demand(model=model.name, waiting=1), 0.0)
    shard = next(shard for desire in desires(effects) for shard in desire.shards)
    fleet.handle(a_word(shard, ShardState.READY), now)
    if model.scaling.on_demand:
        fleet.handle(Demand(model=model.name), now)
    return fleet, shard


def desires(effects: Sequence[Effect]) -> list[Desire]:
    return [effect for effect in effects if isinstance(effect, Desire)]


def announced(effects: Sequence[Effect]) -> list[Announce]:
    return [effect for effect in effects if isinstance(effect, Announce)]


def wakes(effects: Sequence[Effect]) -> list[float]:
    return [effect.at for effect in effects if isinstance(effect, WakeAt)]


def drains(effects: Sequence[Effect]) -> list[Drain]:
    return [effect for effect in effects if isinstance(effect, Drain)]


def drained(drain: Drain) -> Drained:
    """The door's answer: nobody is answered by it any more."""
    return Drained(replica=drain.replica, epoch=drain.epoch, number=drain.number)


def texts(effects: Sequence[Effect]) -> list[str]:
    return [announce.text for announce in announced(effects)]


def wake(fleet: Fleet, until: float) -> list[Effect]:
    """Nobody says anything until then: the fleet is woken whenever it has asked for that."""
    effects: list[Effect] = []
    for _ in range(1000):
        at = fleet._state.wake_at
        if at is None or at > until:
            return effects
        effects += fleet.handle(Wakeup(), at)
    raise AssertionError("it asks to be woken for ever")


def the_shard(effects: Sequence[Effect]) -> ShardSpec:
    (shard,) = desires(effects)[-1].shards
    return shard


def a_word(spec: ShardSpec, state: ShardState, **facts: object) -> ShardChanged:
    if state is ShardState.READY:
        facts = {"endpoint": ENDPOINT, **facts}
    report = ShardReport(shard=spec.id, replica=spec.replica, epoch=spec.epoch, state=state, **facts)  # type: ignore[arg-type]
    return ShardChanged(node=spec.node, report=report)


def the_replica(fleet: Fleet, name: ModelName = M) -> Replica:
    (replica,) = next(seen.replicas for seen in fleet.statistics().models if seen.model.name == name)
    return replica


def a_running(model: Model, epoch: int = 7, number: int = 1, node: NodeId = N1) -> ShardSpec:
    return ShardSpec(
        id=ShardId(f"shd-{model.name}-{number}-0"),
        replica=ReplicaId(f"rep-{model.name}-{number}"),
        epoch=epoch,
        node=node,
        model=model,
        profile=model.profiles[0],
    )


def found(spec: ShardSpec, state: ShardState = ShardState.READY) -> tuple[ShardSpec, ShardReport]:
    return spec, a_word(spec, state).report


def lose_one(fleet: Fleet, effects: Sequence[Effect]) -> ShardSpec:
    """rep-m-1 is ready on n1, which is lost at 20; n2 is there."""
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    fleet.handle(Wakeup(), 11.0)
    assert wakes(fleet.handle(NodeLost(node=N1), 20.0)) == [80.0]
    return shard


PAIR = Profile(name="p", engine="e", gpu_class="h100-80g", tp=8, pp=2, nodes=2)


def a_wide_model(profile: Profile = PAIR, least: int = 1, most: int = 1) -> Model:
    return Model(name=M, source="/m", scaling=Scaling(min=least, max=most), profiles=(profile,))


def a_gpu_node(name: str, fabric: str | None = "ib-a", gpus: int = 8) -> Node:
    address = f"10.0.0.{name[1:]}"
    fabrics = () if fabric is None else (FabricFound(name=fabric, interface="ib0", address=address),)
    cards = tuple(
        Gpu(
            uuid=f"GPU-{name}-{index}",
            index=index,
            gpu_class="h100-80g",
            name="H100",
            memory_gb=85.0,
            memory_used_gb=0.0,
        )
        for index in range(gpus)
    )
    return replace(a_node(name), gpus=cards, fabrics=fabrics)


def a_group(most: int = 1, nodes: int = 2) -> tuple[Fleet, list[ShardSpec]]:
    fleet, effects = a_fleet(
        a_wide_model(most=most), nodes=[a_gpu_node(f"n{number}") for number in range(1, nodes + 1)]
    )
    return fleet, [shard for desire in desires(effects) for shard in desire.shards]


def a_launched_group(most: int = 1, nodes: int = 2) -> tuple[Fleet, list[ShardSpec]]:
    """All is there on its nodes, and it has been told to launch at 0."""
    fleet, shards = a_group(most, nodes)
    for shard in shards:
        fleet.handle(a_word(shard, ShardState.PREPARED), 0.0)
    return fleet, [replace(shard, go=True) for shard in shards]


def a_restarted(*running: tuple[Node, ShardSpec]) -> tuple[Fleet, list[Effect]]:
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset(node.id for node, _ in running), until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_wide_model(),)), 0.0)
    effects: list[Effect] = []
    for node, spec in running:
        effects += fleet.handle(NodeRegistered(node=node, running=(found(spec),)), 1.0)
    return fleet, effects
