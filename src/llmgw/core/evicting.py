"""Which idle replica makes way for a model that somebody asks for, and from when on it may."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from llmgw.core import leaving
from llmgw.core.crews import is_stopping
from llmgw.core.effects import Happening
from llmgw.core.hosts import Host
from llmgw.core.learned import USUAL_LOAD_SECONDS
from llmgw.core.model import Model, ModelName
from llmgw.core.placement import Placement, place
from llmgw.core.replica import ShardState
from llmgw.core.roster import LifeKey
from llmgw.core.state import State

# A model that was just loaded stays for at least this long: two that have room for one would else take turns with each
# request.
RESIDENCY_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A replica that serves nobody: what it costs to have it again, in seconds, since when nobody has asked for it,
    and from when on it may make way."""

    life: LifeKey
    reload_seconds: float
    idle_since: float
    free_at: float


def find_victim(idle: Iterable[Idle], makes_room: Callable[[LifeKey], bool], now: float) -> Idle | float:
    """The one to be stopped: of those whose room alone is enough the cheapest to have again, the longest idle of these.

    None that may go now: when one will (inf: none will).
    """
    later = math.inf
    for each in sorted(idle, key=lambda each: (each.reload_seconds, each.idle_since, each.life)):
        if each.free_at > now:
            if each.free_at < later and makes_room(each.life):
                later = each.free_at
        elif makes_room(each.life):
            return each
    return later


def make_way(state: State, model: Model, filled: Model, now: float) -> bool:
    """Stop an idle replica of another model that loads on demand, where its room is enough."""
    found = choose(state, model, filled, now)
    if isinstance(found, float):
        if found < math.inf:
            state.retry_at[model.name] = found
        return False
    life = state.roster.lives[found.life]
    life.evicted_for = model.name
    leaving.retire(state, life, f"it is idle, and makes way for {model.name}", now, what=Happening.EVICTED)
    return True


def choose(state: State, model: Model, filled: Model, now: float) -> Idle | float:
    """Which one that would be now, or from when on there will be one (inf: there won't)."""
    backing_off, failed = state.backing_off(model.name), state.failed(model.name, now)
    single = all(profile.nodes == 1 for profile in filled.profiles)

    def fits(hosts: Sequence[Host]) -> bool:
        return isinstance(place(filled, hosts, backing_off, now, failed=failed), Placement)

    def makes_room(key: LifeKey) -> bool:
        node = state.roster.lives[key].replica.shard.node
        # A look at its own node alone costs little, and tells nearly all.
        if single and not fits((state.roster.host_without(node, key),)):
            return False
        return fits(state.roster.hosts_without((key,)))

    return find_victim(_list_idle(state, model, now), makes_room, now)


def _list_idle(state: State, asker: Model, now: float) -> Iterator[Idle]:
    """Replicas on one node of models that load on demand, that nobody is answered by or waits for; and those that load
    though whoever asked has left."""
    for name, model in state.rolls.launched.items():
        if not model.scaling.on_demand or name == asker.name or state.is_asked_for(name, now):
            continue
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
            seconds = state.learned.load_seconds(model) or USUAL_LOAD_SECONDS
            yield Idle(
                life=life.key,
                reload_seconds=seconds if ready else 0.0,
                idle_since=max(state.demands.asked_at(name, now), replica.since),
                free_at=replica.since + RESIDENCY_SECONDS if ready else now,
            )


def is_about_to_end(state: State, key: LifeKey, asker: ModelName, now: float) -> bool:
    """It gives back its room in a moment: one that still answers somebody may take minutes."""
    life = state.roster.lives[key]
    if life.replica.draining is None:
        return is_stopping(state, life, now)
    return life.evicted_for == asker or not state.is_busy(life)
