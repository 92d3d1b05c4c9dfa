from __future__ import annotations

from llmgw.core.node import NodeId
from llmgw.core.weights import Fetch, NodeWeights, Phase, Pull
from llmgw.server.pulls import KEPT, Pulls

N1, N2 = NodeId("n1"), NodeId("n2")
SOURCE = "hf:org/repo/a.gguf"


def says(phase: Phase, pull: int | None, *, source: str = SOURCE, cause: str | None = None) -> NodeWeights:
    return NodeWeights(fetches=(Fetch(source=source, phase=phase, pull=pull, cause=cause),))


def test_a_node_carries_it_out_until_it_says_how_it_went() -> None:
    pulls = Pulls()
    asked = pulls.add(5, SOURCE, [N1, N2])
    assert pulls.of(N1) == (Pull(number=5, source=SOURCE),)
    assert not pulls.take(N1, says(Phase.FETCHING, 5))
    assert pulls.take(N1, says(Phase.READY, 5))
    assert (pulls.of(N1), pulls.sources()) == ((), {SOURCE})
    assert pulls.take(N2, says(Phase.FAILED, 5, cause="no such file"))
    assert {node: fetch.phase for node, fetch in asked.ended.items()} == {N1: Phase.READY, N2: Phase.FAILED}
    assert pulls.sources() == frozenset()
    assert pulls.find(5) is asked


def test_what_ended_before_or_is_of_another_order_is_not_its_end() -> None:
    pulls = Pulls()
    pulls.add(5, SOURCE, [N1])
    assert not pulls.take(N1, says(Phase.READY, None))
    assert not pulls.take(N1, says(Phase.READY, 4))
    assert not pulls.take(N1, says(Phase.READY, 5, source="hf:org/repo/b.gguf"))
    assert not pulls.take(N2, says(Phase.READY, 5))
    assert pulls.of(N1)


def test_a_later_one_of_the_same_source_takes_its_place() -> None:
    pulls = Pulls()
    first, second = pulls.add(5, SOURCE, [N1]), pulls.add(6, SOURCE, [N1])
    assert pulls.of(N1) == (Pull(number=6, source=SOURCE),)
    assert pulls.take(N1, says(Phase.READY, 6))
    assert first.ended.keys() == second.ended.keys() == {N1}


def test_a_node_that_was_removed_never_will() -> None:
    pulls = Pulls()
    asked = pulls.add(5, SOURCE, [N1])
    pulls.forget(N1)
    assert (asked.ended[N1].phase, asked.ended[N1].cause) == (Phase.FAILED, "n1 was removed")
    assert pulls.of(N1) == ()


def test_of_those_that_are_over_the_last_are_kept() -> None:
    pulls = Pulls()
    lasting = pulls.add(1, "hf:org/repo/b.gguf", [N2])
    for number in range(2, KEPT + 4):
        pulls.add(number, SOURCE, [N1])
        pulls.take(N1, says(Phase.READY, number))
    pulls.add(1000, SOURCE, [N1])
    assert (pulls.find(2), pulls.find(1)) == (None, lasting)
    assert pulls.find(KEPT + 3) is not None
