"""One shard's life, from its source to its end: a function, and its state is the line it stands on."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import trio

from llmgw.agent.held import Adopted, Held, Tools
from llmgw.agent.programs import find_program
from llmgw.agent.sources import check_source
from llmgw.agent.telling import Telling, first_report
from llmgw.core.replica import ShardReport, ShardSpec, ShardState
from llmgw.engines.types import Health, HealthState, Launch, Load
from llmgw.errors import EngineFailed
from llmgw.host.cpu import count_cores
from llmgw.host.http import Reply, get
from llmgw.host.ports import HOST
from llmgw.host.process import describe_exit

log = logging.getLogger(__name__)

CAUSE_LINES = 400
SHOWN_LINES = 50
PORT_TRIES = 5
MISSED_POLLS = 3

PORT_TAKEN = re.compile(r"address already in use|couldn't bind|\bport\b.*\b(?:in use|taken)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why a shard ended, in one line, and the engine's last lines."""

    cause: str
    lines: tuple[str, ...] = ()


async def run_shard(
    spec: ShardSpec,
    tools: Tools,
    report: Callable[[ShardReport], None],
    *,
    stop: trio.Event,
    adopted: Adopted | None = None,
) -> None:
    """Live through one shard, and return once it has ended and all its processes are seen gone.

    ``stop`` ends it: the desired set no longer has it. Being cancelled does not: the engine goes on and is adopted by
    the next agent, which is what a crash of this one amounts to.
    """
    telling = Telling(first_report(spec) if adopted is None else adopted.report, report)
    held = Held(spec, tools, telling)
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
            log.info("shard %s ended: %s", spec.id, end.cause)
            telling.state(ShardState.ENDED, cause=end.cause, lines=end.lines)
    finally:
        held.close()


async def _heed(stop: trio.Event, life: trio.CancelScope) -> None:
    await stop.wait()
    life.cancel()


async def _live(held: Held) -> End:
    """The shard's life; what goes wrong in it ends this shard and no other."""
    try:
        if held.process is None:
            held.telling.state(ShardState.LAUNCHING)
            launch = await _prepare(held)
            end = await _launch(held, launch)
        else:
            end = await _watch(held)
    except EngineFailed as error:
        end = End(cause=error.message, lines=error.lines)
    except Exception as error:
        log.exception("shard %s ends by a fault of llmgw", held.spec.id)
        end = End(cause=f"a fault of llmgw itself: {type(error).__name__}: {error}")
    if held.process is not None:
        # At once, so that no request is sent to what is being cleared away.
        held.telling.state(ShardState.STOPPING)
    await held.clear()
    return end


async def _prepare(held: Held) -> Launch:
    """Everything about the launch but its port. Raises EngineFailed with what is missing."""
    spec, engine = held.spec, held.engine()
    await trio.to_thread.run_sync(check_source, spec.model.source, engine)
    program = await trio.to_thread.run_sync(find_program, engine, held.tools.settings.binaries)
    version = await held.tools.programs.probe(engine, program)
    cores = await trio.to_thread.run_sync(count_cores)
    return Launch(
        program=program,
        source=spec.model.source,
        served_name=spec.model.name,
        host=HOST,
        port=0,
        version=version,
        tp=spec.profile.tp,
        rank=spec.rank,
        count=spec.count,
        context_length=spec.model.context_length,
        max_output=spec.model.max_output,
        # An engine counts the machine's cores, not those that it may use, and then its threads fight for them.
        threads=cores if cores < (os.cpu_count() or cores) else None,
        args=spec.profile.args,
    )


async def _launch(held: Held, launch: Launch) -> End:
    """Start the engine and watch it; one that finds its port taken gets another, in the same try."""
    tried = 1
    while True:
        await held.start(launch)
        end = await _watch(held)
        if held.ready or tried == PORT_TRIES or not (PORT_TAKEN.search(end.cause) or await held.has_lost_its_port()):
            return end
        log.warning("shard %s: another program took port %s; trying another", held.spec.id, held.port)
        await held.clear()
        tried += 1


