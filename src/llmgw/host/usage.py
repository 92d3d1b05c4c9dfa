"""What the processes of one engine take of their machine at the moment."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmgw.host.memory import PROC, read_held_gb

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The living processes, the memory that they hold together, in GB of 10^9 bytes, and the seconds of processors that
    they have used since their starts. ``gpu_gb`` is the most that they hold of any one GPU, None where nobody says."""

    pids: frozenset[int] = frozenset()
    memory_gb: float = 0.0
    cpu_seconds: float = 0.0
    gpu_gb: float | None = None


def read_usage(pids: Iterable[int], proc: Path = PROC) -> Usage:
    """What these processes take, without GPUs. One that has ended takes nothing."""
    found = frozenset(pids)
    cpu_seconds = sum(_read_ticks(proc / str(pid) / "stat") for pid in found) / TICKS_PER_SECOND
    return Usage(pids=found, memory_gb=read_held_gb(found, proc), cpu_seconds=cpu_seconds)


def _read_ticks(stat: Path) -> int:
    try:
        text = stat.read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    # The name stands in brackets and may itself hold spaces and brackets: count from the last one.
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
