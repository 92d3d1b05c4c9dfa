"""What a node reports of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

NodeId = NewType("NodeId", str)

# How the warning begins of a node whose fake inventory is wrong: nobody has to live with that one.
FAKE_TROUBLE = "the fake inventory can't be used"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The filesystem that holds ``path``; sizes in GB of 10^9 bytes."""

    path: str
    free_gb: float
    total_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagFound:
    """A flag of a launch that a binary does not simply take: who gives it ("llmgw" or "profile"), what the binary says
    of it in one word (``engines.check.FlagState``), and what to write instead."""

    flag: str
    given_by: str
    state: str
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFound:
    """A binary that a node would launch for an engine (a path, or the module of an embedded program), and what came of
    trying it.

    ``broken``: why nothing can be launched with it, in one line, and ``starts`` false where that is because it does not
    run at all. ``problems``: what else of it does not fit, one line each. ``missing_libraries``: those that its loader
    did not find. ``flags`` are those of an ordinary launch that there is something to tell of, the worst first;
    ``flags_ok`` counts the others. None of it is known before ``checked``.
    """

    engine: str
    program: tuple[str, ...]
    version: str | None = None
    checked: bool = False
    starts: bool = True
    broken: str | None = None
    problems: tuple[str, ...] = ()
    missing_libraries: tuple[str, ...] = ()
    flags: tuple[FlagFound, ...] = ()
    flags_ok: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignUse:
    """Memory of a GPU that nothing of ours holds, in GB of 10^9 bytes: whose it is, None where the device does not
    say (a process of a container, or memory that an ended one has not given back yet)."""

    memory_gb: float
    pid: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """A part of a GPU that stands for itself. ``shape`` is the device's word for its size, as ``1g.10gb``."""

    uuid: str
    shape: str
    memory_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. ``uuid`` is what it is known by; ``index`` is its place in PCI bus order now, which a reboot may change.

    Memory in GB of 10^9 bytes. ``nvlink_peers`` are the UUIDs that it reaches over NVLink, directly or through a
    switch: None where that is not known, () where there are none. ``mig`` is None where it is not cut into instances;
    one that is takes no replica. ``broken``: why nothing can run on it, in one line. None of a figure: the device does
    not say. ``ecc_errors`` counts those that could not be corrected.
    """

    uuid: str
    index: int
    gpu_class: str
    name: str
    memory_gb: float
    memory_used_gb: float
    pci: str | None = None
    temperature_c: float | None = None
    utilization_percent: float | None = None
    ecc_errors: int | None = None
    nvlink_peers: tuple[str, ...] | None = None
    mig: tuple[MigInstance, ...] | None = None
    foreign: tuple[ForeignUse, ...] = ()
    broken: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFound:
    """A network that the node was declared to be on: its interface and this node's address there, where they are known,
    and its adapters (``mlx5_0``). ``down``: why it is out of service here, in one line."""

    name: str
    interface: str | None = None
    address: str | None = None
    hcas: tuple[str, ...] = ()
    down: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine as its agent sees it now.

    ``memory_gb`` is all of its RAM in GB of 10^9 bytes, ``memory_foreign_gb`` what programs that are not ours hold of
    it. ``gpus`` is None where nobody has looked: then no profile that needs one is placed there, and no other is kept
    from one. ``labels`` are those of its agent.yaml. ``warnings``: what of the machine makes it slow or odd, one line
    each. ``clock`` is its wall clock in seconds since 1970 when it said all this. ``outdated`` is the server's word for
    an agent that passes over what definitions have gained since (``newer_keys``), and
    ``fetches`` False for one that fetches no weights.
    """

    id: NodeId
    cores: int
    cpu_flags: frozenset[str]
    memory_gb: float
    memory_available_gb: float
    memory_foreign_gb: float = 0.0
    disks: tuple[Disk, ...] = ()
    engines: tuple[EngineFound, ...] = ()
    gpus: tuple[Gpu, ...] | None = None
    gpu_driver: str | None = None
    fabrics: tuple[FabricFound, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    warnings: tuple[str, ...] = ()
    clock: float | None = None
    outdated: bool = False
    fetches: bool = True
