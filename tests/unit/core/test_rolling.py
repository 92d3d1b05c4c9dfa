from __future__ import annotations

from collections.abc import Sequence
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
    a_running,
    a_wide_model,
    a_word,
    announced,
    desires,
    drained,
    drains,
    found,
    texts,
    the_replica,
    the_shard,
    wake,
)

from llmgw.core.catalog import Catalog
from llmgw.core.effects import Effect, Happening, Proven, Reverted
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Event,
    ModelCalled,
    ModelsHeld,
    NodeLost,
    NodeMarked,
    NodeRegistered,
    NodeReported,
    NodesExpected,
    NodeSilent,
    ReplicaRecalled,
)
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model, Profile, Scaling
from llmgw.core.replica import ShardSpec, ShardState
from llmgw.core.rolling import (
    PROVING_SECONDS,
    TRIES,
    UNANSWERED_SECONDS,
    Failed,
    Rollout,
    Rolls,
    defines,
    is_same_launch,
)
from llmgw.core.starting import LAUNCH_SECONDS

OLD, NEW, NEWER = a_model(), a_model(source="/new"), a_model(source="/newer")


def a_spec(model: Model) -> ShardSpec:
    """As it runs by this definition."""
    return a_running(model, epoch=1)


def proven(effects: Sequence[Effect]) -> list[Model]:
    return [effect.model for effect in effects if isinstance(effect, Proven)]


def reverted(effects: Sequence[Effect]) -> list[Reverted]:
    return [effect for effect in effects if isinstance(effect, Reverted)]


# The books


def a_roll(*models: Model) -> Rolls:
    """The first one has served; then came the others."""
    rolls = Rolls()
    for model in models:
        rolls.change(Catalog([model]), {}, frozenset())
        if model is models[0]:
            rolls.note_proven(a_spec(model))
    return rolls


def fail(rolls: Rolls, model: Model, times: int = TRIES) -> list[Failed | None]:
    return [rolls.note_failure(a_spec(model), "no") for _ in range(times)]


def test_a_definition_is_launched_as_it_is_written_until_it_has_failed_twice() -> None:
    rolls = a_roll(OLD, NEW)
    assert rolls.launched[M] == NEW
    first, second = fail(rolls, NEW)
    assert (first, second) == (None, Failed(model=NEW, by=OLD, why="no"))
    assert rolls.failed(M) == second
    assert rolls.launched[M] == OLD
    # it has failed, and more of it is no news
    assert fail(rolls, NEW) == [None, None]


def test_what_to_return_to_has_all_that_was_in_effect_at_once_since_it_was_proven() -> None:
    aliased = replace(OLD, aliases=("nick",), scaling=Scaling(min=1, max=2))
    changed = replace(aliased, source="/new")
    rolls = a_roll(OLD, aliased, changed)
    assert fail(rolls, changed)[-1] == Failed(model=changed, by=aliased, why="no")
    assert rolls.launched[M] == aliased
    # what fails says nothing of what else was written with it
    rolls.change(Catalog([replace(changed, aliases=("other",))]), {}, frozenset())
    assert rolls.proven(M) == aliased
    assert rolls.launched[M].aliases == ("other",)


def test_one_that_has_served_in_between_begins_to_count_anew() -> None:
    rolls = a_roll(OLD, NEW)
    fail(rolls, NEW, 1)
    assert rolls.note_proven(a_spec(NEW)) == NEW
    assert rolls.note_proven(a_spec(NEW)) is None
    assert fail(rolls, NEW, 5) == [None] * 5
    assert rolls.launched[M] == NEW


def test_a_first_definition_has_none_to_return_to() -> None:
    rolls = Rolls()
    rolls.change(Catalog([OLD]), {}, frozenset())
    assert fail(rolls, OLD, 5) == [None] * 5
    assert rolls.launched[M] == OLD


def test_what_fails_and_is_not_the_definition_as_it_is_written_counts_for_nothing() -> None:
    rolls = a_roll(OLD, NEW)
    assert fail(rolls, OLD, 5) == [None] * 5
    assert fail(rolls, NEWER, 5) == [None] * 5
    assert fail(rolls, a_model("other"), 5) == [None] * 5
    assert rolls.launched[M] == NEW


def test_what_no_engine_sees_is_that_of_the_definition_as_it_is_written() -> None:
    changed = replace(NEW, aliases=("alias",), scaling=Scaling(min=2, max=5), over_limit="refuse")
    rolls = a_roll(OLD, changed)
    fail(rolls, changed)
    assert rolls.launched[M] == replace(OLD, aliases=("alias",), scaling=Scaling(min=2, max=5), over_limit="refuse")
    # and goes on to be
    rolls.change(Catalog([replace(changed, aliases=())]), {}, frozenset())
    assert rolls.launched[M].source == OLD.source
    assert rolls.launched[M].aliases == ()


def test_another_edit_is_launched_though_the_one_before_has_failed() -> None:
    rolls = a_roll(OLD, NEW)
    fail(rolls, NEW)
    rolls.change(Catalog([NEWER]), {}, frozenset())
    assert (rolls.launched[M], rolls.failed(M)) == (NEWER, None)
    assert fail(rolls, NEWER)[-1] == Failed(model=NEWER, by=OLD, why="no")


def test_failures_of_the_edit_before_are_none_of_the_next() -> None:
    rolls = a_roll(OLD, NEW)
    fail(rolls, NEW, 1)
    rolls.change(Catalog([NEWER]), {}, frozenset())
    assert fail(rolls, NEWER, 1) == [None]
    assert rolls.launched[M] == NEWER


def test_a_model_that_was_removed_has_no_past() -> None:
    rolls = a_roll(OLD, NEW)
    fail(rolls, NEW)
    rolls.change(Catalog([]), {}, frozenset())
    assert (rolls.launched, rolls.failed(M)) == ({}, None)
    assert not rolls.try_again(M)
    assert rolls.note_proven(a_spec(OLD)) is None
    rolls.change(Catalog([NEW]), {}, frozenset())
    assert rolls.launched[M] == NEW
    assert fail(rolls, NEW, 5) == [None] * 5


def test_what_an_earlier_server_knew_is_known() -> None:
    rolls = Rolls()
    rolls.change(Catalog([NEW]), {M: OLD}, frozenset({M}))
    assert rolls.launched[M] == OLD
    assert rolls.failed(M) == Failed(model=NEW, by=OLD, why="it failed before this server began")
    rolls = Rolls()
    rolls.change(Catalog([NEW]), {M: OLD}, frozenset())
    assert rolls.launched[M] == NEW
    assert fail(rolls, NEW)[-1] == Failed(model=NEW, by=OLD, why="no")


@pytest.mark.parametrize(("earlier", "failed"), [({}, {M}), ({M: NEW}, {M}), ({M: OLD}, set())])
def test_one_that_has_failed_and_has_none_to_return_to_is_tried(earlier: dict, failed: set) -> None:  # type: ignore[type-arg]
    rolls = Rolls()
    rolls.change(Catalog([NEW]), earlier, frozenset(failed))
    assert (rolls.launched[M], rolls.failed(M)) == (NEW, None)


