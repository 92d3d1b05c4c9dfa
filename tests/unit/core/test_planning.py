from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fleets import (
    N1,
    N2,
    M,
    a_fleet,
    a_gpu_node,
    a_model,
    a_node,
    a_ready,
    a_wide_model,
    a_word,
    announced,
    desires,
    drained,
    drains,
    found,
    the_replica,
    the_shard,
    wake,
    wakes,
)

from llmgw.core import planning
from llmgw.core.crews import STOPPING_SECONDS
from llmgw.core.effects import Desire, Drain, Effect
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    ModelCalled,
    ModelsHeld,
    NodeLost,
    NodeRegistered,
    NodeReported,
    NodeSilent,
    ReplicaRecalled,
    Wakeup,
)
from llmgw.core.fleet import Fleet
from llmgw.core.lives import RESERVED_SECONDS
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import EngineFound, ForeignUse, NodeId
from llmgw.core.placement import Placement, Rejected
from llmgw.core.planning import BACKSTOP_SECONDS, HOSTS_A_TURN, MOST_LOOKS
from llmgw.core.rejection import Reason
from llmgw.core.replica import ReplicaId, ShardSpec, ShardState
from llmgw.core.searching import SOON_SECONDS, Search
from llmgw.core.state import FEW


def test_a_turn_plans_one_model_and_asks_for_the_next_turn() -> None:
    fleet = Fleet()
    fleet.handle(NodeRegistered(node=a_node()), 0.0)
    effects = fleet.handle(CatalogChanged(models=(a_model("a"), a_model("b"), a_model("c"))), 5.0)
    assert [shard.model.name for shard in desires(effects)[-1].shards] == ["a"]
    assert wakes(effects) == [5.0]
    effects = fleet.handle(Wakeup(), 5.0)
    assert [shard.model.name for shard in desires(effects)[-1].shards] == ["a", "b"]
    assert wakes(effects) == [5.0]
    effects = fleet.handle(Wakeup(), 5.0)
    assert [shard.model.name for shard in desires(effects)[-1].shards] == ["a", "b", "c"]
    assert wakes(effects) == []


def test_every_replica_of_the_least_number_is_placed() -> None:
    fleet, effects = a_fleet(a_model(least=3, most=3), nodes=[a_node("n1", 16.0), a_node("n2", 15.0)])
    told = {desire.node: [shard.replica for shard in desire.shards] for desire in desires(effects)}
    assert told == {"n1": ["rep-m-1", "rep-m-2", "rep-m-3"], "n2": []} or sum(map(len, told.values())) == 3
    statistics = fleet.statistics()
    assert sum(node.booked_gb for node in statistics.nodes) == 12.0
    assert [replica.id for replica in statistics.models[0].replicas] == ["rep-m-1", "rep-m-2", "rep-m-3"]


# Demand


def test_a_model_on_demand_waits_for_somebody_who_asks() -> None:
    fleet, effects = a_fleet(a_model(least=0))
    assert desires(effects)[-1].shards == ()
    shard = the_shard(fleet.handle(Demand(model=M, waiting=1), 10.0))
    assert shard.replica == "rep-m-1"
    assert desires(fleet.handle(Demand(model=M, waiting=1), 11.0)) == []


def test_another_node_is_tried_at_once() -> None:
    fleet, effects = a_fleet(a_model(), nodes=[a_node("n1", 16.0), a_node("n2", 8.0)])
    shard = the_shard([effect for effect in desires(effects) if effect.shards])
    effects = fleet.handle(a_word(shard, ShardState.ENDED), 10.0)
    told = {desire.node: desire.shards for desire in desires(effects)}
    assert told[N1] == ()
    (again,) = told[N2]
    assert (again.replica, again.epoch) == ("rep-m-1", 2)


# Room


def test_a_model_that_fits_nowhere_says_why_once() -> None:
    fleet, effects = a_fleet(a_model(gb=99.0))
    (announce,) = announced(effects)
    assert announce.text == "no node can run m now (1 not_enough_memory)"
    assert announce.lines == (
        "n1, profile 'p': needs 99 GB of memory; 16 of 16 GB are free, 0 GB are booked by replicas",
    )
    assert announce.warning
    assert fleet.handle(NodeReported(node=a_node(memory_gb=17.0)), 5.0) == []
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Rejected)
    assert "of 17 GB" in verdict.rejections[0].detail


def test_another_reason_is_news() -> None:
    fleet, _ = a_fleet(a_model(gb=99.0))
    (announce,) = announced(fleet.handle(NodeReported(node=a_node(engines=())), 5.0))
    assert "no binary of the engine 'e'" in announce.lines[0]


def test_room_that_an_end_gives_back_is_used_by_those_that_wait() -> None:
    fleet, _ = a_fleet(a_model("a", gb=10.0), a_model("b", gb=10.0))
    assert isinstance(fleet.verdict(ModelName("b")), Rejected)
    old = the_replica(fleet, ModelName("a")).shard
    fleet.handle(a_word(old, ShardState.LAUNCHING), 1.0)
    effects = fleet.handle(CatalogChanged(models=(a_model("b", gb=10.0),)), 2.0)
    assert desires(effects)[-1].shards == ()
    assert fleet.statistics().nodes[0].booked_gb == 10.0
    fleet.handle(a_word(old, ShardState.ENDED), 3.0)
    fleet.handle(Wakeup(), 3.0)
    assert the_replica(fleet, ModelName("b")).state is ShardState.PLACED


