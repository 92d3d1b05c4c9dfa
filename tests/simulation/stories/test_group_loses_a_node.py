"""A replica over two nodes loses one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.faults import EngineCrash, NodeCrash
from simulator.stage import Stage


def test_a_group_that_loses_a_node_ends_as_a_whole_and_begins_anew(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 200.0
        first = world.engines("wide")
        assert [engine.spec.rank for engine in first] == [0, 1]
        (replica,) = world.ready("wide")
        world.strike(NodeCrash(at=world.now, node=replica.nodes[1], seconds=900.0))

        # The rest of it answers nothing, and holds eight GPUs.
        yield 30.0
        assert world.ready("wide") == ()

        yield 270.0
        (anew,) = world.ready("wide")
        assert anew.epoch == replica.epoch + 1
        assert replica.nodes[1] not in anew.nodes
        assert {engine.node for engine in world.engines("wide")} == set(anew.nodes)
        assert all(engine.ready for engine in world.engines("wide"))

    tell(story, "wide")


def test_a_group_one_of_whose_engines_dies_ends_as_a_whole_and_begins_anew(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 200.0
        (replica,) = world.ready("wide")
        before = {engine.pid for engine in world.engines("wide") if engine.node == replica.nodes[0]}
        world.strike(EngineCrash(at=world.now, node=replica.nodes[1]))

        yield 5.0
        assert world.ready("wide") == ()

        yield 295.0
        (anew,) = world.ready("wide")
        assert anew.epoch == replica.epoch + 1
        assert len(world.engines("wide")) == 2
        assert not before & {engine.pid for engine in world.engines("wide") if engine.node == replica.nodes[0]}

    tell(story, "wide")
