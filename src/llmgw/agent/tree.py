"""The nursery tree of a node: shards, inventory, and the talk with the server. Shards outlive the link's troubles."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import trio

from llmgw.agent.adopt import adopt
from llmgw.agent.hands import Hands
from llmgw.agent.held import Adopted, Tools
from llmgw.agent.inventory import serve_checks, serve_inventory
from llmgw.agent.machine import Machine
from llmgw.agent.places import Places
from llmgw.agent.programs import Programs
from llmgw.agent.settings import AgentSettings
from llmgw.agent.shards import run_shard
from llmgw.agent.telling import first_report
from llmgw.agent.tether import Tether
from llmgw.agent.weights import Weights
from llmgw.core.effects import Desire
from llmgw.core.events import Event, NodeRegistered, NodeReported, ShardChanged, WeightsReported
from llmgw.core.node import Node, NodeId
from llmgw.core.replica import ShardId, ShardReport, ShardSpec, ShardState
from llmgw.core.weights import NodeWeights, WeightsOrder
from llmgw.engines.registry import Engine
from llmgw.errors import LinkLost
from llmgw.host.ports import Ports

log = logging.getLogger(__name__)


class Link(Protocol):
    """The way to the server. Both calls may raise LinkLost; the agent then tries again and registers anew."""

    async def desired(self, after: int) -> Desire:
        """The desired set, once there is one whose revision is greater than ``after``."""

    async def order(self, after: WeightsOrder | None) -> WeightsOrder:
        """What the server says of weights, once that is something else than ``after`` (None at first); never
        LinkLost."""

    async def report(self, event: Event) -> None:
        """Hand an event up."""

    async def wait_open(self) -> None:
        """Until there is a link to register over."""

    @property
    def give_up_seconds(self) -> float | None:
        """How long after the last word from here the server may give up what runs on several nodes; None where it has
        not said."""

    async def wait_lost(self) -> None:
        """Until the link that the node is registered over is gone, if ever: then it is to register again."""


async def serve_node(
    link: Link,
    *,
    engines: Mapping[str, Engine],
    settings: AgentSettings,
    hands: Hands | None = None,
    places: Places | None = None,
    held: bool = False,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run what the server desires, for ever. Started once the engines that ran before are taken over.

    ``hands`` are this machine, unless others are given. ``places`` is told where engines listen. What is desired is
    remembered in the state folder. ``held``: the caller holds that folder's lock already (host/state.py).

    Being cancelled leaves the engines running: to stop them, desire nothing and wait for their ENDED. Raises UsageError
    when another program works with the same state folder, or that can't be used.
    """
    hands = hands or Machine(settings)
    with nullcontext() if held else hands.state.hold():
        await hands.run(hands.state.make)
        programs = Programs(hands, retry_seconds=settings.pace.recheck)
        ports = Ports(*settings.engine_ports, is_free=hands.is_free)
        outbox = Outbox(settings.node_id)
        tools = Tools(
            engines=engines,
            settings=settings,
            hands=hands,
            programs=programs,
            weights=Weights(hands),
            ports=ports,
            tell_node=outbox.put_node,
        )
        found = await adopt(tools)
        async with trio.open_nursery() as nursery:
            tether = Tether()
            shards = Shards(tools, outbox, nursery, places or Places(), tether)
            await nursery.start(tools.weights.serve, nursery, outbox.put_weights, settings.pace.weights)
            shards.note_ended(found.ended)
            for adopted in found.running:
                shards.begin(adopted.record.spec, adopted)
            nursery.start_soon(serve_checks, tools)
            nursery.start_soon(serve_inventory, tools, outbox.put_node)
            nursery.start_soon(tether.watch, lambda: link.give_up_seconds, shards.end_groups)
            nursery.start_soon(_speak, link, tools, shards, outbox, found.ended)
            nursery.start_soon(_listen, link, tools, shards, outbox)
            nursery.start_soon(_take_orders, link, tools)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                shards.say_farewell()


@dataclass(slots=True)
class Life:
    """One shard that runs here: what it is as it was told last, what ends it and what lets it go on, and what was last
    said of it. ``why`` it was stopped, where that was not because the server wants it no more."""

    spec: ShardSpec
    last: ShardReport
    stop: trio.Event = field(default_factory=trio.Event)
    go: trio.Event = field(default_factory=trio.Event)
    why: str | None = None


