from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from llmgw.errors import LlmgwError
from llmgw.server.socket_file import open_socket_file


def test_its_folder_is_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "run" / "pages.sock"
    with open_socket_file(str(path), backlog=8):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_that_is_open_to_others_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    with open_socket_file(str(folder / "pages.sock"), backlog=8):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(LlmgwError, match="not a folder of this user"),
        open_socket_file(str(tmp_path / "run" / "pages.sock"), backlog=8),
    ):
        raise AssertionError("a socket was opened where anybody can put another")


def test_what_a_crash_left_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "pages.sock")
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(path)
    assert os.path.exists(path)
    with open_socket_file(path, backlog=8), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def test_one_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "pages.sock")
    with open_socket_file(path, backlog=8), socket.socket(socket.AF_UNIX) as client:
        with pytest.raises(LlmgwError, match="another llmgw listens"), open_socket_file(path, backlog=8):
            raise AssertionError("two listen at one path")
        client.connect(path)


def test_a_busy_one_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "pages.sock")
    with open_socket_file(path, backlog=0), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        with pytest.raises(LlmgwError, match="another llmgw listens"), open_socket_file(path, backlog=8):
            raise AssertionError("two listen at one path")


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pages.sock"
    path.write_text("precious")
    with pytest.raises(LlmgwError, match="not a socket"), open_socket_file(str(path), backlog=8):
        raise AssertionError("a file was replaced")
    assert path.read_text() == "precious"


def test_a_path_that_is_too_long_says_what_to_do(tmp_path: Path) -> None:
    path = str(tmp_path / ("x" * 120))
    with pytest.raises(LlmgwError, match="choose a shorter folder"), open_socket_file(path, backlog=8):
        raise AssertionError("a socket was opened at a path that the system can't hold")


def test_the_file_is_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "pages.sock"
    with open_socket_file(str(path), backlog=8):
        assert path.is_socket()
    assert not path.exists()


def test_a_file_that_another_put_there_stays_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "pages.sock"
    with open_socket_file(str(path), backlog=8):
        # A second name keeps the number of the first file taken, so that the new file can't get the same.
        path.rename(tmp_path / "moved.sock")
        path.write_text("another's")
    assert path.read_text() == "another's"


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("run", lambda path: path.touch(), "it is a file, not a folder"),
        ("run", lambda path: path.symlink_to("run"), "it is a file, not a folder"),
        ("file", lambda path: path.touch(), "Not a directory"),
    ],
)
def test_a_folder_that_can_not_be_used_is_told_in_words(
    tmp_path: Path, name: str, make: Callable[[Path], None], said: str
) -> None:
    make(tmp_path / name)
    folder = tmp_path / name if name == "run" else tmp_path / name / "run"
    with (
        pytest.raises(LlmgwError, match=rf"can't be opened \(.*{said}\): mend that, or choose another folder"),
        open_socket_file(str(folder / "pages.sock"), backlog=8),
    ):
        raise AssertionError("a socket was opened")
