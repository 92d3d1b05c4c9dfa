"""Room on disks, of this machine's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmgw.host.disks import is_shared, read_disks


def test_two_folders_of_one_filesystem_are_one_disk(tmp_path):
    (disk,) = read_disks([tmp_path, tmp_path / "models"])
    assert disk.path == str(tmp_path)
    assert 0 <= disk.free_gb <= disk.total_gb
    assert disk.total_gb > 0


def test_a_folder_that_is_still_to_be_made_counts_as_its_parent(tmp_path):
    (disk,) = read_disks([tmp_path / "not" / "yet"])
    assert disk.path == str(tmp_path / "not" / "yet")


def test_another_filesystem_is_another_disk(tmp_path):
    assert len(read_disks([tmp_path, Path("/proc")])) == 2


def mounts(tmp_path, *lines):
    path = tmp_path / "mountinfo"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def line(point, kind, device="0:99", optional=""):
    return f"36 35 {device} / {point} rw,noatime {optional}- {kind} source rw"


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "lustre", "ceph", "beegfs", "9p", "fuse.sshfs", "fuse.s3fs"])
def test_what_other_machines_fill_too_is_left_out(tmp_path, kind):
    (tmp_path / "models").mkdir()
    table = mounts(tmp_path, line("/", "ext4"), line(tmp_path / "models", kind, optional="shared:7 master:1 "))
    (disk,) = read_disks([tmp_path / "models" / "deep" / "er", tmp_path], table)
    assert disk.path == str(tmp_path)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "zfs", "btrfs", "fuseblk", "fuse.mergerfs"])
def test_a_disk_of_this_machine_is_told_however_it_is_mounted(tmp_path, kind):
    assert len(read_disks([tmp_path], mounts(tmp_path, line(tmp_path, kind)))) == 1


def test_a_shared_one_is_known_by_its_path_and_never_touched(tmp_path):
    gone = Path("/nowhere/that/a file\\server/is")
    table = mounts(tmp_path, line("/nowhere/that/a\\040file\\134server", "nfs4"))
    assert read_disks([gone], table) == ()
    assert read_disks([Path("/nowhere/that/else")], table) != ()


def test_what_is_mounted_over_a_shared_one_counts(tmp_path):
    local, shared = line(tmp_path, "ext4"), line(tmp_path, "nfs")
    assert len(read_disks([tmp_path], mounts(tmp_path, shared, local))) == 1
    assert read_disks([tmp_path], mounts(tmp_path, local, shared)) == ()


def test_a_link_into_a_shared_one_is_left_out_too(tmp_path):
    (tmp_path / "link").symlink_to("/proc")
    number = os.stat("/proc").st_dev
    table = mounts(tmp_path, line("/elsewhere", "nfs", device=f"{os.major(number)}:{os.minor(number)}"))
    assert read_disks([tmp_path / "link"], table) == ()


def test_a_folder_that_others_write_to_is_known_by_its_path_or_its_device(tmp_path):
    number = os.stat("/proc").st_dev
    (tmp_path / "link").symlink_to("/proc")
    table = mounts(
        tmp_path,
        line("/", "ext4"),
        line("/nowhere/server", "nfs4"),
        line("/elsewhere", "nfs", device=f"{os.major(number)}:{os.minor(number)}"),
    )
    found = [
        is_shared(Path(each), table) for each in ("/nowhere/server/.cache", tmp_path / "link", tmp_path / "a" / "b")
    ]
    assert found == [True, True, False]


def test_lines_that_mean_nothing_are_passed_over(tmp_path):
    (tmp_path / "models").mkdir()
    table = mounts(tmp_path, "nonsense", "36 35 x:y / / rw - nfs s rw", line(tmp_path / "models", "nfs"))
    assert is_shared(tmp_path / "models", table)
    assert not is_shared(tmp_path, table)


def test_a_folder_that_can_not_be_looked_at_hides_no_other(tmp_path):
    odd = tmp_path / ("x" * 300)
    (disk,) = read_disks([odd, tmp_path])
    assert disk.path == str(tmp_path)
    assert not is_shared(odd)


def test_a_machine_that_does_not_tell_its_mounts_tells_its_disks(tmp_path):
    assert len(read_disks([tmp_path], tmp_path / "none")) == 1
