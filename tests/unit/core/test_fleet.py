from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from fleets import (
    N1,
    N2,
    PAIR,
    M,
    a_fleet,
    a_gpu_node,
    a_model,
    a_node,
    a_running,
    a_wide_model,
    a_word,
    announced,
    desires,
    drained,
    drains,
    the_replica,
    the_shard,
    wake,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.core.effects import Desire, Drain, Effect, WakeAt
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Drained,
    Event,
    FactsKnown,
    ModelCalled,
    ModelsHeld,
    NodeLost,
    NodeMarked,
    NodeRegistered,
    NodeRemoved,
    NodeReported,
    NodesExpected,
    NodeSilent,
    ReplicaRecalled,
    ShardChanged,
    Stopping,
    Wakeup,
)
from llmgw.core.fleet import Fleet
from llmgw.core.learned import Fact, make_key
from llmgw.core.model import Model, ModelName, Profile, Scaling
from llmgw.core.node import Node, NodeId
from llmgw.core.placement import Placement, Rejected, place
from llmgw.core.replica import Measured, Replica, ReplicaId, ShardId, ShardReport, ShardSpec, ShardState
from llmgw.core.rolling import defines
from llmgw.core.weights import Fetch, Phase

# From the first word to the first answer


def test_a_wanted_model_is_placed_when_a_node_comes() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    assert (shard.id, shard.replica, shard.epoch, shard.node) == ("shd-m-1-0", "rep-m-1", 1, N1)
    assert desires(effects)[-1].revision == 1
    assert announced(effects)[-1].text == "rep-m-1 goes to n1 by profile 'p' (epoch 1): the least cost: 30 s"
    assert isinstance(fleet.verdict(M), Placement)
    assert fleet.ready(M) == ()
    assert not fleet.idle()


def test_a_node_that_registers_is_told_what_to_run_even_when_that_is_nothing() -> None:
    _, effects = a_fleet(a_model(least=0))
    assert desires(effects) == [Desire(node=N1, revision=1, shards=())]


def test_without_a_node_nothing_is_said() -> None:
    fleet = Fleet()
    assert fleet.handle(CatalogChanged(models=(a_model(),)), 0.0) == []
    assert fleet.verdict(M) == Rejected()


def test_a_thing_that_is_no_event_is_a_fault_of_the_program() -> None:
    with pytest.raises(AssertionError):
        Fleet().handle("event", 0.0)  # type: ignore[arg-type]


# When to ask again


def test_until_it_has_loaded_once_the_time_to_ask_again_is_a_guess() -> None:
    fleet, _ = a_fleet(a_model())
    assert fleet.retry_after_seconds(M, 0.0) == 5
    assert fleet.retry_after_seconds(M, 3.5) == 2
    assert fleet.retry_after_seconds(M, 400.0) == 5
    assert fleet.retry_after_seconds(ModelName("nobody"), 0.0) == 5


def test_an_earlier_load_tells_when_to_ask_again() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY, measured=Measured(load_seconds=40.0)), 43.0)
    fleet.handle(a_word(shard, ShardState.ENDED), 50.0)
    # (it is tried again at 55)
    assert fleet.retry_after_seconds(M, 50.0) == 45
    fleet.handle(Wakeup(), 55.0)
    assert fleet.retry_after_seconds(M, 65.0) == 30
    assert fleet.retry_after_seconds(M, 95.0) == 5


def test_what_an_earlier_server_learned_tells_when_to_ask_again() -> None:
    key = make_key(a_model(), a_model().profiles[0], "", "")
    fleet = Fleet()
    fleet.handle(FactsKnown(facts=(Fact(key=key, load_seconds=70.0),)), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(least=0),)), 0.0)
    assert fleet.retry_after_seconds(M, 0.0) == 70


