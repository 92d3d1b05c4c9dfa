"""How much room the filesystems of the folders that matter have, as far as that room is this node's own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from llmgw.core.node import Disk
from llmgw.host.mounts import MOUNTS, Mount, read_mounts

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
    shared = _Mounts(read_mounts(mounts))
    disks: dict[int, Disk] = {}
    for folder in folders:
        if shared.above(folder):
            continue
        try:
            place = _find_existing(folder)
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
    shared = _Mounts(read_mounts(mounts))
    if shared.above(folder):
        return True
    try:
        return os.stat(_find_existing(folder)).st_dev in shared.devices
    except OSError:
        return False


class _Mounts:
    """Which mount points there are, those of shared filesystems, and their devices."""

    __slots__ = ("_shared", "devices")

    def __init__(self, mounts: Iterable[Mount]) -> None:
        found = [(mount, _is_shared(mount.kind)) for mount in mounts]
        # What is mounted last at a point hides what was there.
        self._shared = {Path(mount.point): shared for mount, shared in found}
        self.devices = {mount.device for mount, shared in found if shared}

    def above(self, folder: Path) -> bool:
        """Whether the filesystem of this folder is a shared one, by its path alone."""
        return next((self._shared[place] for place in (folder, *folder.parents) if place in self._shared), False)


def _is_shared(kind: str) -> bool:
    return kind in _SHARED or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)


def _find_existing(folder: Path) -> Path:
    return next((place for place in (folder, *folder.parents) if place.exists()), folder)
