from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.core.effects import Announce, Desire, Effect, WakeAt
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Event,
    NodeLost,
    NodeRegistered,
    NodeReported,
    NodesExpected,
    ShardChanged,
    Stopping,
    Wakeup,
)
from llmgw.core.fleet import DEMAND_SECONDS, FEW, UNHEARD_SECONDS, Fleet
from llmgw.core.model import Model, ModelName, Profile, Scaling
from llmgw.core.node import EngineFound, Node, NodeId
from llmgw.core.placement import Placement, Rejected
from llmgw.core.rejection import Reason
from llmgw.core.replica import Endpoint, Load, Replica, ReplicaId, ShardId, ShardReport, ShardSpec, ShardState
from llmgw.core.scaling import wanted

M = ModelName("m")
N1, N2 = NodeId("n1"), NodeId("n2")
ENDPOINT = Endpoint(host="127.0.0.1", port=18000, served_name="m")


def a_model(name: str = "m", least: int = 1, most: int = 1, gb: float | None = 4.0, source: str = "/m.gguf") -> Model:
    profile = Profile(name="p", engine="e", min_memory_gb=gb)
    return Model(name=ModelName(name), source=source, scaling=Scaling(min=least, max=most), profiles=(profile,))


def a_node(name: str = "n1", memory_gb: float = 16.0, engines: Sequence[str] = ("e",)) -> Node:
    return Node(
        id=NodeId(name),
        cores=4,
        cpu_flags=frozenset(),
        memory_gb=memory_gb,
        memory_available_gb=memory_gb,
        engines=tuple(EngineFound(engine=engine, program=(engine,)) for engine in engines),
    )


def a_fleet(*models: Model, nodes: Sequence[Node] = (a_node(),), now: float = 0.0) -> tuple[Fleet, list[Effect]]:
    """A fleet that has planned all its models; the effects are those since the nodes came."""
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=models), now)
    fleet.handle(Wakeup(), now)
    effects = [effect for node in nodes for effect in fleet.handle(NodeRegistered(node=node), now)]
    for _ in models:
        effects += fleet.handle(Wakeup(), now)
    return fleet, effects


def desires(effects: Sequence[Effect]) -> list[Desire]:
    return [effect for effect in effects if isinstance(effect, Desire)]


def announced(effects: Sequence[Effect]) -> list[Announce]:
    return [effect for effect in effects if isinstance(effect, Announce)]


def wakes(effects: Sequence[Effect]) -> list[float]:
    return [effect.at for effect in effects if isinstance(effect, WakeAt)]


def the_shard(effects: Sequence[Effect]) -> ShardSpec:
    (shard,) = desires(effects)[-1].shards
    return shard


def a_word(spec: ShardSpec, state: ShardState, **facts: object) -> ShardChanged:
    if state is ShardState.READY:
        facts = {"endpoint": ENDPOINT, **facts}
    report = ShardReport(shard=spec.id, replica=spec.replica, epoch=spec.epoch, state=state, **facts)  # type: ignore[arg-type]
    return ShardChanged(node=spec.node, report=report)


def the_replica(fleet: Fleet, name: ModelName = M) -> Replica:
    (replica,) = next(seen.replicas for seen in fleet.statistics().models if seen.model.name == name)
    return replica


def a_running(model: Model, epoch: int = 7, number: int = 1, node: NodeId = N1) -> ShardSpec:
    return ShardSpec(
        id=ShardId(f"shd-{model.name}-{number}-0"),
        replica=ReplicaId(f"rep-{model.name}-{number}"),
        epoch=epoch,
        node=node,
        model=model,
        profile=model.profiles[0],
    )


def found(spec: ShardSpec, state: ShardState = ShardState.READY) -> tuple[ShardSpec, ShardReport]:
    return spec, a_word(spec, state).report


# From the first word to the first answer


def test_a_wanted_model_is_placed_when_a_node_comes() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    assert (shard.id, shard.replica, shard.epoch, shard.node) == ("shd-m-1-0", "rep-m-1", 1, N1)
    assert desires(effects)[-1].revision == 1
    assert announced(effects)[-1].text == "rep-m-1 goes to n1 by profile 'p' (epoch 1)"
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


def test_a_replica_is_routable_from_ready_on() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    for state in (ShardState.LAUNCHING, ShardState.LOADING):
        fleet.handle(a_word(shard, state, progress="half"), 3.0)
        assert fleet.ready(M) == ()
    effects = fleet.handle(a_word(shard, ShardState.READY), 12.0)
    (replica,) = fleet.ready(M)
    assert (replica.id, replica.endpoint, replica.since) == ("rep-m-1", ENDPOINT, 12.0)
    assert [announce.text for announce in announced(effects)] == ["rep-m-1 is ready on n1 after 12s"]
    assert fleet.ready(M) is fleet.ready(M)


