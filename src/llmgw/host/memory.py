"""How much of the machine's memory certain processes hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
GB = 1e9

# Not what is mapped of files: those pages are there for everybody, and go when they are needed.
_HELD = frozenset({"RssAnon", "RssShmem"})


def read_held_gb(pids: Iterable[int], proc: Path = PROC) -> float:
    """What these processes hold together, in GB of 10^9 bytes; one that has ended holds nothing.

    Memory that several of them share counts for each. Huge pages, files that are locked in memory, and what a driver
    holds in their name are not seen here.
    """
    return sum(_read_held_bytes(proc / str(pid) / "status") for pid in pids) / GB


def _read_held_bytes(status: Path) -> int:
    try:
        lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    fields = (line.partition(":") for line in lines)
    # as "RssAnon:	    1234 kB"
    return sum(int(value.split()[0]) * 1024 for name, _, value in fields if name in _HELD)
