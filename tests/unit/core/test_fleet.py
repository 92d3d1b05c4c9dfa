from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.core.effects import Announce, Desire, Effect, WakeAt
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Event,
    NodeLost,
    NodeMarked,
    NodeRegistered,
    NodeRemoved,
    NodeReported,
    NodesExpected,
    NodeSilent,
    RulesChanged,
    ShardChanged,
    Stopping,
    Wakeup,
)
from llmgw.core.fleet import (
    BACKSTOP_SECONDS,
    DEMAND_SECONDS,
    FEW,
    HOSTS_A_TURN,
    RENDEZVOUS_PORTS,
    STOPPING_SECONDS,
    UNHEARD_SECONDS,
    Fleet,
)
from llmgw.core.model import Model, ModelName, Profile, Scaling
from llmgw.core.node import EngineFound, FabricFound, Gpu, Node, NodeId
from llmgw.core.placement import Placement, Rejected, explain
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
    assert wakes(fleet.handle(NodesExpected(nodes=frozenset({N1, N2}), until=15.0), 0.0)) == [15.0]
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
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


# Nodes that an operator speaks of


def test_a_node_whose_link_is_down_gets_nothing_new_and_keeps_what_it_has() -> None:
    fleet, effects = a_fleet(a_model(), a_model("b", least=0))
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    assert fleet.handle(NodeSilent(node=N1), 2.0) == []
    assert fleet.handle(NodeSilent(node=N2), 2.0) == []
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-1"]
    fleet.handle(Demand(model=ModelName("b")), 3.0)
    verdict = fleet.verdict(ModelName("b"))
    assert isinstance(verdict, Rejected)
    assert verdict.reasons() == {Reason.NODE_SILENT: 1}
    running = (found(the_replica(fleet).shard),)
    effects = fleet.handle(NodeRegistered(node=a_node(), running=running), 4.0)
    effects += fleet.handle(Wakeup(), 4.0)
    assert [shard.model.name for shard in desires(effects)[-1].shards] == ["b", "m"]


def test_a_lost_node_does_not_fall_silent() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    fleet.handle(NodeLost(node=N1), 1.0)
    fleet.handle(NodeSilent(node=N1), 2.0)
    assert fleet.statistics().nodes[0].lost


def test_a_cordoned_node_keeps_its_replicas_and_gets_no_other() -> None:
    fleet, effects = a_fleet(a_model(), a_model("b", least=0))
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    fleet.handle(NodeMarked(node=N1, cordoned=True), 2.0)
    fleet.handle(Demand(model=ModelName("b")), 3.0)
    verdict = fleet.verdict(ModelName("b"))
    assert isinstance(verdict, Rejected)
    assert verdict.reasons() == {Reason.CORDONED: 1}
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-1"]
    # what waits is placed at once
    effects = fleet.handle(NodeMarked(node=N1), 4.0)
    assert [shard.model.name for shard in desires(effects)[-1].shards] == ["b", "m"]


def test_a_node_is_removed_only_when_it_is_lost_or_empty() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    (said,) = announced(fleet.handle(NodeRemoved(node=N1), 2.0))
    assert said.text == "n1 is not removed: rep-m-1 runs there"
    assert len(fleet.statistics().nodes) == 1
    fleet.handle(NodeLost(node=N1), 3.0)
    fleet.handle(NodeRemoved(node=N1), 4.0)
    assert fleet.statistics().nodes == ()
    assert fleet.statistics().models[0].replicas == ()
    assert fleet.verdict(M) == Rejected()
    # a word of it, or its second removal, is no news
    assert fleet.handle(NodeReported(node=a_node()), 5.0) == []
    assert fleet.handle(a_word(shard, ShardState.READY), 5.0) == []
    assert fleet.handle(NodeRemoved(node=N1), 6.0) == []


def test_a_removed_node_is_told_nothing_old_when_it_comes_back() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    fleet.handle(NodeLost(node=N1), 2.0)
    # whoever keeps what it was told last, keeps this
    assert desires(fleet.handle(NodeRemoved(node=N1), 3.0)) == [Desire(node=N1, revision=2, shards=())]
    effects = fleet.handle(NodeRegistered(node=a_node()), 4.0)
    assert [desire.revision for desire in desires(effects)] == [3]
    assert the_shard(effects).epoch == 2


def test_a_removed_node_that_comes_back_is_told_to_stop_what_has_its_place_elsewhere() -> None:
    fleet, effects = a_fleet(a_model())
    old = the_shard(effects)
    fleet.handle(a_word(old, ShardState.READY), 1.0)
    fleet.handle(NodeLost(node=N1), 2.0)
    fleet.handle(NodeRemoved(node=N1), 3.0)
    new = the_shard(fleet.handle(NodeRegistered(node=a_node("n2")), 4.0))
    assert (new.replica, new.epoch) == ("rep-m-1", 2)
    effects = fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(old),)), 5.0)
    assert desires(effects) == [Desire(node=N1, revision=3, shards=())]
    assert {replica.epoch: replica.state for replica in fleet.statistics().models[0].replicas} == {
        1: ShardState.STOPPING,
        2: ShardState.PLACED,
    }
    # it books its room until it is gone
    assert [seen.booked_gb for seen in fleet.statistics().nodes] == [4.0, 4.0]
    fleet.handle(a_word(old, ShardState.ENDED), 6.0)
    assert [seen.booked_gb for seen in fleet.statistics().nodes] == [0.0, 4.0]


