"""What processes take of a machine, by this one's own and by made-up ones."""

from __future__ import annotations

import os
import time

import pytest

from llmgw.host.usage import TICKS_PER_SECOND, read_usage


def test_a_process_that_works_is_seen_to():
    before = read_usage({os.getpid()})
    began = time.process_time()
    while time.process_time() - began < 0.05:
        sum(range(1000))
    after = read_usage({os.getpid()})
    assert before.pids == {os.getpid()}
    assert before.memory_gb > 0
    assert after.cpu_seconds - before.cpu_seconds >= 0.03


def test_several_are_taken_together_and_one_that_is_gone_takes_nothing(tmp_path):
    for pid, name, user, system in ((5, "a (b) c", 300, 20), (6, "engine", 100, 80)):
        (tmp_path / str(pid)).mkdir()
        numbers = " ".join(map(str, range(4, 14)))
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {numbers} {user} {system} 0 0")
        (tmp_path / str(pid) / "status").write_text("RssAnon:\t 1000000 kB\n")
    usage = read_usage({5, 6, 7}, tmp_path)
    assert usage.cpu_seconds == pytest.approx(500 / TICKS_PER_SECOND)
    assert usage.memory_gb == pytest.approx(2.048)
    assert usage.gpu_gb is None
