"""Which filesystem a folder is on, in the words that the operator knows it by."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """``point``: where it is mounted; ``kind``: ``ext4``, ``nfs4``, …"""

    point: str
    kind: str

    def __str__(self) -> str:
        return f"{self.point} ({self.kind})"


def find_mount(path: Path, mounts: Path = MOUNTS) -> Mount | None:
    """The filesystem that this path is on, also when it is still to be made; None where nobody can say."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    place = Path(os.path.realpath(path))
    found: Mount | None = None
    for mount in filter(None, map(_parse, lines)):
        # What is mounted last at a point hides what was there.
        if place.is_relative_to(mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _parse(line: str) -> Mount | None:
    # Its fields end with any number of optional ones; behind a lone dash come the type and the source.
    left, _, right = line.partition(" - ")
    fields, kind = left.split(" "), right.partition(" ")[0]
    return Mount(point=_unescape(fields[4]), kind=kind) if len(fields) > 4 and kind else None


def _unescape(text: str) -> str:
    """A path as it is: the kernel writes a blank, a tab, a line's end and a backslash in octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
