"""A replica over several nodes: none of its engines is launched before all of them can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from simulator.faults import AgentCrash, BadEngines, EngineCrash, Mood, NodeCrash, ServerRestart
from simulator.stage import Stage, was_said


def test_a_slow_member_delays_a_group_and_does_not_make_it_loop(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        world.strike(BadEngines(at=world.now, node="n01", seconds=36000.0, mood=Mood.SLOW_TO_PREPARE))
        yield 190.0
        assert world.engines("wide") == []

        yield 400.0
        (replica,) = world.ready("wide")
        assert replica.epoch == 1
        assert len(world.engines("wide")) == 2

    # There are but these two on one fabric.
    tell(story, "wide", nodes=2)


@pytest.mark.parametrize("after_seconds", [0.02, 0.3, 1.0, 1.5, 2.0, 3.0, 10.0, 60.0])
def test_a_group_one_of_whose_agents_is_killed_at_its_start_comes_up(
    tell: Callable[..., None], after_seconds: float
) -> None:
    def story(world: Stage) -> Iterator[float]:
        while not was_said(world, "rep-wide-1 goes to"):
            yield 0.05
        yield after_seconds
        world.strike(AgentCrash(at=world.now, node="n01", seconds=1.0))
        if after_seconds > 1.0:
            world.strike(ServerRestart(at=world.now, seconds=0.5))
        yield 500.0
        assert len(world.ready("wide")) == 1
        assert [engine.ready for engine in world.engines("wide")] == [True, True]

    tell(story, "wide", nodes=2)


def test_a_group_whose_member_dies_while_it_prepares_begins_anew(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        world.strike(BadEngines(at=world.now, node="n01", seconds=100.0, mood=Mood.SLOW_TO_PREPARE))
        yield 120.0
        world.strike(NodeCrash(at=world.now, node="n01", seconds=30.0))
        yield 400.0
        assert [engine.ready for engine in world.engines("wide")] == [True, True]

    tell(story, "wide", nodes=2)


def test_an_engine_that_hangs_is_replaced(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        for node in ("n05", "n06", "n07", "n08", "n09"):
            world.strike(BadEngines(at=world.now, node=node, seconds=60.0, mood=Mood.HANGS_SERVING))
        yield 120.0
        (hung,) = world.engines("couple")
        # It hangs within a quarter of an hour, and is found out some minutes after.
        yield 1600.0
        (new,) = world.engines("couple")
        assert new.ready
        assert new.pid != hung.pid or new.node != hung.node
        assert was_said(world, "rep-couple-1 ended", "hung")
        world.strike(EngineCrash(at=world.now, node=new.node))
        yield 200.0
        assert len(world.ready("couple")) == 1

    tell(story, "couple")