# The catalog changes


# Nodes that are lost


def test_nothing_is_placed_on_a_lost_node() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    fleet.handle(NodeLost(node=N1), 1.0)
    fleet.handle(Demand(model=M, waiting=1), 2.0)
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Rejected)
    assert [no.reason for no in verdict.rejections] == [Reason.NODE_LOST]
    assert the_shard(fleet.handle(NodeRegistered(node=a_node()), 3.0)).node == N1


# Replicas of several nodes


def test_without_a_second_node_none_of_it_is_placed() -> None:
    fleet, effects = a_fleet(a_wide_model(), nodes=[a_gpu_node("n1"), a_gpu_node("n2", fabric="ib-b")])
    assert all(desire.shards == () for desire in desires(effects))
    assert isinstance(fleet.verdict(M), Rejected)


# Where to, and why not


def test_where_it_failed_of_late_it_is_tried_last() -> None:
    fleet, effects = a_fleet(a_model(), nodes=[a_node(f"n{n}") for n in (1, 2, 3)])
    tried = []
    now = 0.0
    for _ in range(3):
        shard = next(shard for desire in desires(effects) for shard in desire.shards)
        tried.append(shard.node)
        # (longer than any wait)
        now += 600.0
        effects = fleet.handle(a_word(shard, ShardState.ENDED, cause="never ready"), now)
    assert tried == ["n1", "n2", "n3"]
    assert fleet.failed(M, now) == {"n1": 1, "n2": 1, "n3": 1}
    assert fleet.failed(M, now + 3700.0) == {}


def test_an_answer_is_kept_without_the_nodes_that_it_was_found_for() -> None:
    fleet, _ = a_fleet(a_model(gb=99.0), nodes=[a_node(f"n{n:02}") for n in range(40)])
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Rejected)
    assert verdict.reasons() == {Reason.NOT_ENOUGH_MEMORY: 40}
    assert len(verdict.rejections) == FEW
    assert [no.node for no in verdict.first(2)] == ["n00", "n01"]
    fleet.handle(NodeRegistered(node=a_node("big", memory_gb=200.0)), 1.0)
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Placement)
    assert verdict.rejections == ()


def test_each_answer_is_kept_with_its_reason() -> None:
    fleet, _ = a_fleet(a_model(), a_model("b", gb=99.0))
    placed, nowhere = fleet.trace.of(M)
    assert (nowhere.replica, nowhere.why, nowhere.reasons) == (None, "there is no node, or no profile", {})
    assert (placed.replica, placed.profile, placed.nodes) == ("rep-m-1", "p", (N1,))
    refused, _ = fleet.trace.of(ModelName("b"))
    assert (refused.replica, refused.reasons, refused.why) == (
        None,
        {"not_enough_memory": 1},
        "1 not_enough_memory",
    )


def test_a_refusal_by_many_nodes_is_told_in_a_few_lines() -> None:
    nodes = [a_node(f"n{n}", memory_gb=1.0) for n in range(40)]
    _, effects = a_fleet(a_model(), nodes=nodes)
    said = announced(effects)[-1]
    assert len(said.lines) == FEW + 1
    assert said.lines[-1] == f"and {40 - FEW} more; llmgw ctl explain-placement m shows all"


def test_when_very_many_nodes_have_changed_at_once_the_plan_waits_for_the_next_turn() -> None:
    fleet = Fleet()
    for n in range(HOSTS_A_TURN * 2):
        fleet.handle(NodeRegistered(node=a_node(f"n{n:03}")), 0.0)
    effects = fleet.handle(CatalogChanged(models=(a_model(),)), 1.0)
    turns = 1
    while fleet.verdict(M) is None:
        assert wakes(effects) == [1.0]
        effects = fleet.handle(Wakeup(), 1.0)
        turns += 1
    assert turns == 2
    assert isinstance(fleet.verdict(M), Placement)


def test_while_the_brake_holds_a_new_model_is_placed_all_the_same() -> None:
    nodes = [a_node(f"n{number}") for number in range(1, 5)]
    fleet, effects = a_fleet(a_model(least=3, most=3, gb=12.0), nodes=nodes)
    for number in (1, 2, 3):
        fleet.handle(NodeLost(node=NodeId(f"n{number}")), 20.0)
    assert fleet.brake(20.0) is not None
    # (this server has seen all that there is)
    effects = fleet.handle(CatalogChanged(models=(a_model(least=3, most=3, gb=12.0), a_model("b"))), 21.0)
    assert [shard.model.name for desire in desires(effects) for shard in desire.shards] == ["b"]


# Room that is kept

OLD, NEW = a_model("m", gb=10.0), a_model("m", gb=10.0, source="/new")


def in_place(*waiting: Model) -> tuple[Fleet, ShardSpec]:
    """``m`` had the only room there is, and has just given it up at 73 for its new definition; the others wait for
    room."""
    fleet, old = a_ready(OLD)
    wake(fleet, until=60.0)
    fleet.handle(CatalogChanged(models=(OLD, *waiting)), 60.0)
    for model in waiting:
        fleet.handle(Demand(model=model.name, waiting=1), 61.0)
    wake(fleet, until=65.0)
    effects = fleet.handle(CatalogChanged(models=(NEW, *waiting)), 70.0)
    effects += wake(fleet, until=71.0)
    (drain,) = drains(effects)
    fleet.handle(drained(drain), 72.0)
    wake(fleet, until=72.0)
    return fleet, old


