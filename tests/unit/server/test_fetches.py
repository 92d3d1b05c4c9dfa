"""What is announced and counted of fetches, as the words of a node come one after another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from llmgw.core.effects import Announce
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.weights import Cached, Fetch, NodeWeights, Phase, SetAside
from llmgw.counters import Counters
from llmgw.server.fetches import Fetches

N1 = NodeId("n1")
SOURCE = "hf:org/repo/a.gguf"
FETCHING = Fetch(source=SOURCE, phase=Phase.FETCHING, commit="c1", total_bytes=2_000_000_000)


@dataclass
class Bench:
    said: list[Announce] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.fetches = Fetches(
            self.said.append,
            lambda source: ModelName("m") if source == SOURCE else None,
            counters=self.counters,
            clock=lambda: self.now,
        )

    def tell(self, *fetches: Fetch) -> list[str]:
        """What is announced when the node says this."""
        self.said.clear()
        self.fetches.take(N1, NodeWeights(fetches=fetches))
        return [each.text for each in self.said]

    def counted(self, name: str) -> dict[tuple[str, ...], float]:
        return self.counters.by_name[name].values


@pytest.fixture
def bench() -> Bench:
    """A node that has said that it fetches nothing."""
    made = Bench()
    made.tell()
    return made


def moved(**facts: Any) -> Fetch:
    return replace(FETCHING, **facts)


def test_a_fetch_is_told_when_it_begins_and_when_it_ends(bench: Bench) -> None:
    assert bench.tell(moved(phase=Phase.RESOLVING, total_bytes=None)) == []
    assert bench.tell(FETCHING) == ["n1 fetches hf:org/repo/a.gguf, 2GB"]
    assert bench.tell(moved(done_bytes=1_000_000_000, origin_bytes=400_000_000, peer_bytes=600_000_000)) == []
    bench.now += 65.2
    end = moved(phase=Phase.READY, done_bytes=2_000_000_000, origin_bytes=500_000_000, peer_bytes=1_500_000_000)
    assert bench.tell(end) == [
        "n1 has hf:org/repo/a.gguf, 2GB: it took 1m5s, 500MB from its origin and 1.5GB from other nodes"
    ]
    (said,) = bench.said
    assert (said.what, said.model, said.node, said.warning) == ("fetched", "m", "n1", False)
    assert bench.tell(end) == bench.tell() == []
    assert bench.counted("llmgw_weights_fetches_total") == {("fetched",): 1}
    assert bench.counted("llmgw_weights_fetched_bytes_total") == {
        ("n1", "origin"): 500_000_000,
        ("n1", "nodes"): 1_500_000_000,
    }


def test_what_was_there_before_is_told_as_such(bench: Bench) -> None:
    assert bench.tell(moved(done_bytes=1_500_000_000)) == [
        "n1 fetches hf:org/repo/a.gguf, 2GB, of which 1.5GB are there already"
    ]


def test_what_is_only_proven_is_no_news(bench: Bench) -> None:
    proven = moved(phase=Phase.VERIFYING, done_bytes=1_000_000_000)
    assert bench.tell(proven) == []
    assert bench.tell(replace(proven, phase=Phase.READY, done_bytes=2_000_000_000)) == []
    assert bench.counted("llmgw_weights_fetches_total") == {("unchanged",): 1}
    assert bench.tell(proven) == []
    assert bench.tell(moved(done_bytes=1_000_000_000)) == [
        "n1 fetches hf:org/repo/a.gguf, 2GB, of which 1GB are there already"
    ]
    assert bench.tell(moved(phase=Phase.VERIFYING, origin_bytes=1_000_000_000)) == []


def test_what_was_damaged_is_told_once_and_not_when_it_was_before_the_server_began(bench: Bench) -> None:
    first = SetAside(source=SOURCE, commit="c" * 40, fetched_at=1.0, why="a.gguf is missing")
    again = replace(first, fetched_at=2.0)
    told = []
    for node in (N1, NodeId("n2")):
        for found in ((first,), (first,), (first, again)):
            bench.said.clear()
            bench.fetches.take(node, NodeWeights(set_aside=found))
            told.append([(each.text, each.warning, each.model) for each in bench.said])
    text = "hf:org/repo/a.gguf (cccccccccccc) was damaged on its disk, and is fetched anew: a.gguf is missing"
    assert told == [
        *([(f"n1: {text}", True, "m")], [], [(f"n1: {text}", True, "m")]),
        *([], [], [(f"n2: {text}", True, "m")]),
    ]


def test_a_failure_is_told_with_its_remedy_and_once(bench: Bench) -> None:
    bench.tell(FETCHING)
    failed = moved(phase=Phase.FAILED, cause="the disk is full", remedy="free 3GB on /data")
    assert bench.tell(failed) == ["n1 can't fetch hf:org/repo/a.gguf: the disk is full"]
    assert (bench.said[0].warning, bench.said[0].what) == (True, "failed")
    assert bench.said[0].lines == ("what to do: free 3GB on /data",)
    assert bench.tell(failed) == []
    assert bench.tell(FETCHING) == ["n1 fetches hf:org/repo/a.gguf, 2GB"]
    assert bench.tell(failed) == ["n1 can't fetch hf:org/repo/a.gguf: the disk is full"]
    assert bench.counted("llmgw_weights_fetches_total") == {("failed",): 2}


def test_a_pause_of_a_minute_is_told_and_its_end(bench: Bench) -> None:
    bench.tell(FETCHING)
    assert bench.tell(moved(done_bytes=500_000_000, stalled_seconds=59.0)) == []
    assert bench.tell(moved(done_bytes=500_000_000, stalled_seconds=61.0)) == [
        "n1: nothing of hf:org/repo/a.gguf has come for 60 s, 500MB of 2GB are there"
    ]
    assert bench.said[0].warning
    assert bench.tell(moved(done_bytes=500_000_000, stalled_seconds=90.0)) == []
    assert bench.tell(moved(done_bytes=600_000_000)) == ["n1: hf:org/repo/a.gguf goes on, 600MB of 2GB are there"]


def test_a_pause_is_told_with_its_cause(bench: Bench) -> None:
    bench.tell(FETCHING)
    assert bench.tell(moved(stalled_seconds=61.0, cause="h answers 503", remedy="ask whose it is")) == [
        "n1: nothing of hf:org/repo/a.gguf has come for 60 s, 0B of 2GB are there: h answers 503"
    ]
    assert bench.said[0].lines == ("what to do: ask whose it is",)


def test_a_wait_for_a_program_that_hangs_is_told_once_and_its_end(bench: Bench) -> None:
    waits = Fetch(
        source=FETCHING.source, phase=Phase.QUEUED, cause="pid 7 on host a holds the lock", remedy="see to it"
    )
    bench.tell(waits)
    assert bench.tell(replace(waits, stalled_seconds=61.0)) == [
        "n1: nothing of hf:org/repo/a.gguf has come for 60 s, 0B are there: pid 7 on host a holds the lock"
    ]
    assert bench.said[0].lines == ("what to do: see to it",)
    assert bench.tell(replace(waits, stalled_seconds=90.0)) == []
    assert bench.tell(Fetch(source=FETCHING.source, phase=Phase.RESOLVING)) == [
        "n1: hf:org/repo/a.gguf goes on, 0B are there"
    ]


def test_a_failure_that_is_told_for_an_hour_is_told_once(bench: Bench) -> None:
    bench.tell(moved(pull=7))
    failed = moved(phase=Phase.FAILED, cause="no such file", pull=7)
    assert len(bench.tell(failed)) == 1
    assert bench.tell(failed) == []
    # (the server knows of the pull, and the node goes on to tell of the failure)
    assert bench.tell(failed) == []
    assert bench.counted("llmgw_weights_fetches_total") == {("failed",): 1}


def test_one_that_is_given_up_is_told(bench: Bench) -> None:
    bench.tell(FETCHING)
    assert bench.tell() == ["n1 no longer fetches hf:org/repo/a.gguf: what has come is kept for a later try"]
    assert bench.counted("llmgw_weights_fetches_total") == {("stopped",): 1}


def test_one_that_is_told_no_more_has_ended_where_all_of_it_is_there(bench: Bench) -> None:
    bench.tell(moved(done_bytes=1_900_000_000, origin_bytes=1_900_000_000))
    bench.now += 9.0
    bench.said.clear()
    cached = Cached(source=SOURCE, commit="c1", size_bytes=2_000_000_000, fetched_at=1.0)
    bench.fetches.take(N1, NodeWeights(cached=(cached,)))
    assert [each.text for each in bench.said] == ["n1 has hf:org/repo/a.gguf, 2GB: it took 9s"]
    assert bench.counted("llmgw_weights_fetches_total") == {("fetched",): 1}


def test_one_that_ends_as_another_commit_than_it_began_has_ended_all_the_same(bench: Bench) -> None:
    old = Cached(source=SOURCE, commit="c0", size_bytes=5, fetched_at=1.0)
    bench.fetches.take(N1, NodeWeights(cached=(old,), fetches=(moved(),)))
    bench.said.clear()
    new = replace(old, commit="c2", size_bytes=2_000_000_000, fetched_at=2.0)
    bench.fetches.take(N1, NodeWeights(cached=(old, new)))
    assert [each.text for each in bench.said] == ["n1 has hf:org/repo/a.gguf, 2GB: it took 0s"]
    bench.fetches.take(N1, NodeWeights(cached=(old, new), fetches=(moved(),)))
    bench.said.clear()
    bench.fetches.take(N1, NodeWeights(cached=(old, new)))
    assert [each.text[:20] for each in bench.said] == ["n1 no longer fetches"]


def test_of_several_of_one_source_the_one_that_goes_on_counts(bench: Bench) -> None:
    ended = moved(phase=Phase.READY, origin_bytes=5, pull=7)
    assert len(bench.tell(moved(phase=Phase.RESOLVING), ended)) == 0
    assert bench.tell(moved(), ended) == ["n1 fetches hf:org/repo/a.gguf, 2GB"]


def test_one_end_of_two_orders_is_one(bench: Bench) -> None:
    assert len(bench.tell(moved(phase=Phase.READY, origin_bytes=5, pull=7))) == 1
    assert bench.tell(moved(phase=Phase.READY, origin_bytes=5, pull=8)) == []


def test_a_node_that_has_the_newest_already_is_no_news(bench: Bench) -> None:
    bench.tell(moved(phase=Phase.RESOLVING, pull=7))
    assert bench.tell(moved(phase=Phase.READY, pull=7)) == []
    assert bench.counted("llmgw_weights_fetches_total") == {("unchanged",): 1}
    assert bench.tell(moved(phase=Phase.READY, pull=8)) == []
    assert bench.counted("llmgw_weights_fetches_total") == {("unchanged",): 2}


@pytest.mark.parametrize("end", [Phase.READY, Phase.FAILED])
def test_what_had_ended_before_the_server_began_is_no_news(end: Phase) -> None:
    bench = Bench()
    ended = moved(phase=end, origin_bytes=9)
    assert bench.tell(ended) == bench.tell(ended) == []
    assert bench.counted("llmgw_weights_fetches_total") == {}


def test_bytes_that_came_before_the_server_began_are_not_counted() -> None:
    bench = Bench()
    assert bench.tell(moved(origin_bytes=1_000)) == ["n1 fetches hf:org/repo/a.gguf, 2GB"]
    bench.tell(moved(origin_bytes=1_500))
    assert bench.counted("llmgw_weights_fetched_bytes_total") == {("n1", "origin"): 500}


def test_what_begins_anew_counts_anew(bench: Bench) -> None:
    bench.tell(moved(origin_bytes=1_000))
    bench.tell(moved(phase=Phase.FAILED, origin_bytes=1_200, cause="reset"))
    bench.tell(moved(origin_bytes=1_500))
    assert bench.counted("llmgw_weights_fetched_bytes_total") == {("n1", "origin"): 2_700}


def test_a_node_that_was_removed_begins_anew(bench: Bench) -> None:
    bench.fetches.forget(N1)
    assert bench.tell(moved(phase=Phase.READY, origin_bytes=9)) == []


def test_what_opens_an_address_is_not_told(bench: Bench) -> None:
    (text,) = bench.tell(moved(source="https://h/a.gguf?token=secret"))
    assert text == "n1 fetches https://h/a.gguf, 2GB"
    assert bench.said[0].model is None
