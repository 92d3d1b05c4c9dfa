"""How much room the filesystems of the folders that matter have."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from llmgw.core.node import Disk

GB = 1e9


def read_disks(folders: Iterable[Path]) -> tuple[Disk, ...]:
    """One disk a filesystem, named by the first folder on it. One that is still to be made counts as its parent."""
    disks: dict[int, Disk] = {}
    for folder in folders:
        place = _find_existing(folder)
        try:
            device, sizes = os.stat(place).st_dev, os.statvfs(place)
        except OSError:
            continue
        disks.setdefault(
            device,
            Disk(
                path=str(folder),
                # What an ordinary user may still write, not what is kept for root.
                free_gb=sizes.f_bavail * sizes.f_frsize / GB,
                total_gb=sizes.f_blocks * sizes.f_frsize / GB,
            ),
        )
    return tuple(disks.values())


def _find_existing(folder: Path) -> Path:
    return next((place for place in (folder, *folder.parents) if place.exists()), folder)