def test_what_has_served_here_counts_for_more_than_what_an_earlier_server_says() -> None:
    rolls = a_roll(OLD)
    rolls.change(Catalog([NEW]), {M: NEWER}, frozenset())
    assert fail(rolls, NEW)[-1] == Failed(model=NEW, by=OLD, why="no")


def test_an_operator_has_it_tried_again() -> None:
    rolls = a_roll(OLD, NEW)
    assert not rolls.try_again(M)
    fail(rolls, NEW)
    assert rolls.try_again(M)
    assert (rolls.launched[M], rolls.failed(M)) == (NEW, None)
    # and it has its two tries again
    assert fail(rolls, NEW) == [None, Failed(model=NEW, by=OLD, why="no")]


def test_the_same_launch_is_the_same_whatever_else_has_changed() -> None:
    assert is_same_launch(OLD, replace(OLD, aliases=("x",), scaling=Scaling(max=9)))
    assert not is_same_launch(OLD, NEW)
    more = replace(OLD, profiles=(*OLD.profiles, Profile(name="q", engine="e")))
    assert not is_same_launch(OLD, more)
    # (but what runs by the one profile goes on)
    assert defines(more, a_spec(OLD))
    assert not defines(NEW, a_spec(OLD))


# A replica at a time


def changed(fleet: Fleet, *models: Model, now: float = 20.0) -> list[Effect]:
    return fleet.handle(CatalogChanged(models=models), now)


def a_served(model: Model = OLD, memory_gb: float = 16.0) -> tuple[Fleet, ShardSpec]:
    """It has served for long enough to be believed."""
    fleet, shard = a_ready(model, nodes=[a_node(memory_gb=memory_gb)])
    assert proven(wake(fleet, until=15.0)) == [model]
    return fleet, shard


def test_a_definition_is_proven_when_it_has_served_for_ten_seconds() -> None:
    fleet, shard = a_ready(OLD)
    assert proven(wake(fleet, until=1.0 + PROVING_SECONDS - 0.1)) == []
    assert proven(wake(fleet, until=1.0 + PROVING_SECONDS)) == [OLD]
    # once is enough
    fleet.handle(a_word(shard, ShardState.ENDED), 20.0)
    fleet.handle(a_word(the_shard(wake(fleet, until=25.0)), ShardState.READY), 26.0)
    assert proven(wake(fleet, until=40.0)) == []


def test_one_that_stays_after_all_makes_room_for_nobody() -> None:
    fleet, _ = a_served(memory_gb=5.0)
    (drain,) = drains(changed(fleet, NEW))
    assert fleet.renews_in_place(M)
    changed(fleet, OLD, now=21.0)
    assert not fleet.renews_in_place(M)
    # nor when it goes later for another reason
    assert len(drains(fleet.handle(ModelsHeld(models=frozenset({M})), 30.0))) == 1
    assert not fleet.renews_in_place(M)
    assert drain.replica == next(fleet._state.roster.of(M)).replica.id


def test_where_somebody_waits_for_its_first_answer_it_is_not_proven_before_that_is_there() -> None:
    fleet, shard = a_ready(OLD)
    fleet.handle(Demand(model=M, in_flight={shard.replica: 1}), 2.0)
    assert proven(wake(fleet, until=94.0)) == []
    fleet.handle(
        Demand(model=M, in_flight={shard.replica: 3}, answered_by=frozenset({(shard.replica, shard.epoch)})), 95.0
    )
    assert proven(wake(fleet, until=105.0)) == [OLD]


def test_one_that_would_have_shown_by_now_that_it_hangs_is_proven_though_its_first_answer_takes_long() -> None:
    fleet, shard = a_ready(OLD)
    fleet.handle(Demand(model=M, in_flight={shard.replica: 1}), 2.0)
    assert proven(wake(fleet, until=UNANSWERED_SECONDS)) == []
    assert proven(wake(fleet, until=2.0 + UNANSWERED_SECONDS)) == [OLD]


def test_a_definition_that_hangs_from_the_start_takes_no_place_and_is_returned_from() -> None:
    fleet, old = a_served()
    changed(fleet, NEW)
    now = 30.0
    for _ in range(TRIES):
        new = the_new(fleet)
        fleet.handle(a_word(new, ShardState.READY), now)
        fleet.handle(
            Demand(
                model=M, in_flight={old.replica: 1, new.replica: 1}, answered_by=frozenset({(old.replica, old.epoch)})
            ),
            now + 1.0,
        )
        assert drains(wake(fleet, until=now + 90.0)) == []
        fleet.handle(a_word(new, ShardState.ENDED, cause="it hangs"), now + 91.0)
        wake(fleet, until=now + 100.0)
        now += 100.0
    assert fleet.launched(M) == OLD
    assert [replica.id for replica in fleet.ready(M)] == [old.replica]


def test_an_engine_that_falls_over_with_its_first_requests_proves_nothing() -> None:
    fleet, shard = a_ready(OLD)
    fleet.handle(a_word(shard, ShardState.STOPPING), 5.0)
    assert proven(wake(fleet, until=50.0)) == []


def test_with_room_to_spare_the_new_one_is_placed_beside_the_old_one() -> None:
    fleet, old = a_served()
    effects = changed(fleet, NEW)
    assert [(said.text, said.what) for said in announced(effects)] == [
        ("the definition of m has changed: rep-m-1 will be replaced, one by one", Happening.ROLLING),
        ("rep-m-2 goes to n1 by profile 'p' (epoch 1): the least cost: 90 s", Happening.PLACED),
    ]
    (model,) = fleet.statistics().models
    assert model.rollout == Rollout(outdated=(old.replica,))
    new = desires(effects)[-1].shards[1]
    fleet.handle(a_word(new, ShardState.READY), 30.0)
    assert drains(wake(fleet, until=39.9)) == []
    assert len(fleet.ready(M)) == 2
    effects = wake(fleet, until=40.0)
    assert proven(effects) == [NEW]
    assert [(said.text, said.what) for said in announced(effects)] == [
        ("rep-m-2 has served by the changed definition for 10s", Happening.ROLLED),
        ("rep-m-1 on n1 is to stop: its definition has changed", Happening.STOPPING),
    ]
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-2"]
    fleet.handle(drained(drains(effects)[0]), 41.0)
    fleet.handle(a_word(old, ShardState.ENDED), 42.0)
    (model,) = fleet.statistics().models
    assert (model.rollout, [replica.id for replica in model.replicas]) == (None, ["rep-m-2"])
    assert desires(wake(fleet, until=5000.0)) == []


