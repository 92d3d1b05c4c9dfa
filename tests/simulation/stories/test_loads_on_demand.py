"""Models that load when somebody asks, and make way for one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.faults import BadEngines, Mood, Storm, Turns
from simulator.stage import Stage, was_said

LARGE = ("n00", "n01", "n02", "n03", "n04")


def count_said(world: Stage, *words: str) -> int:
    return sum(all(word in line for word in words) for line in world.lines)


def test_the_idle_timer_does_not_end_a_load_in_progress(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        for node in LARGE:
            world.strike(BadEngines(at=world.now, node=node, seconds=36000.0, mood=Mood.SLOW))
        yield 30.0
        world.strike(Storm(at=world.now, model="brief", requests=1, seconds=0.1))

        # It loads for longer than it may be idle, and whoever asked was told to come back.
        yield 400.0
        assert was_said(world, "rep-brief-1 is ready")
        assert count_said(world, "rep-brief-1 goes to") == 1

    tell(story, "brief")


def test_a_request_that_comes_as_its_model_is_unloaded_is_served_or_told_to_come_back(
    tell: Callable[..., None],
) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 30.0
        for number in range(60):
            world.strike(Storm(at=world.now, model="brief", requests=1, seconds=0.01, returns=5))
            yield 61.0 + 0.3 * number
        yield 100.0
        assert set(world.ends()) <= {"answered", "model_loading"}
        assert world.ends()["answered"] >= 50
        assert was_said(world, "rep-brief-1", "nobody has asked for it for 1m")

    tell(story, "brief")


def test_a_crowd_at_a_model_at_zero_loads_no_more_than_may_be(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 30.0
        world.strike(Storm(at=world.now, model="lazy", requests=200, seconds=1.0, returns=20))
        for _ in range(150):
            yield 1.0
            assert len(world.engines("lazy")) <= 2
        assert len(world.ready("lazy")) == 2

    tell(story, "lazy")


def test_less_load_stops_a_replica_after_its_last_stream(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        world.strike(Storm(at=world.now, model="single", requests=600, seconds=200.0))
        yield 200.0
        assert len(world.engines("single")) > 2
        yield 1500.0
        assert len(world.engines("single")) == 2
        assert world.ends().keys() == {"answered"}

    tell(story, "single")


def test_a_load_that_nobody_waits_for_any_more_makes_way(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        world.strike(BadEngines(at=world.now, node="n11", seconds=36000.0, mood=Mood.SLOW))
        yield 30.0
        world.strike(Storm(at=world.now, model="turn-a", requests=1, seconds=0.1, patience=5.0))
        yield 10.0
        (engine,) = world.engines()
        assert engine.spec.model.name == "turn-a"
        world.strike(Storm(at=world.now, model="turn-b", requests=1, seconds=0.1, returns=50))
        yield 20.0
        (engine,) = world.engines()
        assert engine.spec.model.name == "turn-b"
        yield 500.0
        assert world.ends()["answered"] == 1

    tell(story, "turn-a", "turn-b")


def test_two_models_on_room_for_one_take_long_turns(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 30.0
        world.strike(Turns(at=world.now, models=("turn-a", "turn-b"), seconds=3600.0))
        yield 3600.0
        swaps = count_said(world, "makes way for turn-")
        assert 4 <= swaps <= 3600 / 120 + 2
        assert world.ends()["answered"] > 100
        assert "error: the engine ended" not in world.ends()

    tell(story, "turn-a", "turn-b")
