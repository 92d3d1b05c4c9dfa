"""What this node has, as it is reported every few seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from llmgw.agent.held import Tools
from llmgw.agent.preflight import Preflight
from llmgw.agent.programs import find_program
from llmgw.agent.telling import WORDS_CHARS
from llmgw.core.node import Disk, EngineFound, Node
from llmgw.engines.registry import Engine
from llmgw.errors import EngineFailed
from llmgw.host.cpu import Memory, count_cores, read_cpu_flags, read_memory, warn_of_cpu
from llmgw.host.disks import read_disks

log = logging.getLogger(__name__)

SHOWN_PROBLEMS = 20


async def survey(tools: Tools) -> Node:
    """The node as it is now."""
    cores, flags, memory, disks = await trio.to_thread.run_sync(_look, tools)
    return Node(
        id=tools.settings.node_id,
        cores=cores,
        cpu_flags=flags,
        memory_gb=memory.total_gb,
        memory_available_gb=memory.available_gb,
        disks=disks,
        engines=await _find_engines(tools),
    )


def _look(tools: Tools) -> tuple[int, frozenset[str], Memory, tuple[Disk, ...]]:
    folders = (tools.settings.state, *tools.settings.folders)
    return count_cores(), read_cpu_flags(), read_memory(), read_disks(folders)


async def _find_engines(tools: Tools) -> tuple[EngineFound, ...]:
    return tuple(
        [
            _tell(name, program, await tools.programs.find(engine, program))
            for name, engine, program in await _list_programs(tools)
        ]
    )


async def _list_programs(tools: Tools) -> list[tuple[str, Engine, tuple[str, ...]]]:
    """The engines that there is a program for."""
    found = []
    for name, engine in sorted(tools.engines.items()):
        try:
            program = await trio.to_thread.run_sync(find_program, engine, tools.settings.binaries)
        except EngineFailed as absent:
            log.debug("engine %s: %s", name, absent)
            continue
        found.append((name, engine, program))
    return found


def _tell(name: str, program: tuple[str, ...], tried: Preflight | None) -> EngineFound:
    if tried is None:
        return EngineFound(engine=name, program=program)
    remedy = f"; {tried.remedy}" if tried.remedy is not None else ""
    return EngineFound(
        engine=name,
        program=program,
        version=None if tried.version is None else _cut(tried.version.number),
        checked=True,
        starts=tried.starts,
        broken=None if tried.broken is None else _cut(tried.broken + remedy),
        problems=tuple(map(_cut, tried.problems[:SHOWN_PROBLEMS])),
        missing_libraries=tuple(map(_cut, tried.missing_libraries[:SHOWN_PROBLEMS])),
    )


def _cut(words: str) -> str:
    return words if len(words) <= WORDS_CHARS else words[:WORDS_CHARS] + "…"


async def serve_checks(tools: Tools) -> None:
    """Try the engines' programs for ever, one after the other: at the start, and whenever one may be another."""
    while True:
        try:
            for name, engine, program in await _list_programs(tools):
                await _check(tools, name, engine, program)
        except Exception:
            log.exception("the engines' programs can't be listed; trying again")
        await trio.sleep(tools.settings.pace.inventory)


async def _check(tools: Tools, name: str, engine: Engine, program: tuple[str, ...]) -> None:
    try:
        await tools.programs.check(engine, program, again=True)
    except Exception:
        # The others are tried all the same.
        log.exception("engine %s: %s can't be tried by a fault of llmgw; trying again", name, program[0])


async def serve_inventory(tools: Tools, report: Callable[[Node], None]) -> None:
    """Report for ever, and at once when there is news of a program. A look that fails is logged and the next one is
    tried."""
    warning = warn_of_cpu(await trio.to_thread.run_sync(read_cpu_flags))
    if warning is not None:
        log.warning("%s", warning)
    # What was tried before this may have come too late for the registration.
    told = 0
    while True:
        with trio.move_on_after(tools.settings.pace.inventory):
            await tools.programs.wait_changed(told)
        told = tools.programs.changes
        try:
            node = await survey(tools)
        except Exception:
            log.exception("what this node has can't be told; trying again")
        else:
            report(node)