def test_progress_and_load_are_kept_and_announce_nothing() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.LOADING, progress="10 %"), 1.0)
    fleet.handle(a_word(shard, ShardState.LOADING, progress="60 %"), 2.0)
    replica = the_replica(fleet)
    assert (replica.progress, replica.since) == ("60 %", 1.0)
    fleet.handle(a_word(shard, ShardState.READY), 3.0)
    load = Load(running=2, waiting=1, cache_used=0.25, prompt_tokens=90, cached_tokens=60, steps=7)
    assert fleet.handle(a_word(shard, ShardState.READY, load=load, endpoint=None), 9.0) == []
    (replica,) = fleet.ready(M)
    assert (replica.load, replica.since, replica.endpoint) == (load, 3.0, ENDPOINT)
    # An engine that said it once and does not any more is not as busy as it was: nobody knows.
    fleet.handle(a_word(shard, ShardState.READY), 11.0)
    assert fleet.ready(M)[0].load == Load()


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
    shard = the_shard(fleet.handle(Demand(model=M), 10.0))
    assert shard.replica == "rep-m-1"
    assert desires(fleet.handle(Demand(model=M), 11.0)) == []


def test_demand_by_an_alias_counts_for_the_model() -> None:
    fleet, _ = a_fleet(replace(a_model(least=0), aliases=("alias",)))
    assert the_shard(fleet.handle(Demand(model=ModelName("alias")), 10.0)).model.name == M


@pytest.mark.parametrize("name", ["nobody", "off"])
def test_demand_for_what_is_unknown_or_switched_off_starts_nothing(name: str) -> None:
    fleet, _ = a_fleet(a_model("off", least=0, most=0))
    assert fleet.handle(Demand(model=ModelName(name)), 10.0) == []
    assert fleet.idle()


def test_a_model_that_fails_is_not_tried_for_ever_when_nobody_asks_any_more() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    shard = the_shard(fleet.handle(Demand(model=M), 0.0))
    at = DEMAND_SECONDS - 1.0
    effects = fleet.handle(a_word(shard, ShardState.ENDED), at)
    assert isinstance(fleet.verdict(M), Rejected)
    assert wakes(effects) == [at + 5.0]
    assert desires(fleet.handle(Wakeup(), at + 5.0)) == []
    assert fleet.verdict(M) is None
    assert the_replica(fleet).state is ShardState.ENDED
    shard = the_shard(fleet.handle(Demand(model=M), at + 50.0))
    assert (shard.replica, shard.epoch) == ("rep-m-1", 2)


# Failures


def test_a_failed_replica_tells_its_cause_and_is_tried_again_with_the_next_epoch() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    effects = fleet.handle(a_word(shard, ShardState.ENDED, cause="out of memory", lines=("l1", "l2")), 10.0)
    (announce,) = announced(effects)
    assert announce.text == "rep-m-1 ended on n1: out of memory (failure 1 in a row; not tried there for 5s)"
    assert announce.lines == ("l1", "l2")
    assert announce.warning
    assert desires(effects)[-1].shards == ()
    assert wakes(effects) == [15.0]
    replica = the_replica(fleet)
    assert (replica.state, replica.cause, replica.lines) == (ShardState.ENDED, "out of memory", ("l1", "l2"))
    assert fleet.idle()
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Rejected)
    assert [rejection.reason for rejection in verdict.rejections] == [Reason.BACKING_OFF]
    shard = the_shard(fleet.handle(Wakeup(), 15.0))
    assert (shard.replica, shard.epoch) == ("rep-m-1", 2)
    assert the_replica(fleet).state is ShardState.PLACED


def test_what_to_do_about_a_failure_is_kept_with_its_cause_and_announced() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY, load=Load(running=3, steps=9)), 1.0)
    facts = {"cause": "CUDA out of memory", "kind": "gpu_memory", "remedy": "give it a larger card"}
    (announce,) = announced(fleet.handle(a_word(shard, ShardState.ENDED, **facts), 10.0))
    assert announce.text == (
        "rep-m-1 ended on n1: CUDA out of memory (failure 1 in a row; not tried there for 5s); give it a larger card"
    )
    replica = the_replica(fleet)
    assert (replica.cause, replica.remedy) == ("CUDA out of memory", "give it a larger card")
    assert replica.kind == "gpu_memory"
    assert replica.load == Load()


