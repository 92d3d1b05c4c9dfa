"""A module as a program that does not outlive this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from llmgw.standalone.child import Child

pytestmark = pytest.mark.slow

MODULE = """
import subprocess, sys, time
if sys.argv[1] == "sleep":
    # one that its parent does not wait for
    below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(below.pid, flush=True)
    time.sleep(600)
print(*sys.argv[1:], flush=True)
sys.exit(3)
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "some_module.py").write_text(MODULE)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.fixture
def out(tmp_path: Path) -> Iterator[BinaryIO]:
    with (tmp_path / "out").open("wb") as out:
        yield out


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"{pid} lives"
        time.sleep(0.01)


def read_pid(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not path.read_text().strip():
        assert time.monotonic() < deadline, "it did not start"
        time.sleep(0.01)
    return int(path.read_text())


def test_it_runs_with_its_words_and_tells_its_end(environ: dict[str, str], out: BinaryIO, tmp_path: Path) -> None:
    with Child("some_module", "a", "b", environ=environ, out=out, kept=out.fileno()) as child:
        assert child.wait(60)
    assert child.code == 3
    assert (tmp_path / "out").read_text() == "a b\n"


def test_leaving_it_ends_all_that_it_started(environ: dict[str, str], out: BinaryIO, tmp_path: Path) -> None:
    with Child("some_module", "sleep", environ=environ, out=out, kept=out.fileno()) as child:
        below = read_pid(tmp_path / "out")
        assert not child.wait(0)
    assert child.ended
    wait_until_gone(below)


STARTER = """
import os, sys, time
from llmgw.standalone.child import Child
with open(sys.argv[1], "wb") as out, Child("some_module", "sleep", environ=os.environ, out=out, kept=out.fileno()):
    time.sleep(600)
"""


def test_a_kill_of_the_one_above_ends_it_too(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path / "out")], env=environ) as above:
        below = read_pid(tmp_path / "out")
        above.send_signal(signal.SIGKILL)
    wait_until_gone(below)


def test_a_program_that_can_not_be_run_is_an_error(
    environ: dict[str, str], out: BinaryIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        Child("some_module", environ=environ, out=out, kept=out.fileno())
    assert len(os.listdir("/proc/self/fd")) == before
