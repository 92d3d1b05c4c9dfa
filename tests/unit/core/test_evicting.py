from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from fleets import (
    N1,
    PAIR,
    a_fleet,
    a_gpu_node,
    a_model,
    a_node,
    a_wide_model,
    a_word,
    announced,
    desires,
    drained,
    drains,
    texts,
    the_replica,
    the_shard,
    wake,
)

from llmgw.core.costs import OFTEN
from llmgw.core.crews import STOPPING_SECONDS
from llmgw.core.effects import Drain, Effect, Happening
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    FactsKnown,
    ModelsHeld,
    NodeLost,
    NodeRegistered,
    NodeReported,
    RulesChanged,
    Stopping,
    Wakeup,
)
from llmgw.core.evicting import RESIDENCY_SECONDS
from llmgw.core.fleet import Fleet
from llmgw.core.learned import Fact, make_key
from llmgw.core.model import ANY_CLASS, Model, ModelName, Profile
from llmgw.core.node import Gpu
from llmgw.core.placement import Rejected
from llmgw.core.planning import BACKSTOP_SECONDS
from llmgw.core.replica import ReplicaId, ShardSpec, ShardState

A, B, C = ModelName("a"), ModelName("b"), ModelName("c")


# Which one


ROOM = a_model("z", least=0, gb=10.0, source="/z")


def all_idle(*idle: tuple[str, float, float], gb: float = 10.0, small: str = "") -> Fleet:
    """Each of these has a node to itself, and nobody asks for it any more since it was ready: its name, what loads of
    it have taken, and when it was ready. The ``small`` ones make room for 4 GB."""
    models = [a_model(name, least=0, gb=4.0 if name in small else gb, source=f"/{name}") for name, _, _ in idle]
    fleet, _ = a_fleet(*models, ROOM, nodes=[])
    facts = [
        Fact(key=make_key(model, model.profiles[0], "", ""), load_seconds=seconds)
        for model, (_, seconds, _) in zip(models, idle, strict=True)
    ]
    fleet.handle(FactsKnown(facts=tuple(facts)), 0.0)
    for model, (name, _, since) in zip(models, idle, strict=True):
        fleet.handle(NodeRegistered(node=a_node(name, memory_gb=4.0 if name in small else gb)), since)
        fleet.handle(Demand(model=model.name, waiting=1), since)
        wake(fleet, until=since)
        fleet.handle(a_word(the_replica(fleet, model.name).shard, ShardState.READY), since)
        fleet.handle(Demand(model=model.name), since)
        wake(fleet, until=since)
    return fleet


def test_the_cheapest_to_load_again_goes_and_of_equals_the_longest_idle() -> None:
    fleet = all_idle(("c", 7.0, 2.0), ("b", 7.0, 3.0), ("a", 9.0, 4.0), ("d", 8.0, 5.0))
    assert fleet.would_evict(ROOM, 200.0) == "rep-c-1"
    fleet = all_idle(("b", 7.0, 3.0), ("a", 9.0, 4.0))
    assert fleet.would_evict(ROOM, 200.0) == "rep-b-1"


def test_none_goes_whose_room_is_not_enough() -> None:
    fleet = all_idle(("a", 1.0, 1.0), ("b", 2.0, 2.0), small="a")
    assert fleet.would_evict(ROOM, 200.0) == "rep-b-1"
    assert all_idle(("a", 1.0, 1.0), small="a").would_evict(ROOM, 200.0) == math.inf
    assert all_idle().would_evict(ROOM, 200.0) == math.inf


def test_one_that_may_not_go_yet_is_waited_for_unless_another_goes_now() -> None:
    idle = [("b", 2.0, 20.0), ("a", 1.0, 30.0), ("c", 3.0, 40.0)]
    assert all_idle(*idle).would_evict(ROOM, 100.0) == 20.0 + RESIDENCY_SECONDS
    assert all_idle(*idle, small="b").would_evict(ROOM, 100.0) == 30.0 + RESIDENCY_SECONDS
    # (dear as it is)
    assert all_idle(("d", 9.0, -30.0), *idle).would_evict(ROOM, 100.0) == "rep-d-1"


