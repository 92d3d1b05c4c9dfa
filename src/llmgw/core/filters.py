"""What speaks against a node: one check for each reason, and its words, which are found only for whoever reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from llmgw.core.hosts import CRUMB_GB, Host, Standing, spare_gb
from llmgw.core.learned import USUAL_SHARE
from llmgw.core.model import ANY_CLASS, Model, Profile, newer_keys
from llmgw.core.node import Disk, Gpu, NodeId
from llmgw.core.rejection import Reason
from llmgw.core.weights import list_sources, parse_source

# Of a box with many GPUs the first few are told.
FEW = 4
# Of a UUID: as much as any other program shows.
LEAST_SHOWN = 8

Check = Callable[["Need", Host], Reason | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a profile asks of each of its nodes at this moment, worked out once for all of them.

    ``gpus`` is how many of a node, ``gpu_class`` of which class, None of any one. ``blind``: nobody has looked for GPUs
    on any node, and a profile that takes any runs with whatever is there. ``fabric`` is the one that is looked at, None
    any. ``failed`` counts for each node the tries that failed there of late. ``newer`` are the keys that an old agent
    passes over, and ``fetched`` says that weights come from elsewhere, which an old one does not get. ``checks`` are
    those that this profile can fail, in their order: what an operator must remove before what passes by itself.
    """

    model: Model
    profile: Profile
    backing_off: Mapping[NodeId, float]
    now: float
    fabric: str | None = None
    blind: bool = False
    failed: Mapping[NodeId, int] = field(default_factory=dict)
    gpus: int = field(init=False)
    gpu_class: str | None = field(init=False)
    newer: tuple[str, ...] = field(init=False)
    fetched: bool = field(init=False)
    checks: tuple[Check, ...] = field(init=False)

    def __post_init__(self) -> None:
        profile = self.profile
        put = object.__setattr__
        takes_any = profile.gpu_class in (None, ANY_CLASS) and profile.gpu_memory_gb is None and profile.nodes == 1
        put(self, "gpus", 0 if self.blind and takes_any else profile.gpus_per_node)
        put(self, "gpu_class", None if profile.gpu_class == ANY_CLASS else profile.gpu_class)
        put(self, "newer", newer_keys(self.model, profile))
        put(self, "fetched", any(parse_source(source).is_fetched for source in list_sources(self.model)))
        can_fail = (
            (True, _check_standing),
            (True, _check_cordon),
            (bool(profile.labels), _check_labels),
            (bool(self.newer) or self.fetched, _check_agent),
            (True, _check_engine),
            (self.gpus > 0, _check_class),
            (profile.nodes > 1, _check_fabric),
            (self.gpus > 0, _check_free_gpus),
            (self.gpus > 0, _check_gpu_memory),
            (profile.min_memory_gb is not None, _check_memory),
            (profile.min_disk_gb is not None, _check_disk),
            (bool(self.backing_off), _check_back_off),
        )
        put(self, "checks", tuple(check for asked, check in can_fail if asked))

    def wait_seconds(self, host: Host) -> float:
        """How long this node is not tried again, because the last try there failed."""
        return self.backing_off.get(host.id, self.now) - self.now


def is_blind(hosts: Iterable[Host]) -> bool:
    """Nobody has looked for GPUs, on none of the nodes; of none there are nothing is known."""
    looked_at = [host.node.gpus is not None for host in hosts]
    return bool(looked_at) and not any(looked_at)


def find_reason(need: Need, host: Host) -> Reason | None:
    """The first reason against this node."""
    for check in need.checks:
        reason = check(need, host)
        if reason is not None:
            return reason
    return None


def find_reasons(need: Need, host: Host) -> tuple[Reason, ...]:
    """All of them. That a node has no GPU of the class at all is not told again as too few that are free."""
    found: list[Reason] = []
    for check in need.checks:
        reason = check(need, host)
        if reason is not None:
            found.append(reason)
    if Reason.NO_GPU in found or Reason.WRONG_CLASS in found:
        found = [reason for reason in found if reason not in _OF_FREE_GPUS]
    return tuple(found)


def describe(reason: Reason, need: Need, host: Host) -> str:
    """This reason for a person: with its numbers, and what to do where they don't say it."""
    return _WORDS[reason](need, host)


def find_cards(need: Need, host: Host) -> list[tuple[str, int]]:
    """The classes of which this node has enough free GPUs with enough memory, and those (bits)."""
    room = _find_room(need.profile.gpu_memory_gb, host)
    return [(name, free & room) for name, free in _find_free(need, host) if (free & room).bit_count() >= need.gpus]


def needs_gb(need: Need, gpu: Gpu) -> float:
    """What the profile takes of this GPU's memory."""
    asked = need.profile.gpu_memory_gb
    return USUAL_SHARE * gpu.memory_gb if asked is None else asked


