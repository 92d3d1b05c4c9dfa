"""Whether the kernel's OOM killer was at work: the counter of the control group that llmgw and its engines are in."""

from __future__ import annotations

import re
from pathlib import Path

_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def count_oom_kills(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes of our control group (version 2), and of those below it, were killed for memory until now.

    Whether the group's own limit or the machine was at its end. None where nobody counts. Blocks for a moment.
    """
    for folder in (_find_group(proc, groups), groups):
        try:
            found = _KILLS.search((folder / "memory.events").read_text(encoding="ascii", errors="replace"))
        except OSError:
            # Seen from inside a container our path may begin outside of what is mounted here: then its root is ours.
            continue
        return int(found[1]) if found else None
    return None


def _find_group(proc: Path, groups: Path) -> Path:
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return groups
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    return groups / path.lstrip("/")