def test_on_a_full_node_the_old_one_goes_first() -> None:
    fleet, old = a_served(memory_gb=6.0)
    effects = changed(fleet, NEW)
    assert texts(effects)[1:] == [
        "rep-m-1 on n1 is to stop: its definition has changed, and there is no room for another beside it"
    ]
    (drain,) = drains(effects)
    assert desires(fleet.handle(drained(drain), 21.0))[-1].shards == ()
    again = the_shard(fleet.handle(a_word(old, ShardState.ENDED), 22.0))
    assert (again.model, again.replica, again.epoch) == (NEW, "rep-m-1", 2)


def test_a_full_node_keeps_what_serves_when_the_new_one_would_not_fit_there_either() -> None:
    fleet, _ = a_served(memory_gb=6.0)
    effects = changed(fleet, a_model(source="/new", gb=7.0))
    assert drains(effects) == []
    said = announced(effects)[-1]
    assert said.text == (
        "rep-m-1 stays until there is room for another: its definition has changed, and no node can run m now "
        "(1 not_enough_memory)"
    )
    (model,) = fleet.statistics().models
    assert model.rollout == Rollout(outdated=(the_replica(fleet).id,), waits="1 not_enough_memory")
    assert drains(wake(fleet, until=2000.0)) == []
    # a place is found
    effects = fleet.handle(NodeRegistered(node=a_node("n2")), 2001.0)
    assert [desire.node for desire in desires(effects) if desire.shards] == [N2]


def test_of_one_that_crashes_and_goes_on_by_its_old_definition_it_is_not_said_that_no_node_can_run_it() -> None:
    fleet, old = a_served(memory_gb=6.0)
    changed(fleet, a_model(source="/new", gb=7.0))
    effects = fleet.handle(a_word(old, ShardState.ENDED, cause="killed"), 30.0)
    effects += wake(fleet, until=34.9)
    assert [text for text in texts(effects) if "no node can run" in text] == []
    (model,) = fleet.statistics().models
    assert model.retries
    effects = wake(fleet, until=40.0)
    assert "by profile 'p' of the earlier definition (epoch" in texts(effects)[0]
    assert the_shard(effects).model.source == OLD.source
    assert not fleet.statistics().models[0].retries


def test_what_does_not_serve_yet_goes_as_soon_as_another_is_on_its_way() -> None:
    fleet, effects = a_fleet(OLD)
    fleet.handle(a_word(the_shard(effects), ShardState.LOADING), 1.0)
    effects = changed(fleet, NEW)
    assert drains(effects) == []
    # (in one desired set: the new one, and no more the old one)
    assert the_shard(effects).model == NEW
    assert len(desires(effects)) == 1


def test_what_does_not_serve_yet_goes_first_where_there_is_room_for_one() -> None:
    fleet, effects = a_fleet(OLD, nodes=[a_node(memory_gb=6.0)])
    old = the_shard(effects)
    fleet.handle(a_word(old, ShardState.LOADING), 1.0)
    effects = changed(fleet, NEW)
    assert drains(effects) == []
    assert desires(effects)[-1].shards == ()
    assert the_shard(fleet.handle(a_word(old, ShardState.ENDED), 21.0)).model == NEW


@pytest.mark.parametrize("memory_gb", [64.0, 12.0])
def test_of_several_one_is_replaced_at_a_time(memory_gb: float) -> None:
    model = replace(OLD, scaling=Scaling(min=3, max=3))
    fleet, effects = a_fleet(model, nodes=[a_node(memory_gb=memory_gb)])
    shards = {shard.replica: shard for shard in desires(effects)[-1].shards}
    for shard in shards.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=15.0)
    now = 20.0
    effects = changed(fleet, replace(NEW, scaling=model.scaling))
    least, most = 3, 3
    for _ in range(60):
        now += 1.0
        least = min(least, len(fleet.ready(M)))
        for drain in drains(effects):
            effects += fleet.handle(drained(drain), now)
            effects += fleet.handle(a_word(shards[drain.replica], ShardState.ENDED), now)
        new = [shard for desire in desires(effects)[-1:] for shard in desire.shards if shard.model.source == "/new"]
        effects = []
        for shard in new:
            if shards.get(shard.replica) != shard:
                shards[shard.replica] = shard
                effects += fleet.handle(a_word(shard, ShardState.READY), now)
        most = max(most, len(fleet.ready(M)))
        effects += wake(fleet, until=now)
    assert {replica.shard.model.source for replica in fleet.ready(M)} == {"/new"}
    assert len(fleet.ready(M)) == 3
    assert (least, most) == ((3, 4) if memory_gb == 64.0 else (2, 3))


def test_what_an_engine_never_sees_rolls_nothing() -> None:
    fleet, old = a_served()
    effects = changed(fleet, replace(OLD, aliases=("alias",), over_limit="refuse"))
    assert (announced(effects), desires(effects)) == ([], [])
    assert fleet.statistics().models[0].rollout is None
    assert [replica.shard for replica in fleet.ready(M)] == [old]


def test_one_that_loads_on_demand_and_is_idle_goes_and_the_next_request_has_the_new_one() -> None:
    fleet, old = a_served(a_model(least=0))
    (drain,) = drains(changed(fleet, a_model(least=0, source="/new")))
    fleet.handle(drained(drain), 21.0)
    assert desires(fleet.handle(a_word(old, ShardState.ENDED), 22.0)) == []
    assert the_shard(fleet.handle(Demand(model=M, waiting=1), 23.0)).model.source == "/new"


def test_one_that_loads_on_demand_and_is_in_use_is_replaced_beside() -> None:
    fleet, old = a_served(a_model(least=0))
    fleet.handle(Demand(model=M, in_flight={old.replica: 1}), 19.0)
    effects = changed(fleet, a_model(least=0, source="/new"))
    assert drains(effects) == []
    assert len(desires(effects)[-1].shards) == 2


def test_a_group_rolls_as_one() -> None:
    model = a_wide_model()
    nodes = [a_gpu_node(f"n{number}") for number in range(1, 5)]
    fleet, effects = a_fleet(model, nodes=nodes)
    shards = [shard for desire in desires(effects) for shard in desire.shards]
    for state in (ShardState.PREPARED, ShardState.READY):
        for shard in shards:
            fleet.handle(a_word(shard, state), 1.0)
    wake(fleet, until=15.0)
    effects = changed(fleet, replace(model, source="/new"))
    new = [shard for desire in desires(effects) for shard in desire.shards if shard.model.source == "/new"]
    assert [shard.node for shard in new] == ["n3", "n4"]
    for state in (ShardState.PREPARED, ShardState.READY):
        for shard in new:
            fleet.handle(a_word(shard, state), 30.0)
    (drain,) = drains(wake(fleet, until=40.0))
    assert drain.replica == "rep-m-1"


# When the new one fails


def fail_once(fleet: Fleet, shard: ShardSpec, now: float, cause: str = "no such file") -> list[Effect]:
    fleet.handle(a_word(shard, ShardState.LOADING), now)
    return fleet.handle(a_word(shard, ShardState.ENDED, cause=cause), now)


