"""What is started and what is shed: the replicas that each model lacks or has too many of, one model at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, islice

from llmgw.core import crews, leaving, starting
from llmgw.core.effects import Announce, Happening
from llmgw.core.evicting import is_about_to_end, make_way
from llmgw.core.model import Model, ModelName
from llmgw.core.placement import Placement, Rejected, Verdict
from llmgw.core.rejection import Reason
from llmgw.core.replica import BEFORE_LAUNCH, ShardState
from llmgw.core.roster import Life
from llmgw.core.searching import SOON_SECONDS, Search
from llmgw.core.state import FEW, State, few
from llmgw.core.trace import Decision

# What found no room is looked at again at each event that may have made some. Should that ever miss one: this often.
BACKSTOP_SECONDS = 30.0

# Replicas of other models that are looked at for room to come: the rest may as well not be.
MOST_LOOKS = 16

# Nodes that are looked at anew before something is placed: more wait for the next turn.
HOSTS_A_TURN = 100


def plan_one(state: State, now: float) -> None:
    """One model a turn, however many wait: a thousand at once would hold up every request meanwhile."""
    while state.unplanned and state.roster.freshen(HOSTS_A_TURN):
        name = _find_next(state)
        del state.unplanned[name]
        model = state.launched(name)
        if model is not None:
            _plan(state, model, now)
            state.review_at[name] = _find_review(state, model, now)
            return


def _find_next(state: State) -> ModelName:
    """The first in the row; of those that somebody waits for, the one that has been waited for the longest."""
    name = next(iter(state.unplanned))
    return name if state.demands.since(name) == math.inf else min(state.unplanned, key=state.demands.since)


def _plan(state: State, model: Model, now: float) -> None:
    state.retry_at.pop(model.name, None)
    crew = crews.muster(state, model, now)
    want = state.sizes[model.name] = state.wanted(model, now)
    crews.shed(state, model, crew, want, now)
    lacking = want - len(crew.steady)
    # What is not proven yet may fail: one at a time, or a bad definition takes all places at once.
    pending = any(not life.proven for life in crew.steady)
    trying = _is_tried_again(state, model.name, now)
    _note_replaced(state, model, crew, len(crew.steady) + trying if pending or trying else 0)
    missing = lacking - len(crew.moving)
    asked = max(missing, 1 if crew.moving and lacking > 0 and not pending else 0)
    if asked <= 0:
        if isinstance(state.verdicts.get(model.name), Rejected):
            del state.verdicts[model.name]
        state.told.pop(model.name, None)
        if not any(life.replica.shard.on_trial and not life.proven for life in crew.steady):
            # (one that fails, and returns to what it was, may need all of it)
            _give_back_room(state, model)
        return
    if _may_run_unseen(state, model, now):
        return
    revived = crews.revive(state, crew, missing)
    asked, missing = asked - revived, missing - revived
    # One that is still stopping counts against the most there may be: its memory is in use, even where the profile
    # books none. Its end plans this model again, or a time by which anything has ended.
    most = max(model.scaling.max, want) + (1 if crew.moving else 0)
    room = most - len(crew.steady) - len(crew.moving) - sum(_is_waited_for(state, life) for life in crew.going)
    for _ in range(min(asked, room)):
        if not _place(state, model, crew, now, missing=missing > 0, pending=pending):
            return
        missing -= 1


def _place(state: State, model: Model, crew: crews.Crew, now: float, *, missing: bool, pending: bool) -> bool:
    """Start one more, or see to it that there will be room; whether it was started. ``missing``: fewer serve than are
    to, else it is to take the place of one that does. ``pending``: another that is not proven is on its way."""
    search = Search(state, model, now)
    verdict = search.find()
    earlier = state.verdicts.get(model.name)
    if isinstance(verdict, Placement):
        _begin(state, model, verdict, crew, now)
        return True
    # Kept as it is, it would hold all nodes as they were at this moment.
    state.verdicts[model.name] = verdict.keep(FEW)
    if verdict.reasons():
        state.look_again_at = min(state.look_again_at, now + BACKSTOP_SECONDS)
    going = [key for key in state.going if is_about_to_end(state, key, model.name, now)]
    if search.fits_once_gone(going):
        return False
    if search.keeps_in_vain:
        # Others would wait for nothing.
        _give_back_room(state, model)
    hopes = search.fits_soon()
    if missing and not hopes and not any(crews.serves(state, life) for life in (*crew.steady, *crew.moving)):
        if make_way(state, model, search, now):
            return False
        # Nobody wrote the figures that keep it from its only place.
        found = search.find_unfilled()
        if found is not None:
            _begin(state, model, found, crew, now)
            return True
    by = None
    if not hopes and (missing or _needs_stand_in(state, model, crew)):
        by, found = search.find_by_proven()
        if by is not None and found is not None:
            # What is written has no place at all: what served before has.
            _begin(state, by, found, crew, now)
            return True
        if search.fits_by_proven_once_gone(going):
            return False
    if not pending and not _may_go_first(state, crew, search, hopes=hopes, now=now):
        _wait_for_room(state, model, verdict, now)
        if by is not None and model.name in state.retry_at:
            # A failure was announced, with the time of the next try: that is by what served before.
            return False
        _tell_no_room(state, model, verdict, crew, earlier, missing=missing)
    return False


def _needs_stand_in(state: State, model: Model, crew: crews.Crew) -> bool:
    """Of those that are to be replaced so many can't stay that one of the earlier definition has to take their place
    where the new one has none. One that was started for that counts, or there would be no end of them."""
    staying = sum(state.find_leave(life) is None for life in crew.moving)
    return len(crew.steady) + staying < state.sizes[model.name]


def _is_waited_for(state: State, life: Life) -> bool:
    """It is about to end, where another may be. What still answers somebody may take minutes."""
    if any(map(state.roster.is_draining, life.replica.nodes)):
        return False
    return life.replica.draining is None or not state.is_busy(life)


def _give_back_room(state: State, model: Model) -> None:
    state.reserved_until.pop(model.name, None)
    if state.roster.release(model.name):
        state.plan_waiting()


def _begin(state: State, model: Model, found: Placement, crew: crews.Crew, now: float) -> None:
    state.verdicts[model.name] = found.keep()
    state.told.pop(model.name, None)
    if crew.lost:
        crews.give_up(state, crew.lost.pop(0), now)
    starting.start(state, model, found, now)
    _note_replaced(state, model, crew, len(crew.steady) + 1)
    # (one that stands in makes none needless that may stay)
    by_launched = model is state.launched(model.name)
    needless = (life for life in crew.moving if by_launched or state.find_leave(life) is not None)
    for life in [life for life in needless if crews.is_no_loss(state, life)][:1]:
        # It does not serve yet, and would only have to go again.
        crew.moving.remove(life)
        leaving.retire(state, life, state.find_move(life) or "", now)


def _note_replaced(state: State, model: Model, crew: crews.Crew, coming: int) -> None:
    """Which of its replicas go as soon as what is on its way beside them has served for a while: nobody else's room is
    left where the next of its own go in place. Of more than are to run one goes in any case."""
    if len(crew.moving) > state.sizes[model.name] - coming:
        state.replacing[model.name] = tuple(life.key for life in crew.moving)
    else:
        state.replacing.pop(model.name, None)


def _is_room_to_come(state: State, search: Search, name: ModelName, now: float) -> bool:
    """Whether the room of a replica of another model would do that goes, or is about to be replaced. What is not proven
    comes to an end by itself: models that all wait for room are no hope for each other. What does not end in its time
    may never."""
    going = (life for key in state.going if (life := state.roster.lives.get(key)) is not None)
    ending = (life for life in going if life.replica.draining is not None or crews.is_stopping(state, life, now))
    leaving_room = (life for life in ending if not life.in_place and life.evicted_for is None)
    replaced = (
        life
        for other, keys in state.replacing.items()
        if _is_about_to_leave(state, other, now)
        for key in keys
        if (life := state.roster.lives.get(key)) is not None and life.alive
    )
    others = [*islice((life for life in chain(leaving_room, replaced) if life.replica.model != name), MOST_LOOKS)]
    alone = any(
        search.could_fit_on(node, life.key, soon=True)
        for life in others
        for node in life.replica.nodes
        if node in state.roster.members
    )
    # (what takes more than one leaves may have to wait for several)
    return alone or (len(others) > 1 and search.fits_once_gone((life.key for life in others), soon=True))


def _is_about_to_leave(state: State, name: ModelName, now: float) -> bool:
    """Something of it is on its way, or tried again in a moment; or it has come, and what it replaces goes as soon as
    its turn to be planned is there."""
    if name in state.unplanned or _is_tried_again(state, name, now):
        return True
    return any(_is_coming(state, life, now) for life in state.roster.of(name))


def _is_tried_again(state: State, name: ModelName, now: float) -> bool:
    return any(now < until <= now + SOON_SECONDS for until in state.backing_off(name).values())


def _is_coming(state: State, life: Life, now: float) -> bool:
    """It will have served for long enough, or have failed, within the time of a load: its weights, which may be on
    their way for hours, are here."""
    if life.proven or not state.is_serving_on(life) or not life.alive:
        return False
    # (of one that was taken over nobody knows since when it was on its way)
    placed_at = life.replica.since if life.launched_at is None else life.launched_at
    return life.replica.state not in BEFORE_LAUNCH or now < placed_at + SOON_SECONDS


def _may_go_first(state: State, crew: crews.Crew, search: Search, *, hopes: bool, now: float) -> bool:
    """Whether one of those that are to be replaced goes now, so that its room is the next one's. Not from a node that
    is to be drained: to take a model away would be no favour; nor where there will be room beside it in a moment; and
    one after the other, however long one that goes still answers somebody."""
    if any(life.replica.draining is not None for life in crew.going):
        return False
    for life in reversed(crew.moving):
        if any(map(state.roster.is_draining, life.replica.nodes)) or (hopes and crews.serves(state, life)):
            continue
        if crews.serves(state, life) and _is_room_to_come(state, search, life.replica.model, now):
            return False
        # (what an operator wants replaced goes in place as it is, where what is written has no place at all)
        if search.fits_once_gone((life.key,)) or (life.recalled and search.fits_by_proven_once_gone((life.key,))):
            why = state.find_move(life)
            life.in_place = True
            leaving.retire(state, life, f"{why}, and there is no room for another beside it", now)
            return True
    return False


def _find_review(state: State, model: Model, now: float) -> float:
    """When this model is to be looked at again though nothing happens."""
    times = [state.demands.settles_at(model.name, now)]
    for life in state.roster.of(model.name):
        if crews.is_stopping(state, life, now):
            times.append(life.replica.since + crews.STOPPING_SECONDS)
    if model.scaling.on_demand:
        for life in state.roster.of(model.name):
            if state.is_serving_on(life) and life.replica.state is ShardState.READY:
                times.append(state.idle_at(model, life, now))
        times.append(state.demands.owed_until(model.name))
    return min((at for at in times if at > now), default=math.inf)


def _may_run_unseen(state: State, model: Model, now: float) -> bool:
    """The brake holds, and nodes that this server has never heard may run it. What is known of it, or asked for,
    goes its way."""
    if state.brake is None or not state.absent or state.is_asked_for(model.name, now):
        return False
    return not any(True for _ in state.roster.of(model.name))


def _wait_for_room(state: State, model: Model, verdict: Rejected, now: float) -> None:
    counts = {str(reason): number for reason, number in verdict.reasons().items()}
    state.trace.add(Decision(at=now, model=model.name, why=_count(verdict), reasons=counts))
    waits = [until for until in state.backing_off(model.name).values() if until > now]
    if waits:
        # Also where something else speaks against those nodes first: that may be what it would make way for.
        state.retry_at[model.name] = min(*waits, state.retry_at.get(model.name, math.inf))


def _tell_no_room(
    state: State, model: Model, verdict: Rejected, crew: crews.Crew, earlier: Verdict | None, *, missing: bool
) -> None:
    reasons = verdict.reasons()
    # Numbers move with each report; only another reason is news, and that there are too few now.
    before = state.told.get(model.name)
    state.told[model.name] = missing
    known = isinstance(earlier, Rejected) and earlier.reasons() == reasons and before == missing
    # (a failure was announced, with the time of the next try)
    if known or not reasons or Reason.BACKING_OFF in reasons:
        return
    shown = verdict.first(FEW)
    more = sum(reasons.values()) - len(shown)
    lines = [f"{no.node}, profile {no.profile!r}: {no.detail}" for no in shown]
    lines += [f"and {more} more; llmgw ctl explain-placement {model.name} shows all"] if more else []
    text = f"no node can run {model.name} now ({_count(verdict)})"
    if crew.moving:
        text = f"{_tell_staying(state, crew.moving)}, and {text}"
    told = Announce(model=model.name, text=text, lines=tuple(lines), warning=True, what=Happening.WAITING)
    state.effects.append(told)


def _tell_staying(state: State, moving: Sequence[Life]) -> str:
    """Those that wait for another to take their place, each with why it is to go."""
    names: dict[str, list[str]] = {}
    for life in moving:
        names.setdefault(state.find_move(life) or "", []).append(life.replica.id)
    told = [
        f"{few(staying)} {'stays' if len(staying) == 1 else 'stay'} until there is room for another: {why}"
        for why, staying in names.items()
    ]
    return "; ".join(told)


def _count(verdict: Rejected) -> str:
    return verdict.counted() or "there is no node, or no profile"
