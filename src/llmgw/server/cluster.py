"""What a server of other machines has besides: the port that agents dial, and the trunks to their engines.

A room of its own, so that ``serve`` and ``demo``, whose engines are on this machine, load none of it.
"""

from __future__ import annotations

import functools
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from llmgw.core.node import NodeId
from llmgw.core.replica import ShardAddress
from llmgw.counters import Counters
from llmgw.door.steps import Destination
from llmgw.door.upstream import Dialer, Upstream, dial
from llmgw.link.agentlink import Agents
from llmgw.link.listener import AgentPort, serve_agents
from llmgw.link.presence import LinkView
from llmgw.link.relay import Relay
from llmgw.link.trunk import Trunks
from llmgw.reactor.credentials import Credentials
from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import Transport


@dataclass(slots=True, kw_only=True)
class Cluster:
    """The agents' port, given what listens and whom it asks."""

    agents: Agents
    agents_at: socket.socket
    credentials: Credentials[ssl.SSLContext]
    revoked: Path
    lease_seconds: float
    replace_after_seconds: float
    counters: Counters
    # called when a node can be reached that could not
    stir: Callable[[], None]
    # what hands weights on between nodes; None: nobody does
    relay: Relay | None = None
    trunks: Trunks | None = None
    port: AgentPort | None = None

    async def plant(self, reactor: Reactor, edge: trio.Nursery) -> Dialer:
        """Open the port in ``edge``; what is given reaches engines here by sockets, on nodes by their trunks."""
        trunks = self.trunks = Trunks(reactor, counters=self.counters, opened=self.stir)
        agents = functools.partial(
            serve_agents,
            self.agents_at,
            self.agents,
            credentials=self.credentials,
            revoked=self.revoked,
            trunks=trunks,
            reactor=reactor,
            lease_seconds=self.lease_seconds,
            replace_after_seconds=self.replace_after_seconds,
            counters=self.counters,
            relay=self.relay,
        )
        self.port = await edge.start(agents)
        return dial_by(trunks)

    def reaches(self, node: NodeId) -> bool:
        """Whether requests get through to a node now."""
        return self.trunks is not None and self.trunks.reaches(node)

    def links(self) -> tuple[LinkView, ...]:
        """How the agents are connected."""
        return self.port.links() if self.port is not None else ()

    def set_lease(self, seconds: float) -> None:
        """What a node's silence may last, from here on."""
        self.lease_seconds = seconds
        if self.port is not None:
            self.port.set_lease(seconds)

    def set_replace_after(self, seconds: float) -> None:
        """How long after its lease what a node runs is placed anew, as agents are told from here on."""
        self.replace_after_seconds = seconds
        if self.port is not None:
            self.port.set_replace_after(seconds)

    def let_go(self, node: NodeId) -> None:
        """End the link of a node that was removed: else it would talk on, and nobody would hear it."""
        if self.port is not None:
            self.port.let_go(node, f"node {node} was removed; it may register anew")

    def goaway(self, reason: str) -> None:
        """Tell the agents that the server stops."""
        if self.port is not None:
            self.port.goaway(reason)


def dial_by(trunks: Trunks) -> Dialer:
    """Sockets for what can be dialled, streams of a trunk for shards of other machines."""

    def dial_destination(reactor: Reactor, address: Destination, owner: Upstream) -> Transport:
        if isinstance(address, ShardAddress):
            return trunks.open(address, owner, connected=owner.connected)
        return dial(reactor, address, owner)

    return dial_destination