def the_new(fleet: Fleet, source: str = "/new") -> ShardSpec:
    (found_one,) = [
        replica.shard
        for replica in fleet.statistics().models[0].replicas
        if replica.shard.model.source == source and replica.state is not ShardState.ENDED
    ]
    return found_one


def a_failed(memory_gb: float = 16.0) -> tuple[Fleet, list[Effect]]:
    """The new definition has failed twice beside the old one, which serves on; the effects of the second time."""
    fleet, _ = a_served(memory_gb=memory_gb)
    changed(fleet, NEW)
    assert reverted(fail_once(fleet, the_new(fleet), 21.0)) == []
    wake(fleet, until=26.0)
    return fleet, fail_once(fleet, the_new(fleet), 27.0)


def test_when_the_new_definition_fails_twice_the_old_one_goes_on() -> None:
    fleet, effects = a_failed()
    assert reverted(effects) == [Reverted(model=NEW, by=OLD, why="no such file")]
    said = next(said for said in announced(effects) if said.what is Happening.REVERTED)
    assert said.text == "the changed definition of m has failed, and the one before goes on: no such file"
    assert said.warning
    assert (said.model, said.node) == (M, N1)
    assert fleet.launched(M) == OLD
    assert [replica.id for replica in fleet.ready(M)] == ["rep-m-1"]
    assert drains(wake(fleet, until=5000.0)) == []
    (model,) = fleet.statistics().models
    # as it is written, it is in the catalog all the same
    assert (model.model, model.rollout) == (NEW, None)
    assert model.failed == Failed(model=NEW, by=OLD, why="no such file")


def test_while_the_new_one_fails_the_old_one_serves() -> None:
    fleet, _ = a_served()
    changed(fleet, NEW)
    fail_once(fleet, the_new(fleet), 21.0)
    assert len(fleet.ready(M)) == 1
    assert drains(wake(fleet, until=26.0)) == []


def test_on_a_full_node_the_old_definition_is_launched_again() -> None:
    fleet, old = a_served(memory_gb=6.0)
    (drain,) = drains(changed(fleet, NEW))
    fleet.handle(drained(drain), 21.0)
    new = the_shard(fleet.handle(a_word(old, ShardState.ENDED), 22.0))
    fail_once(fleet, new, 23.0)
    again = the_shard(wake(fleet, until=28.0))
    assert again.model == NEW
    effects = fail_once(fleet, again, 29.0)
    assert len(reverted(effects)) == 1
    # at once: what failed says nothing of what has served
    assert the_shard(effects).model == OLD


def test_one_that_serves_for_less_than_ten_seconds_has_failed() -> None:
    fleet, _ = a_served()
    changed(fleet, NEW)
    for now in (21.0, 40.0):
        new = the_new(fleet)
        fleet.handle(a_word(new, ShardState.READY), now)
        wake(fleet, until=now + 9.0)
        effects = fleet.handle(a_word(new, ShardState.ENDED, cause="fell over"), now + 9.0)
        wake(fleet, until=now + 15.0) if now == 21.0 else None
    assert len(reverted(effects)) == 1


def test_one_that_fails_after_it_was_proven_is_no_reason_to_return() -> None:
    fleet, old = a_served()
    changed(fleet, NEW)
    new = the_new(fleet)
    fleet.handle(a_word(new, ShardState.READY), 21.0)
    (drain,) = drains(wake(fleet, until=31.0))
    fleet.handle(drained(drain), 32.0)
    fleet.handle(a_word(old, ShardState.ENDED), 33.0)
    for now in (40.0, 100.0, 200.0):
        assert reverted(fail_once(fleet, the_new(fleet), now)) == []
        wake(fleet, until=now + 50.0)
    assert fleet.launched(M) == NEW


def test_what_its_node_is_to_blame_for_is_no_failure_of_the_definition() -> None:
    fleet, old = a_served()
    changed(fleet, NEW)
    for now in (21.0, 80.0, 150.0):
        fleet.handle(a_word(the_new(fleet), ShardState.LOADING), now)
        # its agent has begun anew, and the engine is gone
        effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(old),)), now + 1.0)
        assert "it no longer ran when its node registered again" in texts(effects)[0]
        assert reverted(effects) == []
        wake(fleet, until=now + 50.0)
    assert fleet.launched(M) == NEW


@pytest.mark.parametrize("kind", ["port", "gpu_in_use"])
def test_what_others_hold_on_its_node_is_no_failure_of_the_definition(kind: str) -> None:
    fleet, _ = a_served()
    changed(fleet, NEW)
    for now in (21.0, 80.0, 150.0):
        ended = a_word(the_new(fleet), ShardState.ENDED, cause="it is in use by pid 7", kind=kind)
        assert reverted(fleet.handle(ended, now)) == []
        wake(fleet, until=now + 50.0)
    assert fleet.launched(M) == NEW


def test_a_launch_that_its_node_says_nothing_of_is_no_failure_of_the_definition() -> None:
    fleet, _ = a_served()
    changed(fleet, NEW)
    now = 20.0
    for _ in range(4):
        now += LAUNCH_SECONDS
        effects = fleet.handle(NodeReported(node=a_node(), applied=99), now)
        assert reverted(effects) == []
        fleet.handle(NodeReported(node=a_node(), applied=99), now)
        wake(fleet, until=now + 45.0)
        now += 45.0
    assert fleet.launched(M) == NEW


def test_a_third_definition_in_the_middle_of_a_rollout_replaces_the_second() -> None:
    fleet, old = a_served()
    changed(fleet, NEW)
    second = the_new(fleet)
    fleet.handle(a_word(second, ShardState.LOADING), 21.0)
    effects = changed(fleet, NEWER, now=22.0)
    assert texts(effects)[0] == ("the definition of m has changed: rep-m-1, rep-m-2 will be replaced, one by one")
    assert "rep-m-2 on n1 is to stop: its definition has changed" in texts(effects)
    assert [replica.shard for replica in fleet.ready(M)] == [old]
    fleet.handle(a_word(second, ShardState.ENDED), 23.0)
    wake(fleet, until=23.0)
    third = the_new(fleet, "/newer")
    fleet.handle(a_word(third, ShardState.READY), 24.0)
    (drain,) = drains(wake(fleet, until=34.0))
    assert drain.replica == old.replica
    assert fleet.launched(M) == NEWER


def test_when_the_third_fails_the_first_goes_on_as_the_second_never_served() -> None:
    fleet, _ = a_served()
    changed(fleet, NEW)
    second = the_new(fleet)
    fleet.handle(a_word(second, ShardState.LOADING), 21.0)
    changed(fleet, NEWER, now=22.0)
    fleet.handle(a_word(second, ShardState.ENDED), 23.0)
    wake(fleet, until=24.0)
    fail_once(fleet, the_new(fleet, "/newer"), 25.0)
    wake(fleet, until=31.0)
    assert reverted(fail_once(fleet, the_new(fleet, "/newer"), 32.0)) == [
        Reverted(model=NEWER, by=OLD, why="no such file")
    ]


