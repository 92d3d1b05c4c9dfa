"""What is told of a shard, and what is not told twice."""

from __future__ import annotations

import pytest

from llmgw.agent.telling import WORDS_CHARS, Telling, first_report
from llmgw.core.replica import Endpoint, Load, Measured, ShardState
from llmgw.core.weights import Fetch, Phase

ENDPOINT = Endpoint(host="127.0.0.1", port=1, served_name="m")


@pytest.fixture
def said():
    return []


@pytest.fixture
def telling(make_spec, said):
    return Telling(first_report(make_spec(epoch=4)), said.append)


def test_the_same_is_not_told_twice(telling, said):
    telling.state(ShardState.LOADING)
    telling.state(ShardState.LOADING)
    telling.progress("half")
    telling.progress("half")
    telling.load(Load())
    assert [(report.state, report.progress) for report in said] == [("loading", None), ("loading", "half")]
    assert {report.epoch for report in said} == {4}


def test_what_a_launch_has_shown_is_told_and_stays_with_it(telling, said):
    telling.measured(Measured(load_seconds=3.0))
    telling.measured(Measured(load_seconds=3.0))
    telling.state(ShardState.READY)
    assert [report.measured for report in said] == [Measured(load_seconds=3.0)] * 2


def test_a_step_forgets_what_was_said_of_the_one_before(telling, said):
    telling.progress("half")
    telling.load(Load(running=2, cache_used=0.5, steps=7))
    assert said[-1].load == Load(running=2, cache_used=0.5, steps=7)
    telling.state(ShardState.READY)
    assert (said[-1].progress, said[-1].load) == (None, Load())


def test_weights_that_it_waits_for_are_told_with_words_for_a_person(telling, said):
    fetch = Fetch(source="hf:org/repo/x.gguf", phase=Phase.VERIFYING)
    telling.fetch(fetch)
    telling.fetch(fetch)
    telling.fetch(None)
    telling.fetch(fetch)
    telling.state(ShardState.LOADING)
    assert [(report.fetch, report.progress) for report in said] == [
        (fetch, "verifying x.gguf"),
        (None, None),
        (fetch, "verifying x.gguf"),
        (None, None),
    ]


def test_a_cause_brings_its_remedy_and_neither_is_told_at_length(telling, said):
    telling.state(ShardState.ENDED, cause="no memory", remedy="r" * 10 * WORDS_CHARS)
    assert said[-1].cause == "no memory"
    assert said[-1].remedy == "r" * WORDS_CHARS + "…"


def test_a_shard_that_serves_nobody_has_no_endpoint(telling, said):
    telling.process(7, None)
    assert (said[-1].pid, said[-1].endpoint) == (7, None)


def test_an_endpoint_holds_until_the_shard_stops(telling, said):
    telling.process(7, ENDPOINT)
    telling.state(ShardState.READY)
    assert (said[-1].pid, said[-1].endpoint) == (7, ENDPOINT)
    telling.state(ShardState.STOPPING)
    assert (said[-1].pid, said[-1].endpoint) == (7, None)


def test_what_is_hidden_is_in_nothing_that_is_told(make_spec, said):
    telling = Telling(first_report(make_spec()), said.append, lambda text: text.replace("sekret", "***"))
    telling.progress("sekret 1")
    # Hidden before it is cut.
    text = "x" * (WORDS_CHARS - 3) + "sekret"
    telling.state(ShardState.ENDED, cause=text, remedy="no sekret", lines=("a sekret", "b"))
    assert said[0].progress == "*** 1"
    assert (said[1].cause, said[1].remedy, said[1].lines) == (text.replace("sekret", "***"), "no ***", ("a ***", "b"))