def test_one_that_goes_by_itself_before_it_has_stayed_is_waited_for_no_longer_than_that() -> None:
    brief = a_model("a", least=0, gb=10.0)
    brief = replace(brief, scaling=replace(brief.scaling, idle_timeout_seconds=30.0))
    fleet, _ = a_fleet(brief, ROOM)
    fleet.handle(a_word(the_shard(fleet.handle(Demand(model=A, waiting=1), 0.0)), ShardState.READY), 1.0)
    fleet.handle(Demand(model=A), 1.0)
    assert fleet.would_evict(ROOM, 20.0) == 31.0
    assert drains(fleet.handle(Demand(model=ModelName("z"), waiting=1), 20.0)) == []
    assert [drain.replica for drain in drains(wake(fleet, until=31.0))] == ["rep-a-1"]


# Models that take turns


def a_turn(*others: Model, memory_gb: float = 16.0) -> tuple[Fleet, ShardSpec]:
    """``a`` takes 10 GB of a node's 16, is ready since 1, and nobody asks for it any more; the others load on demand
    too."""
    models = (a_model("a", least=0, gb=10.0), *others)
    fleet, _ = a_fleet(*models, nodes=[a_node(memory_gb=memory_gb)])
    shard = the_shard(fleet.handle(Demand(model=A, waiting=1), 0.0))
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    fleet.handle(Demand(model=A, asked=True), 1.0)
    fleet.handle(Wakeup(), 11.0)
    return fleet, shard


OTHER = a_model("b", least=0, gb=10.0)


def wait(fleet: Fleet, name: ModelName = B, now: float = 200.0) -> list[Drain]:
    """Somebody begins to wait for this model; what is drained for it."""
    return drains(fleet.handle(Demand(model=name, waiting=1), now))


def test_an_idle_model_makes_way_for_one_that_somebody_waits_for() -> None:
    fleet, old = a_turn(OTHER)
    effects = fleet.handle(Demand(model=B, waiting=1), 200.0)
    (said,) = announced(effects)
    assert (said.text, said.what) == ("rep-a-1 on n1 is to stop: it is idle, and makes way for b", Happening.EVICTED)
    assert fleet.ready(A) == ()
    (drain,) = drains(effects)
    (desire,) = desires(fleet.handle(drained(drain), 200.1))
    assert desire.shards == ()
    # its memory is free when it has ended, and not before
    assert desires(fleet.handle(Wakeup(), 210.0)) == []
    new = the_shard(fleet.handle(a_word(old, ShardState.ENDED), 211.0))
    assert (new.model.name, new.epoch) == (B, 1)


def test_a_model_that_is_always_to_run_is_made_room_for_too() -> None:
    fleet, _ = a_turn()
    effects = fleet.handle(CatalogChanged(models=(a_model("a", least=0, gb=10.0), a_model("b", gb=10.0))), 200.0)
    assert [drain.replica for drain in drains(effects)] == ["rep-a-1"]


def test_the_gpus_of_what_made_way_are_used_when_the_device_says_that_their_memory_is_free() -> None:
    profile = Profile(name="p", engine="e", gpu_class="h100-80g")
    one, other = (replace(a_wide_model(profile, least=0), name=name) for name in (A, B))
    node = a_gpu_node("n1", gpus=1)
    fleet, _ = a_fleet(one, other, nodes=[node])
    old = the_shard(fleet.handle(Demand(model=A, waiting=1), 0.0))
    fleet.handle(a_word(old, ShardState.READY), 1.0)
    fleet.handle(Demand(model=A), 1.0)
    (drain,) = wait(fleet)
    fleet.handle(drained(drain), 201.0)
    effects = fleet.handle(a_word(old, ShardState.ENDED), 202.0)
    new = the_shard(effects)
    assert (new.model.name, new.gpus) == (B, ("GPU-n1-0",))


def test_one_that_has_just_loaded_stays_for_two_minutes_and_then_makes_way() -> None:
    fleet, _ = a_turn(OTHER)
    assert wait(fleet, now=20.0) == []
    # whoever waited is told to come back
    fleet.handle(Demand(model=B, asked=True), 80.0)
    assert drains(wake(fleet, until=120.9)) == []
    assert [drain.replica for drain in drains(wake(fleet, until=121.0))] == ["rep-a-1"]


