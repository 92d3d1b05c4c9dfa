from __future__ import annotations

from llmgw.core.model import ModelName
from llmgw.core.trace import Decision, Trace

M, OTHER = ModelName("m"), ModelName("o")


def test_the_last_decisions_are_kept_and_the_newest_comes_first() -> None:
    trace = Trace(kept=3)
    for number in range(5):
        trace.add(Decision(at=float(number), model=M, why="best", replica=f"rep-m-{number}"))
    assert [decision.at for decision in trace] == [4.0, 3.0, 2.0]


def test_the_same_refusal_over_and_over_is_one() -> None:
    trace = Trace()
    for at in (1.0, 2.0, 3.0):
        trace.add(Decision(at=at, model=M, why="2 no_gpu", reasons={"no_gpu": 2}))
    trace.add(Decision(at=4.0, model=M, why="1 no_gpu", reasons={"no_gpu": 1}))
    trace.add(Decision(at=5.0, model=OTHER, why="1 no_gpu", reasons={"no_gpu": 1}))
    assert [decision.at for decision in trace] == [5.0, 4.0, 3.0]
    # two that wait in turn
    for at in (6.0, 8.0):
        trace.add(Decision(at=at, model=M, why="1 no_gpu", reasons={"no_gpu": 1}))
        trace.add(Decision(at=at + 1.0, model=OTHER, why="1 no_gpu", reasons={"no_gpu": 1}))
    assert [decision.at for decision in trace] == [9.0, 8.0, 3.0]


def test_two_that_were_placed_alike_are_two() -> None:
    trace = Trace()
    for _ in range(2):
        trace.add(Decision(at=1.0, model=M, why="best", replica="rep-m-1"))
    assert len(trace.of(M)) == 2
    assert trace.of(OTHER) == ()
