from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from llmgw.errors import LlmgwError, UsageError
from llmgw.pki.atomic import append_lines, explained, make_folder, stage

Nobody = Callable[[], AbstractContextManager[None]]


@contextmanager
def at_most(size_bytes: int) -> Iterator[None]:
    """A disk that takes no larger file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_files_appear_together_with_their_modes(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with stage() as staged:
            staged.add(tmp_path / "a", b"one", 0o644)
            staged.add(tmp_path / "b", b"two", 0o600)
            assert not (tmp_path / "a").exists()
            staged.place_new()
    finally:
        os.umask(before)
    assert {path.name: (path.read_bytes(), mode(path)) for path in tmp_path.iterdir()} == {
        "a": (b"one", 0o644),
        "b": (b"two", 0o600),
    }


def test_nothing_is_readable_by_others_on_its_way(tmp_path: Path) -> None:
    with stage() as staged:
        staged.add(tmp_path / "key", b"secret", 0o600)
        assert [mode(path) for path in tmp_path.iterdir()] == [0o600]


def test_a_place_that_is_taken_leaves_all_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"here first")
    with stage() as staged:
        staged.add(tmp_path / "a", b"one", 0o644)
        staged.add(tmp_path / "b", b"two", 0o644)
        with pytest.raises(FileExistsError):
            staged.place_new()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"b": b"here first"}


def test_what_is_replaced_is_replaced_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with stage() as staged:
        staged.add(tmp_path / "a", b"new", 0o640)
        staged.place()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new"}
    assert mode(tmp_path / "a") == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_owner_and_a_group_can_be_kept(tmp_path: Path) -> None:
    old = tmp_path / "a"
    old.write_bytes(b"old")
    os.chown(old, 12, 34)
    with stage() as staged:
        staged.add(old, b"new", 0o640, like=old.stat())
        staged.place()
    assert (old.stat().st_uid, old.stat().st_gid, mode(old)) == (12, 34, 0o640)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with at_most(10), stage() as staged:
        staged.add(tmp_path / "a", b"x" * 5, 0o644)
        with pytest.raises(OSError, match="File too large"):
            staged.add(tmp_path / "b", b"x" * 50, 0o644)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_with_all_that_lead_to_it(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_that_is_a_file_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(UsageError, match="a is a file, not a folder"):
        make_folder(tmp_path / "a")
    with pytest.raises(LlmgwError, match="it is a file, not a folder"):
        make_folder(tmp_path / "a" / "b")


def test_a_folder_that_may_not_be_written_is_told(open_folder: Path, as_nobody: Nobody) -> None:
    open_folder.chmod(0o555)
    with as_nobody(), pytest.raises(LlmgwError, match="Permission denied: do it as a user who may"):
        make_folder(open_folder / "a")


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "mend that"), (errno.EPERM, "as a user who may")],
)
def test_each_fault_says_what_helps(number: int, said: str) -> None:
    with pytest.raises(LlmgwError, match=f"x can't be read: .*{said}"), explained(Path("x"), "read"):
        raise OSError(number, os.strerror(number))


def test_lines_are_added_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "list"
    before = os.umask(0o077)
    try:
        append_lines(path, ["one", "two"], 0o644)
    finally:
        os.umask(before)
    append_lines(path, ["three"], 0o600)
    assert path.read_text() == "one\ntwo\nthree\n"
    assert mode(path) == 0o644


def test_an_entry_is_never_joined_to_a_line_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("by hand")
    append_lines(path, ["one"], 0o644)
    assert path.read_text() == "by hand\none\n"


def test_half_a_line_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("one\n")
    with at_most(10), pytest.raises(OSError, match="File too large"):
        append_lines(path, ["x" * 50], 0o644)
    assert path.read_text() == "one\n"
