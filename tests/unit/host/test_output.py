"""Standard output by its descriptor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from llmgw.host.output import write_out


def test_all_of_it_is_written_however_little_is_taken_at_once() -> None:
    read, write = os.pipe()
    text = "ü" * 200_000
    writer = threading.Thread(target=write_out, args=(text,), kwargs={"fd": write})
    writer.start()
    got = b""
    while len(got) < 400_000:
        got += os.read(read, 65536)
    writer.join(60)
    os.close(read)
    os.close(write)
    assert got.decode() == text


def test_nobody_who_reads_is_an_error() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        with pytest.raises(BrokenPipeError):
            write_out("x", fd=write)
    finally:
        os.close(write)


def test_a_pipe_that_does_not_wait_is_waited_for() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    writer = threading.Thread(target=write_out, args=("x" * 1_000_000,), kwargs={"fd": write})
    writer.start()
    got = 0
    while got < 1_000_000:
        got += len(os.read(read, 65536))
    writer.join(60)
    os.close(read)
    os.close(write)


def run(program: str, redirected: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-c", program]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


STREAMS = """
import os, sys
from llmgw.host.output import open_standard
open_standard()
sys.stdin.read(0), sys.stdout.flush(), sys.stderr.flush()
null = os.stat(os.devnull).st_rdev
closed = [fd for fd in range(3) if os.fstat(fd).st_rdev == null]
assert all(os.get_inheritable(fd) for fd in range(3))
sys.exit(sum(1 << fd for fd in closed))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirected", "closed"), [("<&-", 1), ("</dev/zero >&-", 2), ("</dev/zero 2>&-", 4), ("<&- >&- 2>&-", 7)]
)
def test_what_came_closed_is_open_and_goes_nowhere(redirected: str, closed: int) -> None:
    done = run(STREAMS, redirected)
    assert (done.returncode, done.stdout, done.stderr) == (closed, "", "")


@pytest.mark.slow
def test_a_full_disk_behind_stderr_stops_no_word() -> None:
    done = run("from llmgw.host.output import say; say('x'); print('on')", "2>/dev/full")
    assert (done.returncode, done.stdout) == (0, "on\n")


@pytest.mark.slow
def test_what_stdout_could_not_take_is_not_tried_again() -> None:
    program = "from llmgw.host.output import give_up_stdout; print('x'); give_up_stdout()"
    done = run(program, ">/dev/full")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_stderr_that_nobody_reads_stops_no_word() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            try:
                os.write(write, b"x" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(write, True)
        program = "from llmgw.host.output import say; say('x'); print('on')"
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=write, text=True, timeout=60, check=False
        )
    finally:
        os.close(read)
        os.close(write)
    assert (done.returncode, done.stdout) == (0, "on\n")