def test_the_old_definition_written_again_in_the_middle_keeps_the_old_replica() -> None:
    fleet, old = a_served()
    changed(fleet, NEW)
    new = the_new(fleet)
    fleet.handle(a_word(new, ShardState.LOADING), 21.0)
    effects = changed(fleet, OLD, now=22.0)
    assert "rep-m-2 on n1 is to stop: its definition has changed" in texts(effects)
    fleet.handle(a_word(new, ShardState.ENDED), 23.0)
    assert drains(wake(fleet, until=2000.0)) == []
    assert [replica.shard for replica in fleet.ready(M)] == [old]


def test_a_model_that_is_removed_in_the_middle_takes_both_along() -> None:
    fleet, old = a_served()
    changed(fleet, NEW)
    new = the_new(fleet)
    fleet.handle(a_word(new, ShardState.LOADING), 21.0)
    effects = changed(fleet, now=22.0)
    (drain,) = drains(effects)
    assert drain.replica == old.replica
    fleet.handle(drained(drain), 23.0)
    for shard in (old, new):
        fleet.handle(a_word(shard, ShardState.ENDED), 24.0)
    assert fleet.idle()
    assert fleet.launched(M) is None


def test_a_model_that_was_removed_and_fails_on_its_way_out_returns_to_nothing() -> None:
    fleet, _ = a_served()
    changed(fleet, NEW)
    new = the_new(fleet)
    fail_once(fleet, new, 21.0)
    wake(fleet, until=27.0)
    again = the_new(fleet)
    changed(fleet, now=28.0)
    assert reverted(fleet.handle(a_word(again, ShardState.ENDED), 29.0)) == []


def test_an_operator_has_a_failed_definition_tried_again() -> None:
    fleet, _ = a_failed()
    effects = fleet.handle(ModelCalled(model=M), 100.0)
    assert texts(effects)[0] == "the definition of m has changed: rep-m-1 will be replaced, one by one"
    assert desires(effects)[-1].shards[-1].model == NEW
    assert fleet.statistics().models[0].failed is None


def test_a_new_edit_after_a_failure_rolls_as_the_first_did() -> None:
    fleet, _ = a_failed()
    effects = changed(fleet, NEWER, now=100.0)
    assert desires(effects)[-1].shards[-1].model == NEWER
    fleet.handle(a_word(the_new(fleet, "/newer"), ShardState.READY), 101.0)
    assert proven(wake(fleet, until=111.0)) == [NEWER]


# A server that begins anew in the middle


def restarted(
    *running: ShardSpec, earlier: Model | None = OLD, failed: bool = False, written: Model = NEW
) -> tuple[Fleet, list[Effect]]:
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({N1}), until=30.0), 0.0)
    known = {} if earlier is None else {M: earlier}
    fleet.handle(CatalogChanged(models=(written,), proven=known, failed=frozenset({M} if failed else ())), 0.0)
    return fleet, fleet.handle(NodeRegistered(node=a_node(), running=tuple(map(found, running))), 1.0)


def test_a_rollout_goes_on_where_it_was() -> None:
    fleet, old = a_served()
    changed(fleet, NEW)
    new = the_new(fleet)
    fleet, effects = restarted(old, new)
    assert desires(effects)[-1].shards == (old, new)
    assert len(fleet.ready(M)) == 2
    effects = wake(fleet, until=11.0)
    assert proven(effects) == [NEW]
    assert [drain.replica for drain in drains(effects)] == [old.replica]


def test_a_rollout_that_had_begun_nothing_begins() -> None:
    _, old = a_served()
    fleet, effects = restarted(old)
    first, second = desires(effects)[-1].shards
    assert (first, second.model) == (old, NEW)
    assert fleet.statistics().models[0].rollout == Rollout(outdated=(old.replica,))


def test_a_definition_that_had_failed_is_not_tried_again() -> None:
    _, old = a_served()
    fleet, effects = restarted(old, failed=True)
    assert the_shard(effects) == old
    assert desires(wake(fleet, until=5000.0)) == []
    assert fleet.launched(M) == OLD
    failed = fleet.statistics().models[0].failed
    assert failed is not None
    assert (failed.model, failed.by) == (NEW, OLD)


def test_without_what_runs_the_proven_definition_is_launched() -> None:
    _, effects = restarted(failed=True)
    assert the_shard(effects).model == OLD


def test_what_had_begun_to_fail_returns_to_what_an_earlier_server_has_seen_to_serve() -> None:
    fleet, effects = restarted()
    shard = the_shard(effects)
    for now in (2.0, 20.0):
        effects = fail_once(fleet, shard, now)
        if now == 2.0:
            shard = the_shard(wake(fleet, until=19.0))
    assert reverted(effects) == [Reverted(model=NEW, by=OLD, why="no such file")]
    assert the_shard(effects).model == OLD


def test_the_old_definition_that_had_failed_for_all_we_know_is_proven_again_by_serving() -> None:
    _, old = a_served()
    fleet, _ = restarted(old, earlier=None, written=OLD)
    assert proven(wake(fleet, until=11.0)) == [OLD]


def test_a_rollout_and_the_drain_of_a_node_at_once_leave_one_that_serves() -> None:
    fleet, old = a_served()
    fleet.handle(NodeRegistered(node=a_node("n2", memory_gb=2.0)), 16.0)
    changed(fleet, NEW)
    new = the_new(fleet)
    fleet.handle(a_word(new, ShardState.LOADING), 21.0)
    # it loads where nothing is to stay
    fleet.handle(NodeMarked(node=N1, draining=True), 22.0)
    fleet.handle(a_word(new, ShardState.ENDED), 23.0)
    assert [replica.shard for replica in fleet.ready(M)] == [old]
    effects = fleet.handle(NodeReported(node=a_node("n2")), 24.0)
    assert [desire.node for desire in desires(effects)] == [N2]
    fleet.handle(a_word(the_new(fleet), ShardState.READY), 31.0)
    effects = wake(fleet, until=41.0)
    assert proven(effects) == [NEW]
    assert [drain.replica for drain in drains(effects)] == [old.replica]


def test_when_the_old_definition_is_stored_again_after_the_new_one_has_failed_nothing_rolls() -> None:
    fleet, _ = a_failed()
    wake(fleet, until=40.0)
    effects = changed(fleet, OLD, now=41.0)
    assert (announced(effects), desires(effects), drains(effects)) == ([], [], [])
    (model,) = fleet.statistics().models
    assert (model.failed, model.rollout) == (None, None)
    # and it may be changed once more
    assert desires(changed(fleet, NEW, now=50.0))[-1].shards[-1].model == NEW


def test_a_new_definition_of_more_replicas_does_not_fail_in_all_places_at_once() -> None:
    model = replace(OLD, scaling=Scaling(min=2, max=2))
    fleet, effects = a_fleet(model, nodes=[a_node(memory_gb=64.0)])
    for shard in desires(effects)[-1].shards:
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=15.0)
    changed(fleet, replace(NEW, scaling=model.scaling))
    for now in (21.0, 40.0):
        fail_once(fleet, the_new(fleet), now)
        assert len(fleet.ready(M)) == 2
        wake(fleet, until=now + 10.0)
    assert fleet.launched(M) == model
    assert len(fleet.ready(M)) == 2


