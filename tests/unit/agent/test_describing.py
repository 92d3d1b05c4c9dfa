"""What a person who waits for weights reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmgw.agent.describing import describe_fetch
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
        (FETCH, "fetching x.gguf: 42 % of 4.7GB, 310MB/s, 9s left"),
        (replace(FETCH, rate=None, left_seconds=None), "fetching x.gguf: 42 % of 4.7GB"),
        (replace(FETCH, stalled_seconds=40.2), "fetching x.gguf: 42 % of 4.7GB, stalled for 40s"),
        (
            replace(FETCH, done_bytes=4_700_000_000 - 1, left_seconds=0.0),
            "fetching x.gguf: 99 % of 4.7GB, 310MB/s, 0s left",
        ),
        (replace(FETCH, total_bytes=None, left_seconds=None), "fetching x.gguf: 2GB, 310MB/s"),
        (replace(FETCH, phase=Phase.VERIFYING), "verifying x.gguf"),
        (replace(FETCH, phase=Phase.RESOLVING), "asking what x.gguf is"),
        (replace(FETCH, phase=Phase.RESOLVING, stalled_seconds=90.0), "asking what x.gguf is, stalled for 1m30s"),
        (replace(FETCH, phase=Phase.VERIFYING, stalled_seconds=12.0), "verifying x.gguf, stalled for 12s"),
        (replace(FETCH, phase=Phase.QUEUED), "waits for another program on this folder that fetches x.gguf"),
        (
            replace(FETCH, phase=Phase.QUEUED, stalled_seconds=12.0),
            "waits for another program on this folder that fetches x.gguf, stalled for 12s",
        ),
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
