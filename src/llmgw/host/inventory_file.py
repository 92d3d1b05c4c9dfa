"""The fake inventory: a file that stands in for what a machine has, for tests and for trying llmgw out without GPUs."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmgw.config.document import Section, parse_document
from llmgw.config.ordinary import read_ordinary
from llmgw.core.node import Disk, FabricFound, ForeignUse, Gpu, MigInstance
from llmgw.errors import ConfigError, Problem

MAX_BYTES = 256 * 1024
# What a report to the server holds at most.
MAX_GPUS = 64
MAX_PARTS = 64
MAX_FABRICS = 16
MAX_CHARS = 200
MAX_GB = 1_000_000

NVLINKS = ("all", "none", "pairs")
# A class that ends so says how much memory its GPUs have.
_SIZED = re.compile(r".*-([1-9][0-9]{0,3})g")
_CLASS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OF_ONE = ("uuid", "index", "pci", "nvlink_peers")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeInventory:
    """What the file says. None: the machine's own is taken. A declared fabric that is not in it is looked for as usual.

    ``driver`` and ``problem`` are what the driver of the GPUs would say of itself.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    problem: str | None = None
    cores: int | None = None
    cpu_flags: frozenset[str] | None = None
    memory_gb: float | None = None
    memory_foreign_gb: float | None = None
    disks: tuple[Disk, ...] | None = None
    fabrics: Mapping[str, FabricFound] = field(default_factory=dict)