def of_each(fleet: Fleet) -> dict[str, list[ShardState]]:
    return {seen.model.name: [replica.state for replica in seen.replicas] for seen in fleet.statistics().models}


def test_the_room_of_one_that_is_replaced_in_place_goes_to_nobody_else() -> None:
    others = [a_model(f"w{number}", gb=10.0) for number in range(3)]
    fleet, old = in_place(*others)
    # something that has all of them looked at, and the others first
    fleet.handle(NodeReported(node=replace(a_node(), memory_foreign_gb=1.0)), 72.5)
    while next(iter(fleet._state.unplanned), "w").startswith("m"):
        fleet.handle(Wakeup(), 72.6)
    fleet.handle(a_word(old, ShardState.ENDED), 73.0)
    wake(fleet, until=73.0)
    assert of_each(fleet) == {"m": [ShardState.PLACED], "w0": [], "w1": [], "w2": []}
    assert the_replica(fleet).shard.model == NEW


def test_two_that_roll_on_a_full_cluster_do_so_one_after_the_other() -> None:
    models = [a_model(name, gb=10.0, source=f"/{name}") for name in "ab"]
    fleet, effects = a_fleet(*models, nodes=[a_node("n1"), a_node("n2")])
    for shard in {shard.id: shard for desire in desires(effects) for shard in desire.shards}.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=60.0)
    news = tuple(replace(model, source=f"{model.source}/new") for model in models)
    now, effects = 60.0, fleet.handle(CatalogChanged(models=news), 60.0)
    away: list[str] = []
    for _ in range(60):
        now += 1.0
        told = drains([*effects, *wake(fleet, until=now)])
        effects = [effect for drain in told for effect in fleet.handle(drained(drain), now)]
        for replica in [replica for seen in fleet.statistics().models for replica in seen.replicas]:
            if replica.state is ShardState.STOPPING:
                # (and both are looked at meanwhile)
                noise = replace(a_node(replica.nodes[0]), memory_foreign_gb=1.0 + now % 2)
                effects += fleet.handle(NodeReported(node=noise), now)
                effects += fleet.handle(a_word(replica.shard, ShardState.ENDED), now)
            elif replica.state is ShardState.PLACED:
                effects += fleet.handle(a_word(replica.shard, ShardState.READY), now)
        away += [model.name for model in models if not fleet.ready(model.name)]
    # (each for as long as its end and its load take)
    assert max(away.count("a"), away.count("b")) <= 5
    assert of_each(fleet) == {"a": [ShardState.READY], "b": [ShardState.READY]}
    sources = {replica.shard.model.source for name in "ab" for replica in fleet.ready(ModelName(name))}
    assert sources == {"/a/new", "/b/new"}


class Machines:
    """Nodes and a door that do at once what they are told; only a load takes its time."""

    def __init__(self, fleet: Fleet, effects: list[Effect], load_seconds: float) -> None:
        self.fleet = fleet
        self.load_seconds = load_seconds
        self.now = 1.0
        self.told: dict[NodeId, dict[tuple[str, int], ShardSpec]] = {}
        self.loading: list[tuple[float, ShardSpec]] = []
        self.do(effects)

    def do(self, effects: list[Effect]) -> None:
        left = list(effects)
        while left:
            effect = left.pop(0)
            if isinstance(effect, Drain):
                left += self.fleet.handle(drained(effect), self.now)
            elif isinstance(effect, Desire):
                before = self.told.get(effect.node, {})
                after = self.told[effect.node] = {(shard.id, shard.epoch): shard for shard in effect.shards}
                for spec in [spec for key, spec in before.items() if key not in after]:
                    left += self.fleet.handle(a_word(spec, ShardState.ENDED), self.now)
                for spec in [spec for key, spec in after.items() if key not in before]:
                    # (none takes as long as the other)
                    slower = 1 + 0.37 * len(self.loading) % 0.5
                    self.loading.append((self.now + self.load_seconds * slower, spec))

    def run(self, until: float) -> None:
        for _ in range(5000):
            ready_at, spec = min(self.loading, key=lambda each: each[0], default=(math.inf, None))
            wake_at = self.fleet._state.wake_at
            at = min(ready_at, math.inf if wake_at is None else wake_at)
            if at > until:
                return
            self.now = max(self.now, at)
            if spec is not None and at == ready_at:
                self.loading.remove((ready_at, spec))
                self.do(self.fleet.handle(a_word(spec, ShardState.READY), self.now))
            else:
                self.do(self.fleet.handle(Wakeup(), self.now))
        raise AssertionError("it has no end")


@pytest.mark.parametrize(("count", "replicas"), [(2, 2), (3, 2), (3, 3), (4, 2)])
def test_many_that_roll_on_a_full_cluster_do_not_wait_for_each_other_for_ever(count: int, replicas: int) -> None:
    models = [a_model(name, replicas, replicas, gb=10.0, source=f"/{name}") for name in "abcd"[:count]]
    fleet, effects = a_fleet(*models, nodes=[a_node(f"n{number}") for number in range(count * replicas)])
    machines = Machines(fleet, effects, load_seconds=30.0)
    machines.run(600.0)
    news = tuple(replace(model, source=f"{model.source}/new") for model in models)
    machines.do(fleet.handle(CatalogChanged(models=news), 600.0))
    machines.run(2000.0)
    serving = [replica.shard.model.source for model in models for replica in fleet.ready(model.name)]
    assert serving == [model.source for model in news for _ in range(replicas)]


