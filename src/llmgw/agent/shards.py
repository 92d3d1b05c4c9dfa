"""One shard's life, from its source to its end: a function, and its state is the line it stands on."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass

import trio

from llmgw.agent.booked import GpuInUse, RendezvousTaken
from llmgw.agent.canary import Ask, Missed, ask_for_token, build_asks, list_paths
from llmgw.agent.held import Adopted, Held, Tools, is_proven
from llmgw.agent.masking import Mask
from llmgw.agent.preparing import prepare
from llmgw.agent.pulse import REMEDY, Finding, Pulse, ask_for_life
from llmgw.agent.sources import SourceMissing, SourceSpoiled
from llmgw.agent.telling import Telling, first_report
from llmgw.core.replica import Load, ShardReport, ShardSpec, ShardState
from llmgw.engines.types import Cause, CauseKind, Health, HealthState, Launch
from llmgw.errors import EngineFailed
from llmgw.host.http import REFUSED, Reply
from llmgw.host.process import advise_exit, describe_exit, split_exit
from llmgw.host.weights.errors import FetchFailed, Kind

log = logging.getLogger(__name__)

KILLED_FOR_MEMORY = Cause(
    kind=CauseKind.HOST_MEMORY,
    line="killed by the kernel's OOM killer: the node, or the limit that llmgw runs under, had no memory left",
    remedy="give it less context or fewer requests at once, or a node with more memory; "
    "min_memory_gb keeps it off nodes that have less",
)

TOO_LATE = (
    "if its last lines show that it goes on, give the profile a longer startup_timeout; else look at what it waits for"
)
UNANSWERED = (
    "by a changed definition an engine has to answer a request for one token before it takes the place of another: "
    "look at its last lines, and at what was changed (its chat template, the name that it serves, its key)"
)
UNPROVEN = "its processes may not reach one another: look at its last lines, and at the network between its nodes"

# What can't be fetched, as what it would be for an engine that fetches by itself.
FETCH_KINDS = {
    Kind.MISSING: CauseKind.WEIGHTS_MISSING,
    Kind.NO_FILE: CauseKind.WEIGHTS_MISSING,
    Kind.GATED: CauseKind.UNAUTHORISED,
    Kind.UNAUTHORIZED: CauseKind.UNAUTHORISED,
    Kind.TLS: CauseKind.OFFLINE,
    Kind.DNS: CauseKind.OFFLINE,
    Kind.UNREACHABLE: CauseKind.OFFLINE,
    Kind.DISK: CauseKind.DISK,
    Kind.CORRUPT: CauseKind.WEIGHTS_CORRUPT,
}

SILENT = "it printed nothing: run its program by hand on the node, and see what becomes of it"

CAUSE_LINES = 400
SHOWN_LINES = 50
PORT_TRIES = 5
MISSED_POLLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why a shard ended and what to do about it, in one line each, and the engine's last lines. ``kind`` is there where
    they, or how it ended, tell it."""

    cause: str
    remedy: str | None = None
    kind: CauseKind | None = None
    lines: tuple[str, ...] = ()


async def run_shard(
    spec: ShardSpec,
    tools: Tools,
    report: Callable[[ShardReport], None],
    *,
    stop: trio.Event,
    go: trio.Event | None = None,
    adopted: Adopted | None = None,
) -> None:
    """Live through one shard, and return once it has ended and all its processes are seen gone.

    ``go`` is set when one whose spec says False may be launched. ``stop`` ends it: the desired set no longer has it.
    Being cancelled does not: the engine goes on and is adopted by the next agent, which is what a crash of this one
    amounts to.
    """
    first = first_report(spec) if adopted is None else adopted.report
    telling = Telling(first, report, Mask(spec.profile.env).hide)
    held = Held(spec, tools, telling, go)
    if adopted is not None:
        held.take(adopted)
    end: End | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_heed, stop, nursery.cancel_scope)
            end = await _live(held)
            nursery.cancel_scope.cancel()
        if end is None:
            telling.state(ShardState.STOPPING)
            await held.clear()
            log.info("shard %s is stopped", spec.id)
            telling.state(ShardState.ENDED)
        else:
            telling.state(ShardState.ENDED, cause=end.cause, kind=end.kind, remedy=end.remedy, lines=end.lines)
            log.info("shard %s ended: %s", spec.id, telling.last.cause)
    finally:
        held.close()
        # Also when it is cancelled and its engine goes on: then all that could wait for these are cancelled with it.
        tools.taken.give_back(spec.id)
        tools.weights.give_back(spec.id)