def disk_gb(need: Need, host: Host) -> float:
    """The room that its weights still take there: without what an earlier fetch has left."""
    return max((need.profile.min_disk_gb or 0.0) - host.begun.get(need.model.source, 0.0), 0.0)


def small_disks(need: Need, host: Host) -> list[Disk]:
    """Those on which its weights have no room.

    Which of its disks a node fills with them isn't known here: the fullest must do, or a fetch ends half way.
    """
    need_gb = disk_gb(need, host)
    return [disk for disk in host.node.disks if disk.free_gb + CRUMB_GB < need_gb]


# The checks

_NOT_READY = {Standing.SILENT: Reason.NODE_SILENT, Standing.LOST: Reason.NODE_LOST}
_OF_FREE_GPUS = {Reason.NOT_ENOUGH_GPUS, Reason.NOT_ENOUGH_GPU_MEMORY}


def _check_standing(need: Need, host: Host) -> Reason | None:
    return None if host.standing is Standing.READY else _NOT_READY[host.standing]


def _check_cordon(need: Need, host: Host) -> Reason | None:
    return Reason.CORDONED if host.cordoned else None


def _check_labels(need: Need, host: Host) -> Reason | None:
    labels = host.labels
    for key, value in need.profile.labels.items():
        if labels.get(key) != value:
            return Reason.LABELS_DIFFER
    return None


def _check_agent(need: Need, host: Host) -> Reason | None:
    # It would start the engine without them: one that is ready, and is not what was asked for.
    if host.node.outdated and need.newer:
        return Reason.AGENT_OUTDATED
    return Reason.AGENT_OUTDATED if need.fetched and not host.node.fetches else None


def _check_engine(need: Need, host: Host) -> Reason | None:
    found = host.engines.get(need.profile.engine)
    if found is None:
        return Reason.NO_ENGINE
    # A profile's own environment may say where the libraries are.
    if found.broken is not None and not (need.profile.env and found.missing_libraries):
        return Reason.ENGINE_BROKEN
    return None


def _check_class(need: Need, host: Host) -> Reason | None:
    if need.gpu_class in host.totals:
        return None
    if not host.totals:
        return Reason.NO_GPU
    return None if need.gpu_class is None else Reason.WRONG_CLASS


def _check_fabric(need: Need, host: Host) -> Reason | None:
    if (need.fabric in host.fabrics) if need.fabric is not None else host.fabrics:
        return None
    declared = need.fabric is None or any(fabric.name == need.fabric for fabric in host.node.fabrics)
    return Reason.FABRIC_DOWN if declared and host.node.fabrics else Reason.NO_FABRIC


def _check_free_gpus(need: Need, host: Host) -> Reason | None:
    for _, free in _find_free(need, host):
        if free.bit_count() >= need.gpus:
            return None
    return Reason.NOT_ENOUGH_GPUS


def _check_gpu_memory(need: Need, host: Host) -> Reason | None:
    room = _find_room(need.profile.gpu_memory_gb, host)
    if room.bit_count() == len(host.free):
        return None
    free = [bits for _, bits in _find_free(need, host)]
    # Where too few are free, those that are must do.
    enough = min(need.gpus, max((bits.bit_count() for bits in free), default=0))
    if enough == 0 or any((bits & room).bit_count() >= enough for bits in free):
        return None
    return Reason.NOT_ENOUGH_GPU_MEMORY


def _check_memory(need: Need, host: Host) -> Reason | None:
    need_gb = need.profile.min_memory_gb or 0.0
    return None if need_gb <= host.free_gb + CRUMB_GB else Reason.NOT_ENOUGH_MEMORY


def _check_disk(need: Need, host: Host) -> Reason | None:
    if need.model.source in host.holds:
        return None
    return Reason.NOT_ENOUGH_DISK if small_disks(need, host) or not host.node.disks else None


def _check_back_off(need: Need, host: Host) -> Reason | None:
    return Reason.BACKING_OFF if need.wait_seconds(host) > 0 else None


def _find_free(need: Need, host: Host) -> Iterable[tuple[str, int]]:
    if need.gpu_class is None:
        return host.classes.items()
    return ((need.gpu_class, host.classes.get(need.gpu_class, 0)),)


def _find_room(need_gb: float | None, host: Host) -> int:
    if need_gb is None:
        return host.roomy
    room = 0
    for at, spare in enumerate(host.spare_gb):
        if spare + CRUMB_GB >= need_gb:
            room |= 1 << at
    return room


# Their words


def _tell_lost(need: Need, host: Host) -> str:
    return f"the node is lost: see whether its agent runs and reaches the server{_tell_pin(need, host)}"


