"""The fleet as the agents' port sees it; which nodes there are is remembered past this server's own end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from llmgw.core.effects import Desire
from llmgw.core.events import Event, NodeLost, NodeRegistered
from llmgw.core.node import NodeId
from llmgw.counters import Counters
from llmgw.errors import LlmgwError
from llmgw.server.scheduler import Scheduler

log = logging.getLogger(__name__)


class NodeStore(Protocol):
    """Where the nodes that have registered are kept."""

    async def see(self, node: NodeId, now: float) -> None:
        """It has registered at ``now`` (seconds since 1970). LlmgwError when that can't be kept."""


class FleetAgents:
    """Hands the agents' words to the scheduler, and its desired sets to them."""

    def __init__(
        self,
        scheduler: Scheduler,
        nodes: NodeStore,
        *,
        counters: Counters,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._nodes = nodes
        self._wall = wall
        self._registered = counters.counter(
            "llmgw_node_registrations_total", "Registrations: an agent's start, or its link's return.", ("node",)
        )
        self._lost = counters.counter(
            "llmgw_nodes_lost_total", "Times that a node was silent for its lease.", ("node",)
        )

    def follow(self, node: NodeId, tell: Callable[[Desire], None]) -> Callable[[], None]:
        """Call ``tell`` with the node's desired set, now if there is one and at each change, until the answer is
        called."""
        return self._scheduler.follow(node, tell)

    async def report(self, event: Event) -> None:
        """Take an event; waits while the fleet is behind."""
        await self._scheduler.post(event)
        if isinstance(event, NodeLost):
            self._lost.bump(event.node)
        if isinstance(event, NodeRegistered):
            self._registered.bump(event.node.id)
            try:
                await self._nodes.see(event.node.id, self._wall())
            except LlmgwError as error:
                # it serves all the same; only the next server will not wait for it
                log.error("node %s can't be remembered: %s", event.node.id, error)