def test_an_empty_node_is_removed_whatever_had_failed_there() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED, cause="no"), 1.0)
    fleet.handle(NodeRemoved(node=N1), 2.0)
    assert fleet.statistics().models[0].replicas == ()


# Replicas on lost nodes


def lose_one(fleet: Fleet, effects: Sequence[Effect]) -> ShardSpec:
    """rep-m-1 is ready on n1, which is lost at 20; n2 is there."""
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    assert wakes(fleet.handle(NodeLost(node=N1), 20.0)) == [80.0]
    return shard


def test_what_ran_on_a_lost_node_is_placed_anew_after_a_while_with_the_next_epoch() -> None:
    fleet, effects = a_fleet(a_model())
    old = lose_one(fleet, effects)
    assert desires(fleet.handle(Wakeup(), 79.0)) == []
    effects = fleet.handle(Wakeup(), 80.0)
    told = {desire.node: desire.shards for desire in desires(effects)}
    (new,) = told[N2]
    assert (new.replica, new.id, new.epoch) == (old.replica, old.id, 2)
    # the lost node is told when it is back
    assert told[N1] == ()
    assert "n1 is lost, and another takes its place" in announced(effects)[0].text
    fleet.handle(a_word(new, ShardState.READY), 90.0)
    assert [replica.nodes for replica in fleet.ready(M)] == [(N2,)]
    assert fleet.silent_nodes(M) == ()
    # what it may still run there keeps its room
    assert [seen.booked_gb for seen in fleet.statistics().nodes] == [4.0, 4.0]
    effects = fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(old),)), 100.0)
    assert desires(effects)[0] == Desire(node=N1, revision=3, shards=())
    assert "it is to stop, another has its place" in announced(effects)[0].text
    assert [replica.epoch for replica in fleet.ready(M)] == [2]
    # it is lost once more before that is done
    assert announced(fleet.handle(NodeLost(node=N1), 101.0)) == []
    fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(old),)), 102.0)
    fleet.handle(a_word(old, ShardState.ENDED), 103.0)
    assert [seen.booked_gb for seen in fleet.statistics().nodes] == [0.0, 4.0]


def test_a_node_that_is_back_in_time_goes_on_with_what_it_runs() -> None:
    fleet, effects = a_fleet(a_model())
    old = lose_one(fleet, effects)
    effects = fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(old),)), 79.0)
    assert desires(effects) == [Desire(node=N1, revision=2, shards=(old,))]
    assert [replica.epoch for replica in fleet.ready(M)] == [1]
    assert desires(fleet.handle(Wakeup(), 81.0)) == []


def test_what_finds_no_other_place_is_what_its_node_goes_on_with() -> None:
    fleet, effects = a_fleet(a_model(gb=4.0))
    old = the_shard(effects)
    fleet.handle(a_word(old, ShardState.READY), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2", memory_gb=2.0)), 2.0)
    fleet.handle(NodeLost(node=N1), 20.0)
    assert desires(fleet.handle(Wakeup(), 80.0)) == []
    assert isinstance(fleet.verdict(M), Rejected)
    effects = fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(old),)), 500.0)
    assert desires(effects) == [Desire(node=N1, revision=2, shards=(old,))]
    assert [replica.epoch for replica in fleet.ready(M)] == [1]
    assert not isinstance(fleet.verdict(M), Rejected)


def test_another_patience_counts_from_the_same_loss() -> None:
    fleet, effects = a_fleet(a_model())
    lose_one(fleet, effects)
    effects = fleet.handle(RulesChanged(replace_after=10.0, brake=600.0), 25.0)
    assert wakes(effects) == [30.0]
    assert [desire.node for desire in desires(fleet.handle(Wakeup(), 30.0))] == [N1, N2]


def test_a_model_that_nobody_wants_now_stays_where_it_is_lost() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    shard = the_shard(fleet.handle(Demand(model=M), 1.0))
    fleet.handle(a_word(shard, ShardState.READY), 2.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 3.0)
    fleet.handle(NodeLost(node=N1), 400.0)
    assert desires(fleet.handle(Wakeup(), 460.0)) == []
    # somebody asks
    assert the_shard([fleet.handle(Demand(model=M), 461.0)[-1]]).epoch == 2


# So many at once that it may be us


def a_wide_fleet(nodes: int = 5) -> tuple[Fleet, list[ShardSpec]]:
    """A replica ready on each node."""
    names = [f"n{number}" for number in range(1, nodes + 1)]
    fleet, effects = a_fleet(a_model(least=nodes, most=nodes, gb=16.0), nodes=[a_node(name) for name in names])
    for _ in names:
        effects += fleet.handle(Wakeup(), 0.0)
    shards = {shard.node: shard for desire in desires(effects) for shard in desire.shards}
    for shard in shards.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    return fleet, [shards[NodeId(name)] for name in names]


