"""The smallest change that would give a place to a model that has none, from what speaks against each node."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from llmgw.core.filters import Need, count_gpus, find_reasons, is_blind, needs_gb, shorten, small_disks, tell_foreign
from llmgw.core.hosts import CRUMB_GB, Host, spare_gb
from llmgw.core.model import ANY_CLASS, Model, Profile
from llmgw.core.node import Gpu, NodeId
from llmgw.core.rejection import Reason

# How much each change asks of somebody, the least first; of what is counted in GB, more asks for more.
EFFORTS: Mapping[Reason, float] = {
    Reason.BACKING_OFF: 1.0,
    Reason.CORDONED: 5.0,
    Reason.NODE_SILENT: 10.0,
    Reason.NOT_ENOUGH_MEMORY: 15.0,
    Reason.NOT_ENOUGH_GPU_MEMORY: 15.0,
    Reason.NOT_ENOUGH_DISK: 15.0,
    Reason.NODE_LOST: 20.0,
    Reason.NOT_ENOUGH_GPUS: 20.0,
    Reason.AGENT_OUTDATED: 20.0,
    # A label is a pin that somebody has meant.
    Reason.LABELS_DIFFER: 30.0,
    Reason.NO_ENGINE: 40.0,
    Reason.ENGINE_BROKEN: 40.0,
    Reason.FABRIC_DOWN: 40.0,
    Reason.NO_FABRIC: 80.0,
    # No word of an operator puts another GPU there.
    Reason.NO_GPU: math.inf,
    Reason.WRONG_CLASS: math.inf,
}
CLASS_EFFORT = 25.0
REPAIR_EFFORT = 20.0
NEW_NODE_EFFORT = 200.0

# What stands for the fabric of a fleet that has none.
NO_NAME = "NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to do about ``reasons``, at ``node`` or (None) elsewhere.

    ``gpus`` are the UUIDs that it is about, ``gb`` how much of them, of memory or of each disk is to come free. ``key``
    is one of the profile's and ``value`` what to write there, None to take it out. ``nodes`` is how many to add.
    """

    text: str
    reasons: tuple[Reason, ...] = ()
    node: NodeId | None = None
    gpus: tuple[str, ...] = ()
    gb: float | None = None
    key: str | None = None
    value: str | float | None = None
    nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlock:
    """The smallest change after which ``profile`` has a place: on ``node``, or on several nodes or a new one (None).

    ``text`` says all of it; none of the ``steps`` is enough alone.
    """

    text: str
    profile: str
    node: NodeId | None = None
    steps: tuple[Step, ...] = ()


class _Plan(NamedTuple):
    """What has to be done at one node."""

    effort: float
    id: NodeId
    steps: tuple[Step, ...]


class _Way(NamedTuple):
    """A profile as it is, or written otherwise, and where: the nodes of one fabric, or (None) any node."""

    need: Need
    edits: tuple[Step, ...]


def find_unlock(model: Model, hosts: Sequence[Host], backing_off: Mapping[NodeId, float], now: float) -> Unlock | None:
    """What to change so that ``place`` finds a place; None where the model has no profile to place.

    ``hosts`` are by id. Of changes that ask for as much, that of the profile which is tried first, then of the first
    node.
    """
    classes = sorted({name for host in hosts for name in host.totals})
    blind = is_blind(hosts)
    best: tuple[float, Unlock] | None = None
    for profile in sorted(model.profiles, key=lambda profile: -profile.priority):
        for written, edits in _write_classes(profile, classes):
            for fabric in _find_fabrics(written, hosts):
                need = Need(model=model, profile=written, backing_off=backing_off, now=now, fabric=fabric, blind=blind)
                effort, unlock = _unlock(_Way(need, edits), hosts)
                if best is None or effort < best[0]:
                    best = effort, unlock
    return best[1] if best is not None else None


