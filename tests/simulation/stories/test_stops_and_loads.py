"""An operator stops a model or a replica, and has it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from simulator.faults import EditModel, Flaw, Hold, LoadModel, Recall, ServerRestart, Storm
from simulator.stage import Stage


def test_a_model_that_is_stopped_stays_so_until_it_is_loaded(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        world.strike(Hold(at=world.now, model="couple"))
        yield 60.0
        assert world.engines("couple") == []
        world.strike(ServerRestart(at=world.now, seconds=3.0))
        yield 60.0
        world.strike(Storm(at=world.now, model="couple", requests=5, seconds=10.0))
        yield 60.0
        assert world.engines("couple") == []
        assert world.ends() == {"model_not_running": 5}
        world.strike(LoadModel(at=world.now, model="couple"))
        yield 150.0
        assert len(world.ready("couple")) == 1

    tell(story, "couple")


def test_a_model_that_loads_on_demand_is_loaded_for_an_operator(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 60.0
        assert world.engines("lazy") == []
        world.strike(LoadModel(at=world.now, model="lazy"))
        yield 120.0
        assert len(world.ready("lazy")) == 1
        yield 1100.0
        assert world.engines("lazy") == []

    tell(story, "lazy")


def test_a_replica_that_is_stopped_is_replaced_first(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        (old,) = world.engines("couple")
        world.strike(Recall(at=world.now, model="couple"))
        for _ in range(200):
            yield 1.0
            assert len(world.ready("couple")) >= 1
        (new,) = world.engines("couple")
        assert (new.pid, new.node) != (old.pid, old.node)

    tell(story, "couple")


def test_the_only_place_of_a_replica_that_is_stopped_is_given_to_the_next(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        (old,) = world.engines("sole")
        world.strike(Recall(at=world.now, model="sole"))
        yield 150.0
        (new,) = world.engines("sole")
        assert new.ready
        assert new.pid != old.pid

    tell(story, "sole")


@pytest.mark.parametrize("model", ["sole", "couple"])
def test_what_goes_on_by_its_old_definition_is_replaced_as_it_is(tell: Callable[..., None], model: str) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 150.0
        (old,) = world.engines(model)
        world.strike(EditModel(at=world.now, model=model, min=1, max=1, restart=True, flaw=Flaw.FITS_NOWHERE))
        yield 60.0
        world.strike(Recall(at=world.now, model=model))
        begun: set[int] = set()
        for _ in range(900):
            yield 1.0
            # (the first where there is no room beside it)
            assert model == "sole" or len(world.ready(model)) >= 1
            begun |= {engine.pid for engine in world.engines(model)}
        (new,) = world.engines(model)
        assert (new.ready, new.spec.profile.args) == (True, old.spec.profile.args)
        assert begun == {old.pid, new.pid}

    tell(story, model)