def test_when_most_nodes_go_together_nothing_is_stopped_or_placed_anew() -> None:
    fleet, shards = a_wide_fleet()
    for name in ("n6", "n7"):
        fleet.handle(NodeRegistered(node=a_node(name)), 2.0)
    effects = [effect for n in range(4) for effect in fleet.handle(NodeLost(node=shards[n].node), 20.0 + n)]
    assert "the brake holds: 4 of 7 nodes were lost together" in announced(effects)[-1].text
    brake = fleet.brake(24.0)
    assert brake is not None
    assert brake.until == 620.0
    for now in (80.0, 300.0, 619.0):
        assert desires(fleet.handle(Wakeup(), now)) == []
        assert desires(fleet.handle(Demand(model=M), now)) == []
    assert "the brake holds" in str(fleet.held_up(300.0))
    assert fleet.statistics(300.0).brake == brake
    # they are all back, with what they run
    effects = []
    for n in range(4):
        effects += fleet.handle(NodeRegistered(node=a_node(f"n{n + 1}"), running=(found(shards[n]),)), 619.5)
    assert fleet.held_up(619.5) is None
    assert {desire.node: desire.shards for desire in desires(effects)} == {s.node: (s,) for s in shards[:4]}
    assert len(fleet.ready(M)) == 5


def test_the_brake_passes_and_what_is_lost_is_placed_anew() -> None:
    fleet, shards = a_wide_fleet(3)
    fleet.handle(NodeRegistered(node=a_node("n4")), 2.0)
    for shard in shards:
        fleet.handle(NodeLost(node=shard.node), 20.0)
    effects = fleet.handle(Wakeup(), 620.0)
    assert next(said.text for said in announced(effects)).startswith("the brake is off")
    assert NodeId("n4") in {desire.node for desire in desires(effects)}


def test_a_server_that_has_begun_anew_and_misses_most_nodes_places_nothing_that_they_may_run() -> None:
    fleet = Fleet()
    nodes = frozenset(NodeId(f"n{n}") for n in range(1, 6))
    fleet.handle(NodesExpected(nodes=nodes, until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(), a_model("b", least=0))), 0.0)
    fleet.handle(NodeRegistered(node=a_node("n1")), 1.0)
    assert "waits for what n2, n3, n4, n5 run" in str(fleet.held_up(2.0))
    effects = fleet.handle(Wakeup(), 30.0)
    assert [said.text.split(":")[0] for said in announced(effects)] == [
        "not back since the server has begun anew",
        "the brake holds",
    ]
    assert desires(effects) == []
    assert fleet.statistics().absent == ("n2", "n3", "n4", "n5")
    # but somebody who asks is served
    assert the_shard(fleet.handle(Demand(model=ModelName("b")), 40.0)).model.name == "b"
    # and one that is removed is missed no more
    fleet.handle(NodeRemoved(node=NodeId("n5")), 50.0)
    fleet.handle(NodeRemoved(node=NodeId("n4")), 50.0)
    # (the others get as long as any that is lost)
    effects = fleet.handle(Wakeup(), 110.0)
    assert [shard.model.name for shard in desires(effects)[-1].shards] == ["b", "m"]


# Replicas of several nodes


PAIR = Profile(name="p", engine="e", gpu_class="h100-80g", tp=8, pp=2, nodes=2)


def a_wide_model(profile: Profile = PAIR, least: int = 1, most: int = 1) -> Model:
    return Model(name=M, source="/m", scaling=Scaling(min=least, max=most), profiles=(profile,))


def a_gpu_node(name: str, fabric: str | None = "ib-a", gpus: int = 8) -> Node:
    address = f"10.0.0.{name[1:]}"
    fabrics = () if fabric is None else (FabricFound(name=fabric, interface="ib0", address=address),)
    cards = tuple(
        Gpu(
            uuid=f"GPU-{name}-{index}",
            index=index,
            gpu_class="h100-80g",
            name="H100",
            memory_gb=85.0,
            memory_used_gb=0.0,
        )
        for index in range(gpus)
    )
    return replace(a_node(name), gpus=cards, fabrics=fabrics)


def a_group(most: int = 1, nodes: int = 2) -> tuple[Fleet, list[ShardSpec]]:
    fleet, effects = a_fleet(
        a_wide_model(most=most), nodes=[a_gpu_node(f"n{number}") for number in range(1, nodes + 1)]
    )
    return fleet, [shard for desire in desires(effects) for shard in desire.shards]


