"""How much room the filesystems of the folders that matter have, as far as that room is this node's own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from llmgw.core.node import Disk

MOUNTS = Path("/proc/self/mountinfo")
GB = 1e9

# Filesystems that other machines write to as well: what is free there now is no promise to anybody.
_SHARED = frozenset({
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "mfs", "ncpfs",
    "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "quobyte", "smb3", "smbfs", "vboxsf", "virtiofs", "wekafs",
})  # fmt: skip
# What comes by a program of its own is shared too, unless it is one of these, which show a local disk.
_LOCAL_FUSE = frozenset({
    "fuse.bindfs", "fuse.encfs", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.ntfs",
    "fuse.ntfs-3g", "fuse.zfs", "fuse.unionfs",
})  # fmt: skip


def read_disks(folders: Iterable[Path], mounts: Path = MOUNTS) -> tuple[Disk, ...]:
    """One disk a filesystem, named by the first folder on it. One that is still to be made counts as its parent.

    Shared ones are left out. Where one is mounted at a folder or above it, it is not touched at all: a file server that
    is gone would hold whoever asks for as long as it is.
    """
    shared = _find_shared(mounts)
    disks: dict[int, Disk] = {}
    for folder in folders:
        if shared.above(folder):
            continue
        place = _find_existing(folder)
        try:
            device, sizes = os.stat(place).st_dev, os.statvfs(place)
        except OSError:
            continue
        # (a link may lead anywhere)
        if device in shared.devices:
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


def is_shared(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Whether other machines write to the filesystem of this folder as well; it is not touched where that is so."""
    shared = _find_shared(mounts)
    if shared.above(folder):
        return True
    try:
        return os.stat(_find_existing(folder)).st_dev in shared.devices
    except OSError:
        return False


class _Mounts:
    """Which mount points there are, those of shared filesystems, and their devices."""

    __slots__ = ("_shared", "devices")

    def __init__(self) -> None:
        self._shared: dict[Path, bool] = {}
        self.devices: set[int] = set()

    def add(self, point: Path, device: int, *, shared: bool) -> None:
        # What is mounted last at a point hides what was there.
        self._shared[point] = shared
        if shared:
            self.devices.add(device)

    def above(self, folder: Path) -> bool:
        """Whether the filesystem of this folder is a shared one, by its path alone."""
        return next((self._shared[place] for place in (folder, *folder.parents) if place in self._shared), False)


def _find_shared(mounts: Path) -> _Mounts:
    found = _Mounts()
    try:
        text = mounts.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return found
    for line in text.splitlines():
        # Its fields end with any number of optional ones; behind a lone dash come the type and the source.
        fields, _, rest = line.partition(" - ")
        _, _, device, _, point, *_ = fields.split(" ")
        major, _, minor = device.partition(":")
        kind = rest.partition(" ")[0]
        found.add(Path(_unescape(point)), os.makedev(int(major), int(minor)), shared=_is_shared(kind))
    return found


def _is_shared(kind: str) -> bool:
    return kind in _SHARED or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)


def _unescape(text: str) -> str:
    """A path as it is: the kernel writes a blank, a tab, a line's end and a backslash in octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _find_existing(folder: Path) -> Path:
    return next((place for place in (folder, *folder.parents) if place.exists()), folder)