def _tell_silent(need: Need, host: Host) -> str:
    return f"the node is silent: its link is down, and its lease still runs{_tell_pin(need, host)}"


def _tell_pin(need: Need, host: Host) -> str:
    # A model that was pinned to this node waits for it, whatever is free elsewhere.
    asked = need.profile.labels
    return f"; it has what is asked for, {_write_labels(asked)}" if asked and not _check_labels(need, host) else ""


def _tell_cordoned(need: Need, host: Host) -> str:
    return f"an operator has cordoned it: llmgw ctl uncordon {host.id}"


def _tell_labels(need: Need, host: Host) -> str:
    asked = need.profile.labels.items()
    has = {key: host.labels[key] for key, value in asked if key in host.labels and host.labels[key] != value}
    lacks = [key for key, _ in asked if key not in host.labels]
    told = [f"has {_write_labels(has)}"] if has else []
    told += [f"has no label {', '.join(lacks)}"] if lacks else []
    return f"asks for {_write_labels(need.profile.labels)}; the node {' and '.join(told)}"


def _write_labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _tell_agent(need: Need, host: Host) -> str:
    return f"its agent is of an older llmgw, which {tell_lack(need, host)}: upgrade it"


def tell_lack(need: Need, host: Host) -> str:
    """What its agent does not do, of what is asked."""
    passes_over = f"passes over {', '.join(need.newer)}" if need.newer and host.node.outdated else None
    fetches = "fetches no weights" if need.fetched and not host.node.fetches else None
    return " and ".join(each for each in (passes_over, fetches) if each is not None)


def _tell_no_engine(need: Need, host: Host) -> str:
    name = need.profile.engine
    return f"no binary of the engine {name!r} was found: install it where PATH finds it, or set engines.{name}.bin"


def _tell_broken_engine(need: Need, host: Host) -> str:
    found = host.engines[need.profile.engine]
    return f"{found.program[0]} can't run {need.profile.engine}: {found.broken}"


def _tell_no_gpu(need: Need, host: Host) -> str:
    asked = f"a GPU of class {need.gpu_class!r}" if need.gpu_class is not None else "a GPU"
    return f"asks for {asked}; the node reports no GPU"


def _tell_class(need: Need, host: Host) -> str:
    return f"asks for a GPU of class {need.gpu_class!r}; the node has {', '.join(sorted(host.totals))}"


def _tell_no_fabric(need: Need, host: Host) -> str:
    return f"asks for {need.profile.nodes} nodes of one fabric; none is declared in the agent.yaml of this one"


def _tell_down_fabric(need: Need, host: Host) -> str:
    down = [
        f"fabric {fabric.name} is out of service here: {fabric.down or 'the node has no address on it'}"
        for fabric in host.node.fabrics
        if need.fabric in (None, fabric.name)
    ]
    return "; ".join(down)


def _tell_free_gpus(need: Need, host: Host) -> str:
    name = need.gpu_class
    if name is None:
        name = max(host.totals, key=lambda each: (host.classes.get(each, 0).bit_count(), host.totals[each], each))
    free, total = host.classes.get(name, 0).bit_count(), host.totals[name]
    told = f"needs {count_gpus(need.gpus)} of class {name}; {free} of {total} {'is' if free == 1 else 'are'} free"
    taken = "; ".join(_tell_taken(host, name))
    return f"{told}: {taken}" if taken else told


def count_gpus(count: int) -> str:
    """``1 GPU``, ``8 GPUs``"""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _tell_taken(host: Host, gpu_class: str) -> list[str]:
    gpus = sorted((gpu for gpu in host.node.gpus or () if gpu.gpu_class == gpu_class), key=lambda gpu: gpu.index)
    holders = Counter(host.booked[gpu.uuid] for gpu in gpus if gpu.uuid in host.booked and gpu.uuid not in host.kept)
    told = [
        f"{replica} holds {count}{' and is stopping' if replica in host.leaving else ''}"
        for replica, count in sorted(holders.items())
    ]
    kept = Counter(host.kept[gpu.uuid] for gpu in gpus if gpu.uuid in host.kept)
    told += [f"{count} {'is' if count == 1 else 'are'} {tell_kept(model)}" for model, count in sorted(kept.items())]
    for gpu in gpus:
        if gpu.uuid not in host.booked and gpu.broken is not None:
            told.append(f"{shorten(gpu, host)} is broken ({gpu.broken})")
        elif gpu.uuid not in host.booked and gpu.mig is not None:
            told.append(f"{shorten(gpu, host)} is cut into instances")
    return keep_few(told)


def tell_kept(model: str) -> str:
    """What room is that nothing runs in; it is given to others soon, so that no time needs to be told."""
    return f"kept for {model} until it runs again, for a minute at most"