def test_while_one_is_not_proven_no_other_is_replaced_though_more_may_run() -> None:
    model = replace(OLD, scaling=Scaling(min=2, max=5))
    fleet, effects = a_fleet(model, nodes=[a_node(memory_gb=64.0)])
    for shard in desires(effects)[-1].shards:
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=15.0)
    changed(fleet, replace(NEW, scaling=model.scaling))
    fleet.handle(a_word(the_new(fleet), ShardState.READY), 21.0)
    assert desires(wake(fleet, until=30.9)) == []
    # (the next one begins, and the first of the old ones goes)
    effects = wake(fleet, until=31.0)
    assert (len(drains(effects)), len(desires(effects))) == (1, 1)


def test_one_that_is_missing_already_is_not_made_two() -> None:
    model = replace(OLD, scaling=Scaling(min=2, max=2))
    fleet, effects = a_fleet(model, nodes=[a_node(memory_gb=9.0)])
    for shard in desires(effects)[-1].shards:
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=15.0)
    effects = changed(fleet, replace(NEW, scaling=model.scaling))
    effects += wake(fleet, until=20.0)
    (drain,) = drains(effects)
    fleet.handle(drained(drain), 21.0)
    old = next(replica.shard for replica in fleet.statistics().models[0].replicas if replica.id == drain.replica)
    fleet.handle(a_word(old, ShardState.ENDED), 22.0)
    fail_once(fleet, the_new(fleet), 23.0)
    # while that is waited for, the other one stays
    effects = wake(fleet, until=30.0)
    assert drains(effects) == []
    assert [spec.model == OLD for spec in desires(effects)[-1].shards].count(False) == 2
    assert len(fleet.ready(M)) == 1


@pytest.mark.parametrize("large", ["n1", "n2"])
def test_in_place_the_one_goes_whose_room_is_enough(large: str) -> None:
    model = replace(OLD, scaling=Scaling(min=2, max=2))
    nodes = [a_node(name, memory_gb=7.0 if name == large else 5.0) for name in ("n1", "n2")]
    fleet, effects = a_fleet(model, nodes=nodes)
    for shard in {shard.id: shard for desire in desires(effects) for shard in desire.shards}.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=15.0)
    assert len(fleet.ready(M)) == 2
    # (the new one takes more)
    effects = changed(fleet, replace(a_model(source="/new", gb=6.0), scaling=model.scaling))
    effects += wake(fleet, until=60.0)
    (drain,) = drains(effects)
    (old,) = [r.shard for r in fleet.statistics().models[0].replicas if r.id == drain.replica]
    assert old.node == large
    fleet.handle(drained(drain), 61.0)
    fleet.handle(a_word(old, ShardState.ENDED), 62.0)
    fleet.handle(a_word(the_new(fleet), ShardState.READY), 63.0)
    # and the other one stays, as there is no room for another in its place
    assert drains(wake(fleet, until=2000.0)) == []
    assert len(fleet.ready(M)) == 2


def test_a_new_one_that_can_not_be_reached_when_it_would_be_proven_takes_nobodys_place() -> None:
    fleet, old = a_served(memory_gb=6.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 16.0)
    changed(fleet, NEW)
    fleet.handle(a_word(the_new(fleet), ShardState.READY), 21.0)
    fleet.handle(NodeLost(node=N2), 30.0)
    assert drains(wake(fleet, until=60.0)) == []
    assert [replica.shard for replica in fleet.ready(M)] == [old]


# What the review of a rollout asks: whatever else is wrong, what serves goes on as long as there may be a place


@pytest.mark.parametrize("lost", [False, True], ids=["there is room for one", "a node of two is lost"])
def test_a_model_that_is_short_of_one_is_rolled_all_the_same(lost: bool) -> None:
    model = a_model(least=2, most=2, gb=10.0)
    fleet, effects = a_fleet(model, nodes=[a_node("n1"), a_node("n2")][: 1 + lost])
    for shard in {shard.id: shard for desire in desires(effects) for shard in desire.shards}.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    if lost:
        fleet.handle(NodeLost(node=N2), 15.0)
    wake(fleet, until=300.0)
    old = fleet.ready(M)[0].shard
    effects = changed(fleet, replace(model, source="/new"), now=300.0)
    effects += wake(fleet, until=400.0)
    (drain,) = drains(effects)
    assert drain.replica == old.replica
    fleet.handle(drained(drain), 400.0)
    fleet.handle(a_word(old, ShardState.ENDED), 401.0)
    wake(fleet, until=401.0)
    assert the_new(fleet).node == N1


def nowhere(model: Model) -> Model:
    """Another definition of it that no node can run."""
    return replace(model, source="/new", profiles=(replace(model.profiles[0], engine="nosuch"),))


def test_a_definition_that_no_node_can_run_stops_no_load_of_the_one_before() -> None:
    fleet, old = a_served()
    fleet.handle(a_word(old, ShardState.ENDED, cause="killed"), 20.0)
    again = the_shard(wake(fleet, until=25.0))
    fleet.handle(a_word(again, ShardState.LOADING), 26.0)
    effects = changed(fleet, nowhere(OLD), now=27.0)
    effects += wake(fleet, until=400.0)
    assert desires(effects) == []
    fleet.handle(a_word(again, ShardState.READY), 400.0)
    assert [replica.shard for replica in fleet.ready(M)] == [again]


def test_what_has_served_is_launched_again_while_what_is_written_has_no_place() -> None:
    fleet, old = a_served()
    changed(fleet, nowhere(OLD))
    effects = fleet.handle(a_word(old, ShardState.ENDED, cause="killed"), 30.0)
    effects += wake(fleet, until=40.0)
    again = the_shard(effects)
    assert (again.model.source, again.epoch) == (OLD.source, 2)
    fleet.handle(a_word(again, ShardState.READY), 41.0)
    assert [replica.shard for replica in fleet.ready(M)] == [again]
    # and the written one takes its place as soon as there is one
    assert drains(wake(fleet, until=100.0)) == []
    effects = fleet.handle(NodeRegistered(node=a_node("n2", engines=("e", "nosuch"))), 101.0)
    effects += wake(fleet, until=102.0)
    assert the_new(fleet).node == N2


def test_that_a_model_is_down_is_told_though_the_reasons_are_those_of_before() -> None:
    fleet, old = a_served(memory_gb=6.0)
    changed(fleet, a_model(source="/new", gb=9.0))
    # (its own room is not there any more either)
    fleet.handle(NodeReported(node=a_node(memory_gb=2.0)), 25.0)
    effects = fleet.handle(a_word(old, ShardState.ENDED, cause="killed"), 30.0)
    effects += wake(fleet, until=80.0)
    told = [said.text for said in announced(effects) if said.what is Happening.WAITING]
    assert told == ["no node can run m now (1 not_enough_memory)"]


