"""Somebody else's program holds the memory of a card."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.faults import AddModel, ForeignMemory
from simulator.stage import Stage, was_said

SMALL = ("n05", "n06", "n07", "n08", "n09")


def test_a_card_that_somebody_else_fills_is_passed_over(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 20.0
        for node in SMALL:
            for gpu in range(2):
                world.strike(ForeignMemory(at=world.now, node=node, gpu=gpu, gb=36.0, seconds=36000.0))
        yield 30.0
        world.strike(AddModel(at=world.now, model="couple"))
        yield 120.0
        (engine,) = world.engines("couple")
        assert engine.ready
        assert engine.gpus == (f"GPU-{engine.node}-2", f"GPU-{engine.node}-3")

    tell(story, "plain")


def test_who_fills_every_card_is_named_and_the_model_comes_up_when_he_is_gone(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 20.0
        for node in SMALL:
            for gpu in range(4):
                world.strike(ForeignMemory(at=world.now, node=node, gpu=gpu, gb=36.0, seconds=600.0))
        yield 30.0
        world.strike(AddModel(at=world.now, model="couple"))
        yield 120.0
        assert world.engines("couple") == []
        assert was_said(world, "no node can run couple now")

        yield 600.0
        (engine,) = world.engines("couple")
        assert engine.ready

    tell(story, "plain")
