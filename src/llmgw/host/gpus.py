"""The GPUs of this machine, by whatever way they can be asked, as they are told to the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmgw.core.node import Gpu
from llmgw.host.cards import Card, LostCard, Source, Survey
from llmgw.host.cpu import read_memory
from llmgw.host.foreign import find_foreign
from llmgw.host.gpu_bus import list_driven
from llmgw.host.gpu_class import name_class
from llmgw.host.nvidia_smi import NvidiaSmi
from llmgw.host.nvml import Nvml
from llmgw.units import printable

GB = 1e9
# A look takes milliseconds; one with a card that has to be started anew, a second or two.
SLOW_SECONDS = 10.0
# (without the seconds: what changes is told again and again)
NO_ANSWER = "the NVIDIA driver does not answer: `dmesg` may say why"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusFound:
    """All GPUs there are, in the order of their indices, and the driver's version. ``problem``: why that may not be
    all, in one line; None where nothing is wrong, as on a machine that has none. ``held_gb``: what each process is
    known to hold of a GPU, by its UUID, in GB of 10^9 bytes."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    problem: str | None = None
    held_gb: Mapping[str, Mapping[int, float]] = field(default_factory=dict, hash=False)

    def find_most_held_gb(self, pids: Collection[int]) -> float | None:
        """The most that these processes hold together of any one GPU; None where they are seen on none."""
        sums = (sum(gb for pid, gb in holders.items() if pid in pids) for holders in self.held_gb.values())
        return max((gb for gb in sums if gb > 0), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What else of the machine a look needs; both block."""

    list_driven: Callable[[], dict[str, LostCard]] = list_driven
    count_memory_bytes: Callable[[], float] = field(default=lambda: read_memory().total_gb * GB)


def open_gpus(nvidia_smi: str | None = None, classes: Mapping[str, str] | None = None) -> GpuReader:
    """A reader for this machine: through the driver's library, else through nvidia-smi (at this path, else on PATH).
    ``classes`` name the class of a card by its product name or UUID. Nothing is loaded or started before a read."""
    return GpuReader((Nvml(), NvidiaSmi(nvidia_smi)), classes=classes or {})


class GpuReader:
    """Looks at the GPUs, and remembers what it saw: a card that falls silent is told as broken and does not vanish."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        classes: Mapping[str, str],
        machine: Machine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._classes = {name.strip().lower(): gpu_class for name, gpu_class in classes.items()}
        self._machine = machine or Machine()
        self._clock = clock
        self._reading = threading.Lock()
        self._since: float | None = None
        self._last = GpusFound()

    def read(self, ours: Collection[int] = ()) -> GpusFound:
        """What there is now. ``ours``: the pids of our engines, their leaders at least.

        Never raises. May block for as long as a driver hangs: call it in a thread that may be abandoned. While one call
        does, others return at once what ``recall`` does.
        """
        if not self._reading.acquire(blocking=False):
            return self.recall()
        try:
            self._since = self._clock()
            self._last = self._judge(self._survey(), ours)
            return self._last
        finally:
            self._since = None
            self._reading.release()

    def recall(self) -> GpusFound:
        """What the last finished read found, at once; with every GPU broken where one under way does not end."""
        since, last = self._since, self._last
        waited = 0.0 if since is None else self._clock() - since
        if waited < SLOW_SECONDS:
            return last
        return GpusFound(gpus=_break_all(last.gpus, NO_ANSWER), driver=last.driver, problem=NO_ANSWER)

    def _survey(self) -> Survey:
        """Of the first way that shows cards; else the first trouble that there was."""
        trouble = None
        for source in self._sources:
            found = source.survey()
            if found is None:
                continue
            if found.cards or found.lost or found.problem is None:
                return found
            trouble = trouble or found
        return trouble or Survey()

    def _judge(self, survey: Survey, ours: Collection[int]) -> GpusFound:
        known = {gpu.uuid: gpu for gpu in self._last.gpus}
        if survey.problem is not None and not survey.cards and not survey.lost:
            silent = _break_all(self._last.gpus, survey.problem)
            return GpusFound(gpus=silent, driver=self._last.driver, problem=survey.problem)
        places = dict(zip(_order(survey.cards), sorted(card.index for card in survey.cards), strict=True))
        gpus = [self._describe(card, places[card.uuid], known.get(card.uuid), ours) for card in survey.cards]
        problems = [] if survey.problem is None else [survey.problem]
        for lost in _find_lost(survey, self._machine.list_driven()):
            gpu = self._describe_lost(lost, known, {gpu.uuid for gpu in gpus})
            if gpu is None:
                problems.append(f"{_point_at(lost)}: {lost.reason}")
            else:
                gpus.append(gpu)
        gpus.sort(key=lambda gpu: (gpu.index, gpu.pci or ""))
        held_gb = {card.uuid: _size_holders(card) for card in survey.cards if card.holders}
        problem = "; ".join(problems) or None
        return GpusFound(gpus=tuple(gpus), driver=survey.driver, problem=problem, held_gb=held_gb)

    def _describe(self, card: Card, index: int, known: Gpu | None, ours: Collection[int]) -> Gpu:
        if card.broken is not None and known is not None:
            return _break(known, card.broken)
        shares = card.broken is None and card.memory_bytes is None
        memory = self._machine.count_memory_bytes() if shares else card.memory_bytes or 0
        used = card.used_bytes or 0
        if shares:
            # What is in use of the machine's memory is not what is in use for the card.
            used = sum(holder.memory_bytes or 0 for holder in card.holders or ())
            card = replace(card, used_bytes=None)
        return Gpu(
            uuid=card.uuid,
            index=index,
            gpu_class=self._name_class(card.uuid, card.name, memory),
            name=printable(card.name),
            memory_gb=round(memory / GB, 3),
            memory_used_gb=round(used / GB, 3),
            pci=card.pci,
            temperature_c=card.temperature_c,
            utilization_percent=card.utilization_percent,
            ecc_errors=card.ecc_errors,
            nvlink_peers=card.nvlink_peers,
            mig=card.mig,
            foreign=find_foreign(card, ours),
            broken=card.broken,
        )

    def _describe_lost(self, lost: LostCard, known: Mapping[str, Gpu], seen: Collection[str]) -> Gpu | None:
        """None where nobody knows which card it is."""
        for gpu in known.values():
            if gpu.uuid not in seen and _is_same(lost, gpu):
                return _break(gpu, lost.reason)
        if lost.uuid is None or lost.uuid in seen:
            return None
        name = printable(lost.name or "NVIDIA GPU")
        return Gpu(
            uuid=lost.uuid,
            index=lost.index if lost.index is not None else len(seen),
            gpu_class=self._name_class(lost.uuid, name, 0),
            name=name,
            memory_gb=0.0,
            memory_used_gb=0.0,
            pci=lost.pci,
            broken=lost.reason,
        )

    def _name_class(self, uuid: str, name: str, memory_bytes: float) -> str:
        told = self._classes.get(uuid.lower()) or self._classes.get(name.strip().lower())
        return told or name_class(name, int(memory_bytes))


def _size_holders(card: Card) -> dict[int, float]:
    """What each process has of a card; one whose size the driver keeps to itself has what no other one has."""
    holders = card.holders or ()
    sizes = {holder.pid: holder.memory_bytes for holder in holders if holder.memory_bytes is not None}
    unsized = [holder.pid for holder in holders if holder.memory_bytes is None]
    if len(unsized) == 1 and card.used_bytes is not None:
        sizes[unsized[0]] = max(0, card.used_bytes - sum(sizes.values()))
    return {pid: round(size / GB, 3) for pid, size in sizes.items()}


def _order(cards: Sequence[Card]) -> list[str]:
    """UUIDs by PCI address, which is how CUDA counts when it is told to; drivers do so without a promise."""
    return [card.uuid for card in sorted(cards, key=lambda card: (card.pci is None, card.pci or "", card.index))]


def _find_lost(survey: Survey, driven: Mapping[str, LostCard]) -> list[LostCard]:
    """The cards that could not be opened, with the addresses of those that the kernel has and the survey has not."""
    told = {card.pci for card in survey.cards} | {lost.pci for lost in survey.lost}
    if any(card.pci is None for card in survey.cards):
        return list(survey.lost)
    unseen = [driven[pci] for pci in sorted(driven) if pci not in told]
    found = []
    nameless = [lost for lost in survey.lost if lost.pci is None]
    for lost in survey.lost:
        also = driven.get(lost.pci) if lost.pci is not None else None
        if lost.pci is None and len(nameless) == len(unseen):
            also = unseen[nameless.index(lost)]
        found.append(lost if also is None else replace(also, reason=lost.reason, index=lost.index))
    return found if nameless else [*found, *unseen]


def _is_same(lost: LostCard, gpu: Gpu) -> bool:
    if lost.uuid is not None:
        return lost.uuid == gpu.uuid
    if lost.pci is not None:
        return lost.pci == gpu.pci
    return lost.index == gpu.index


def _point_at(lost: LostCard) -> str:
    if lost.pci is not None:
        return f"the GPU at {lost.pci}"
    return "a GPU" if lost.index is None else f"GPU {lost.index}"


def _break(gpu: Gpu, reason: str) -> Gpu:
    """A card of which nothing is known any more but what it was."""
    return replace(gpu, broken=reason, temperature_c=None, utilization_percent=None, foreign=())


def _break_all(gpus: Sequence[Gpu], reason: str) -> tuple[Gpu, ...]:
    return tuple(_break(gpu, reason) for gpu in gpus)
