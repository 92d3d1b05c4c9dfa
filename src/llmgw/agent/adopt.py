"""What was running before this agent started, and is it ours: engines outlive the agent that started them."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from llmgw.agent.hands import Process
from llmgw.agent.held import Adopted, Tools, endpoint_of, is_proven
from llmgw.agent.masking import Mask
from llmgw.agent.shards import CAUSE_LINES, SHOWN_LINES
from llmgw.agent.telling import first_report
from llmgw.core.replica import ShardReport, ShardSpec, ShardState
from llmgw.engines.types import HealthState
from llmgw.host.process import Stat
from llmgw.host.state import ShardRecord

log = logging.getLogger(__name__)

GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundShards:
    """What the last agent left: engines that run, and what is to be told of those that ended unseen."""

    running: tuple[Adopted, ...]
    ended: tuple[tuple[ShardSpec, ShardReport], ...]


async def adopt(tools: Tools) -> FoundShards:
    """Take over every engine of this state folder that still is the one its file tells of; stop all others of ours."""
    hands = tools.hands
    records = await hands.run(tools.state.read)
    boot_id = await hands.run(hands.read_boot_id)
    running = []
    ended = []
    for record in records:
        process = None
        if record.boot_id == boot_id and record.spec.profile.engine in tools.engines:
            process = hands.take_over(record.pid, record.start_time, record.marker)
        if process is None:
            ended.append((record.spec, await _tell_end(tools, record)))
            continue
        tools.ports.hold(record.port)
        await tools.weights.resume(record.spec.id, record.weights)
        state = ShardState.READY if await _is_ready(tools, record) else ShardState.LOADING
        endpoint = endpoint_of(record.spec, record.port) if record.serves else None
        report = replace(first_report(record.spec), state=state, pid=record.pid, endpoint=endpoint)
        running.append(Adopted(record=record, process=process, report=report))
        name = (record.spec.id, record.pid, record.port, record.argv_hash)
        log.info("shard %s runs on: pid %d, port %d, command %s", *name)
    # Only now are the files of the ended ones removed: each of their processes is found by its marker.
    await _stop_strays(tools, {adopted.record.marker for adopted in running})
    for spec, _ in ended:
        await hands.run(tools.state.remove, spec.id)
    in_use = {Path(adopted.record.log) for adopted in running}
    await hands.run(tools.state.prune_logs, in_use)
    return FoundShards(running=tuple(running), ended=tuple(ended))


async def _is_ready(tools: Tools, record: ShardRecord) -> bool:
    if not record.serves:
        return True
    if not is_proven(record.spec, record):
        return False
    engine = tools.engines[record.spec.profile.engine]
    with trio.move_on_after(tools.settings.pace.health_limit):
        reply = await tools.hands.get(record.port, engine.info.health_path)
        return reply is not None and engine.read_health(reply.status, reply.body).state is HealthState.READY
    return False


async def _tell_end(tools: Tools, record: ShardRecord) -> ShardReport:
    ended = tools.state.open_log(Path(record.log), Mask(record.spec.profile.env).hide)
    lines = await tools.hands.run(ended.read_last, CAUSE_LINES)
    engine = tools.engines.get(record.spec.profile.engine)
    remedy = None
    if engine is None:
        cause = f"stopped, because no engine plugin is called {record.spec.profile.engine} any more"
    else:
        cause = "ended while no agent was watching it"
        named = await tools.hands.run(engine.read_exit, lines, None, None)
        if named is not None:
            cause, remedy = f"{cause}: {named.line}", named.remedy
    log.warning("shard %s: %s", record.spec.id, cause)
    last = lines[-SHOWN_LINES:]
    return replace(first_report(record.spec), state=ShardState.ENDED, cause=cause, remedy=remedy, lines=last)


async def _stop_strays(tools: Tools, kept: Iterable[str]) -> None:
    """Stop what carries this folder's marker and belongs to no shard that was taken over.

    Children of a dead leader, engines whose state file was damaged, and one that was started in the moment before its
    agent died: each would hold its memory and its port for ever.
    """
    marked = await tools.hands.run(tools.hands.find_marked, tools.state.marker_prefix())
    strays = {stat: marker for stat, marker in marked.items() if marker not in kept}
    for stat in _leaders(strays):
        process = tools.hands.take_over(stat.pid, stat.start_time, strays[stat])
        if process is None:
            continue
        log.warning("process %d is ours (%s) and belongs to no shard: stopping it", stat.pid, strays[stat])
        try:
            await _stop(process)
        finally:
            process.close()


def _leaders(strays: Iterable[Stat]) -> list[Stat]:
    """One process of each marker's tree is enough: stopping it finds the others by the marker."""
    return sorted(strays, key=lambda stat: (stat.pid != stat.group, stat.start_time))


async def _stop(process: Process) -> None:
    if not await process.stop(signal.SIGTERM, GRACE_SECONDS):
        log.error("process %d can't be killed", process.pid)
