"""A folder's filesystem, by the kernel's own list."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmgw.host.mounts import find_mount, read_mounts

LIST = r"""25 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
26 25 0:24 / /mnt/lustre rw - lustre mgs@tcp:/fs rw
27 25 0:25 / /mnt/a\040b rw shared:2 master:3 - nfs4 filer:/x rw
28 25 8:1 / /srv rw - xfs /dev/sda1 rw
29 28 8:2 / /srv rw - btrfs /dev/sda2 rw
nonsense
30 25 x / /nowhere rw - xfs /dev/sdb rw
31 25 8:3 / /odd@name rw - xfs /dev/sdc rw
"""


@pytest.fixture
def mounts(tmp_path):
    (tmp_path / "mountinfo").write_bytes(LIST.replace("@name", "\x0b\r\u2028name").encode())
    return tmp_path / "mountinfo"


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [
        ("/", "/", "ext4"),
        ("/mnt/lustrelike/x", "/", "ext4"),
        ("/mnt/lustre/x/y", "/mnt/lustre", "lustre"),
        ("/mnt/a b", "/mnt/a b", "nfs4"),
        # (the one mounted last hides the other)
        ("/srv/models", "/srv", "btrfs"),
    ],
)
def test_the_innermost_mount_counts(mounts, path, point, kind):
    found = find_mount(Path(path), mounts)
    assert (found.point, found.kind) == (point, kind)
    assert str(found) == f"{point} ({kind})"


def test_links_are_followed_to_where_the_bytes_are(mounts, tmp_path):
    (tmp_path / "models").symlink_to("/mnt/lustre/models")
    assert find_mount(tmp_path / "models", mounts).kind == "lustre"


def test_each_line_that_means_something_is_a_mount(mounts):
    found = read_mounts(mounts)
    assert [each.point for each in found[2:]] == ["/mnt/a b", "/srv", "/srv", "/odd\x0b\r\u2028name"]
    assert {each.device for each in found[3:]} == {os.makedev(8, 1), os.makedev(8, 2), os.makedev(8, 3)}


def test_nobody_can_say_without_a_list(tmp_path):
    assert find_mount(tmp_path, tmp_path / "none") is None


def test_this_machine_has_one(tmp_path):
    assert find_mount(tmp_path) is not None
