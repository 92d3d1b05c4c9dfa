"""What is told of a shard, and what is not told twice."""

from __future__ import annotations

import pytest

from llmgw.agent.telling import Telling, first_report
from llmgw.core.replica import Endpoint, ShardState
from llmgw.engines.types import Load

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


def test_a_step_forgets_what_was_said_of_the_one_before(telling, said):
    telling.progress("half")
    telling.load(Load(running=2, waiting=1))
    telling.state(ShardState.READY)
    assert (said[-1].progress, said[-1].running, said[-1].waiting) == (None, None, None)


def test_an_endpoint_holds_until_the_shard_stops(telling, said):
    telling.process(7, ENDPOINT)
    telling.state(ShardState.READY)
    assert (said[-1].pid, said[-1].endpoint) == (7, ENDPOINT)
    telling.state(ShardState.STOPPING)
    assert (said[-1].pid, said[-1].endpoint) == (7, None)
