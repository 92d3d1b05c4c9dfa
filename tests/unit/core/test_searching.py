from __future__ import annotations

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
    desires,
    the_replica,
    the_shard,
    wake,
)

from llmgw.core.costs import OFTEN
from llmgw.core.events import CatalogChanged, FactsKnown, NodeLost, NodeRegistered, NodeReported, NodeSilent
from llmgw.core.fleet import Fleet
from llmgw.core.learned import Fact, make_key
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.placement import Placement, Rejected
from llmgw.core.replica import ShardState
from llmgw.core.searching import SOON_SECONDS, Search

ASKER = a_model("b", gb=10.0, source="/b")


def search(fleet: Fleet, model: Model = ASKER, now: float = 20.0) -> Search:
    return Search(fleet._state, model, now)


def measured(fleet: Fleet, model: Model, memory_gb: float) -> None:
    fact = Fact(key=make_key(model, model.profiles[0], "", ""), memory_gb=memory_gb)
    fleet.handle(FactsKnown(facts=(fact,)), 0.0)


def failed(model: Model, times: int = 1) -> tuple[Fleet, float]:
    """It has ended so often in a row on ``n1``, the last time at the moment that is answered."""
    fleet, _ = a_fleet(model)
    now = 0.0
    for _ in range(times):
        now += 400.0
        wake(fleet, until=now)
        fleet.handle(a_word(the_replica(fleet, model.name).shard, ShardState.ENDED, cause="no"), now)
    return fleet, now


# Now


def test_where_it_can_go_now_is_found_or_why_not() -> None:
    fleet, _ = a_ready(a_model())
    found = search(fleet).find()
    assert isinstance(found, Placement)
    assert found.node == N1
    refused = search(fleet, a_model("b", gb=13.0)).find()
    assert isinstance(refused, Rejected)
    assert refused.counted() == "1 not_enough_memory"


# Once others are gone


def test_without_any_that_go_there_is_nothing_to_look_at() -> None:
    fleet, _ = a_fleet()
    # (though there is room)
    assert not search(fleet).fits_once_gone(())


@pytest.mark.parametrize(("gb", "fits"), [(16.0, True), (16.5, False)])
def test_the_room_of_those_that_go_counts_as_free(gb: float, fits: bool) -> None:
    fleet, effects = a_fleet(a_model(least=2, most=2, gb=8.0))
    keys = [(shard.replica, shard.epoch, N1) for shard in desires(effects)[-1].shards]
    assert len(keys) == 2
    asker = a_model("b", gb=gb)
    assert search(fleet, asker).fits_once_gone(life.key for life in fleet._state.roster.of(M)) is fits
    assert not search(fleet, asker).fits_once_gone([next(iter(fleet._state.roster.of(M))).key])


A = ModelName("a")
CARD = Profile(name="p", engine="e", gpu_class="h100-80g", tp=8)


def a_single(*profiles: Profile, least: int = 1) -> Model:
    model = a_wide_model(least=least, most=max(least, 1))
    return replace(model, name=A, source="/a", profiles=profiles or (CARD,))


def could_fit(fleet: Fleet, model: Model) -> list[str]:
    """The nodes of what runs of ``a`` that this model could go to once it has ended."""
    asker = search(fleet, model)
    lives = sorted(fleet._state.roster.of(A), key=lambda life: life.key)
    return [life.replica.nodes[0] for life in lives if asker.could_fit_on(life.replica.nodes[0], life.key)]


def test_a_node_could_do_for_one_replica_once_what_is_missing_there_has_ended() -> None:
    fleet, _ = a_fleet(a_single(least=2), nodes=[a_gpu_node("n1"), replace(a_gpu_node("n2"), labels={"rack": "b"})])
    other = replace(a_wide_model(CARD), name=ModelName("b"))
    assert could_fit(fleet, other) == ["n1", "n2"]
    # cards that are there, enough of them, with enough memory, on a node that may be taken
    for profile in (
        replace(CARD, tp=16),
        replace(CARD, gpu_memory_gb=90.0),
        replace(CARD, gpu_class="a100-40g"),
        replace(CARD, engine="other"),
        replace(CARD, min_memory_gb=17.0),
    ):
        assert could_fit(fleet, replace(other, profiles=(profile,))) == []
    assert could_fit(fleet, replace(other, profiles=(replace(CARD, labels={"rack": "b"}),))) == ["n2"]
    # by whichever of its profiles
    assert could_fit(fleet, replace(other, profiles=(replace(CARD, tp=16), replace(CARD, name="q")))) == ["n1", "n2"]


