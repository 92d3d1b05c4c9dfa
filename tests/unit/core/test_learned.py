from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fleets import M, a_fleet, a_gpu_node, a_model, a_node, a_wide_model, a_word, desires, the_replica, the_shard, wake

from llmgw.core.effects import Effect, Learn
from llmgw.core.events import CatalogChanged, Demand, FactsKnown, NodeRegistered, NodeReported
from llmgw.core.learned import KEPT, USUAL_LOAD_SECONDS, Fact, FactKey, Figure, Kind, Learned, make_key
from llmgw.core.model import Model, ModelName, Profile, Scaling
from llmgw.core.node import EngineFound
from llmgw.core.placement import Rejected
from llmgw.core.replica import Measured, ShardState

CARD = Profile(name="p", engine="e", gpu_class="h100-80g")
MODEL = a_wide_model(CARD)
SEEN = Measured(load_seconds=40.0, gpu_gb=30.0, memory_gb=5.0, version="1.2")


def versions(*known: str) -> Callable[[str], set[str]]:
    """That nodes have of the engine ``e``."""
    return lambda engine: set(known) if engine == "e" else set()


def learned(*shown: tuple[Profile, Measured], gpu_class: str = "h100-80g") -> Learned:
    found = Learned()
    for profile, measured in shown:
        found.note(replace(MODEL, profiles=(profile,)), profile, gpu_class, measured, loaded=True)
    return found


# What is kept


def test_the_first_launch_is_what_is_known() -> None:
    found = Learned()
    fact = found.note(MODEL, CARD, "h100-80g", SEEN, loaded=True)
    key = make_key(MODEL, CARD, "1.2", "h100-80g")
    assert fact == Fact(key=key, load_seconds=40.0, gpu_gb=30.0, memory_gb=5.0)
    assert (key.source, key.engine, key.version, key.gpu_class) == ("/m", "e", "1.2", "h100-80g")
    assert list(found) == [fact]


def test_the_same_again_is_no_news() -> None:
    found = learned((CARD, SEEN))
    assert found.note(MODEL, CARD, "h100-80g", SEEN, loaded=False) is None
    assert found.note(MODEL, CARD, "h100-80g", Measured(version="1.2"), loaded=True) is None


def test_of_memory_the_most_is_kept_and_of_loads_the_last_counts_for_half() -> None:
    found = learned((CARD, SEEN))
    shown = Measured(load_seconds=20.0, gpu_gb=33.0, memory_gb=4.0, version="1.2")
    fact = found.note(MODEL, CARD, "h100-80g", shown, loaded=True)
    assert fact is not None
    assert (fact.load_seconds, fact.gpu_gb, fact.memory_gb) == (30.0, 33.0, 5.0)
    assert found.load_seconds(MODEL) == 30.0


def test_the_seconds_of_one_load_count_once() -> None:
    found = learned((CARD, SEEN))
    shown = Measured(load_seconds=20.0, gpu_gb=35.0, version="1.2")
    fact = found.note(MODEL, CARD, "h100-80g", shown, loaded=False)
    assert fact is not None
    assert (fact.load_seconds, fact.gpu_gb) == (40.0, 35.0)


def test_what_could_not_be_measured_takes_away_nothing() -> None:
    found = learned((CARD, Measured(gpu_gb=30.0)))
    fact = found.note(MODEL, CARD, "h100-80g", Measured(load_seconds=9.0), loaded=True)
    assert fact is not None
    assert (fact.key.version, fact.load_seconds, fact.gpu_gb, fact.memory_gb) == ("", 9.0, 30.0, None)