def test_weights_that_are_on_their_way_come_before_the_load() -> None:
    key = make_key(a_model(), a_model().profiles[0], "", "")
    fleet = Fleet()
    fleet.handle(FactsKnown(facts=(Fact(key=key, load_seconds=10.0),)), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    fleet.handle(Wakeup(), 0.0)
    shard = the_shard(fleet.handle(NodeRegistered(node=a_node()), 0.0))
    fetch = Fetch(source=a_model().source, phase=Phase.FETCHING, left_seconds=30.0)
    fleet.handle(a_word(shard, ShardState.PREPARING, fetch=fetch), 50.0)
    assert fleet.retry_after_seconds(M, 50.0) == 40
    fleet.handle(a_word(shard, ShardState.PREPARING, fetch=replace(fetch, left_seconds=None)), 60.0)
    assert fleet.retry_after_seconds(M, 60.0) == 120
    fleet.handle(a_word(shard, ShardState.LOADING), 90.0)
    assert fleet.retry_after_seconds(M, 96.0) == 4


# Of models whose engines are there in a moment
QUICK = tuple(
    Fact(key=make_key(model, model.profiles[0], "", ""), load_seconds=1.0)
    for model in (a_model("m", source="/m"), a_model("o", source="/o"))
)


def a_crowded(least: int) -> Fleet:
    """``o`` has the only room since 1, and ``m`` is asked for at 10."""
    other, model = (a_model(name, least=least, gb=10.0, source=f"/{name}") for name in "om")
    fleet, effects = a_fleet(other)
    fleet.handle(FactsKnown(facts=QUICK), 0.0)
    effects += fleet.handle(Demand(model=other.name, waiting=1), 0.5)
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    fleet.handle(Demand(model=other.name), 1.0)
    fleet.handle(CatalogChanged(models=(other, model)), 2.0)
    fleet.handle(Demand(model=model.name, waiting=1), 10.0)
    wake(fleet, until=10.0)
    return fleet


def test_without_room_the_time_to_ask_again_is_when_it_is_looked_for_next() -> None:
    fleet = a_crowded(least=1)
    assert fleet.retry_after_seconds(M, 10.0) == 31
    assert fleet.least_wait_seconds(M, 10.0) == 1.0
    # (a moment is enough for what has room)
    assert fleet.retry_after_seconds(ModelName("nobody"), 10.0) == 5


def test_where_it_is_known_when_there_is_room_that_is_the_time_to_ask_again() -> None:
    fleet = a_crowded(least=0)
    # the idle one may go two minutes after it was loaded
    assert fleet.retry_after_seconds(M, 10.0) == 112
    (drain,) = drains(wake(fleet, until=121.0))
    assert fleet.makes_way(M) == ("rep-o-1",)
    assert fleet.retry_after_seconds(M, 121.0) == 1
    fleet.handle(drained(drain), 121.5)
    assert fleet.makes_way(M) == ("rep-o-1",)
    fleet.handle(a_word(the_replica(fleet, ModelName("o")).shard, ShardState.ENDED), 122.0)
    assert fleet.makes_way(M) == ()
    assert the_replica(fleet).state is ShardState.PLACED


def test_room_that_is_kept_for_it_is_there_in_a_moment() -> None:
    fleet, effects = a_fleet(a_model(gb=10.0))
    fleet.handle(FactsKnown(facts=QUICK), 0.0)
    node = a_node()
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=20.0)
    fleet.handle(NodeReported(node=replace(node, memory_foreign_gb=8.0)), 21.0)
    fleet.handle(a_word(shard, ShardState.ENDED, cause="killed"), 22.0)
    wake(fleet, until=30.0)
    assert list(fleet.statistics().reserved) == [M]
    assert fleet.retry_after_seconds(M, 30.0) == 5


def test_the_time_to_ask_again_has_a_ceiling() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY, measured=Measured(load_seconds=1000.0)), 1000.0)
    fleet.handle(a_word(shard, ShardState.ENDED), 1001.0)
    assert fleet.retry_after_seconds(M, 1001.0) == 120


# A small world: agents that are late, engines that die, operators who change their minds