@pytest.mark.parametrize(
    ("takes", "more"),
    [
        (1024, "; it takes 1024 tokens a request, and its model promises context_length 4096"),
        (4096, ""),
        (None, ""),
    ],
)
def test_an_engine_that_takes_less_than_its_model_promises_is_told(takes: int | None, more: str) -> None:
    fleet, effects = a_fleet(replace(a_model(), context_length=4096))
    shard = the_shard(effects)
    (announce,) = announced(fleet.handle(a_word(shard, ShardState.READY, context_length=takes), 1.0))
    assert announce.text == f"rep-m-1 is ready on n1 after 1s{more}"
    assert the_replica(fleet).context_length == takes


def test_a_model_that_promises_nothing_is_not_compared() -> None:
    fleet, effects = a_fleet(a_model())
    (announce,) = announced(fleet.handle(a_word(the_shard(effects), ShardState.READY, context_length=8), 1.0))
    assert announce.text == "rep-m-1 is ready on n1 after 1s"


def test_what_to_do_about_the_last_try_is_not_told_of_the_next() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED, cause="a", remedy="do b"), 10.0)
    shard = the_shard(fleet.handle(Wakeup(), 15.0))
    assert (the_replica(fleet).cause, the_replica(fleet).remedy) == (None, None)
    fleet.handle(a_word(shard, ShardState.ENDED, cause="c"), 16.0)
    assert (the_replica(fleet).cause, the_replica(fleet).remedy) == ("c", None)


def test_the_last_words_of_a_failure_are_told_when_its_cause_is_new() -> None:
    fleet, effects = a_fleet(a_model())
    now, told = 10.0, []
    for cause in ("a", "a", "b", "b", "a"):
        shard = the_shard(effects)
        effects = fleet.handle(a_word(shard, ShardState.ENDED, cause=cause, lines=("words",)), now)
        told.append(announced(effects)[-1].lines)
        now = wakes(effects)[-1]
        effects = fleet.handle(Wakeup(), now)
    assert told == [("words",), (), ("words",), (), ("words",)]


def test_a_wakeup_that_comes_early_asks_again() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED), 10.0)
    assert fleet.handle(Wakeup(), 14.5) == [WakeAt(at=15.0)]


def test_an_end_without_a_cause_is_still_told() -> None:
    fleet, effects = a_fleet(a_model())
    effects = fleet.handle(a_word(the_shard(effects), ShardState.ENDED), 10.0)
    assert "it gave no cause" in announced(effects)[0].text


def test_failures_in_a_row_wait_longer_and_health_begins_anew() -> None:
    fleet, effects = a_fleet(a_model())
    now, waits = 0.0, []
    for ready_seconds in (None, 1.0, 599.0, 600.0, None):
        shard = the_shard(effects)
        if ready_seconds is not None:
            fleet.handle(a_word(shard, ShardState.READY), now)
            now += ready_seconds
        (at,) = wakes(fleet.handle(a_word(shard, ShardState.ENDED), now))
        waits.append(at - now)
        now = at
        effects = fleet.handle(Wakeup(), now)
    assert waits == [5.0, 10.0, 20.0, 5.0, 10.0]


def test_health_counts_though_a_dying_engine_is_first_said_to_be_stopping() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED), 0.0)
    shard = the_shard(fleet.handle(Wakeup(), 5.0))
    fleet.handle(a_word(shard, ShardState.READY), 10.0)
    fleet.handle(a_word(shard, ShardState.STOPPING), 610.0)
    assert wakes(fleet.handle(a_word(shard, ShardState.ENDED), 612.0)) == [617.0]


def test_another_node_is_tried_at_once() -> None:
    fleet, effects = a_fleet(a_model(), nodes=[a_node("n1", 16.0), a_node("n2", 8.0)])
    shard = the_shard([effect for effect in desires(effects) if effect.shards])
    effects = fleet.handle(a_word(shard, ShardState.ENDED), 10.0)
    told = {desire.node: desire.shards for desire in desires(effects)}
    assert told[N1] == ()
    (again,) = told[N2]
    assert (again.replica, again.epoch) == ("rep-m-1", 2)


def test_late_words_of_an_old_epoch_and_of_strangers_move_nothing() -> None:
    fleet, effects = a_fleet(a_model())
    old = the_shard(effects)
    fleet.handle(a_word(old, ShardState.ENDED), 0.0)
    new = the_shard(fleet.handle(Wakeup(), 5.0))
    fleet.handle(a_word(new, ShardState.READY), 6.0)
    for late in (old, replace(new, epoch=9), replace(new, node=N2), replace(new, replica=ReplicaId("rep-x-1"))):
        assert fleet.handle(a_word(late, ShardState.ENDED), 7.0) == []
    assert len(fleet.ready(M)) == 1


