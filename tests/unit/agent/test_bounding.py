"""Whatever a node has to tell of weights can be told."""

from __future__ import annotations

from dataclasses import replace

from llmgw.agent.bounding import MOST_CACHED, bound, bound_fetch
from llmgw.core.weights import Cached, Collected, Fetch, NodeWeights, Phase, SetAside
from llmgw.wire import PROTOCOL, WeightsWord, decode_from_agent, encode

LONG = "x" * 10_000


def a_cached(number, **facts):
    return Cached(source=f"hf:org/repo/{number}.gguf", commit="c", size_bytes=1, fetched_at=float(number), **facts)


def test_the_oddest_report_arrives():
    weights = NodeWeights(
        cached=(replace(a_cached(1), fetched_at=1e308), *(a_cached(number - 5, wrong=LONG) for number in range(3000))),
        fetches=tuple(
            Fetch(source=f"hf:org/repo/{number}.gguf", phase=Phase.FAILED, cause=LONG, remedy=LONG)
            for number in range(600)
        ),
        seen=tuple(f"/models/{number}/{LONG}" for number in range(1000)),
        collected=Collected(number=1, kept=(LONG,) * 2000),
        set_aside=tuple(
            SetAside(source="hf:org/repo/a.gguf", commit="c", fetched_at=at, why=LONG) for at in (-5.0, 1e308)
        ),
    )
    word = WeightsWord(weights=bound(weights))
    assert decode_from_agent(encode(word), PROTOCOL) == word
    assert word.weights.collected.kept[-1] == "and 1500 more"


def test_of_very_much_what_runs_and_what_is_newest_is_told():
    used = a_cached(0, in_use=True)
    weights = bound(NodeWeights(cached=(used, *(a_cached(number) for number in range(1, 2000)))))
    assert len(weights.cached) == MOST_CACHED
    assert used in weights.cached
    assert min(each.fetched_at for each in weights.cached[1:]) == 2000 - MOST_CACHED + 1


def test_what_is_ordinary_is_left_as_it_is():
    fetch = Fetch(source="s", phase=Phase.FETCHING)
    weights = NodeWeights(
        cached=(a_cached(1), a_cached(2, wrong="a.gguf is missing")),
        fetches=(fetch,),
        seen=("/m.gguf",),
        collected=Collected(number=1, kept=("a",)),
    )
    assert bound(weights) == weights
    assert bound_fetch(fetch) is fetch
    failed = Fetch(source="s", phase=Phase.FAILED, cause="no room", remedy="make room")
    assert bound_fetch(failed) == failed
