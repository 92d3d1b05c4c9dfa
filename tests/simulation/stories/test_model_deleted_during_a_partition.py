"""Somebody deletes a model while the node that it runs on can't be reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.faults import Partition, RemoveModel
from simulator.stage import Stage


def test_the_engine_of_a_model_deleted_during_a_partition_ends_at_its_return(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 120.0
        (engine,) = world.engines("couple")
        world.strike(Partition(at=world.now, nodes=(engine.node,), seconds=300.0))
        yield 30.0
        world.strike(RemoveModel(at=world.now, model="couple"))

        # Nobody can tell it to end: what it holds is not given away.
        yield 200.0
        assert world.engines("couple") == [engine]
        assert set(world.books().hosts[engine.node].booked) == set(engine.gpus)

        yield 120.0
        assert world.engines() == []
        assert dict(world.books().hosts[engine.node].booked) == {}
        assert world.books().replicas == ()

    tell(story, "couple")