def test_a_replica_of_two_nodes_is_placed_whole_and_meets_at_rank_0() -> None:
    fleet, shards = a_group()
    assert [(s.node, s.rank, s.count, s.fabric, s.rendezvous) for s in shards] == [
        ("n1", 0, 2, "ib-a", "10.0.0.1:29500"),
        ("n2", 1, 2, "ib-a", "10.0.0.1:29500"),
    ]
    assert [s.id for s in shards] == ["shd-m-1-0", "shd-m-1-1"]
    assert [s.gpus for s in shards] == [tuple(f"GPU-{name}-{n}" for n in range(8)) for name in ("n1", "n2")]
    fleet.handle(a_word(shards[0], ShardState.READY), 5.0)
    assert fleet.ready(M) == ()
    effects = fleet.handle(a_word(shards[1], ShardState.READY, endpoint=None), 7.0)
    assert announced(effects)[0].text == "rep-m-1 is ready on n1, n2 after 7s"
    assert [replica.endpoint for replica in fleet.ready(M)] == [ENDPOINT]
    assert the_replica(fleet).progress is None


def test_what_holds_up_an_end_is_told() -> None:
    fleet, effects = a_fleet(a_model())
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.LAUNCHING), 1.0)
    fleet.handle(a_word(shard, ShardState.LAUNCHING, progress="/opt/e is being checked"), 2.0)
    assert the_replica(fleet).progress == "/opt/e is being checked"
    fleet.handle(CatalogChanged(models=()), 3.0)
    fleet.handle(a_word(shard, ShardState.STOPPING, progress="can't be killed: processes 7"), 4.0)
    (replica,) = fleet.statistics().nodes[0].replicas
    assert (replica.state, replica.since, replica.progress) == (
        ShardState.STOPPING,
        3.0,
        "can't be killed: processes 7",
    )


def test_progress_of_several_nodes_names_the_node() -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[1], ShardState.LOADING, progress="10 %"), 5.0)
    assert the_replica(fleet).progress == "n2: 10 %"


def test_without_a_second_node_none_of_it_is_placed() -> None:
    fleet, effects = a_fleet(a_wide_model(), nodes=[a_gpu_node("n1"), a_gpu_node("n2", fabric="ib-b")])
    assert all(desire.shards == () for desire in desires(effects))
    assert isinstance(fleet.verdict(M), Rejected)


def test_two_replicas_of_two_nodes_meet_at_two_places() -> None:
    nodes = [a_gpu_node(name) for name in ("n1", "n2")]
    _, effects = a_fleet(a_wide_model(replace(PAIR, tp=4, pp=2), least=2, most=2), nodes=nodes)
    shards = {shard.id: shard for desire in desires(effects) for shard in desire.shards}
    assert sorted({str(shard.rendezvous) for shard in shards.values()}) == ["10.0.0.1:29500", "10.0.0.1:29501"]
    booked = [gpu for shard in shards.values() for gpu in shard.gpus or ()]
    assert len(booked) == len(set(booked)) == 16


def test_a_node_that_says_that_all_its_places_to_meet_are_taken_gets_one_all_the_same() -> None:
    fleet, effects = a_fleet(nodes=[a_gpu_node("n2")])
    pair = a_wide_model()
    other = replace(pair, name=ModelName("x"))
    liar = tuple(
        found(replace(a_running(other, number=number), rendezvous=f"10.0.0.1:{port}", count=2, gpus=()))
        for number, port in enumerate(RENDEZVOUS_PORTS)
    )
    fleet.handle(NodeRegistered(node=a_gpu_node("n1"), running=liar), 1.0)
    effects = fleet.handle(CatalogChanged(models=(pair,)), 2.0)
    assert {str(shard.rendezvous) for desire in desires(effects) for shard in desire.shards} == {"10.0.0.1:29500"}


def test_an_address_with_colons_is_written_in_brackets() -> None:
    nodes = [
        replace(a_gpu_node(name), fabrics=(FabricFound(name="ib-a", interface="ib0", address=f"fd00::{name}"),))
        for name in ("n1", "n2")
    ]
    _, effects = a_fleet(a_wide_model(), nodes=nodes)
    assert desires(effects)[-1].shards[0].rendezvous == "[fd00::n1]:29500"


def test_the_end_of_one_shard_ends_the_epoch_everywhere_before_another_begins() -> None:
    fleet, shards = a_group()
    for shard in shards:
        fleet.handle(a_word(shard, ShardState.READY), 5.0)
    effects = fleet.handle(a_word(shards[1], ShardState.ENDED, cause="CUDA error", kind="gpu_fault"), 9.0)
    assert [(desire.node, desire.shards) for desire in desires(effects)] == [(N1, ()), (N2, ())]
    assert "rep-m-1 ended on n2: CUDA error (failure 1 in a row" in announced(effects)[0].text
    replica = the_replica(fleet)
    assert (replica.state, replica.cause, replica.kind) == (ShardState.STOPPING, "CUDA error", "gpu_fault")
    assert fleet.ready(M) == ()
    # the time of the next try comes before the other shard has ended
    assert desires(fleet.handle(Wakeup(), 15.0)) == []
    assert len(fleet.statistics().nodes[0].host.booked) == 8
    fleet.handle(a_word(shards[0], ShardState.ENDED), 16.0)
    effects = fleet.handle(Wakeup(), 16.0)
    again = [shard for seen in fleet.statistics().models for r in seen.replicas for shard in (r.shard,)]
    assert [(shard.epoch, shard.rendezvous) for shard in again] == [(2, "10.0.0.1:29501")]