def test_two_that_take_turns_change_no_more_often_than_that() -> None:
    fleet, shard = a_turn(OTHER)
    swaps, now = [], 11.0
    for second in range(12, 1212):
        now = float(second)
        for name in (A, B):
            # both are asked for all the time, and answered at once when they can be
            demand = Demand(model=name, asked=True) if fleet.ready(name) else Demand(model=name, waiting=1)
            effects = fleet.handle(demand, now)
            for drain in drains(effects):
                swaps.append(now)
                fleet.handle(drained(drain), now)
                effects = fleet.handle(a_word(the_replica(fleet, shard.model.name).shard, ShardState.ENDED), now)
            if desires(effects) and desires(effects)[-1].shards:
                shard = the_shard(effects)
                fleet.handle(a_word(shard, ShardState.READY), now)
    assert len(swaps) in (9, 10)
    assert all(later - earlier >= RESIDENCY_SECONDS for earlier, later in pairwise(swaps))


def test_of_three_that_take_turns_each_has_its_turn() -> None:
    fleet, shard = a_turn(OTHER, a_model("c", least=0, gb=10.0))
    turns: list[ModelName] = []
    for second in range(12, 1212):
        now = float(second)
        for name in (A, B, C):
            # each is asked for all the time: answered at once, or told to come back
            effects = fleet.handle(Demand(model=name, asked=True), now)
            effects += wake(fleet, now)
            for drain in drains(effects):
                effects += fleet.handle(drained(drain), now)
                effects += fleet.handle(a_word(the_replica(fleet, shard.model.name).shard, ShardState.ENDED), now)
            if desires(effects) and desires(effects)[-1].shards:
                shard = the_shard(effects)
                turns.append(shard.model.name)
                fleet.handle(a_word(shard, ShardState.READY), now)
    assert len(turns) >= 8
    assert all({*three} == {A, B, C} for three in zip(turns, turns[1:], turns[2:], strict=False))


@pytest.mark.parametrize(
    "word",
    [
        Demand(model=A, in_flight={ReplicaId("rep-a-1"): 1}),
        Demand(model=A, waiting=1),
    ],
    ids=["somebody is answered by it", "somebody waits for it"],
)
def test_one_that_is_in_use_does_not_make_way(word: Demand) -> None:
    fleet, _ = a_turn(OTHER)
    fleet.handle(word, 150.0)
    assert wait(fleet) == []
    assert isinstance(fleet.verdict(B), Rejected)
    # and when it is not any more, it does
    effects = fleet.handle(Demand(model=A), 210.0)
    effects += fleet.handle(Wakeup(), 210.0)
    assert [drain.replica for drain in drains(effects)] == ["rep-a-1"]


def test_one_that_is_always_to_run_does_not_make_way() -> None:
    fleet, effects = a_fleet(a_model("a", gb=10.0), OTHER)
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    assert wait(fleet, now=5000.0) == []


def test_one_that_would_not_make_enough_room_stays() -> None:
    fleet, _ = a_turn(a_model("b", least=0, gb=16.5))
    assert wait(fleet) == []
    assert fleet.would_evict(a_model("b", least=0, gb=16.5), 200.0) == math.inf


def test_one_that_can_not_be_reached_is_no_room() -> None:
    fleet, _ = a_turn(OTHER)
    fleet.handle(RulesChanged(replace_after=5000.0, brake=600.0), 11.0)
    fleet.handle(NodeLost(node=N1), 100.0)
    assert wait(fleet) == []


def test_a_group_does_not_make_way() -> None:
    pair = replace(a_wide_model(least=0), name=A)
    profile = Profile(name="p", engine="e", gpu_class="h100-80g", tp=8)
    single = replace(a_wide_model(profile, least=0), name=B)
    fleet, _ = a_fleet(pair, single, nodes=[a_gpu_node("n1"), a_gpu_node("n2")])
    effects = fleet.handle(Demand(model=A, waiting=1), 0.0)
    shards = [shard for desire in desires(effects) for shard in desire.shards]
    for state in (ShardState.PREPARED, ShardState.READY):
        for shard in shards:
            fleet.handle(a_word(shard, state), 1.0)
    fleet.handle(Demand(model=A), 1.0)
    assert len(fleet.ready(A)) == 1
    assert wait(fleet) == []