def _tell_gpu_memory(need: Need, host: Host) -> str:
    free = [gpu for gpu in host.free if need.gpu_class in (None, gpu.gpu_class)]
    full = [gpu for gpu in free if spare_gb(gpu) + CRUMB_GB < needs_gb(need, gpu)]
    asked = min(needs_gb(need, gpu) for gpu in full)
    told = [_tell_card(gpu, host) for gpu in full]
    where = "a GPU" if need.gpus == 1 else f"each of {need.gpus} GPUs"
    return f"needs {asked:.4g} GB on {where}: {'; '.join(keep_few(told))}"


def _tell_card(gpu: Gpu, host: Host) -> str:
    spare = spare_gb(gpu)
    if spare == gpu.memory_gb:
        return f"{shorten(gpu, host)} has {spare:.4g} GB"
    return f"{shorten(gpu, host)} has {max(spare, 0.0):.4g} of {gpu.memory_gb:.4g} GB: {tell_foreign(gpu)}"


def tell_foreign(gpu: Gpu) -> str:
    """Who holds memory of a GPU, the most first."""
    uses = sorted(gpu.foreign, key=lambda use: (-use.memory_gb, use.pid or 0))
    return ", ".join(keep_few([f"{_name_user(use.pid, use.name)} holds {use.memory_gb:.4g} GB" for use in uses]))


def _name_user(pid: int | None, name: str | None) -> str:
    if pid is None:
        return name or "an unknown program"
    return f"pid {pid} {name}" if name else f"pid {pid}"


def _tell_memory(need: Need, host: Host) -> str:
    node = host.node
    told = (
        f"needs {need.profile.min_memory_gb:g} GB of memory; {max(host.free_gb, 0.0):.4g} of {node.memory_gb:.4g} GB "
        f"are free, {host.booked_gb - sum(host.kept_gb.values()):.4g} GB are booked by replicas"
    )
    if host.leaving:
        told += f" ({', '.join(keep_few(sorted(host.leaving)))} {'is' if len(host.leaving) == 1 else 'are'} stopping)"
    for model, gb in sorted(host.kept_gb.items()):
        told += f", {gb:.4g} GB are {tell_kept(model)}" if gb else ""
    return f"{told}, {node.memory_foreign_gb:.4g} GB are held by other programs" if node.memory_foreign_gb else told


def _tell_disk(need: Need, host: Host) -> str:
    need_gb = disk_gb(need, host)
    fullest = min(host.node.disks, key=lambda disk: disk.free_gb, default=None)
    if fullest is None:
        return f"needs {need_gb:g} GB on disk; the node reports no disk"
    return (
        f"needs {need_gb:g} GB on disk; {fullest.free_gb:.4g} of {fullest.total_gb:.4g} GB are free at {fullest.path}"
    )


def _tell_back_off(need: Need, host: Host) -> str:
    return f"the last try here failed; the next one is in {need.wait_seconds(host):.0f} s"


def shorten(gpu: Gpu, host: Host) -> str:
    """As much of a GPU's UUID as tells it from the others of its node, in whole groups: ``GPU-8f3e12ab`` of the usual
    kind."""
    groups = gpu.uuid.split("-")
    others = [other.uuid.split("-") for other in host.node.gpus or () if other.uuid != gpu.uuid]
    for count in range(2, len(groups)):
        short = "-".join(groups[:count])
        if len(short) >= LEAST_SHOWN and all(other[:count] != groups[:count] for other in others):
            return short
    return gpu.uuid


def keep_few(told: list[str]) -> list[str]:
    """The first of many, and how many more."""
    return told if len(told) <= FEW else [*told[:FEW], f"and {len(told) - FEW} more"]


_WORDS: Mapping[Reason, Callable[[Need, Host], str]] = {
    Reason.NODE_LOST: _tell_lost,
    Reason.NODE_SILENT: _tell_silent,
    Reason.CORDONED: _tell_cordoned,
    Reason.LABELS_DIFFER: _tell_labels,
    Reason.AGENT_OUTDATED: _tell_agent,
    Reason.NO_ENGINE: _tell_no_engine,
    Reason.ENGINE_BROKEN: _tell_broken_engine,
    Reason.NO_GPU: _tell_no_gpu,
    Reason.WRONG_CLASS: _tell_class,
    Reason.NO_FABRIC: _tell_no_fabric,
    Reason.FABRIC_DOWN: _tell_down_fabric,
    Reason.NOT_ENOUGH_GPUS: _tell_free_gpus,
    Reason.NOT_ENOUGH_GPU_MEMORY: _tell_gpu_memory,
    Reason.NOT_ENOUGH_MEMORY: _tell_memory,
    Reason.NOT_ENOUGH_DISK: _tell_disk,
    Reason.BACKING_OFF: _tell_back_off,
}