def test_a_failed_group_is_shown_until_its_next_try() -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[0], ShardState.ENDED, cause="no"), 9.0)
    # the other was never launched, as far as anybody has said
    fleet.handle(NodeReported(node=a_gpu_node("n2"), applied=2), 9.1)
    replica = the_replica(fleet)
    assert (replica.state, replica.cause, [shard.state for shard in replica.shards]) == (
        ShardState.ENDED,
        "no",
        [ShardState.ENDED] * 2,
    )


def test_a_group_that_loses_a_node_ends_where_it_can_be_reached_and_is_placed_elsewhere() -> None:
    fleet, shards = a_group(nodes=3)
    for shard in shards:
        fleet.handle(a_word(shard, ShardState.READY), 5.0)
    fleet.handle(NodeLost(node=N2), 20.0)
    assert fleet.ready(M) == ()
    effects = fleet.handle(Wakeup(), 80.0)
    assert {desire.node: desire.shards for desire in desires(effects)} == {N1: (), N2: ()}
    fleet.handle(a_word(shards[0], ShardState.ENDED), 85.0)
    effects = fleet.handle(Wakeup(), 85.0)
    live = [r for r in fleet.statistics().models[0].replicas if r.epoch == 2]
    assert [replica.nodes for replica in live] == [("n1", "n3")]
    # and back: what it runs there ends
    effects = fleet.handle(NodeRegistered(node=a_gpu_node("n2"), running=(found(shards[1]),)), 90.0)
    assert desires(effects)[0] == Desire(node=N2, revision=3, shards=())
    fleet.handle(a_word(shards[1], ShardState.ENDED), 91.0)
    assert [r.epoch for r in fleet.statistics().models[0].replicas] == [2]


def test_a_group_whose_node_registers_without_its_part_is_begun_anew() -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[0], ShardState.LOADING), 1.0)
    effects = fleet.handle(NodeRegistered(node=a_gpu_node("n2")), 2.0)
    assert "n2 never launched its part" in announced(effects)[0].text
    assert {desire.node: desire.shards for desire in desires(effects)} == {N1: (), N2: ()}
    fleet.handle(a_word(shards[0], ShardState.ENDED), 3.0)
    fleet.handle(Wakeup(), 3.0)
    assert the_replica(fleet).epoch == 2


def test_a_removed_node_takes_its_group_along() -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[0], ShardState.READY), 1.0)
    fleet.handle(a_word(shards[1], ShardState.READY), 1.0)
    fleet.handle(NodeLost(node=N2), 20.0)
    fleet.handle(NodeRemoved(node=N2), 21.0)
    assert the_replica(fleet).state is ShardState.STOPPING
    fleet.handle(a_word(shards[0], ShardState.ENDED), 22.0)
    assert fleet.statistics().models[0].replicas == ()


def a_restarted(*running: tuple[Node, ShardSpec]) -> tuple[Fleet, list[Effect]]:
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset(node.id for node, _ in running), until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_wide_model(),)), 0.0)
    effects: list[Effect] = []
    for node, spec in running:
        effects += fleet.handle(NodeRegistered(node=node, running=(found(spec),)), 1.0)
    return fleet, effects


def test_a_group_is_taken_over_by_a_server_that_has_begun_anew() -> None:
    _, shards = a_group()
    nodes = [a_gpu_node("n1"), a_gpu_node("n2")]
    fleet, effects = a_restarted((nodes[1], shards[1]), (nodes[0], shards[0]))
    assert {desire.node: desire.shards for desire in desires(effects)} == {N1: (shards[0],), N2: (shards[1],)}
    (replica,) = fleet.ready(M)
    assert (replica.nodes, replica.epoch) == (("n1", "n2"), 1)
    assert desires(fleet.handle(Wakeup(), 70.0)) == []
    assert [replica.state for replica in fleet.ready(M)] == [ShardState.READY]


def test_a_group_of_which_a_part_is_missing_ends_after_a_while() -> None:
    _, shards = a_group()
    fleet = Fleet()
    fleet.handle(CatalogChanged(models=(a_wide_model(),)), 0.0)
    fleet.handle(NodeRegistered(node=a_gpu_node("n1"), running=(found(shards[0]),)), 1.0)
    fleet.handle(NodeRegistered(node=a_gpu_node("n2")), 2.0)
    assert fleet.ready(M) == ()
    assert the_replica(fleet).state is ShardState.PLACED
    effects = fleet.handle(Wakeup(), 31.0)
    assert "is to stop: 1 of its 2 shards came back" in announced(effects)[0].text
    fleet.handle(a_word(shards[0], ShardState.ENDED), 32.0)
    fleet.handle(Wakeup(), 32.0)
    assert (the_replica(fleet).epoch, len(the_replica(fleet).shards)) == (2, 2)