def test_the_oldest_are_forgotten_and_news_makes_one_young_again() -> None:
    keys = [FactKey(source=f"/{n}", engine="e", version="", flags="f", gpu_class="") for n in range(KEPT + 1)]
    found = Learned(Fact(key=key, load_seconds=1.0) for key in keys)
    assert [fact.key for fact in found] == keys[1:]
    found = Learned([*(Fact(key=key) for key in keys[:KEPT]), Fact(key=keys[0], gpu_gb=1.0), Fact(key=keys[KEPT])])
    assert [fact.key for fact in found][-2:] == [keys[0], keys[KEPT]]
    assert keys[1] not in {fact.key for fact in found}


# What it holds for


@pytest.mark.parametrize(
    "other",
    [
        replace(CARD, args=("--big",)),
        replace(CARD, engine="f"),
        replace(CARD, tp=2),
        replace(CARD, tool_parser="hermes"),
        replace(CARD, env={"MODE": "x"}),
    ],
)
def test_what_an_engine_is_told_otherwise_says_nothing_of_this_launch(other: Profile) -> None:
    assert learned((other, SEEN)).load_seconds(MODEL) is None
    assert make_key(MODEL, other, "", "") != make_key(MODEL, CARD, "", "")


@pytest.mark.parametrize(
    "other",
    [
        replace(CARD, name="q"),
        replace(CARD, gpu_class="any"),
        replace(CARD, gpu_memory_gb=20.0),
        replace(CARD, min_memory_gb=2.0, labels={"zone": "a"}, priority=3, startup_timeout_seconds=5.0),
    ],
)
def test_what_no_engine_is_told_makes_no_other_launch_of_it(other: Profile) -> None:
    assert learned((other, SEEN)).load_seconds(MODEL) == 40.0


def test_a_model_of_another_name_with_the_same_weights_and_flags_is_the_same_launch() -> None:
    assert learned((CARD, SEEN)).load_seconds(replace(MODEL, name=ModelName("other"))) == 40.0
    assert learned((CARD, SEEN)).load_seconds(replace(MODEL, source="/other")) is None


def test_what_is_in_the_environment_is_in_no_key() -> None:
    one, other = (replace(CARD, env={"HF_TOKEN": secret}) for secret in ("s3cret", "hunter2"))
    assert make_key(MODEL, one, "", "") == make_key(MODEL, other, "", "")


def test_the_profile_that_was_launched_last_tells_how_long_a_load_takes() -> None:
    fast = replace(CARD, name="fast", args=("--fast",))
    both = replace(MODEL, profiles=(CARD, fast))
    found = learned((fast, replace(SEEN, load_seconds=7.0)), (CARD, SEEN))
    assert found.load_seconds(both) == 40.0
    found.note(MODEL, CARD, "a100-40g", Measured(gpu_gb=30.0), loaded=True)
    # (that launch has not told how long it took)
    assert found.load_seconds(both) == 40.0
    found.note(both, fast, "h100-80g", replace(SEEN, load_seconds=9.0), loaded=True)
    assert found.load_seconds(both) == 8.0


# Figures in place of guesses


def test_what_nobody_has_written_is_filled_in() -> None:
    (profile,) = learned((CARD, SEEN)).fill(MODEL, versions("1.2")).profiles
    assert (profile.gpu_memory_gb, profile.min_memory_gb) == (30.0, 5.0)


def test_what_is_written_stays() -> None:
    written = replace(MODEL, profiles=(replace(CARD, gpu_memory_gb=60.0, min_memory_gb=9.0),))
    assert learned((CARD, SEEN)).fill(written, versions("1.2")) is written
    half = replace(MODEL, profiles=(replace(CARD, min_memory_gb=9.0),))
    (profile,) = learned((CARD, SEEN)).fill(half, versions("1.2")).profiles
    assert (profile.gpu_memory_gb, profile.min_memory_gb) == (30.0, 9.0)


def test_nothing_is_filled_in_of_what_was_never_launched() -> None:
    assert Learned().fill(MODEL, versions("1.2")) is MODEL
    assert learned((replace(CARD, args=("-x",)), SEEN)).fill(MODEL, versions("1.2")) is MODEL


