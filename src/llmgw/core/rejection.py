"""The closed list of reasons why a node is not chosen for a replica."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why not this node. Each value is what ``explain`` output and JSON carry."""

    NODE_LOST = "node_lost"
    NODE_SILENT = "node_silent"
    CORDONED = "cordoned"
    LABELS_DIFFER = "labels_differ"
    AGENT_OUTDATED = "agent_outdated"
    NO_ENGINE = "no_engine"
    ENGINE_BROKEN = "engine_broken"
    NO_GPU = "no_gpu"
    WRONG_CLASS = "wrong_class"
    NO_FABRIC = "no_fabric"
    FABRIC_DOWN = "fabric_down"
    NOT_ENOUGH_GPUS = "not_enough_gpus"
    NOT_ENOUGH_GPU_MEMORY = "not_enough_gpu_memory"
    NOT_ENOUGH_MEMORY = "not_enough_memory"
    NOT_ENOUGH_DISK = "not_enough_disk"
    NOT_ENOUGH_NODES = "not_enough_nodes"
    BACKING_OFF = "backing_off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """One node, one profile, one reason; ``detail`` has the numbers, for a person."""

    node: str
    profile: str
    reason: Reason
    detail: str