CARDS = Profile(name="p", engine="e", gpu_class="h100-80g", tp=2, pp=1, nodes=2, min_memory_gb=1.0)
GROUP = replace(a_wide_model(CARDS), name=ModelName("g"))
CARD = replace(a_wide_model(replace(CARDS, tp=1, nodes=1), least=0), name=ModelName("h"))
CATALOGS: tuple[tuple[Model, ...], ...] = (
    (a_model("a", 1, 2, gb=6.0), a_model("b", 0, 1, gb=5.0), a_model("c", 2, 2, gb=3.0), CARD),
    (a_model("a", 1, 2, gb=6.0, source="/new"), a_model("b", 1, 1, gb=5.0), GROUP, CARD),
    (a_model("b", 0, 0, gb=5.0), a_model("c", 1, 1, gb=3.0), a_model("d", 3, 3, gb=7.0), replace(GROUP, source="/new")),
    (a_model("b", 0, 2, gb=5.0, source="/new"), a_model("d", 0, 1, gb=7.0), replace(CARD, source="/new")),
    (),
)
NAMES = [ModelName(name) for name in "abcdghx"]
NODES = {N1: replace(a_gpu_node("n1", gpus=2), memory_gb=10.0), N2: replace(a_gpu_node("n2", gpus=1), memory_gb=8.0)}
# What may take a replica that serves out of what is to run, at once: all else drains it first.
MAY_CUT_OFF = (ShardChanged, NodeRegistered, Stopping)


@dataclass
class Agent:
    """Runs what it is told, whenever it gets round to it."""

    node: Node
    told: Desire | None = None
    running: dict[ShardId, tuple[ShardSpec, ShardState]] = field(default_factory=dict)
    over: set[tuple[ShardId, int]] = field(default_factory=set)
    words: list[ShardChanged] = field(default_factory=list)

    def set(self, spec: ShardSpec, state: ShardState) -> None:
        if state is ShardState.ENDED:
            del self.running[spec.id]
            self.over.add((spec.id, spec.epoch))
        else:
            self.running[spec.id] = spec, state
        self.words.append(a_word(spec, state))

    def obey(self) -> None:
        if self.told is None:
            return
        epochs = {spec.id: spec.epoch for spec in self.told.shards}
        for spec, state in list(self.running.values()):
            if epochs.get(spec.id) != spec.epoch and state is not ShardState.STOPPING:
                self.set(spec, ShardState.STOPPING)
        for spec in self.told.shards:
            if spec.id in self.running:
                _, state = self.running[spec.id]
                if state is ShardState.PREPARED and spec.go:
                    self.set(spec, ShardState.LAUNCHING)
            elif (spec.id, spec.epoch) not in self.over:
                self.set(spec, ShardState.PREPARING)

    def advance(self, pick: int) -> None:
        if self.running:
            spec, state = list(self.running.values())[pick % len(self.running)]
            self.set(
                spec,
                {
                    ShardState.PREPARING: ShardState.LAUNCHING if spec.go else ShardState.PREPARED,
                    ShardState.PREPARED: ShardState.PREPARED,
                    ShardState.LAUNCHING: ShardState.LOADING,
                    ShardState.LOADING: ShardState.READY,
                    ShardState.READY: ShardState.READY,
                    ShardState.STOPPING: ShardState.ENDED,
                }[state],
            )

    def crash(self, pick: int) -> None:
        if self.running:
            spec, _ = list(self.running.values())[pick % len(self.running)]
            self.set(spec, ShardState.ENDED)


