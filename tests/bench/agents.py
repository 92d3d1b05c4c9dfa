"""Many agents in one process, without engines: each keeps its control link and says every 5 s what it has.

They dial, ping and wait between dials as a real agent does. Each time one has registered and was told what to run, the
program writes a line: ``linked NODE SECONDS`` (of the machine's monotonic clock).
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path

import trio

from llmgw import __version__
from llmgw.config.agent import AgentConfig, NodeTls, ServerAddress
from llmgw.core.events import NodeRegistered, NodeReported
from llmgw.core.node import Disk, EngineFound, Node, NodeId
from llmgw.errors import LinkLost
from llmgw.host.cpu import count_cores, read_cpu_flags, read_memory
from llmgw.host.limits import raise_file_limit
from llmgw.link.dial import TlsServer
from llmgw.link.dialer import Dialer
from llmgw.reactor.loop import Reactor

HEARTBEAT_SECONDS = 5.0
RETRY_SECONDS = 1.0


def describe_node() -> Node:
    """What a real agent says of this machine, in the size that it has."""
    memory = read_memory()
    return Node(
        id=NodeId(""),
        cores=count_cores(),
        cpu_flags=read_cpu_flags(),
        memory_gb=memory.total_gb,
        memory_available_gb=memory.available_gb,
        disks=(Disk(path="/var/lib/llmgw-agent", free_gb=100.0, total_gb=500.0),),
        engines=(EngineFound(engine="llamacpp", program=("/usr/local/bin/llama-server",), version="6000"),),
    )


def describe_agent(name: str, folder: Path, port: int) -> AgentConfig:
    return AgentConfig(
        node=name,
        server=ServerAddress(host="127.0.0.1", port=port),
        tls=NodeTls(ca=folder / "ca.pem", cert=folder / f"{name}.pem", key=folder / f"{name}-key.pem"),
        trunks=0,
    )


class Agent:
    """One node's word and its way to the server."""

    def __init__(self, config: AgentConfig, machine: Node, reactor: Reactor) -> None:
        self._node = replace(machine, id=NodeId(config.node))
        server = TlsServer(config, reactor=reactor, find_port=lambda shard, epoch: "no_shard")
        self._dialer = Dialer(server, node=config.node, trunks=config.trunks, version=__version__)
        self._applied: int | None = None

    async def live(self, wait_seconds: float) -> None:
        """For ever, begun after a while."""
        await trio.sleep(wait_seconds)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._dialer.serve)
            while True:
                try:
                    await self._stay()
                except* LinkLost:
                    await trio.sleep(RETRY_SECONDS)

    async def _stay(self) -> None:
        """Register, listen and speak, until the link is gone."""
        self._applied = None
        await self._dialer.report(NodeRegistered(node=self._node))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen)
            nursery.start_soon(self._speak)
            await self._dialer.wait_lost()
            nursery.cancel_scope.cancel()

    async def _listen(self) -> None:
        """Take what is to run here, which is nothing."""
        while True:
            desire = await self._dialer.desired(-1 if self._applied is None else self._applied)
            if self._applied is None:
                print(f"linked {self._node.id} {time.monotonic():.3f}", flush=True)
            self._applied = desire.revision

    async def _speak(self) -> None:
        # As agents that have started at any time.
        await trio.sleep(random.uniform(0, HEARTBEAT_SECONDS))
        while True:
            await self._dialer.report(NodeReported(node=self._node, applied=self._applied))
            await trio.sleep(HEARTBEAT_SECONDS)


async def live_all(agents: list[Agent], over_seconds: float) -> None:
    async with trio.open_nursery() as nursery:
        for number, agent in enumerate(agents):
            nursery.start_soon(agent.live, over_seconds * number / len(agents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="of the server's agents, on 127.0.0.1")
    parser.add_argument("--folder", type=Path, required=True, help="with ca.pem, and NODE.pem and NODE-key.pem of each")
    parser.add_argument("--over", type=float, default=0.0, help="seconds from the first agent's start to the last's")
    parser.add_argument("nodes", nargs="+")
    options = parser.parse_args()
    raise_file_limit()
    machine, reactor = describe_node(), Reactor()
    # All before the first dials: certificates take longer to read than a handshake to make.
    agents = [Agent(describe_agent(name, options.folder, options.port), machine, reactor) for name in options.nodes]
    trio.run(live_all, agents, options.over)


if __name__ == "__main__":
    main()