async def _heed(stop: trio.Event, life: trio.CancelScope) -> None:
    await stop.wait()
    life.cancel()


async def _live(held: Held) -> End:
    """The shard's life; what goes wrong in it ends this shard and no other."""
    try:
        if held.process is None:
            launch = await prepare(held)
            held.telling.state(ShardState.LAUNCHING)
            end = await _launch(held, launch)
        else:
            end = await _watch(held)
    except EngineFailed as error:
        end = End(cause=error.message, remedy=error.remedy, kind=_find_kind(error), lines=error.lines)
    except Exception as error:
        log.exception("shard %s ends by a fault of llmgw", held.spec.id)
        end = End(cause=f"a fault of llmgw itself: {type(error).__name__}: {error}")
    if held.process is not None:
        # At once, so that no request is sent to what is being cleared away.
        held.telling.state(ShardState.STOPPING)
    await held.clear()
    return end


def _find_kind(error: EngineFailed) -> CauseKind | None:
    match error:
        case GpuInUse():
            return CauseKind.GPU_IN_USE
        case RendezvousTaken():
            return CauseKind.PORT
        case SourceMissing():
            return CauseKind.WEIGHTS_MISSING
        case SourceSpoiled():
            return CauseKind.WEIGHTS_CORRUPT
        case FetchFailed():
            return FETCH_KINDS.get(error.kind)
        case _:
            return None


async def _launch(held: Held, launch: Launch) -> End:
    """Start the engine and watch it; one that finds its port taken gets another, in the same try."""
    tried = 1
    while True:
        await held.start(launch)
        end = await _watch(held)
        if held.ready or tried == PORT_TRIES or not (end.kind is CauseKind.PORT or await held.has_lost_its_port()):
            return end
        log.warning("shard %s: another program took port %s; trying another", held.spec.id, held.port)
        await held.clear()
        tried += 1


async def _watch(held: Held) -> End:
    """From a started process to its end: loading until it is ready, then polled."""
    if not held.ready:
        held.telling.state(ShardState.LOADING)
        end = await _wait_ready(held) if held.serves else None
        if end is not None:
            return end
        held.ready = True
        if held.serves:
            # One of a group that does not listen is up as soon as its process is.
            held.peaks.note_ready(trio.current_time())
    if held.serves:
        await _ask_context(held)
    await held.measure(within_seconds=0.0)
    held.tell_peaks()
    held.telling.state(ShardState.READY)
    async with trio.open_nursery() as nursery:
        end = await _look_after(held, nursery)
        nursery.cancel_scope.cancel()
    return end or await _explain_exit(held)


async def _look_after(held: Held, nursery: trio.Nursery) -> End | None:
    """Poll an engine that is ready. None once it has ended; else it is hung."""
    spec, info = held.spec, held.engine().info
    asks = build_asks(spec.model.task, spec.model.name, info.api_paths)
    # Where nobody has booked GPUs it may compute on processors.
    pulse = Pulse(
        held.pace,
        trio.current_time(),
        is_group=spec.count > 1,
        on_processors=not spec.gpus,
        can_ask=bool(asks),
    )
    missed = 0
    asking = trio.CancelScope()
    while not await _exits_within(held, held.pace.health):
        await held.count_kills()
        await held.tools.hands.run(held.read_log)
        usage = await held.measure(within_seconds=held.pace.measure)
        held.tell_peaks()
        if not held.serves:
            continue
        if usage is not None:
            pulse.note_usage(usage, trio.current_time())
        said = await _poll(held, pulse)
        missed = 0 if said is None else missed + 1
        finding = pulse.judge(now := trio.current_time())
        if finding is Finding.HUNG:
            return await _explain_hung(held, pulse.explain(now))
        if finding is Finding.ASK:
            asking = trio.CancelScope()
            nursery.start_soon(_ask_for_life, held, pulse, asks, asking)
        elif finding is Finding.WELL:
            asking.cancel()
        unwell = f"runs, but {said} at its health check ({missed} times in a row)" if missed >= MISSED_POLLS else None
        held.telling.progress(pulse.tell(now) or unwell)
    return None