class World:
    def __init__(self) -> None:
        self.fleet = Fleet()
        self.agents = {name: Agent(node) for name, node in NODES.items()}
        self.now = 0.0
        self.wake_at: float | None = None
        self.log: list[Effect] = []
        self.drains: list[Drain] = []
        # what each node is to run, whether or not it can be told, and those that can't
        self.desired: dict[NodeId, Desire] = {}
        self.lost: set[NodeId] = set()
        self.was_lost = False
        self.happen(CatalogChanged(models=CATALOGS[0]))

    def ready(self) -> dict[tuple[ReplicaId, int], Replica]:
        return {(each.id, each.epoch): each for name in NAMES for each in self.fleet.ready(name)}

    def happen(self, event: Event) -> None:
        if isinstance(event, Wakeup):
            self.wake_at = None
        served = self.ready()
        effects = self.fleet.handle(event, self.now)
        self.log += effects
        for effect in effects:
            if isinstance(effect, Desire):
                before = self.desired.get(effect.node)
                assert before is None or effect.revision == before.revision + 1
                self.desired[effect.node] = effect
                if effect.node not in self.lost:
                    self.agents[effect.node].told = effect
            elif isinstance(effect, WakeAt):
                assert effect.at >= self.now
                self.wake_at = effect.at if self.wake_at is None else min(self.wake_at, effect.at)
            elif isinstance(effect, Drain):
                assert effect.number > max((drain.number for drain in self.drains), default=0)
                self.drains.append(effect)
        placed = {announce.model for announce in announced(effects) if " goes to " in announce.text}
        assert len(placed) <= 1
        self.check()
        if not isinstance(event, MAY_CUT_OFF):
            assert served.keys() <= self.wished(), f"{event} stopped what served, without a drain"
            if not isinstance(event, CatalogChanged | ModelsHeld | NodeLost):
                self.check_least({replica.model for replica in served.values()})

    def check_least(self, served: set[ModelName]) -> None:
        """A model that is always to run serves on while there is a place for another of it."""
        for name in sorted(served):
            model = self.fleet.launched(name)
            if model is not None and model.scaling.min and not self.fleet.held(name) and not self.fleet.ready(name):
                backing_off = self.fleet.backing_off(name)
                place_left = place(self.fleet.filled(model), self.fleet.hosts(), backing_off, self.now)
                drained_nodes = self.fleet.statistics().draining.values()
                late = any(node.until is not None and node.until <= self.now for node in drained_nodes)
                assert late or isinstance(place_left, Rejected), f"{name} is gone by our own doing"

    def wished(self) -> set[tuple[ReplicaId, int]]:
        return {(spec.replica, spec.epoch) for desire in self.desired.values() for spec in desire.shards}

    def check(self) -> None:
        routable = self.ready()
        assert len({replica for replica, _ in routable}) == len(routable)
        assert all(replica.draining is None for replica in routable.values())
        wished = [spec for desire in self.desired.values() for spec in desire.shards]
        for agent in self.agents.values():
            told = agent.told.shards if agent.told else ()
            held = {(spec.id, spec.epoch): spec for spec in told if (spec.id, spec.epoch) not in agent.over}
            held |= {(spec.id, spec.epoch): spec for spec, _ in agent.running.values()}
            assert sum(spec.profile.min_memory_gb or 0.0 for spec in held.values()) <= agent.node.memory_gb
            cards = [card for spec in held.values() for card in spec.gpus or ()]
            assert len(set(cards)) == len(cards), "a card twice"
        self.check_groups(wished)
        running = [spec for agent in self.agents.values() for spec, _ in agent.running.values()]
        if self.was_lost:
            # What ran there goes on until its node is back and has been told.
            running = []
        alive = {(spec.replica, spec.epoch, spec.rank) for spec in [*wished, *running]}
        epochs = {(replica, epoch) for replica, epoch, _ in alive}
        assert len({replica for replica, _ in epochs}) == len(epochs), "two epochs of a replica"

    def check_groups(self, wished: list[ShardSpec]) -> None:
        """They are told to launch when all is there on each of their nodes, and not before."""
        began = {(spec.id, spec.epoch) for agent in self.agents.values() for spec, _ in agent.running.values()}
        over = {each for agent in self.agents.values() for each in agent.over}
        for spec in wished:
            if spec.count > 1:
                mates = {each.id for each in wished if (each.replica, each.epoch) == (spec.replica, spec.epoch)}
                assert len(mates) == spec.count, "a part of a group"
                assert not spec.go or all((mate, spec.epoch) in began | over for mate in mates)
            else:
                assert spec.go

    def deliver(self, name: NodeId) -> None:
        agent = self.agents[name]
        while agent.words and name not in self.lost:
            self.happen(agent.words.pop(0))

    def answer_drain(self) -> None:
        for drain in self.drains[-20:]:
            self.happen(drained(drain))

    def drain(self) -> None:
        for agent in self.agents.values():
            agent.obey()
            self.deliver(agent.node.id)

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(10_000):
            self.drain()
            if self.wake_at is None or self.wake_at > end:
                break
            self.now = max(self.now, self.wake_at)
            self.happen(Wakeup())
        else:
            pytest.fail("the fleet asks to be woken for ever")
        self.now = end

    def ask(self, pick: int) -> None:
        name = NAMES[pick % len(NAMES)]
        ready = self.fleet.ready(name)
        in_flight = {replica.id: pick % 23 for replica in ready[: pick % 3]}
        self.happen(Demand(model=name, waiting=0 if ready else pick % 4, in_flight=in_flight, asked=pick % 5 == 0))

    def step(self, kind: int, pick: int) -> None:
        agent = self.agents[N1 if pick % 2 else N2]
        match kind:
            case 0:
                running = tuple((spec, a_word(spec, state).report) for spec, state in agent.running.values())
                agent.words.clear()
                self.lost.discard(agent.node.id)
                self.happen(NodeRegistered(node=agent.node, running=running))
            case 1:
                agent.obey()
            case 2:
                self.deliver(agent.node.id)
            case 3:
                agent.advance(pick // 2)
            case 4:
                agent.crash(pick // 2)
            case 5:
                self.ask(pick)
            case 6:
                self.happen(CatalogChanged(models=CATALOGS[pick % len(CATALOGS)]))
            case 7:
                if agent.node.id not in self.lost:
                    self.happen(NodeReported(node=agent.node))
            case 8:
                self.pass_time(float(pick))
            case 9:
                until = self.now + pick if pick % 3 else None
                self.happen(NodeMarked(node=agent.node.id, draining=pick % 4 > 0, drain_until=until))
            case 10:
                self.happen(ModelsHeld(models=frozenset(NAMES[: pick % 3])))
            case 11:
                self.happen(ModelCalled(model=NAMES[pick % len(NAMES)]))
            case 12:
                self.answer_drain()
            case 13:
                for replica, epoch in list(self.ready())[: pick % 2 + 1]:
                    self.happen(ReplicaRecalled(replica=replica, epoch=epoch))
            case 14 if agent.told is not None:
                self.lost.add(agent.node.id)
                self.was_lost = True
                self.happen(NodeLost(node=agent.node.id))
            case _:
                self.happen(Wakeup())

    def settle(self) -> None:
        for name, agent in self.agents.items():
            self.deliver(name)
            if agent.told is None or name in self.lost:
                self.step(0, 1 if name == N1 else 0)
            self.happen(NodeMarked(node=name))
        for model in NAMES:
            self.happen(Demand(model=model))
        for _ in range(16):
            for agent in self.agents.values():
                for pick in range(len(agent.running)):
                    agent.advance(pick)
                for pick in reversed(range(len(agent.running))):
                    agent.advance(pick)
            self.pass_time(301.0)
            self.answer_drain()


STEPS = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 60)), max_size=80)