def test_a_second_node_with_the_same_rank_of_a_group_is_to_stop_it() -> None:
    _, shards = a_group()
    thief = replace(shards[0], node=NodeId("n3"))
    _, effects = a_restarted((a_gpu_node("n1"), shards[0]), (a_gpu_node("n3"), thief), (a_gpu_node("n2"), shards[1]))
    assert {desire.node: len(desire.shards) for desire in desires(effects)} == {"n1": 1, "n2": 1, "n3": 0}


def test_an_older_epoch_that_comes_late_is_to_stop() -> None:
    fleet, effects = a_fleet(a_model(most=2))
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.ENDED, cause="no"), 1.0)
    fleet.handle(Wakeup(), 7.0)
    assert the_replica(fleet).epoch == 2
    late = replace(shard, node=N2)
    effects = fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(late),)), 8.0)
    assert "is to stop" in announced(effects)[0].text


def test_a_group_that_was_taken_over_and_dies_at_once_begins_anew() -> None:
    _, shards = a_group()
    fleet, _ = a_restarted((a_gpu_node("n1"), shards[0]), (a_gpu_node("n2"), shards[1]))
    fleet.handle(a_word(shards[1], ShardState.ENDED, cause="no"), 2.0)
    fleet.handle(a_word(shards[0], ShardState.ENDED), 3.0)
    fleet.handle(Wakeup(), 8.0)
    assert the_replica(fleet).epoch == 2
    # the time at which the first one was to be whole
    fleet.handle(Wakeup(), 60.0)
    assert the_replica(fleet).epoch == 2


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


def test_what_was_to_stop_on_a_node_that_is_lost_then_does_not_count_for_ever() -> None:
    fleet, effects = a_fleet(a_model())
    old = the_shard(effects)
    fleet.handle(a_word(old, ShardState.READY), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    # it is told, and nobody hears what comes of it
    changed = a_model(source="/new.gguf")
    fleet.handle(CatalogChanged(models=(changed,)), 3.0)
    assert fleet.statistics().models[0].replicas[0].state is ShardState.STOPPING
    effects = fleet.handle(NodeLost(node=N1), 20.0)
    effects += fleet.handle(Wakeup(), 80.0)
    new = next(shard for desire in desires(effects) for shard in desire.shards)
    assert (new.node, new.model) == (N2, changed)


def test_what_was_taken_for_gone_and_runs_after_all_is_to_stop_and_books_its_room() -> None:
    fleet, shards = a_group()
    fleet.handle(a_word(shards[0], ShardState.LOADING), 1.0)
    # n2 never spoke of its part, and is thought to have never seen it
    fleet.handle(a_word(shards[0], ShardState.ENDED, cause="no"), 2.0)
    fleet.handle(NodeReported(node=a_gpu_node("n2"), applied=2), 2.1)
    assert fleet.statistics().nodes[1].host.booked == {}
    fleet.handle(NodeRegistered(node=a_gpu_node("n2"), running=(found(shards[1], ShardState.LOADING),)), 3.0)
    assert len(fleet.statistics().nodes[1].host.booked) == 8
    # so that its cards are given to nobody meanwhile
    assert desires(fleet.handle(Wakeup(), 10.0)) == []
    fleet.handle(a_word(shards[1], ShardState.ENDED), 11.0)
    effects = fleet.handle(Wakeup(), 11.0)
    assert [shard.epoch for desire in desires(effects) for shard in desire.shards] in ([], [2, 2])
    assert the_replica(fleet).epoch == 2


def test_an_agent_that_tells_what_it_took_is_waited_for_until_it_has_taken_the_end() -> None:
    fleet, _ = a_fleet(a_model())
    fleet.handle(NodeReported(node=a_node(), applied=0), 1.0)
    fleet.handle(CatalogChanged(models=()), 2.0)
    assert wakes(fleet.handle(Wakeup(), 2.0)) == []
    fleet.handle(Wakeup(), 500.0)
    # it may be launching it just now
    assert not fleet.idle()
    fleet.handle(NodeReported(node=a_node(), applied=2), 501.0)
    assert fleet.idle()


def test_a_node_that_says_nothing_of_what_it_was_told_to_launch_is_not_waited_for_for_ever() -> None:
    fleet, effects = a_fleet(a_model())
    old = the_shard(effects)
    fleet.handle(NodeRegistered(node=a_node("n2")), 1.0)
    assert desires(fleet.handle(NodeReported(node=a_node(), applied=1), 59.0)) == []
    effects = fleet.handle(NodeReported(node=a_node(), applied=1), 60.0)
    assert "its node was told to launch it and says nothing of it" in announced(effects)[0].text
    assert [desire.shards for desire in desires(effects) if desire.node == N1] == [()]
    # it may launch it still: its room is booked until it has taken the set without it
    assert [seen.booked_gb for seen in fleet.statistics().nodes] == [4.0, 0.0]
    fleet.handle(NodeReported(node=a_node(), applied=2), 65.0)
    effects = fleet.handle(Wakeup(), 65.0)
    assert [replica.nodes for replica in fleet.statistics().models[0].replicas] == [(N2,)]
    # a late word of it, and what came of one that did speak
    fleet.handle(a_word(old, ShardState.LAUNCHING), 66.0)
    fleet.handle(a_word(the_replica(fleet).shard, ShardState.LAUNCHING), 67.0)
    assert desires(fleet.handle(NodeReported(node=a_node("n2"), applied=9), 200.0)) == []


def test_what_is_taken_back_in_time_need_not_be_launched() -> None:
    fleet, _ = a_fleet(a_model())
    fleet.handle(CatalogChanged(models=()), 2.0)
    assert announced(fleet.handle(NodeReported(node=a_node(), applied=1), 61.0)) == []


def test_an_epoch_that_nobody_gave_is_not_counted_on_from() -> None:
    fleet, _ = a_fleet(a_model(least=0), a_model("b"))
    liar = a_running(a_model(least=0), epoch=2**40)
    effects = fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(liar),)), 1.0)
    assert "is to stop" in announced(effects)[0].text
    assert desires(fleet.handle(Demand(model=M), 2.0)) == []
    # a node that claims it and never ends it can't keep it from others for ever
    assert wakes(fleet.handle(Wakeup(), 2.0)) == [1.0 + STOPPING_SECONDS]
    effects = fleet.handle(Demand(model=M), 1.0 + STOPPING_SECONDS)
    assert {s.epoch for e in desires(effects) for s in e.shards if s.model.name == M} == {1}


