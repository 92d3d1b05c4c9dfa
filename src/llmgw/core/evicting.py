"""Which idle replica makes way for a model that somebody asks for, and from when on it may."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from llmgw.core import leaving
from llmgw.core.crews import is_stopping
from llmgw.core.effects import Happening
from llmgw.core.learned import USUAL_LOAD_SECONDS
from llmgw.core.model import Model, ModelName
from llmgw.core.replica import ShardState
from llmgw.core.roster import LifeKey
from llmgw.core.searching import Search
from llmgw.core.state import State

# A model that was just loaded stays for at least this long: two that have room for one would else take turns with each
# request.
RESIDENCY_SECONDS = 120.0

# Each is a placement over all nodes: a client that asks for what fits nowhere must not hold up everybody else.
FULL_LOOKS = 4

TURN_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A replica that serves nobody: what it costs to have it again, in seconds, since when nobody has asked for it,
    and from when on it may make way. ``gone_at``: when it goes by itself."""

    life: LifeKey
    reload_seconds: float
    idle_since: float
    free_at: float
    gone_at: float


def make_way(state: State, model: Model, search: Search, now: float) -> bool:
    """Stop an idle replica of another model that loads on demand, where its room is enough."""
    found = choose(state, model, search, now)
    if isinstance(found, float):
        if found < math.inf:
            state.retry_at[model.name] = found
        return False
    life = state.roster.lives[found.life]
    life.evicted_for = model.name
    ready = life.replica.state is ShardState.READY
    why = "it is idle, and makes way" if ready else "nobody waits for it any more, and it makes way"
    leaving.retire(state, life, f"{why} for {model.name}", now, what=Happening.EVICTED)
    return True


def choose(state: State, model: Model, search: Search, now: float) -> Idle | float:
    """The one to be stopped: of those whose room alone is enough the cheapest to have again, the longest idle of these.

    None that may go now: when one will (inf: none will).
    """
    if search.has_failed_often:
        # One that never comes up would push out what serves, again and again.
        return math.inf
    later, looks = math.inf, FULL_LOOKS
    idle = sorted(_list_idle(state, model, now), key=lambda each: (each.reload_seconds, each.idle_since, each.life))
    for each in idle:
        # (what is about to go by itself does so in a turn of its own)
        soon = each.free_at if each.free_at <= now else max(min(each.free_at, each.gone_at), now + TURN_SECONDS)
        if soon >= later or not looks:
            continue
        node = state.roster.lives[each.life].replica.shard.node
        # A look at its own node costs little, and tells nearly all.
        if not search.could_fit_on(node, each.life):
            continue
        looks -= 1
        if not search.fits_once_gone((each.life,)):
            continue
        if each.free_at <= now:
            return each
        later = soon
    return later


def _list_idle(state: State, asker: Model, now: float) -> Iterator[Idle]:
    """Replicas on one node of models that load on demand, that nobody is answered by or waits for; and those that load
    though whoever asked has left."""
    for name, model in state.rolls.launched.items():
        if not model.scaling.on_demand or name == asker.name or state.is_asked_for(name, now):
            continue
        # What takes the place of another that serves is no load that nobody wants.
        serves = any(life.replica.state is ShardState.READY for life in state.roster.of(name))
        for life in state.roster.of(name):
            replica = life.replica
            if (
                not state.is_serving_on(life)
                or life.count > 1
                or state.is_busy(life)
                or state.roster.is_lost(replica.shard.node)
            ):
                continue
            ready = replica.state is ShardState.READY
            if serves and not ready:
                continue
            seconds = state.learned.load_seconds(model) or USUAL_LOAD_SECONDS
            yield Idle(
                life=life.key,
                reload_seconds=seconds if ready else 0.0,
                idle_since=max(state.demands.asked_at(name, now), replica.since),
                free_at=replica.since + RESIDENCY_SECONDS if ready else now,
                gone_at=state.idle_at(model, life, now),
            )


def is_about_to_end(state: State, key: LifeKey, asker: ModelName, now: float) -> bool:
    """It gives back its room in a moment: one that still answers somebody may take minutes."""
    life = state.roster.lives[key]
    if life.replica.draining is None:
        return is_stopping(state, life, now)
    return life.evicted_for == asker or not state.is_busy(life)
