"""What becomes of an epoch of a replica: how far it is, what its end means, and what is left of it to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmgw.core.effects import Announce, Happening, Learn, Proven, Reverted
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import MAY_FOLLOW, Load, Measured, Replica, Shard, ShardReport, ShardState, reached
from llmgw.core.rolling import PROVING_SECONDS, UNANSWERED_SECONDS
from llmgw.core.roster import Life
from llmgw.core.scaling import fail as count_failure
from llmgw.core.state import State
from llmgw.units import format_duration

# A node says at once that it launches what it was told to. What it has not mentioned this long after it was told
# otherwise, it never saw: the second word had replaced the first.
UNHEARD_SECONDS = 5.0

PREPARED_OR_LATER = frozenset({ShardState.PREPARED, ShardState.LAUNCHING, ShardState.LOADING, ShardState.READY})

# Room is kept for so long for what is to be there again.
RESERVED_SECONDS = 60.0

NO_CAUSE = "it gave no cause"

# Kinds of ends (engines.types.CauseKind) that no definition can bring about: others hold what it was given.
OF_THE_NODE = frozenset({"gpu_in_use", "port"})


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a shard ended: why, of what kind that is, what to do about it, and its engine's last lines. ``blames_node``:
    it says nothing of its definition."""

    cause: str
    kind: str | None = None
    remedy: str | None = None
    lines: tuple[str, ...] = ()
    blames_node: bool = False


def observe(state: State, life: Life, node: NodeId, report: ShardReport, now: float) -> None:
    """What its node says of a shard of it; a word that may not follow what was said before moves nothing."""
    life.heard.add(node)
    state.forget_at.pop((node, *life.key[:2]), None)
    state.launched_at.pop((node, *life.key[:2]), None)
    shard = life.shard_on(node)
    state_now = reached(report, shard.spec)
    if state_now not in MAY_FOLLOW[shard.state]:
        return
    if report.state is ShardState.ENDED:
        how = End(
            cause=report.cause or NO_CAUSE,
            kind=report.kind,
            remedy=report.remedy,
            lines=report.lines,
            blames_node=report.kind in OF_THE_NODE,
        )
        end(state, life, node, how, now)
        return
    before = life.replica
    changed = state_now is not shard.state
    life.set_shard(
        replace(
            shard,
            state=state_now,
            since=now if changed else shard.since,
            endpoint=report.endpoint or shard.endpoint,
            context_length=report.context_length,
            progress=report.progress,
            load=report.load,
            measured=report.measured or shard.measured,
            fetch=report.fetch,
        ),
        now,
    )
    measured = report.measured is not None and report.measured != shard.measured
    if report.measured is not None and measured:
        _learn(state, shard, report.measured)
    if not changed and not measured:
        state.roster.refresh(life)
        return
    _count_health(life, before, now)
    state.roster.put(life)
    if state_now is ShardState.READY:
        state.roster.note_held(node, shard.spec.model.source)
    let_go(state, life, now)
    if life.replica.state is ShardState.READY and before.state is not ShardState.READY:
        _welcome(state, life, now)


def let_go(state: State, life: Life, now: float) -> None:
    """Launch the shards of several nodes, once each of them has said that all is there for it."""
    replica = life.replica
    held = [shard for shard in replica.shards if not shard.spec.go]
    if not held or not life.complete or not state.roster.is_desired(life):
        return
    if not all(shard.state in PREPARED_OR_LATER for shard in replica.shards):
        return
    for shard in held:
        spec = replace(shard.spec, go=True)
        life.set_shard(replace(shard, spec=spec), now)
        state.roster.desire(spec)
    state.roster.put(life)


def _learn(state: State, shard: Shard, measured: Measured) -> None:
    spec, node = shard.spec, state.roster.members[shard.spec.node].node
    first = spec.gpus[0] if spec.gpus else None
    gpu = next((gpu for gpu in node.gpus or () if gpu.uuid == first), None)
    gpu_class = "" if gpu is None else gpu.gpu_class
    # Whatever a node says, nothing holds more than there is.
    measured = replace(
        measured,
        gpu_gb=None if gpu is None or measured.gpu_gb is None else min(measured.gpu_gb, gpu.memory_gb),
        memory_gb=None if measured.memory_gb is None else min(measured.memory_gb, node.memory_gb),
    )
    loaded = shard.measured is None or shard.measured.load_seconds is None
    fact = state.learned.note(spec.model, spec.profile, gpu_class, measured, loaded=loaded)
    if fact is not None:
        state.effects.append(Learn(fact=fact))