class InventoryFile:
    """The file, read anew when it has changed. ``trouble`` says why what is in it now can't be used: then it is what it
    was before."""

    __slots__ = ("_last", "_node", "_seen", "path", "trouble")

    def __init__(self, path: Path, node: str) -> None:
        self.path = path
        self.trouble: str | None = None
        self._node = node
        self._seen: bytes | None = None
        self._last = FakeInventory()

    def load(self) -> FakeInventory:
        """What it says now. ConfigError with everything that is wrong in it. Blocks."""
        try:
            raw = read_ordinary(self.path, MAX_BYTES + 1)
            text = raw.decode("utf-8-sig")
        except OSError as error:
            raise self._refuse(f"can't be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise self._refuse("is not UTF-8") from None
        if len(raw) > MAX_BYTES:
            raise self._refuse(f"is larger than {MAX_BYTES // 1024} KiB: no inventory")
        # Compared as a whole: two changes within one tick of the disk's clock would look like one.
        if raw != self._seen:
            self._last = parse_inventory(text, str(self.path), self._node)
            self._seen = raw
        self.trouble = None
        return self._last

    def read(self) -> FakeInventory:
        """What it says now, or said last while it is wrong, or is just being written. Blocks."""
        try:
            return self.load()
        except ConfigError as error:
            self.trouble = "; ".join(map(str, error.problems))
            return self._last

    def _refuse(self, why: str) -> ConfigError:
        return ConfigError([Problem(key="", message=why, where=str(self.path))])


def parse_inventory(text: str, file: str, node: str) -> FakeInventory:
    """The inventory of ``node``, whose name is in the UUIDs that the text leaves open. ConfigError with everything that
    is wrong, placed in ``file``."""
    top, findings = parse_document(text, file)
    memory_gb = top.gigabytes("memory_gb", None, high=MAX_GB, zero=False)
    inventory = FakeInventory(
        gpus=_read_gpus(top, node),
        driver=_words(top, "driver"),
        problem=_words(top, "problem"),
        cores=top.count("cores", None, low=1, high=100_000),
        cpu_flags=frozenset(top.texts("cpu_flags")) if top.has("cpu_flags") else None,
        memory_gb=memory_gb,
        memory_foreign_gb=top.gigabytes("memory_foreign_gb", None, high=MAX_GB),
        disks=_read_disks(top) if top.has("disks") else None,
        fabrics=_read_fabrics(top),
    )
    if memory_gb is not None and (inventory.memory_foreign_gb or 0.0) > memory_gb:
        top.wrong("memory_foreign_gb", f"is more than memory_gb ({memory_gb:g})")
    top.close()
    findings.raise_if_any()
    return inventory


def _words(section: Section, key: str) -> str | None:
    text = section.text(key, None)
    if text is not None and (len(text) > MAX_CHARS or not text.isprintable()):
        section.wrong(key, f"must be one printable line of {MAX_CHARS} characters at most")
    return text


# -- GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """One GPU, and how it is linked: a word of NVLINKS or the indices of its peers, None where nothing is said."""

    gpu: Gpu
    nvlink: str | None
    peers: tuple[str, ...] | None
    section: Section


def _read_gpus(top: Section, node: str) -> tuple[Gpu, ...]:
    found: list[_Written] = []
    for stanza in top.sections("gpus"):
        found += _read_entry(stanza, node, first=max((each.gpu.index for each in found), default=-1) + 1)
        if len(found) > MAX_GPUS:
            top.wrong("gpus", f"are more than {MAX_GPUS}, which is what a node has at most")
            return ()
    for number, each in enumerate(found):
        if each.gpu.index in {other.gpu.index for other in found[:number]}:
            each.section.wrong("index", f"{each.gpu.index} is that of another GPU too")
        elif each.gpu.uuid in {other.gpu.uuid for other in found[:number]}:
            each.section.wrong("uuid", f"{each.gpu.uuid} is that of another GPU too")
    return tuple(replace(each.gpu, nvlink_peers=_find_peers(each, found)) for each in found)


def _read_entry(stanza: Section, node: str, *, first: int) -> Iterator[_Written]:
    """The GPUs of one entry; the first of them has the index ``first`` where none is written."""
    count = stanza.count("count", 1, low=1, high=MAX_GPUS)
    if stanza.has("count"):
        for key in _OF_ONE:
            if stanza.has(key):
                stanza.wrong(key, "is of one GPU alone; give that an entry of its own, without count")
    first = stanza.count("index", first, low=0, high=100_000)
    gpu_class = stanza.required_text("class")
    if gpu_class and (len(gpu_class) > MAX_CHARS or not _CLASS.fullmatch(gpu_class)):
        stanza.wrong("class", f"{gpu_class!r} may hold letters, digits and . _ - only (h100-80g)")
    nvlink = stanza.choice("nvlink", "", NVLINKS) or None
    peers = stanza.texts("nvlink_peers", numbers=True) if stanza.has("nvlink_peers") else None
    if nvlink is not None and peers is not None:
        stanza.wrong("nvlink_peers", "stands beside nvlink; write one of the two")
    model = _read_gpu(stanza, gpu_class)
    uuid = _words(stanza, "uuid")
    stanza.close()
    for index in range(first, first + count):
        gpu = replace(model, index=index, uuid=uuid or f"GPU-{node}-{index}")
        yield _Written(gpu=gpu, nvlink=nvlink, peers=peers, section=stanza)


def _read_gpu(stanza: Section, gpu_class: str) -> Gpu:
    sized = _SIZED.fullmatch(gpu_class)
    if gpu_class and sized is None and not stanza.has("memory_gb"):
        stanza.wrong("memory_gb", f"is missing, and the class {gpu_class!r} does not end with it (h100-80g)")
    memory_gb = stanza.gigabytes("memory_gb", float(sized[1]) if sized else 0.0, high=MAX_GB, zero=False)
    foreign = tuple(_read_foreign(each) for each in stanza.sections("foreign"))
    held_gb = sum((use.memory_gb for use in foreign), 0.0)
    used_gb = stanza.gigabytes("memory_used_gb", held_gb, high=MAX_GB)
    if held_gb > used_gb:
        stanza.wrong("memory_used_gb", f"is less than what foreign holds ({held_gb:g})")
    if used_gb > memory_gb > 0:
        key = "memory_used_gb" if stanza.has("memory_used_gb") else "foreign"
        stanza.wrong(key, f"is more than memory_gb ({memory_gb:g})")
    _bound(stanza, "foreign", foreign)
    instances = tuple(_read_instance(each) for each in stanza.sections("mig")) if stanza.has("mig") else None
    _bound(stanza, "mig", instances or ())
    return Gpu(
        uuid="",
        index=0,
        gpu_class=gpu_class,
        name=_words(stanza, "name") or f"fake {gpu_class}",
        memory_gb=memory_gb,
        memory_used_gb=used_gb,
        pci=_words(stanza, "pci"),
        temperature_c=stanza.amount("temperature_c", None, high=200),
        utilization_percent=stanza.amount("utilization_percent", None, high=100),
        ecc_errors=stanza.count("ecc_errors", None, low=0, high=2**40),
        mig=instances,
        foreign=foreign,
        broken=_words(stanza, "broken"),
    )


def _bound(stanza: Section, key: str, parts: tuple[object, ...]) -> None:
    if len(parts) > MAX_PARTS:
        stanza.wrong(key, f"are {len(parts)}; {MAX_PARTS} can be told")


def _read_foreign(stanza: Section) -> ForeignUse:
    stanza.require("memory_gb")
    use = ForeignUse(
        memory_gb=stanza.gigabytes("memory_gb", 0.0, high=MAX_GB, zero=False),
        pid=stanza.count("pid", None, low=1, high=2**22),
        name=_words(stanza, "name"),
    )
    stanza.close()
    return use


def _read_instance(stanza: Section) -> MigInstance:
    stanza.require("memory_gb")
    instance = MigInstance(
        uuid=stanza.required_text("uuid"),
        shape=stanza.required_text("shape"),
        memory_gb=stanza.gigabytes("memory_gb", 0.0, high=MAX_GB, zero=False),
    )
    stanza.close()
    return instance


def _find_peers(one: _Written, written: list[_Written]) -> tuple[str, ...] | None:
    others = [each.gpu for each in written if each is not one]
    if one.peers is not None:
        known = {str(gpu.index): gpu.uuid for gpu in others}
        for peer in one.peers:
            if peer not in known:
                one.section.wrong("nvlink_peers", f"{peer} is not the index of another GPU")
        return tuple(known[peer] for peer in one.peers if peer in known)
    alike = [each for each in written if each.nvlink == one.nvlink]
    match one.nvlink:
        case "all":
            return tuple(each.gpu.uuid for each in alike if each is not one)
        case "pairs":
            return _find_partner(one, alike)
        case "none":
            return ()
        case _:
            return None


def _find_partner(one: _Written, paired: list[_Written]) -> tuple[str, ...]:
    """The other one of two that follow each other; the last of an odd number has none."""
    place = next(number for number, each in enumerate(paired) if each is one) ^ 1
    return (paired[place].gpu.uuid,) if place < len(paired) else ()


# -- all else


def _read_disks(top: Section) -> tuple[Disk, ...]:
    disks = []
    for stanza in top.sections("disks"):
        for key in ("free_gb", "total_gb"):
            stanza.require(key)
        free_gb, total_gb = (stanza.gigabytes(key, 0.0, high=MAX_GB) for key in ("free_gb", "total_gb"))
        if free_gb > total_gb:
            stanza.wrong("free_gb", f"is more than total_gb ({total_gb:g})")
        disks.append(Disk(path=stanza.required_text("path"), free_gb=free_gb, total_gb=total_gb))
        stanza.close()
    return tuple(disks)


def _read_fabrics(top: Section) -> dict[str, FabricFound]:
    section = top.section("fabrics")
    fabrics = {}
    for name in section.names():
        stanza = section.section(name)
        address = stanza.text("address", None)
        if address is not None and not _is_address(address):
            stanza.wrong("address", f"{address!r} is no IP address")
        fabrics[name] = FabricFound(
            name=name,
            interface=_words(stanza, "interface"),
            address=address,
            hcas=stanza.texts("hcas"),
            down=_words(stanza, "down"),
        )
        stanza.close()
    if len(fabrics) > MAX_FABRICS:
        top.wrong("fabrics", f"are {len(fabrics)}; a node has {MAX_FABRICS} at most")
    return fabrics


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
