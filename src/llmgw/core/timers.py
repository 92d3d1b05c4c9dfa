"""What is due: nodes that were waited for long enough, the brake, next tries, and when to be woken for the next."""

from __future__ import annotations

import math

from llmgw.core import adoption, leaving, lives
from llmgw.core.brake import Brake
from llmgw.core.effects import Announce, Happening, WakeAt
from llmgw.core.roster import Life, LifeKey
from llmgw.core.state import State, few
from llmgw.units import format_duration


def settle(state: State, now: float) -> None:
    """The nodes of an earlier server have had their time to come back."""
    if not state.expected or now < state.settled_at:
        return
    state.absent = dict.fromkeys(sorted(state.expected), now)
    state.expected.clear()
    text = f"not back since the server has begun anew: {few(state.absent)}; what they run is placed elsewhere"
    state.effects.append(Announce(model=None, text=text, warning=True, what=Happening.NODE))


def heed_brake(state: State, now: float) -> None:
    """Whether so many nodes are lost that none of them is dealt with. Once it is over, those that are still lost get
    their time again."""
    before, state.brake = state.brake, state.find_brake(now)
    if state.brake is not None:
        if before is None:
            text = describe_brake(state.brake, now)
            state.effects.append(Announce(model=None, text=text, warning=True, what=Happening.BRAKE))
        return
    if before is None:
        return
    text = "the brake is off: lost nodes are dealt with one by one again"
    state.effects.append(Announce(model=None, text=text, what=Happening.BRAKE))
    if now < before.until:
        # Some are back, and the others may be about to come.
        state.replace_at = dict.fromkeys(state.replace_at, now + state.replace_after)
        state.whole_at = dict.fromkeys(state.whole_at, now + adoption.WHOLE_SECONDS)
        if state.absent:
            # What those run nobody here has heard yet.
            state.expected, state.absent = set(state.absent), {}
            state.settled_at = now + state.replace_after
    for model in state.catalog:
        state.plan_later(model.name)


def describe_brake(brake: Brake, now: float) -> str:
    """What holds, why, and for how long at most."""
    wait = format_duration(round(max(brake.until - now, 0.0)))
    return (
        f"the brake holds: {brake.lost} of {brake.nodes} nodes were lost together, so it may be this server that is "
        f"cut off. Nothing is stopped or placed anew for them before they are back, or for {wait}"
    )


def come_due(state: State, now: float) -> None:
    """Do what was put off till now. What concerns lost nodes waits for the brake too."""
    due = [name for name, at in state.retry_at.items() if at <= now]
    for name in due:
        del state.retry_at[name]
    state.plan_in_turn(due)
    for name in [name for name, at in state.reserved_until.items() if at <= now]:
        del state.reserved_until[name]
        state.roster.release(name)
        state.plan_waiting()
    for name in [name for name, at in state.review_at.items() if at <= now]:
        del state.review_at[name]
        state.plan_later(name)
    # (an epoch makes room for the next one without a word to these)
    for life in _pop_due(state, state.prove_at, now):
        lives.prove(state, life, now)
    for life in _pop_due(state, state.drain_until, now):
        leaving.cut_off(state, life, f"its last requests have had {format_duration(leaving.DRAIN_SECONDS)}", now)
    for node in [node for node, at in state.drain_node_at.items() if at <= now]:
        del state.drain_node_at[node]
        for life in list(state.roster.on(node)):
            if life.replica.draining is not None:
                leaving.cut_off(state, life, f"{node} is to be empty by now", now)
            state.plan_later(life.replica.model)
    for key in [key for key, at in state.forget_at.items() if at <= now]:
        lives.gone(state, state.roster.owner(key), key[0], now)
    if state.brake is None:
        for life in _pop_due(state, state.whole_at, now):
            if not life.complete:
                lives.take_back(state, life, f"{len(life.replica.shards)} of its {life.count} shards came back", now)
        for node in [node for node, at in state.replace_at.items() if at <= now]:
            del state.replace_at[node]
            for life in state.roster.on(node):
                state.plan_later(life.replica.model)
    if now >= state.look_again_at:
        state.look_again_at = math.inf
        state.plan_waiting()


def _pop_due(state: State, times: dict[LifeKey, float], now: float) -> list[Life]:
    """The lives whose time has come, of those that there still are."""
    due = [key for key, at in times.items() if at <= now]
    for key in due:
        del times[key]
    return [state.roster.lives[key] for key in due if key in state.roster.lives]


def ask_to_be_woken(state: State, now: float) -> None:
    """At the first time that anything is due, unless that was asked for."""
    times = [*state.retry_at.values(), *state.forget_at.values(), state.look_again_at]
    times += [*state.review_at.values(), *state.prove_at.values()]
    times += [*state.reserved_until.values(), *state.drain_until.values(), *state.drain_node_at.values()]
    # What the brake holds up has its own time after that.
    times += [state.brake.until] if state.brake is not None else state.replace_at.values()
    times += state.whole_at.values() if state.brake is None else ()
    if state.unplanned and not state.expected:
        times.append(now)
    if state.expected:
        times.append(state.settled_at)
    at = min(times)
    if at < math.inf and (state.wake_at is None or at < state.wake_at):
        state.wake_at = at
        state.effects.append(WakeAt(at=at))