async def _poll(held: Held, pulse: Pulse) -> str | None:
    """Ask a ready engine how it is, and tell how busy. None where it says that it is ready, else what it does."""
    info = held.engine().info
    reply = await _ask(held, info.health_path)
    health = _judge(held, reply)
    healthy = health is not None and health.state is HealthState.READY
    pulse.note_health(trio.current_time(), healthy=healthy)
    # Also of one whose health is silent: that its steps grow shows it busy.
    load = await _ask_load(held, info.load_path)
    if load is not None:
        pulse.note_load(load, trio.current_time())
    if healthy:
        return None
    if reply is None or reply == REFUSED:
        return "does not answer"
    return "says that it is not ready" if health is None or health.reason is None else health.reason


async def _ask_for_life(held: Held, pulse: Pulse, asks: tuple[Ask, ...], asking: trio.CancelScope) -> None:
    suspicion = pulse.suspicion
    if suspicion is None:
        return
    level = logging.DEBUG if suspicion.is_routine else logging.WARNING
    log.log(level, "shard %s may be hung: %s", held.spec.id, suspicion.describe(trio.current_time()))
    hands, hide, limit_seconds = held.tools.hands, held.telling.hide, held.pace.canary_blind
    with asking:
        await ask_for_life(pulse, suspicion, hands, held.port or 0, asks, hide=hide, limit_seconds=limit_seconds)


async def _wait_ready(held: Held) -> End | None:
    """None once the engine serves, as it says and, where its word alone is not enough, as it shows."""
    pause = held.pace.loading_first
    limit_seconds = held.spec.profile.startup_timeout_seconds
    deadline = trio.current_time() + limit_seconds
    unproven: str | None = None
    while trio.current_time() < deadline:
        if await _exits_within(held, pause):
            return await _explain_exit(held)
        pause = min(pause * 1.5, held.pace.loading)
        await held.count_kills()
        await held.measure(within_seconds=held.pace.measure)
        for progress in await held.tools.hands.run(_read_progress, held):
            held.telling.progress(progress)
        health = _judge(held, await _ask(held, held.engine().info.health_path))
        if health is None or health.state is HealthState.LOADING:
            continue
        if await held.has_lost_its_port():
            return End(cause=f"port {held.port} is already in use by another program", kind=CauseKind.PORT)
        if health.state is HealthState.BROKEN:
            return await _explain_broken(held, health.reason or "the engine says that it is broken")
        if is_proven(held.spec, held.record):
            return None
        missed = await _prove(held, deadline)
        if missed is None:
            return None
        # (the last try may be cut short by the deadline, and what was said before is the cause)
        unproven = unproven if unproven is not None and missed.silent else missed.words
    return await _explain_timeout(held, limit_seconds, unproven)


def _read_progress(held: Held) -> list[str]:
    """What the new lines tell. In a thread: there may be a megabyte of them."""
    facts = map(held.engine().read_log, held.read_log())
    return [fact.progress for fact in facts if fact is not None]


async def _prove(held: Held, deadline: float) -> Missed | None:
    """None once it has answered a request for one token, or can't be asked for one; else what came of it."""
    model, info = held.spec.model, held.engine().info
    asks = build_asks(model.task, model.name, info.api_paths)
    if not asks:
        text = "shard %s: %s says that it is ready, and can't be asked for a proof: its api_paths have none of %s"
        log.warning(text, held.spec.id, info.title, list_paths(model.task))
        return None
    held.telling.progress("says that it is ready, and is asked for one token")
    missed: Missed | None = Missed(words="it did not answer a request for one token in time", silent=True)
    with trio.move_on_at(deadline):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at_exit, held, nursery.cancel_scope)
            missed = await ask_for_token(held.tools.hands, held.port or 0, asks, held.telling.hide)
            nursery.cancel_scope.cancel()
    if missed is None:
        await held.note_proven()
        return None
    held.telling.progress(f"says that it is ready, and does not generate: {missed.words}")
    return missed


async def _exits_within(held: Held, seconds: float) -> bool:
    with trio.move_on_after(seconds):
        await held.wait_exit()
        return True
    return False


def _judge(held: Held, reply: Reply | None) -> Health | None:
    """What the answer of the health path means; None when none came."""
    return None if reply is None else held.engine().read_health(reply.status, reply.body)


