"""What this node has, as it is reported every few seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from llmgw.agent.held import Tools
from llmgw.agent.masking import Mask
from llmgw.agent.preflight import Preflight
from llmgw.agent.programs import find_program
from llmgw.agent.telling import WORDS_CHARS
from llmgw.core.node import Disk, EngineFound, FlagFound, Node
from llmgw.engines.check import FlagFinding, FlagState
from llmgw.engines.registry import Engine
from llmgw.errors import EngineFailed
from llmgw.host.cpu import Memory, count_cores, read_cpu_flags, read_memory, warn_of_cpu
from llmgw.host.disks import read_disks

log = logging.getLogger(__name__)

SHOWN_PROBLEMS = 20
SHOWN_FLAGS = 20
FLAG_CHARS = 100
DETAIL_CHARS = 300


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
    """The engines that there is a program for, or that one is configured for."""
    found = []
    for name, engine in sorted(tools.engines.items()):
        try:
            program = await _find(tools, engine)
            if isinstance(program, EngineFailed):
                configured = tools.settings.binaries.get(name)
                if configured is not None:
                    found.append(tell_unusable(name, configured, program))
            else:
                found.append(tell_engine(name, program, await tools.programs.find(engine, program)))
        except Exception:
            # The node has the others all the same; whoever tries the programs tells of this, once.
            log.debug("engine %s is not reported", name, exc_info=True)
    return tuple(found)


async def _find(tools: Tools, engine: Engine) -> tuple[str, ...] | EngineFailed:
    """What is run for the engine, or why there is nothing."""
    try:
        return await trio.to_thread.run_sync(find_program, engine, tools.settings.binaries)
    except EngineFailed as absent:
        return absent


def tell_unusable(name: str, configured: str, why: EngineFailed) -> EngineFound:
    """A configured binary that is no program: whoever set it expects it to run, so it does not just go missing."""
    # Bytes that are no text can't be told to the server.
    path = configured.encode("utf-8", "replace").decode()
    return EngineFound(engine=name, program=(path,), checked=True, starts=False, broken=_cut(_words(why)))


def _words(why: EngineFailed) -> str:
    return f"{why.message}; {why.remedy}" if why.remedy is not None else why.message


def tell_engine(name: str, program: tuple[str, ...], tried: Preflight | None) -> EngineFound:
    if tried is None:
        return EngineFound(engine=name, program=program)
    remedy = f"; {tried.remedy}" if tried.remedy is not None else ""
    hide = Mask({}).hide
    wanting = sorted((each for each in tried.findings if each.state is not FlagState.OK), key=_weigh)
    return EngineFound(
        engine=name,
        program=program,
        version=None if tried.version is None else _cut(hide(tried.version.number)),
        checked=True,
        starts=tried.starts,
        broken=None if tried.broken is None else _cut(tried.broken + remedy),
        problems=tuple(map(_cut, tried.problems[:SHOWN_PROBLEMS])),
        missing_libraries=tuple(map(_cut, tried.missing_libraries[:SHOWN_PROBLEMS])),
        # This goes out every few seconds, and of most flags there is nothing to tell.
        flags=tuple(map(_tell_flag, wanting[:SHOWN_FLAGS])),
        flags_ok=len(tried.findings) - len(wanting),
    )


def _weigh(finding: FlagFinding) -> int:
    """What breaks a launch first, and last what nobody knows."""
    return 0 if finding.breaks else 2 if finding.state is FlagState.UNCHECKED else 1


def _tell_flag(finding: FlagFinding) -> FlagFound:
    return FlagFound(
        flag=_cut(finding.flag, FLAG_CHARS),
        given_by=finding.given_by,
        state=str(finding.state),
        detail=None if finding.detail is None else _cut(finding.detail, DETAIL_CHARS),
    )


def _cut(words: str, chars: int = WORDS_CHARS) -> str:
    return words if len(words) <= chars else words[:chars] + "…"


async def serve_checks(tools: Tools) -> None:
    """Try the engines' programs for ever, one after the other: at the start, and whenever one may be another."""
    # said once of each, for this looks every few seconds: what is wrong with it, "" for a fault of ours
    troubled: dict[str, str] = {}
    while True:
        try:
            for name, engine in sorted(tools.engines.items()):
                await _check(tools, name, engine, troubled)
        except Exception:
            log.exception("the engines' programs can't be listed; trying again")
        await trio.sleep(tools.settings.pace.inventory)


async def _check(tools: Tools, name: str, engine: Engine, troubled: dict[str, str]) -> None:
    try:
        program = await _find(tools, engine)
        if not isinstance(program, EngineFailed):
            await tools.programs.check(engine, program, again=True)
    except Exception:
        # The others are tried all the same.
        if troubled.get(name) != "":
            log.exception("engine %s can't be tried, by a fault of its plugin or of llmgw; trying again", name)
        troubled[name] = ""
        return
    trouble = _words(program) if isinstance(program, EngineFailed) and name in tools.settings.binaries else None
    if trouble is None:
        troubled.pop(name, None)
    elif troubled.get(name) != trouble:
        log.warning("engine %s can't be used: %s", name, trouble)
        troubled[name] = trouble


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
