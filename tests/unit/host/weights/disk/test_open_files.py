"""Files are opened as they are needed, and not too many of them."""

from __future__ import annotations

import os

import pytest

from llmgw.host.weights.disk.beneath import open_folder
from llmgw.host.weights.disk.open_files import MOST_OPEN, OpenFiles

COUNT = MOST_OPEN + 20


@pytest.fixture
def files(tmp_path):
    names = [f"f{number}" for number in range(COUNT)]
    for name in names:
        (tmp_path / name).write_text(name)
    with open_folder(tmp_path) as folder:
        files = OpenFiles(folder, names, os.O_RDONLY)
    yield files
    files.close()


def count_open():
    return len(os.listdir("/proc/self/fd"))


def test_only_some_stay_open(files):
    before = count_open()
    for number in [*range(COUNT), *reversed(range(COUNT)), 0, 0]:
        with files.use(number) as file:
            assert os.pread(file, 9, 0).decode() == f"f{number}"
    assert count_open() == before + MOST_OPEN


def test_one_that_is_in_use_stays_open_whatever_comes(files):
    with files.use(0) as first, files.use(0) as again:
        assert first == again
        for number in range(1, COUNT):
            with files.use(number):
                pass
        assert os.pread(first, 9, 0) == b"f0"


def test_close_waits_for_who_uses_one_and_lets_nobody_in(files):
    before = count_open()
    with files.use(0) as file:
        files.close()
        files.close()
        assert os.pread(file, 9, 0) == b"f0"
        with pytest.raises(LookupError), files.use(1):
            pass
    # (its folder is closed as well)
    assert count_open() == before - 1


def test_what_is_missing_is_told(files, tmp_path):
    (tmp_path / "f3").unlink()
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "f3")), files.use(3):
        pass
    with files.use(4):
        pass
