"""Where a replica goes: one node, or every reason against every node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from llmgw.core.model import Model, Profile, newer_keys
from llmgw.core.node import Node, NodeId
from llmgw.core.rejection import Reason, Rejection
from llmgw.core.topology import islands


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A node that can run this profile. ``rejections`` are of the nodes and better profiles that were turned away."""

    node: NodeId
    profile: Profile
    rejections: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """No node can run any profile now. Without rejections there was no node, or no profile, to look at."""

    rejections: tuple[Rejection, ...] = ()


Verdict = Placement | Rejected


def place(
    model: Model,
    nodes: Iterable[Node],
    bookings: Mapping[NodeId, float],
    backing_off: Mapping[NodeId, float],
    now: float,
    *,
    lost: Collection[NodeId] = (),
) -> Verdict:
    """Find a node for one more replica of ``model``.

    ``bookings`` is the memory in GB that our replicas have on each node, whatever they use of it at the moment,
    ``backing_off`` until when a node is not tried again, ``lost`` the nodes that are silent. The best profile that fits
    anywhere wins, on the node with the most memory left; of equal nodes the first by id.
    """
    groups = islands(nodes)
    rejections: list[Rejection] = []
    for profile in sorted(model.profiles, key=lambda profile: -profile.priority):
        best: Node | None = None
        newer = newer_keys(model, profile)
        for island in groups:
            for node in island:
                free_gb = _free_gb(node, bookings)
                rejection = _reject(profile, node, free_gb, backing_off.get(node.id, now) - now, lost=lost, newer=newer)
                if rejection is not None:
                    rejections.append(rejection)
                elif best is None or free_gb > _free_gb(best, bookings):
                    best = node
        if best is not None:
            return Placement(node=best.id, profile=profile, rejections=tuple(rejections))
    return Rejected(rejections=tuple(rejections))


def _free_gb(node: Node, bookings: Mapping[NodeId, float]) -> float:
    # What is available at the moment would count an engine twice while it loads, or not at all before it does.
    return node.memory_gb - bookings.get(node.id, 0.0)


def _reject(
    profile: Profile,
    node: Node,
    free_gb: float,
    wait_seconds: float,
    *,
    lost: Collection[NodeId],
    newer: tuple[str, ...],
) -> Rejection | None:
    """The first reason against this node: those that an operator must remove before those that pass by themselves."""
    found = (
        _is_lost(node, lost)
        or _is_outdated(node, newer)
        or _lacks_engine(profile, node)
        or _lacks_gpu(profile)
        or _lacks_memory(profile, node, free_gb)
        or _lacks_disk(profile, node)
        or _backs_off(wait_seconds)
    )
    if found is None:
        return None
    reason, detail = found
    return Rejection(node=node.id, profile=profile.name, reason=reason, detail=detail)


def _is_lost(node: Node, lost: Collection[NodeId]) -> tuple[Reason, str] | None:
    if node.id not in lost:
        return None
    return Reason.NODE_LOST, "the node is silent: see whether its agent runs and reaches the server"


def _is_outdated(node: Node, newer: tuple[str, ...]) -> tuple[Reason, str] | None:
    # It would start the engine without them: one that is ready, and is not what was asked for.
    if not node.outdated or not newer:
        return None
    return Reason.AGENT_OUTDATED, f"its agent is of an older llmgw, which passes over {', '.join(newer)}: upgrade it"


def _lacks_engine(profile: Profile, node: Node) -> tuple[Reason, str] | None:
    name = profile.engine
    found = next((found for found in node.engines if found.engine == name), None)
    if found is None:
        return Reason.NO_ENGINE, (
            f"no binary of the engine {name!r} was found: install it where PATH finds it, or set engines.{name}.bin"
        )
    # A profile's own environment may say where the libraries are.
    if found.broken is not None and not (profile.env and found.missing_libraries):
        return Reason.ENGINE_BROKEN, f"{found.program[0]} can't run {name}: {found.broken}"
    return None


def _lacks_gpu(profile: Profile) -> tuple[Reason, str] | None:
    if profile.gpu_class is None:
        return None
    return Reason.NO_GPU, f"asks for a GPU of class {profile.gpu_class!r}; the node reports no GPU"


def _lacks_memory(profile: Profile, node: Node, free_gb: float) -> tuple[Reason, str] | None:
    need_gb = profile.min_memory_gb
    if need_gb is None or need_gb <= free_gb:
        return None
    booked_gb = node.memory_gb - free_gb
    return Reason.NOT_ENOUGH_MEMORY, (
        f"needs {need_gb:g} GB of memory; {max(free_gb, 0.0):.4g} of {node.memory_gb:.4g} GB are free, "
        f"{booked_gb:.4g} GB are booked by replicas"
    )


def _lacks_disk(profile: Profile, node: Node) -> tuple[Reason, str] | None:
    need_gb = profile.min_disk_gb
    if need_gb is None:
        return None
    # Which of its disks a node fills with weights isn't known here: the fullest must do, or a fetch ends half way.
    fullest = min(node.disks, key=lambda disk: disk.free_gb, default=None)
    if fullest is None:
        return Reason.NOT_ENOUGH_DISK, f"needs {need_gb:g} GB on disk; the node reports no disk"
    if need_gb <= fullest.free_gb:
        return None
    return Reason.NOT_ENOUGH_DISK, (
        f"needs {need_gb:g} GB on disk; {fullest.free_gb:.4g} of {fullest.total_gb:.4g} GB are free at {fullest.path}"
    )


def _backs_off(wait_seconds: float) -> tuple[Reason, str] | None:
    if wait_seconds <= 0:
        return None
    return Reason.BACKING_OFF, f"the last try here failed; the next one is in {wait_seconds:.0f} s"