def test_what_another_replica_has_of_the_node_stays_taken() -> None:
    small = replace(CARD, tp=4)
    fleet, _ = a_fleet(a_single(small, least=2), nodes=[a_gpu_node("n1")])
    assert len(list(fleet._state.roster.of(A))) == 2
    assert could_fit(fleet, replace(a_wide_model(small), name=ModelName("b"))) == ["n1", "n1"]
    assert could_fit(fleet, replace(a_wide_model(CARD), name=ModelName("b"))) == []


def test_what_was_launched_on_cards_that_nobody_knew_gives_back_all_of_them() -> None:
    old = replace(a_gpu_node("n1"), gpus=None)
    fleet, _ = a_fleet(a_single(replace(CARD, gpu_class=None)), nodes=[old])
    assert the_replica(fleet, A).shard.gpus is None
    fleet.handle(NodeReported(node=a_gpu_node("n1")), 1.0)
    assert could_fit(fleet, replace(a_wide_model(CARD), name=ModelName("b"))) == ["n1"]


def test_a_node_could_do_for_a_group_where_others_on_its_fabric_would() -> None:
    nodes = [a_gpu_node("n1"), a_gpu_node("n2", fabric="ib-b"), a_gpu_node("n3", gpus=1)]
    fleet, _ = a_fleet(a_single(least=2), nodes=nodes)
    assert could_fit(fleet, a_wide_model()) == []
    # (n4 is on the fabric of n2)
    fleet.handle(NodeRegistered(node=a_gpu_node("n4", fabric="ib-b")), 1.0)
    assert could_fit(fleet, a_wide_model()) == ["n2"]
    assert could_fit(fleet, a_wide_model(replace(a_wide_model().profiles[0], nodes=3, pp=3))) == []


def test_a_node_is_no_company_for_itself() -> None:
    fleet, _ = a_fleet(a_single(replace(CARD, tp=4)), nodes=[a_gpu_node("n1")])
    # (each half of it would do for one part)
    assert could_fit(fleet, a_wide_model(replace(a_wide_model().profiles[0], tp=4))) == []


# In a moment


def test_what_stands_in_the_way_for_good_is_not_waited_for() -> None:
    fleet, _ = a_ready(a_model(gb=10.0))
    assert not search(fleet).fits_soon()


def test_a_node_whose_link_is_down_may_be_back_in_a_moment() -> None:
    fleet, _ = a_fleet(nodes=[a_node("n1", memory_gb=8.0), a_node("n2")])
    fleet.handle(NodeSilent(node=N2), 10.0)
    assert isinstance(search(fleet).find(), Rejected)
    assert search(fleet).fits_soon()
    # one that has no room is no hope
    assert not search(fleet, a_model("b", gb=17.0)).fits_soon()


def test_a_node_that_is_lost_is_no_hope() -> None:
    fleet, _ = a_fleet()
    fleet.handle(NodeLost(node=N1), 10.0)
    assert not search(fleet).fits_soon()


def test_a_node_where_it_failed_is_tried_again_in_a_moment_unless_that_is_long() -> None:
    fleet, now = failed(ASKER)
    assert isinstance(search(fleet, now=now).find(), Rejected)
    assert search(fleet, now=now).fits_soon()
    # 5 s, 10 s, 20 s, 40 s, 80 s
    fleet, now = failed(ASKER, times=5)
    assert fleet.backing_off(ASKER.name) == {N1: now + 80.0}
    assert not search(fleet, now=now).fits_soon()
    assert search(fleet, now=now + 80.0 - SOON_SECONDS).fits_soon()


def test_of_nodes_where_it_failed_only_those_that_come_soon_count() -> None:
    fleet, now = failed(ASKER, times=5)
    fleet.handle(NodeRegistered(node=a_node("n2", memory_gb=8.0)), now)
    fleet.handle(NodeSilent(node=N2), now)
    # (what is silent is too small, and where there is room it is not tried for long)
    assert not search(fleet, now=now).fits_soon()
    assert search(fleet, a_model("b", gb=8.0, source="/b"), now=now).fits_soon()


@pytest.mark.parametrize(("times", "often"), [(OFTEN - 1, False), (OFTEN, True)])
def test_what_has_failed_often_of_late_is_known(times: int, often: bool) -> None:
    fleet, now = failed(ASKER, times=times)
    assert search(fleet, now=now).has_failed_often is often
    assert not search(fleet, now=now + 4000.0).has_failed_often


# By other figures


