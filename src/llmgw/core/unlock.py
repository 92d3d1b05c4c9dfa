"""The smallest change that would give a place to a model that has none, from what speaks against each node."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from operator import itemgetter
from typing import NamedTuple

from llmgw.core.filters import (
    Need,
    count_gpus,
    disk_gb,
    find_reasons,
    is_blind,
    keep_few,
    needs_gb,
    shorten,
    small_disks,
    tell_foreign,
    tell_kept,
    tell_lack,
)
from llmgw.core.hosts import CRUMB_GB, Host, Standing, spare_gb
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
    # Of each replica that has to stop, however many GPUs it has.
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
# Of each replica that is on its way out anyway, and each model that room is kept for.
WAIT_EFFORT = 2.0
# A class that was meant, and is written otherwise.
SPELLING_EFFORT = 4.0
CLASS_EFFORT = 25.0
REPAIR_EFFORT = 20.0
NEW_NODE_EFFORT = 200.0

# What stands for the fabric of a fleet that has none.
NO_NAME = "NAME"

# Nodes that ask for as much as the dearest of a group: of so many more it is looked at which have replicas in common.
MOST_ALIKE = 16


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
    """What has to be done at one node. ``effort`` has that of each of ``stops`` in it: replicas that have to be gone,
    and models that room is kept for, which asks for no more where that is on other nodes too."""

    effort: float
    id: NodeId
    steps: tuple[Step, ...]
    stops: Mapping[str, float]


class _Way(NamedTuple):
    """A profile as it is, or written otherwise. ``of_class``: the class is the profile's own, or that of its nodes."""

    need: Need
    edits: tuple[Step, ...]
    effort: float
    of_class: bool


# A node with the least that there can be to do, before anybody has looked at what that is.
_Near = tuple[float, NodeId, Host]


def find_unlock(
    model: Model,
    hosts: Sequence[Host],
    backing_off: Mapping[NodeId, float],
    now: float,
    *,
    away: Mapping[NodeId, Standing] | None = None,
) -> Unlock | None:
    """What to change so that ``place`` finds a place; None where the model has no profile to place.

    ``hosts`` are by id. Of changes that ask for as much, that of the profile which is tried first, then of the first
    node. ``away`` are nodes of which nothing but their names is known: to have them back comes before a new one.
    """
    classes = sorted({name for host in hosts for name in host.totals})
    blind = is_blind(hosts)
    on: dict[str, set[NodeId]] = {}
    for host in hosts:
        for declared in host.node.fabrics:
            on.setdefault(declared.name, set()).add(host.id)
    best: Unlock | None = None
    least = math.inf
    for profile in sorted(model.profiles, key=lambda profile: -profile.priority):
        fabrics: list[str | None] = [*(sorted(on) or [NO_NAME])] if profile.nodes > 1 else [None]
        for written, edits, effort, of_class in _write_classes(profile, classes):
            need = Need(model=model, profile=written, backing_off=backing_off, now=now, blind=blind)
            ranked = _rank(need, hosts)
            for fabric in fabrics:
                on_it = need if fabric is None else replace(need, fabric=fabric)
                near = iter(ranked) if fabric is None else _approach(ranked, fabric, on.get(fabric, set()))
                found, unlock = _unlock(_Way(on_it, edits, effort, of_class), near, least)
                if found < least:
                    least, best = found, unlock
    if best is not None and away:
        return _bring_back(best, away, least)
    return best


def _write_classes(profile: Profile, classes: Sequence[str]) -> Iterator[tuple[Profile, tuple[Step, ...], float, bool]]:
    """The profile for each class of GPU that there is: which is a change where it names another."""
    free = profile.gpu_class in (None, ANY_CLASS)
    if profile.gpus == 0 or not classes or not free:
        yield profile, (), 0.0, not free
    if profile.gpus == 0:
        return
    for name in classes:
        if free:
            yield replace(profile, gpu_class=name), (), 0.0, False
        elif name != profile.gpu_class:
            text = f"write gpu_class: {name} (there is {', '.join(classes)})"
            # Cards of another class make up for those of this one that are booked or full as well.
            edit = Step(text=text, reasons=(Reason.WRONG_CLASS, *_OF_FREE_GPUS), key="gpu_class", value=name)
            meant = _spell(name) == _spell(profile.gpu_class or "")
            yield replace(profile, gpu_class=name), (edit,), SPELLING_EFFORT if meant else CLASS_EFFORT, True