def test_a_group_that_somebody_waits_for_is_made_room_for_where_one_replica_is_enough() -> None:
    profile = Profile(name="p", engine="e", gpu_class="h100-80g", tp=8)
    single = replace(a_wide_model(profile, least=0), name=A)
    pair = replace(a_wide_model(least=0), name=B)
    fleet, _ = a_fleet(single, pair, nodes=[a_gpu_node("n1"), a_gpu_node("n2")])
    old = the_shard([e for e in desires(fleet.handle(Demand(model=A, waiting=1), 0.0)) if e.shards])
    fleet.handle(a_word(old, ShardState.READY), 1.0)
    fleet.handle(Demand(model=A), 1.0)
    (drain,) = wait(fleet)
    fleet.handle(drained(drain), 201.0)
    effects = fleet.handle(a_word(old, ShardState.ENDED), 202.0)
    assert sorted(desire.node for desire in desires(effects)) == ["n1", "n2"]


def test_the_cheapest_to_load_again_goes_by_what_loads_have_taken() -> None:
    models = [a_model(name, least=0, gb=5.0, source=f"/{name}") for name in "abc"]
    fleet, _ = a_fleet(*models, a_model("d", least=0, gb=5.0))
    seconds = {"a": 90.0, "b": 20.0, "c": 40.0}
    facts = [Fact(key=make_key(model, model.profiles[0], "", ""), load_seconds=seconds[model.name]) for model in models]
    fleet.handle(FactsKnown(facts=tuple(facts)), 0.0)
    for model in models:
        effects = fleet.handle(Demand(model=model.name, waiting=1), 0.0)
        shard = next(shard for shard in desires(effects)[-1].shards if shard.model.name == model.name)
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
        fleet.handle(Demand(model=model.name), 1.0)
    assert fleet.would_evict(a_model("d", least=0, gb=5.0), 200.0) == "rep-b-1"
    assert [drain.replica for drain in wait(fleet, ModelName("d"))] == ["rep-b-1"]


def test_one_goes_at_a_time() -> None:
    models = [a_model(name, least=0, gb=8.0, source=f"/{name}") for name in "ab"]
    fleet, _ = a_fleet(*models, a_model("c", least=0, gb=8.0))
    for model in models:
        effects = fleet.handle(Demand(model=model.name, waiting=1), 0.0)
        shard = next(shard for shard in desires(effects)[-1].shards if shard.model.name == model.name)
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
        fleet.handle(Demand(model=model.name), 1.0)
    (drain,) = wait(fleet, C)
    # it is asked for again and again while that goes on
    assert wait(fleet, C, 201.0) == []
    fleet.handle(drained(drain), 202.0)
    assert wait(fleet, C, 203.0) == []
    assert len(fleet.ready(A)) + len(fleet.ready(B)) == 1


def test_the_room_goes_to_the_one_that_it_was_made_for() -> None:
    third = a_model("c", least=0, gb=10.0)
    fleet, _ = a_fleet(third, a_model("a", least=0, gb=10.0), OTHER)
    now = 0.0
    for name in (C, A):
        effects = fleet.handle(Demand(model=name, waiting=1), now)
        for drain in drains(effects):
            fleet.handle(drained(drain), now)
            effects = fleet.handle(a_word(the_replica(fleet, C).shard, ShardState.ENDED), now)
        old = the_shard(effects)
        fleet.handle(a_word(old, ShardState.READY), now + 1.0)
        fleet.handle(Demand(model=name), now + 1.0)
        now += 300.0
    (drain,) = wait(fleet, B, now)
    # c has been here before, and asks as soon as it can
    wait(fleet, C, now + 1.0)
    fleet.handle(drained(drain), now + 2.0)
    assert the_shard(fleet.handle(a_word(old, ShardState.ENDED), now + 3.0)).model.name == B


