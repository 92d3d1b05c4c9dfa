"""What runs and what should: events go in with a time, effects come out, and nothing else writes this state."""

from __future__ import annotations

import math
from typing import assert_never

from llmgw.core import arrivals, evicting, leaving, lives, orders, planning, timers
from llmgw.core.brake import Brake
from llmgw.core.catalog import Catalog
from llmgw.core.effects import Effect
from llmgw.core.events import (
    CatalogChanged,
    Demand,
    Drained,
    Event,
    FactsKnown,
    ModelCalled,
    ModelsHeld,
    NodeLost,
    NodeMarked,
    NodeRegistered,
    NodeRemoved,
    NodeReported,
    NodesExpected,
    NodeSilent,
    ReplicaRecalled,
    RulesChanged,
    ShardChanged,
    Stopping,
    Wakeup,
    WeightsReported,
)
from llmgw.core.hosts import Host
from llmgw.core.learned import USUAL_LOAD_SECONDS, Figure, Learned
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.picture import FleetStatistics, picture
from llmgw.core.placement import Rejected, Verdict
from llmgw.core.replica import Replica, ReplicaId, ShardState
from llmgw.core.roster import Life
from llmgw.core.searching import Search
from llmgw.core.state import State, few
from llmgw.core.trace import Trace
from llmgw.units import format_duration

LONGEST_RETRY_AFTER_SECONDS = 120


