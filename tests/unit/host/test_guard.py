"""What is started here ends with this program, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from llmgw.host.guard import end_marked, ended_with_us
from llmgw.host.process import MARKER, find_marked

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 60
# Starts a program in a session of its own, as a probe is started, and hangs.
STARTER = """
import os, subprocess, sys, time
from llmgw.host.guard import ended_with_us
with ended_with_us(sys.argv[1]):
    subprocess.Popen(["sleep", "600"], env={**os.environ, "LLMGW_SHARD": sys.argv[1] + "1:0"}, start_new_session=True)
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def prefix(tmp_path):
    prefix = f"{tmp_path}-guard-"
    yield prefix
    end_marked(prefix)


def wait_until(is_so):
    until = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_program_ends_with_the_one_that_was_killed(prefix):
    with subprocess.Popen([sys.executable, "-c", STARTER, prefix], stdout=subprocess.PIPE) as starter:
        assert starter.stdout.readline() == b"up\n"
        assert len(find_marked(prefix)) == 1
        starter.send_signal(signal.SIGKILL)
    wait_until(lambda: not find_marked(prefix))


def test_what_runs_is_left_when_the_guard_goes(prefix):
    with subprocess.Popen(["sleep", "600"], env={**os.environ, MARKER: f"{prefix}1:0"}) as running:
        with ended_with_us(prefix):
            pass
        assert running.poll() is None
        running.kill()


def test_everything_that_is_marked_so_is_ended_and_nothing_else(prefix):
    ours = [subprocess.Popen(["sleep", "600"], env={**os.environ, MARKER: f"{prefix}{at}:0"}) for at in range(2)]
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, MARKER: f"other{prefix}"})
    try:
        end_marked(prefix)
        assert [each.wait(PATIENCE_SECONDS) for each in ours] == [-signal.SIGKILL] * 2
        assert other.poll() is None
    finally:
        for each in (*ours, other):
            each.kill()
            each.wait()