def _spell(gpu_class: str) -> str:
    """What is the same for those who write a class as it comes to mind: ``H100_80GB``."""
    return "".join(filter(str.isalnum, gpu_class.lower())).removesuffix("b")


def _rank(need: Need, hosts: Sequence[Host]) -> list[_Near]:
    """The nodes at which there is less to do than to buy another, whatever their fabrics."""
    near: list[_Near] = []
    for host in hosts:
        effort = _ask_at_least([reason for reason in find_reasons(need, host) if reason not in _OF_FABRICS], host)
        if effort < NEW_NODE_EFFORT:
            near.append((effort, host.id, host))
    return sorted(near, key=itemgetter(0, 1))


def _ask_at_least(reasons: Sequence[Reason], host: Host) -> float:
    """What there is to do at a node never asks for less."""
    room = [reason for reason in reasons if reason in _OF_ROOM]
    rest = sum(EFFORTS[reason] for reason in reasons if reason not in _OF_ROOM)
    if room and (host.leaving or host.kept or host.kept_gb):
        return rest + WAIT_EFFORT
    if Reason.NOT_ENOUGH_GPUS in room and Reason.NOT_ENOUGH_GPU_MEMORY in room:
        # (cards that come free may have the memory)
        room.remove(Reason.NOT_ENOUGH_GPU_MEMORY)
    return rest + sum(EFFORTS[reason] for reason in room)


def _approach(ranked: Sequence[_Near], fabric: str, declared: set[NodeId]) -> Iterator[_Near]:
    """The same with what there is to do before they are on this fabric."""
    down, far = EFFORTS[Reason.FABRIC_DOWN], EFFORTS[Reason.NO_FABRIC]
    of_it = [
        (effort if fabric in host.fabrics else effort + down, name, host)
        for effort, name, host in ranked
        if name in declared
    ]
    others = ((effort + far, name, host) for effort, name, host in ranked if name not in declared)
    return merge(sorted(of_it, key=itemgetter(0, 1)), others, key=itemgetter(0, 1))


def _unlock(way: _Way, near: Iterator[_Near], most: float) -> tuple[float, Unlock]:
    """What has to be done and how much it asks: no other than the least where that is less than ``most``."""
    need = way.need
    plans = _find_cheapest(need, near, most - way.effort)
    steps = [*way.edits, *(step for plan in plans for step in plan.steps)]
    effort = way.effort + _sum_up(plans)
    lacking = need.profile.nodes - len(plans)
    if lacking:
        steps.append(_add_nodes(need, lacking, of_class=way.of_class or bool(plans)))
        effort += NEW_NODE_EFFORT * lacking
    steps = _merge(steps)
    return effort, Unlock(
        text="; ".join(dict.fromkeys(step.text for step in steps)),
        profile=need.profile.name,
        node=plans[0].id if need.profile.nodes == 1 and plans else None,
        steps=tuple(steps),
    )


def _find_cheapest(need: Need, near: Iterator[_Near], most: float) -> list[_Plan]:
    """The nodes that ask for the least, as many as are needed, or fewer where a new one asks for less."""
    wanted = need.profile.nodes
    kept = wanted + MOST_ALIKE if wanted > 1 else 1
    found: list[_Plan] = []
    for effort, _, host in near:
        dearest = found[wanted - 1].effort if len(found) >= wanted else NEW_NODE_EFFORT
        if effort >= min(most, NEW_NODE_EFFORT) or effort > dearest or (effort == dearest and len(found) >= kept):
            break
        plan = _plan(need, host)
        if plan is not None and plan.effort < NEW_NODE_EFFORT:
            insort(found, plan, key=itemgetter(0, 1))
            dearest = found[wanted - 1].effort if len(found) >= wanted else NEW_NODE_EFFORT
            found = [plan for plan in found if plan.effort <= dearest][:kept]
    return _group(found, wanted)


def _group(plans: Sequence[_Plan], wanted: int) -> list[_Plan]:
    """So many of them: where they have replicas in common, those that ask for less together."""
    stops = Counter(replica for plan in plans for replica in plan.stops)
    if len(plans) <= wanted or not stops or max(stops.values()) == 1:
        return list(plans[:wanted])
    groups = [_gather(first, plans, wanted) for first in plans]
    return min(groups, key=lambda group: (_sum_up(group), [plan.id for plan in group]))


def _gather(first: _Plan, plans: Sequence[_Plan], wanted: int) -> list[_Plan]:
    group, rest = [first], [plan for plan in plans if plan is not first]
    gone = set(first.stops)
    while len(group) < wanted:
        asks = [plan.effort - sum(plan.stops[each] for each in gone & plan.stops.keys()) for plan in rest]
        following = rest.pop(asks.index(min(asks)))
        gone |= following.stops.keys()
        group.append(following)
    return sorted(group, key=itemgetter(0, 1))


