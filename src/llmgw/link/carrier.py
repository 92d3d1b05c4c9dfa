"""Joins the frames of a trunk to its connection: reads, gathers what leaves, keeps time, and ends the trunk.

What all streams have to say is sent once per turn, so that many frames share one TLS record and one system call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from llmgw.link.mux import DATA, FIN, HELLO, OPEN, RST, VIOLATION, Channel, Hello, Mux, Opening
from llmgw.link.words import clean, trace
from llmgw.reactor.loop import Deadline, Owner, Reactor
from llmgw.reactor.transports import Transport

log = logging.getLogger("llmgw.link")

HELLO_SECONDS = 5.0
PING_SECONDS = 5.0
DEAD_SECONDS = 15.0
# A limit that is noticed so much later than it was due was missed by us: deadlines alone are half a second late.
LATE_SECONDS = 1.0
# Words of the trunk itself that may wait for a peer that does not read; data stops long before.
WAITING_BYTES = 1024 * 1024 + 256 * 1024
# A peer's words go into our log.
FAREWELL_LENGTH = 200


class Say(Protocol):
    """Logs a line, which may hold a peer's words, with where ``fault`` was raised."""

    def __call__(self, level: int, text: str, fault: Exception | None = None) -> None: ...


def _log(level: int, text: str, fault: Exception | None = None) -> None:
    log.log(level, "%s%s", clean(text), trace(fault) if fault is not None else "")


class Above(Protocol):
    """Whom a stream belongs to, at either end."""

    def take(self, data: bytes) -> None:
        """Bytes came."""

    def peer_finished(self) -> None:
        """The peer will send nothing more."""

    def peer_reset(self, reason: str) -> None:
        """The peer has ended the stream."""

    def peer_stands(self) -> None:
        """The engine was reached."""

    def unblocked(self) -> None:
        """All that waited has left."""

    def crash(self, error: Exception) -> None:
        """One of the above raised: end this one stream."""

    def settle(self) -> None:
        """Give credit back, if all that came has been taken; asked for by ``settle_soon``."""

    def trunk_lost(self, reason: str) -> None:
        """The trunk has ended; nothing can be sent any more."""


class Role(Protocol):
    """What the two ends do differently."""

    def greeted(self, hello: Hello) -> None:
        """The peer has said who it is."""

    def opened(self, channel: Channel, opening: Opening) -> None:
        """The peer has opened a stream: give it an ``above``, or reset it."""

    def told_to_leave(self, reason: str) -> None:
        """The peer wants no new streams here."""

    def over(self, reason: str) -> None:
        """The trunk has ended, and so have its streams. Called once."""