def test_a_load_that_nobody_wants_any_more_gives_way_at_once() -> None:
    fleet, _ = a_fleet(a_model("a", least=0, gb=10.0), OTHER)
    old = the_shard(fleet.handle(Demand(model=A, waiting=1), 0.0))
    fleet.handle(a_word(old, ShardState.LOADING), 1.0)
    # whoever waited has hung up
    fleet.handle(Demand(model=A), 2.0)
    effects = fleet.handle(Demand(model=B, waiting=1), 3.0)
    assert texts(effects) == ["rep-a-1 on n1 is to stop: nobody waits for it any more, and it makes way for b"]
    assert drains(effects) == []
    assert [desire.shards for desire in desires(effects)] == [()]
    assert the_shard(fleet.handle(a_word(old, ShardState.ENDED), 4.0)).model.name == B


def test_a_load_that_somebody_still_waits_for_goes_on() -> None:
    fleet, _ = a_fleet(a_model("a", least=0, gb=10.0), OTHER)
    old = the_shard(fleet.handle(Demand(model=A, waiting=1), 0.0))
    fleet.handle(a_word(old, ShardState.LOADING), 1.0)
    effects = fleet.handle(Demand(model=B, waiting=1), 3.0)
    assert texts(effects) == ["no node can run b now (1 not_enough_memory)"]
    # told to come back, they will
    fleet.handle(Demand(model=A, asked=True), 4.0)
    assert desires(fleet.handle(Demand(model=B, waiting=2), 5.0)) == []


def test_what_serves_has_nobody_make_way_for_another_of_it() -> None:
    model = replace(a_model("b", gb=6.0), scaling=replace(OTHER.scaling, max=2, target=1))
    fleet, _ = a_turn(model)
    effects = fleet.handle(Demand(model=B, waiting=1), 200.0)
    new = next(shard for shard in desires(effects)[-1].shards if shard.model.name == B)
    fleet.handle(a_word(new, ShardState.READY), 201.0)
    fleet.handle(Demand(model=B, in_flight={new.replica: 2}), 202.0)
    assert drains(fleet.handle(Wakeup(), 220.0)) == []
    assert isinstance(fleet.verdict(B), Rejected)


def test_what_makes_way_is_not_kept_when_somebody_asks_for_it_again() -> None:
    fleet, old = a_turn(OTHER)
    (drain,) = wait(fleet)
    fleet.handle(Demand(model=A, waiting=1), 200.5)
    assert fleet.ready(A) == ()
    fleet.handle(drained(drain), 201.0)
    effects = fleet.handle(a_word(old, ShardState.ENDED), 202.0)
    assert the_shard(effects).model.name == B


def test_a_node_with_room_is_taken_before_anybody_makes_way() -> None:
    fleet, _ = a_turn(OTHER)
    fleet.handle(NodeRegistered(node=a_node("n2")), 150.0)
    effects = fleet.handle(Demand(model=B, waiting=1), 200.0)
    assert (drains(effects), the_shard(effects).node) == ([], "n2")


def test_who_would_make_way_is_told_to_who_looks_on() -> None:
    fleet, _ = a_turn(OTHER)
    assert fleet.would_evict(OTHER, 20.0) == 121.0
    assert fleet.would_evict(OTHER, 121.0) == "rep-a-1"
    assert fleet.would_evict(a_model("a", least=0, gb=10.0), 121.0) == math.inf


def test_what_waits_for_room_gets_it_elsewhere_when_that_comes_first() -> None:
    fleet, _ = a_turn(OTHER)
    assert wait(fleet, now=20.0) == []
    effects = fleet.handle(NodeReported(node=a_node(memory_gb=32.0)), 30.0)
    assert [spec.model.name for spec in desires(effects)[-1].shards] == [A, B]
    assert drains(fleet.handle(Wakeup(), 121.0)) == []


def test_another_class_of_card_is_no_room() -> None:
    card = Gpu(uuid="GPU-x", index=0, gpu_class="a100-40g", name="A100", memory_gb=42.0, memory_used_gb=0.0)
    one = replace(a_wide_model(Profile(name="p", engine="e", gpu_class="a100-40g"), least=0), name=A)
    two = replace(a_wide_model(Profile(name="p", engine="e", gpu_class="h100-80g"), least=0), name=B)
    fleet, _ = a_fleet(one, two, nodes=[replace(a_gpu_node("n1"), gpus=(card,))])
    old = the_shard(fleet.handle(Demand(model=A, waiting=1), 0.0))
    fleet.handle(a_word(old, ShardState.READY), 1.0)
    fleet.handle(Demand(model=A), 1.0)
    assert wait(fleet) == []


