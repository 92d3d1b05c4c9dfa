"""A node as placement sees it: what it has, what an operator said of it, and what is booked there already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from llmgw.core.learned import USUAL_SHARE
from llmgw.core.model import ModelName
from llmgw.core.node import EngineFound, Gpu, Node, NodeId
from llmgw.core.replica import ReplicaId

# Sums of bookings drift: nobody is turned away for a kilobyte.
CRUMB_GB = 1e-6


class Standing(StrEnum):
    """Whether a node can be told anything: ``silent`` has lost its link, ``lost`` its lease too."""

    READY = "ready"
    SILENT = "silent"
    LOST = "lost"


def _derived() -> Any:
    return field(init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One node. It never changes: a node that does gets another, so that what is derived here is derived once.

    ``labels`` are the agent's with the operator's over them. ``booked_gb`` is the memory in GB that our replicas
    have there, whatever they use of it at the moment, and ``booked`` whose each booked GPU is, by UUID; both count
    what is on its way out. That is ``leaving``, with the memory in GB that each of them gives back: told to whoever
    asks why there is no room, and nothing is placed by it. So is ``kept``: of the GPUs that are booked those which
    nothing runs on any more, by UUID, with the model whose next replica they are for, as ``kept_gb`` is of the memory
    that is booked. ``replicas`` counts the living ones of each model,
    ``holds`` are the sources whose weights the node is known to have. ``begun``: of those that
    were not fetched to their end, the GB on its disks that the next fetch has no need of.

    ``free_gb`` and ``free`` are what is left: GPUs in the order of their indices that nobody has booked and that are
    neither broken nor cut into instances. What other programs hold of one is still in it. ``engines`` is the node's by
    name.

    Sets of free GPUs are bits, bit 0 the first of ``free``: ``classes`` are those of each class, ``roomy`` those with
    as much memory as an engine usually takes, ``links`` by each those that it reaches over NVLink (None: not known).
    ``spare_gb`` is what other programs leave of each. ``totals`` counts the GPUs of each class, free or not, ``whole``
    says that all are free, and ``fabrics`` are those in service here.
    """

    node: Node
    standing: Standing = Standing.READY
    cordoned: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    booked_gb: float = 0.0
    booked: Mapping[str, ReplicaId] = field(default_factory=dict)
    leaving: Mapping[ReplicaId, float] = field(default_factory=dict)
    kept: Mapping[str, ModelName] = field(default_factory=dict)
    kept_gb: Mapping[ModelName, float] = field(default_factory=dict)
    replicas: Mapping[ModelName, int] = field(default_factory=dict)
    holds: frozenset[str] = frozenset()
    begun: Mapping[str, float] = field(default_factory=dict)
    id: NodeId = field(init=False)
    engines: Mapping[str, EngineFound] = _derived()
    free_gb: float = _derived()
    free: tuple[Gpu, ...] = _derived()
    spare_gb: tuple[float, ...] = _derived()
    classes: Mapping[str, int] = _derived()
    roomy: int = _derived()
    links: tuple[int, ...] | None = _derived()
    totals: Mapping[str, int] = _derived()
    whole: bool = _derived()
    fabrics: frozenset[str] = _derived()

    def __post_init__(self) -> None:
        node = self.node
        # (frozen for everybody else)
        put = object.__setattr__
        put(self, "id", node.id)
        put(self, "engines", {found.engine: found for found in node.engines})
        # What is available at the moment would count an engine twice while it loads, or not at all before it does.
        put(self, "free_gb", node.memory_gb - node.memory_foreign_gb - self.booked_gb)
        gpus = node.gpus or ()
        unbooked = [gpu for gpu in gpus if gpu.uuid not in self.booked and gpu.broken is None and gpu.mig is None]
        free = tuple(sorted(unbooked, key=lambda gpu: gpu.index))
        spare = tuple(spare_gb(gpu) for gpu in free)
        classes: dict[str, int] = {}
        roomy = 0
        for at, gpu in enumerate(free):
            classes[gpu.gpu_class] = classes.get(gpu.gpu_class, 0) | 1 << at
            if spare[at] + CRUMB_GB >= USUAL_SHARE * gpu.memory_gb:
                roomy |= 1 << at
        totals: dict[str, int] = {}
        for gpu in gpus:
            totals[gpu.gpu_class] = totals.get(gpu.gpu_class, 0) + 1
        put(self, "free", free)
        put(self, "spare_gb", spare)
        put(self, "classes", classes)
        put(self, "roomy", roomy)
        put(self, "links", _find_links(free))
        put(self, "totals", totals)
        put(self, "whole", len(free) == len(gpus) > 0)
        # Without an address there its engines have nowhere to meet.
        in_service = (fabric for fabric in node.fabrics if fabric.down is None and fabric.address is not None)
        put(self, "fabrics", frozenset(fabric.name for fabric in in_service))


def spare_gb(gpu: Gpu) -> float:
    """What other programs leave of its memory."""
    return gpu.memory_gb - sum(use.memory_gb for use in gpu.foreign)


def _find_links(free: tuple[Gpu, ...]) -> tuple[int, ...] | None:
    place = {gpu.uuid: at for at, gpu in enumerate(free)}
    links = [0] * len(free)
    for at, gpu in enumerate(free):
        if gpu.nvlink_peers is None:
            return None
        for peer in gpu.nvlink_peers:
            other = place.get(peer, at)
            if other != at:
                links[at] |= 1 << other
                # A link has two ends, whichever of them was able to tell.
                links[other] |= 1 << at
    return tuple(links)
