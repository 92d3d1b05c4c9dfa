"""A node is to be drained: where there is room elsewhere, and where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from simulator.faults import Cordon, DrainNode, EditModel, Flaw, Partition, ServerRestart, Storm
from simulator.stage import Stage, was_said


def test_what_runs_on_a_drained_node_is_replaced_first(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        (old,) = world.engines("couple")
        world.strike(Storm(at=world.now, model="couple", requests=60, seconds=300.0))
        world.strike(DrainNode(at=world.now, node=old.node))
        for _ in range(1200):
            yield 1.0
            assert len(world.ready("couple")) >= 1
        (new,) = world.engines("couple")
        assert new.ready
        assert new.node != old.node
        assert was_said(world, f"{old.node} is drained: nothing runs there")
        assert world.ends() == {"answered": 60}

    tell(story, "couple")


def test_a_drain_without_room_says_so_and_waits(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        before = world.engines("sole")
        world.strike(DrainNode(at=world.now, node="n07"))
        yield 900.0
        assert world.engines("sole") == before
        assert len(world.ready("sole")) == 1
        assert was_said(world, "rep-sole-1 stays until there is room for another")
        world.strike(Cordon(at=world.now, node="n07", cordoned=False))
        yield 100.0
        assert world.engines("sole") == before

    tell(story, "sole")


def test_at_its_deadline_a_drain_waits_no_longer(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        (engine,) = world.engines("sole")
        world.strike(DrainNode(at=world.now, node="n07", deadline=300.0))
        yield 200.0
        # The time goes on while there is no server.
        world.strike(ServerRestart(at=world.now, seconds=5.0))
        yield 95.0
        assert world.engines("sole") == [engine]
        yield 60.0
        assert world.engines("sole") == []
        world.strike(Cordon(at=world.now, node="n07", cordoned=False))
        yield 120.0
        assert len(world.ready("sole")) == 1

    tell(story, "sole")


def test_a_drain_of_a_lost_node_ends_with_its_return(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        (old,) = world.engines("couple")
        world.strike(Partition(at=world.now, nodes=(old.node,), seconds=400.0))
        yield 30.0
        world.strike(DrainNode(at=world.now, node=old.node))
        yield 300.0
        (replica,) = world.ready("couple")
        assert replica.nodes != (old.node,)

        yield 150.0
        assert [engine.node for engine in world.engines("couple")] == [*replica.nodes]
        assert dict(world.books().hosts[old.node].booked) == {}
        assert was_said(world, f"{old.node} is drained: nothing runs there")

    tell(story, "couple")


@pytest.mark.parametrize("restarts", [(), (1.0, 20.0, 15.0)])
def test_what_goes_on_by_its_old_definition_is_placed_elsewhere_as_it_is(
    tell: Callable[..., None], restarts: tuple[float, ...]
) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        (old,) = world.engines("couple")
        world.strike(EditModel(at=world.now, model="couple", min=1, max=1, restart=True, flaw=Flaw.FITS_NOWHERE))
        yield 60.0
        world.strike(DrainNode(at=world.now, node=old.node))
        begun: set[int] = set()
        for after in restarts:
            yield after
            world.strike(ServerRestart(at=world.now, seconds=1.0))
            begun |= {engine.pid for engine in world.engines("couple")}
        for _ in range(600):
            yield 1.0
            assert restarts or len(world.ready("couple")) >= 1
            begun |= {engine.pid for engine in world.engines("couple")}
        (new,) = world.engines("couple")
        assert (new.ready, new.spec.profile.args) == (True, old.spec.profile.args)
        assert new.node != old.node
        # one has stood in, and none for that one
        assert begun == {old.pid, new.pid}
        assert was_said(world, f"{old.node} is drained: nothing runs there")

    tell(story, "couple")
