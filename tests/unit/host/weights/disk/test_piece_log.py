"""The list of pieces survives whatever a kill or a full disk makes of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmgw.host.weights.disk.beneath import open_folder
from llmgw.host.weights.disk.piece_log import PieceLog

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


@pytest.fixture
def folder(tmp_path):
    with open_folder(tmp_path) as folder:
        yield folder


@pytest.fixture
def reopen(folder):
    opened = []

    def reopen():
        opened.append(PieceLog(folder))
        return opened[-1]

    yield reopen
    for each in opened:
        each.close()


def test_pieces_are_read_back_in_their_order(reopen):
    log = reopen()
    assert log.read() == {}
    log.add(1, 2, A)
    log.add(0, 7, B)
    log.add(0, 0, C)
    assert list(reopen().read().items()) == [((1, 2), A), ((0, 7), B), ((0, 0), C)]


def test_the_last_word_on_a_piece_counts(reopen):
    log = reopen()
    log.add(0, 0, A)
    log.add(0, 1, B)
    log.forget([(0, 0), (0, 1)])
    log.forget([])
    log.add(0, 0, C)
    assert reopen().read() == {(0, 0): C}


@pytest.mark.parametrize("kept", range(1, 70))
def test_a_torn_last_line_costs_its_piece_only(reopen, folder, kept):
    log = reopen()
    log.add(0, 0, A)
    log.add(0, 1, B)
    path = folder.path / ".pieces"
    text = path.read_bytes()
    whole = len(text) // 2
    path.write_bytes(text[: whole + kept])
    log = reopen()
    torn = {(0, 0): A} if kept < whole - 1 else {(0, 0): A, (0, 1): B}
    assert log.read() == torn
    log.add(0, 2, C)
    assert reopen().read() == torn | {(0, 2): C}


def test_nonsense_is_passed_over(reopen, folder):
    (folder.path / ".pieces").write_bytes(
        b"\x00\xff\n0 0\n-1 0 " + A.encode() + b"\n0 0 " + A.encode() + b" 7\n0 1 " + A[:-1].encode() + b"\n0 2 "
        + B.encode() + b"\n99999999999 0 " + A.encode() + b"\n\n\n0 3 " + C.upper().encode() + b"\n"
    )  # fmt: skip
    assert reopen().read() == {(0, 2): B}


def test_half_a_line_on_a_full_disk_does_not_spoil_the_next(folder):
    code = f"""
import resource, sys, pathlib
from llmgw.host.weights.disk.beneath import open_folder
from llmgw.host.weights.disk.piece_log import PieceLog
log = PieceLog(open_folder(pathlib.Path(sys.argv[1])))
log.add(0, 0, {A!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    log.add(0, 1, {B!r})
except OSError as error:
    print(error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.add(0, 2, {C!r})
"""
    run = subprocess.run([sys.executable, "-c", code, folder.path], capture_output=True, text=True, check=True)
    assert run.stdout == "27\n"
    log = PieceLog(folder)
    assert log.read() == {(0, 0): A, (0, 2): C}
    log.close()
    log.close()
