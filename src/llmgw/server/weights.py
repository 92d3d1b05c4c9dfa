"""What the nodes say of weights, and what each of them is told: who else has them, what to fetch, what to remove."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from llmgw.core.effects import Announce, Happening
from llmgw.core.events import Event, NodeLost, NodeRegistered, NodeReported, WeightsReported
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.sharing import Sharing
from llmgw.core.weights import (
    RELAY,
    Cached,
    Collect,
    Collected,
    NodeWeights,
    WeightsOrder,
    key_of,
    list_fetched,
    list_sources,
)
from llmgw.counters import Counters
from llmgw.server.fetches import Fetches
from llmgw.server.pulls import Asked, Pulls
from llmgw.server.scheduler import Scheduler
from llmgw.units import format_decimal

log = logging.getLogger(__name__)

# What a node gets to remove files, which is a matter of moments on any disk that is well.
COLLECT_SECONDS = 60.0
# Of these what is left for its answer: what a node has begun by then is over when it is said that nothing is removed
# any more.
ANSWER_SECONDS = 5.0
# Nodes that begin together report within a moment, and are told of each other before they have asked for much; for each
# that was told the next look is a little later, so that a thousand cost no more of a second than ten.
PACE_SECONDS = 0.02
TOLD_SECONDS = 0.002
# Of one turn: a source that a thousand nodes have takes some milliseconds, and so do as many orders.
SOURCES_A_TURN = 1
ORDERS_A_TURN = 16
# Of one kind in one order: what is left over comes when some of these are done.
MOST_TOLD = 1000

NOTHING = WeightsOrder()


@dataclass(slots=True, eq=False)
class Collecting:
    """An order to remove ``items``, until ``until``, and what became of it. ``stands``: nodes that have asked whether
    it does, with what they were told: no other removes anything. ``lost``: they were before they had answered.
    ``wanted`` is what was when it was ordered."""

    number: int
    items: Mapping[NodeId, tuple[tuple[str, str], ...]]
    until: float = 0.0
    wanted: frozenset[str] = frozenset()
    stands: dict[NodeId, Collect] = field(default_factory=dict)
    answers: dict[NodeId, Collected] = field(default_factory=dict)
    lost: set[NodeId] = field(default_factory=set)
    answered: trio.Event = field(default_factory=trio.Event)

    def settle(self) -> None:
        """See whether any node is still waited for."""
        if self.items.keys() <= self.answers.keys() | self.lost:
            self.answered.set()


class Weights:
    """The books of all nodes' weights; ``known`` is what each has said last, also of those that are away.

    ``heed`` takes the nodes' words, and ``serve`` works out what follows and tells it to whoever ``follow``s.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        counters: Counters,
        seeds: bool = True,
        relays: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``seeds`` False: nodes take nothing from each other. ``relays``: they do it through this server."""
        self._scheduler = scheduler
        self._sharing = Sharing(seeds=seeds, relays=relays)
        self._fetches = Fetches(scheduler.announce, self.find_model, counters=counters)
        self._pulls = Pulls()
        # What a node says of an order of an earlier server must be none of this one's.
        self._number = int(wall())
        self._followers: dict[NodeId, list[Callable[[WeightsOrder], None]]] = {}
        self._orders: dict[NodeId, WeightsOrder] = {}
        self._stale: dict[NodeId, None] = {}
        # Those that go by what an earlier server has told them, which of them have not said what they have, until when
        # that is waited for, and who has been told nothing for it.
        self._kept: frozenset[NodeId] = frozenset()
        self._missing: set[NodeId] = set()
        self._kept_until = math.inf
        self._untold: dict[NodeId, None] = {}
        self._stirred = trio.Event()
        self._collecting: Collecting | None = None
        self._one_at_a_time = trio.Lock()
        self._models: tuple[Model, ...] = ()
        self._wanted: frozenset[str] = frozenset()
        self._allowed: frozenset[str] = frozenset()
        self.known: dict[NodeId, NodeWeights] = {}

    def expect(self, nodes: frozenset[NodeId], until: float) -> None:
        """An earlier server has told these nodes of each other, and they go by that until all of them have said what
        they have, or ``until``: from swarms without those that are not back yet all would be asked of the origins."""
        self._kept, self._missing, self._kept_until = nodes, set(nodes), until
        self._stir()

    # -- what comes in

    def heed(self, event: Event) -> None:
        """What it means for weights that this has happened."""
        try:
            self._heed(event)
        except Exception:
            # Whatever a node says must not end its link, or the server.
            log.exception("%s could not be taken, by a fault of llmgw", type(event).__name__)
        if self._stale or not self._sharing.settled:
            self._stir()

    def _heed(self, event: Event) -> None:
        match event:
            case NodeRegistered(node=node) | NodeReported(node=node):
                self._sharing.see(node)
            case NodeLost(node=name):
                # Not when its link ends: that says nothing of the roads between nodes, and is over in a moment, mostly.
                self._sharing.lose(name)
                self._lose(name)
            case WeightsReported(node=name, weights=weights):
                self._take(name, weights)
                self._unmiss(name)

    def refuse(self, node: NodeId) -> None:
        """Its certificate is revoked: at once nobody is told of it any more, until it registers again."""
        self._sharing.lose(node)
        if node in self._kept and node in self.known:
            # An earlier server may have named it to others: they are told now, whoever is not back yet.
            self._kept_until = trio.current_time()
        self._unmiss(node)
        self._stir()

    def forget(self, node: NodeId) -> None:
        """It was removed."""
        self.known.pop(node, None)
        self._sharing.forget(node)
        self._fetches.forget(node)
        self._pulls.forget(node)
        self._untold.pop(node, None)
        self._unmiss(node)
        self._stale[node] = None
        self._stir()

    def _unmiss(self, node: NodeId) -> None:
        """Nothing is waited for from it (any more)."""
        if node in self._missing:
            self._missing.discard(node)
            self._stir()

    def _take(self, node: NodeId, weights: NodeWeights) -> None:
        self.known[node] = weights
        self._fetches.take(node, weights)
        self._sharing.report(node, weights)
        if self._pulls.take(node, weights):
            self._stale[node] = None
        if weights.collected is not None:
            self._note_collected(node, weights.collected)
        if weights.asks is not None:
            self._answer(node, weights.asks)

    def _answer(self, node: NodeId, mark: str) -> None:
        """It is about to carry out an order: what of that stands, and for how long."""
        waiting = self._collecting
        items = waiting.items.get(node) if waiting is not None else None
        if waiting is None or items is None or node in waiting.answers or node in waiting.lost:
            return
        before, seconds = waiting.stands.get(node), waiting.until - ANSWER_SECONDS - trio.current_time()
        if seconds > 0 and (before is None or before.asked != mark):
            # What a model has come to name meanwhile stays.
            since = self.wanted - waiting.wanted
            waiting.stands[node] = Collect(
                number=waiting.number,
                items=tuple((source, commit) for source, commit in items if source not in since),
                asked=mark,
                seconds=seconds,
            )
            self._stale[node] = None

    def _lose(self, node: NodeId) -> None:
        """An answer of it is not waited for any more; nor does what it was ordered stand."""
        waiting = self._collecting
        if waiting is not None and node in waiting.items and node not in waiting.answers:
            waiting.lost.add(node)
            waiting.settle()
            self._stale[node] = None

    def _note_collected(self, node: NodeId, collected: Collected) -> None:
        waiting = self._collecting
        if waiting is None or collected.number != waiting.number or node not in waiting.items:
            return
        if node not in waiting.answers:
            waiting.answers[node] = collected
            waiting.lost.discard(node)
            text = (
                f"{node} has removed weights that nothing wants: {format_decimal(collected.freed_bytes)} are free again"
            )
            self._scheduler.announce(
                Announce(model=None, node=node, text=text, lines=collected.kept, what=Happening.COLLECTED)
            )
        waiting.settle()

    # -- what is told

    def follow(self, node: NodeId, tell: Callable[[WeightsOrder], None]) -> Callable[[], None]:
        """Call ``tell`` with what the node is told of weights, now and at each change, until the answer is called. What
        it raises is logged."""
        followers = self._followers.setdefault(node, [])
        followers.append(tell)
        if node in self._kept and node not in self._orders:
            self._untold[node] = None
        else:
            # Also where that is nothing: it may have something of an earlier server.
            self._tell(node, tell, self._orders.get(node, NOTHING))
        return functools.partial(self._unfollow, node, tell)

    def _unfollow(self, node: NodeId, tell: Callable[[WeightsOrder], None]) -> None:
        followers = self._followers[node]
        followers.remove(tell)
        if not followers:
            del self._followers[node]

    def takes_orders(self, node: NodeId) -> bool:
        """Whether a node that is there can be told anything of weights: an old agent can't."""
        return node in self._followers

    def may_take(self, node: NodeId, of: NodeId, key: str) -> bool:
        """Whether ``node`` is now to take what is of the source with this key from ``of``, through this server."""
        return any(
            key_of(swarm.source) == key and any(member.node == of and member.seed == RELAY for member in swarm.members)
            for swarm in self._sharing.swarms(node)
        )

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tell the nodes what follows from what they say, for ever."""
        task_status.started()
        while True:
            with trio.move_on_at(self._kept_until if self._kept else math.inf):
                await self._stirred.wait()
            await trio.sleep(PACE_SECONDS)
            self._stirred = trio.Event()
            if not self._missing or trio.current_time() >= self._kept_until:
                self._kept = frozenset()
                self._stale.update(self._untold)
            told = 0
            try:
                self._look_at_catalog()
                while not self._sharing.settled:
                    self._stale.update(dict.fromkeys(self._sharing.settle(SOURCES_A_TURN)))
                    await trio.lowlevel.checkpoint()
                while self._stale:
                    for node in tuple(self._stale)[:ORDERS_A_TURN]:
                        del self._stale[node]
                        told += self._renew(node)
                    await trio.lowlevel.checkpoint()
            except Exception:
                # What follows from it is worked out at the next word of a node; all else goes on.
                log.exception("nodes could not be told of weights, by a fault of llmgw")
            await trio.sleep(told * TOLD_SECONDS)

    def _stir(self) -> None:
        self._stirred.set()

    def _renew(self, node: NodeId) -> bool:
        """Tell a node what it is told now, where that is another thing than before."""
        if node in self._kept and not self._is_asked(node):
            self._untold[node] = None
            return False
        is_first = node in self._untold
        self._untold.pop(node, None)
        order = WeightsOrder(
            swarms=self._sharing.swarms(node)[:MOST_TOLD],
            pulls=self._pulls.of(node)[:MOST_TOLD],
            collect=self._find_collect(node),
        )
        if order == self._orders.get(node, NOTHING) and not is_first:
            return False
        if order == NOTHING:
            self._orders.pop(node, None)
        else:
            self._orders[node] = order
        for tell in tuple(self._followers.get(node, ())):
            self._tell(node, tell, order)
        return True

    def _find_collect(self, node: NodeId) -> Collect | None:
        collecting = self._collecting
        items = collecting.items.get(node) if collecting is not None else None
        if collecting is None or items is None or node in collecting.lost:
            return None
        return collecting.stands.get(node) or Collect(number=collecting.number, items=items)

    def _is_asked(self, node: NodeId) -> bool:
        """Whether an operator waits for it to do something."""
        return bool(self._pulls.of(node)) or (self._collecting is not None and node in self._collecting.items)

    def _tell(self, node: NodeId, tell: Callable[[WeightsOrder], None], order: WeightsOrder) -> None:
        try:
            tell(order)
        except Exception:
            # its link may be lost for this; every other node's must not be
            log.exception("node %s can't be told of weights", node)

    # -- what is wanted

    @property
    def wanted(self) -> frozenset[str]:
        """The sources that models are made of, and that are fetched: as they are written, and as they are launched
        where that has failed."""
        fleet = self._scheduler.fleet
        launched = (fleet.launched(model.name) for model in fleet.catalog)
        models = (*fleet.catalog, *(model for model in launched if model is not None))
        # (they are the same objects until the catalog is another one)
        if list(map(id, models)) != list(map(id, self._models)):
            self._models, self._wanted = models, frozenset(list_fetched(models))
        return self._wanted

    def _look_at_catalog(self) -> None:
        allowed = self.wanted | self._pulls.sources()
        if allowed != self._allowed:
            self._allowed = allowed
            self._sharing.allow(allowed)

    def find_model(self, source: str) -> ModelName | None:
        """A model that is made of this source; the first one."""
        return next((model.name for model in self._scheduler.fleet.catalog if source in list_sources(model)), None)

    # -- what operators ask for

    def pull(self, source: str, nodes: tuple[NodeId, ...]) -> Asked:
        """Have these nodes fetch the newest commit of a source."""
        self._number += 1
        asked = self._pulls.add(self._number, source, nodes)
        self._stale.update(dict.fromkeys(nodes))
        self._stir()
        return asked

    def find_pull(self, number: int) -> Asked | None:
        return self._pulls.find(number)

    async def collect(self, find: Callable[[], Awaitable[Mapping[NodeId, tuple[Cached, ...]]]]) -> Collecting:
        """Have these nodes remove what ``find`` gives, one such order after another; with the answers of those that
        gave one within ``COLLECT_SECONDS``. One that comes later is no longer to remove anything: by then it may be
        wanted again."""
        async with self._one_at_a_time:
            free = await find()
            if not free:
                return Collecting(self._number, {})
            self._number += 1
            items = {
                node: tuple((each.source, each.commit) for each in found[:MOST_TOLD]) for node, found in free.items()
            }
            until = trio.current_time() + COLLECT_SECONDS
            with self._ordered(Collecting(self._number, items, until, self.wanted)) as waiting:
                with trio.move_on_at(until):
                    await waiting.answered.wait()
                return waiting

    @contextmanager
    def _ordered(self, collecting: Collecting) -> Iterator[Collecting]:
        self._collecting = collecting
        self._stale.update(dict.fromkeys(collecting.items))
        self._stir()
        try:
            yield collecting
        finally:
            self._collecting = None
            self._stale.update(dict.fromkeys(collecting.items))
            self._stir()