def _write_classes(profile: Profile, classes: Sequence[str]) -> Iterator[tuple[Profile, tuple[Step, ...]]]:
    """The profile for each class of GPU that there is: which is a change where it names another."""
    if profile.gpus == 0 or not classes:
        yield profile, ()
        return
    free = profile.gpu_class in (None, ANY_CLASS)
    if not free:
        yield profile, ()
    for name in classes:
        if free:
            yield replace(profile, gpu_class=name), ()
        elif name != profile.gpu_class:
            text = f"write gpu_class: {name} (there is {', '.join(classes)})"
            # Cards of another class make up for those of this one that are booked or full as well.
            edit = Step(text=text, reasons=(Reason.WRONG_CLASS, *_OF_FREE_GPUS), key="gpu_class", value=name)
            yield replace(profile, gpu_class=name), (edit,)


def _find_fabrics(profile: Profile, hosts: Sequence[Host]) -> list[str | None]:
    if profile.nodes == 1:
        return [None]
    return [*sorted({fabric.name for host in hosts for fabric in host.node.fabrics})] or [NO_NAME]


def _unlock(way: _Way, hosts: Sequence[Host]) -> tuple[float, Unlock]:
    need, edits = way
    plans = _find_cheapest(need, hosts)
    steps = [*edits, *(step for plan in plans for step in plan.steps)]
    effort = CLASS_EFFORT * len(edits) + sum(plan.effort for plan in plans)
    lacking = need.profile.nodes - len(plans)
    if lacking:
        steps.append(_add_nodes(need, lacking))
        effort += NEW_NODE_EFFORT * lacking
    steps = _merge(steps)
    return effort, Unlock(
        text="; ".join(step.text for step in steps),
        profile=need.profile.name,
        node=plans[0].id if need.profile.nodes == 1 and plans else None,
        steps=tuple(steps),
    )


def _find_cheapest(need: Need, hosts: Sequence[Host]) -> list[_Plan]:
    """The nodes that ask for the least, as many as are needed, or fewer where a new one asks for less."""
    wanted = need.profile.nodes
    cheapest: list[_Plan] = []
    reasons = {host.id: find_reasons(need, host) for host in hosts}
    at_least = [(sum(EFFORTS[reason] for reason in reasons[host.id]), host.id, host) for host in hosts]
    for effort, _, host in sorted(at_least, key=lambda each: each[:2]):
        # (what there is to do at a node never asks for less than its reasons)
        if effort >= (cheapest[-1].effort if len(cheapest) == wanted else NEW_NODE_EFFORT):
            break
        plan = _plan(need, host, reasons[host.id])
        if plan is not None and plan.effort < NEW_NODE_EFFORT:
            insort(cheapest, plan)
            del cheapest[wanted:]
    return cheapest


def _plan(need: Need, host: Host, reasons: Iterable[Reason]) -> _Plan | None:
    """All that has to be done at this node; None where it can't be done."""
    effort = 0.0
    steps: list[Step] = []
    left = list(reasons)
    of_gpus = [reason for reason in left if reason in _OF_FREE_GPUS]
    for reason in left:
        if reason not in of_gpus:
            cure = _CURES[reason](need, host)
        elif reason is of_gpus[0]:
            cure = _free_gpus(need, host, of_gpus)
        else:
            continue
        if cure is None:
            return None
        effort += cure[0]
        steps += cure[1]
    return _Plan(effort, host.id, tuple(steps))


def _merge(steps: Iterable[Step]) -> list[Step]:
    """Of changes to one key the one that suits all nodes."""
    merged: list[Step] = []
    edited: dict[str, int] = {}
    for step in steps:
        at = edited.get(step.key) if step.key is not None else None
        if at is None:
            if step.key is not None:
                edited[step.key] = len(merged)
            merged.append(step)
        elif _asks_for(step) < _asks_for(merged[at]):
            merged[at] = step
    return merged


def _asks_for(step: Step) -> float:
    return step.value if isinstance(step.value, float) else 0.0