def _welcome(state: State, life: Life, now: float) -> None:
    replica = life.replica
    after = "" if life.launched_at is None else f" after {format_duration(now - life.launched_at)}"
    on = ", ".join(replica.nodes)
    text = f"{replica.id} is ready on {on}{after}{_short_of_context(replica)}"
    state.announce(replica, text, what=Happening.READY)
    state.demands.note_ready(replica.model)
    earlier = state.rolls.note_serving(replica.shard)
    if earlier is not None:
        state.effects.append(Proven(model=earlier))
    state.prove_at[life.key] = now + PROVING_SECONDS
    state.plan_later(replica.model)


def prove(state: State, life: Life, now: float) -> None:
    """It has served for a while: what it replaces may go, and its definition is the one to return to."""
    if life.replica.state is not ShardState.READY:
        return
    if any(map(state.roster.is_away, life.replica.nodes)):
        # Nobody knows what it does now.
        state.prove_at[life.key] = now + PROVING_SECONDS
        return
    silent = state.is_busy(life) and not life.answered
    if silent and now < life.replica.since + UNANSWERED_SECONDS:
        # Its health is all that is known of it: the first that it was asked is not answered yet.
        state.prove_at[life.key] = now + PROVING_SECONDS
        return
    life.proven = True
    earlier = state.rolls.proven(life.replica.model)
    proven = state.rolls.note_proven(life.replica.shard)
    if proven is not None:
        state.effects.append(Proven(model=proven))
        if earlier is not None:
            served = format_duration(round(now - life.replica.since))
            text = f"{life.replica.id} has served by the changed definition for {served}"
            state.announce(life.replica, text, what=Happening.ROLLED)
    state.plan_later(life.replica.model)


def _short_of_context(replica: Replica) -> str:
    """What an engine takes less than clients are told; "" when nothing."""
    takes, promised = replica.context_length, replica.shard.model.context_length
    if takes is None or promised is None or takes >= promised:
        return ""
    return f"; it takes {takes} tokens a request, and its model promises context_length {promised}"


def _count_health(life: Life, before: Replica, now: float) -> None:
    """How long it served, as it leaves that: an engine that dies may be reported as stopping before it has
    ended."""
    if before.state is ShardState.READY and life.replica.state is not ShardState.READY:
        life.ready_seconds = now - before.since


def end(state: State, life: Life, node: NodeId, how: End, now: float) -> None:
    """A shard's process is gone, and its room is free. Where nobody asked for that, the whole epoch has failed."""
    before = life.replica
    if before.draining is not None:
        # It was to stop in any case.
        take_back(state, life, None, now)
    if not state.roster.is_desired(life):
        gone(state, life, node, now)
        if not life.alive and life.replica.cause is None:
            text = f"{before.id} has stopped on {', '.join(before.nodes)}"
            state.announce(before, text, what=Happening.STOPPED)
        return
    fail(state, life, node, how, now)
    gone(state, life, node, now)
    stop_shards(state, life, now)


def fail(state: State, life: Life, node: NodeId, how: End, now: float) -> None:
    """An epoch that was wanted is over, by what happened on this node."""
    before = life.replica
    state.roster.withdraw(life)
    life.replica = replace(before, cause=how.cause, kind=how.kind, remedy=how.remedy, lines=how.lines)
    if before.state is ShardState.READY:
        life.ready_seconds = now - before.since
    tries = state.failures.setdefault(before.model, {})
    earlier = tries.get(node)
    failures = tries[node] = replace(count_failure(earlier, life.ready_seconds, now), cause=how.cause)
    wait = format_duration(failures.until - now)
    text = f"{before.id} ended on {node}: {how.cause} (failure {failures.count} in a row; not tried there for {wait})"
    text += f"; {how.remedy}" if how.remedy else ""
    # What fails in the same way for a week must not fill the log with the engine's same last words.
    told = earlier is not None and failures.count > 1 and earlier.cause == how.cause
    state.announce(before, text, lines=how.lines, again=told, warning=True, what=Happening.FAILED)
    if not life.proven and not how.blames_node:
        _consider_return(state, before, how.cause)


def _consider_return(state: State, replica: Replica, cause: str) -> None:
    """Where a changed definition does not come to serve, the one before goes on."""
    failed = state.rolls.note_failure(replica.shard, cause)
    if failed is None:
        return
    name = failed.model.name
    text = f"the changed definition of {name} has failed, and the one before goes on: {cause}"
    state.announce(replica, text, warning=True, what=Happening.REVERTED)
    state.effects.append(Reverted(model=failed.model, by=failed.by, why=cause))
    # What failed says nothing of what served.
    state.forget_failures(name)
    state.plan_later(name)