async def _ask_context(held: Held) -> None:
    """What it was started with is not what it serves: engines cap a context by the model's, or by their memory."""
    path = held.engine().info.context_path
    reply = await _ask(held, path) if path is not None else None
    tokens = None if reply is None or reply.status != 200 else held.engine().read_context(reply.body)
    held.telling.context(tokens)
    promised = held.spec.model.context_length
    if tokens is not None and promised is not None and tokens < promised:
        text = "shard %s takes %d tokens a request, and its model promises context_length %d"
        log.warning(text, held.spec.id, tokens, promised)


async def _ask_load(held: Held, path: str | None) -> Load | None:
    """What it says of its load; None where it does not answer at all."""
    if path is None:
        return Load()
    reply = await _ask(held, path)
    load = None if reply is None or reply.status != 200 else held.engine().read_load(reply.body)
    load = load or Load()
    held.telling.load(load)
    return None if reply is None or reply == REFUSED else load


async def _ask(held: Held, path: str) -> Reply | None:
    """None when nothing answers in time, or the engine ends meanwhile: its end is not to wait for a silent poll."""
    reply = None
    with trio.move_on_after(held.pace.health_limit):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at_exit, held, nursery.cancel_scope)
            reply = await held.tools.hands.get(held.port or 0, path)
            nursery.cancel_scope.cancel()
    return reply


async def _cancel_at_exit(held: Held, asking: trio.CancelScope) -> None:
    await held.wait_exit()
    asking.cancel()


async def _explain_exit(held: Held) -> End:
    """Wait for the process to end, and say why it did."""
    number = await held.wait_exit()
    code, signum = split_exit(number)
    await held.count_kills()
    lines = await _read_last(held)
    cause = await _read_exit(held, lines, code, signum)
    if held.has_seen_a_kill():
        # The kernel may have taken a worker only: the leader then ends by itself, and names nothing, or its echo.
        vague = cause is None or cause.kind is CauseKind.OTHER or cause == await _read_exit(held, (), code, signum)
        if vague or signum == signal.SIGKILL:
            return _end(KILLED_FOR_MEMORY, lines)
    if cause is not None:
        return _end(cause, lines)
    remedy = advise_exit(number) if any(lines) else SILENT
    return End(cause=describe_exit(number), remedy=remedy, lines=lines[-SHOWN_LINES:])


async def _explain_broken(held: Held, reason: str) -> End:
    """An engine that still runs and says why it never will serve; what to do about that its log may tell."""
    lines = await _read_last(held)
    cause = await _read_exit(held, lines, None, None)
    return End(cause=reason, remedy=None if cause is None else cause.remedy, lines=lines[-SHOWN_LINES:])


async def _explain_hung(held: Held, cause: str) -> End:
    """An engine that still runs and answers nobody; what to do about that its log may tell."""
    lines = await _read_last(held)
    named = await _read_exit(held, lines, None, None)
    remedy = REMEDY if named is None or named.remedy is None else named.remedy
    return End(cause=cause, kind=CauseKind.HUNG, remedy=remedy, lines=lines[-SHOWN_LINES:])


async def _explain_timeout(held: Held, limit_seconds: float, unproven: str | None) -> End:
    """An engine that still runs: what its log names may be why, and may be nothing; so no kind is told."""
    lines = await _read_last(held)
    named = await _read_exit(held, lines, None, None)
    said = [f"not ready within startup_timeout ({limit_seconds:g} s)"]
    remedy = TOO_LATE
    if unproven is not None:
        said.append(f"it says that it is, but {unproven}")
        remedy = UNPROVEN if held.spec.count > 1 else UNANSWERED
    if named is not None:
        said.append(named.line)
        remedy = named.remedy or remedy
    elif unproven is None and held.telling.last.progress:
        said.append(f"the last it said: {held.telling.last.progress}")
    return End(cause="; ".join(said), remedy=remedy, lines=lines[-SHOWN_LINES:])


async def _read_exit(held: Held, lines: tuple[str, ...], code: int | None, signum: int | None) -> Cause | None:
    # In a thread: rules over 400 long lines may take a second, and other shards are looked after here.
    return await held.tools.hands.run(held.engine().read_exit, lines, code, signum)


async def _read_last(held: Held) -> tuple[str, ...]:
    return await held.tools.hands.run(held.log.read_last, CAUSE_LINES)


def _end(cause: Cause, lines: tuple[str, ...]) -> End:
    return End(cause=cause.line, remedy=cause.remedy, kind=cause.kind, lines=lines[-SHOWN_LINES:])
