"""What a person who waits for weights reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.agent.describing import describe_fetch, show_bytes, show_seconds
from llmgw.core.weights import Fetch, Phase

FETCH = Fetch(
    source="hf:org/repo/x.gguf@main",
    phase=Phase.FETCHING,
    done_bytes=1_999_999_999,
    total_bytes=4_700_000_000,
    rate=310e6,
    left_seconds=8.7,
)


@pytest.mark.parametrize(
    ("fetch", "words"),
    [
        (FETCH, "fetching x.gguf: 42 % of 4.7 GB, 310 MB/s, 9 s left"),
        (replace(FETCH, rate=None, left_seconds=None), "fetching x.gguf: 42 % of 4.7 GB"),
        (replace(FETCH, stalled_seconds=40.2), "fetching x.gguf: 42 % of 4.7 GB, stalled for 40 s"),
        (
            replace(FETCH, done_bytes=4_700_000_000 - 1, left_seconds=0.0),
            "fetching x.gguf: 99 % of 4.7 GB, 310 MB/s, 0 s left",
        ),
        (replace(FETCH, total_bytes=None, left_seconds=None), "fetching x.gguf: 2.0 GB, 310 MB/s"),
        (replace(FETCH, phase=Phase.VERIFYING), "verifying x.gguf"),
        (replace(FETCH, phase=Phase.RESOLVING), "asking what x.gguf is"),
        (replace(FETCH, phase=Phase.QUEUED), "waits for another program on this folder that fetches x.gguf"),
        (replace(FETCH, phase=Phase.READY), "x.gguf is here"),
        (replace(FETCH, phase=Phase.FAILED, cause="no such file"), "x.gguf can't be fetched: no such file"),
    ],
)
def test_each_phase_has_its_words(fetch, words):
    assert describe_fetch(fetch) == words


def test_nothing_that_opens_an_address_is_told():
    assert describe_fetch(replace(FETCH, source="https://host/x.gguf?token=sekret")).startswith("fetching x.gguf: ")


def test_all_is_said_only_once_it_is_here():
    assert "99 %" in describe_fetch(replace(FETCH, done_bytes=4_700_000_000))
    assert "99 %" in describe_fetch(replace(FETCH, done_bytes=0, total_bytes=0))


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0.0 MB"), (512_000, "0.5 MB"), (310e6, "310 MB"), (43.1e9, "43.1 GB"), (2.25e12, "2.2 TB")],
)
def test_bytes_are_read_at_a_glance(count, words):
    assert show_bytes(count) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (7260, "2 h 1 min")]
)
def test_seconds_are_read_at_a_glance(seconds, words):
    assert show_seconds(seconds) == words