def test_where_nothing_was_measured_there_is_nothing_to_set_aside() -> None:
    fleet, _ = a_fleet()
    assert search(fleet).find_unfilled() is None


def test_without_measured_figures_there_may_be_a_place() -> None:
    asker = a_model("b", gb=None)
    fleet, _ = a_fleet()
    measured(fleet, asker, 17.0)
    assert isinstance(search(fleet, asker).find(), Rejected)
    found = search(fleet, asker).find_unfilled()
    assert found is not None
    assert found.profile.min_memory_gb is None
    # or it is not for them
    fleet.handle(NodeLost(node=N1), 10.0)
    assert search(fleet, asker).find_unfilled() is None


# By another definition


def test_what_has_served_by_nothing_or_by_the_same_has_no_other_place() -> None:
    fleet, effects = a_fleet(ASKER)
    assert search(fleet).find_by_proven() == (None, None)
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    wake(fleet, until=11.0)
    assert fleet._state.rolls.proven(ASKER.name) == ASKER
    assert search(fleet).find_by_proven() == (None, None)


def test_what_has_served_goes_by_what_is_written_now_but_for_its_launch() -> None:
    fleet, effects = a_fleet(a_model(gb=None))
    fleet.handle(a_word(the_shard(effects), ShardState.READY), 1.0)
    wake(fleet, until=11.0)
    written = replace(a_model(source="/new", gb=99.0, most=3), aliases=("alias",))
    fleet.handle(CatalogChanged(models=(written,)), 12.0)
    by, found = search(fleet, written).find_by_proven()
    assert by is not None
    assert (by.source, by.aliases, by.scaling.max) == ("/m.gguf", ("alias",), 3)
    assert found is not None
    assert found.node == N1
    # (what it was seen to take holds for it as well)
    measured(fleet, a_model(gb=None), 17.0)
    assert search(fleet, written).find_by_proven() == (by, None)


def test_what_has_served_may_have_a_place_once_others_are_gone() -> None:
    model = a_model(gb=10.0)
    fleet, effects = a_fleet(model)
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=11.0)
    (key,) = fleet._state.roster.lives
    assert not search(fleet, model).fits_by_proven_once_gone([key])
    written = replace(model, source="/new", profiles=(replace(model.profiles[0], engine="nosuch"),))
    fleet.handle(CatalogChanged(models=(written,)), 12.0)
    look = search(fleet, written)
    assert not look.fits_by_proven_once_gone([])
    assert look.fits_by_proven_once_gone([key])
    assert not look.fits_once_gone([key])
    fleet.handle(NodeReported(node=a_node(memory_gb=8.0)), 13.0)
    assert not search(fleet, written).fits_by_proven_once_gone([key])


# Room that is kept for it


def kept_for(model: Model, *, foreign_gb: float = 0.0, memory_gb: float = 16.0) -> Fleet:
    """It has failed on ``n1`` at 20, where its room is kept for it."""
    fleet, effects = a_fleet(model)
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.LOADING), 1.0)
    fleet.handle(a_word(shard, ShardState.ENDED, cause="killed"), 20.0)
    node = replace(a_node(memory_gb=memory_gb), memory_foreign_gb=foreign_gb)
    fleet._state.roster.set_node(fleet._state.roster.members[N1], node)
    assert fleet.statistics().reserved
    return fleet


def test_where_nothing_is_kept_nothing_is_kept_in_vain() -> None:
    fleet, _ = a_fleet(ASKER, nodes=[a_node(memory_gb=1.0)])
    assert not search(fleet).keeps_in_vain


@pytest.mark.parametrize(
    ("foreign_gb", "memory_gb", "in_vain"), [(0.0, 16.0, False), (9.0, 16.0, False), (0.0, 9.0, True)]
)
def test_what_others_hold_at_the_moment_does_not_make_it_vain(
    foreign_gb: float, memory_gb: float, *, in_vain: bool
) -> None:
    fleet = kept_for(ASKER, foreign_gb=foreign_gb, memory_gb=memory_gb)
    # (it is tried there again in five seconds)
    assert isinstance(search(fleet).find(), Rejected)
    assert search(fleet).keeps_in_vain == in_vain


def test_a_node_whose_link_is_down_may_make_use_of_it_in_a_moment() -> None:
    fleet = kept_for(ASKER, memory_gb=9.0)
    fleet._state.roster.enrol(a_node("n2"))
    fleet.handle(NodeSilent(node=N2), 22.0)
    assert not Search(fleet._state, ASKER, 22.0).keeps_in_vain
