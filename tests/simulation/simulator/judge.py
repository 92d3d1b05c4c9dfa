"""Keeps the log of a simulation, and checks after every step all that has to hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from llmgw.core.effects import Announce, Desire, Effect, WakeAt
from llmgw.core.events import Event, NodeLost, NodeRegistered, NodeRemoved, NodeReported, Wakeup
from llmgw.core.node import NodeId
from llmgw.core.replica import ShardSpec
from simulator.books import Books
from simulator.faults import Scenario, show
from simulator.invariants import MOVES, STATE, Move, ShardTry, State

SHOWN_LINES = 80


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
        self.moved = True
        self._state = None
        before = self._books
        for effect in effects:
            if isinstance(effect, Announce):
                self.note(effect.text)
        desires = [effect for effect in effects if isinstance(effect, Desire)]
        for desire in desires:
            self.note(f"{desire.node} is to run {', '.join(map(_name, desire.shards)) or 'nothing'}")
        if desires and self._checked and before is not None:
            self._check_move(event, effects, before)
        for desire in desires:
            self._told[desire.node] = desire
            self._known.update((spec.node, spec.id, spec.epoch) for spec in desire.shards)

    def forget_server(self) -> None:
        """It has ended. Its successor may give the same numbers again, to what does not run any more."""
        self._lost_at.clear()
        self._told.clear()
        self._known.clear()
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
            self._state = self._look()
            self._books = self._state.books
        return self._state

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
        )
        for invariant in MOVES:
            self.judge(f"{invariant.__name__} ({type(event).__name__})", invariant(move))

    def _is_braked(self, before: Books) -> bool:
        """More than half of all nodes, and at least three, were lost lately; as the simulation counts."""
        recent = sum(self._clock() - at < self._brake_seconds for at in self._lost_at.values())
        return recent >= 3 and 2 * recent > len(before.hosts)


def _name(spec: ShardSpec) -> str:
    return f"{spec.id}@{spec.epoch}"