def gone(state: State, life: Life, node: NodeId, now: float) -> None:
    """Nothing of the life is left on this node. One that has failed is shown until its next try."""
    shard = life.shard_on(node)
    state.forget_at.pop((node, *life.key[:2]), None)
    over = replace(shard, state=ShardState.ENDED, since=now, endpoint=None, progress=None, load=Load())
    life.set_shard(over, now)
    state.plan_later(life.replica.model)
    state.plan_waiting()
    # (of several not only with the last of them: the others may take their time)
    _keep_room(state, life, over, now)
    if not life.alive:
        state.going.pop(life.key, None)
        if life.evicted_for is not None and state.launched(life.evicted_for) is not None:
            # Or whoever comes first would have the room that was made for this one.
            _reserve(state, life.evicted_for, over, now)
            state.plan_first(life.evicted_for)
    if life.alive or life.replica.cause is not None:
        state.roster.put(life)
    else:
        forget(state, life)
    # (of a lost node nobody knows)
    if state.roster.is_draining(node) and not state.roster.is_lost(node) and not runs_anything(state, node):
        text = f"{node} is drained: nothing runs there"
        state.effects.append(Announce(model=None, node=node, text=text, what=Happening.DRAINING))


def _keep_room(state: State, life: Life, over: Shard, now: float) -> None:
    """What is to be there again in a moment has its place, or whoever waits for room would be quicker."""
    name = life.replica.model
    model = state.launched(name)
    if model is None or name in state.held or state.stopping:
        return
    waits = [until - now for node, until in state.backing_off(name).items() if node in life.replica.nodes]
    failed = life.replica.cause is not None and model.scaling.min > 0 and max(waits, default=0.0) <= RESERVED_SECONDS
    reachable = not any(state.roster.is_lost(node) or state.roster.is_draining(node) for node in life.replica.nodes)
    if reachable and (failed or life.in_place):
        _reserve(state, name, over, now)


def _reserve(state: State, name: ModelName, over: Shard, now: float) -> None:
    state.roster.reserve(name, (over,))
    state.reserved_until[name] = now + RESERVED_SECONDS


def stop_shards(state: State, life: Life, now: float) -> None:
    """What is left of an epoch that is over is to end, and books its room until it has."""
    if life.alive:
        state.going[life.key] = None
    state.drain_until.pop(life.key, None)
    for shard in life.replica.shards:
        node = shard.spec.node
        if shard.state in (ShardState.ENDED, ShardState.STOPPING):
            continue
        if node not in life.heard:
            # An agent that tells what it has taken tells this as well, and till then it may launch it.
            member = state.roster.members.get(node)
            tells = member is not None and member.tells
            state.forget_at[node, *life.key[:2]] = math.inf if tells else now + UNHEARD_SECONDS
        life.set_shard(replace(shard, state=ShardState.STOPPING, since=now), now)
    state.roster.put(life)


def take_back(state: State, life: Life, why: str | None, now: float) -> None:
    """Out of the desired sets; alive and booked until its nodes say that it ended. ``why`` None: that was told."""
    if not life.alive:
        forget(state, life)
    elif state.roster.is_desired(life):
        before = life.replica
        life.replica = replace(before, draining=None)
        state.roster.withdraw(life)
        stop_shards(state, life, now)
        if why is not None:
            text = f"{before.id} on {', '.join(before.nodes)} is to stop: {why}"
            state.announce(before, text, what=Happening.STOPPING)


def stop_everything(state: State, now: float) -> None:
    """All that runs is to end, and nothing begins any more."""
    state.stopping = True
    state.unplanned.clear()
    state.retry_at.clear()
    for life in list(state.roster.lives.values()):
        take_back(state, life, "everything stops", now)


def enter(state: State, life: Life) -> None:
    """Into the books; an earlier epoch of the replica that has ended makes room for it."""
    for earlier in [other for other in state.roster.epochs_of(life.replica.id) if not other.alive]:
        forget(state, earlier)
    state.roster.put(life)


def forget(state: State, life: Life) -> None:
    """Out of the books, with its times."""
    state.roster.forget(life)
    for times in (state.whole_at, state.prove_at, state.drain_until, state.going):
        times.pop(life.key, None)
    for node in life.replica.nodes:
        state.forget_at.pop((node, *life.key[:2]), None)


def runs_anything(state: State, node: NodeId) -> bool:
    """Some shard there has not ended."""
    return any(life.shard_on(node).state is not ShardState.ENDED for life in state.roster.on(node))