class Shards:
    """What runs against what is desired: the only writer of both."""

    __slots__ = ("_desired", "_ended", "_nursery", "_outbox", "_places", "_running", "_tools", "tether")

    def __init__(self, tools: Tools, outbox: Outbox, nursery: trio.Nursery, places: Places, tether: Tether) -> None:
        self.tether = tether
        self._tools = tools
        self._outbox = outbox
        self._nursery = nursery
        self._places = places
        self._running: dict[ShardId, Life] = {}
        self._desired: dict[ShardId, ShardSpec] = {}
        # A shard that ended while it was desired stays ended: a new try is a new epoch, and the server's to decide.
        self._ended: dict[ShardId, Life] = {}

    def note_ended(self, ended: Iterable[tuple[ShardSpec, ShardReport]]) -> None:
        """These ran under an earlier agent, and ended: whoever still desires one of them does not know it yet."""
        for spec, report in ended:
            self._ended[spec.id] = Life(spec=spec, last=report)

    def desire(self, desire: Desire) -> None:
        """Take the whole set that is to run."""
        self._desired = {spec.id: spec for spec in desire.shards}
        self._ended = {shard: life for shard, life in self._ended.items() if shard in self._desired}
        self._reconcile()
        self._outbox.put_applied(desire.revision)

    def _reconcile(self) -> None:
        for shard, life in self._running.items():
            wanted = self._desired.get(shard)
            if wanted is None or wanted.epoch != life.spec.epoch:
                life.stop.set()
            elif wanted.go and not life.spec.go:
                # The same one, and all of its replica are prepared.
                life.spec = replace(life.spec, go=True)
                life.go.set()
        for shard, spec in self._desired.items():
            # One whose older epoch still runs is begun when that has ended: two epochs never run at once. And one that
            # the server may have given up waits for its word.
            given_up = self.tether.overdue and spec.count > 1
            if shard not in self._running and not self._has_ended(spec) and not given_up:
                self.begin(spec)

    def end_groups(self, seconds: float) -> None:
        """Stop the shards of replicas of several nodes: the link has been gone for so long that the server may have
        given them up, and what is left of them serves nobody and holds its GPUs."""
        why = f"no link to the server for {seconds:g} s: a replica of several nodes is placed anew without this node"
        for shard, life in self._running.items():
            # One that is being cleared away has a cause of its own.
            if life.spec.count > 1 and life.last.state is not ShardState.STOPPING and not life.stop.is_set():
                log.warning("shard %s is stopped: %s", shard, why)
                life.why = why
                life.stop.set()

    def _has_ended(self, spec: ShardSpec) -> bool:
        life = self._ended.get(spec.id)
        return life is not None and life.spec.epoch == spec.epoch

    def begin(self, spec: ShardSpec, adopted: Adopted | None = None) -> None:
        """Give a shard its life."""
        life = Life(spec=spec, last=first_report(spec) if adopted is None else adopted.report)
        self._running[spec.id] = life
        self._places.note(life.last)
        self._nursery.start_soon(self._guard, life, adopted, name=f"shard {spec.id}")

    async def _guard(self, life: Life, adopted: Adopted | None) -> None:
        """One shard; whatever happens in it, the others go on."""

        def report(said: ShardReport) -> None:
            if said.state is ShardState.ENDED and said.cause is None:
                said = replace(said, cause=life.why)
            life.last = said
            self._places.note(said)
            self._outbox.put_report(ShardChanged(node=self._tools.settings.node_id, report=said))

        try:
            await run_shard(life.spec, self._tools, report, stop=life.stop, go=life.go, adopted=adopted)
        except Exception as error:
            log.exception("shard %s ends by a fault of llmgw", life.spec.id)
            cause = f"a fault of llmgw itself: {type(error).__name__}: {error}"
            report(replace(first_report(life.spec), state=ShardState.ENDED, cause=cause))
        del self._running[life.spec.id]
        wanted = self._desired.get(life.spec.id)
        # One that was to stop leaves nothing behind: a server that has begun anew may give its number again.
        if wanted is not None and wanted.epoch == life.spec.epoch:
            self._ended[life.spec.id] = life
        self._reconcile()

    def list_known(self) -> tuple[tuple[ShardSpec, ShardReport], ...]:
        """Every shard and what was last said of it: those that run, and those that ended while the server wants them,
        for the word of their end may have been lost with the link."""
        ended = (self._ended[shard] for shard, spec in self._desired.items() if self._has_ended(spec))
        return tuple((life.spec, life.last) for life in (*self._running.values(), *ended))

    def say_farewell(self) -> None:
        """Say which engines go on without this agent."""
        alive = self._tools.hands.find_marked(self._tools.state.marker_prefix())
        markers = {self._tools.state.marker(life.spec) for life in self._running.values()}
        leaders = {life.last.pid for life in self._running.values()}
        # An engine's children may outlive it, and then they are what goes on.
        engines = {
            marker: sorted(stat.pid for stat, carried in alive.items() if carried == marker) for marker in markers
        }
        pids = [str(pid) for found in engines.values() for pid in ([*filter(leaders.__contains__, found)] or found)]
        if pids:
            level = logging.WARNING if self._tools.settings.stop_on_exit else logging.INFO
            log.log(level, "engines go on running and are taken over at the next start: pids %s", ", ".join(pids))


