"""The fleet as the agents' port sees it; what the nodes say is counted, and remembered past this server's own end."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import trio

from llmgw.core.effects import Desire
from llmgw.core.events import Event, NodeLost, NodeRegistered, NodeReported, NodeSilent
from llmgw.core.node import Node, NodeId
from llmgw.core.weights import WeightsOrder
from llmgw.counters import Counters
from llmgw.errors import LlmgwError
from llmgw.server.scheduler import Scheduler
from llmgw.server.weights import Weights
from llmgw.units import printable

log = logging.getLogger(__name__)

# How far behind the store may be with when a node was last heard of.
SEEN_SECONDS = 600.0
# An agent is not read meanwhile: a disk that hangs must not cost it its lease.
STORE_SECONDS = 2.0
# Of the last so many words of a node the quickest one tells what its clock is.
CLOCK_LOOKS = 4
# What a node says so soon after its link's return it may have said while nobody heard it.
QUEUED_SECONDS = 6.0


class NodeStore(Protocol):
    """Where the nodes that have registered are kept."""

    async def see(self, node: NodeId, now: float) -> None:
        """It was there at ``now`` (seconds since 1970). LlmgwError when that can't be kept."""


class FleetAgents:
    """Hands the agents' words to the scheduler, and its desired sets to them.

    Every time that is kept is this server's: a node's clock is compared with it, and decides nothing. ``skews`` are the
    seconds that each clock is ahead.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        nodes: NodeStore,
        *,
        weights: Weights,
        counters: Counters,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._nodes = nodes
        self._weights = weights
        self._wall = wall
        self._seen_at: dict[NodeId, float] = {}
        self._down: dict[NodeId, Mapping[str, str]] = {}
        self._clocks: dict[NodeId, deque[float]] = {}
        self._back_at: dict[NodeId, float] = {}
        self.skews: dict[NodeId, float] = {}
        self._registered = counters.counter(
            "llmgw_node_registrations_total", "Registrations: an agent's start, or its link's return.", ("node",)
        )
        self._lost = counters.counter(
            "llmgw_nodes_lost_total", "Times that a node was silent for its lease.", ("node",)
        )
        self._outages = counters.counter(
            "llmgw_fabric_outages_total", "Times that a fabric went out of service on a node.", ("node", "fabric")
        )

    def follow(self, node: NodeId, tell: Callable[[Desire], None]) -> Callable[[], None]:
        """Call ``tell`` with the node's desired set, now if there is one and at each change, until the answer is
        called."""
        return self._scheduler.follow(node, tell)

    def follow_orders(self, node: NodeId, tell: Callable[[WeightsOrder], None]) -> Callable[[], None]:
        """The same for what the node is told of weights."""
        return self._weights.follow(node, tell)

    def refuse(self, node: NodeId) -> None:
        """Its certificate is revoked: it takes nothing from other nodes, and they nothing from it, until it registers
        again."""
        self._weights.refuse(node)

    def forget(self, node: NodeId) -> None:
        """It was removed: nothing of it is remembered before it registers again."""
        self._seen_at.pop(node, None)
        self._down.pop(node, None)
        self._back_at.pop(node, None)
        self._clocks.pop(node, None)
        self.skews.pop(node, None)
        self._weights.forget(node)

    async def report(self, event: Event) -> None:
        """Take an event; waits while the fleet is behind, and with a registration until that has been taken: what the
        node was to run before it is nothing that it may be told after it."""
        now = self._wall()
        if isinstance(event, NodeRegistered):
            await self._scheduler.settle(event)
        else:
            await self._scheduler.post(event)
        self._weights.heed(event)
        match event:
            case NodeRegistered(node=node):
                self._registered.bump(node.id)
                # What it says it may have looked at long before there was a link to say it over.
                self._back_at[node.id] = trio.current_time()
                self._clocks.pop(node.id, None)
                self.skews.pop(node.id, None)
                self._look_at_fabrics(node)
                await self._see(node.id, now)
            case NodeReported(node=node):
                self._look_at_clock(node, now)
                self._look_at_fabrics(node)
                if now - self._seen_at.get(node.id, now) > SEEN_SECONDS:
                    await self._see(node.id, now)
            case NodeSilent(node=name):
                # One that was removed meanwhile is not to be remembered for its last word.
                if name in self._seen_at:
                    await self._see(name, now)
            case NodeLost(node=name):
                self._lost.bump(name)

    def _look_at_clock(self, node: Node, now: float) -> None:
        fresh = trio.current_time() >= self._back_at.get(node.id, -math.inf) + QUEUED_SECONDS
        if node.clock is not None and fresh:
            # A word that was long on its way makes a clock seem slow, and none makes it seem fast.
            recent = self._clocks.setdefault(node.id, deque(maxlen=CLOCK_LOOKS))
            recent.append(node.clock - now)
            self.skews[node.id] = max(recent)

    def _look_at_fabrics(self, node: Node) -> None:
        earlier = self._down.get(node.id, {})
        down = {fabric.name: fabric.down for fabric in node.fabrics if fabric.down is not None}
        self._down[node.id] = down
        if down == earlier:
            return
        for fabric in node.fabrics:
            why = down.get(fabric.name)
            if why is None and fabric.name in earlier:
                log.warning("node %s: fabric %s is in service again", node.id, printable(fabric.name))
            elif why is not None and why != earlier.get(fabric.name):
                log.warning("node %s: fabric %s is out of service: %s", node.id, printable(fabric.name), printable(why))
                if fabric.name not in earlier:
                    self._outages.bump(node.id, fabric.name)

    async def _see(self, node: NodeId, now: float) -> None:
        self._seen_at[node] = now
        why = f"the store did not answer within {STORE_SECONDS:g} s"
        with trio.move_on_after(STORE_SECONDS):
            try:
                await self._nodes.see(node, now)
                return
            except LlmgwError as error:
                why = error.message
        # it serves all the same; only the next server will not wait for it
        log.error("node %s can't be remembered: %s", node, why)