def test_figures_of_a_version_that_no_node_has_any_more_are_not_used() -> None:
    found = learned((CARD, SEEN))
    assert found.fill(MODEL, versions("1.3")) is MODEL
    assert found.fill(MODEL, versions("1.2", "1.3")) is not MODEL


def test_of_several_versions_that_nodes_have_the_most_counts() -> None:
    found = learned((CARD, SEEN), (CARD, replace(SEEN, version="1.3", gpu_gb=28.0, memory_gb=6.0)))
    (profile,) = found.fill(MODEL, versions("1.2", "1.3")).profiles
    assert (profile.gpu_memory_gb, profile.min_memory_gb) == (30.0, 6.0)


def test_news_of_one_version_takes_nothing_from_another() -> None:
    old, new = replace(SEEN, version="1.1", gpu_gb=40.0), replace(SEEN, version="1.2")
    known = learned((CARD, old), (CARD, new), (CARD, replace(new, gpu_gb=35.0)))
    assert known.fill(MODEL, versions("1.1", "1.2")).profiles[0].gpu_memory_gb == 40.0
    assert known.fill(MODEL, versions("1.2")).profiles[0].gpu_memory_gb == 35.0


def test_figures_of_another_class_of_gpu_are_not_used() -> None:
    assert learned((CARD, SEEN), gpu_class="a100-40g").fill(MODEL, versions("1.2")) is MODEL


def test_a_profile_that_takes_any_gpu_is_not_told_how_much_of_which() -> None:
    any_card = replace(MODEL, profiles=(replace(CARD, gpu_class="any"),))
    (profile,) = learned((CARD, SEEN)).fill(any_card, versions("1.2")).profiles
    # (the machine's memory is another matter)
    assert (profile.gpu_memory_gb, profile.min_memory_gb) == (None, 5.0)


def test_a_profile_with_gpus_of_no_named_class_is_filled_in_with_what_it_takes_of_the_machine() -> None:
    pair = replace(CARD, gpu_class=None, tp=2)
    (profile,) = learned((pair, SEEN)).fill(replace(MODEL, profiles=(pair,)), versions("1.2")).profiles
    assert (profile.gpu_memory_gb, profile.min_memory_gb) == (None, 5.0)


def test_a_profile_without_gpus_is_filled_in_with_memory_only() -> None:
    model = a_model(gb=None)
    found = Learned()
    found.note(model, model.profiles[0], "", Measured(memory_gb=3.0, gpu_gb=None), loaded=True)
    (profile,) = found.fill(model, versions("")).profiles
    assert (profile.gpu_memory_gb, profile.min_memory_gb, profile.gpus) == (None, 3.0, 0)


def test_each_figure_says_where_it_comes_from() -> None:
    fast = replace(CARD, name="fast", args=("--fast",), gpu_memory_gb=70.0, min_memory_gb=8.0)
    blind = replace(CARD, name="blind", args=("--blind",))
    model = replace(MODEL, profiles=(CARD, fast, blind))
    assert learned((CARD, SEEN)).figures(model, versions("1.2")) == (
        Figure(name="gpu_memory", value=30.0, unit="GB", kind=Kind.MEASURED, profile="p"),
        Figure(name="memory", value=5.0, unit="GB", kind=Kind.MEASURED, profile="p"),
        Figure(name="gpu_memory", value=70.0, unit="GB", kind=Kind.DECLARED, profile="fast"),
        Figure(name="memory", value=8.0, unit="GB", kind=Kind.DECLARED, profile="fast"),
        Figure(name="gpu_memory", value=90.0, unit="%", kind=Kind.ESTIMATED, profile="blind"),
        Figure(name="load", value=40.0, unit="s", kind=Kind.MEASURED, profile=""),
    )
    assert Learned().figures(a_model(gb=None), versions()) == (
        Figure(name="load", value=USUAL_LOAD_SECONDS, unit="s", kind=Kind.ESTIMATED, profile=""),
    )


# As the fleet goes by it


