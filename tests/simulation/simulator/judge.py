"""Keeps the log of a simulation, and checks after every step all that has to hold."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from llmgw.core.effects import Announce, Desire, Drain, Effect, WakeAt
from llmgw.core.events import (
    Demand,
    Event,
    NodeLost,
    NodeRegistered,
    NodeRemoved,
    NodeReported,
    ReplicaRecalled,
    Wakeup,
)
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import Replica, ReplicaId, ShardSpec, ShardState
from simulator.books import ON_ITS_WAY_OUT, Books
from simulator.faults import Scenario, show
from simulator.invariants import MOVES, STATE, Move, Reckoner, ShardTry, State

SHOWN_LINES = 80
# So long the place of a replica is kept for the one that follows it.
LEFT_SECONDS = 60.0
# What was launched longer ago is none of the same row.
BEGUN_SECONDS = 300.0


class Broken(AssertionError):  # noqa: N818 - named by what it is, like ours
    """Something that has to hold does not; the text has the scenario, as code."""


class Judge:
    """``look`` tells how everything is, and ``brake_seconds`` is the server's rule. Unchecked it only keeps the log."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        clock: Callable[[], float],
        look: Callable[[], State],
        brake_seconds: float,
        checked: bool = True,
    ) -> None:
        self.scenario = scenario
        self.lines: list[str] = []
        # Something has changed since the last check.
        self.moved = False
        self.events = 0
        self._clock = clock
        self._look = look
        self._brake_seconds = brake_seconds
        self._checked = checked
        self._hash = hashlib.sha256()
        self._state: State | None = None
        self._books: Books | None = None
        self._known: set[ShardTry] = set()
        self._told: dict[NodeId, Desire] = {}
        self._lost_at: dict[NodeId, float] = {}
        self._drained_at: dict[tuple[ReplicaId, int], float] = {}
        self._demands: dict[ModelName, Demand] = {}
        self._recalled: set[tuple[ReplicaId, int]] = set()
        # who makes way for whom, until it has ended
        self._evicted: dict[tuple[ReplicaId, int], ModelName] = {}
        self.evictions = 0
        # the GPUs that a model has left for its next replica, and until when it is waited for
        self._left: dict[str, tuple[ModelName, float]] = {}
        # when shards of each model were launched of late
        self._begun: dict[ModelName, deque[float]] = {}

    def note(self, text: str) -> None:
        """A line of the log."""
        line = f"{self._clock():.3f} {text}"
        self.lines.append(line)
        self._hash.update(line.encode() + b"\n")

    def log_hash(self) -> str:
        return self._hash.hexdigest()

    def complain(self, what: str) -> None:
        """Something does not hold: end here, and say how to come here again."""
        lines = "\n".join(self.lines[-SHOWN_LINES:])
        raise Broken(
            f"{what}\nat {self._clock():.3f} s; the last that happened:\n{lines}\n"
            f"To play it again:\n{show(self.scenario)}"
        )

    def judge(self, what: str, faults: Iterator[str]) -> None:
        found = [*faults]
        if found:
            self.complain(f"{what}: " + "; ".join(found))

    # -- what happens

    def follow(self, event: Event, effects: list[Effect]) -> None:
        """The fleet has handled an event."""
        self.events += 1
        match event:
            case NodeReported() | Wakeup() if all(isinstance(effect, WakeAt) for effect in effects):
                # (a node that says it is well moves nothing, nor does a time that has come for nothing)
                return
            case NodeRegistered(node=node, running=running):
                self._lost_at.pop(node.id, None)
                self._known.update((node.id, spec.id, spec.epoch) for spec, _ in running)
            case NodeLost(node=node_id):
                self._lost_at[node_id] = self._clock()
            case NodeRemoved(node=node_id):
                self._told.pop(node_id, None)
                self._lost_at.pop(node_id, None)
            case Demand(model=model):
                self._demands[model] = event
            case ReplicaRecalled(replica=replica, epoch=epoch):
                self._recalled.add((replica, epoch))
        self.moved = True
        self._state = None
        before = self._books
        for effect in effects:
            if isinstance(effect, Announce):
                self.note(effect.text)
        desires = [effect for effect in effects if isinstance(effect, Desire)]
        for desire in desires:
            self.note(f"{desire.node} is to run {', '.join(map(_name, desire.shards)) or 'nothing'}")
        drains = [effect for effect in effects if isinstance(effect, Drain)]
        if (desires or drains) and self._checked and before is not None:
            self._check_move(event, effects, before)
        for drain in drains:
            self._drained_at[drain.replica, drain.epoch] = self._clock()
        for desire in desires:
            self._note_begun(desire)
            self._told[desire.node] = desire
            self._known.update((spec.node, spec.id, spec.epoch) for spec in desire.shards)

    def _note_begun(self, desire: Desire) -> None:
        now = self._clock()
        for spec in desire.shards:
            if (spec.node, spec.id, spec.epoch) not in self._known:
                times = self._begun.setdefault(spec.model.name, deque())
                times.append(now)
                while times[0] < now - BEGUN_SECONDS:
                    times.popleft()

    def forget_server(self) -> None:
        """It has ended. Its successor may give the same numbers again, to what does not run any more."""
        self._lost_at.clear()
        self._told.clear()
        self._known.clear()
        for known in (self._drained_at, self._demands, self._evicted, self._left, self._begun):
            known.clear()
        self._recalled.clear()
        self._books = None
        self._state = None
        self.moved = True

    # -- what is checked

    def check(self) -> None:
        """How everything is now."""
        if not self.moved:
            return
        self.moved = False
        if self._checked:
            state = self._now()
            for invariant in STATE:
                self.judge(invariant.__name__, invariant(state))
            self._state = None

    def _now(self) -> State:
        if self._state is None:
            self._state = replace(self._look(), recalled=self._recalled)
            before, books = self._books, self._state.books
            self._books = books
            if before is not None and books is not None and self._state.reckoning is not None:
                self._note_left(before, books, self._state.reckoning)
            if books is not None:
                for key in [key for key in self._evicted if _is_over(books.find(*key))]:
                    del self._evicted[key]
        return self._state

    def _note_left(self, before: Books, after: Books, reckoning: Reckoner) -> None:
        """The places that models leave which are about to take them again, and those that they have."""
        for replica in after.replicas:
            if replica.state not in ON_ITS_WAY_OUT:
                for gpu in replica.shard.gpus or ():
                    self._left.pop(gpu, None)
        for replica in before.replicas:
            now = after.find(replica.id, replica.epoch)
            if replica.state is ShardState.ENDED or len(replica.shards) > 1 or not _is_over(now):
                continue
            in_place = replica.draining is not None and "no room for another beside" in replica.draining
            node = replica.shard.node
            waits = reckoning.backing_off(replica.model).get(node, math.inf)
            fell = now is not None and now.cause is not None and waits <= LEFT_SECONDS
            if in_place or fell:
                until = self._clock() + min(LEFT_SECONDS, waits if fell else LEFT_SECONDS)
                self._left |= dict.fromkeys(replica.shard.gpus or (), (replica.model, until))

    def _check_move(self, event: Event, effects: list[Effect], before: Books) -> None:
        state = self._now()
        after = state.books
        if after is None:
            return
        move = Move(
            event=event,
            effects=effects,
            before=before,
            after=after,
            state=state,
            told=self._told,
            known=self._known,
            braked=self._is_braked(before),
            drained_at=self._drained_at,
            demands=self._demands,
            evicted=self._evicted,
            left=self._left,
            begun={name: len(times) for name, times in self._begun.items()},
        )
        for invariant in MOVES:
            self.judge(f"{invariant.__name__} ({type(event).__name__})", invariant(move))
        for victim, asker in move.evictions():
            self.evictions += victim.state is ShardState.READY
            self._evicted[victim.id, victim.epoch] = asker

    def _is_braked(self, before: Books) -> bool:
        """More than half of all nodes, and at least three, were lost lately; as the simulation counts."""
        recent = sum(self._clock() - at < self._brake_seconds for at in self._lost_at.values())
        return recent >= 3 and 2 * recent > len(before.hosts)


def _is_over(replica: Replica | None) -> bool:
    return replica is None or replica.state is ShardState.ENDED


def _name(spec: ShardSpec) -> str:
    return f"{spec.id}@{spec.epoch}"