def test_while_everything_stops_nothing_is_placed_in_the_room_that_was_made() -> None:
    fleet, old = a_turn(OTHER)
    wait(fleet)
    fleet.handle(Stopping(), 201.0)
    assert desires(fleet.handle(a_word(old, ShardState.ENDED), 202.0)) == []
    assert fleet.idle()


def test_nobody_makes_way_for_one_that_is_not_tried_there_for_a_while() -> None:
    fleet, _ = a_turn(a_model("b", least=0, gb=6.0), a_model("c", least=0, gb=6.0))
    shard = desires(fleet.handle(Demand(model=B, waiting=1), 200.0))[-1].shards[-1]
    fleet.handle(a_word(shard, ShardState.ENDED, cause="no"), 201.0)
    # somebody else has the room meanwhile
    assert len(desires(fleet.handle(Demand(model=C, waiting=1), 202.0))[-1].shards) == 2
    assert drains(fleet.handle(Demand(model=B, waiting=2), 203.0)) == []
    assert [drain.replica for drain in drains(wake(fleet, until=206.0))] == ["rep-a-1"]


def two_idle(*others: Model, most: int = 1) -> tuple[Fleet, list[ShardSpec]]:
    """``a`` and ``b`` take 8 of a node's 16 GB each, and nobody asks for them any more."""
    models = [a_model(name, least=0, most=most, gb=8.0, source=f"/{name}") for name in "ab"]
    fleet, _ = a_fleet(*models, *others)
    shards = []
    for model in models:
        effects = fleet.handle(Demand(model=model.name, waiting=1), 0.0)
        shards.append(next(shard for shard in desires(effects)[-1].shards if shard.model.name == model.name))
        fleet.handle(a_word(shards[-1], ShardState.READY), 1.0)
        fleet.handle(Demand(model=model.name), 1.0)
    return fleet, shards


def test_no_second_one_makes_way_while_the_first_answers_a_last_request() -> None:
    fleet, _ = two_idle(a_model("c", least=0, gb=8.0))
    (drain,) = wait(fleet, C)
    # it came just before the word that it is to stop
    fleet.handle(Demand(model=A, in_flight={drain.replica: 1}), 200.1)
    assert wait(fleet, C, 201.0) == []
    assert drains(wake(fleet, until=400.0)) == []
    assert (len(fleet.ready(A)), len(fleet.ready(B))) == (0, 1)


def test_the_last_request_of_one_that_is_drained_is_no_reason_to_load_another() -> None:
    fleet, _ = two_idle(a_model("c", least=0, gb=8.0), most=2)
    (drain,) = wait(fleet, C)
    effects = fleet.handle(Demand(model=A, in_flight={drain.replica: 1}), 200.1)
    effects += wake(fleet, until=400.0)
    assert drains(effects) == []
    assert desires(effects) == []


def test_the_room_of_one_that_still_answers_is_not_waited_for_by_another_model() -> None:
    fleet, _ = two_idle(a_model("c", least=0, gb=8.0), a_model("d", least=0, gb=8.0))
    (drain,) = wait(fleet, C)
    fleet.handle(Demand(model=A, in_flight={drain.replica: 1}), 200.1)
    effects = fleet.handle(Demand(model=ModelName("d"), waiting=1), 201.0)
    effects += wake(fleet, until=201.0)
    assert [other.replica for other in drains(effects)] == ["rep-b-1"]


def test_of_an_idle_one_and_a_load_that_nobody_wants_the_load_gives_way() -> None:
    fleet, _ = a_turn(a_model("b", least=0, gb=4.0), a_model("c", least=0, gb=5.0), memory_gb=16.0)
    effects = fleet.handle(Demand(model=B, waiting=1), 200.0)
    shard = next(shard for shard in desires(effects)[-1].shards if shard.model.name == B)
    fleet.handle(a_word(shard, ShardState.LOADING), 201.0)
    fleet.handle(Demand(model=B), 202.0)
    effects = fleet.handle(Demand(model=C, waiting=1), 203.0)
    assert texts(effects) == ["rep-b-1 on n1 is to stop: nobody waits for it any more, and it makes way for c"]