def test_one_that_says_it_is_ready_and_not_where_takes_nobodys_place() -> None:
    fleet, old = a_served()
    changed(fleet, NEW)
    new = the_new(fleet)
    fleet.handle(a_word(new, ShardState.READY, endpoint=None), 21.0)
    effects = wake(fleet, until=100.0)
    assert (proven(effects), drains(effects)) == ([], [])
    assert [replica.shard for replica in fleet.ready(M)] == [old]
    # once it says where, it is ready
    fleet.handle(a_word(new, ShardState.READY), 101.0)
    assert len(drains(wake(fleet, until=111.0))) == 1


def test_the_replicas_of_a_rollout_are_no_sign_of_load() -> None:
    model = replace(a_model(gb=2.0), scaling=Scaling(min=1, max=3, target=2))
    fleet, old = a_served(model)
    # more than one could take, and not for long
    fleet.handle(Demand(model=M, in_flight={old.replica: 5}), 100.0)
    fleet.handle(Demand(model=M, in_flight={old.replica: 1}), 104.0)
    wake(fleet, until=150.0)
    changed(fleet, replace(model, source="/new"), now=150.0)
    new = the_new(fleet)
    fleet.handle(a_word(new, ShardState.READY), 155.0)
    effects = wake(fleet, until=200.0)
    assert [drain.replica for drain in drains(effects)] == [old.replica]
    assert [replica.id for replica in fleet.ready(M)] == [new.replica]


@pytest.mark.parametrize("what", ["it has failed there once", "its link is down", "it is recalled"])
def test_a_spare_place_that_comes_in_a_moment_is_waited_for_while_the_old_one_serves(what: str) -> None:
    model = a_model(gb=10.0)
    fleet, old = a_served(model)
    fleet.handle(NodeRegistered(node=a_node("n2")), 16.0)
    new = replace(model, source="/new")
    if what == "it has failed there once":
        changed(fleet, new)
        fail_once(fleet, the_new(fleet), 21.0)
    else:
        fleet.handle(NodeSilent(node=N2), 19.0)
        recalled = ReplicaRecalled(replica=old.replica, epoch=old.epoch)
        fleet.handle(recalled if what == "it is recalled" else CatalogChanged(models=(new,)), 20.0)
    wake(fleet, until=21.5)
    assert [replica.shard for replica in fleet.ready(M)] == [old]
    # it has come
    fleet.handle(NodeRegistered(node=a_node("n2")), 22.0)
    wake(fleet, until=30.0)
    assert [replica.nodes for replica in fleet.statistics().models[0].replicas] == [(N1,), (N2,)]
    assert [replica.shard for replica in fleet.ready(M)] == [old]


def test_with_a_spare_place_a_definition_that_fails_never_takes_the_model_away() -> None:
    model = a_model(gb=10.0)
    fleet, old = a_served(model)
    fleet.handle(NodeRegistered(node=a_node("n2")), 16.0)
    changed(fleet, replace(model, source="/new"))
    effects: list[Effect] = []
    for now in (21.0, 40.0):
        effects += fail_once(fleet, the_new(fleet), now)
        effects += wake(fleet, until=now + 10.0)
    assert len(reverted(effects)) == 1
    assert drains([*effects, *wake(fleet, until=2000.0)]) == []
    assert [replica.shard for replica in fleet.ready(M)] == [old]


def test_where_the_spare_place_is_not_tried_for_long_the_old_one_goes_first() -> None:
    model = a_model(gb=10.0)
    fleet, _ = a_served(model)
    fleet.handle(NodeRegistered(node=a_node("n2")), 16.0)
    fleet.handle(NodeSilent(node=N2), 17.0)
    fleet.handle(NodeLost(node=N2), 18.0)
    assert len(drains(changed(fleet, replace(model, source="/new")))) == 1


def test_what_serves_when_it_is_changed_is_what_to_return_to() -> None:
    fleet, old = a_ready(OLD)
    effects = changed(fleet, NEW, now=5.0)
    assert proven(effects) == [OLD]
    for now in (6.0, 20.0):
        effects += fail_once(fleet, the_new(fleet), now)
        effects += wake(fleet, until=now + 10.0)
    assert [(found.model, found.by) for found in reverted(effects)] == [(NEW, OLD)]
    assert [replica.shard for replica in fleet.ready(M)] == [old]


def test_what_loads_when_it_is_changed_is_nothing_to_return_to() -> None:
    fleet, effects = a_fleet(OLD)
    fleet.handle(a_word(the_shard(effects), ShardState.LOADING), 1.0)
    assert proven(changed(fleet, NEW, now=5.0)) == []
    assert fleet._state.rolls.proven(M) is None


@pytest.mark.parametrize("away", [NodeSilent(node=N1), NodeLost(node=N1)])
def test_one_that_can_not_be_reached_is_proven_when_it_is_back(away: Event) -> None:
    fleet, shard = a_ready(OLD)
    fleet.handle(away, 3.0)
    assert proven(wake(fleet, until=50.0)) == []
    effects = fleet.handle(NodeRegistered(node=a_node(), running=(found(shard),)), 50.5)
    assert proven([*effects, *wake(fleet, until=61.0)]) == [OLD]


def test_an_old_one_that_dies_while_the_new_one_comes_is_not_shown_as_failed_for_ever() -> None:
    fleet, old = a_served(a_model(most=2))
    changed(fleet, a_model(most=2, source="/new"))
    new = the_new(fleet)
    fleet.handle(a_word(old, ShardState.ENDED, cause="killed by SIGKILL"), 21.0)
    wake(fleet, until=21.0)
    fleet.handle(a_word(new, ShardState.READY), 22.0)
    wake(fleet, until=60.0)
    assert [(replica.id, replica.state) for replica in fleet.statistics().models[0].replicas] == [
        (new.replica, ShardState.READY)
    ]


def test_one_that_stands_in_takes_the_place_of_none_that_still_loads() -> None:
    model = replace(OLD, scaling=Scaling(min=2, max=2))
    fleet, effects = a_fleet(model)
    one, two = desires(effects)[-1].shards
    for shard in (one, two):
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=15.0)
    # one loads again, and the other ends, while what is written has no place
    fleet.handle(a_word(one, ShardState.ENDED, cause="killed"), 16.0)
    again = next(shard for shard in desires(wake(fleet, until=25.0))[-1].shards if shard.replica == one.replica)
    fleet.handle(a_word(again, ShardState.LOADING), 26.0)
    changed(fleet, nowhere(model), now=27.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 28.0)
    fleet.handle(a_word(two, ShardState.ENDED, cause="killed"), 29.0)
    wake(fleet, until=60.0)
    shown = {replica.id: (replica.state, replica.epoch) for replica in fleet.statistics().models[0].replicas}
    assert shown == {one.replica: (ShardState.LOADING, 2), two.replica: (ShardState.PLACED, 2)}