# What to do about each reason: how much it asks, and the steps. Words are found for the few nodes that come near.

_Cure = tuple[float, list[Step]]
_OF_FREE_GPUS = (Reason.NOT_ENOUGH_GPUS, Reason.NOT_ENOUGH_GPU_MEMORY)


def _do(reason: Reason, host: Host, text: str, more_effort: float = 0.0) -> _Cure:
    return EFFORTS[reason] + more_effort, [Step(text=text, reasons=(reason,), node=host.id)]


def _bring_back_lost(need: Need, host: Host) -> _Cure:
    return _do(Reason.NODE_LOST, host, f"bring {host.id} back (silent for its lease)")


def _bring_back_silent(need: Need, host: Host) -> _Cure:
    return _do(Reason.NODE_SILENT, host, f"bring {host.id} back (its link is down)")


def _uncordon(need: Need, host: Host) -> _Cure:
    return _do(Reason.CORDONED, host, f"uncordon {host.id}")


def _label(need: Need, host: Host) -> _Cure:
    differ = [f"{key}={value}" for key, value in sorted(need.profile.labels.items()) if host.labels.get(key) != value]
    return _do(Reason.LABELS_DIFFER, host, f"label {host.id} {' '.join(differ)}")


def _upgrade(need: Need, host: Host) -> _Cure:
    return _do(Reason.AGENT_OUTDATED, host, f"upgrade llmgw on {host.id} (it passes over {', '.join(need.newer)})")


def _install(need: Need, host: Host) -> _Cure:
    name = need.profile.engine
    return _do(Reason.NO_ENGINE, host, f"install {name} on {host.id}, or set engines.{name}.bin in its agent.yaml")


def _mend_engine(need: Need, host: Host) -> _Cure:
    found = host.engines[need.profile.engine]
    return _do(Reason.ENGINE_BROKEN, host, f"mend {found.program[0]} on {host.id} ({found.broken})")


def _declare_fabric(need: Need, host: Host) -> _Cure:
    return _do(Reason.NO_FABRIC, host, f"declare fabric {need.fabric} in the agent.yaml of {host.id}")


def _mend_fabric(need: Need, host: Host) -> _Cure:
    why = next(fabric.down for fabric in host.node.fabrics if fabric.name == need.fabric)
    text = f"put fabric {need.fabric} into service on {host.id} ({why or 'it has no address there'})"
    return _do(Reason.FABRIC_DOWN, host, text)


def _wait(need: Need, host: Host) -> _Cure:
    seconds = math.ceil(need.wait_seconds(host))
    text = f"wait {seconds} s: the last try on {host.id} failed"
    # Waiting asks for nothing but time, and never for as much as a hand does.
    return _do(Reason.BACKING_OFF, host, text, seconds / (seconds + 60.0))


def _free_memory(need: Need, host: Host) -> _Cure | None:
    need_gb, node = need.profile.min_memory_gb or 0.0, host.node
    if need_gb > node.memory_gb + CRUMB_GB:
        of = f"{host.id} has {max(host.free_gb, 0.0):.4g} of {node.memory_gb:.4g} GB free"
        return _lower(Reason.NOT_ENOUGH_MEMORY, "min_memory_gb", need_gb, host.free_gb, of)
    gb = _round_up(need_gb - host.free_gb)
    held = [f"replicas have booked {host.booked_gb:.4g} GB"] if host.booked_gb else []
    held += [f"other programs hold {node.memory_foreign_gb:.4g} GB"] if node.memory_foreign_gb else []
    step = Step(
        text=f"free {gb:g} GB of memory on {host.id} ({', '.join(held)})",
        reasons=(Reason.NOT_ENOUGH_MEMORY,),
        node=host.id,
        gb=gb,
    )
    return EFFORTS[Reason.NOT_ENOUGH_MEMORY] + gb / 100, [step]


