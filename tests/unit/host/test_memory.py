"""What processes hold, of this machine's and from a folder that looks like /proc."""

from __future__ import annotations

import os

from llmgw.host.memory import read_held_gb


def test_what_processes_hold_is_added_up_without_what_is_mapped_of_files(tmp_path):
    for pid, anon, shared in ((1, 1_000_000, 0), (2, 500_000, 250_000)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(
            f"Name:\tengine\nRssAnon:\t{anon} kB\nRssFile:\t99999 kB\nRssShmem:\t{shared} kB\nThreads:\t1\n"
        )
    assert read_held_gb([1, 2, 3], tmp_path) == 1.792


def test_a_kernel_thread_and_a_process_that_has_ended_hold_nothing(tmp_path):
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "status").write_text("Name:\tkthreadd\n")
    assert read_held_gb([2, 3], tmp_path) == 0


def test_this_process_holds_some():
    assert 0.001 < read_held_gb([os.getpid()]) < 1000
