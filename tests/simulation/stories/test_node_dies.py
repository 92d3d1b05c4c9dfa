"""A node dies that a model serves on, and its model has to be driven elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.faults import Cordon, NodeCrash, RemoveNode, Storm
from simulator.stage import Stage


def test_a_replica_is_placed_anew_after_its_node_has_died(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        first = world.engines("single")
        assert len(first) == 2
        dead = first[0].node
        world.strike(NodeCrash(at=world.now, node=dead, seconds=3600.0))
        world.strike(Storm(at=world.now, model="single", requests=40, seconds=200.0))

        yield 200.0
        engines = world.engines("single")
        assert len(engines) == 2
        assert all(engine.ready and engine.node != dead for engine in engines)
        assert len(world.ready("single")) == 2

        # All of them had an end, and most an answer: the other replica was there all the time, if on another node.
        # (some streams take a quarter of an hour)
        yield 1020.0
        assert sum(world.ends().values()) == 40

    tell(story, "single")


def test_a_dead_node_that_is_removed_and_returns_begins_with_nothing(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        (old,) = world.engines("couple")
        world.strike(NodeCrash(at=world.now, node=old.node, seconds=600.0))
        yield 200.0
        world.strike(RemoveNode(at=world.now, node=old.node))
        yield 1.0
        assert old.node not in world.books().hosts
        yield 500.0
        host = world.books().hosts[old.node]
        assert dict(host.booked) == {}
        (new,) = world.engines("couple")
        assert new.node != old.node

    tell(story, "couple")


def test_a_cordoned_node_keeps_its_replica_and_gets_no_other(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        (engine,) = world.engines("couple")
        world.strike(Cordon(at=world.now, node=engine.node))
        yield 60.0
        assert world.engines("couple") == [engine]
        assert len(world.ready("couple")) == 1
        world.strike(NodeCrash(at=world.now, node=engine.node, seconds=10.0))
        yield 200.0
        (moved,) = world.engines("couple")
        assert moved.node != engine.node

    tell(story, "couple")


def test_a_node_that_reboots_does_not_begin_an_epoch_that_has_ended(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        for away_seconds in (3.0, 10.0, 20.0, 25.0, 30.0, 40.0):
            yield 150.0
            (engine,) = world.engines("couple")
            world.strike(NodeCrash(at=world.now, node=engine.node, seconds=away_seconds))
            yield away_seconds - 0.5
            for _ in range(600):
                yield 0.005
                assert engine.spec.epoch not in [each.spec.epoch for each in world.engines("couple")]

    tell(story, "couple")
