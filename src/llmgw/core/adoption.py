"""What ran before this fleet knew of it: taken over as it is, or left to its node to stop."""

from __future__ import annotations

from dataclasses import replace

from llmgw.core import lives
from llmgw.core.effects import Announce, Happening
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import (
    BEFORE_LAUNCH,
    Replica,
    Shard,
    ShardReport,
    ShardSpec,
    ShardState,
    reached,
    replica_id,
    shard_id,
)
from llmgw.core.rolling import PROVING_SECONDS, defines
from llmgw.core.roster import Life, Member
from llmgw.core.state import State

# The nodes of a replica that ran before this server each come when they come. Then it is whole, or it is none.
WHOLE_SECONDS = 30.0

# Nobody gets so far, and a node that says it did must not bring a replica to where no number is left for its next try.
MOST_EPOCHS = 2**31

# Of a replica, by its digits.
LONGEST_NUMBER = 4


def find_running(
    state: State, member: Member, spec: ShardSpec, report: ShardReport, *, room: dict[ModelName, int], now: float
) -> Life | None:
    """A shard that ran before this fleet knew of it: taken over as it is, or left to its node to stop.

    ``room`` is how many more there may be of each model, as far as it was asked for.
    """
    node = member.node.id
    if report.state is ShardState.ENDED:
        text = f"{spec.replica} had ended on {node}: {report.cause or lives.NO_CAUSE}"
        text += f"; {report.remedy}" if report.remedy else ""
        what = Happening.FAILED
        model = spec.model.name
        state.effects.append(Announce(model=model, node=node, text=text, lines=report.lines, warning=True, what=what))
        return None
    # Booked on the node that it runs on, whatever that node was called when it was placed.
    there = replace(spec, node=node)
    life = _find_rest(state, spec)
    ours = (
        not state.stopping
        and report.state is not ShardState.STOPPING
        and spec.node == node
        and may_be_named(state, spec)
        and spec.epoch < MOST_EPOCHS
        and spec.epoch >= state.roster.last_given(spec.replica)
        and (life is not None or (not state.roster.is_alive(spec.replica) and _has_room(state, spec, room)))
    )
    shard = Shard(
        spec=there,
        state=reached(report, there) if ours else ShardState.STOPPING,
        since=now,
        endpoint=report.endpoint,
        context_length=report.context_length,
        progress=report.progress,
        load=report.load,
        measured=report.measured,
        fetch=report.fetch,
    )
    if ours and life is None:
        room[spec.model.name] -= 1
    if life is None or not ours:
        life = _begin(shard, spec.count, now)
        life.stray = not ours
        # (one that serves may as well be what ran before the change)
        life.stands_in = shard.state is not ShardState.READY and _is_earlier(state, spec)
    else:
        life.set_shard(shard, now)
    if ours:
        state.roster.desire(spec)
        if not life.complete:
            state.whole_at.setdefault(life.key, max(now, state.settled_at) + WHOLE_SECONDS)
    life.heard.add(node)
    lives.enter(state, life)
    if life.stray:
        state.going[life.key] = None
    if ours:
        _note_size(state, spec.model.name, now)
    if shard.state is ShardState.READY:
        state.roster.note_held(node, spec.model.source)
    fate = "is taken over" if ours else "is to stop: it isn't what the catalog asks for"
    # (what its node only prepares has no engine yet)
    how = "being prepared" if report.state in BEFORE_LAUNCH else "running"
    text = f"{spec.replica} was already {how} on {node} and {fate}"
    state.announce(life.replica, text, what=Happening.ADOPTED)
    lives.let_go(state, life, now)
    if life.replica.state is ShardState.READY:
        state.prove_at[life.key] = now + PROVING_SECONDS
    return life


def _note_size(state: State, name: ModelName, now: float) -> None:
    """So many there were worth having. Of those that take the place of others what serves counts: one too many where
    both do is the lesser harm."""
    there = [life for life in state.roster.of(name) if state.is_serving_on(life)]
    if len({state.find_move(life) is None for life in there}) > 1:
        there = [life for life in there if life.replica.state is ShardState.READY]
    state.sizes[name] = max(state.sizes.get(name, 0), len(there))
    state.demands.note_found(name, now)


def find_again(state: State, life: Life, node: NodeId, report: ShardReport, now: float) -> None:
    """A shard that was taken for gone, since nobody spoke of it, and runs: it is to stop, and books its room."""
    shard = life.shard_on(node)
    if shard.state is ShardState.ENDED and report.state is not ShardState.ENDED:
        life.set_shard(replace(shard, state=ShardState.STOPPING, since=now), now)
        state.going[life.key] = None
        state.roster.put(life)


def _find_rest(state: State, spec: ShardSpec) -> Life | None:
    """The life of several nodes that this shard is a missing part of."""
    for life in state.roster.epochs_of(spec.replica):
        replica = life.replica
        wanted_here = replica.epoch == spec.epoch and life.count == spec.count and state.roster.is_desired(life)
        if wanted_here and spec.rank not in {shard.spec.rank for shard in replica.shards}:
            return life
    return None


def _begin(shard: Shard, count: int, now: float) -> Life:
    spec = shard.spec
    reached = shard.state if count == 1 or shard.state is ShardState.STOPPING else ShardState.PLACED
    replica = Replica(
        id=spec.replica,
        model=spec.model.name,
        profile=spec.profile.name,
        epoch=spec.epoch,
        shards=(shard,),
        state=reached,
        since=now,
    )
    return Life(replica, count=count)


def _is_earlier(state: State, spec: ShardSpec) -> bool:
    """It was launched as its model was when it served, and would not be so now."""
    proven = state.rolls.proven(spec.model.name)
    return proven is not None and defines(proven, spec) and not state.is_defined(spec)


def _has_room(state: State, spec: ShardSpec, room: dict[ModelName, int]) -> bool:
    """Whether there may be one more: a node can't take a model from another by saying that it runs it."""
    name = spec.model.name
    if name not in room:
        model = state.catalog.named(name)
        most = model.scaling.max if model is not None else 0
        room[name] = most - sum(map(state.roster.is_desired, state.roster.of(name)))
    if room[name] != 0:
        return room[name] > 0
    # One serves while another takes its place.
    there = [life for life in state.roster.of(name) if state.roster.is_desired(life)]
    moves = not state.is_defined(spec) or state.roster.is_draining(spec.node) or any(map(state.find_move, there))
    return moves and bool(there)


def may_be_named(state: State, spec: ShardSpec) -> bool:
    """Its names are such as this fleet gives: others are not to be remembered for ever, nor taken for ours."""
    name = spec.model.name
    if state.catalog.named(name) is None:
        return False
    number = spec.replica.removeprefix(replica_id(name, 0).removesuffix("0"))
    if not (number.isdecimal() and number.isascii() and len(number) <= LONGEST_NUMBER):
        return False
    return spec.id == shard_id(name, int(number), spec.rank) and 0 <= spec.rank < spec.count