def a_world(steps: Sequence[tuple[int, int]]) -> World:
    world = World()
    for kind, pick in steps:
        world.step(kind, pick)
    return world


@pytest.mark.slow
@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_whatever_happens_each_replica_gets_where_it_should_be(steps: list[tuple[int, int]]) -> None:
    world = a_world(steps)
    world.settle()
    fleet = world.fleet
    for agent in world.agents.values():
        assert agent.told is not None
        assert {spec.id: (spec, ShardState.READY) for spec in agent.told.shards} == agent.running
    for model in fleet.catalog:
        launched = fleet.launched(model.name)
        assert launched is not None
        ready = fleet.ready(model.name)
        assert all(defines(launched, replica.shard) for replica in ready)
        assert len(ready) <= model.scaling.max
        if len(ready) < fleet.wanted(launched, world.now):
            assert isinstance(fleet.verdict(model.name), Rejected)
            assert isinstance(place(fleet.filled(launched), fleet.hosts(), {}, world.now), Rejected)


@pytest.mark.slow
@given(STEPS)
@settings(max_examples=75, deadline=None)
def test_whatever_happened_everything_is_gone_after_a_stop(steps: list[tuple[int, int]]) -> None:
    world = a_world(steps)
    world.happen(Stopping())
    world.settle()
    assert world.fleet.idle()
    assert all(not agent.running for agent in world.agents.values())