def _sum_up(plans: Sequence[_Plan]) -> float:
    """What they ask for together: a replica stops once."""
    stops = {replica: effort for plan in plans for replica, effort in plan.stops.items()}
    return sum(plan.effort - sum(plan.stops.values()) for plan in plans) + sum(stops.values())


def _plan(need: Need, host: Host) -> _Plan | None:
    """All that has to be done at this node; None where it can't be done."""
    effort = 0.0
    steps: list[Step] = []
    stops: dict[str, float] = {}
    reasons = find_reasons(need, host)
    of_gpus = [reason for reason in reasons if reason in _OF_FREE_GPUS]
    for reason in reasons:
        if reason not in of_gpus:
            cure = _CURES[reason](need, host)
        elif reason is of_gpus[0]:
            cure = _free_gpus(need, host, of_gpus)
        else:
            continue
        if cure is None:
            return None
        effort += cure.effort
        steps += cure.steps
        stops |= cure.stops
    return _Plan(effort + sum(stops.values()), host.id, tuple(steps), stops)


def _bring_back(best: Unlock, away: Mapping[NodeId, Standing], least: float) -> Unlock:
    """To have those back that nothing is known of, where that asks for less than ``best``."""
    reason = Reason.NODE_SILENT if Standing.SILENT in away.values() else Reason.NODE_LOST
    if least <= EFFORTS[reason]:
        return best
    names = sorted(away)
    they, have = ("it has", names[0]) if len(names) == 1 else ("they have", None)
    who = ", ".join(keep_few(list(map(str, names))))
    text = f"wait for {who}, or bring back what does not come: {they} not come since the server started"
    return Unlock(text=text, profile=best.profile, node=have, steps=(Step(text=text, reasons=(reason,), node=have),))


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


class _Cure(NamedTuple):
    """How much it asks, without the replicas that have to be gone, and the steps."""

    effort: float
    steps: list[Step]
    stops: Mapping[str, float] = {}


_OF_FREE_GPUS = (Reason.NOT_ENOUGH_GPUS, Reason.NOT_ENOUGH_GPU_MEMORY)
_OF_FABRICS = (Reason.NO_FABRIC, Reason.FABRIC_DOWN)
# What somebody gives back who goes.
_OF_ROOM = (*_OF_FREE_GPUS, Reason.NOT_ENOUGH_MEMORY)


def _do(reason: Reason, host: Host, text: str, more_effort: float = 0.0) -> _Cure:
    return _Cure(EFFORTS[reason] + more_effort, [Step(text=text, reasons=(reason,), node=host.id)])


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
    return _do(Reason.AGENT_OUTDATED, host, f"upgrade llmgw on {host.id} (it {tell_lack(need, host)})")


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
    going = _find_going(host, gb)
    if going:
        reasons = (Reason.NOT_ENOUGH_MEMORY,)
        waits = [Step(text=_wait_for(name, host), reasons=reasons, node=host.id, gb=size) for name, size in going]
        return _Cure(0.0, waits, {name: WAIT_EFFORT for name, _ in going})
    booked_gb = host.booked_gb - sum(host.kept_gb.values())
    held = [f"replicas have booked {booked_gb:.4g} GB"] if booked_gb > CRUMB_GB else []
    held += [f"{size:.4g} GB are {tell_kept(model)}" for model, size in sorted(host.kept_gb.items()) if size]
    held += [f"other programs hold {node.memory_foreign_gb:.4g} GB"] if node.memory_foreign_gb else []
    step = Step(
        text=f"free {gb:g} GB of memory on {host.id} ({', '.join(held)})",
        reasons=(Reason.NOT_ENOUGH_MEMORY,),
        node=host.id,
        gb=gb,
    )
    return _Cure(EFFORTS[Reason.NOT_ENOUGH_MEMORY] + gb / 100, [step])


def _find_going(host: Host, gb: float) -> list[tuple[str, float]]:
    """The fewest that are on their way out, or that room is kept for, and give back so much memory together, each with
    its own; none where all of them don't."""
    going: list[tuple[str, float]] = []
    given: list[tuple[str, float]] = [*host.leaving.items(), *host.kept_gb.items()]
    for name, size in sorted(given, key=lambda each: (-each[1], each[0])):
        if gb > CRUMB_GB:
            going.append((name, size))
            gb -= size
    return going if gb <= CRUMB_GB else []