def learns(effects: list[Effect]) -> list[Fact]:
    return [effect.fact for effect in effects if isinstance(effect, Learn)]


def test_what_a_launch_has_shown_is_kept_under_what_was_launched() -> None:
    fleet, effects = a_fleet(MODEL, nodes=[a_gpu_node("n1")])
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.LOADING), 1.0)
    (fact,) = learns(fleet.handle(a_word(shard, ShardState.READY, measured=SEEN), 41.0))
    assert fact == Fact(key=make_key(MODEL, CARD, "1.2", "h100-80g"), load_seconds=40.0, gpu_gb=30.0, memory_gb=5.0)
    # as it is said again and again, and with another peak
    assert learns(fleet.handle(a_word(shard, ShardState.READY, measured=SEEN), 42.0)) == []
    assert learns(fleet.handle(a_word(shard, ShardState.READY), 43.0)) == []
    assert the_replica(fleet).shards[0].measured == SEEN
    assert learns(fleet.handle(a_word(shard, ShardState.READY, measured=replace(SEEN, gpu_gb=29.0)), 43.5)) == []
    (fact,) = learns(fleet.handle(a_word(shard, ShardState.READY, measured=replace(SEEN, gpu_gb=31.0)), 44.0))
    assert (fact.gpu_gb, fact.load_seconds) == (31.0, 40.0)


def test_a_launch_without_gpus_is_of_no_class() -> None:
    fleet, effects = a_fleet(a_model())
    (fact,) = learns(fleet.handle(a_word(the_shard(effects), ShardState.READY, measured=Measured(memory_gb=3.0)), 9.0))
    assert fact.key.gpu_class == ""


def test_each_shard_of_a_group_tells_and_the_most_counts() -> None:
    fleet, effects = a_fleet(a_wide_model(), nodes=[a_gpu_node("n1"), a_gpu_node("n2")])
    shards = [shard for desire in desires(effects) for shard in desire.shards]
    (first,) = learns(fleet.handle(a_word(shards[0], ShardState.LOADING, measured=Measured(gpu_gb=50.0)), 1.0))
    (second,) = learns(fleet.handle(a_word(shards[1], ShardState.LOADING, measured=Measured(gpu_gb=60.0)), 2.0))
    assert first.key == second.key
    assert second.gpu_gb == 60.0


def test_what_was_measured_is_booked_for_what_runs_and_for_the_next_launch() -> None:
    fleet, effects = a_fleet(a_model(gb=None))
    shard = the_shard(effects)
    assert fleet.statistics().nodes[0].booked_gb == 0.0
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    assert fleet.statistics().nodes[0].booked_gb == 0.0
    fleet.handle(a_word(shard, ShardState.READY, measured=Measured(memory_gb=9.0)), 1.5)
    assert fleet.statistics().nodes[0].booked_gb == 9.0
    # 16 GB: another of 9 does not fit, neither of this model nor of one that says so
    models = (a_model(least=2, most=2, gb=None), a_model("b", gb=9.0))
    fleet.handle(CatalogChanged(models=models), 2.0)
    wake(fleet, until=12.0)
    assert [isinstance(fleet.verdict(model.name), Rejected) for model in models] == [True, True]
    fleet.handle(NodeRegistered(node=a_node("n2", memory_gb=18.0)), 13.0)
    wake(fleet, until=13.0)
    assert [node.booked_gb for node in fleet.statistics().nodes] == [9.0, 18.0]


def test_a_profile_that_says_what_it_takes_books_that_whatever_was_measured() -> None:
    fleet, effects = a_fleet(a_model(gb=4.0))
    fleet.handle(a_word(the_shard(effects), ShardState.READY, measured=Measured(memory_gb=9.0)), 1.0)
    assert fleet.statistics().nodes[0].booked_gb == 4.0