@pytest.mark.slow
@given(STEPS)
@settings(max_examples=50, deadline=None)
def test_the_same_events_give_the_same_effects(steps: list[tuple[int, int]]) -> None:
    assert a_world(steps).log == a_world(steps).log


# Engines that start and a door that answers: with room to spare nobody notices what operators do, and without
# it they get it all the same


class Calm:
    """Nodes, and models that take 2 GB each, four in all. What is launched is ready after 5 s, nobody is answered by
    what is drained after 3 s, and what is to stop has ended after 2 s. ``short``: how many of a model may be away while
    one takes the place of another."""

    MODELS = tuple(a_model(name, least, most, gb=2.0) for name, least, most in (("a", 1, 1), ("b", 2, 2), ("c", 1, 3)))

    def __init__(self, nodes: int = 3, memory_gb: float = 64.0, short: int = 0) -> None:
        self.fleet = Fleet()
        self.short = short
        self.models = {model.name: model for model in self.MODELS}
        self.now = 0.0
        self.queue: list[tuple[float, int, Event]] = []
        self.running: dict[NodeId, dict[tuple[ShardId, int], ShardSpec]] = {}
        self.wake_at: float | None = None
        self.begun = False
        self.edits = 0
        self.nodes = [NodeId(f"n{number}") for number in range(1, nodes + 1)]
        self.happen(CatalogChanged(models=tuple(self.models.values())))
        for name in self.nodes:
            self.running[name] = {}
            self.happen(NodeRegistered(node=a_node(name, memory_gb=memory_gb)))
        self.pass_time(30.0)
        self.begun = True

    def later(self, seconds: float, event: Event) -> None:
        self.queue.append((self.now + seconds, len(self.queue), event))
        self.queue.sort(key=lambda entry: entry[:2])

    def happen(self, event: Event) -> None:
        if isinstance(event, Wakeup):
            self.wake_at = None
        for effect in self.fleet.handle(event, self.now):
            if isinstance(effect, Desire):
                self.obey(effect)
            elif isinstance(effect, WakeAt):
                self.wake_at = effect.at if self.wake_at is None else min(self.wake_at, effect.at)
            elif isinstance(effect, Drain):
                self.later(3.0, drained(effect))
        for model in self.models.values() if self.begun else ():
            least, most = model.scaling.min - self.short, model.scaling.max + 1
            assert least <= len(self.fleet.ready(model.name)) <= most, (event, model.name)

    def obey(self, told: Desire) -> None:
        running = self.running[told.node]
        wished = {(spec.id, spec.epoch): spec for spec in told.shards}
        for key in running.keys() - wished.keys():
            self.later(2.0, a_word(running.pop(key), ShardState.ENDED))
        for key in wished.keys() - running.keys():
            running[key] = wished[key]
            self.later(5.0, a_word(wished[key], ShardState.READY))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            times = [at for at, _, _ in self.queue[:1]] + [at for at in (self.wake_at,) if at is not None]
            next_up = min(times, default=math.inf)
            if next_up > end:
                break
            self.now = max(self.now, next_up)
            if self.queue and self.queue[0][0] <= self.now:
                self.happen(self.queue.pop(0)[2])
            else:
                self.happen(Wakeup())
        self.now = end

    def do(self, kind: int, pick: int) -> None:
        model = list(self.models.values())[pick % 3]
        match kind:
            case 0:
                # (or as it was first)
                self.edits += 1
                source = f"/{self.edits}" if pick % 4 else model.source
                self.models[model.name] = replace(model, source=source, aliases=(f"alias-{self.edits}",))
                self.happen(CatalogChanged(models=tuple(self.models.values())))
            case 1:
                # one at a time: the others have room for all
                for name in self.nodes:
                    self.happen(NodeMarked(node=name, draining=name == self.nodes[pick % 3]))
            case 2:
                self.happen(NodeMarked(node=self.nodes[pick % 3]))
            case 3:
                for replica in self.fleet.ready(model.name)[: pick % 2 + 1]:
                    self.happen(ReplicaRecalled(replica=replica.id, epoch=replica.epoch))
            case _:
                self.pass_time(float(pick))


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=25))
@settings(max_examples=100, deadline=None)
def test_with_room_to_spare_no_change_takes_down_what_could_have_stayed(steps: list[tuple[int, int]]) -> None:
    calm = Calm()
    for kind, pick in steps:
        calm.do(kind, pick)
    calm.pass_time(300.0)
    assert_all_is_as_it_is_to_be(calm)
    assert all(draining.left == () for draining in calm.fleet.statistics().draining.values())


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from([0, 0, 3, 4]), st.integers(0, 40)), max_size=25))
@settings(max_examples=100, deadline=None)
def test_on_a_full_fleet_every_change_comes_through_one_by_one(steps: list[tuple[int, int]]) -> None:
    calm = Calm(nodes=4, memory_gb=2.0, short=1)
    for kind, pick in steps:
        # (two who are called back are two that are away)
        calm.do(kind, pick & ~1 if kind == 3 else pick)
    calm.pass_time(900.0)
    assert_all_is_as_it_is_to_be(calm)


