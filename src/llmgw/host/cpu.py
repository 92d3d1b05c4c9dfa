"""What this machine has for engines that run on its processors: usable cores, instruction sets, memory."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """In GB of 10^9 bytes, within what the control group allows."""

    total_gb: float
    available_gb: float


def count_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """The cores this process may use: its affinity, and a container's share of processor time rounded up."""
    cores = len(os.sched_getaffinity(0))
    for folder in _find_groups("cpu", proc, cgroup):
        share = _read_share(folder)
        if share is not None:
            cores = min(cores, max(1, math.ceil(share)))
    return cores


def _read_share(folder: Path) -> float | None:
    """Processor time per time; None without a limit."""
    quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us") or "", _read(folder / "cpu.cfs_period_us") or ""
    if quota.isdigit() and period.isdigit() and int(period):
        return int(quota) / int(period)
    return None


def read_cpu_flags(proc: Path = PROC) -> frozenset[str]:
    """The instruction sets that every processor here has, by the kernel's names."""
    text = _read(proc / "cpuinfo") or ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def warn_of_cpu(flags: frozenset[str], machine: str = platform.machine()) -> str | None:
    """What an operator should know of this processor; None when nothing."""
    if machine in ("x86_64", "AMD64") and flags and "avx2" not in flags:
        return (
            "this processor has no AVX2: engines that run on it are several times slower, and some builds crash; "
            "a virtual machine has it when its CPU type is set to host"
        )
    return None


def read_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> Memory:
    """What there is, and what a new engine could take without pushing another out."""
    lines = (line.partition(":") for line in (_read(proc / "meminfo") or "").splitlines())
    sizes = {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.split()}
    total = sizes.get("MemTotal", 0)
    available = sizes.get("MemAvailable", sizes.get("MemFree", 0))
    for folder in _find_groups("memory", proc, cgroup):
        limit = _read_first(folder, "memory.max", "memory.limit_in_bytes")
        # Without a limit the old interface says a number near 2^63.
        if limit is None or limit >= total:
            continue
        used = _read_first(folder, "memory.current", "memory.usage_in_bytes") or 0
        total = limit
        available = min(available, max(0, limit - used + _read_reclaimable(folder)))
    return Memory(total_gb=total / GB, available_gb=min(available, total) / GB)


def _read_reclaimable(folder: Path) -> int:
    """File pages that count as used and go when they are needed: the weights just read are among them, and those that
    an engine reads again and again, as the kernel has it for the whole machine."""
    fields = (line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
    sizes = {pair[0]: int(pair[1]) for pair in fields if len(pair) == 2 and pair[1].isdigit()}
    return sum(sizes.get(f"total_{name}", sizes.get(name, 0)) for name in ("inactive_file", "active_file"))


def _find_groups(controller: str, proc: Path, cgroup: Path) -> Iterator[Path]:
    """The folders of this process's control group and of all above it, for one controller."""
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":
            root = cgroup
        elif controller in controllers.split(","):
            root = cgroup / controller
        else:
            continue
        folder = root / path.lstrip("/")
        # In a container the path may be that of the machine, which is not there to be seen: the root then is ours.
        if not folder.is_dir():
            folder = root
        yield folder
        while folder != root and root in folder.parents:
            folder = folder.parent
            yield folder


def _read_first(folder: Path, *names: str) -> int | None:
    for name in names:
        text = _read(folder / name)
        if text is not None and text.isdigit():
            return int(text)
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
