"""The fleet as the agents' port sees it; which nodes there are is remembered past this server's own end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llmgw.core.effects import Desire
from llmgw.core.events import Event, NodeRegistered
from llmgw.core.node import NodeId
from llmgw.errors import LlmgwError
from llmgw.server.scheduler import Scheduler

log = logging.getLogger(__name__)


class NodeStore(Protocol):
    """Where the nodes that have registered are kept."""

    async def see(self, node: NodeId, now: float) -> None:
        """It has registered at ``now`` (seconds since 1970). LlmgwError when that can't be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAgents:
    """Hands the agents' words to the scheduler, and its desired sets to them."""

    scheduler: Scheduler
    nodes: NodeStore
    wall: Callable[[], float] = time.time

    async def desired(self, node: NodeId, after: int) -> Desire:
        return await self.scheduler.desired(node, after)

    async def report(self, event: Event) -> None:
        await self.scheduler.post(event)
        if isinstance(event, NodeRegistered):
            try:
                await self.nodes.see(event.node.id, self.wall())
            except LlmgwError as error:
                # it serves all the same; only the next server will not wait for it
                log.error("node %s can't be remembered: %s", event.node.id, error)
