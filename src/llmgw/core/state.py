"""What all rooms of the fleet work on: one state, which nothing outside them changes. Nothing is decided here."""

from __future__ import annotations

import math
from collections.abc import Iterable

from llmgw.core.brake import Brake, find_brake
from llmgw.core.catalog import Catalog
from llmgw.core.demand import Demands
from llmgw.core.effects import Announce, Effect, Happening
from llmgw.core.learned import Learned
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.placement import Rejected, Verdict
from llmgw.core.replica import Replica, ShardSpec, ShardState
from llmgw.core.rolling import Rolls, defines
from llmgw.core.roster import Life, LifeKey, Roster, ShardKey
from llmgw.core.scaling import Failures, wanted
from llmgw.core.trace import Trace

# What failed on a node longer ago says little of the next try there.
FAILED_SECONDS = 3600.0

# Before a server says otherwise.
REPLACE_AFTER_SECONDS = 60.0
BRAKE_SECONDS = 600.0

# Lines of the log about one registration, or one model that finds no place.
FEW = 16


class State:
    """All that the fleet knows. What has a time is dealt with by ``timers`` when that has come."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.trace = Trace()
        self.roster = Roster()
        self.failures: dict[ModelName, dict[NodeId, Failures]] = {}
        self.demands = Demands()
        self.learned = Learned()
        self.rolls = Rolls()
        # the models that an operator holds at zero
        self.held: frozenset[ModelName] = frozenset()
        # what came of the last attempt to place one
        self.verdicts: dict[ModelName, Verdict] = {}
        # what was last said of one that finds no place: whether fewer serve than are to
        self.told: dict[ModelName, bool] = {}
        # how many replicas each was to have when it was last looked at
        self.sizes: dict[ModelName, int] = {}
        # of those that others are on their way for, the replicas that these take the place of
        self.replacing: dict[ModelName, tuple[LifeKey, ...]] = {}
        # the models that are to be looked at, the first one in this turn
        self.unplanned: dict[ModelName, None] = {}
        # everything is to end, and nothing to begin
        self.stopping = False
        # what is to end and has not: draining, or out of the desired sets
        self.going: dict[LifeKey, None] = {}
        # the number of the last drain
        self.drains = 0
        # the next try
        self.retry_at: dict[ModelName, float] = {}
        # when a shard that is to stop, and that its node never spoke of, is taken for never launched
        self.forget_at: dict[ShardKey, float] = {}
        # when a replica of several nodes that ran before is whole or is none
        self.whole_at: dict[LifeKey, float] = {}
        # by when a node is to have spoken of what it was told to launch
        self.launched_at: dict[ShardKey, float] = {}
        # when what runs on a lost node is placed anew
        self.replace_at: dict[NodeId, float] = {}
        # when a replica has served for long enough to be believed
        self.prove_at: dict[LifeKey, float] = {}
        # when the last requests of one that is to stop have had their time
        self.drain_until: dict[LifeKey, float] = {}
        # when what is left on a node that is to be drained stops all the same
        self.drain_node_at: dict[NodeId, float] = {}
        # until when room is kept for a model that is to be there again
        self.reserved_until: dict[ModelName, float] = {}
        # when a model has been idle for long enough, or its load has settled
        self.review_at: dict[ModelName, float] = {}
        # when those that found no room are looked at once more
        self.look_again_at = math.inf
        # when they last were because of what a node has said
        self.looked_at = -math.inf
        # what the scheduler was last asked for; None when it has come
        self.wake_at: float | None = None
        # of a server that has begun anew: who was there before, who may still come and until when, and who did not
        # (with the time at which they were given up)
        self.known: frozenset[NodeId] = frozenset()
        self.expected: set[NodeId] = set()
        self.settled_at = 0.0
        self.absent: dict[NodeId, float] = {}
        self.replace_after = REPLACE_AFTER_SECONDS
        self.brake_seconds = BRAKE_SECONDS
        # as the last turn left it; ``find_brake`` says how it is at this moment
        self.brake: Brake | None = None
        # what this turn asks for
        self.effects: list[Effect] = []

    def announce(
        self,
        replica: Replica,
        text: str,
        *,
        what: Happening,
        lines: tuple[str, ...] = (),
        again: bool = False,
        warning: bool = False,
    ) -> None:
        """Tell the log, and whoever waits for the replica's model."""
        node = replica.shards[0].spec.node
        self.effects.append(
            Announce(model=replica.model, node=node, text=text, lines=lines, again=again, warning=warning, what=what)
        )

    def plan_later(self, name: ModelName) -> None:
        """Look at this model in a turn to come, or at the end of this one."""
        if not self.stopping:
            self.unplanned[name] = None

    def plan_first(self, name: ModelName) -> None:
        """Look at this model before all others."""
        if not self.stopping:
            self.unplanned = {name: None, **self.unplanned}

    def plan_waiting(self) -> None:
        """There may be room now for those that found none."""
        self.plan_in_turn(name for name, verdict in self.verdicts.items() if isinstance(verdict, Rejected))

    def plan_in_turn(self, names: Iterable[ModelName]) -> None:
        """Look at these: first those that are to run in any case, then those that somebody has waited for the longest.
        Else of three that take turns on room for one the same could come away empty every time."""
        for name in sorted(names, key=self._urge):
            self.plan_later(name)

    def _urge(self, name: ModelName) -> tuple[bool, float]:
        model = self.launched(name)
        return model is None or model.scaling.min == 0, self.demands.since(name)

    def launched(self, name: ModelName) -> Model | None:
        """The model as it is launched: as it is written, unless that has failed."""
        return self.rolls.launched.get(name)

    def versions(self, engine: str) -> set[str]:
        """Those of an engine that the nodes have."""
        found = (member.node.engines for member in self.roster.members.values())
        return {each.version or "" for engines in found for each in engines if each.engine == engine}

    def wanted(self, model: Model, now: float) -> int:
        """How many replicas there are to be now."""
        if model.name in self.held:
            return 0
        lives = [life for life in self.roster.of(model.name) if self.is_serving_on(life)]
        # (one that another takes the place of is no sign of load)
        settled = self.demands.settled(model.name, self.sizes.get(model.name, len(lives)), now)
        return wanted(model, used=self.is_used(model, lives, now), settled=settled)

    def is_used(self, model: Model, lives: Iterable[Life], now: float) -> bool:
        """Whether one that loads on demand is asked for, or was of late."""
        lives = tuple(lives)
        # (the last requests of one that goes are no reason to load another)
        if self.is_asked_for(model.name, now) or any(map(self.is_busy, lives)):
            return True
        # One that loads is not idle, however long that takes. What is to be replaced is not worth another one.
        return any(
            life.replica.state is not ShardState.READY or self.idle_at(model, life, now) > now
            for life in lives
            if life.stands_in or self.find_move(life) is None
        )

    def find_move(self, life: Life) -> str | None:
        """Why a replica is to be replaced, though it may serve; None when it is as it is to be."""
        why = self.find_leave(life)
        if why is None and not self.is_defined(life.replica.shard):
            why = "its definition has changed"
        return why

    def find_leave(self, life: Life) -> str | None:
        """Why a replica is to be replaced whatever it was launched by; None when it may stay."""
        if life.recalled:
            return "an operator wants it replaced"
        draining = [node for node in life.replica.nodes if self.roster.is_draining(node)]
        return f"{', '.join(draining)} is to be drained" if draining else None

    def idle_at(self, model: Model, life: Life, now: float) -> float:
        """When a replica that serves has been idle for long enough to go."""
        last = max(self.demands.asked_at(model.name, now), life.replica.since)
        return last + model.scaling.idle_timeout_seconds

    def is_busy(self, life: Life) -> bool:
        """Some request is in flight to it, as the door has last told."""
        return self.demands.in_flight(life.replica.model, life.replica.id) > 0

    def is_serving_on(self, life: Life) -> bool:
        """It is to run, for all that is known."""
        return life.replica.draining is None and self.roster.is_desired(life)

    def is_asked_for(self, name: ModelName, now: float) -> bool:
        """Somebody waits for it, or was told to come back."""
        return self.demands.waiting(name) > 0 or self.demands.is_owed(name, now)

    def backing_off(self, name: ModelName) -> dict[NodeId, float]:
        """Until when each node is not tried again for this model, because it failed there."""
        return {node: failures.until for node, failures in self.failures.get(name, {}).items()}

    def failed(self, name: ModelName, now: float) -> dict[NodeId, int]:
        """How often in a row this model failed on each node, the last time within an hour."""
        tries = self.failures.get(name, {})
        for node in [node for node, failures in tries.items() if failures.until <= now - FAILED_SECONDS]:
            del tries[node]
        return {node: failures.count for node, failures in tries.items()}

    def forget_failures(self, name: ModelName) -> None:
        """What came of a model's earlier tries says nothing of the next one."""
        self.failures.pop(name, None)
        self.verdicts.pop(name, None)
        self.retry_at.pop(name, None)

    def find_brake(self, now: float) -> Brake | None:
        """The brake, as it is at this moment; None when it does not hold."""
        lost_at = [*self.roster.lost_at.values(), *self.absent.values()]
        return find_brake(lost_at, len(self.roster.members) + len(self.absent), self.brake_seconds, now)

    def is_defined(self, spec: ShardSpec) -> bool:
        """Its model, too, would be launched as this shard runs."""
        launched = self.launched(spec.model.name)
        return launched is not None and defines(launched, spec)


def few(names: Iterable[str]) -> str:
    """The first of them, and how many more."""
    found = list(names)
    more = f" and {len(found) - FEW} more" if len(found) > FEW else ""
    return ", ".join(found[:FEW]) + more
