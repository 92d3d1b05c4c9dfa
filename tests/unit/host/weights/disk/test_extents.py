"""Room that is taken beforehand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from llmgw.host.weights.disk.extents import begin_writing, give_back_room, take_room

SIZE = 300_000


@pytest.fixture
def file(tmp_path):
    file = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    yield file
    os.close(file)


def test_room_is_taken_and_what_is_there_stays(file):
    os.pwrite(file, b"abc", 1000)
    if not take_room(file, SIZE):
        pytest.skip("this filesystem takes no room beforehand")
    found = os.fstat(file)
    assert found.st_size == SIZE
    assert found.st_blocks * 512 >= SIZE
    assert os.pread(file, 5, 999) == b"\0abc\0"


@pytest.mark.parametrize("before", [0, 10, SIZE, 2 * SIZE])
def test_a_file_has_its_length_afterwards(file, before):
    os.ftruncate(file, before)
    take_room(file, SIZE)
    assert os.fstat(file).st_size == SIZE


def test_an_empty_file_needs_no_room(file):
    os.ftruncate(file, 5)
    assert take_room(file, 0)
    assert os.fstat(file).st_size == 0


def test_where_there_is_no_room_the_file_is_as_before(tmp_path):
    # A limit on what a process may write stands for the full disk.
    code = (
        "import os, resource, sys; from llmgw.host.weights.disk.extents import take_room\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))\n"
        "file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); os.pwrite(file, b'abc', 0)\n"
        "try: take_room(file, 300000)\n"
        "except OSError as error: print(error.errno, os.fstat(file).st_size)"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "f"], capture_output=True, text=True, check=True)
    assert run.stdout == "27 3\n"


def test_writing_is_begun_and_harms_nothing(file, tmp_path):
    os.pwrite(file, b"abc", 0)
    begin_writing(file, 0, 3)
    # (what can't be, is not: the sync at the end tells)
    reader, writer = os.pipe()
    begin_writing(writer, 0, 3)
    os.close(reader)
    os.close(writer)
    assert (tmp_path / "f").read_bytes() == b"abc"


def test_room_of_what_never_came_is_given_back_and_what_came_stays(file):
    size = 64 * SIZE
    os.pwrite(file, b"abc", 10 * SIZE)
    if not take_room(file, size):
        pytest.skip("this filesystem takes no room beforehand")
    os.pwrite(file, b"x" * SIZE, 40 * SIZE)
    give_back_room(file)
    found = os.fstat(file)
    assert found.st_size == size
    assert found.st_blocks * 512 < 3 * SIZE
    assert os.pread(file, 5, 10 * SIZE - 1) == b"\0abc\0"
    assert os.pread(file, SIZE + 2, 40 * SIZE - 1) == b"\0" + b"x" * SIZE + b"\0"
    assert take_room(file, size)
    assert os.fstat(file).st_blocks * 512 >= size


def test_of_what_is_all_there_nothing_is_given_back(file):
    os.pwrite(file, b"x" * SIZE, 0)
    blocks = os.fstat(file).st_blocks
    give_back_room(file)
    assert os.fstat(file).st_blocks == blocks
    assert os.pread(file, SIZE, 0) == b"x" * SIZE
    os.ftruncate(file, 0)
    give_back_room(file)
    assert os.fstat(file).st_size == 0


def test_a_disk_that_fails_meanwhile_says_so(tmp_path):
    reading = os.open(tmp_path, os.O_RDONLY)
    os.close(reading)
    with pytest.raises(OSError, match="Bad file descriptor"):
        give_back_room(reading)
