from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from llmgw.errors import UsageError
from llmgw.store.place import discard, hold_file, read_address

Nobody = Callable[[], AbstractContextManager[None]]


def test_an_address_is_a_path() -> None:
    assert read_address("/var/lib/llmgw/llmgw.db") == Path("/var/lib/llmgw/llmgw.db")
    assert read_address("llmgw.db") == Path.cwd() / "llmgw.db"
    assert read_address("~/llmgw.db") == Path.home() / "llmgw.db"


@pytest.mark.parametrize("address", ["postgresql://host/llmgw", "", ":memory:", "a\0b"])
def test_any_other_store_is_not_of_this_version(address: str) -> None:
    with pytest.raises(UsageError, match=r"auth\.store: "):
        read_address(address)


def test_a_file_is_made_for_its_owner_and_group(path: Path) -> None:
    before = os.umask(0)
    try:
        with hold_file(path) as held:
            assert held.is_new
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    with hold_file(path) as held:
        assert not held.is_new


def test_the_mode_of_a_file_that_is_there_stays(path: Path) -> None:
    path.touch()
    path.chmod(0o600)
    with hold_file(path):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_second_server_is_refused_and_told_who_has_it(path: Path) -> None:
    with (
        hold_file(path),
        pytest.raises(UsageError, match=rf"another llmgw server \(pid {os.getpid()}\) has the store \S*llmgw\.db"),
        hold_file(path),
    ):
        raise AssertionError
    with hold_file(path):
        pass


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_second_name_of_the_file_is_no_second_store(path: Path, link: Callable[[Path, Path], None]) -> None:
    other = path.with_name("other.db")
    with hold_file(path):
        link(path, other)
        with pytest.raises(UsageError, match=rf"pid {os.getpid()}\) has the store \S*other\.db"), hold_file(other):
            raise AssertionError
    with hold_file(other):
        pass


def test_a_store_that_is_no_ordinary_file_is_told_and_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(UsageError, match="it is no ordinary file"), hold_file(path):
        raise AssertionError


@pytest.mark.slow
def test_a_server_that_was_killed_holds_nothing(path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom llmgw.store.place import hold_file\n"
        "with hold_file(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=rf"pid {other.pid}"), hold_file(path):
            raise AssertionError
        other.kill()
    with hold_file(path):
        pass


def test_a_missing_folder_a_folder_and_a_file_for_a_folder_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, said in (
        (tmp_path / "no" / "llmgw.db", "there is no folder"),
        (tmp_path, "it is a folder: name a file in it"),
        (tmp_path / "file" / "llmgw.db", "is not a folder"),
    ):
        with pytest.raises(UsageError, match=said), hold_file(path):
            raise AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_may_not_be_written_is_told(open_folder: Path, as_nobody: Nobody) -> None:
    open_folder.chmod(0o555)
    said = "Permission denied: the server's user has to own it"
    with as_nobody(), pytest.raises(UsageError, match=said), hold_file(open_folder / "llmgw.db"):
        raise AssertionError


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user, and so root")
def test_a_file_or_a_folder_of_another_user_is_told(open_folder: Path, as_nobody: Nobody) -> None:
    path = open_folder / "llmgw.db"
    path.touch(0o644)
    with as_nobody(), pytest.raises(UsageError, match=r"llmgw\.db: Permission denied"), hold_file(path):
        raise AssertionError
    path.chmod(0o666)
    with as_nobody(), pytest.raises(UsageError, match="no files can be made in it"), hold_file(path):
        raise AssertionError


def test_nothing_is_left_of_what_was_made_for_nothing(path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).touch()
    discard(path)
    assert list(path.parent.iterdir()) == []