def two_that_roll() -> tuple[Fleet, ShardSpec, ModelName]:
    """Of two models on three places the one begins in the spare place at 60, and the other waits for what that leaves:
    with what has begun, and the name of the other."""
    models = [a_model(name, gb=10.0, source=f"/{name}") for name in "ab"]
    fleet, effects = a_fleet(*models, nodes=[a_node(f"n{number}") for number in (1, 2, 3)])
    for shard in {shard.id: shard for desire in desires(effects) for shard in desire.shards}.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=59.0)
    effects = fleet.handle(CatalogChanged(models=tuple(replace(model, source="/new") for model in models)), 60.0)
    effects += wake(fleet, until=61.0)
    assert drains(effects) == []
    (new,) = (shard for desire in desires(effects) for shard in desire.shards if shard.model.source == "/new")
    return fleet, new, ModelName("ab".replace(new.model.name, ""))


def test_a_replica_of_another_model_whose_weights_are_on_their_way_is_not_waited_for_longer_than_a_minute() -> None:
    fleet, new, other = two_that_roll()
    fleet.handle(a_word(new, ShardState.PREPARING), 62.0)
    assert drains(wake(fleet, until=60.0 + SOON_SECONDS - 0.1)) == []
    (drain,) = drains(wake(fleet, until=60.0 + SOON_SECONDS + BACKSTOP_SECONDS))
    assert drain.replica.startswith(f"rep-{other}-")


def test_the_place_of_one_that_still_answers_is_waited_for_by_all_who_have_no_other() -> None:
    fleet, new, other = two_that_roll()
    (old,) = (life.replica for life in fleet._state.roster.of(new.model.name) if life.replica.id != new.replica)
    fleet.handle(Demand(model=new.model.name, in_flight={old.id: 2}), 62.0)
    fleet.handle(a_word(new, ShardState.READY), 65.0)
    (drain,) = drains(wake(fleet, until=200.0))
    assert drain.replica == old.id
    fleet.handle(drained(drain), 200.0)
    fleet.handle(a_word(old.shard, ShardState.ENDED), 201.0)
    assert drains(wake(fleet, until=202.0)) == []
    assert sorted(of_each(fleet)[other]) == [ShardState.PLACED, ShardState.READY]


def test_while_one_that_has_failed_is_tried_again_in_a_moment_the_others_wait_for_what_comes_of_it() -> None:
    fleet, new, other = two_that_roll()
    now = 64.0
    for _ in range(2):
        (coming,) = (
            life.replica.shard
            for life in fleet._state.roster.of(new.model.name)
            if life.alive and life.replica.shard.model.source == "/new"
        )
        effects = fleet.handle(a_word(coming, ShardState.ENDED, cause="no such flag"), now)
        now += 12.0
        assert drains([*effects, *wake(fleet, until=now)]) == []
    # it has returned, and the spare place is the other's
    placed = [life.replica for life in fleet._state.roster.of(other) if life.replica.shard.model.source == "/new"]
    assert [replica.state for replica in placed] == [ShardState.PLACED]


def test_between_the_proof_of_one_and_the_end_of_the_other_nobody_goes_in_place() -> None:
    fleet, new, other = two_that_roll()
    fleet.handle(a_word(new, ShardState.READY), 65.0)
    wake(fleet, until=74.9)
    # the other is looked at first
    fleet._state.plan_first(other)
    effects = [*fleet.handle(Wakeup(), 75.0), *wake(fleet, until=76.0)]
    assert [drain.replica.split("-")[1] for drain in drains(effects)] == [new.model.name]


def on_cards(name: str, source: str = "/m.gguf") -> Model:
    model = a_model(name, source=source)
    profiles = tuple(replace(profile, gpu_class="h100-80g", gpu_memory_gb=70.0) for profile in model.profiles)
    return replace(model, profiles=profiles)


def a_spare_card(beside: str, apart: str, at: float) -> tuple[Fleet, ShardSpec]:
    """The one model is on a node with a card to spare, and the other on one without; both are changed at that time, and
    the first of the given ones has the spare card."""
    fleet, effects = a_fleet(on_cards("c"), nodes=[a_gpu_node("n2", gpus=1)])
    effects += fleet.handle(NodeRegistered(node=a_gpu_node("n1", gpus=2)), 0.0)
    effects += fleet.handle(CatalogChanged(models=(on_cards("b"), on_cards("c"))), 0.5) + wake(fleet, until=0.6)
    for shard in {shard.id: shard for desire in desires(effects) for shard in desire.shards}.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=at)
    effects = []
    for changed in ((beside,), (beside, apart)):
        models = tuple(on_cards(name, "/new" if name in changed else "/m.gguf") for name in "bc")
        effects += fleet.handle(CatalogChanged(models=models), at) + wake(fleet, until=at)
    assert drains(effects) == []
    (new,) = {shard for desire in desires(effects) for shard in desire.shards if shard.model.source == "/new"}
    assert (new.model.name, new.node) == (beside, N1)
    return fleet, new


def fail_on_trial(fleet: Fleet, now: float) -> list[Effect]:
    (new,) = (
        life.replica.shard
        for name in "bc"
        for life in fleet._state.roster.of(ModelName(name))
        if life.alive and life.replica.shard.model.source == "/new"
    )
    return fleet.handle(a_word(new, ShardState.ENDED, cause="no such flag"), now)