def test_facts_of_an_earlier_server_are_gone_by_from_the_first_placement_on() -> None:
    model = a_model(gb=None, least=0)
    fact = Fact(key=make_key(model, model.profiles[0], "", ""), load_seconds=33.0, memory_gb=20.0)
    fleet, _ = a_fleet(model, nodes=[a_node(memory_gb=24.0)])
    fleet.handle(FactsKnown(facts=(fact,)), 0.0)
    fleet.handle(Demand(model=M, waiting=1), 1.0)
    assert fleet.statistics().nodes[0].booked_gb == 20.0
    assert fleet.filled(model).profiles[0].min_memory_gb == 20.0
    assert [(figure.name, figure.kind) for figure in fleet.figures(model)] == [
        ("memory", Kind.MEASURED),
        ("load", Kind.MEASURED),
    ]
    # another version of the engine is there now: what the old one took says nothing of it
    newer = EngineFound(engine="e", program=("e",), version="2")
    fleet.handle(NodeReported(node=replace(a_node(memory_gb=24.0), engines=(newer,))), 2.0)
    assert fleet.filled(model) == model


def test_a_model_without_profiles_has_no_figures_but_the_guess_of_a_load() -> None:
    model = Model(name=M, source="/m", scaling=Scaling(max=1))
    assert [figure.name for figure in learned((CARD, SEEN)).figures(model, versions("1.2"))] == ["load"]


def test_a_node_that_says_more_than_it_has_takes_the_model_from_no_other() -> None:
    fleet, effects = a_fleet(a_model(gb=None), nodes=[a_node("n1", memory_gb=16.0), a_node("n2", memory_gb=64.0)])
    shard = next(shard for desire in desires(effects) for shard in desire.shards)
    lie = Measured(load_seconds=3.0, memory_gb=1e6, gpu_gb=1e6)
    (fact,) = learns(fleet.handle(a_word(shard, ShardState.READY, measured=lie), 1.0))
    (node,) = [seen.host.node for seen in fleet.statistics().nodes if seen.host.id == shard.node]
    assert (fact.memory_gb, fact.gpu_gb) == (node.memory_gb, None)
    fleet.handle(a_word(shard, ShardState.ENDED, cause="no"), 2.0)
    wake(fleet, until=60.0)
    assert the_replica(fleet).state is ShardState.PLACED


def test_a_card_holds_no_more_than_there_is_of_it() -> None:
    fleet, effects = a_fleet(a_wide_model(CARD), nodes=[a_gpu_node("n1", gpus=1)])
    shard = the_shard(effects)
    (fact,) = learns(fleet.handle(a_word(shard, ShardState.READY, measured=Measured(gpu_gb=999.0)), 1.0))
    assert fact.gpu_gb == 85.0


def test_what_ran_on_its_only_place_is_launched_there_again_whatever_was_measured() -> None:
    fleet, effects = a_fleet(a_model(gb=None))
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY, measured=Measured(memory_gb=15.5)), 1.0)
    fleet.handle(NodeReported(node=replace(a_node(), memory_foreign_gb=1.0)), 2.0)
    fleet.handle(a_word(shard, ShardState.ENDED, cause="killed"), 3.0)
    # (when its node is to be tried again)
    again = the_shard(wake(fleet, until=10.0))
    assert (again.epoch, again.profile.min_memory_gb) == (2, None)


def test_what_ran_on_its_only_card_is_launched_there_again_though_a_little_less_of_it_is_told() -> None:
    node = a_gpu_node("n1", gpus=1)
    assert node.gpus is not None
    fleet, effects = a_fleet(a_wide_model(CARD), nodes=[node])
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY, measured=Measured(gpu_gb=84.6)), 1.0)
    less = replace(node, gpus=(replace(node.gpus[0], memory_gb=84.5),))
    fleet.handle(NodeReported(node=less), 2.0)
    fleet.handle(a_word(shard, ShardState.ENDED, cause="killed"), 3.0)
    assert the_shard(wake(fleet, until=10.0)).epoch == 2
