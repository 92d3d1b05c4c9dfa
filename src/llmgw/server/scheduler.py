"""The one caller of ``Fleet.handle``: events come in by one inbox, and what the fleet asks for is carried out here."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import assert_never

import trio

from llmgw.core.effects import Announce, Desire, Drain, Effect, Learn, Proven, Reverted, WakeAt
from llmgw.core.events import Drained, Event, Wakeup
from llmgw.core.fleet import Fleet
from llmgw.core.node import NodeId
from llmgw.core.replica import ReplicaId
from llmgw.counters import Counters
from llmgw.server.chronicle import Chronicle
from llmgw.units import printable

log = logging.getLogger("llmgw.scheduler")

# A full inbox makes whoever reports wait: an agent's link is then not read, which its own bounds can bear.
INBOX_EVENTS = 256
# Of an engine's last words.
SHOWN_LINES = 8


class Scheduler:
    """Feeds the fleet. ``clock`` gives the ``now`` of every event; ``chronicle`` has what was announced of late."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        clock: Callable[[], float] = trio.current_time,
        counters: Counters | None = None,
        chronicle: Chronicle | None = None,
    ) -> None:
        self.fleet = fleet
        self.chronicle = chronicle or Chronicle()
        self._clock = clock
        self._announced = (counters or Counters()).counter(
            "llmgw_fleet_events_total", "What has happened in the fleet, by what it was.", ("what",)
        )
        # (a trio.Event is set when all that came before it has been taken)
        self._inbox, self._outbox = trio.open_memory_channel[Event | trio.Event](math.inf)
        self._room = trio.Semaphore(INBOX_EVENTS)
        # how many were put in though there was no room
        self._over = 0
        self._drain: Callable[[ReplicaId, int, int], None] | None = None
        self._keep: Callable[[Proven | Reverted | Learn], None] | None = None
        self._desires: dict[NodeId, Desire] = {}
        # by node: with one for all, each set would wake a thousand links for nothing
        self._desired: dict[NodeId, trio.Event] = {}
        self._followers: dict[NodeId, list[Callable[[Desire], None]]] = {}
        self._changed = trio.Event()
        self._wake_at = math.inf
        self._alarm = trio.CancelScope()

    async def post(self, event: Event) -> None:
        """Hand the fleet an event; waits while the inbox is full."""
        await self._send(event)

    def put(self, event: Event) -> None:
        """The same without a wait, for what is born in a turn that can't: after all that is in the inbox, and before
        what others wait to hand over. Nothing bounds it, so what is put must have a bound of its own."""
        try:
            self._room.acquire_nowait()
        except trio.WouldBlock:
            self._over += 1
        self._inbox.send_nowait(event)

    def attend(self, drain: Callable[[ReplicaId, int, int], None]) -> None:
        """Have ``drain`` called with the replica, the epoch and the number of each ``Drain``: it puts ``Drained`` when
        nothing is in flight there. Until then nothing ever is."""
        self._drain = drain

    def entrust(self, keep: Callable[[Proven | Reverted | Learn], None]) -> None:
        """Have ``keep`` called with all that a later server is to know. Until then it is known to nobody."""
        self._keep = keep

    async def settle(self, event: Event) -> None:
        """The same, and wait until the fleet has taken it and all is carried out that it asked for."""
        taken = trio.Event()
        await self._send(event)
        await self._send(taken)
        await taken.wait()

    async def _send(self, item: Event | trio.Event) -> None:
        try:
            self._room.acquire_nowait()
        except trio.WouldBlock:
            await self._room.acquire()
        self._inbox.send_nowait(item)

    def _make_room(self) -> None:
        """One was taken out of the inbox."""
        if self._over:
            self._over -= 1
        else:
            self._room.release()

    async def desired(self, node: NodeId, after: int) -> Desire:
        """The node's desired set, once its revision is greater than ``after``. Only the newest is ever given."""
        while True:
            desire = self._desires.get(node)
            if desire is not None and desire.revision > after:
                return desire
            await self._desired.setdefault(node, trio.Event()).wait()

    def follow(self, node: NodeId, tell: Callable[[Desire], None]) -> Callable[[], None]:
        """Call ``tell`` with the node's desired set, now if there is one and at each change, until the answer is
        called: for a thousand nodes, each of which would else have a task that waits. What it raises is logged."""
        followers = self._followers.setdefault(node, [])
        followers.append(tell)
        desire = self._desires.get(node)
        if desire is not None:
            tell(desire)
        return functools.partial(followers.remove, tell)

    def stir(self) -> None:
        """Let whoever waits for a change look again: something else that they look at has changed."""
        self._changed.set()
        self._changed = trio.Event()

    async def wait_changed(self) -> None:
        """Wait until the fleet has changed in a way that it announced, or ``stir`` was called."""
        await self._changed.wait()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Handle events for ever."""
        task_status.started()
        while True:
            # One scope for many events: making one costs as much as an event does.
            with trio.CancelScope() as self._alarm:
                self._set_alarm()
                while True:
                    item = await self._outbox.receive()
                    self._make_room()
                    if isinstance(item, trio.Event):
                        item.set()
                    else:
                        self._take(item)
            self._wake_at = math.inf
            self._take(Wakeup())

    def _set_alarm(self) -> None:
        self._alarm.deadline = trio.current_time() + max(0.0, self._wake_at - self._clock())

    def _take(self, event: Event) -> None:
        try:
            effects = self.fleet.handle(event, self._clock())
        except Exception:
            # Whatever a node says must not end the server: the others are looked after all the same.
            log.exception("%s could not be taken, by a fault of llmgw", type(event).__name__)
            return
        self._carry_out(effects)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Desire(node=node):
                    self._desires[node] = effect
                    self._tell_followers(effect)
                    waiting = self._desired.pop(node, None)
                    if waiting is not None:
                        waiting.set()
                case WakeAt(at=at):
                    if at < self._wake_at:
                        self._wake_at = at
                        self._set_alarm()
                case Announce():
                    self.announce(effect)
                case Drain(replica=replica, epoch=epoch, number=number):
                    if self._drain is not None:
                        self._drain(replica, epoch, number)
                    else:
                        self.put(Drained(replica=replica, epoch=epoch, number=number))
                case Proven() | Reverted() | Learn():
                    if self._keep is not None:
                        self._keep(effect)
                case _:
                    assert_never(effect)

    def _tell_followers(self, desire: Desire) -> None:
        for tell in tuple(self._followers.get(desire.node, ())):
            try:
                tell(desire)
            except Exception:
                # its link may be lost for this; every other node's must not be
                log.exception("node %s can't be told what to run", desire.node)

    def announce(self, announced: Announce) -> None:
        """Log, count and keep what has happened, and let whoever waits for a change look again."""
        level = logging.WARNING if announced.warning else logging.INFO
        # an agent's words, and an engine's, are in it
        lines = () if announced.again else announced.lines[-SHOWN_LINES:]
        text = "\n    ".join(map(printable, (announced.text, *lines)))
        about = "" if announced.model is None else f"{printable(announced.model)}: "
        log.log(level, "%s%s", about, text)
        self._announced.bump(announced.what)
        self.chronicle.add(announced)
        self.stir()
