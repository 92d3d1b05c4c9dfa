"""Machines and profiles as tests of placement make them up, and whole fleets drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from llmgw.core.filters import Need
from llmgw.core.hosts import Host, Standing
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import Disk, EngineFound, FabricFound, ForeignUse, Gpu, MigInstance, Node, NodeId
from llmgw.core.replica import ReplicaId

H100, A100 = "h100-80g", "a100-40g"
SIZES = {H100: 80.0, A100: 40.0}
SOURCE = "hf:org/m"
ENGINE = EngineFound(engine="e", program=("/usr/bin/e",))
BROKEN = EngineFound(engine="e", program=("/usr/bin/e",), checked=True, broken="libe.so.1 is missing")

# Which GPUs of a box are joined, as groups of their indices.
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
QUADS = ((0, 1, 2, 3), (4, 5, 6, 7))
SWITCH = ((0, 1, 2, 3, 4, 5, 6, 7),)
NONE = ()


def a_gpu(uuid: str = "GPU-0", index: int = 0, gpu_class: str = H100, **facts: Any) -> Gpu:
    usual = {"name": gpu_class, "memory_gb": SIZES[gpu_class], "memory_used_gb": 0.0}
    return Gpu(**{"uuid": uuid, "index": index, "gpu_class": gpu_class, **usual, **facts})


def a_box(
    count: int, gpu_class: str = H100, *, joined: Iterable[Sequence[int]] | None = SWITCH, name: str = ""
) -> tuple[Gpu, ...]:
    """GPUs with their links; None: nobody knows them."""
    uuids = [f"GPU-{name}{index}" for index in range(count)]
    groups = None if joined is None else [set(group) for group in joined]

    def peers(index: int) -> tuple[str, ...] | None:
        if groups is None:
            return None
        others = {other for group in groups if index in group for other in group if other != index and other < count}
        return tuple(uuids[other] for other in sorted(others))

    return tuple(a_gpu(uuids[index], index, gpu_class, nvlink_peers=peers(index)) for index in range(count))


def a_node(name: str = "n1", **facts: Any) -> Node:
    usual: dict[str, Any] = {
        "cores": 4,
        "cpu_flags": frozenset(),
        "memory_gb": 16.0,
        "memory_available_gb": 8.0,
        "engines": (ENGINE,),
    }
    return Node(**{"id": NodeId(name), **usual, **facts})


OF_HOST = {
    "standing",
    "cordoned",
    "labels",
    "booked_gb",
    "booked",
    "leaving",
    "kept",
    "kept_gb",
    "begun",
    "replicas",
    "holds",
}


def a_host(name: str = "n1", **facts: Any) -> Host:
    """Facts of the node and of what is booked there alike."""
    of_node = {key: value for key, value in facts.items() if key not in OF_HOST}
    return Host(node=a_node(name, **of_node), **{key: facts[key] for key in OF_HOST & facts.keys()})


def a_fabric(name: str = "ib-a", down: str | None = None, address: str | None = "10.0.0.1") -> FabricFound:
    return FabricFound(name=name, address=address, down=down)


def a_profile(name: str = "p", **facts: Any) -> Profile:
    return Profile(**{"name": name, "engine": "e", **facts})


def a_model(*profiles: Profile) -> Model:
    return Model(name=ModelName("m"), source=SOURCE, profiles=profiles)


def a_need(now: float = 0.0, backing_off: dict[NodeId, float] | None = None, **facts: Any) -> Need:
    profile = a_profile(**facts)
    return Need(model=a_model(profile), profile=profile, backing_off=backing_off or {}, now=now)


# Fleets, drawn


@dataclass(frozen=True, kw_only=True)
class World:
    """All that ``place`` is asked with."""

    model: Model
    hosts: tuple[Host, ...]
    backing_off: dict[NodeId, float] = field(default_factory=dict)
    now: float = 10.0


def mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([usual] * 4 + list(others))


COUNTS = st.sampled_from([1, 2, 4, 8])
CLASSES = st.sampled_from([0, 0b11111111, 0b01010110])
JOINED = st.sampled_from([None, NONE, PAIRS, QUADS, SWITCH])
# Which of up to eight GPUs something is the matter with, as bits: mostly of none.
ODD = mostly(0, 0b1, 0b10100, 0b11111111) | st.integers(0, 255)
FOREIGN = mostly(
    (),
    (ForeignUse(memory_gb=30.5, pid=4711, name="python"),),
    (ForeignUse(memory_gb=9.0), ForeignUse(memory_gb=4.0, pid=12)),
)
MIG = st.sampled_from([(), (MigInstance(uuid="MIG-1", shape="1g.10gb", memory_gb=10.0),)])


@st.composite
def boxes(draw: st.DrawFn, name: str) -> tuple[Gpu, ...]:
    count = draw(COUNTS)
    turned = draw(st.integers(0, count - 1))
    broken, cut, held, of_a100 = draw(ODD), draw(ODD), draw(ODD), draw(CLASSES)
    mig, foreign = draw(MIG), draw(FOREIGN)
    return tuple(
        a_gpu(
            gpu.uuid,
            (gpu.index + turned) % count,
            A100 if of_a100 >> at & 1 else H100,
            nvlink_peers=gpu.nvlink_peers,
            broken="fell off the bus" if broken >> at & 1 else None,
            mig=mig if cut >> at & 1 else None,
            foreign=foreign if held >> at & 1 else (),
        )
        for at, gpu in enumerate(a_box(count, joined=draw(JOINED), name=f"{name}-"))
    )


FABRICS = st.lists(
    st.builds(
        a_fabric,
        st.sampled_from(["ib-a", "ib-b"]),
        mostly(None, "no port is ACTIVE"),
        mostly("10.0.0.1", None),
    ),
    max_size=2,
    unique_by=lambda fabric: fabric.name,
).map(tuple)
DISKS = mostly(
    (Disk(path="/", free_gb=90.0, total_gb=100.0),),
    (),
    (Disk(path="/", free_gb=5.0, total_gb=100.0), Disk(path="/data", free_gb=2.5, total_gb=10.0)),
)
HAS_GPUS = st.sampled_from([None, (), True, True, True])
FACTS = st.fixed_dictionaries(
    {
        "memory_gb": st.sampled_from([16.0, 64.0]),
        "memory_foreign_gb": mostly(0.0, 3.3),
        "engines": mostly((ENGINE,), (), (BROKEN,)),
        "fabrics": FABRICS,
        "disks": DISKS,
        "outdated": mostly(False, True),
        "standing": mostly(Standing.READY, Standing.SILENT, Standing.LOST),
        "cordoned": mostly(False, True),
        "labels": mostly({"zone": "a"}, {}, {"zone": "b", "rack": "1"}),
        "booked_gb": mostly(0.0, 7.7, 12.0),
        "kept_gb": mostly({}, {ModelName("k"): 3.1}),
        "leaving": mostly({}, {ReplicaId("r1"): 0.0}, {ReplicaId("r1"): 3.0, ReplicaId("r2"): 4.7}),
        "replicas": mostly({}, {ModelName("m"): 1}, {ModelName("m"): 3}),
        "holds": mostly(frozenset(), frozenset([SOURCE])),
    }
)


@st.composite
def hosts(draw: st.DrawFn, name: str) -> Host:
    gpus = draw(HAS_GPUS)
    gpus = draw(boxes(name)) if gpus else gpus
    booked, whose, kept = draw(ODD), draw(ODD), draw(ODD)
    return a_host(
        name,
        gpus=gpus,
        booked={
            gpu.uuid: ReplicaId("r2" if whose >> at & 1 else "r1")
            for at, gpu in enumerate(gpus or ())
            if booked >> at & 1
        },
        kept={gpu.uuid: ModelName("k") for at, gpu in enumerate(gpus or ()) if booked & kept >> at & 1},
        **draw(FACTS),
    )


DEMANDS = st.fixed_dictionaries(
    {
        "engine": mostly("e", "f"),
        "priority": st.integers(0, 2),
        "gpu_class": st.sampled_from([None, None, "any", H100, A100, "mi300"]),
        "pp": mostly(1, 2),
        "gpu_memory_gb": mostly(None, 5.0, 33.3, 76.0, 100.0),
        "labels": mostly({}, {"zone": "a"}, {"zone": "b", "rack": "1"}),
        "min_memory_gb": mostly(None, 6.0, 15.5, 100.0),
        "min_disk_gb": mostly(None, 4.0, 50.0, 500.0),
        "env": mostly({}, {"A": "1"}),
    }
)
NODES = mostly(1, 2)
WIDTHS = st.sampled_from([1, 2, 4])
UNTIL = mostly(0.0, 12.5, 300.0)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    count = draw(st.integers(0, 4))
    profiles = []
    for number in range(draw(st.integers(0, 2))):
        nodes = draw(NODES)
        profiles.append(a_profile(f"p{number}", nodes=nodes, tp=draw(WIDTHS) * nodes, **draw(DEMANDS)))
    return World(
        model=a_model(*profiles),
        hosts=tuple(draw(hosts(f"n{number}")) for number in range(count)),
        backing_off={NodeId(f"n{number}"): draw(UNTIL) for number in range(count)},
    )
