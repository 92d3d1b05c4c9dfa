"""Nothing is followed out of a folder, and every error says where it was."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from llmgw.host.weights.disk.beneath import count_bytes, open_folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    with open_folder(tmp_path / "in") as folder:
        yield folder


@pytest.fixture
def outside(tmp_path):
    """A folder beside it, with something that must stay as it is."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    yield tmp_path / "out"
    assert (tmp_path / "out" / "precious").read_text() == "mine"
    assert len(list((tmp_path / "out").iterdir())) == 1


def write(folder, name, content=b"x"):
    folder.write(name, content)


def test_folders_are_made_as_they_are_entered(folder):
    with folder.enter("a/b", make=True) as inner:
        write(inner, "f")
    assert (folder.path / "a/b/f").read_text() == "x"
    assert folder.status("a/b/f").st_size == 1
    assert folder.status("a/b/g") is None
    assert folder.status("a/b/f/g") is None
    assert folder.has_folder("a/b")
    assert not folder.has_folder("a/b/f")
    assert [name for name, _ in folder.walk()] == ["a/b/f", "a/b", "a"]


def test_a_file_is_written_over_as_a_whole(folder):
    write(folder, "f", b"long before")
    write(folder, "f", b"short")
    assert folder.read("f", 100) == b"short"
    assert folder.read("f", 2) == b"sh"


@pytest.mark.parametrize("make", [True, False])
def test_a_link_to_a_folder_is_not_entered(folder, outside, make):
    (folder.path / "a").symlink_to(outside)
    with pytest.raises(OSError, match=rf"it is a link, and none is followed there: '{folder.path}/a'") as raised:
        folder.enter("a/b", make=make)
    assert raised.value.errno == errno.ELOOP
    assert folder.status("a/precious") is None


@pytest.mark.parametrize("name", ["l", "a/l"])
def test_a_link_to_a_file_is_neither_read_nor_written(folder, outside, name):
    folder.enter("a", make=True).close()
    (folder.path / name).symlink_to(outside / "precious")
    with pytest.raises(OSError, match="it is a link"):
        folder.read(name, 1)
    with pytest.raises(OSError, match="it is a link"):
        write(folder, name)


def test_a_hard_link_is_read_but_never_written(folder, outside):
    os.link(outside / "precious", folder.path / "l")
    assert folder.read("l", 9) == b"mine"
    with pytest.raises(OSError, match=rf"it is a hard link to another file: '{folder.path}/l'"):
        write(folder, "l")


def test_what_is_no_plain_file_is_not_opened_and_holds_nobody(folder):
    os.mkfifo(folder.path / "pipe")
    with pytest.raises(OSError, match=r"no plain file: .*pipe"):
        folder.read("pipe", 1)
    folder.enter("sub", make=True).close()
    with pytest.raises(OSError, match=r"no plain file: .*sub"):
        folder.read("sub", 1)


def test_links_are_removed_themselves_and_never_what_they_lead_to(folder, outside):
    folder.enter("a/b", make=True).close()
    (folder.path / "a/l").symlink_to(outside)
    (folder.path / "a/b/l").symlink_to(outside / "precious")
    os.link(outside / "precious", folder.path / "a/b/hard")
    write(folder, "a/b/f", b"12345")
    assert folder.remove("a") == 5
    assert folder.names() == []
    assert folder.remove("a") == 0
    folder.unlink("a")


def test_a_file_alone_is_removed_too(folder):
    write(folder, "f", b"123")
    assert folder.remove("f") == 3


def test_holes_take_nothing_from_the_disk(folder):
    with (folder.path / "f").open("wb") as file:
        file.truncate(1_000_000)
    assert count_bytes(os.stat(folder.path / "f")) < 100_000
    assert count_bytes(os.stat(folder.path)) == 0


def test_a_rename_that_fails_says_where(folder):
    folder.enter("a", make=True).close()
    folder.enter("b/c", make=True).close()
    with pytest.raises(OSError, match=rf"'{folder.path}/b'") as raised:
        folder.rename("a", "b")
    assert raised.value.filename2 is None


def test_a_file_in_the_place_of_a_folder_is_told(folder):
    write(folder, "a")
    with pytest.raises(NotADirectoryError, match=rf"'{folder.path}/a'"):
        folder.enter("a", make=True)


def test_a_folder_may_be_closed_twice_and_nothing_stays_open(folder):
    before = len(os.listdir("/proc/self/fd"))
    inner = folder.enter("a/b/c", make=True)
    inner.close()
    inner.close()
    with pytest.raises(OSError, match="none"):
        folder.enter("none/such")
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_folder_itself_may_be_reached_by_a_link_and_is_made(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with open_folder(tmp_path / "link" / "a" / "b", make=True) as folder:
        write(folder, "f")
    assert (tmp_path / "real/a/b/f").exists()


@pytest.fixture
def mounted(folder):
    """A small disk below the folder."""
    place = folder.path / "a"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=False, capture_output=True
    ).returncode:
        pytest.skip("nothing may be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_what_is_mounted_below_is_not_removed(folder, mounted):
    (mounted / "precious").write_text("mine")
    with pytest.raises(OSError, match="something is mounted there"):
        folder.remove("a")
    assert (mounted / "precious").read_text() == "mine"
