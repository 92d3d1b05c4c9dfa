"""The hands of a real agent: this machine, by threads, processes, files, sockets and its devices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import trio

from llmgw.agent import hands
from llmgw.agent.depot import Depot, MakeGiving
from llmgw.agent.held import Tools
from llmgw.agent.inventory import Inventory
from llmgw.agent.preflight import examine
from llmgw.agent.programs import find_program, stamp_program
from llmgw.agent.settings import AgentSettings
from llmgw.agent.sources import check_sources
from llmgw.core.node import FabricFound, Node
from llmgw.engines.types import Command
from llmgw.host.cpu import count_cores
from llmgw.host.gpus import GpusFound
from llmgw.host.http import Reply, get, post
from llmgw.host.logfile import begin_log
from llmgw.host.oom import count_oom_kills
from llmgw.host.ports import HOST, is_foreign, is_free, is_taken
from llmgw.host.process import Process, Stat, find_marked, is_killed, read_boot_id, start_process, take_over
from llmgw.host.state import StateFolder
from llmgw.host.usage import Usage, read_usage

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class Machine:
    """This machine, with the folders of these settings (see ``hands.Hands``)."""

    __slots__ = ("_inventory", "depot", "state")

    def __init__(
        self, settings: AgentSettings, inventory: Inventory | None = None, *, make_giving: MakeGiving | None = None
    ) -> None:
        """``make_giving``: what gives weights through the server. Raises LlmgwError where a setting of weights can't be
        used."""
        self.state = StateFolder(settings.state)
        self.depot = Depot(settings.node_id, settings.weights, make_giving=make_giving)
        self._inventory = inventory or Inventory()

    check_sources = staticmethod(check_sources)
    count_oom_kills = staticmethod(count_oom_kills)
    examine = staticmethod(examine)
    find_program = staticmethod(find_program)
    is_foreign = staticmethod(is_foreign)
    is_free = staticmethod(is_free)
    is_taken = staticmethod(is_taken)
    read_boot_id = staticmethod(read_boot_id)
    stamp_program = staticmethod(stamp_program)
    take_over = staticmethod(take_over)

    def boot_seconds(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    async def run(self, work: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        return await trio.to_thread.run_sync(work, *args)

    async def survey(self, tools: Tools) -> Node:
        return await self._inventory.survey(tools)

    async def look_at_gpus(self, tools: Tools) -> GpusFound:
        return await self._inventory.look_at_gpus(tools)

    async def measure(self, tools: Tools, process: hands.Process) -> Usage:
        usage = await self.run(read_usage, await process.find_alive())
        return replace(usage, gpu_gb=self._inventory.recall_held_gb(tools, usage.pids))

    async def look_at_fabrics(self, tools: Tools) -> tuple[FabricFound, ...]:
        return await self._inventory.look_at_fabrics(tools)

    def choose_threads(self) -> int | None:
        # An engine counts the machine's cores, not those that it may use, and then its threads fight for them.
        cores = count_cores()
        return cores if cores < (os.cpu_count() or cores) else None

    def start(self, command: Command, *, log: Path, marker: str) -> Process:
        begin_log(log)
        return start_process(command, log=log, marker=marker)

    def find_marked(self, prefix: str) -> Mapping[Stat, str]:
        # One that has its SIGKILL is gone but for the noticing.
        return {stat: marker for stat, marker in find_marked(prefix).items() if not is_killed(stat.pid)}

    async def get(self, port: int, path: str) -> Reply | None:
        return await get(HOST, port, path)

    async def post(self, port: int, path: str, body: object) -> Reply | None:
        return await post(HOST, port, path, body)
