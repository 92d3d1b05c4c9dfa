"""The driver's own library (NVML) through pynvml, which is loaded when there is one and never before."""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from llmgw.core.node import MigInstance
from llmgw.host.cards import Card, Holder, LostCard, Survey
from llmgw.host.gpu_bus import count_cards, short_pci

GB = 1e9
MIB = 1024 * 1024

_NAME = "libnvidia-ml.so.1"
# Where drivers that are not installed as packages put it, and no loader looks: WSL, NixOS, two kinds of containers.
PLACES = (
    _NAME,
    f"/usr/lib/wsl/lib/{_NAME}",
    f"/run/opengl-driver/lib/{_NAME}",
    f"/usr/local/nvidia/lib64/{_NAME}",
    f"/home/kubernetes/bin/nvidia/lib64/{_NAME}",
)

# NVML's numbers of what goes wrong. They are part of its interface, and needed before it is loaded.
UNINITIALIZED, NO_PERMISSION, NO_POWER, NOT_LOADED, IRQ = 1, 4, 8, 9, 11
NOT_SUPPORTED, NO_LIBRARY, NO_FUNCTION, LOST, NEEDS_RESET, MISMATCH = 3, 12, 13, 15, 16, 18

NOT_RUNNING = "the NVIDIA driver is not running: load its kernel module (`modprobe nvidia`), or install it again"
UPDATED = (
    "the NVIDIA driver was updated while it ran, and its kernel module and libraries are of different releases: "
    "reboot, or load the new module"
)
FELL_OFF = "it fell off the bus (GPU is lost): the kernel's log has an Xid; reset the card or reboot"
_WORDS = {
    NO_PERMISSION: "the driver gives no permission for it: let the agent's user open /dev/nvidia*",
    NO_POWER: "its power cables are not connected",
    NOT_LOADED: NOT_RUNNING,
    IRQ: "the kernel gets no interrupts from it",
    LOST: FELL_OFF,
    NEEDS_RESET: "it needs a reset (`nvidia-smi --gpu-reset`), or a reboot",
    MISMATCH: UPDATED,
}
# After these nothing can be asked any more, of no card.
_DRIVER_GONE = frozenset({UNINITIALIZED, NOT_LOADED, NO_LIBRARY, MISMATCH})
# After these nothing can be asked of this card.
_CARD_GONE = frozenset({LOST, NEEDS_RESET})

_MIG_SHAPE = re.compile(r"\bMIG (\S+)")


class _Fault(Exception):  # noqa: N818 - what it is; it is told and goes no further than this room
    """A question that was not answered, for a reason that NVML numbers so."""

    def __init__(self, text: str, code: int | None) -> None:
        super().__init__(text)
        self.code = code


class _DriverFault(Exception):  # noqa: N818 - as above
    """No question is answered any more."""


@dataclass(frozen=True, slots=True)
class _Links:
    """Where the NVLinks of one card lead: to these PCI addresses, to others of which the driver does not say what is
    there, and to a switch."""

    cards: frozenset[str]
    doubtful: frozenset[str]
    to_switch: bool


def load_nvml(places: Iterable[str] = PLACES) -> Any:
    """pynvml over the first library of these that there is; None without one, and why where it can't be loaded."""
    for place in places:
        try:
            # pynvml then finds it by its name, wherever it is.
            ctypes.CDLL(place)
        except OSError as error:
            if "No such file" not in str(error):
                return f"the NVIDIA driver's library can't be loaded: {error}"
            continue
        return importlib.import_module("pynvml")
    return None


