"""What a launch has shown, and when that is news."""

from __future__ import annotations

from llmgw.agent.peaks import Peaks
from llmgw.core.replica import Measured
from llmgw.host.usage import Usage


def usage(memory_gb, gpu_gb=None):
    return Usage(pids=frozenset({1}), memory_gb=memory_gb, gpu_gb=gpu_gb)


def test_what_was_held_at_most_is_told_with_the_time_it_took():
    peaks = Peaks(100.0, "1.0")
    for memory_gb, gpu_gb in ((40.0, None), (8.0, 60.0), (9.0, 50.0)):
        peaks.note(usage(memory_gb, gpu_gb))
    peaks.note_ready(342.04)
    assert peaks.find_news() == Measured(load_seconds=242.0, gpu_gb=60.0, memory_gb=40.0, version="1.0")
    assert peaks.find_news() is None


def test_what_has_grown_is_told_and_what_breathes_is_not():
    peaks = Peaks(0.0)
    peaks.note(usage(1.0, 50.0))
    assert peaks.find_news() == Measured(gpu_gb=50.0, memory_gb=1.0)
    peaks.note(usage(1.09, 50.9))
    assert peaks.find_news() is None
    peaks.note(usage(1.2, 50.9))
    assert peaks.find_news() == Measured(gpu_gb=50.9, memory_gb=1.2)
    peaks.note(usage(1.2, 52.0))
    assert peaks.find_news() == Measured(gpu_gb=52.0, memory_gb=1.2)


def test_what_is_seen_late_is_news():
    peaks = Peaks(0.0)
    peaks.note(usage(1.0))
    assert peaks.find_news() == Measured(memory_gb=1.0)
    peaks.note(usage(1.0, 0.05))
    assert peaks.find_news() == Measured(memory_gb=1.0, gpu_gb=0.05)


def test_one_that_has_ended_holds_nothing_and_is_not_counted():
    peaks = Peaks(0.0)
    peaks.note(Usage())
    assert peaks.find_news() == Measured()


def test_nothing_is_told_of_a_launch_that_was_not_seen():
    peaks = Peaks(None)
    peaks.note(usage(50.0, 50.0))
    peaks.note_ready(10.0)
    assert peaks.find_news() is None