def test_a_node_that_says_that_a_later_epoch_has_ended_stops_none_on_another() -> None:
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({N1, N2}), until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(),)), 0.0)
    running = a_running(a_model(), epoch=1)
    liar = (replace(running, node=N2, epoch=5), a_word(replace(running, epoch=5), ShardState.ENDED).report)
    fleet.handle(NodeRegistered(node=a_node("n2"), running=(liar,)), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n1"), running=(found(running),)), 2.0)
    assert [replica.epoch for replica in fleet.ready(M)] == [1]


def test_a_name_that_this_fleet_never_gives_is_not_remembered() -> None:
    fleet, _ = a_fleet(a_model(least=0))
    names = ("rep-m-12345", "rep-m-x", "rep-m-²", "other")
    liar = tuple(found(replace(a_running(a_model(), epoch=9), replica=ReplicaId(name))) for name in names)
    liar += (found(a_running(a_model("gone"), epoch=9)),)
    fleet.handle(NodeRegistered(node=a_node(), running=liar), 1.0)
    assert fleet._roster._epochs == {}


def test_a_group_that_is_not_whole_when_the_brake_goes_off_has_its_time_again() -> None:
    _, shards = a_group()
    fleet = Fleet()
    nodes = frozenset(NodeId(f"n{n}") for n in range(1, 6))
    fleet.handle(NodesExpected(nodes=nodes, until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_wide_model(),)), 0.0)
    fleet.handle(NodeRegistered(node=a_gpu_node("n1"), running=(found(shards[0]),)), 1.0)
    fleet.handle(Wakeup(), 30.0)
    for n in range(3, 6):
        fleet.handle(NodeRegistered(node=a_gpu_node(f"n{n}")), 200.0)
    assert fleet.brake(200.0) is None
    assert the_replica(fleet).state is ShardState.PLACED
    fleet.handle(NodeRegistered(node=a_gpu_node("n2"), running=(found(shards[1]),)), 229.0)
    assert [replica.nodes for replica in fleet.ready(M)] == [("n1", "n2")]


def test_when_the_first_nodes_are_back_and_the_brake_goes_off_the_others_are_waited_for_a_while_more() -> None:
    fleet = Fleet()
    nodes = frozenset(NodeId(f"n{n}") for n in range(1, 5))
    fleet.handle(NodesExpected(nodes=nodes, until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_model(), a_model("b"))), 0.0)
    fleet.handle(NodeRegistered(node=a_node("n4")), 1.0)
    fleet.handle(Wakeup(), 30.0)
    assert fleet.brake(31.0) is not None
    # n1 is back, and runs one of the two
    running = found(a_running(a_model()))
    effects = fleet.handle(NodeRegistered(node=a_node("n1"), running=(running,)), 100.0)
    assert fleet.brake(100.0) is None
    assert "waits for what n2, n3 run" in str(fleet.held_up(100.0))
    effects += fleet.handle(Wakeup(), 105.0)
    assert [desire.node for desire in desires(effects)] == [N1]
    # n2 has the other one
    other = a_running(a_model("b"), node=N2)
    fleet.handle(NodeRegistered(node=a_node("n2"), running=(found(other),)), 110.0)
    assert [replica.nodes for replica in fleet.ready(ModelName("b"))] == [(N2,)]
    # n3 does not come
    fleet.handle(Wakeup(), 160.0)
    assert fleet.held_up(160.0) is None
    assert fleet.statistics().absent == ("n3",)