def test_what_is_about_to_end_is_not_waited_for_where_its_room_is_not_enough() -> None:
    fleet, _ = a_turn(OTHER)
    models = (a_model("a", least=0, gb=10.0), OTHER)
    fleet.handle(CatalogChanged(models=(*models, a_model("small", gb=2.0))), 12.0)
    fleet.handle(a_word(the_replica(fleet, ModelName("small")).shard, ShardState.LOADING), 13.0)
    assert [len(desire.shards) for desire in desires(fleet.handle(CatalogChanged(models=models), 199.0))] == [1]
    assert [drain.replica for drain in wait(fleet)] == ["rep-a-1"]


def test_nobody_makes_way_while_one_that_is_drained_for_another_reason_is_about_to_end() -> None:
    fleet, shards = two_idle(a_model("c", least=0, gb=8.0))
    (drain,) = drains(fleet.handle(ModelsHeld(models=frozenset({A})), 200.0))
    assert wait(fleet, C, 200.1) == []
    fleet.handle(drained(drain), 200.2)
    assert wait(fleet, C, 201.0) == []
    effects = fleet.handle(a_word(shards[0], ShardState.ENDED), 202.0)
    effects += wake(fleet, until=202.0)
    assert {shard.model.name for shard in desires(effects)[-1].shards} == {B, C}


