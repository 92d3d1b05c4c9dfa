"""Engines that never come up, don't heed TERM, or can't be launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.faults import BadEngines, ClockSkew, DiskFull, Mood, RemoveModel
from simulator.stage import Stage, was_said

SMALL = ("n05", "n06", "n07", "n08", "n09")


def test_an_engine_that_is_never_ready_ends_with_its_cause_and_is_tried_elsewhere(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        # (whichever of them registers first gets it; the last one is well a little later)
        for node in SMALL:
            seconds = 60.0 if node == SMALL[4] else 36000.0
            world.strike(BadEngines(at=world.now, node=node, seconds=seconds, mood=Mood.NEVER_READY))
        yield 120.0
        (first,) = world.engines("couple")
        assert world.ready("couple") == ()

        yield first.spec.profile.startup_timeout_seconds
        assert was_said(world, first.spec.replica, "not ready within startup_timeout")
        assert not any(engine.pid == first.pid for engine in world.engines("couple") if engine.node == first.node)

        # Each try takes as long, twice on each of the others at most; the last of them is well by then.
        yield 10 * first.spec.profile.startup_timeout_seconds
        (last,) = world.engines("couple")
        assert last.ready
        assert last.node == SMALL[4]

    tell(story, "couple")


def test_an_engine_that_is_deaf_to_term_is_killed_and_booked_until_then(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        for node in SMALL:
            world.strike(BadEngines(at=world.now, node=node, seconds=36000.0, mood=Mood.DEAF))
        yield 120.0
        (engine,) = world.engines("couple")
        world.strike(RemoveModel(at=world.now, model="couple"))

        yield 0.7
        assert [each.pid for each in world.engines("couple")] == [engine.pid]
        assert set(world.books().hosts[engine.node].booked) == set(engine.gpus)

        yield 60.0
        assert world.engines("couple") == []
        assert dict(world.books().hosts[engine.node].booked) == {}

    tell(story, "couple")


def test_a_full_disk_is_told_as_the_cause_and_the_model_goes_elsewhere(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        for node in SMALL:
            world.strike(DiskFull(at=world.now, node=node, seconds=100.0 if node == SMALL[4] else 36000.0))
        yield 600.0
        (engine,) = world.engines("couple")
        assert engine.ready
        assert engine.node == SMALL[4]
        assert was_said(world, "rep-couple-1 ended", "space left on device")

    tell(story, "couple")


def test_a_clock_that_is_wrong_by_a_day_harms_nothing(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        for node in SMALL:
            world.strike(ClockSkew(at=world.now, node=node, skew=-86400.0))
        yield 150.0
        assert len(world.ready("couple")) == 1

    tell(story, "couple")