def test_what_has_served_stands_in_for_nothing_that_has_a_place_in_a_moment() -> None:
    fleet, old = a_served()
    fleet.handle(NodeRegistered(node=a_node("n2", engines=("nosuch",))), 16.0)
    fleet.handle(NodeSilent(node=N2), 17.0)
    changed(fleet, nowhere(OLD))
    fleet.handle(a_word(old, ShardState.ENDED, cause="killed"), 30.0)
    assert desires(wake(fleet, until=60.0)) == []
    # it is not so
    effects = fleet.handle(NodeLost(node=N2), 61.0)
    effects += wake(fleet, until=61.0)
    again = the_shard(effects)
    assert (again.model.source, again.node) == (OLD.source, N1)


def test_while_one_is_not_proven_no_other_gives_up_its_room_though_one_is_missing() -> None:
    model = replace(OLD, scaling=Scaling(min=3, max=3))
    fleet, effects = a_fleet(model, nodes=[a_node(memory_gb=12.0)])
    shards = {shard.replica: shard for shard in desires(effects)[-1].shards}
    for shard in shards.values():
        fleet.handle(a_word(shard, ShardState.READY), 1.0)
    wake(fleet, until=15.0)
    effects = changed(fleet, replace(NEW, scaling=model.scaling))
    (drain,) = drains(effects)
    fleet.handle(drained(drain), 21.0)
    fleet.handle(a_word(shards.pop(drain.replica), ShardState.ENDED), 22.0)
    wake(fleet, until=22.0)
    fleet.handle(a_word(the_new(fleet), ShardState.LOADING), 23.0)
    # one that serves dies, and its room is not there any more
    gone = shards.popitem()[1]
    fleet.handle(NodeReported(node=a_node(memory_gb=8.0)), 24.0)
    fleet.handle(a_word(gone, ShardState.ENDED, cause="killed"), 25.0)
    assert drains(wake(fleet, until=600.0)) == []
    assert [replica.shard for replica in fleet.ready(M)] == list(shards.values())


def test_what_does_not_serve_yet_goes_first_though_there_is_a_place_in_a_moment() -> None:
    fleet, effects = a_fleet(OLD, nodes=[a_node(memory_gb=6.0)])
    fleet.handle(a_word(the_shard(effects), ShardState.LOADING), 1.0)
    fleet.handle(NodeRegistered(node=a_node("n2")), 2.0)
    fleet.handle(NodeSilent(node=N2), 3.0)
    effects = changed(fleet, NEW)
    assert [(desire.node, desire.shards) for desire in desires(effects)] == [(N1, ())]


def test_what_stands_in_for_a_definition_without_a_place_stays_as_long_as_any_other() -> None:
    model = a_model(least=0)
    fleet, _ = a_fleet(model)
    shard = the_shard(fleet.handle(Demand(model=M, waiting=1), 1.0))
    fleet.handle(a_word(shard, ShardState.READY), 2.0)
    fleet.handle(Demand(model=M, answered=True), 3.0)
    nowhere = replace(model, profiles=(replace(model.profiles[0], engine="nosuch"),))
    (drain,) = drains(fleet.handle(CatalogChanged(models=(nowhere,)), 20.0))
    fleet.handle(drained(drain), 20.0)
    fleet.handle(a_word(shard, ShardState.ENDED), 21.0)
    stand_in = the_shard(fleet.handle(Demand(model=M, waiting=1), 30.0))
    assert stand_in.profile.engine == "e"
    # its client hangs up while it loads
    assert desires(fleet.handle(Demand(model=M), 31.0)) == []
    fleet.handle(a_word(stand_in, ShardState.READY), 40.0)
    assert drains(wake(fleet, until=939.0)) == []
    assert [drain.replica for drain in drains(wake(fleet, until=940.0))] == ["rep-m-1"]


def test_what_begins_to_serve_by_an_earlier_definition_is_started_again_while_the_new_one_has_no_place() -> None:
    model = a_model()
    fleet, effects = a_fleet(model)
    shard = the_shard(effects)
    fleet.handle(a_word(shard, ShardState.LOADING), 1.0)
    nowhere = replace(model, profiles=(replace(model.profiles[0], engine="nosuch"),))
    fleet.handle(CatalogChanged(models=(nowhere,)), 2.0)
    effects = fleet.handle(a_word(shard, ShardState.READY), 3.0)
    assert [effect.model for effect in effects if isinstance(effect, Proven)] == [model]
    fleet.handle(a_word(shard, ShardState.ENDED, cause="killed"), 5.0)
    again = the_shard(wake(fleet, until=10.0))
    assert (again.profile.engine, again.epoch) == ("e", 2)


def test_what_was_being_changed_when_the_server_ended_has_its_room_before_those_that_wait() -> None:
    changed, waiting = a_model("m", gb=10.0), a_model("a", gb=10.0)
    fleet = Fleet()
    fleet.handle(NodesExpected(nodes=frozenset({N1}), until=60.0), 0.0)
    new = replace(changed, source="/new")
    fleet.handle(CatalogChanged(models=(waiting, new), proven={M: changed}), 1.0)
    assert the_shard(fleet.handle(NodeRegistered(node=a_node()), 2.0)).model.name == M


def a_smaller_one() -> tuple[Fleet, ShardSpec]:
    """On the only node, of 16 GB, ``m`` has gone in place from 14 GB to 4, which has been placed at 23; ``w`` waits for
    10."""
    old = a_model(gb=14.0)
    fleet, _ = a_ready(old)
    wake(fleet, until=20.0)
    small = replace(old, source="/small", profiles=(replace(old.profiles[0], min_memory_gb=4.0),))
    waiting = a_model("w", gb=10.0)
    (drain,) = drains(fleet.handle(CatalogChanged(models=(small, waiting)), 21.0) + wake(fleet, until=21.0))
    fleet.handle(drained(drain), 22.0)
    (ended,) = (replica.shard for replica in fleet.statistics().models[0].replicas)
    return fleet, the_shard(fleet.handle(a_word(ended, ShardState.ENDED), 23.0))


def test_what_is_left_of_the_room_of_an_old_one_is_kept_until_the_new_one_is_proven() -> None:
    fleet, first = a_smaller_one()
    assert first.model.source == "/small"
    fleet.handle(a_word(first, ShardState.ENDED, cause="no"), 24.0)
    second = the_shard(wake(fleet, until=29.0))
    assert second.model.source == "/small"
    effects = fleet.handle(a_word(second, ShardState.ENDED, cause="no"), 30.0) + wake(fleet, until=30.0)
    assert the_shard(effects).model.source == "/m.gguf"


def test_what_is_left_of_the_room_of_an_old_one_is_given_away_once_the_new_one_is_proven() -> None:
    fleet, first = a_smaller_one()
    fleet.handle(a_word(first, ShardState.READY), 24.0)
    assert desires(wake(fleet, until=33.0)) == []
    assert [shard.model.name for shard in desires(wake(fleet, until=34.0))[-1].shards] == ["m", "w"]