async def _watch(held: Held) -> End:
    """From a started process to its end: loading until it is ready, then polled."""
    if not held.ready:
        held.telling.state(ShardState.LOADING)
        end = await _wait_ready(held)
        if end is not None:
            return end
        held.ready = True
    held.telling.state(ShardState.READY)
    missed = 0
    while not await _exits_within(held, held.pace.health):
        await trio.to_thread.run_sync(held.read_log)
        health = await _ask_health(held)
        missed = 0 if health is not None and health.state is HealthState.READY else missed + 1
        if missed >= MISSED_POLLS:
            said = "does not answer" if health is None else health.reason or "says that it is not ready"
            held.telling.progress(f"runs, but {said} at its health check ({missed} times in a row)")
        else:
            held.telling.progress(None)
            await _ask_load(held)
    return await _explain_exit(held)


async def _wait_ready(held: Held) -> End | None:
    """None once the engine says that it serves."""
    pause = held.pace.loading_first
    limit_seconds = held.spec.profile.startup_timeout_seconds
    deadline = trio.current_time() + limit_seconds
    while trio.current_time() < deadline:
        if await _exits_within(held, pause):
            return await _explain_exit(held)
        pause = min(pause * 1.5, held.pace.loading)
        for line in await trio.to_thread.run_sync(held.read_log):
            fact = held.engine().read_log(line)
            if fact is not None and fact.progress is not None:
                held.telling.progress(fact.progress)
        health = await _ask_health(held)
        if health is None or health.state is HealthState.LOADING:
            continue
        if await held.has_lost_its_port():
            return End(cause=f"port {held.port} is already in use by another program")
        if health.state is HealthState.READY:
            return None
        return await _explain(held, health.reason or "the engine says that it is broken", prefer_log=False)
    last = f"; the last it said: {held.telling.last.progress}" if held.telling.last.progress else ""
    return await _explain(held, f"not ready within startup_timeout ({limit_seconds:g} s){last}")


async def _exits_within(held: Held, seconds: float) -> bool:
    with trio.move_on_after(seconds):
        await held.wait_exit()
        return True
    return False


async def _ask_health(held: Held) -> Health | None:
    """None when nothing answers."""
    reply = await _ask(held, held.engine().info.health_path)
    return None if reply is None else held.engine().read_health(reply.status, reply.body)


async def _ask_load(held: Held) -> None:
    path = held.engine().info.load_path
    if path is not None:
        reply = await _ask(held, path)
        load = None if reply is None or reply.status != 200 else held.engine().read_load(reply.body)
        held.telling.load(load or Load())


async def _ask(held: Held, path: str) -> Reply | None:
    """None when nothing answers in time, or the engine ends meanwhile: its end is not to wait for a silent poll."""
    reply = None
    with trio.move_on_after(held.pace.health_limit):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at_exit, held, nursery.cancel_scope)
            reply = await get(HOST, held.port or 0, path)
            nursery.cancel_scope.cancel()
    return reply


async def _cancel_at_exit(held: Held, asking: trio.CancelScope) -> None:
    await held.wait_exit()
    asking.cancel()


async def _explain_exit(held: Held) -> End:
    """Wait for the process to end, and say why it did."""
    code = await held.wait_exit()
    return await _explain(held, describe_exit(code))


async def _explain(held: Held, otherwise: str, *, prefer_log: bool = True) -> End:
    """The cause that the log names, else ``otherwise``. The first specific line counts: what follows are its echoes."""
    lines = await trio.to_thread.run_sync(held.log.read_last, CAUSE_LINES)
    facts = [fact for fact in map(held.engine().read_log, lines) if fact is not None and fact.fatal]
    facts.sort(key=lambda fact: fact.generic)
    cause = facts[0].fatal if facts and prefer_log else None
    return End(cause=cause or otherwise, lines=lines[-SHOWN_LINES:])
