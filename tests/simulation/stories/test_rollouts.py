"""A definition changes: for the better or the worse, with room for another replica or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from simulator.faults import AddModel, AgentCrash, EditModel, Flaw, RemoveModel, Rollback, ServerRestart, Storm
from simulator.stage import Stage, was_said


def runs_by(world: Stage, model: str) -> list[tuple[str, ...]]:
    """What the engines that are ready were started with."""
    return [engine.spec.profile.args for engine in world.engines(model) if engine.ready]


def test_a_good_change_on_the_only_card_is_made_in_place(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        assert runs_by(world, "sole") == [()]
        world.strike(Storm(at=world.now, model="sole", requests=20, seconds=200.0, returns=20))
        world.strike(EditModel(at=world.now, model="sole", min=1, max=1, restart=True))
        yield 200.0
        assert runs_by(world, "sole") == [("--again",)]
        assert was_said(world, "no room for another beside it")
        yield 1100.0
        assert "error: the engine ended" not in world.ends()

    tell(story, "sole")


@pytest.mark.parametrize("flaw", [Flaw.NEVER_READY, Flaw.DIES_AT_ONCE])
@pytest.mark.parametrize("model", ["sole", "couple"])
def test_a_bad_change_is_taken_back(tell: Callable[..., None], model: str, flaw: Flaw) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        world.strike(EditModel(at=world.now, model=model, min=1, max=1, restart=True, flaw=flaw))
        for _ in range(1600):
            yield 1.0
            # Where there is room beside it the old one serves all the time.
            assert model == "sole" or len(world.ready(model)) >= 1
        assert runs_by(world, model) == [()]
        assert was_said(world, f"the changed definition of {model} has failed, and the one before goes on")

    tell(story, model)


def test_a_change_that_finds_no_place_leaves_the_old_one_serving(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        world.strike(EditModel(at=world.now, model="couple", min=1, max=1, restart=True, flaw=Flaw.FITS_NOWHERE))
        for _ in range(100):
            yield 10.0
            assert len(world.ready("couple")) == 1
        assert was_said(world, "stays until there is room for another")
        world.strike(Rollback(at=world.now, model="couple"))
        yield 100.0
        assert runs_by(world, "couple") == [()]

    tell(story, "couple")


def test_a_bad_definition_can_be_removed(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        world.strike(EditModel(at=world.now, model="couple", min=1, max=1, restart=True, flaw=Flaw.NEVER_READY))
        yield 60.0
        world.strike(RemoveModel(at=world.now, model="couple"))
        yield 60.0
        assert world.engines("couple") == []
        world.strike(AddModel(at=world.now, model="couple"))
        yield 150.0
        assert runs_by(world, "couple") == [()]

    tell(story, "couple")


def test_a_change_on_a_full_fleet_goes_one_by_one(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        world.strike(EditModel(at=world.now, model="couple", min=2, max=2))
        yield 200.0
        assert len(world.ready("couple")) == 2
        world.strike(EditModel(at=world.now, model="couple", min=2, max=2, restart=True))
        for _ in range(400):
            yield 1.0
            assert len(world.ready("couple")) >= 1
        assert runs_by(world, "couple") == [("--again",)] * 2

    tell(story, "couple", nodes=6)


def test_a_change_during_a_change_ends_with_the_last(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        for _ in range(4):
            world.strike(EditModel(at=world.now, model="couple", min=1, max=1, restart=True))
            yield 23.0
            assert len(world.ready("couple")) >= 1
        yield 250.0
        assert runs_by(world, "couple") == [("--again",) * 4]

    tell(story, "couple")


def test_a_server_and_agents_that_are_killed_during_a_change_come_to_its_end(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        world.strike(EditModel(at=world.now, model="sole", min=1, max=1, restart=True))
        for step_seconds in (0.01, 0.1, 1.0, 5.0, 30.0, 60.0, 12.0):
            yield step_seconds
            world.strike(ServerRestart(at=world.now, seconds=1.0))
            world.strike(AgentCrash(at=world.now, node="n07", seconds=2.0))
            yield 15.0
        yield 250.0
        assert runs_by(world, "sole") == [("--again",)]

    tell(story, "sole")


def test_what_has_failed_is_known_to_the_next_server(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        # Its definition is in a file, and stays there as it is.
        world.strike(EditModel(at=world.now, model="sole", min=1, max=1, restart=True, flaw=Flaw.DIES_AT_ONCE))
        yield 600.0
        before = world.engines("sole")
        assert [engine.ready for engine in before] == [True]
        world.strike(ServerRestart(at=world.now, seconds=2.0))
        yield 300.0
        assert world.engines("sole") == before

    tell(story, "sole")