class Nvml:
    """A driver that is asked through its library, opened at the first look and kept. For one thread at a time."""

    def __init__(
        self, load: Callable[[], Any] = load_nvml, count_present: Callable[[], int | None] = count_cards
    ) -> None:
        self._load = load
        self._count_present = count_present
        self._nvml: Any = None
        self._open = False

    def survey(self) -> Survey | None:
        if self._nvml is None:
            loaded = self._load()
            if loaded is None:
                return None
            if isinstance(loaded, str):
                return Survey(problem=loaded)
            self._nvml = loaded
        try:
            if not self._open:
                self._call("nvmlInit")
                self._open = True
            found = self._survey()
        except (_Fault, _DriverFault) as fault:
            self._close()
            if str(fault) == NOT_RUNNING and self._count_present() == 0:
                # Its packages are here, as on every machine of an image, and nothing that it could drive.
                return Survey()
            return Survey(problem=str(fault))
        if found.lost or any(card.broken for card in found.cards):
            # One that was reset or put back is seen only by a library that is opened anew.
            self._close()
        return found

    def _close(self) -> None:
        if self._open:
            self._open = False
            with suppress(_Fault, _DriverFault):
                self._call("nvmlShutdown")

    def _call(self, function: str, *arguments: Any) -> Any:
        """What the driver answers; a fault where it does not."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError as error:
            text = _WORDS.get(error.value, f"the NVIDIA driver says: {error}")
            if error.value in _DRIVER_GONE:
                raise _DriverFault(text) from error
            raise _Fault(text, error.value) from error
        except UnicodeDecodeError as error:
            raise _Fault(f"the NVIDIA driver answers nonsense: {error}", None) from error

    def _ask(self, function: str, *arguments: Any) -> Any:
        """The same; None where the driver does not tell this of this card."""
        try:
            return self._call(function, *arguments)
        except _Fault as fault:
            if fault.code in _CARD_GONE:
                raise
            return None

    def _survey(self) -> Survey:
        cards: list[Card] = []
        lost: list[LostCard] = []
        links: dict[str, _Links | None] = {}
        count = self._call("nvmlDeviceGetCount")
        driver = self._ask("nvmlSystemGetDriverVersion")
        for index in range(count):
            try:
                handle = self._call("nvmlDeviceGetHandleByIndex", index)
                uuid = self._call("nvmlDeviceGetUUID", handle)
            except _Fault as fault:
                lost.append(LostCard(reason=str(fault), index=index))
                continue
            card = self._identify(handle, uuid, index)
            try:
                card = self._measure(handle, card)
                links[uuid] = self._read_links(handle)
            except _Fault as fault:
                card = replace(card, broken=str(fault))
            cards.append(card)
        return Survey(cards=_connect(cards, links), lost=tuple(lost), driver=driver)

    def _identify(self, handle: Any, uuid: str, index: int) -> Card:
        """What a card is called, also where it can be asked nothing else."""
        name = pci = None
        with suppress(_Fault):
            name = self._call("nvmlDeviceGetName", handle)
        with suppress(_Fault):
            pci = short_pci(self._call("nvmlDeviceGetPciInfo", handle).busId)
        return Card(uuid=uuid, index=index, name=name or "NVIDIA GPU", pci=pci)

    def _measure(self, handle: Any, card: Card) -> Card:
        nvml = self._nvml
        # Before its processes: an engine that loads meanwhile would leave memory that seems nobody's.
        memory, reserve_apart = self._read_memory(handle)
        utilization = self._ask("nvmlDeviceGetUtilizationRates", handle)
        return replace(
            card,
            memory_bytes=memory and memory.total,
            used_bytes=memory and max(0, memory.total - memory.free - (memory.reserved if reserve_apart else 0)),
            reserve_apart=reserve_apart,
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            utilization_percent=utilization and utilization.gpu,
            ecc_errors=self._ask(
                "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            mig=self._read_mig(handle),
            holders=self._read_holders(handle),
        )

    def _read_memory(self, handle: Any) -> tuple[Any, bool]:
        """The sizes, and whether what the driver keeps for itself stands apart; None for one that has no memory of its
        own. One that has, and does not tell, is broken."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle, self._nvml.nvmlMemory_v2)
        if memory is not None:
            return memory, True
        try:
            return self._call("nvmlDeviceGetMemoryInfo", handle), False
        except _Fault as fault:
            if fault.code == NOT_SUPPORTED:
                return None, False
            raise

    def _read_mig(self, handle: Any) -> tuple[MigInstance, ...] | None:
        modes = self._ask("nvmlDeviceGetMigMode", handle)
        if modes is None or modes[0] != self._nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        found = []
        for place in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            # Places without an instance answer with an error.
            instance = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
            uuid = instance and self._ask("nvmlDeviceGetUUID", instance)
            if uuid:
                found.append(self._describe_instance(instance, uuid))
        return tuple(found)

    def _describe_instance(self, instance: Any, uuid: str) -> MigInstance:
        shape = _MIG_SHAPE.search(self._ask("nvmlDeviceGetName", instance) or "")
        parts = self._ask("nvmlDeviceGetAttributes_v2", instance)
        size_bytes = parts.memorySizeMB * MIB if parts else 0
        built = f"{parts.gpuInstanceSliceCount}g.{round(size_bytes / 1024**3)}gb" if parts else "unknown"
        return MigInstance(uuid=uuid, shape=shape[1] if shape else built, memory_gb=round(size_bytes / GB, 3))

    def _read_holders(self, handle: Any) -> tuple[Holder, ...] | None:
        """Who has memory of it; one that computes and draws is in two lists with the same size."""
        found: dict[int, int | None] = {}
        told = False
        for kind in ("Compute", "Graphics", "MPSCompute"):
            function = f"nvmlDeviceGet{kind}RunningProcesses"
            running = self._ask(f"{function}_v3", handle)
            if running is None:
                running = self._ask(f"{function}_v2", handle)
            if running is None:
                continue
            told = True
            for process in running:
                known = [size for size in (found.get(process.pid), process.usedGpuMemory) if size is not None]
                found[process.pid] = max(known, default=None)
        return tuple(Holder(pid=pid, memory_bytes=size) for pid, size in found.items()) if told else None

    def _read_links(self, handle: Any) -> _Links | None:
        """None where the driver knows of no links at all, or does not say where an active one leads."""
        nvml = self._nvml
        cards: set[str] = set()
        doubtful: set[str] = set()
        to_switch = False
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                state = self._call("nvmlDeviceGetNvLinkState", handle, link)
            except _Fault as fault:
                if fault.code in _CARD_GONE:
                    raise
                if fault.code == NO_FUNCTION:
                    return None
                # It has none of this number.
                continue
            if state != nvml.NVML_FEATURE_ENABLED:
                continue
            kind = self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                to_switch = True
                continue
            remote = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            address = short_pci(remote.busId) if remote else None
            if address is None:
                return None
            (cards if kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU else doubtful).add(address)
        return _Links(frozenset(cards), frozenset(doubtful), to_switch)


def _connect(cards: list[Card], links: dict[str, _Links | None]) -> tuple[Card, ...]:
    """Give each card its peers: those at the other ends of its links, and all that reach a switch as it does."""
    seen = {card.pci for card in cards}
    known = {uuid: one for uuid, one in links.items() if one is not None and one.doubtful <= seen}

    def joined(one: _Links, card: Card) -> bool:
        other = known.get(card.uuid)
        direct = card.pci in one.cards or card.pci in one.doubtful
        return direct or (one.to_switch and other is not None and other.to_switch)

    connected = []
    for card in cards:
        own = known.get(card.uuid)
        peers = None if own is None else tuple(one.uuid for one in cards if one is not card and joined(own, one))
        connected.append(replace(card, nvlink_peers=peers))
    return tuple(connected)