def test_one_that_was_told_to_stop_and_never_does_is_not_waited_for_for_ever() -> None:
    waits, gone = a_model("c", gb=10.0), a_model("gone", gb=10.0)
    fleet, effects = a_fleet(gone, OTHER)
    old = the_shard(effects)
    fleet.handle(a_word(old, ShardState.READY), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    fleet.handle(a_word(the_shard(fleet.handle(Demand(model=B, waiting=1), 3.0)), ShardState.READY), 4.0)
    fleet.handle(Demand(model=B, asked=True), 5.0)
    wake(fleet, until=200.0)
    (drain,) = drains(fleet.handle(CatalogChanged(models=(OTHER, waits)), 200.0))
    fleet.handle(drained(drain), 200.1)
    fleet.handle(a_word(old, ShardState.STOPPING), 200.2)
    # its end is waited for as long as that takes at most, and then another makes way
    assert drains(wake(fleet, until=200.0 + STOPPING_SECONDS)) == []
    effects = wake(fleet, until=200.2 + STOPPING_SECONDS + 2 * BACKSTOP_SECONDS)
    assert texts(effects)[-1] == "rep-b-1 on n2 is to stop: it is idle, and makes way for c"


def test_a_group_finds_the_one_whose_pair_is_free_among_many_whose_pair_is_not() -> None:
    profile = Profile(name="p", engine="e", gpu_class="h100-80g", tp=8)
    names = [f"s{number}" for number in range(9)]
    singles = [replace(a_wide_model(profile, least=0), name=ModelName(name), source=f"/{name}") for name in names]
    pair = replace(a_wide_model(least=0), name=B)
    nodes = [a_gpu_node(f"n{number + 1}", fabric=f"ib-{number // 2}") for number in range(10)]
    fleet, _ = a_fleet(*singles, pair, nodes=[])
    for node, model in zip(nodes, singles, strict=False):
        fleet.handle(NodeRegistered(node=node), 0.0)
        fleet.handle(Demand(model=model.name, waiting=1), 0.0)
        wake(fleet, until=0.0)
        fleet.handle(a_word(the_replica(fleet, model.name).shard, ShardState.READY), 1.0)
        fleet.handle(Demand(model=model.name), 1.0)
    fleet.handle(NodeRegistered(node=nodes[-1]), 2.0)
    wake(fleet, until=2.0)
    assert [drain.replica for drain in wait(fleet)] == ["rep-s8-1"]


def test_one_that_fails_again_and_again_pushes_out_nobody_more() -> None:
    fleet, _ = a_turn(OTHER)
    evicted = 0
    for second in range(200, 3800):
        now = float(second)
        effects: list[Effect] = []
        for name in (A, B):
            waits = not fleet.ready(name) and bool(second % 20)
            effects += fleet.handle(Demand(model=name, waiting=int(waits), asked=True), now)
        effects += wake(fleet, until=now)
        for drain in drains(effects):
            evicted += 1
            fleet.handle(drained(drain), now)
        for replica in [replica for seen in fleet.statistics().models for replica in seen.replicas]:
            if replica.state is ShardState.STOPPING or (replica.model == B and replica.state is ShardState.PLACED):
                fleet.handle(a_word(replica.shard, ShardState.ENDED, cause="bad"), now)
            elif replica.state is ShardState.PLACED:
                fleet.handle(a_word(replica.shard, ShardState.READY), now)
    assert evicted == OFTEN


def test_nobody_makes_way_for_a_group_whose_nodes_would_have_cards_of_two_classes() -> None:
    single = replace(a_wide_model(Profile(name="p", engine="e", gpu_class="h100-80g", tp=8), least=0), name=A)
    pair = replace(a_wide_model(replace(PAIR, gpu_class=ANY_CLASS), least=0), name=B)
    other = a_gpu_node("n2")
    assert other.gpus is not None
    other = replace(other, gpus=tuple(replace(gpu, gpu_class="a100-80g") for gpu in other.gpus))
    fleet, _ = a_fleet(single, pair, nodes=[a_gpu_node("n1"), other])
    effects = fleet.handle(Demand(model=A, waiting=1), 0.0)
    fleet.handle(a_word(next(e.shards[0] for e in desires(effects) if e.shards), ShardState.READY), 1.0)
    fleet.handle(Demand(model=A), 1.0)
    assert wait(fleet) == []
    # (of one class they do)
    fleet.handle(NodeRegistered(node=a_gpu_node("n3")), 201.0)
    assert [drain.replica for drain in drains(wake(fleet, until=202.0))] == ["rep-a-1"]


def test_nobody_makes_way_for_what_has_a_place_in_a_moment() -> None:
    fleet, _ = a_turn(OTHER)
    fleet.handle(NodeRegistered(node=a_node("n2")), 150.0)
    (shard,) = (spec for each in desires(fleet.handle(Demand(model=B, waiting=1), 200.0)) for spec in each.shards)
    assert shard.node == "n2"
    effects = fleet.handle(a_word(shard, ShardState.ENDED, cause="no"), 201.0)
    effects += wake(fleet, until=205.9)
    assert drains(effects) == []
    effects = wake(fleet, until=206.0)
    assert (drains(effects), the_replica(fleet, B).nodes) == ([], ("n2",))


def test_the_room_that_was_made_for_a_model_that_is_removed_is_anybodys() -> None:
    third = a_model("c", least=0, gb=10.0)
    fleet, old = a_turn(OTHER, third)
    (drain,) = wait(fleet)
    fleet.handle(CatalogChanged(models=(a_model("a", least=0, gb=10.0), third)), 200.1)
    fleet.handle(drained(drain), 200.2)
    fleet.handle(a_word(old, ShardState.ENDED), 201.0)
    assert the_shard(fleet.handle(Demand(model=C, waiting=1), 202.0)).model.name == C


def test_the_next_one_of_a_model_that_serves_is_no_load_that_nobody_wants() -> None:
    first = a_model("a", least=0, gb=4.0)
    fleet, _ = a_fleet(first, a_model("b", least=0, gb=10.0), nodes=[a_node(memory_gb=16.0)])
    old = the_shard(fleet.handle(Demand(model=A, waiting=1), 0.0))
    fleet.handle(a_word(old, ShardState.READY), 1.0)
    fleet.handle(Demand(model=A, in_flight={old.replica: 1}), 190.0)
    fleet.handle(CatalogChanged(models=(replace(first, source="/new"), a_model("b", least=0, gb=10.0))), 191.0)
    fleet.handle(Demand(model=A, answered=True), 193.0)
    effects = fleet.handle(Demand(model=B, waiting=1), 194.0)
    # (the one that is idle goes, and is replaced by then)
    assert [drain.replica for drain in drains(effects)] == [old.replica]
    (model, _) = fleet.statistics().models
    assert [replica.state for replica in model.replicas] == [ShardState.READY, ShardState.PLACED]