def test_a_step_back_is_ignored() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    assert fleet.handle(a_word(shard, ShardState.LOADING), 2.0) == []
    assert len(fleet.ready(M)) == 1


def test_a_replica_that_its_node_stops_by_itself_is_not_routable_and_comes_again() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    fleet.handle(a_word(shard, ShardState.STOPPING), 2.0)
    assert fleet.ready(M) == ()
    assert wakes(fleet.handle(a_word(shard, ShardState.ENDED), 3.0)) == [8.0]


# Room


def test_a_model_that_fits_nowhere_says_why_once() -> None:
    fleet, effects = a_fleet(a_model(gb=99.0))
    (announce,) = announced(effects)
    assert announce.text == "no node can run m now"
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


def test_a_report_with_more_room_is_used() -> None:
    fleet, _ = a_fleet(a_model(gb=99.0))
    assert the_shard(fleet.handle(NodeReported(node=a_node(memory_gb=100.0)), 5.0)).model.name == M


def test_a_report_of_a_stranger_is_ignored() -> None:
    fleet, _ = a_fleet(a_model(gb=99.0))
    assert fleet.handle(NodeReported(node=a_node("n9", memory_gb=100.0)), 5.0) == []


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


def test_a_node_whose_engine_turns_out_to_be_broken_is_given_nothing_more_and_mended_it_is() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    ailing = EngineFound(engine="e", program=("/opt/e",), checked=True, broken="libe.so.1 is missing")
    fleet.handle(NodeReported(node=replace(a_node(), engines=(ailing,))), 5.0)
    (announce,) = announced(fleet.handle(Demand(model=M), 6.0))
    assert announce.lines == ("n1, profile 'p': /opt/e can't run e: libe.so.1 is missing",)
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Rejected)
    assert [no.reason for no in verdict.rejections] == [Reason.ENGINE_BROKEN]
    mended = replace(ailing, broken=None, version="1.2")
    assert the_shard(fleet.handle(NodeReported(node=replace(a_node(), engines=(mended,))), 7.0)).node == N1


def test_an_engine_that_breaks_does_not_take_down_what_runs() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    ailing = EngineFound(engine="e", program=("/opt/e",), checked=True, broken="it is half replaced")
    assert fleet.handle(NodeReported(node=replace(a_node(), engines=(ailing,))), 2.0) == []
    assert len(fleet.ready(M)) == 1


# The catalog changes


def test_a_removed_model_is_stopped_and_booked_until_its_end() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    effects = fleet.handle(CatalogChanged(models=()), 2.0)
    assert desires(effects) == [Desire(node=N1, revision=2, shards=())]
    assert announced(effects)[0].text == "rep-m-1 on n1 is to stop: its definition has changed or is gone"
    assert fleet.ready(M) == ()
    assert not fleet.idle()
    (replica,) = fleet.statistics().nodes[0].replicas
    assert replica.state is ShardState.STOPPING
    effects = fleet.handle(a_word(shard, ShardState.ENDED), 3.0)
    assert announced(effects)[0].text == "rep-m-1 has stopped on n1"
    assert not announced(effects)[0].warning
    assert fleet.idle()
    assert fleet.statistics().nodes[0].replicas == ()


def test_a_changed_model_starts_again_after_its_old_replica_has_ended() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    effects = fleet.handle(CatalogChanged(models=(a_model(source="/new.gguf"),)), 2.0)
    assert desires(effects)[-1].shards == ()
    fleet.handle(a_word(shard, ShardState.READY), 3.0)
    assert fleet.ready(M) == ()
    again = the_shard(fleet.handle(a_word(shard, ShardState.ENDED), 4.0))
    assert (again.model.source, again.replica, again.epoch) == ("/new.gguf", "rep-m-1", 2)


def test_what_an_engine_never_sees_may_change_while_it_runs() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    changed = replace(a_model(most=2), aliases=("alias",))
    assert fleet.handle(CatalogChanged(models=(changed,)), 2.0) == []
    assert len(fleet.ready(M)) == 1


def test_a_changed_definition_is_tried_without_waiting_for_the_old_ones_failures() -> None:
    fleet, effects = a_fleet(a_model("other", least=0), a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED), 10.0)
    shard = the_shard(fleet.handle(CatalogChanged(models=(a_model(source="/mended.gguf"),)), 11.0))
    assert (shard.epoch, shard.model.source) == (2, "/mended.gguf")


def test_an_unchanged_catalog_changes_nothing() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED), 10.0)
    assert fleet.handle(CatalogChanged(models=(a_model(),)), 11.0) == []


