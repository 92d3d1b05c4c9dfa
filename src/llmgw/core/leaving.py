"""How a replica goes that we have done with: out of what requests may go to, its last ones answered, then stopped."""

from __future__ import annotations

from dataclasses import replace

from llmgw.core import lives
from llmgw.core.effects import Announce, Drain, Happening
from llmgw.core.events import Drained, NodeMarked
from llmgw.core.replica import ShardState
from llmgw.core.roster import Life
from llmgw.core.state import State
from llmgw.units import format_duration

# As long as a whole reply may take.
DRAIN_SECONDS = 600.0


def retire(state: State, life: Life, why: str, now: float, *, what: Happening = Happening.STOPPING) -> None:
    """It is to stop once nobody is answered by it any more: at once, where it has not served yet."""
    replica = life.replica
    if replica.draining is not None or not state.roster.is_desired(life):
        return
    text = f"{replica.id} on {', '.join(replica.nodes)} is to stop: {why}"
    if replica.state is not ShardState.READY:
        state.announce(replica, text, what=what)
        lives.take_back(state, life, None, now)
        return
    state.drains += 1
    life.drain = state.drains
    life.replica = replace(replica, draining=why)
    state.drain_until[life.key] = now + DRAIN_SECONDS
    state.going[life.key] = None
    state.roster.put(life)
    state.effects.append(Drain(replica=replica.id, epoch=replica.epoch, number=life.drain))
    state.announce(replica, text, what=what)


def revive(state: State, life: Life) -> None:
    """It is wanted after all, before it was stopped."""
    state.drain_until.pop(life.key, None)
    state.going.pop(life.key, None)
    life.replica = replace(life.replica, draining=None)
    life.in_place = False
    state.roster.put(life)
    state.demands.note_ready(life.replica.model)
    state.announce(life.replica, f"{life.replica.id} stays after all", what=Happening.READY)


def take_drained(state: State, event: Drained, now: float) -> None:
    """Nobody is answered by it any more."""
    for life in list(state.roster.epochs_of(event.replica)):
        same = life.replica.epoch == event.epoch and life.drain == event.number
        # One that was revived meanwhile, and drained again, has another number.
        if same and life.replica.draining is not None:
            lives.take_back(state, life, None, now)
            # On a node that is lost nothing more is heard of it.
            state.plan_later(life.replica.model)


def cut_off(state: State, life: Life, why: str, now: float) -> None:
    """It stops now, whoever is answered by it."""
    text = f"{life.replica.id} on {', '.join(life.replica.nodes)} stops with all that runs there: {why}"
    state.announce(life.replica, text, warning=True, what=Happening.STOPPING)
    lives.take_back(state, life, None, now)
    state.plan_later(life.replica.model)


def mark(state: State, event: NodeMarked, now: float) -> None:
    """What an operator has said of a node. One that is to be drained has its replicas replaced, model by model."""
    before = state.roster.marked(event.node)
    state.roster.mark(event)
    state.drain_node_at.pop(event.node, None)
    if event.draining:
        if event.drain_until is not None:
            state.drain_node_at[event.node] = event.drain_until
        if before is None or not before.draining:
            state.effects.append(
                Announce(model=None, node=event.node, text=_tell_drain(event, now), what=Happening.DRAINING)
            )
            known = event.node in state.roster.members and not state.roster.is_lost(event.node)
            if known and not lives.runs_anything(state, event.node):
                text = f"{event.node} is drained: nothing runs there"
                state.effects.append(Announce(model=None, node=event.node, text=text, what=Happening.DRAINING))
    for life in state.roster.on(event.node):
        state.plan_later(life.replica.model)
    state.plan_waiting()


def _tell_drain(event: NodeMarked, now: float) -> str:
    text = f"{event.node} is to be drained: what runs there is placed elsewhere, then it stops"
    if event.drain_until is None:
        return text
    return f"{text}; what is left in {format_duration(max(round(event.drain_until - now), 0))} stops all the same"