def _wait_for(name: str, host: Host) -> str:
    if name in host.leaving:
        return f"wait until {name} has stopped"
    return f"wait until {name} runs again, for a minute at most: room on {host.id} is kept for it"


def _free_disks(need: Need, host: Host) -> _Cure | None:
    need_gb, reason = disk_gb(need, host), Reason.NOT_ENOUGH_DISK
    disks = small_disks(need, host)
    if not disks:
        text = f"take min_disk_gb out ({host.id} reports no disk)"
        return _Cure(2 * CLASS_EFFORT, [Step(text=text, reasons=(reason,), key="min_disk_gb")])
    fullest = min(disks, key=lambda disk: disk.free_gb)
    if any(need_gb > disk.total_gb + CRUMB_GB for disk in disks):
        of = f"{host.id} has {fullest.free_gb:.4g} of {fullest.total_gb:.4g} GB free at {fullest.path}"
        begun_gb = (need.profile.min_disk_gb or 0.0) - need_gb
        return _lower(reason, "min_disk_gb", need_gb + begun_gb, fullest.free_gb + begun_gb, of)
    gb = _round_up(need_gb - fullest.free_gb)
    where = " and ".join(
        f"{_round_up(need_gb - disk.free_gb):g} GB at {disk.path}" for disk in sorted(disks, key=lambda disk: disk.path)
    )
    step = Step(text=f"free {where} on {host.id}", reasons=(reason,), node=host.id, gb=gb)
    return _Cure(EFFORTS[reason] + gb / 100, [step])


def _lower(reason: Reason, key: str, need_gb: float, have_gb: float, of: str) -> _Cure | None:
    """Ask for less, as far as that is something to say: the further, the less likely to be meant."""
    value = math.floor(have_gb * 10 + CRUMB_GB) / 10
    if value <= 0:
        return None
    step = Step(text=f"lower {key} to {value:g} ({of})", reasons=(reason,), key=key, value=value)
    return _Cure(CLASS_EFFORT + 300.0 * (1 - value / need_gb), [step])


def _free_gpus(need: Need, host: Host, reasons: Sequence[Reason]) -> _Cure | None:
    """Free as many GPUs as are needed, with as much memory: those that ask for the least."""
    gpus = [gpu for gpu in host.node.gpus or () if gpu.gpu_class == need.gpu_class]
    large = [gpu for gpu in gpus if gpu.memory_gb + CRUMB_GB >= needs_gb(need, gpu)]
    if len(large) < need.gpus:
        return _lower_gpu_memory(need, host)
    full = {gpu.uuid: gb for gpu in large if (gb := needs_gb(need, gpu) - spare_gb(gpu)) > CRUMB_GB}
    # To make room on several cards asks for one look at the node; and where others do, it need not be made at all.
    choices = [_choose(host, large, need.gpus, full, first_gb=first) for first in (0.0, EFFORTS[_OF_FREE_GPUS[1]])]
    chosen, effort, stops = min(choices, key=lambda choice: choice.effort + sum(choice.stops.values()))
    return _Cure(effort, _free_chosen(need, host, chosen, reasons), stops)


class _Choice(NamedTuple):
    gpus: list[Gpu]
    effort: float
    stops: Mapping[str, float]


def _choose(host: Host, gpus: Sequence[Gpu], count: int, full: Mapping[str, float], *, first_gb: float) -> _Choice:
    """So many of these GPUs, and how much it asks to have them. ``full`` is what they lack of memory, each for
    ``first_gb`` and what the size of it adds."""

    def ask(gpu: Gpu) -> float:
        room = first_gb + full[gpu.uuid] / 100 if gpu.uuid in full else 0.0
        return room + _ask_repair(gpu)

    # What comes free together: all that a replica has, or a card.
    lots: dict[str, list[Gpu]] = {}
    for gpu in sorted(gpus, key=lambda gpu: (ask(gpu), gpu.index)):
        lots.setdefault(_find_holder(host, gpu) or gpu.uuid, []).append(gpu)

    def ask_lot(name: str, lacking: int) -> float:
        return sum(map(ask, lots[name][:lacking])) + _ask_stop(host, lots[name][0])

    taken: list[str] = []
    lacking = count
    while lacking > 0:

        def judge(name: str, lacking: int = lacking) -> tuple[object, ...]:
            # Of replicas that hold enough the smallest, else the largest: as few as can be have to go.
            size = len(lots[name])
            each = ask_lot(name, lacking) / min(size, lacking)
            return each, size < lacking, size if size >= lacking else -size, lots[name][0].index

        taken.append(min((name for name in lots if name not in taken), key=judge))
        lacking -= len(lots[taken[-1]])
    for name in sorted(taken, key=lambda name: -ask_lot(name, count)):
        others = [other for other in taken if other != name]
        if sum(len(lots[other]) for other in others) >= count:
            taken = others
    chosen = sorted((gpu for name in taken for gpu in lots[name]), key=lambda gpu: (ask(gpu), gpu.index))[:count]
    lack = [full[gpu.uuid] for gpu in chosen if gpu.uuid in full]
    effort = sum(map(_ask_repair, chosen)) + (EFFORTS[Reason.NOT_ENOUGH_GPU_MEMORY] + sum(lack) / 100 if lack else 0.0)
    held = ((_find_holder(host, gpu), gpu) for gpu in chosen)
    stops = {holder: _ask_stop(host, gpu) for holder, gpu in held if holder is not None}
    return _Choice(chosen, effort, stops)


