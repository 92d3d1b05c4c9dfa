"""Which filesystems are mounted where, by the kernel's own list, in the words that the operator knows them by."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """``point``: where it is mounted; ``kind``: ``ext4``, ``nfs4``, …; ``device``: its number, as of ``stat``."""

    point: str
    kind: str
    device: int

    def __str__(self) -> str:
        return f"{self.point} ({self.kind})"


def read_mounts(mounts: Path = MOUNTS) -> tuple[Mount, ...]:
    """What is mounted, in that order: what comes later at a point hides what was there. None where nobody can say."""
    try:
        text = os.fsdecode(mounts.read_bytes())
    except OSError:
        return ()
    # (not by splitlines: to that more ends a line than to the kernel, which writes all but that as it is)
    return tuple(filter(None, map(_parse, text.split("\n"))))


def find_mount(path: Path, mounts: Path = MOUNTS) -> Mount | None:
    """The filesystem that this path is on, also when it is still to be made; None where nobody can say."""
    place = Path(os.path.realpath(path))
    found: Mount | None = None
    for mount in read_mounts(mounts):
        if place.is_relative_to(mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _parse(line: str) -> Mount | None:
    # Its fields end with any number of optional ones; behind a lone dash come the type and the source.
    left, _, right = line.partition(" - ")
    fields, kind = left.split(" "), right.partition(" ")[0]
    if len(fields) < 5 or not kind or (device := re.fullmatch(r"(\d{1,9}):(\d{1,9})", fields[2])) is None:
        return None
    return Mount(point=_unescape(fields[4]), kind=kind, device=os.makedev(int(device[1]), int(device[2])))


def _unescape(text: str) -> str:
    """A path as it is: the kernel writes a blank, a tab, a line's end and a backslash in octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