def test_failures_of_other_models_survive_a_change() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED), 10.0)
    fleet.handle(CatalogChanged(models=(a_model(), a_model("b", least=0))), 11.0)
    fleet.handle(CatalogChanged(models=(a_model(), a_model("b", least=0, source="/c"))), 12.0)
    assert desires(fleet.handle(Wakeup(), 14.0)) == []
    assert the_shard(fleet.handle(Wakeup(), 15.0)).epoch == 2


def test_a_smaller_most_stops_the_replicas_that_serve_least() -> None:
    fleet, effects = a_fleet(a_model(least=3, most=3))
    one, two, three = desires(effects)[-1].shards
    fleet.handle(a_word(one, ShardState.LOADING), 1.0)
    fleet.handle(a_word(two, ShardState.READY), 1.0)
    fleet.handle(a_word(three, ShardState.ENDED), 1.0)
    effects = fleet.handle(CatalogChanged(models=(a_model(least=1, most=1),)), 2.0)
    assert the_shard(effects) == two
    assert announced(effects)[0].text == "rep-m-1 on n1 is to stop: no more than 1 may run"
    assert [replica.id for replica in fleet.statistics().models[0].replicas] == ["rep-m-1", "rep-m-2"]
    effects = fleet.handle(CatalogChanged(models=(a_model(least=0, most=0),)), 3.0)
    assert desires(effects)[-1].shards == ()


def test_a_stopping_replica_counts_against_the_most_there_may_be() -> None:
    fleet, effects = a_fleet(a_model(least=2, most=3, gb=None))
    for shard in desires(effects)[-1].shards:
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    effects = fleet.handle(CatalogChanged(models=(a_model(least=2, most=3, gb=None, source="/new"),)), 2.0)
    assert [shard.replica for shard in desires(effects)[-1].shards] == ["rep-m-3"]


def test_a_shard_that_its_node_never_saw_is_given_up_after_a_while() -> None:
    fleet, _ = a_fleet(a_model())
    effects = fleet.handle(CatalogChanged(models=(a_model(source="/new.gguf"),)), 1.0)
    assert wakes(effects) == [1.0 + UNHEARD_SECONDS]
    assert not fleet.idle()
    shard = the_shard(fleet.handle(Wakeup(), 1.0 + UNHEARD_SECONDS))
    assert (shard.replica, shard.epoch) == ("rep-m-1", 2)


def test_a_shard_that_its_node_never_saw_is_given_up_when_it_has_taken_a_later_set() -> None:
    fleet, _ = a_fleet(a_model())
    fleet.handle(CatalogChanged(models=(a_model(source="/new.gguf"),)), 1.0)
    fleet.handle(NodeReported(node=a_node(), applied=1), 1.1)
    fleet.handle(NodeReported(node=a_node("n2"), applied=2), 1.1)
    assert not fleet.idle()
    shard = the_shard(fleet.handle(NodeReported(node=a_node(), applied=2), 1.2))
    assert (shard.replica, shard.epoch) == ("rep-m-1", 2)


# Nodes that are silent


def test_no_request_goes_to_a_lost_node_until_it_is_back() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    effects = fleet.handle(NodeLost(node=N1), 20.0)
    assert announced(effects)[0].text == (
        "rep-m-1 can't be reached: n1 is silent; no request goes there until it is back"
    )
    assert fleet.ready(M) == ()
    assert fleet.silent_nodes(M) == (N1,)
    assert fleet.statistics().nodes[0].lost
    assert fleet.handle(NodeLost(node=N1), 21.0) == []
    assert desires(effects) == []
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(shard),)), 30.0)
    # (which is what requests wait for that were held meanwhile)
    assert [said.text for said in announced(effects)] == ["rep-m-1 can be reached again: n1 is back"]
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-1"]
    assert fleet.silent_nodes(M) == ()
    assert not fleet.statistics().nodes[0].lost


def test_a_lost_node_that_is_unknown_is_no_news() -> None:
    fleet, _ = a_fleet(a_model())
    assert fleet.handle(NodeLost(node=N2), 1.0) == []


def test_what_runs_on_other_nodes_is_not_concerned() -> None:
    fleet, _ = a_fleet(a_model(), nodes=(a_node("n1"), a_node("n2")))
    assert the_replica(fleet).shard.node == N1
    assert fleet.handle(NodeLost(node=N2), 1.0) == []