def _free_disks(need: Need, host: Host) -> _Cure | None:
    need_gb, reason = need.profile.min_disk_gb or 0.0, Reason.NOT_ENOUGH_DISK
    disks = small_disks(need_gb, host)
    if not disks:
        text = f"take min_disk_gb out ({host.id} reports no disk)"
        return 2 * CLASS_EFFORT, [Step(text=text, reasons=(reason,), key="min_disk_gb")]
    fullest = min(disks, key=lambda disk: disk.free_gb)
    if any(need_gb > disk.total_gb + CRUMB_GB for disk in disks):
        of = f"{host.id} has {fullest.free_gb:.4g} of {fullest.total_gb:.4g} GB free at {fullest.path}"
        return _lower(reason, "min_disk_gb", need_gb, fullest.free_gb, of)
    gb = _round_up(need_gb - fullest.free_gb)
    where = " and ".join(
        f"{_round_up(need_gb - disk.free_gb):g} GB at {disk.path}" for disk in sorted(disks, key=lambda disk: disk.path)
    )
    step = Step(text=f"free {where} on {host.id}", reasons=(reason,), node=host.id, gb=gb)
    return EFFORTS[reason] + gb / 100, [step]


def _lower(reason: Reason, key: str, need_gb: float, have_gb: float, of: str) -> _Cure | None:
    """Ask for less, as far as that is something to say: the further, the less likely to be meant."""
    value = math.floor(have_gb * 10 + CRUMB_GB) / 10
    if value <= 0:
        return None
    step = Step(text=f"lower {key} to {value:g} ({of})", reasons=(reason,), key=key, value=value)
    return CLASS_EFFORT + 300.0 * (1 - value / need_gb), [step]


def _free_gpus(need: Need, host: Host, reasons: Sequence[Reason]) -> _Cure | None:
    """Free as many GPUs as are needed, with as much memory: those that ask for the least."""
    gpus = [gpu for gpu in host.node.gpus or () if gpu.gpu_class == need.gpu_class]
    large = [gpu for gpu in gpus if gpu.memory_gb + CRUMB_GB >= needs_gb(need, gpu)]
    if len(large) < need.gpus:
        return _lower_gpu_memory(need, host)
    ready = {gpu.uuid for gpu in host.free}
    lacking = need.gpus - sum(gpu.uuid in ready for gpu in large)
    holds = Counter(host.booked[gpu.uuid] for gpu in large if gpu.uuid in host.booked)

    def ask(gpu: Gpu) -> tuple[object, ...]:
        holder = host.booked.get(gpu.uuid)
        size = holds[holder] if holder is not None else 0
        # Of replicas that hold enough the smallest, else the largest: as few as can be have to go.
        return _ask_of(need, host, gpu), size < lacking, size if size >= lacking else -size, holder or "", gpu.index

    chosen = sorted(large, key=ask)[: need.gpus]
    taken = [gpu for gpu in chosen if gpu.uuid not in ready]
    full = [gpu for gpu in chosen if spare_gb(gpu) + CRUMB_GB < needs_gb(need, gpu)]
    steps = [_free_card(need, host, gpu) for gpu in full]
    if taken:
        told = tuple(reasons) if not full else (Reason.NOT_ENOUGH_GPUS,)
        steps.insert(0, Step(text=_tell_taken(host, taken), reasons=told, node=host.id, gpus=_uuids(taken)))
    least = sum(EFFORTS[reason] for reason in reasons)
    return max(least, sum(_ask_of(need, host, gpu) for gpu in chosen)), steps


def _ask_of(need: Need, host: Host, gpu: Gpu) -> float:
    """How much it asks to have this GPU."""
    lacking_gb = needs_gb(need, gpu) - spare_gb(gpu)
    effort = EFFORTS[Reason.NOT_ENOUGH_GPU_MEMORY] + lacking_gb / 100 if lacking_gb > CRUMB_GB else 0.0
    effort += EFFORTS[Reason.NOT_ENOUGH_GPUS] if gpu.uuid in host.booked else 0.0
    return effort + REPAIR_EFFORT * ((gpu.broken is not None) + (gpu.mig is not None))


