"""Who serves a model, who is to be replaced, and who is one too many."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmgw.core import leaving, lives
from llmgw.core.model import Model
from llmgw.core.replica import ShardState
from llmgw.core.roster import Life
from llmgw.core.state import State
from llmgw.units import format_duration

# What does not end within this time may never: it keeps its room, and holds up nothing else.
STOPPING_SECONDS = 120.0


@dataclass(slots=True)
class Crew:
    """The replicas of a model: ``steady`` are as they are to be; ``moving`` serve until others take their place;
    ``lost`` can't be reached, and another takes their place as soon as there is one; ``going`` are about to end;
    ``failed`` have, and are shown until their next try."""

    steady: list[Life] = field(default_factory=list)
    moving: list[Life] = field(default_factory=list)
    lost: list[Life] = field(default_factory=list)
    going: list[Life] = field(default_factory=list)
    failed: list[Life] = field(default_factory=list)


def muster(state: State, model: Model, now: float) -> Crew:
    """Who there is, the most useful first; what is lost for too long, and serves nobody, is given up."""
    crew = Crew()
    ranked = sorted(state.roster.of(model.name), key=lambda life: _rank(state, life))
    for life in ranked:
        if not state.is_serving_on(life):
            # (what a node runs that nobody asked it to is no reason to go without)
            if not life.stray and (life.replica.draining is not None or is_stopping(state, life, now)):
                crew.going.append(life)
        elif _is_overdue(state, life):
            if life.count > 1:
                # The nodes that can be reached end their shards first: what is left of it serves nobody.
                give_up(state, life, now)
                crew.going += [life] if is_stopping(state, life, now) else []
            else:
                crew.lost.append(life)
        elif state.find_move(life) is not None:
            crew.moving.append(life)
        else:
            crew.steady.append(life)
    crew.failed += [life for life in ranked if not life.alive]
    return crew


def serves(state: State, life: Life) -> bool:
    return life.replica.state is ShardState.READY and not any(map(state.roster.is_lost, life.replica.nodes))


def shed(state: State, model: Model, crew: Crew, want: int, now: float) -> None:
    """Stop what is one too many, and what another has taken the place of."""
    for at, life in [*enumerate(crew.steady)][want:]:
        # What is cut off with the others may answer people that nobody here sees.
        cut_off = state.brake is not None and any(map(state.roster.is_lost, life.replica.nodes))
        if not cut_off or at >= model.scaling.max or model.name in state.held:
            crew.steady.remove(life)
            _retire(state, crew, life, _why_surplus(state, model, want), now)
    proven = sum(life.proven and serves(state, life) for life in crew.steady)
    # The least useful first, and before them those that can't stay.
    least_first = crew.moving[::-1]
    for life in sorted(least_first, key=lambda life: state.find_leave(life) is None):
        why = _why_moved(state, model, life, want)
        others = sum(_makes_needless(state, each, life) for each in crew.moving if each is not life)
        if _is_late(state, life, now):
            crew.moving.remove(life)
            crew.going.append(life)
            draining = [node for node in life.replica.nodes if state.roster.is_draining(node)]
            why = f"{', '.join(draining)} is to be drained"
            if any(map(state.roster.is_lost, life.replica.nodes)):
                lives.take_back(state, life, f"{why}; on a node that is lost, once that is back", now)
            else:
                leaving.cut_off(state, life, f"{why}, and its time is over", now)
        elif proven + others >= want:
            crew.moving.remove(life)
            _retire(state, crew, life, why, now)
    # A model that nobody wants now shows what became of it; one that has what it wants has nothing to try again.
    kept = len(crew.steady) + len(crew.moving) + len(crew.lost)
    for life in crew.failed[max((want or model.scaling.max) - kept, 0) :]:
        lives.forget(state, life)
    for life in crew.lost[max(want - len(crew.steady), 0) :]:
        lives.take_back(state, life, f"no more than {want} are to run", now)
        crew.lost.remove(life)


def _makes_needless(state: State, other: Life, life: Life) -> bool:
    """Of two that are to be replaced, whether this one may go since there is the other."""
    leaves, stays = state.find_leave(life) is not None, state.find_leave(other) is None
    if leaves and stays:
        # It takes the place of this one, as one of the right definition would.
        return (other.proven and serves(state, other)) or is_no_loss(state, life)
    if not leaves and not stays:
        # It may have been started since the other can't stay.
        return not serves(state, life) and not life.stands_in
    return serves(state, other) or not serves(state, life)


def is_no_loss(state: State, life: Life) -> bool:
    """It does not serve yet, and once it did it would have to go: as soon as another is on its way it may."""
    loads = life.replica.state is not ShardState.READY
    return loads and (life.recalled or not state.is_defined(life.replica.shard))


def _is_late(state: State, life: Life, now: float) -> bool:
    """Its node is to be drained by now, whether there is room elsewhere or not."""
    marks = map(state.roster.marked, life.replica.nodes)
    return any(
        mark is not None and mark.draining and mark.drain_until is not None and mark.drain_until <= now
        for mark in marks
    )


def _retire(state: State, crew: Crew, life: Life, why: str, now: float) -> None:
    leaving.retire(state, life, why, now)
    crew.going.append(life)


def _why_moved(state: State, model: Model, life: Life, want: int) -> str:
    """Of one that is to be replaced; where none of its model may run at all, that is what ends it."""
    if model.name in state.held or model.scaling.max == 0:
        return _why_surplus(state, model, want)
    return state.find_move(life) or ""


def _why_surplus(state: State, model: Model, want: int) -> str:
    scaling = model.scaling
    if model.name in state.held:
        return "an operator has stopped its model"
    if scaling.max == 0 or want >= scaling.max:
        return f"no more than {scaling.max} may run"
    if want == 0:
        return f"nobody has asked for it for {format_duration(scaling.idle_timeout_seconds)}"
    return f"its load needs no more than {want}"


def revive(state: State, crew: Crew, missing: int) -> int:
    """Keep those that were to stop for want of use, and are missing now; how many they are."""
    found = [
        life
        for life in crew.going
        if life.replica.draining is not None
        and life.evicted_for is None
        and state.find_move(life) is None
        and serves(state, life)
    ]
    revived = found[: max(missing, 0)]
    for life in revived:
        leaving.revive(state, life)
        crew.going.remove(life)
        crew.steady.append(life)
    return len(revived)


def _is_overdue(state: State, life: Life) -> bool:
    """A node of it is lost for so long that it is not waited for any more."""
    if state.brake is not None:
        return False
    return any(node in state.roster.lost_at and node not in state.replace_at for node in life.replica.nodes)


def give_up(state: State, life: Life, now: float) -> None:
    """Another epoch takes its place. What of it can't be reached keeps its room, and ends when its node is back."""
    life.given_up = True
    gone = [node for node in life.replica.nodes if node in state.roster.lost_at]
    lives.take_back(state, life, f"{', '.join(gone)} is lost, and another takes its place", now)


def is_stopping(state: State, life: Life, now: float) -> bool:
    """It is to end, can be told to, and has not had its time."""
    over = not life.alive or state.roster.is_desired(life) or not state.roster.is_running(life)
    return not over and now < life.replica.since + STOPPING_SECONDS


def _rank(state: State, life: Life) -> tuple[bool, bool, bool, bool, int, str]:
    """The most useful first: those that serve, and of these the proven, those that we have placed and the busy."""
    lost = any(node in state.roster.lost_at for node in life.replica.nodes)
    busy = state.demands.in_flight(life.replica.model, life.replica.id)
    return (
        lost,
        life.replica.state is not ShardState.READY,
        not life.proven,
        life.launched_at is None,
        -busy,
        life.replica.id,
    )