def _ask_repair(gpu: Gpu) -> float:
    return REPAIR_EFFORT * ((gpu.broken is not None) + (gpu.mig is not None))


def _find_holder(host: Host, gpu: Gpu) -> str | None:
    """The replica that has this GPU, or the model that it is kept for."""
    return host.kept.get(gpu.uuid) or host.booked.get(gpu.uuid)


def _comes_free(host: Host, gpu: Gpu) -> bool:
    """Whoever has it gives it back by and by."""
    return gpu.uuid in host.kept or _find_holder(host, gpu) in host.leaving


def _ask_stop(host: Host, gpu: Gpu) -> float:
    """How much it asks that whoever has this GPU goes."""
    if _find_holder(host, gpu) is None:
        return 0.0
    return WAIT_EFFORT if _comes_free(host, gpu) else EFFORTS[Reason.NOT_ENOUGH_GPUS]


def _free_chosen(need: Need, host: Host, chosen: Sequence[Gpu], reasons: Sequence[Reason]) -> list[Step]:
    ready = {gpu.uuid for gpu in host.free}
    full = [gpu for gpu in chosen if spare_gb(gpu) + CRUMB_GB < needs_gb(need, gpu)]
    told = tuple(reasons) if not full else (Reason.NOT_ENOUGH_GPUS,)
    steps: list[Step] = []
    going: dict[str, list[Gpu]] = {}
    taken: list[Gpu] = []
    for gpu in chosen:
        holder = _find_holder(host, gpu)
        if holder is not None and _comes_free(host, gpu):
            going.setdefault(holder, []).append(gpu)
        if gpu.uuid not in ready and (holder not in going or _ask_repair(gpu)):
            taken.append(gpu)
    for name, gpus in sorted(going.items()):
        steps.append(Step(text=_wait_for(name, host), reasons=told, node=host.id, gpus=_uuids(gpus)))
    if taken:
        steps.append(Step(text=_tell_taken(host, taken), reasons=told, node=host.id, gpus=_uuids(taken)))
    return [*steps, *(_free_card(need, host, gpu) for gpu in full)]


def _tell_taken(host: Host, taken: Sequence[Gpu]) -> str:
    held = (gpu for gpu in taken if gpu.uuid in host.booked and not _comes_free(host, gpu))
    holders = Counter(host.booked[gpu.uuid] for gpu in held)
    told = [f"{replica} holds {count}" for replica, count in sorted(holders.items())]
    for gpu in sorted(taken, key=lambda gpu: gpu.index):
        told += [f"{shorten(gpu, host)} is broken ({gpu.broken})"] if gpu.broken is not None else []
        told += [f"{shorten(gpu, host)} is cut into instances"] if gpu.mig is not None else []
    more = "1 more free GPU" if len(taken) == 1 else f"{len(taken)} more free GPUs"
    return f"{host.id} needs {more}: {', '.join(told)}"


def _free_card(need: Need, host: Host, gpu: Gpu) -> Step:
    gb = min(_round_up(needs_gb(need, gpu) - spare_gb(gpu)), sum(use.memory_gb for use in gpu.foreign))
    text = f"free {gb:.4g} GB on {host.id}'s {shorten(gpu, host)} ({tell_foreign(gpu)})"
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


def _add_nodes(need: Need, count: int, *, of_class: bool) -> Step:
    profile = need.profile
    has = [f"the engine {profile.engine}"]
    if need.gpus:
        of = f" of class {need.gpu_class}" if of_class and need.gpu_class is not None else ""
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
