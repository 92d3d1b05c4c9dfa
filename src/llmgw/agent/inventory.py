"""What this node has, as it is reported every few seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from llmgw.agent.held import Tools
from llmgw.agent.programs import find_program
from llmgw.core.node import Disk, EngineFound, Node
from llmgw.errors import EngineFailed
from llmgw.host.cpu import Memory, count_cores, read_cpu_flags, read_memory, warn_of_cpu
from llmgw.host.disks import read_disks

log = logging.getLogger(__name__)


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
    found = []
    for name, engine in sorted(tools.engines.items()):
        try:
            program = await trio.to_thread.run_sync(find_program, engine, tools.settings.binaries)
        except EngineFailed as absent:
            log.debug("engine %s: %s", name, absent)
            continue
        version = await tools.programs.probe(engine, program)
        found.append(EngineFound(engine=name, program=program, version=None if version is None else version.number))
    return tuple(found)


async def serve_inventory(tools: Tools, report: Callable[[Node], None]) -> None:
    """Report for ever. A look that fails is logged and the next one is tried."""
    warning = warn_of_cpu(await trio.to_thread.run_sync(read_cpu_flags))
    if warning is not None:
        log.warning("%s", warning)
    while True:
        await trio.sleep(tools.settings.pace.inventory)
        try:
            node = await survey(tools)
        except Exception:
            log.exception("what this node has can't be told; trying again")
        else:
            report(node)