def assert_all_is_as_it_is_to_be(calm: Calm) -> None:
    for seen in calm.fleet.statistics().models:
        ready = calm.fleet.ready(seen.model.name)
        assert {replica.shard.model.source for replica in ready} == {seen.model.source}
        assert (seen.rollout, seen.failed, len(ready)) == (None, None, seen.model.scaling.min)


# Nodes that say anything

SHOWN = (None, None, Measured(load_seconds=3.0, version="9"), Measured(load_seconds=-1.0, gpu_gb=70.0, memory_gb=2.0))


class Liars:
    """Four nodes with valid certificates, and nothing true in what they say; each step is drawn."""

    def __init__(self, random: Random) -> None:
        self.random = random
        one = Profile(name="p", engine="e", gpu_class="h100-80g", tp=2)
        models = (
            Model(name=ModelName("o"), source="/o", scaling=Scaling(min=1, max=3), profiles=(one,)),
            a_wide_model(replace(PAIR, tp=4, pp=2), most=2),
            a_model("c", least=1, most=2),
        )
        changed = replace(models[0], profiles=(replace(one, args=("x",)),))
        self.catalogs = (models, models[:2], (changed, *models[1:]))
        self.fleet = Fleet()
        self.fleet.handle(CatalogChanged(models=models), 0.0)
        self.names = [NodeId(f"n{number}") for number in range(1, 5)]
        self.specs: list[ShardSpec] = []
        self.now = 0.0

    def invent(self) -> ShardSpec:
        pick = self.random
        if self.specs and pick.random() < 0.7:
            base = pick.choice(self.specs)
        else:
            model = pick.choice(self.catalogs[0])
            base = a_running(model, pick.randint(0, 4), pick.randint(1, 3), pick.choice(self.names))
        lies: dict[str, object] = {
            "epoch": pick.choice([*range(7), 2**40]),
            "rank": pick.randint(0, 2),
            "count": pick.randint(0, 3),
            "node": pick.choice(self.names),
            "id": ShardId(f"shd-{pick.choice('omc')}-{pick.randint(0, 3)}-0"),
            "replica": ReplicaId(pick.choice(["rep-o-1", "rep-m-1", "rep-c-1", "x"])),
            "gpus": tuple(f"GPU-n4-{pick.randint(0, 7)}" for _ in range(pick.randint(0, 3))),
            "rendezvous": pick.choice([None, "10.0.0.1:29500"]),
        }
        return replace(base, **{key: lie for key, lie in lies.items() if pick.random() < 0.25})  # type: ignore[arg-type]

    def draw(self) -> Event:
        pick, name = self.random, self.random.choice(self.names)
        states = list(ShardState)

        def word() -> tuple[ShardSpec, ShardReport]:
            spec = self.invent()
            return spec, a_word(spec, pick.choice(states), measured=pick.choice(SHOWN)).report

        match pick.randint(0, 15):
            case 0 | 1 | 2:
                running = tuple(word() for _ in range(pick.randint(0, 4)))
                return NodeRegistered(node=a_gpu_node(name), running=running)
            case 3 | 4 if self.specs:
                return a_word(pick.choice(self.specs), pick.choice(states))
            case 5:
                return a_word(self.invent(), pick.choice(states))
            case 6:
                return pick.choice([NodeSilent(node=name), NodeLost(node=name)])
            case 7:
                marked = NodeMarked(node=name, cordoned=pick.random() < 0.5, draining=pick.random() < 0.3)
                return pick.choice([NodeRemoved(node=name), marked])
            case 8:
                return CatalogChanged(models=pick.choice(self.catalogs))
            case 9:
                return NodeReported(node=a_gpu_node(name), applied=pick.choice([None, 0, 1, 5, 100]))
            case 10:
                return NodesExpected(nodes=frozenset(pick.sample(self.names, 2)), until=self.now + 10.0)
            case 11:
                waiting, asked = pick.randint(0, 20), pick.random() < 0.5
                in_flight = {ReplicaId(f"rep-o-{number}"): pick.randint(0, 20) for number in range(3)}
                return Demand(model=ModelName(pick.choice("omc")), waiting=waiting, in_flight=in_flight, asked=asked)
            case 12 if self.specs:
                spec = pick.choice(self.specs)
                return Drained(replica=spec.replica, epoch=spec.epoch, number=pick.randint(1, 9))
            case 13 if self.specs:
                spec = pick.choice(self.specs)
                return pick.choice(
                    [ReplicaRecalled(replica=spec.replica, epoch=spec.epoch), ModelCalled(model=spec.model.name)]
                )
            case 14:
                return ModelsHeld(models=frozenset(map(ModelName, pick.choice(["", "", "o", "mc"]))))
            case _:
                return Wakeup()

    def step(self) -> None:
        self.now += self.random.choice([0.0, 0.1, 1.0, 6.0, 31.0, 70.0])
        effects = self.fleet.handle(self.draw(), self.now)
        self.specs += [shard for desire in desires(effects) for shard in desire.shards if shard not in self.specs]

    def check(self) -> None:
        roster = self.fleet._state.roster
        for member in roster.members.values():
            for spec in member.desired.values():
                life = roster.at(member.node.id, spec.replica, spec.epoch)
                assert life is not None
                assert life.shard_on(member.node.id).state is not ShardState.ENDED
        for key, life in roster.lives.items():
            assert life.key == key
            assert all(roster.at(node, life.replica.id, life.replica.epoch) is life for node in life.replica.nodes)
        assert all(life.key in roster.lives for life in roster._at.values())
        state = self.fleet._state
        assert all(key in roster._at for key in state.forget_at)
        for keys in (state.going, state.prove_at, state.drain_until, state.whole_at):
            assert keys.keys() <= roster.lives.keys()
        names = {model.name for model in self.fleet.catalog}
        for known in (state.told, state.sizes, state.failures, state.reserved_until):
            assert known.keys() <= names
        assert roster.reserved.keys() == state.reserved_until.keys()
        assert all(tries.keys() <= roster.members.keys() for tries in state.failures.values())
        for model in self.fleet.catalog:
            ready = self.fleet.ready(model.name)
            # (one more while one takes the place of another)
            assert len({replica.id for replica in ready}) == len(ready) <= model.scaling.max + 1


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_whatever_nodes_say_the_books_stay_whole(random: Random) -> None:
    liars = Liars(random)
    for _ in range(120):
        liars.step()
        liars.check()
