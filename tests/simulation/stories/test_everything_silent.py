"""So many nodes are lost at once that it is rather the server that is cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.faults import NodeCrash, Partition
from simulator.stage import Stage, was_said

MODELS = ("plain", "single", "couple", "pair", "wide", "either")


def test_ten_minutes_without_a_heartbeat_of_anybody_stop_nothing(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 300.0
        before = world.engines()
        assert all(engine.ready for engine in before)
        nodes = tuple(world.books().hosts)
        world.strike(Partition(at=world.now, nodes=nodes, seconds=600.0))

        yield 300.0
        assert was_said(world, "the brake holds")
        assert world.engines() == before

        yield 330.0
        assert world.engines() == before
        assert sum(len(world.ready(model)) for model in MODELS) == len({engine.spec.replica for engine in before})

    tell(story, *MODELS)


def test_half_of_a_fleet_that_stays_away_is_replaced_once_the_brake_has_passed(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 200.0
        (old,) = world.engines("couple")
        gone = {old.node, *sorted(set(world.books().hosts) - {old.node, "n05", "n06"})[:6]}
        for node in sorted(gone):
            world.strike(NodeCrash(at=world.now, node=node, seconds=3600.0))

        yield 500.0
        assert world.engines("couple") == []

        yield 300.0
        (new,) = world.engines("couple")
        assert new.ready
        assert (new.spec.replica, new.spec.epoch) == (old.spec.replica, old.spec.epoch + 1)

    tell(story, "couple")