@pytest.mark.parametrize("at", [2.0, 60.0], ids=["what serves has just begun to", "it serves for long"])
def test_room_that_was_kept_for_what_is_returned_from_is_given_back_at_once(at: float) -> None:
    fleet, _ = a_spare_card("c", "b", at)
    effects = fail_on_trial(fleet, at + 1.0) + wake(fleet, until=at + 6.5)
    effects += fail_on_trial(fleet, at + 7.0) + wake(fleet, until=at + 7.1)
    assert drains(effects) == []
    (new,) = (each for each in desires(effects)[-1].shards if each.model.source == "/new")
    assert (new.model.name, new.node) == ("b", N1)


def test_room_to_come_on_a_node_whose_link_is_down_for_a_moment_is_waited_for() -> None:
    fleet, _ = a_spare_card("b", "c", 60.0)
    effects = fail_on_trial(fleet, 61.0) + fleet.handle(NodeSilent(node=N1), 61.5)
    assert drains([*effects, *wake(fleet, until=62.0)]) == []


def test_one_that_is_launched_is_waited_for_as_long_as_it_loads() -> None:
    fleet, new, _ = two_that_roll()
    fleet.handle(a_word(new, ShardState.LOADING), 62.0)
    assert drains(wake(fleet, until=600.0)) == []


def test_only_a_few_rooms_of_others_are_looked_at_and_none_that_is_gone() -> None:
    fleet, new, other = two_that_roll()
    state, first = fleet._state, new.model.name
    search = Search(state, a_model("third", gb=10.0), 62.0)
    gone = (ReplicaId("rep-gone-1"), 1, N1)
    state.going[gone] = None
    assert planning._is_room_to_come(state, search, other, 62.0)
    # not its own, nor one that has ended
    assert not planning._is_room_to_come(state, search, first, 62.0)
    keys = state.replacing[first]
    state.replacing[first] = (gone, *keys)
    assert planning._is_room_to_come(state, search, other, 62.0)
    large = Search(state, a_model("third", gb=99.0), 62.0)
    assert not planning._is_room_to_come(state, large, other, 62.0)
    # of many the first
    state.replacing[first] = (*[life.key for life in state.roster.of(other)] * MOST_LOOKS, *keys)
    assert not planning._is_room_to_come(state, large, other, 62.0)


def test_one_that_still_answers_somebody_is_waited_for_before_the_next_goes_in_place() -> None:
    models = [a_model("m", least=1, most=3, gb=10.0, source=source) for source in ("/old", "/new")]
    fleet, effects = a_fleet(
        a_model("m", least=3, most=3, gb=10.0, source="/old"), nodes=[a_node(f"n{n}") for n in "123"]
    )
    for shard in {shard.id: shard for desire in desires(effects) for shard in desire.shards}.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    names = [replica.id for replica in fleet.ready(M)]
    busy = Demand(model=M, waiting=0, in_flight=dict.fromkeys(names, 8))
    fleet.handle(busy, 2.0)
    wake(fleet, until=60.0)
    fleet.handle(CatalogChanged(models=models[:1]), 60.0)
    fleet.handle(busy, 60.0)
    effects = fleet.handle(CatalogChanged(models=models[1:]), 61.0)
    effects += wake(fleet, until=62.0)
    (drain,) = drains(effects)
    # other news has the model looked at again, and again
    for now in (63.0, 70.0, 80.0):
        effects = fleet.handle(NodeReported(node=replace(a_node("n1"), memory_foreign_gb=now / 100)), now)
        effects += fleet.handle(busy, now)
        assert drains([*effects, *wake(fleet, until=now + 1.0)]) == []
    assert len(fleet.ready(M)) == 2
    fleet.handle(drained(drain), 90.0)
    (going,) = (each for each in fleet.statistics().models[0].replicas if each.id == drain.replica)
    fleet.handle(a_word(going.shard, ShardState.ENDED), 91.0)
    wake(fleet, until=91.0)
    assert sorted(replica.state for replica in fleet.statistics().models[0].replicas)[:1] == [ShardState.PLACED]


def test_the_place_that_another_model_is_about_to_free_is_waited_for() -> None:
    nodes = [a_node(f"n{number}") for number in (1, 2, 3)]
    models = [a_model(name, gb=10.0, source=f"/{name}") for name in "ab"]
    fleet, effects = a_fleet(*models, nodes=nodes)
    for shard in {shard.id: shard for desire in desires(effects) for shard in desire.shards}.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=60.0)
    effects = fleet.handle(CatalogChanged(models=tuple(replace(model, source="/new") for model in models)), 60.0)
    effects += wake(fleet, until=61.0)
    # the one goes to the spare place, and the other waits for the room that it leaves
    assert drains(effects) == []
    (new,) = (shard for desire in desires(effects) for shard in desire.shards if shard.model.source == "/new")
    fleet.handle(a_word(new, ShardState.READY), 65.0)
    (drain,) = drains(wake(fleet, until=76.0))
    fleet.handle(drained(drain), 76.0)
    first, second = sorted("ab", key=lambda name: name != new.model.name)
    (old,) = (each for each in fleet.statistics().models["ab".index(first)].replicas if each.id == drain.replica)
    fleet.handle(a_word(old.shard, ShardState.ENDED), 77.0)
    assert drains(wake(fleet, until=78.0)) == []
    assert sorted(of_each(fleet)[second]) == [ShardState.PLACED, ShardState.READY]


