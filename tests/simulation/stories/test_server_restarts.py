"""The server is gone for a moment, or longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.faults import Cordon, EngineCrash, Label, Partition, ServerRestart, Storm
from simulator.stage import Stage

from llmgw.core.node import NodeId


def test_an_engine_goes_on_loading_while_the_server_restarts(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 10.0
        (loading,) = world.engines("couple")
        assert not loading.ready
        world.strike(ServerRestart(at=world.now, seconds=3.0))

        yield 150.0
        (ready,) = world.engines("couple")
        assert (ready.pid, ready.spec.epoch) == (loading.pid, loading.spec.epoch)
        assert len(world.ready("couple")) == 1

    tell(story, "couple")


def test_an_old_epoch_that_returns_after_a_restart_ends_and_the_new_one_serves_on(tell: Callable[..., None]) -> None:
    """The server that comes back has never heard of the epoch that runs on the node it can't reach."""

    def story(world: Stage) -> Iterator[float]:
        yield 120.0
        (old,) = world.engines("couple")
        world.strike(Partition(at=world.now, nodes=(old.node,), seconds=600.0))
        yield 1.0
        world.strike(ServerRestart(at=world.now, seconds=5.0))

        yield 400.0
        by_node = {engine.node: engine for engine in world.engines("couple")}
        assert by_node.pop(old.node) == old
        (new,) = by_node.values()
        assert [replica.nodes for replica in world.ready("couple")] == [(new.node,)]

        yield 260.0
        assert world.engines("couple") == [new]
        assert [replica.nodes for replica in world.ready("couple")] == [(new.node,)]
        assert dict(world.books().hosts[old.node].booked) == {}

    tell(story, "couple")


def test_marks_of_an_operator_survive_a_restart(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 120.0
        world.strike(Cordon(at=world.now, node="n05"))
        world.strike(Label(at=world.now, node="n06", key="zone", value="east"))
        yield 1.0
        world.strike(ServerRestart(at=world.now, seconds=3.0))
        yield 60.0
        hosts = world.books().hosts
        assert [node for node, host in hosts.items() if host.cordoned] == ["n05"]
        assert hosts[NodeId("n06")].labels == {"zone": "east"}

    tell(story, "couple")


def test_a_model_at_zero_wakes_after_a_restart(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 60.0
        world.strike(ServerRestart(at=world.now, seconds=3.0))
        yield 60.0
        world.strike(Storm(at=world.now, model="lazy", requests=1, seconds=1.0))
        yield 200.0
        assert world.ends() == {"model_loading": 1}
        assert len(world.ready("lazy")) == 1
        world.strike(Storm(at=world.now, model="lazy", requests=5, seconds=1.0))
        yield 60.0
        assert world.ends() == {"model_loading": 1, "answered": 5}

    tell(story, "lazy")


def test_a_group_that_was_taken_over_and_dies_at_once_begins_anew(tell: Callable[..., None]) -> None:
    def story(world: Stage) -> Iterator[float]:
        yield 200.0
        (replica,) = world.ready("wide")
        world.strike(ServerRestart(at=world.now, seconds=1.0))
        yield 20.0
        assert [each.epoch for each in world.ready("wide")] == [replica.epoch]
        world.strike(EngineCrash(at=world.now, node=replica.nodes[1]))

        yield 280.0
        (anew,) = world.ready("wide")
        assert anew.epoch == replica.epoch + 1

    tell(story, "wide")
