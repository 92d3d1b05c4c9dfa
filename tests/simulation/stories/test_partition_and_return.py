"""A node can't be reached for a while, and its engines go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.faults import Partition
from simulator.stage import Stage, was_said


def test_a_node_that_returns_in_time_serves_on_with_the_same_engine(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 120.0
        (before,) = world.engines("couple")
        assert world.ready("couple")
        world.strike(Partition(at=world.now, nodes=(before.node,), seconds=50.0))

        yield 40.0
        assert was_said(world, before.spec.replica, "can't be reached")
        assert world.ready("couple") == ()

        yield 40.0
        assert world.engines("couple") == [before]
        assert [replica.epoch for replica in world.ready("couple")] == [before.spec.epoch]

    tell(story, "couple")


def test_a_node_that_returns_too_late_gives_its_engine_up(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 120.0
        (old,) = world.engines("couple")
        world.strike(Partition(at=world.now, nodes=(old.node,), seconds=400.0))

        # Both run; requests go to the new one alone, and the old one's GPUs stay booked.
        yield 250.0
        by_node = {engine.node: engine for engine in world.engines("couple")}
        assert by_node.pop(old.node) == old
        (new,) = by_node.values()
        assert new.ready
        assert new.spec.epoch == old.spec.epoch + 1
        assert [replica.nodes for replica in world.ready("couple")] == [(new.node,)]
        assert set(world.books().hosts[old.node].booked) == set(old.gpus)

        yield 250.0
        assert world.engines("couple") == [new]
        assert dict(world.books().hosts[old.node].booked) == {}

    tell(story, "couple")