def test_nothing_is_placed_on_a_lost_node() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    fleet.handle(NodeLost(node=N1), 1.0)
    fleet.handle(Demand(model=M), 2.0)
    verdict = fleet.verdict(M)
    assert isinstance(verdict, Rejected)
    assert [no.reason for no in verdict.rejections] == [Reason.NODE_LOST]
    assert the_shard(fleet.handle(NodeRegistered(node=a_node()), 3.0)).node == N1


# Nodes that say what is not so


def test_a_node_can_not_take_a_model_from_another_by_saying_that_it_runs_it() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    thief = replace(a_running(a_model(), epoch=9, number=0, node=N2), replica=ReplicaId("rep-m-0"))
    effects = fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(thief),)), 2.0)
    assert [replica.shard.node for replica in fleet.ready(M)] == [N1]
    assert all(desire.shards == () for desire in desires(effects))
    assert "is to stop" in announced(effects)[0].text


def test_of_a_thousand_shards_at_once_the_log_gets_a_few_lines() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    gone = a_model("gone")
    running = tuple(found(a_running(gone, number=number)) for number in range(1000))
    said = announced(fleet.handle(NodeRegistered(node=a_node(), running=running), 1.0))
    assert len(said) == FEW + 1
    assert said[-1].text == f"and {1000 - FEW} more changes with the registration of n1"


# A server that begins anew


def test_nothing_is_placed_before_the_nodes_that_were_there_have_said_what_they_run() -> None:
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({N1, N2}), until=15.0), 0.0)
    assert wakes(fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)) == [15.0]
    effects = fleet.handle(NodeRegistered(node=a_node("n1")), 1.0)
    assert desires(effects)[-1].shards == ()
    running = a_running(a_model(), node=N2)
    fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(running),)), 2.0)
    assert [replica.shard.node for replica in fleet.ready(M)] == [N2]
    assert the_replica(fleet).shard == running


def test_a_node_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({N1, N2}), until=15.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    fleet.handle(NodeRegistered(node=a_node("n1")), 1.0)
    assert the_shard(fleet.handle(Wakeup(), 15.0)).node == N1


def test_a_shard_that_its_node_did_see_is_waited_for() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(CatalogChanged(models=()), 1.0)
    fleet.handle(a_word(shard, ShardState.LAUNCHING), 2.0)
    fleet.handle(Wakeup(), 100.0)
    assert not fleet.idle()
    fleet.handle(a_word(shard, ShardState.ENDED), 101.0)
    assert fleet.idle()


# Nodes that come with something running


def test_a_shard_that_already_runs_is_taken_over_as_it_is() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(least=0),)), 0.0)
    spec = a_running(replace(a_model(least=1, most=1), aliases=("old",)))
    report = a_word(spec, ShardState.READY, load=Load(running=1)).report
    effects = fleet.handle(NodeRegistered(node=a_node(), running=((spec, report),)), 1.0)
    assert the_shard(effects) == spec
    assert announced(effects)[0].text == "rep-m-1 was already running on n1 and is taken over"
    (replica,) = fleet.ready(M)
    assert (replica.shard.epoch, replica.endpoint, replica.load) == (7, ENDPOINT, Load(running=1))
    fleet.handle(a_word(spec, ShardState.ENDED), 2.0)
    assert the_shard(fleet.handle(Demand(model=M), 10.0)).epoch == 8


def test_an_adopted_shard_that_was_loading_becomes_ready() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    spec = a_running(a_model())
    fleet.handle(NodeRegistered(node=a_node(), running=(found(spec, ShardState.LOADING),)), 1.0)
    effects = fleet.handle(a_word(spec, ShardState.READY), 500.0)
    assert announced(effects)[0].text == "rep-m-1 is ready on n1"
    assert fleet.verdict(M) is None


@pytest.mark.parametrize(
    "spec",
    [
        a_running(a_model(source="/other.gguf")),
        a_running(a_model("gone")),
        a_running(replace(a_model(), profiles=(Profile(name="p", engine="e", args=("-x",), min_memory_gb=4.0),))),
        a_running(a_model(), node=N2),
    ],
)
def test_a_shard_that_the_catalog_would_not_launch_is_left_out_and_booked_until_its_end(spec: ShardSpec) -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(least=0),)), 0.0)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(spec),)), 1.0)
    assert desires(effects) == [Desire(node=N1, revision=1, shards=())]
    assert "is to stop" in announced(effects)[0].text
    assert fleet.ready(M) == ()
    assert fleet.statistics().nodes[0].booked_gb == 4.0
    fleet.handle(a_word(replace(spec, node=N1), ShardState.ENDED), 2.0)
    assert fleet.statistics().nodes[0].booked_gb == 0.0
    assert fleet.idle()


