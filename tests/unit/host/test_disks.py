"""Room on disks, of this machine's own."""

from __future__ import annotations

from pathlib import Path

from llmgw.host.disks import read_disks


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
