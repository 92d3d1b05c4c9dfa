"""A node loses its power while an engine loads there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.faults import NodeCrash
from simulator.stage import Stage


def test_a_replica_whose_node_dies_while_it_loads_comes_up_elsewhere(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 10.0
        first, *others = world.engines("couple")
        assert not others
        assert not first.ready
        world.strike(NodeCrash(at=world.now, node=first.node, seconds=600.0))

        # Its lease runs, and then nothing is done for a while: it may be back.
        yield 60.0
        assert world.engines("couple") == []

        yield 120.0
        (second,) = world.engines("couple")
        assert second.ready
        assert second.node != first.node
        assert (second.spec.replica, second.spec.epoch) == (first.spec.replica, first.spec.epoch + 1)
        assert [replica.epoch for replica in world.ready("couple")] == [second.spec.epoch]

        # The node comes back with nothing on it, and what was booked there is free.
        yield 500.0
        assert dict(world.books().hosts[first.node].booked) == {}
        assert [engine.pid for engine in world.engines("couple")] == [second.pid]

    tell(story, "couple")
