"""The server: one fleet, the leases of its nodes, what an operator asks, and what is stored past its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from llmgw.core.effects import Announce, Desire, Drain, Effect, Learn, Proven, Reverted, WakeAt
from llmgw.core.events import (
    Event,
    FactsKnown,
    ModelCalled,
    ModelsHeld,
    NodeLost,
    NodeMarked,
    NodeRegistered,
    NodeRemoved,
    NodesExpected,
    NodeSilent,
    ReplicaRecalled,
    RulesChanged,
    Wakeup,
)
from llmgw.core.fleet import Fleet
from llmgw.core.hosts import Standing
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import ReplicaId, ShardState
from simulator.faults import Cordon, DrainNode, Label
from simulator.link import Link
from simulator.loop import Loop
from simulator.store import Rules, Store

SETTLE_SECONDS = 30.0
# How long the store takes to keep what the fleet says.
KEEP_SECONDS = 0.05


class Control:
    """One server, over all its lives. ``done`` is called after every event that its fleet has handled, ``stirred``
    whenever that announced something, ``drain`` with each replica whose last request is to be waited for, and
    ``hung_up`` when it takes a node's connection for dead. ``pings``: whether there is an answer over a link now."""

    def __init__(
        self,
        loop: Loop,
        rules: Rules,
        models: Iterable[Model],
        *,
        done: Callable[[Event, list[Effect]], None],
        stirred: Callable[[], None],
        drain: Callable[[ReplicaId, int, int], None],
        hung_up: Callable[[Link], None],
        pings: Callable[[Link], bool],
    ) -> None:
        self.rules = rules
        self.store = Store(models={model.name: model for model in models})
        self.up = False
        self.lives = 0
        self.fleet = Fleet()
        self.links: dict[NodeId, Link] = {}
        self.registered: set[NodeId] = set()
        self.desires: dict[NodeId, Desire] = {}
        self._loop = loop
        self._done = done
        self._stirred = stirred
        self._drain = drain
        self._hung_up = hung_up
        self._pings = pings
        self._born = 0.0
        self._heard: dict[NodeId, float] = {}
        self._watched: set[NodeId] = set()
        self._wake_at = math.inf

    def clock(self) -> float:
        """Its monotonic clock, which says something else in each of its lives."""
        return self._clock_at(self._loop.now)

    def _clock_at(self, when: float) -> float:
        return when - self._born + 1000.0 * self.lives

    # -- its beginning and end

    def start(self) -> None:
        """As server/program.py begins: what is stored first, then who is expected, then the models."""
        self.up = True
        self.lives += 1
        self._born = self._loop.now
        self.fleet = Fleet()
        self._wake_at = math.inf
        self.handle(RulesChanged(replace_after=self.rules.replace_after, brake=self.rules.brake))
        self.handle(FactsKnown(facts=tuple(self.store.facts.values())))
        for mark in self.store.marks.values():
            self._tell_mark(mark)
        self._tell_held()
        self.handle(NodesExpected(nodes=frozenset(self.store.nodes), until=self.clock() + SETTLE_SECONDS))
        self._publish()

    def crash(self) -> list[Link]:
        """It is gone; these links end with it."""
        self.up = False
        links = [*self.links.values()]
        for link in links:
            link.server_open = False
        self.links.clear()
        self.registered.clear()
        self.desires.clear()
        self._heard.clear()
        self._watched.clear()
        return links

    # -- the agents' port

    def enter(self, link: Link) -> None:
        """An agent has dialled; whoever spoke for its node before does so no longer."""
        earlier = self.links.get(link.node)
        if earlier is not None:
            earlier.server_open = False
        self.links[link.node] = link
        self._hear(link.node)

    def leave(self, link: Link) -> None:
        """The connection is seen to be over."""
        if not link.server_open:
            return
        link.server_open = False
        del self.links[link.node]
        if link.node in self.registered:
            self.handle(NodeSilent(node=link.node))

    def receive(self, link: Link, event: Event) -> None:
        """A word of an agent."""
        self._hear(link.node)
        if isinstance(event, NodeRegistered):
            link.registered = True
            self.registered.add(link.node)
            self.store.nodes[link.node] = None
        self.handle(event)
        if isinstance(event, NodeRegistered):
            # Its trunks are there again, which whoever waits for them is told.
            self._stirred()

    def reaches(self, node: NodeId) -> bool:
        """Whether requests get through, as far as is known here."""
        link = self.links.get(node)
        return link is not None and link.registered

    def _hear(self, node: NodeId) -> None:
        self._heard[node] = self._loop.now
        if node not in self._watched:
            self._watched.add(node)
            self._loop.after(self.rules.lease, self._look_at_lease, node, self.lives)

    def _look_at_lease(self, node: NodeId, life: int) -> None:
        if life != self.lives or not self.up:
            return
        link = self.links.get(node)
        if link is not None and self._pings(link):
            self._heard[node] = self._loop.now
        heard = self._heard[node]
        if self._loop.now < heard + self.rules.lease:
            self._loop.at(heard + self.rules.lease, self._look_at_lease, node, life)
            return
        self._watched.discard(node)
        if link is not None:
            self._hang_up(link)
        del self._heard[node]
        if node in self.registered:
            self.registered.discard(node)
            self.handle(NodeLost(node=node))

    def _hang_up(self, link: Link) -> None:
        del self.links[link.node]
        link.server_open = False
        self._hung_up(link)

    # -- the operators' port

    def put_model(self, model: Model) -> None:
        """Add a model, or put it in the place of the one of that name."""
        self.store.put(model)
        self._publish()

    def remove_model(self, name: str) -> None:
        was_held = ModelName(name) in self.store.held
        if self.store.remove(name):
            self._publish()
            if was_held:
                self._tell_held()

    def roll_back(self, name: str) -> None:
        if self.store.roll_back(name):
            self._publish()

    def hold(self, name: str) -> None:
        """Hold a model at zero."""
        if name in self.store.models:
            self.store.held[ModelName(name)] = None
            self._tell_held()

    def load(self, name: str) -> None:
        """Let a model run, load one that loads on demand, and try a definition again that has failed."""
        model = self.store.models.get(name)
        if model is None or model.scaling.max == 0:
            return
        self.store.failed.pop(model.name, None)
        if model.name in self.store.held:
            del self.store.held[model.name]
            self._tell_held()
        self.handle(ModelCalled(model=model.name))

    def recall(self, name: str, pick: int) -> None:
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
            self.handle(ReplicaRecalled(replica=replica.id, epoch=replica.epoch))

    def _publish(self) -> None:
        if self.up:
            self.handle(self.store.catalog())

    def _tell_held(self) -> None:
        if self.up:
            self.handle(ModelsHeld(models=frozenset(self.store.held)))

    def mark(self, act: Cordon | DrainNode | Label) -> None:
        """Say something of a node, whether or not it is there."""
        marked = self.store.marks[NodeId(act.node)] = self.store.marked(act)
        self._tell_mark(marked)

    def _tell_mark(self, mark: NodeMarked) -> None:
        """The store has it by the wall clock, and the fleet goes by its own."""
        until = mark.drain_until
        self.handle(mark if until is None else replace(mark, drain_until=self._clock_at(until)))

    def remove_node(self, node: NodeId) -> None:
        """Only one that is lost, or that nothing runs on and nothing is to be put on; else nothing happens."""
        found = next((each for each in self.fleet.statistics().nodes if each.host.id == node), None)
        if found is None:
            return
        drained = found.host.cordoned and not any(found.host.replicas.values())
        if found.host.standing is Standing.LOST or drained:
            self.handle(NodeRemoved(node=node))
            self.store.nodes.pop(node, None)
            self.store.marks.pop(node, None)
            self.handle(NodeMarked(node=node))
            # An agent that is there after all dials anew, and registers as one that was never seen.
            link = self.links.get(node)
            if link is not None:
                self._hang_up(link)
            self.registered.discard(node)

    # -- the scheduler

    def handle(self, event: Event) -> None:
        effects = self.fleet.handle(event, self.clock())
        for effect in effects:
            match effect:
                case Desire(node=node):
                    self.desires[node] = effect
                    link = self.links.get(node)
                    # Not before it has said what runs there: it would be told to stop all of it.
                    if link is not None and link.registered:
                        link.send_down(effect)
                case WakeAt(at=at):
                    if at < self._wake_at:
                        self._wake_at = at
                        self._loop.at(self._when(at), self._wake, at, self.lives)
                case Drain(replica=replica, epoch=epoch, number=number):
                    self._drain(replica, epoch, number)
                case Proven() | Reverted() | Learn():
                    self._loop.after(KEEP_SECONDS, self._keep, effect, self.lives)
        self._done(event, effects)
        if any(isinstance(effect, Announce) for effect in effects):
            self._stirred()

    def _keep(self, effect: Proven | Reverted | Learn, life: int) -> None:
        """A server that has ended meanwhile has not kept it."""
        if self.up and life == self.lives and self.store.keep(effect):
            self._publish()

    def _when(self, at: float) -> float:
        """The first moment at which the server's clock says ``at`` or more: here no time passes while it computes."""
        when = self._loop.now + at - self.clock()
        while self._clock_at(when) < at:
            when = math.nextafter(when, math.inf)
        return when

    def _wake(self, at: float, life: int) -> None:
        if self.up and life == self.lives and at == self._wake_at:
            self._wake_at = math.inf
            self.handle(Wakeup())