class Carrier:
    """The owner of the connection below. ``leaving``: no new streams, and the end when the last one has ended."""

    __slots__ = (
        "_attached",
        "_behind",
        "_due",
        "_farewell",
        "_pulse",
        "_reactor",
        "_role",
        "_scheduled",
        "_settling",
        "_stuck_pending",
        "_stuck_since",
        "below",
        "heard_at",
        "leaving",
        "mux",
        "name",
        "over",
        "say",
    )

    below: Transport

    def __init__(self, reactor: Reactor, mux: Mux, role: Role, *, name: str, say: Say | None = None) -> None:
        """``name`` stands in the log. ``say``: logs a line of a level; it may withhold some."""
        self._reactor = reactor
        self._role = role
        self.mux = mux
        self.name = name
        self.heard_at = 0.0
        self.leaving = self.over = False
        self._attached = self._scheduled = self._behind = False
        self.say: Say = say or _log
        # why the peer wants no new streams here
        self._farewell: str | None = None
        self._settling: dict[Above, None] = {}
        self._pulse = Deadline(reactor, self, self._beat)
        self._due = 0.0
        self._stuck_pending = 0
        self._stuck_since = 0.0

    def attach(self, below: Transport, *, node: str = "", session: str = "") -> None:
        """Begin, over a connection that stands and whose owner this is from now on."""
        below.owner = self
        self.below = below
        self._attached = True
        if self.over:
            return below.abort()
        # not the time of the last turn: of a loop with nothing to do that may be long ago
        self.heard_at = self._reactor.clock()
        self._beat_at(self.heard_at + HELLO_SECONDS)
        # at once: whatever else may be said has to come after it
        self.mux.say_hello(node=node, session=session)
        self._flush()

    @property
    def attached(self) -> bool:
        """Whether there is a connection below."""
        return self._attached

    # -- from below

    def received(self, data: bytes) -> None:
        if self.over:
            return
        self.heard_at = self._reactor.now
        self._hear(data)

    def _hear(self, data: bytes) -> None:
        mux = self.mux
        for kind, channel, payload in mux.feed(data):
            if kind == DATA:
                above = channel.above
                if above is not None:
                    try:
                        above.take(payload)
                    except Exception as error:
                        self._crashed(above, error)
            elif channel is None:
                if not self.over:
                    self._hear_trunk(kind, payload)
            elif kind != OPEN:
                self._hear_stream(kind, channel.above, payload)
            elif not self.over:
                self._role.opened(channel, payload)
        if not self._scheduled and (self.leaving or not mux.idle):
            self.schedule()
        if mux.behind and not self.over:
            # The rest in a piece of its own, and nothing more until then: others are waiting.
            if not self._behind:
                self._behind = True
                self.below.pause()
            self._reactor.call_soon(self, self._catch_up)

    def _catch_up(self) -> None:
        if not self._behind or self.over:
            return
        self._hear(b"")
        if not self.mux.behind and not self.over:
            self._behind = False
            self.below.resume()

    def settle_soon(self, above: Above) -> None:
        """Call ``settle`` after what is in hand: the accounts count frames that their stream has yet to be given."""
        self._settling[above] = None
        self.schedule()

    def _hear_stream(self, kind: int, above: Above | None, payload: Any) -> None:
        if above is None:
            # refused at its opening, and its next frames came along
            return
        if kind == FIN:
            self._guarded(above, above.peer_finished)
        elif kind == RST:
            self._guarded(above, above.peer_reset, payload)
        else:
            self._guarded(above, above.peer_stands)

    def _hear_trunk(self, kind: int, payload: Any) -> None:
        if kind == VIOLATION:
            self.refuse(payload)
        elif kind == HELLO:
            self._beat_at(self.heard_at + PING_SECONDS)
            self._role.greeted(payload)
        else:
            self.leaving = True
            self._farewell = clean(payload, FAREWELL_LENGTH) or "it did not say why"
            self._role.told_to_leave(self._farewell)

    def _guarded(self, above: Above, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            self._crashed(above, error)

    def _crashed(self, above: Above, error: Exception) -> None:
        """What one stream raises ends that stream; its neighbours on the trunk have done nothing."""
        self.say(logging.ERROR, f"a callback of {type(above).__name__} failed", error)
        try:
            above.crash(error)
        except Exception as another:
            self.say(logging.ERROR, "and ending it failed too", another)

    def ended(self) -> None:
        # it is told again when all that came before has been read
        if not self._behind:
            self._end("the other end closed the trunk")

    def lost(self, reason: str) -> None:
        while self.mux.behind and not self.over:
            self._hear(b"")
        self._end(reason)

    def drained(self) -> None:
        self.mux.unblock()
        self._flush()

    def on_crash(self, error: Exception) -> None:
        self.fail(f"a fault of our own: {error!r}")

    # -- out

    def schedule(self) -> None:
        """Send what has gathered, once this turn."""
        if not self._scheduled:
            self._scheduled = True
            self._reactor.call_soon(self, self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self.over or not self._attached:
            return
        if self._settling:
            for above in self._settling:
                above.settle()
            self._settling.clear()
        mux = self.mux
        if mux.blocked:
            if mux.gathered > WAITING_BYTES:
                self.fail("the other end takes nothing")
            return
        done = mux.collect()
        data = mux.take()
        took = not data or self.below.send(data)
        if not took:
            mux.block()
            self._stuck_pending = self.below.pending
            self._stuck_since = self._reactor.now
        for channel in done:
            self._guarded(channel.above, channel.above.unblocked)
        if took and not mux.idle:
            self.schedule()
        if self.leaving and not mux.channels and mux.idle and (mux.opener or self._farewell is not None):
            self._close("it was taken out of use, and its last stream has ended")

    def call_soon(self, owner: Owner, call: Callable[[], None]) -> None:
        """For a stream that must not call its owner now."""
        self._reactor.call_soon(owner, call)

    # -- time

    def deadline(self, owner: Owner, call: Callable[[], None], seconds: float) -> Deadline:
        """A time limit of a stream's own."""
        deadline = Deadline(self._reactor, owner, call)
        deadline.set(self._reactor.now + seconds)
        return deadline

    def _beat_at(self, when: float) -> None:
        self._due = when
        self._pulse.set(when)

    def _beat(self) -> None:
        now = self._reactor.now
        mux = self.mux
        if now - self._due >= LATE_SECONDS:
            # we were stopped, the peer perhaps with us, and what it said since may not have been read yet
            self.heard_at = max(self.heard_at, now - PING_SECONDS)
            self._stuck_since = now
            if not mux.greeted:
                return self._beat_at(now + HELLO_SECONDS)
        if not mux.greeted:
            return self.refuse(f"no HELLO within {HELLO_SECONDS:g} s")
        silent = now - self.heard_at
        if silent >= DEAD_SECONDS:
            return self.fail(f"nothing heard for {DEAD_SECONDS:g} s")
        if mux.blocked and self._stuck(now):
            return self.fail(f"the other end has taken nothing for {DEAD_SECONDS:g} s")
        if silent >= PING_SECONDS:
            mux.ping()
            self.schedule()
            self._beat_at(min(self.heard_at + DEAD_SECONDS, now + PING_SECONDS))
        else:
            self._beat_at(self.heard_at + PING_SECONDS)

    def _stuck(self, now: float) -> bool:
        """A peer that talks but does not read is as good as dead; one that reads slowly is not."""
        pending = self.below.pending
        if pending < self._stuck_pending:
            self._stuck_pending = pending
            self._stuck_since = now
        return now - self._stuck_since >= DEAD_SECONDS

    # -- the end

    def go_away(self, reason: str) -> None:
        """No new streams; the trunk ends with its last one."""
        if not self._attached:
            self.fail(reason)
        elif not self.leaving and not self.over:
            self.leaving = True
            self.mux.go_away(reason)
            self.schedule()

    def refuse(self, reason: str) -> None:
        """End the trunk now, and tell the peer why, if it listens."""
        reason = clean(reason)
        if not self.over and self.mux.blocked:
            self.fail(reason)
        elif not self.over:
            self.say(logging.WARNING, f"{self.name}: closed: {reason}")
            # what the streams had to say is for a peer that is not trusted any more
            self.mux.take()
            self.mux.go_away(reason)
            self.below.send(self.mux.take())
            self.below.close(linger=True)
            self._finish(reason)

    def fail(self, reason: str) -> None:
        """End the trunk at once."""
        reason = clean(reason)
        if not self.over:
            self.say(logging.WARNING, f"{self.name}: lost: {reason}")
            self._finish(reason)
            if self._attached:
                self.below.abort()

    def _end(self, reason: str) -> None:
        """The connection has ended."""
        if self.leaving and not self.mux.channels:
            self._close(reason)
        else:
            self.fail(reason if self._farewell is None else f"{reason} ({self._farewell})")

    def _close(self, reason: str) -> None:
        if not self.over:
            if self._farewell is not None:
                reason = f"{reason} ({self._farewell})"
            self.say(logging.INFO, f"{self.name}: closed: {reason}")
            self.below.close(linger=True)
            self._finish(reason)

    def _finish(self, reason: str) -> None:
        self.over = True
        self._pulse.drop()
        self._settling.clear()
        channels = list(self.mux.channels.values())
        self.mux.channels.clear()
        for channel in channels:
            channel.gone = True
            if channel.above is not None:
                self._guarded(channel.above, channel.above.trunk_lost, reason)
        self._role.over(reason)