def test_a_shard_that_is_stopping_or_has_ended_is_not_taken_over() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(least=0),)), 0.0)
    mended = a_running(a_model(), number=3)
    running = (
        found(a_running(a_model(), number=1), ShardState.STOPPING),
        found(a_running(a_model(), number=2), ShardState.ENDED),
        (mended, a_word(mended, ShardState.ENDED, cause="no room", remedy="make some", lines=("last",)).report),
    )
    effects = fleet.handle(NodeRegistered(node=a_node(), running=running), 1.0)
    (replica,) = fleet.statistics().nodes[0].replicas
    assert (replica.id, replica.state) == ("rep-m-1", ShardState.STOPPING)
    assert [announce.text for announce in announced(effects)] == [
        "rep-m-1 was already running on n1 and is to stop: it isn't what the catalog asks for",
        "rep-m-2 had ended on n1: it gave no cause",
        "rep-m-3 had ended on n1: no room; make some",
    ]
    assert announced(effects)[-1].lines == ("last",)


def test_the_epoch_of_what_had_ended_before_is_not_given_again() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    ended = found(a_running(a_model()), ShardState.ENDED)
    assert the_shard(fleet.handle(NodeRegistered(node=a_node(), running=(ended,)), 1.0)).epoch == 8


def test_of_two_epochs_of_a_replica_the_newest_is_kept() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    old, new = a_running(a_model(), epoch=3), a_running(a_model(), epoch=4)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(old), found(new))), 1.0)
    assert the_shard(effects) == new
    assert fleet.statistics().nodes[0].booked_gb == 8.0


def test_more_than_may_run_are_taken_over_and_stopped() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    running = tuple(found(a_running(a_model(), number=number)) for number in (1, 2))
    effects = fleet.handle(NodeRegistered(node=a_node(), running=running), 1.0)
    assert the_shard(effects).replica == "rep-m-1"


def test_what_still_runs_when_a_node_registers_again_goes_on() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.LOADING), 1.0)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(shard),)), 2.0)
    assert desires(effects) == [Desire(node=N1, revision=2, shards=(shard,))]
    assert len(fleet.ready(M)) == 1


def test_what_no_longer_runs_when_a_node_registers_again_has_failed() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    effects = fleet.handle(NodeRegistered(node=a_node()), 2.0)
    assert "it no longer ran when its node registered again" in announced(effects)[0].text
    assert wakes(effects) == [7.0]
    fleet.handle(NodeRegistered(node=a_node()), 3.0)
    assert the_replica(fleet).state is ShardState.ENDED


def test_what_a_node_was_told_and_never_spoke_of_is_told_again_with_the_next_epoch() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    effects = fleet.handle(NodeRegistered(node=a_node()), 2.0)
    assert the_shard(effects) == replace(shard, epoch=2)
    assert [announce.warning for announce in announced(effects)] == [False]


def test_what_a_node_never_saw_and_is_no_longer_to_run_is_forgotten() -> None:
    fleet, _ = a_fleet(a_model())
    fleet.handle(CatalogChanged(models=()), 1.0)
    fleet.handle(NodeRegistered(node=a_node()), 2.0)
    assert fleet.idle()


def test_one_node_says_nothing_of_another() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    assert len(fleet.ready(M)) == 1


# The end


def test_at_the_stop_everything_runs_down_and_nothing_starts() -> None:
    fleet, effects = a_fleet(a_model(least=2, most=2), a_model("b"))
    one, two, three = desires(effects)[-1].shards
    for shard in (one, two):
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    fleet.handle(a_word(three, ShardState.ENDED), 1.0)
    effects = fleet.handle(Stopping(), 2.0)
    assert desires(effects)[-1].shards == ()
    assert not fleet.idle()
    for event in (Demand(model=M), Wakeup(), NodeReported(node=a_node()), CatalogChanged(models=(a_model("c"),))):
        assert desires(fleet.handle(event, 10.0)) == []
    fleet.handle(a_word(one, ShardState.ENDED), 11.0)
    assert not fleet.idle()
    assert desires(fleet.handle(a_word(two, ShardState.ENDED), 12.0)) == []
    assert fleet.idle()


def test_a_node_that_comes_while_everything_stops_is_told_to_run_nothing() -> None:
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    fleet.handle(Stopping(), 0.0)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(a_running(a_model())),)), 1.0)
    assert desires(effects) == [Desire(node=N1, revision=1, shards=())]


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
    fleet.handle(a_word(shard, ShardState.READY), 40.0)
    fleet.handle(a_word(shard, ShardState.ENDED), 50.0)
    assert fleet.retry_after_seconds(M, 50.0) == 45
    fleet.handle(Wakeup(), 55.0)
    assert fleet.retry_after_seconds(M, 65.0) == 30