class Fleet:
    """The machine. Only ``handle`` changes anything; all else reads."""

    def __init__(self) -> None:
        self._state = State()

    # -- what is read

    @property
    def catalog(self) -> Catalog:
        return self._state.catalog

    @property
    def trace(self) -> Trace:
        return self._state.trace

    def ready(self, name: ModelName) -> tuple[Replica, ...]:
        """The replicas that requests may go to, by id. A look-up, not a search: each request asks."""
        return self._state.roster.ready.get(name, ())

    def verdict(self, name: ModelName) -> Verdict | None:
        """What came of the last attempt to place a replica of this model; None when none is to the point."""
        return self._state.verdicts.get(name)

    def held(self, name: ModelName) -> bool:
        """An operator holds it at zero."""
        return name in self._state.held

    def launched(self, name: ModelName) -> Model | None:
        """The model as it is launched: as it is written, unless that has failed."""
        return self._state.launched(name)

    def filled(self, model: Model) -> Model:
        """The model with figures that launches have shown where none are written: what ``place`` is to go by."""
        return self._state.learned.fill(model, self._state.versions)

    def figures(self, model: Model) -> tuple[Figure, ...]:
        """The numbers that placement, evictions and Retry-After go by, and where each comes from."""
        return self._state.learned.figures(model, self._state.versions)

    def would_evict(self, model: Model, now: float) -> ReplicaId | float:
        """The idle replica of another model that would make way for this one now, where it finds no other place; else
        from when on there will be one (inf: there won't)."""
        found = evicting.choose(self._state, model, Search(self._state, model, now), now)
        return found if isinstance(found, float) else found.life[0]

    def silent_nodes(self, name: ModelName) -> tuple[NodeId, ...]:
        """The lost nodes that replicas of this model are on."""
        roster = self._state.roster
        on = {node for life in roster.of(name) if life.alive and not life.given_up for node in life.replica.nodes}
        return tuple(sorted(on & roster.lost_at.keys()))

    def idle(self) -> bool:
        """True when nothing runs or is about to run on any node."""
        return self._state.roster.idle()

    def makes_way(self, name: ModelName) -> tuple[ReplicaId, ...]:
        """The replicas of other models that are on their way out so that this one has their room."""
        lives = (self._state.roster.lives[key] for key in self._state.going)
        return tuple(sorted(life.replica.id for life in lives if life.evicted_for == name))

    def renews_in_place(self, name: ModelName) -> bool:
        """One of its own replicas is on its way out so that the next one has its room."""
        return any(life.in_place for life in self._state.roster.of(name) if life.key in self._state.going)

    def retry_after_seconds(self, name: ModelName, now: float) -> int:
        """When to ask again for a model that is not ready, from 1 to 120: by how long such a launch has taken before,
        and a plain guess until there was one. Where it lacks room, and nobody knows when there will be some, it is
        when room is next looked for whatever happens."""
        left = self.least_wait_seconds(name, now)
        if self._lacks_room(name):
            left += planning.BACKSTOP_SECONDS
        left = min(left, LONGEST_RETRY_AFTER_SECONDS)
        # A load that is late already says nothing of when it will be done.
        return min(max(math.ceil(left if left > 0 else USUAL_LOAD_SECONDS), 1), LONGEST_RETRY_AFTER_SECONDS)

    def _lacks_room(self, name: ModelName) -> bool:
        """Nothing of it is on its way, nor is room made for it or kept, and no time is known at which it has some."""
        state = self._state
        known = name in state.retry_at or name in state.roster.reserved
        if known or not isinstance(state.verdicts.get(name), Rejected):
            return False
        made = self.renews_in_place(name) or self.makes_way(name)
        return not made and not any(map(state.roster.is_desired, state.roster.of(name)))

    def least_wait_seconds(self, name: ModelName, now: float) -> float:
        """How long it takes until it is ready where there is room for it by then, as such launches go; 0 and less where
        it is late."""
        state, roster = self._state, self._state.roster
        model = state.launched(name)
        usual = (state.learned.load_seconds(model) if model is not None else None) or USUAL_LOAD_SECONDS
        began = [
            _find_begin(life, life.launched_at, now)
            for life in roster.of(name)
            if life.launched_at is not None and roster.is_desired(life)
        ]
        began_at = min(began) if began else max(state.retry_at.get(name, now), now)
        return began_at + usual - now

    def hosts(self) -> tuple[Host, ...]:
        """The nodes as placement sees them now, by id: with ``backing_off`` and ``failed`` all that an answer depends
        on, for whoever wants it explained somewhere else."""
        return self._state.roster.hosts()

    def backing_off(self, name: ModelName) -> dict[NodeId, float]:
        """Until when each node is not tried again for this model, because it failed there."""
        return self._state.backing_off(name)

    def failed(self, name: ModelName, now: float) -> dict[NodeId, int]:
        """How often in a row this model failed on each node, the last time within an hour."""
        return self._state.failed(name, now)

    def wanted(self, model: Model, now: float) -> int:
        """How many replicas there are to be now."""
        return self._state.wanted(model, now)

    def brake(self, now: float) -> Brake | None:
        """The brake, as it is at this moment; None when it does not hold."""
        return self._state.find_brake(now)

    def held_up(self, now: float) -> str | None:
        """Why what would be placed may not be: nothing at all while the server waits for its nodes, and nothing for
        lost nodes while the brake holds. None when neither is so."""
        if self._state.expected:
            names = few(sorted(self._state.expected))
            wait = format_duration(round(max(self._state.settled_at - now, 0.0)))
            return f"nothing is placed yet: the server waits for what {names} run, {wait} at most"
        brake = self.brake(now)
        return None if brake is None else timers.describe_brake(brake, now)

    def statistics(self, now: float | None = None) -> FleetStatistics:
        """An immutable picture for people and programs that look on; never a basis for a change. Without a time it does
        not tell of the brake."""
        brake = None if now is None else self.brake(now)
        state = self._state
        return picture(state, brake)

    # -- what changes it

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in what happened, answer what is to be done. Plans one model at most; a WakeAt asks for another turn."""
        state = self._state
        state.effects = []
        match event:
            case CatalogChanged():
                orders.change_catalog(state, event, now)
            case NodeRegistered():
                arrivals.register(state, event, now)
            case NodesExpected(nodes=nodes, until=until):
                arrivals.expect(state, nodes, until)
            case NodeReported(node=node, applied=applied):
                arrivals.take_report(state, node, applied, now)
            case NodeSilent(node=node_id):
                arrivals.fall_silent(state, node_id)
            case NodeLost(node=node_id):
                arrivals.lose(state, node_id, now)
            case NodeMarked():
                leaving.mark(state, event, now)
            case NodeRemoved(node=node_id):
                arrivals.remove(state, node_id, now)
            case RulesChanged(replace_after=replace_after, brake=brake):
                arrivals.change_rules(state, replace_after, brake)
            case ShardChanged(node=node_id, report=report):
                life = state.roster.at(node_id, report.replica, report.epoch)
                # A word of an epoch that is over, or that this fleet never began, moves nothing.
                if life is not None:
                    lives.observe(state, life, node_id, report, now)
            case WeightsReported(node=node_id, weights=weights):
                arrivals.take_weights(state, node_id, weights, now)
            case Demand():
                orders.take_demand(state, event, now)
            case ModelCalled(model=name):
                orders.call(state, name, now)
            case ModelsHeld(models=models):
                orders.hold(state, models)
            case ReplicaRecalled():
                orders.recall(state, event)
            case Drained():
                leaving.take_drained(state, event, now)
            case FactsKnown(facts=facts):
                state.learned = Learned(facts)
                state.plan_waiting()
            case Wakeup():
                state.wake_at = None
            case Stopping():
                lives.stop_everything(state, now)
            case _:
                assert_never(event)
        timers.settle(state, now)
        timers.heed_brake(state, now)
        timers.come_due(state, now)
        if not state.expected:
            planning.plan_one(state, now)
        state.effects += state.roster.changed_desires()
        timers.ask_to_be_woken(state, now)
        return state.effects


def _find_begin(life: Life, launched_at: float, now: float) -> float:
    """When its launch began or will begin, as far as that is known: its weights may have to come first."""
    fetch = life.replica.fetch
    if fetch is not None:
        return now + (LONGEST_RETRY_AFTER_SECONDS if fetch.left_seconds is None else fetch.left_seconds)
    # (what came before may have been hours of fetching)
    began = (ShardState.LAUNCHING, ShardState.LOADING)
    return life.replica.since if life.replica.state in began else launched_at