def _tell_taken(host: Host, taken: Sequence[Gpu]) -> str:
    holders = Counter(host.booked[gpu.uuid] for gpu in taken if gpu.uuid in host.booked)
    told = [f"{replica} holds {count}" for replica, count in sorted(holders.items())]
    for gpu in sorted(taken, key=lambda gpu: gpu.index):
        told += [f"{shorten(gpu.uuid)} is broken ({gpu.broken})"] if gpu.broken is not None else []
        told += [f"{shorten(gpu.uuid)} is cut into instances"] if gpu.mig is not None else []
    more = "1 more free GPU" if len(taken) == 1 else f"{len(taken)} more free GPUs"
    return f"{host.id} needs {more}: {', '.join(told)}"


def _free_card(need: Need, host: Host, gpu: Gpu) -> Step:
    gb = min(_round_up(needs_gb(need, gpu) - spare_gb(gpu)), sum(use.memory_gb for use in gpu.foreign))
    text = f"free {gb:.4g} GB on {host.id}'s {shorten(gpu.uuid)} ({tell_foreign(gpu)})"
    return Step(text=text, reasons=(Reason.NOT_ENOUGH_GPU_MEMORY,), node=host.id, gpus=(gpu.uuid,), gb=gb)


def _lower_gpu_memory(need: Need, host: Host) -> _Cure | None:
    asked = need.profile.gpu_memory_gb
    spare = sorted((spare_gb(gpu) for gpu in host.free if gpu.gpu_class == need.gpu_class), reverse=True)
    if asked is None or len(spare) < need.gpus:
        return None
    have = spare[need.gpus - 1]
    of = f"{host.id} has {count_gpus(need.gpus)} of class {need.gpu_class} with {have:.4g} GB free"
    return _lower(Reason.NOT_ENOUGH_GPU_MEMORY, "gpu_memory_gb", asked, have, of)


def _uuids(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    return tuple(sorted(gpu.uuid for gpu in gpus))


def _round_up(gb: float) -> float:
    """To a tenth that is enough."""
    return math.ceil(gb * 10 - CRUMB_GB) / 10


def _add_nodes(need: Need, count: int) -> Step:
    profile = need.profile
    has = [f"the engine {profile.engine}"]
    if need.gpus:
        of = f" of class {need.gpu_class}" if need.gpu_class is not None else ""
        room = f" with {profile.gpu_memory_gb:g} GB" if profile.gpu_memory_gb is not None else ""
        has.append(f"{count_gpus(need.gpus)}{of}{room}")
    has += [f"{profile.min_memory_gb:g} GB of memory"] if profile.min_memory_gb is not None else []
    has += [f"{profile.min_disk_gb:g} GB on disk"] if profile.min_disk_gb is not None else []
    has += [f"{key}={value}" for key, value in sorted(profile.labels.items())]
    where = f" to fabric {need.fabric}" if need.fabric is not None else ""
    nodes = "a node" if count == 1 else f"{count} nodes"
    return Step(text=f"add {nodes}{where} with {', '.join(has)}", nodes=count)


_CURES: Mapping[Reason, Callable[[Need, Host], _Cure | None]] = {
    Reason.NODE_LOST: _bring_back_lost,
    Reason.NODE_SILENT: _bring_back_silent,
    Reason.CORDONED: _uncordon,
    Reason.LABELS_DIFFER: _label,
    Reason.AGENT_OUTDATED: _upgrade,
    Reason.NO_ENGINE: _install,
    Reason.ENGINE_BROKEN: _mend_engine,
    Reason.NO_FABRIC: _declare_fabric,
    Reason.FABRIC_DOWN: _mend_fabric,
    Reason.NOT_ENOUGH_MEMORY: _free_memory,
    Reason.NOT_ENOUGH_DISK: _free_disks,
    Reason.BACKING_OFF: _wait,
}