class Outbox:
    """Events on their way up. A newer word on the same thing replaces the older one that has not left yet, so that it
    can't grow however long the link is gone."""

    __slots__ = ("_applied", "_events", "_id", "_node", "_wake", "registered")

    def __init__(self, node: NodeId) -> None:
        self._id = node
        self._events: dict[object, Event] = {}
        self._node: Node | None = None
        self._applied: int | None = None
        self._wake = trio.Event()
        self.registered = trio.Event()

    def put_report(self, changed: ShardChanged) -> None:
        """What is new of a shard."""
        self._put((changed.report.shard, changed.report.epoch), changed)

    def drop_reports(self) -> None:
        """What was said of shards and has not left yet: all that is so of them is told with the registration that
        follows. The end of one that was to stop, told by itself, a server that has begun anew would take for that of
        the one to which it has just given the same number."""
        self._events = {key: event for key, event in self._events.items() if not isinstance(event, ShardChanged)}

    def put_node(self, node: Node) -> None:
        """What is new of the node."""
        self._node = node
        self._put("node", NodeReported(node=node, applied=self._applied))

    def put_weights(self, weights: NodeWeights) -> None:
        """What is new of its weights."""
        self._put("weights", WeightsReported(node=self._id, weights=weights))

    def put_applied(self, revision: int | None) -> None:
        """The desired set of this revision is taken; None: whoever counted the revisions may have begun anew.

        It is told behind all that came of the set before.
        """
        self._applied = revision
        if self._node is not None and revision is not None:
            self.put_node(self._node)

    def _put(self, key: object, event: Event) -> None:
        # To the end: a shard's next epoch is never told before the end of the one before.
        self._events.pop(key, None)
        self._events[key] = event
        self._wake.set()

    async def send_all(self, link: Link) -> None:
        """Send for ever; what the link raises ends it."""
        while True:
            while self._events:
                key, event = next(iter(self._events.items()))
                await link.report(event)
                # Only now: one that did not get through is sent again, unless there is newer word by then.
                if self._events.get(key) is event:
                    del self._events[key]
            self._wake = trio.Event()
            await self._wake.wait()


async def _speak(
    link: Link, tools: Tools, shards: Shards, outbox: Outbox, ended: tuple[tuple[ShardSpec, ShardReport], ...]
) -> None:
    """Register, then send what there is; after the link's loss again from the beginning.

    ``ended`` ran under an earlier agent. It is told with the registration: by itself, a server that has begun anew
    could take it for the end of its own first try.
    """
    while True:
        try:
            node = await tools.hands.survey(tools)
            outbox.put_applied(None)
            # What has ended while there was no link must not be told as running.
            await link.wait_open()
            outbox.drop_reports()
            await link.report(NodeRegistered(node=node, running=(*shards.list_known(), *ended)))
            ended = ()
            outbox.registered.set()
            # A server that has begun anew knows nothing of them.
            weights = tools.weights.tell()
            if weights is not None:
                outbox.put_weights(weights)
            with shards.tether.holding():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(outbox.send_all, link)
                    await link.wait_lost()
                    nursery.cancel_scope.cancel()
            continue
        except* LinkLost as lost:
            log.debug("the server can't be told anything: %s", _first(lost))
        except* Exception as failed:
            log.error("the talk with the server failed; trying again", exc_info=_first(failed))
        await trio.sleep(tools.settings.pace.link_retry)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _listen(link: Link, tools: Tools, shards: Shards, outbox: Outbox) -> None:
    """Take each new desired set. Not before the server knows of what runs here: it would desire none of it."""
    await outbox.registered.wait()
    revision = -1
    while True:
        try:
            desire = await link.desired(revision)
        except LinkLost as lost:
            log.debug("the server can't be heard: %s", lost)
            # A server that has begun anew counts its revisions anew.
            revision = -1
        except Exception:
            log.exception("the talk with the server failed; trying again")
        else:
            revision = desire.revision
            await _remember(tools.hands, desire)
            shards.desire(desire)
            continue
        await trio.sleep(tools.settings.pace.link_retry)


async def _take_orders(link: Link, tools: Tools) -> None:
    """Take all that the server says of weights."""
    order: WeightsOrder | None = None
    while True:
        try:
            newer = await link.order(order)
            tools.weights.order(newer)
            # (only now: one that could not be taken is tried again)
            order = newer
        except Exception:
            log.exception("what the server says of weights can't be heard; trying again")
            await trio.sleep(tools.settings.pace.link_retry)


async def _remember(hands: Hands, desire: Desire) -> None:
    """For whoever stops this node's engines while no agent runs: that the server wants them."""
    try:
        await hands.run(hands.state.write_desired, desire)
    except OSError as error:
        log.warning("what is to run here can't be kept in %s: %s", error.filename, error.strerror or error)
