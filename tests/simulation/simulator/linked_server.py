"""The server half of the larger size, as server/program.py joins it, over memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import trio
from hands import WALL
from links import MemoryTrunks

from llmgw.core.effects import Effect, Learn, Proven, Reverted
from llmgw.core.events import (
    Event,
    FactsKnown,
    ModelCalled,
    ModelsHeld,
    NodeMarked,
    NodeRemoved,
    NodesExpected,
    ReplicaRecalled,
    RulesChanged,
)
from llmgw.core.fleet import Fleet
from llmgw.core.hosts import Standing
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import ShardState
from llmgw.counters import Counters
from llmgw.link.agentlink import Pace as PortPace
from llmgw.link.presence import Presence
from llmgw.server.agents import FleetAgents
from llmgw.server.gateway import FleetGateway, locate_by_trunk
from llmgw.server.requestlog import RequestLog
from llmgw.server.scheduler import Scheduler
from llmgw.server.weights import Weights
from simulator.store import Store

if TYPE_CHECKING:
    from simulator.linked import LinkedWorld

SETTLE_SECONDS = 30.0
# How long the store takes to keep what the fleet says.
KEEP_SECONDS = 0.05


class WatchedFleet(Fleet):
    """The real one, of which everything that it handles is followed."""

    def __init__(self, world: LinkedWorld) -> None:
        super().__init__()
        self._world = world

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        self._world.follow(event, effects)
        return effects


class MemoryNodes:
    """The part of the store that remembers which nodes there were."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def see(self, node: NodeId, now: float) -> None:
        await trio.lowlevel.checkpoint()
        self._store.nodes[node] = None


class Server:
    """One life of the server half."""

    def __init__(self, world: LinkedWorld) -> None:
        self._world = world
        self.fleet = WatchedFleet(world)
        self.scheduler = Scheduler(self.fleet)
        self.linked: set[NodeId] = set()
        counters, tokens = Counters(), itertools.count(1)
        self.weights = Weights(self.scheduler, counters=counters, wall=lambda: WALL + trio.current_time())
        self.agents = FleetAgents(
            self.scheduler,
            MemoryNodes(world.store),
            weights=self.weights,
            counters=counters,
            wall=lambda: WALL + trio.current_time(),
        )
        self.trunks = MemoryTrunks(world.network, opened=self.scheduler.stir)
        self.presence = Presence(
            self.agents,
            trunks=self.trunks,
            lease_seconds=world.rules.lease,
            pace=PortPace(),
            make_token=lambda: f"token-{next(tokens)}",
        )
        self.gateway = FleetGateway(
            self.scheduler,
            engines=world.engines_by_name,
            counters=counters,
            log=RequestLog(lambda text: None),
            wait_seconds=world.rules.on_demand_wait,
            created=0,
            pages=lambda: None,
            locate=locate_by_trunk,
            reaches=self.trunks.reaches,
        )
        self.life = trio.CancelScope()
        self.nursery: trio.Nursery

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Until its life is over."""
        world, store = self._world, self._world.store
        with self.life:
            async with trio.open_nursery() as self.nursery:
                self.scheduler.attend(self.gateway.drain)
                self.scheduler.entrust(lambda what: self.nursery.start_soon(self._keep, what))
                await self.nursery.start(self.scheduler.serve)
                self.nursery.start_soon(self.weights.serve)
                self.nursery.start_soon(self.gateway.serve_demand)
                rules = world.rules
                await self.scheduler.post(RulesChanged(replace_after=rules.replace_after, brake=rules.brake))
                await self.scheduler.post(FactsKnown(facts=tuple(store.facts.values())))
                for mark in store.marks.values():
                    await self.scheduler.post(mark)
                await self.tell_held()
                until = trio.current_time() + SETTLE_SECONDS
                await self.scheduler.post(NodesExpected(nodes=frozenset(store.nodes), until=until))
                await self.publish()
                await self.nursery.start(world.network.serve, self.presence, self.trunks)
                task_status.started()

    async def publish(self) -> None:
        await self.scheduler.post(self._world.store.catalog())

    async def _keep(self, what: Proven | Reverted | Learn) -> None:
        """A server that ends meanwhile has not kept it."""
        await trio.sleep(KEEP_SECONDS)
        if self._world.store.keep(what):
            await self.publish()

    async def tell_held(self) -> None:
        await self.scheduler.post(ModelsHeld(models=frozenset(self._world.store.held)))

    async def hold(self, name: str) -> None:
        """Hold a model at zero."""
        if name in self._world.store.models:
            self._world.store.held[ModelName(name)] = None
            await self.tell_held()

    async def load(self, name: str) -> None:
        """Let a model run, load one that loads on demand, and try a definition again that has failed."""
        store = self._world.store
        model = store.models.get(name)
        if model is None or model.scaling.max == 0:
            return
        store.failed.pop(model.name, None)
        store.held.pop(model.name, None)
        await self.tell_held()
        await self.scheduler.post(ModelCalled(model=model.name))

    async def recall(self, name: str, pick: int) -> None:
        """Have one of a model's replicas replaced."""
        found = [
            replica
            for told in self.fleet.statistics().models
            if told.model.name == name
            for replica in told.replicas
            if replica.draining is None and replica.state not in (ShardState.STOPPING, ShardState.ENDED)
        ]
        if found:
            replica = found[pick % len(found)]
            await self.scheduler.post(ReplicaRecalled(replica=replica.id, epoch=replica.epoch))

    async def remove_node(self, node: NodeId) -> None:
        """Only one that is lost, or drained; else nothing happens."""
        told = self.fleet.statistics(trio.current_time())
        found = next((each.host for each in told.nodes if each.host.id == node), None)
        if found is None:
            return
        if found.standing is Standing.LOST or (found.cordoned and not any(found.replicas.values())):
            store = self._world.store
            await self.scheduler.post(NodeRemoved(node=node))
            store.nodes.pop(node, None)
            store.marks.pop(node, None)
            await self.scheduler.post(NodeMarked(node=node))
            self.agents.forget(node)
            self.presence.let_go(node, "an operator has removed it")