def a_site(
    rooms: dict[str, float], *placed: tuple[Model, str], until: float = 60.0
) -> tuple[Fleet, dict[str, ShardSpec]]:
    """Nodes of so much memory, and models that are ready there since the beginning: each fits nowhere else when it
    comes."""
    fleet, there, shards = Fleet(), set[str](), {}
    for at, (model, node) in enumerate(placed):
        if node not in there:
            fleet.handle(NodeRegistered(node=a_node(node, memory_gb=rooms[node])), float(at))
            there.add(node)
        models = tuple(each for each, _ in placed[: at + 1])
        effects = fleet.handle(CatalogChanged(models=models), float(at)) + wake(fleet, until=float(at))
        (shard,) = {
            shard.id: shard for desire in desires(effects) for shard in desire.shards if shard.model == model
        }.values()
        assert shard.node == node
        fleet.handle(a_word(shard, ShardState.READY), float(at))
        shards[model.name] = shard
    wake(fleet, until=until)
    return fleet, shards


def edited(*models: Model) -> tuple[Model, ...]:
    return tuple(replace(model, source="/new") for model in models)


def test_room_that_two_models_are_about_to_leave_together_is_waited_for() -> None:
    wide, left, right = a_model("t", gb=8.0), a_model("b", gb=4.0), a_model("c", gb=4.0)
    fleet, shards = a_site({"n1": 8.0, "n2": 16.0}, (wide, "n1"), (left, "n2"), (right, "n2"))
    effects = fleet.handle(CatalogChanged(models=(wide, *edited(left, right))), 60.0) + wake(fleet, until=60.0)
    new = [shard for shard in desires(effects)[-1].shards if shard.model.source == "/new"]
    assert len(new) == 2
    effects = fleet.handle(CatalogChanged(models=edited(wide, left, right)), 61.0) + wake(fleet, until=62.0)
    for shard in new:
        effects += fleet.handle(a_word(shard, ShardState.READY), 63.0)
    effects += wake(fleet, until=74.0)
    assert sorted(drain.replica for drain in drains(effects)) == ["rep-b-1", "rep-c-1"]
    for drain in drains(effects):
        fleet.handle(drained(drain), 74.0)
    for name in "bc":
        assert drains(wake(fleet, until=75.0)) == []
        fleet.handle(a_word(shards[name], ShardState.ENDED), 75.0)
    wake(fleet, until=76.0)
    assert sorted(of_each(fleet)["t"]) == [ShardState.PLACED, ShardState.READY]


@pytest.mark.parametrize("why", ["recalled", "edited again"])
def test_of_two_that_are_both_to_be_replaced_one_leaves_its_room(why: str) -> None:
    first, second = a_model("b", gb=4.0), a_model("c", gb=4.0)
    # (none has served for long enough to make the other needless)
    fleet, _ = a_site({"n1": 8.0, "n2": 4.0}, (second, "n2"), (first, "n1"), until=2.0)
    effects = fleet.handle(CatalogChanged(models=(second, *edited(first))), 2.0) + wake(fleet, until=2.0)
    (new,) = (shard for shard in desires(effects)[-1].shards if shard.model.source == "/new")
    fleet.handle(a_word(new, ShardState.READY), 3.0)
    fleet.handle(CatalogChanged(models=edited(second, first)), 4.0)
    assert drains(wake(fleet, until=5.0)) == []
    if why == "recalled":
        effects = fleet.handle(ReplicaRecalled(replica=new.replica, epoch=new.epoch), 6.0)
    else:
        effects = fleet.handle(CatalogChanged(models=(*edited(second), replace(first, source="/newer"))), 6.0)
    effects += wake(fleet, until=6.0)
    # (what waits for room is looked at again)
    effects += fleet.handle(ModelCalled(model=second.name), 6.1) + wake(fleet, until=30.0)
    assert [drain.replica for drain in drains(effects) if drain.replica.startswith("rep-c")] == []
    assert len(fleet.ready(second.name)) == 1


def test_what_an_earlier_server_has_left_and_is_to_stop_leaves_its_room() -> None:
    model, nobodys = a_model("c", gb=4.0), a_model("x", gb=4.0)
    _, shards = a_site({"n1": 4.0, "n2": 4.0}, (model, "n1"), (nobodys, "n2"))
    nodes = [a_node(name, memory_gb=4.0) for name in ("n1", "n2")]
    server = Fleet()
    server.handle(CatalogChanged(models=edited(model)), 0.0)
    server.handle(NodeRegistered(node=nodes[1], running=(found(shards["x"]),)), 1.0)
    effects = server.handle(NodeRegistered(node=nodes[0], running=(found(shards["c"]),)), 1.0)
    effects += wake(server, until=20.0)
    assert drains(effects) == []
    server.handle(a_word(shards["x"], ShardState.ENDED), 21.0)
    wake(server, until=22.0)
    assert sorted(of_each(server)["c"]) == [ShardState.PLACED, ShardState.READY]


