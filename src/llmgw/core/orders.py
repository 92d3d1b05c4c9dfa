"""What people want of the fleet: other definitions, models stopped or loaded, replicas replaced, requests answered."""

from __future__ import annotations

from llmgw.core import leaving, lives
from llmgw.core.catalog import Catalog
from llmgw.core.effects import Announce, Happening, Proven
from llmgw.core.events import CatalogChanged, Demand, ReplicaRecalled
from llmgw.core.model import Model, ModelName
from llmgw.core.replica import ShardState
from llmgw.core.rolling import is_same_launch
from llmgw.core.roster import Life
from llmgw.core.state import State, few


def change_catalog(state: State, event: CatalogChanged, now: float) -> None:
    """Go by these models from now on: what they would not launch as it runs is replaced, and what is of none stops."""
    earlier, state.catalog = state.catalog, Catalog(event.models)
    for model in earlier:
        _prove_what_serves(state, model)
    state.rolls.change(state.catalog, event.proven, event.failed)
    for model in earlier:
        name = model.name
        written = state.catalog.named(name)
        if written != model:
            state.forget_failures(name)
        if written is None:
            state.demands.forget(name)
            for known in (state.review_at, state.sizes, state.replacing, state.told, state.reserved_until):
                known.pop(name, None)
            if state.roster.release(name):
                state.plan_waiting()
            for life in list(state.roster.of(name)):
                _dismiss(state, life, "its model was removed", now)
        elif not is_same_launch(model, written):
            _tell_rollout(state, written)
    for model in state.catalog:
        if earlier.named(model.name) != model:
            state.plan_later(model.name)
    # The room of one that was to be started again when the server before this one ended is not another's.
    state.unplanned = dict.fromkeys(sorted(state.unplanned, key=lambda name: name not in event.served))
    for name in sorted(event.proven, reverse=True):
        # It served, and was being changed when the server before this one ended: its room is not to be another's.
        state.plan_first(name)
    state.roster.forget_held(each.source for each in state.rolls.launched.values())


def _prove_what_serves(state: State, model: Model) -> None:
    """Where nothing is known to have served for longer, what serves at this moment is what to return to."""
    written = state.catalog.named(model.name)
    if written is None or is_same_launch(model, written) or state.rolls.proven(model.name) is not None:
        return
    for life in state.roster.of(model.name):
        proven = state.rolls.note_proven(life.replica.shard) if life.replica.state is ShardState.READY else None
        if proven is not None:
            state.effects.append(Proven(model=proven))
            return


def _dismiss(state: State, life: Life, why: str, now: float) -> None:
    """Of no use any more, whatever it has come to."""
    if life.alive:
        leaving.retire(state, life, why, now)
    else:
        lives.forget(state, life)


def _tell_rollout(state: State, model: Model) -> None:
    outdated = [
        life.replica.id
        for life in state.roster.of(model.name)
        if state.is_serving_on(life) and not state.is_defined(life.replica.shard)
    ]
    if outdated:
        text = f"the definition of {model.name} has changed: {few(sorted(outdated))} will be replaced, one by one"
        state.effects.append(Announce(model=model.name, text=text, what=Happening.ROLLING))


def hold(state: State, held: frozenset[ModelName]) -> None:
    """These are to have no replica, whatever their scaling says."""
    changed, state.held = held ^ state.held, held
    for name in sorted(changed):
        state.forget_failures(name)
        state.plan_later(name)
        if state.catalog.named(name) is not None:
            text = f"an operator has stopped {name}" if name in held else f"{name} is no longer held at zero"
            state.effects.append(Announce(model=name, text=text))


def recall(state: State, event: ReplicaRecalled) -> None:
    """This epoch of a replica is to be replaced."""
    for life in state.roster.epochs_of(event.replica):
        if life.replica.epoch == event.epoch and state.is_serving_on(life):
            life.recalled = True
            state.plan_later(life.replica.model)


def call(state: State, name: ModelName, now: float) -> None:
    """An operator wants this model loaded."""
    model = state.catalog.named(name)
    if model is not None:
        state.demands.note_call(name, now)
        if state.rolls.try_again(name):
            state.forget_failures(name)
            _tell_rollout(state, model)
        # At once: whoever asked is told what came of it.
        state.plan_first(name)


def take_demand(state: State, demand: Demand, now: float) -> None:
    """How much a model is asked for, by its name or an alias."""
    # Only for models that there are: a client's invention must not grow memory.
    model = state.catalog.resolve(demand.model)
    if model is None:
        return
    asked = state.demands.is_answered(model.name) or state.demands.waiting(model.name) > 0
    state.demands.note(model, demand, now, ready=model.name in state.roster.ready)
    if demand.answered_by:
        for life in state.roster.of(model.name):
            life.answered |= (life.replica.id, life.replica.epoch) in demand.answered_by
    state.plan_later(model.name)
    if asked and not state.demands.is_answered(model.name) and not state.demands.waiting(model.name):
        # It is idle, or loads for nobody, and may make way for those that wait.
        state.plan_waiting()