def test_the_time_to_ask_again_has_a_ceiling() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1000.0)
    fleet.handle(a_word(shard, ShardState.ENDED), 1001.0)
    assert fleet.retry_after_seconds(M, 1001.0) == 120


# A small world: agents that are late, engines that die, operators who change their minds

CATALOGS: tuple[tuple[Model, ...], ...] = (
    (a_model("a", 1, 2, gb=6.0), a_model("b", 0, 1, gb=5.0), a_model("c", 2, 2, gb=3.0)),
    (a_model("a", 1, 2, gb=6.0, source="/new"), a_model("b", 1, 1, gb=5.0)),
    (a_model("b", 0, 0, gb=5.0), a_model("c", 1, 1, gb=3.0), a_model("d", 3, 3, gb=7.0)),
    (),
)
NODES = {N1: a_node("n1", 10.0), N2: a_node("n2", 8.0)}


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
            if spec.id not in self.running and (spec.id, spec.epoch) not in self.over:
                self.set(spec, ShardState.LAUNCHING)

    def advance(self, pick: int) -> None:
        if self.running:
            spec, state = list(self.running.values())[pick % len(self.running)]
            self.set(
                spec,
                {
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
        self.epochs: set[tuple[ReplicaId, int]] = set()
        self.happen(CatalogChanged(models=CATALOGS[0]))

    def happen(self, event: Event) -> None:
        if isinstance(event, Wakeup):
            self.wake_at = None
        effects = self.fleet.handle(event, self.now)
        self.log += effects
        for effect in effects:
            if isinstance(effect, Desire):
                told = self.agents[effect.node].told
                assert told is None or effect.revision == told.revision + 1
                self.agents[effect.node].told = effect
            elif isinstance(effect, WakeAt):
                assert effect.at >= self.now
                self.wake_at = effect.at if self.wake_at is None else min(self.wake_at, effect.at)
        placed = {announce.model for announce in announced(effects) if " goes to " in announce.text}
        assert len(placed) <= 1
        self.check()

    def check(self) -> None:
        routable = [shard for name in "abcd" for shard in self.fleet.ready(ModelName(name))]
        assert len({replica.id for replica in routable}) == len(routable)
        wished: list[ShardSpec] = []
        for agent in self.agents.values():
            told = agent.told.shards if agent.told else ()
            wished += told
            held = {(spec.id, spec.epoch): spec for spec in told if (spec.id, spec.epoch) not in agent.over}
            held |= {(spec.id, spec.epoch): spec for spec, _ in agent.running.values()}
            assert sum(spec.profile.min_memory_gb or 0.0 for spec in held.values()) <= agent.node.memory_gb
        running = [spec for agent in self.agents.values() for spec, _ in agent.running.values()]
        alive = {(spec.replica, spec.epoch, spec.node) for spec in [*wished, *running]}
        assert len({replica for replica, _, _ in alive}) == len(alive), "two epochs of a replica"

    def deliver(self, name: NodeId) -> None:
        agent = self.agents[name]
        while agent.words:
            self.happen(agent.words.pop(0))

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

    def step(self, kind: int, pick: int) -> None:
        agent = self.agents[N1 if pick % 2 else N2]
        match kind:
            case 0:
                running = tuple((spec, a_word(spec, state).report) for spec, state in agent.running.values())
                agent.words.clear()
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
                self.happen(Demand(model=ModelName("abcdx"[pick % 5])))
            case 6:
                self.happen(CatalogChanged(models=CATALOGS[pick % len(CATALOGS)]))
            case 7:
                self.happen(NodeReported(node=agent.node))
            case 8:
                self.pass_time(float(pick))
            case _:
                self.happen(Wakeup())

    def settle(self) -> None:
        for name, agent in self.agents.items():
            self.deliver(name)
            if agent.told is None:
                self.step(0, 1 if name == N1 else 0)
        for _ in range(12):
            for agent in self.agents.values():
                for pick in range(len(agent.running)):
                    agent.advance(pick)
                for pick in reversed(range(len(agent.running))):
                    agent.advance(pick)
            self.pass_time(301.0)


STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=60)


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
    booked = {seen.node.id: seen.booked_gb for seen in fleet.statistics().nodes}
    for model in fleet.catalog:
        count = len(fleet.ready(model.name))
        assert count <= model.scaling.max
        if count < wanted(model, demand=False):
            assert isinstance(fleet.verdict(model.name), Rejected)
            need_gb = model.profiles[0].min_memory_gb or 0.0
            assert all(node.memory_gb - booked[node.id] < need_gb for node in NODES.values())


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