def test_a_group_of_which_a_part_is_on_no_node_ends_when_all_have_said_what_they_run() -> None:
    _, shards = a_group()
    fleet, _ = a_restarted((a_gpu_node("n1"), shards[0]))
    assert the_replica(fleet).state is ShardState.STOPPING


def test_while_the_brake_holds_a_group_that_is_not_whole_is_not_stopped() -> None:
    _, shards = a_group()
    fleet = Fleet()
    nodes = frozenset(NodeId(f"n{n}") for n in range(1, 6))
    fleet.handle(NodesExpected(nodes=nodes, until=30.0), 0.0)
    fleet.handle(CatalogChanged(models=(a_wide_model(),)), 0.0)
    fleet.handle(NodeRegistered(node=a_gpu_node("n1"), running=(found(shards[0]),)), 1.0)
    assert desires(fleet.handle(Wakeup(), 30.0)) == []
    assert fleet.brake(31.0) is not None
    effects = fleet.handle(Wakeup(), 100.0)
    assert (desires(effects), wakes(effects)) == ([], [630.0])
    # the others are back in time
    for n in range(2, 6):
        running = (found(shards[1]),) if n == 2 else ()
        fleet.handle(NodeRegistered(node=a_gpu_node(f"n{n}"), running=running), 200.0)
    assert [replica.nodes for replica in fleet.ready(M)] == [("n1", "n2")]


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


# Why


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


def test_an_answer_can_be_explained_somewhere_else() -> None:
    fleet, effects = a_fleet(a_model())
    fleet.handle(a_word(the_shard(effects), ShardState.ENDED, cause="no"), 10.0)
    assert fleet.backing_off(M) == {N1: 15.0}
    assert fleet.backing_off(ModelName("other")) == {}
    told = explain(a_model(), fleet.hosts(), fleet.backing_off(M), 11.0)
    assert [no.reason for each in told.candidates for no in each.rejections] == [Reason.BACKING_OFF]
    assert fleet.wanted(a_model(), 11.0) == 1
    assert fleet.held_up(11.0) is None


def test_what_waits_is_looked_at_again_when_a_node_offers_something_else_and_not_at_each_report() -> None:
    fleet, _ = a_fleet(a_model(gb=20.0))
    assert isinstance(fleet.verdict(M), Rejected)
    assert desires(fleet.handle(NodeReported(node=replace(a_node(), memory_available_gb=1.0)), 1.0)) == []
    assert the_shard(fleet.handle(NodeReported(node=a_node(memory_gb=32.0)), 2.0)).node == N1


def test_what_waits_is_looked_at_again_now_and_then_in_any_case() -> None:
    fleet, effects = a_fleet(a_model(gb=20.0))
    assert set(wakes(effects)) == {BACKSTOP_SECONDS}
    fleet.handle(Wakeup(), BACKSTOP_SECONDS)
    assert [seen.at for seen in fleet.trace.of(M)] == [BACKSTOP_SECONDS, 0.0]


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


def test_many_names_are_cut_short() -> None:
    fleet = Fleet()
    nodes = frozenset(NodeId(f"n{n:02}") for n in range(20))
    fleet.handle(NodesExpected(nodes=nodes, until=30.0), 0.0)
    assert "n15 and 4 more run" in str(fleet.held_up(0.0))


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


# Nodes that say anything


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
            return found(self.invent(), pick.choice(states))

        match pick.randint(0, 11):
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
                return pick.choice([NodeRemoved(node=name), NodeMarked(node=name, cordoned=pick.random() < 0.5)])
            case 8:
                return CatalogChanged(models=pick.choice(self.catalogs))
            case 9:
                return NodeReported(node=a_gpu_node(name), applied=pick.choice([None, 0, 1, 5, 100]))
            case 10:
                return NodesExpected(nodes=frozenset(pick.sample(self.names, 2)), until=self.now + 10.0)
            case _:
                return Wakeup()

    def step(self) -> None:
        self.now += self.random.choice([0.0, 0.1, 1.0, 6.0, 31.0, 70.0])
        effects = self.fleet.handle(self.draw(), self.now)
        self.specs += [shard for desire in desires(effects) for shard in desire.shards if shard not in self.specs]

    def check(self) -> None:
        roster = self.fleet._roster
        for member in roster.members.values():
            for spec in member.desired.values():
                life = roster.at(member.node.id, spec.replica, spec.epoch)
                assert life is not None
                assert life.shard_on(member.node.id).state is not ShardState.ENDED
        for key, life in roster.lives.items():
            assert life.key == key
            assert all(roster.at(node, life.replica.id, life.replica.epoch) is life for node in life.replica.nodes)
        assert all(life.key in roster.lives for life in roster._at.values())
        assert all(key in roster._at for key in self.fleet._forget_at)
        for model in self.fleet.catalog:
            ready = self.fleet.ready(model.name)
            assert len({replica.id for replica in ready}) == len(ready) <= model.scaling.max


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_whatever_nodes_say_the_books_stay_whole(random: Random) -> None:
    liars = Liars(random)
    for _ in range(120):
        liars.step()
        liars.check()
