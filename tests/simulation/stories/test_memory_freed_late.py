"""An engine is gone, and its card's memory is not free yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.faults import AddModel, BadEngines, EditModel, Mood
from simulator.stage import Stage, was_said

SMALL = ("n05", "n06", "n07", "n08", "n09")


def test_no_engine_is_launched_into_memory_that_another_has_not_given_back(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        for node in SMALL:
            world.strike(BadEngines(at=world.now, node=node, seconds=36000.0, mood=Mood.FREES_LATE))
        yield 150.0
        for _ in range(5):
            # Another definition: the engine has to begin anew.
            world.strike(AddModel(at=world.now, model="couple"))
            yield 0.1
            world.strike(EditModel(at=world.now, model="couple", min=2, max=2, restart=True))
            yield 200.0
            assert [engine.ready for engine in world.engines("couple")] == [True, True]
        assert not was_said(world, "out of memory")

    tell(story, "couple")


def test_a_card_that_keeps_its_memory_is_passed_over_until_it_gives_it_back(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        for node in SMALL:
            world.strike(BadEngines(at=world.now, node=node, seconds=36000.0, mood=Mood.FREES_NEVER))
        yield 150.0
        (old,) = world.engines("couple")
        world.strike(EditModel(at=world.now, model="couple", min=1, max=1, restart=True))
        yield 250.0
        (new,) = world.engines("couple")
        assert new.ready
        assert not set(old.gpus) & set(new.gpus)

    tell(story, "couple")
