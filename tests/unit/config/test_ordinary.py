from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from llmgw.config.ordinary import read_ordinary, read_with_stat


def test_the_first_bytes_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert read_ordinary(path, 2) == b"ab"
    assert read_ordinary(path, 10) == b"abc"
    data, facts = read_with_stat(path, 0)
    assert (data, facts.st_size, facts.st_ino) == (b"", 3, path.stat().st_ino)


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_ordinary(tmp_path / "link", 10) == b"abc"


def test_nothing_else_is_waited_for_or_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is no ordinary file"):
            read_ordinary(path, 10)
    with pytest.raises(IsADirectoryError):
        read_ordinary(tmp_path, 10)
    with pytest.raises(FileNotFoundError):
        read_ordinary(tmp_path / "none", 10)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device"):
            read_ordinary(tmp_path / "socket", 10)
    assert len(os.listdir("/proc/self/fd")) == before