def test_an_engine_that_can_not_be_killed_is_not_waited_for_without_end() -> None:
    old, other = (a_model(name, gb=8.0) for name in "mw")
    fleet, effects = a_fleet(old, other, nodes=[a_node(memory_gb=16.0)])
    specs = {shard.model.name: shard for desire in desires(effects) for shard in desire.shards}
    for spec in specs.values():
        fleet.handle(a_word(spec, ShardState.READY), 1.0)
    wake(fleet, until=30.0)
    # the other model is removed, and its engine does not end
    effects = fleet.handle(CatalogChanged(models=(old,)), 40.0)
    fleet.handle(drained(drains(effects)[0]), 41.0)
    fleet.handle(a_word(specs["w"], ShardState.STOPPING), 42.0)
    effects = fleet.handle(CatalogChanged(models=(replace(old, source="/new"),)), 43.0)
    assert drains([*effects, *wake(fleet, until=42.0 + STOPPING_SECONDS - 1.0)]) == []
    (drain,) = drains(wake(fleet, until=42.0 + STOPPING_SECONDS + BACKSTOP_SECONDS))
    assert drain.replica == specs["m"].replica


def test_one_that_has_failed_and_is_not_tried_again_leaves_no_room() -> None:
    pair = Profile(name="p", engine="e", tp=1, pp=2, nodes=2, gpu_memory_gb=40.0)
    wide = a_wide_model(pair)
    other = replace(a_model("w", least=0), profiles=(Profile(name="p", engine="other", min_memory_gb=1.0),))
    fleet, effects = a_fleet(wide, nodes=[a_gpu_node("n1", gpus=1), a_gpu_node("n2", gpus=1)])
    shards = {shard.id: shard for desire in desires(effects) for shard in desire.shards}.values()
    for state in (ShardState.PREPARED, ShardState.READY):
        for shard in shards:
            fleet.handle(a_word(replace(shard, go=state is ShardState.READY), state), 1.0)
    wake(fleet, until=30.0)
    # two more nodes, whose cards are no pair
    for name, gpu_class in (("n3", "one"), ("n4", "another")):
        node = a_gpu_node(name, gpus=1)
        gpus = tuple(replace(gpu, gpu_class=gpu_class) for gpu in node.gpus or ())
        engines = (*node.engines, EngineFound(engine="other", program=("other",)))
        fleet.handle(NodeRegistered(node=replace(node, gpus=gpus, engines=engines)), 31.0)
    fleet.handle(CatalogChanged(models=(wide, other)), 32.0)
    effects = fleet.handle(Demand(model=other.name, waiting=1), 33.0)
    (failed,) = (shard for desire in desires(effects) for shard in desire.shards if shard.model.name == "w")
    assert failed.node == "n3"
    fleet.handle(a_word(failed, ShardState.ENDED, cause="no such flag"), 34.0)
    fleet.handle(Demand(model=other.name, waiting=0), 35.0)
    wake(fleet, until=400.0)
    changed = a_wide_model(replace(pair, env={"A": "b"}))
    effects = fleet.handle(CatalogChanged(models=(changed, other)), 500.0)
    assert [drain.replica for drain in drains([*effects, *wake(fleet, until=510.0)])] == ["rep-m-1"]


def test_the_room_of_one_that_fails_and_is_tried_again_in_a_moment_goes_to_nobody_else() -> None:
    other = a_model("w", least=0, gb=10.0)
    fleet, old = in_place(other)
    fleet.handle(a_word(old, ShardState.ENDED), 73.0)
    wake(fleet, until=73.0)
    for now in (74.0, 80.0):
        fleet.handle(a_word(the_replica(fleet).shard, ShardState.ENDED, cause="bad flag"), now)
        wake(fleet, until=now + 1.0)
        assert of_each(fleet)["w"] == []
        wake(fleet, until=now + 5.5)
    # it has failed twice, and what served before goes on
    assert the_replica(fleet).shard.model == OLD
    assert of_each(fleet) == {"m": [ShardState.PLACED], "w": []}


def test_room_that_nobody_comes_back_to_is_given_to_who_waits() -> None:
    other = a_model("w", least=0, gb=7.0)
    fleet, old = in_place(other)
    # (some other program has it at the moment)
    fleet.handle(NodeReported(node=replace(a_node(), memory_foreign_gb=8.0)), 72.5)
    fleet.handle(a_word(old, ShardState.ENDED), 73.0)
    fleet.handle(Demand(model=other.name, asked=True), 74.0)
    wake(fleet, until=74.0)
    assert of_each(fleet)["w"] == []
    wake(fleet, until=73.0 + RESERVED_SECONDS)
    assert of_each(fleet)["w"] == [ShardState.PLACED]


def test_room_that_is_of_no_use_to_its_model_is_given_to_who_waits_at_once() -> None:
    other = a_model("w", least=0, gb=7.0)
    fleet, old = in_place(other)
    # (less of it is left than m takes, by any of its definitions)
    fleet.handle(NodeReported(node=a_node(memory_gb=8.0)), 72.5)
    fleet.handle(Demand(model=other.name, asked=True), 72.6)
    wake(fleet, until=72.7)
    assert of_each(fleet)["w"] == []
    fleet.handle(a_word(old, ShardState.ENDED), 73.0)
    wake(fleet, until=73.0)
    assert of_each(fleet) == {"m": [], "w": [ShardState.PLACED]}
    assert fleet.statistics().reserved == {}


CARDS = Profile(name="p", engine="e", gpu_class="h100-80g", tp=4)


@pytest.mark.parametrize(
    ("profile", "fits"),
    [
        (replace(CARDS, tp=8), False),
        (replace(CARDS, gpu_class="a100-40g"), False),
        (replace(CARDS, engine="nosuch"), False),
        (replace(CARDS, args=("--other",)), True),
    ],
)
def test_the_room_of_one_that_ends_while_the_next_definition_can_not_use_it_is_not_kept(
    profile: Profile, fits: bool
) -> None:
    model, other = a_wide_model(replace(CARDS, env={"A": "1"})), replace(a_wide_model(CARDS), name=ModelName("w"))
    fleet, effects = a_fleet(model, nodes=[a_gpu_node("n1", gpus=4)])
    fleet.handle(a_word(the_shard(effects), ShardState.LOADING), 1.0)
    # (one that has never served is not what its model returns to)
    fleet.handle(CatalogChanged(models=(a_wide_model(profile), other)), 2.0)
    wake(fleet, until=3.0)
    (old,) = [each.shard for each in fleet.statistics().models[0].replicas]
    fleet.handle(a_word(old, ShardState.ENDED, cause="killed"), 5.0)
    wake(fleet, until=6.0)
    assert of_each(fleet)["w"] == ([] if fits else [ShardState.PLACED])
    assert fleet.statistics().reserved == {}


def test_room_that_what_has_served_returns_to_is_kept_for_it() -> None:
    other = a_model("w", gb=10.0)
    fleet, old = a_ready(OLD)
    wake(fleet, until=60.0)
    nowhere = replace(NEW, profiles=(replace(NEW.profiles[0], engine="nosuch"),))
    fleet.handle(CatalogChanged(models=(nowhere, other)), 61.0)
    wake(fleet, until=62.0)
    fleet.handle(a_word(old, ShardState.ENDED, cause="killed"), 63.0)
    wake(fleet, until=64.0)
    assert of_each(fleet) == {"m": [ShardState.ENDED], "w": []}
    wake(fleet, until=70.0)
    assert of_each(fleet) == {"m": [ShardState.PLACED], "w": []}
    assert the_replica(fleet).shard.model.source == OLD.source


def test_cards_whose_memory_is_not_given_back_yet_are_kept() -> None:
    model = a_wide_model(replace(CARDS, tp=4))
    other = replace(a_wide_model(CARDS), name=ModelName("w"))
    node = a_gpu_node("n1", gpus=4)
    fleet, effects = a_fleet(model, nodes=[node])
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=20.0)
    fleet.handle(CatalogChanged(models=(model, other)), 21.0)
    full = tuple(replace(gpu, foreign=(ForeignUse(memory_gb=80.0),)) for gpu in node.gpus or ())
    fleet.handle(a_word(shard, ShardState.ENDED, cause="killed"), 22.0)
    fleet.handle(NodeReported(node=replace(node, gpus=full)), 22.5)
    wake(fleet, until=30.0)
    assert list(fleet.statistics().reserved) == [M]
    fleet.handle(NodeReported(node=node), 31.0)
    wake(fleet, until=32.0)
    assert of_each(fleet) == {"m": [ShardState.PLACED], "w": []}


@pytest.mark.parametrize("event", ["its model is removed", "an operator stops it"])
def test_no_room_is_kept_for_what_is_not_to_run(event: str) -> None:
    other = a_model("w", least=0, gb=10.0)
    fleet, old = in_place(other)
    fleet.handle(a_word(old, ShardState.ENDED), 73.0)
    fleet.handle(a_word(the_replica(fleet).shard, ShardState.ENDED, cause="bad flag"), 74.0)
    wake(fleet, until=74.0)
    assert of_each(fleet)["w"] == []
    gone = CatalogChanged(models=(other,)) if event == "its model is removed" else ModelsHeld(models=frozenset({M}))
    fleet.handle(gone, 75.0)
    wake(fleet, until=75.0)
    assert of_each(fleet)["w"] == [ShardState.PLACED]


def test_no_room_is_kept_for_what_loads_on_demand_and_fails() -> None:
    first, second = (a_model(name, least=0, gb=10.0, source=f"/{name}") for name in "ab")
    fleet, _ = a_fleet(first, second)
    shard = the_shard(fleet.handle(Demand(model=first.name, waiting=1), 1.0))
    fleet.handle(Demand(model=second.name, waiting=1), 2.0)
    effects = fleet.handle(a_word(shard, ShardState.ENDED, cause="no"), 3.0)
    effects += wake(fleet, until=3.0)
    assert the_shard(effects).model.name == "b"


def test_no_room_is_kept_for_what_is_not_tried_again_for_long() -> None:
    fleet, effects = a_fleet(OLD)
    now = 0.0
    for _ in range(5):
        now += 600.0
        wake(fleet, until=now)
        fleet.handle(a_word(the_replica(fleet).shard, ShardState.ENDED, cause="no"), now)
    assert fleet.backing_off(M)[N1] - now > RESERVED_SECONDS
    effects = fleet.handle(CatalogChanged(models=(OLD, a_model("b", gb=10.0))), now + 1.0)
    assert the_shard(effects).model.name == "b"


def test_what_is_back_in_its_room_takes_it_once() -> None:
    small = a_model("w", least=0, gb=6.0)
    fleet, old = in_place(a_model("big", least=0, gb=10.0))
    fleet.handle(a_word(old, ShardState.ENDED), 73.0)
    fleet.handle(CatalogChanged(models=(NEW, small)), 74.0)
    effects = fleet.handle(Demand(model=small.name, waiting=1), 75.0)
    effects += wake(fleet, until=75.0)
    assert of_each(fleet) == {"m": [ShardState.PLACED], "w": [ShardState.PLACED]}
