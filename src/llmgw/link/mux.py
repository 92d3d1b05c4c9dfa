"""The frames of a trunk: many streams of bytes over one connection, each with a credit of its own.

Pure: what came goes into ``feed``, and events come out; what is to leave gathers until ``take``. Only one end opens
streams. Where a peer breaks a rule the two ends no longer mean the same: that is the last event, and the trunk
has to end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from struct import Struct
from typing import Any, TypeVar

import msgspec

from llmgw.errors import LlmgwError

PROTOCOL = 1
# What a peer may send on a stream before we have taken it; it is given back in halves.
WINDOW = 256 * 1024
HALF = WINDOW // 2
MAX_STREAMS = 4096
MAX_DATA = 16 * 1024
MAX_OTHER = 64 * 1024
# Data beyond this waits with its stream until the next take, so that no stream is far ahead of the others.
GATHER = 256 * 1024
LAST_NUMBER = 0xFFFF_FFFF
# That are read at once; a peer may send eight thousand in one piece, and work on them is work that others wait for.
TURN_FRAMES = 256

VIOLATION, HELLO, OPEN, DATA, FIN, RST, CREDIT, PING, PONG, GOAWAY = range(10)
# Why a stream was reset. ``no_shard``, ``wrong_epoch``, ``connect_failed`` and ``going_away`` only come before the
# engine has seen anything.
REASONS = frozenset(
    {
        "client_left",
        "no_shard",
        "wrong_epoch",
        "connect_failed",
        "engine_closed",
        "engine_reset",
        "crashed",
        "going_away",
    }
)

_HEADER = Struct(">II")
_NUMBER = Struct(">I")
_NAMES = {
    HELLO: "HELLO",
    OPEN: "OPEN",
    DATA: "DATA",
    FIN: "FIN",
    RST: "RST",
    CREDIT: "CREDIT",
    PING: "PING",
    PONG: "PONG",
    GOAWAY: "GOAWAY",
}
# The sizes that a kind's payload may have.
_SIZES = {
    HELLO: (2, MAX_OTHER),
    OPEN: (2, MAX_OTHER),
    FIN: (0, 0),
    RST: (0, MAX_OTHER),
    CREDIT: (4, 4),
    PING: (0, 8),
    PONG: (0, 8),
    GOAWAY: (0, MAX_OTHER),
}
_OF_THE_TRUNK = frozenset({HELLO, PING, PONG, GOAWAY})


T = TypeVar("T")


class Violation(LlmgwError):  # noqa: N818 - named by what it is, like all of them
    """The peer broke a rule of the frames; says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first frame, both ways. ``window``: bytes a stream may send ahead; ``streams``: how many may be open at once.

    ``node`` and ``session`` are the agent's: who it is, and the word that the server gave it on the control link.
    """

    protocol: int
    window: int
    streams: int
    node: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a stream is for: never a host or a port."""

    shard: str
    epoch: int


class Channel:
    """The accounts of one stream. ``above`` is whoever it belongs to; the mux does not look at it.

    ``credit``: what may still be sent. ``room``: what the peer may still send. ``waiting``: what has no credit, or no
    place in this take.
    """

    __slots__ = (
        "above",
        "credit",
        "gone",
        "got_fin",
        "last_words",
        "number",
        "queued",
        "room",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self, number: int, credit: int) -> None:
        self.number = number
        self.credit = credit
        self.room = WINDOW
        self.above: Any = None
        self.waiting: deque[bytes | memoryview] | None = None
        self.waiting_bytes = 0
        self.last_words = b""
        self.queued = self.got_fin = self.gone = False


# (kind, channel, payload). DATA: bytes · FIN: b"" · RST: the reason · CREDIT: b"", the stream's end stands ·
# OPEN: an Opening · HELLO: a Hello, no channel · GOAWAY: the reason, no channel · VIOLATION: what is wrong, no channel
Event = tuple[int, Any, Any]


class Mux:
    """One end of a trunk. ``opener``: the end that opens streams."""

    __slots__ = (
        "_have",
        "_last",
        "_need",
        "_out",
        "_parts",
        "_peer_window",
        "_ready",
        "_space",
        "behind",
        "blocked",
        "channels",
        "gathered",
        "greeted",
        "max_streams",
        "opener",
    )

    def __init__(self, *, opener: bool, max_streams: int = MAX_STREAMS) -> None:
        self.opener = opener
        self.max_streams = max_streams
        self.channels: dict[int, Channel] = {}
        self.greeted = False
        # there are whole frames that came and were not read yet: feed again, with nothing
        self.behind = False
        # the connection below is full: data waits with its stream, which then stops whoever feeds it
        self.blocked = False
        self.gathered = 0
        self._space = GATHER
        self._out: list[bytes | memoryview] = []
        self._ready: deque[Channel] = deque()
        self._last = 0
        self._peer_window = 0
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 0

    # -- in

    def feed(self, data: bytes) -> list[Event]:
        """What the peer's bytes mean, in order; a frame that is not whole yet is kept, and so is what
        follows the first ``TURN_FRAMES``. A VIOLATION is the last."""
        parts = self._parts
        if parts:
            parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return []
            data = b"".join(parts)
            parts.clear()
        events: list[Event] = []
        try:
            at, need = self._parse(data, events)
        except Violation as violation:
            # what came before it counts: of a stream that ended there nobody else would tell
            events.append((VIOLATION, None, violation.message))
            return events
        if at < len(data):
            parts.append(data[at:] if at else data)
            self._have = len(data) - at
            self._need = need
        return events

    def _parse(self, data: bytes, events: list[Event]) -> tuple[int, int]:
        """How far it came, and how many bytes the frame there needs at least."""
        at, end = 0, len(data)
        self.behind = False
        add, get, unpack = events.append, self.channels.get, _HEADER.unpack_from
        for _ in range(TURN_FRAMES):
            if end - at < 8:
                return at, 8
            number, word = unpack(data, at)
            start = at + 8
            size = word >> 8
            after = start + size
            if word & 0xFF == DATA:
                if not 0 < size <= MAX_DATA:
                    raise Violation(f"a DATA frame of {size} bytes")
                if after > end:
                    return at, 8 + size
                channel = get(number)
                if channel is not None:
                    room = channel.room = channel.room - size
                    if room < 0:
                        raise Violation(f"stream {number} sent more than its credit, or after its FIN")
                    add((DATA, channel, data[start:after]))
                else:
                    self._pass_late(number, DATA)
            else:
                self._check(number, word & 0xFF, size)
                if after > end:
                    return at, 8 + size
                event = self._read(number, word & 0xFF, data[start:after])
                if event is not None:
                    add(event)
            at = after
        self.behind = end - at >= 8
        return at, 0 if self.behind else 8

    def _check(self, number: int, kind: int, size: int) -> None:
        """What the header alone tells, before anything is kept for it."""
        sizes = _SIZES.get(kind)
        if sizes is None:
            raise Violation(f"a frame of the unknown kind {kind}")
        if not sizes[0] <= size <= sizes[1]:
            raise Violation(f"a {_NAMES[kind]} frame of {size} bytes")
        if (number == 0) != (kind in _OF_THE_TRUNK):
            raise Violation(f"a {_NAMES[kind]} frame for stream {number}")
        if self.greeted == (kind == HELLO):
            raise Violation(f"a {_NAMES[kind]} frame {'after' if self.greeted else 'before'} the HELLO")

    def _read(self, number: int, kind: int, payload: bytes) -> Event | None:
        if kind == PING:
            self._emit(PONG, 0, payload)
            return None
        if kind == PONG:
            return None
        if kind == HELLO:
            return HELLO, None, self._read_hello(payload)
        if kind == GOAWAY:
            return GOAWAY, None, payload.decode("utf-8", "replace")
        if kind == OPEN:
            return OPEN, self._opened(number), _decode(payload, Opening, "OPEN")
        channel = self.channels.get(number)
        if channel is None:
            self._pass_late(number, kind)
            return None
        if kind == CREDIT:
            return self._credit(channel, _NUMBER.unpack(payload)[0])
        if kind == RST:
            self._drop(channel)
            reason = payload.decode("ascii", "replace")
            return RST, channel, reason if reason in REASONS else "unknown"
        if channel.got_fin:
            raise Violation(f"a second FIN on stream {number}")
        channel.got_fin = True
        channel.room = 0
        return FIN, channel, b""

    def _read_hello(self, payload: bytes) -> Hello:
        hello = _decode(payload, Hello, "HELLO")
        if hello.protocol < 1 or not MAX_DATA <= hello.window <= LAST_NUMBER or hello.streams < 1:
            raise Violation(f"a HELLO with protocol {hello.protocol}, window {hello.window}, streams {hello.streams}")
        self.greeted = True
        self._peer_window = hello.window
        if self.opener:
            self.max_streams = min(self.max_streams, hello.streams)
        return hello

    def _opened(self, number: int) -> Channel:
        if self.opener:
            raise Violation("an OPEN frame from the end that opens nothing")
        if number <= self._last:
            raise Violation(f"stream {number} was opened after stream {self._last}")
        if len(self.channels) >= self.max_streams:
            raise Violation(f"more than {self.max_streams} streams")
        return self._add(number)

    def _credit(self, channel: Channel, amount: int) -> Event | None:
        if not amount:
            return CREDIT, channel, b""
        credit = channel.credit + amount
        if credit > self._peer_window:
            raise Violation(f"stream {channel.number} was given more credit than the window")
        channel.credit = credit
        if channel.waiting is not None and not channel.queued:
            channel.queued = True
            self._ready.append(channel)
        return None

    def _pass_late(self, number: int, kind: int) -> None:
        """Frames of a stream that we have ended may be on their way; of one that never was, none can be."""
        if not 0 < number <= self._last:
            raise Violation(f"a {_NAMES[kind]} frame for stream {number}, which was never opened")

    # -- streams

    @property
    def spent(self) -> bool:
        """There is no number left for another stream."""
        return self._last >= LAST_NUMBER

    def open(self, opening: Opening) -> Channel:
        """A new stream; what is written follows at once. The caller heeds ``max_streams`` and ``spent``."""
        channel = self._add(self._last + 1)
        self._emit(OPEN, channel.number, msgspec.json.encode(opening))
        return channel

    def _add(self, number: int) -> Channel:
        self._last = number
        channel = self.channels[number] = Channel(number, self._peer_window)
        return channel

    def _drop(self, channel: Channel) -> None:
        channel.gone = True
        channel.credit = 0
        channel.waiting = None
        channel.waiting_bytes = 0
        del self.channels[channel.number]

    def write(self, channel: Channel, data: bytes) -> bool:
        """Take all of ``data``. False: some waits with the stream, until ``collect`` names it."""
        size = len(data)
        if size <= channel.credit and size <= self._space and size <= MAX_DATA and channel.waiting is None:
            channel.credit -= size
            self._space -= size
            self.gathered += size
            out = self._out
            out.append(_HEADER.pack(channel.number, size << 8 | DATA))
            out.append(data)
            return True
        return self._write_rest(channel, data)

    def _write_rest(self, channel: Channel, data: bytes) -> bool:
        if channel.gone or channel.last_words:
            return True
        if channel.waiting is None:
            channel.waiting = deque()
        channel.waiting.append(data)
        channel.waiting_bytes += len(data)
        if channel.queued:
            return False
        while channel.waiting and channel.credit and self._space > 0:
            self._frame(channel)
        if not channel.waiting:
            channel.waiting = None
            return True
        if channel.credit:
            channel.queued = True
            self._ready.append(channel)
        return False

    def acknowledge(self, channel: Channel) -> None:
        """The stream's end stands: the engine was reached."""
        if not channel.gone:
            self._emit(CREDIT, channel.number, b"\0\0\0\0")

    def give_back(self, channel: Channel) -> None:
        """All that came has been taken: the peer may send as much again; in halves of the window."""
        amount = WINDOW - channel.room
        if amount >= HALF and not channel.got_fin and not channel.gone:
            channel.room += amount
            self._emit(CREDIT, channel.number, _NUMBER.pack(amount))

    def close(self, channel: Channel, reason: str) -> None:
        """End in good order: what waits, FIN, and an RST, as nothing is read any more either."""
        self._say_last(channel, _HEADER.pack(channel.number, FIN) + _reset(channel.number, reason))

    def break_off(self, channel: Channel, reason: str) -> None:
        """What waits, and then that it broke."""
        self._say_last(channel, _reset(channel.number, reason))

    def _say_last(self, channel: Channel, words: bytes) -> None:
        if channel.gone or channel.last_words:
            return
        channel.last_words = words
        if channel.waiting is None:
            self._leave(channel)

    def _leave(self, channel: Channel) -> None:
        self._out.append(channel.last_words)
        self.gathered += len(channel.last_words)
        self._drop(channel)

    def reset(self, channel: Channel, reason: str) -> None:
        """End now; what waits is dropped."""
        if not channel.gone:
            self._emit(RST, channel.number, reason.encode())
            self._drop(channel)

    # -- of the trunk itself

    def say_hello(self, *, node: str = "", session: str = "") -> None:
        hello = Hello(protocol=PROTOCOL, window=WINDOW, streams=self.max_streams, node=node, session=session)
        self._emit(HELLO, 0, msgspec.json.encode(hello))

    def ping(self) -> None:
        self._emit(PING, 0, b"")

    def go_away(self, reason: str) -> None:
        """Say that no stream is to be opened any more."""
        self._emit(GOAWAY, 0, reason.encode()[:1024])

    # -- out

    def _emit(self, kind: int, number: int, payload: bytes) -> None:
        frame = _HEADER.pack(number, len(payload) << 8 | kind) + payload
        self._out.append(frame)
        self.gathered += len(frame)

    def _frame(self, channel: Channel) -> None:
        """One DATA frame of what waits, from as many pieces as go in."""
        waiting = channel.waiting or deque()
        limit = min(MAX_DATA, channel.credit)
        pieces: list[bytes | memoryview] = []
        size = 0
        while waiting and size < limit:
            piece = waiting[0]
            left = limit - size
            if len(piece) <= left:
                pieces.append(waiting.popleft())
                size += len(piece)
            else:
                view = memoryview(piece)
                pieces.append(view[:left])
                waiting[0] = view[left:]
                size = limit
        channel.credit -= size
        channel.waiting_bytes -= size
        self._space -= size
        self.gathered += size
        self._out.append(_HEADER.pack(channel.number, size << 8 | DATA))
        self._out += pieces

    @property
    def idle(self) -> bool:
        """There is nothing to take."""
        return not self._out and not self._ready

    def collect(self) -> list[Channel]:
        """Gather what waits, a frame of each stream in turn. Returns the streams of which nothing waits any more."""
        done: list[Channel] = []
        ready = self._ready
        while ready and self._space > 0:
            channel = ready.popleft()
            if not channel.gone:
                self._frame(channel)
                if channel.waiting and channel.credit:
                    ready.append(channel)
                    continue
                if not channel.waiting:
                    channel.waiting = None
                    done.append(channel)
                    if channel.last_words:
                        self._leave(channel)
            channel.queued = False
        return done

    def take(self) -> bytes:
        """All that has gathered."""
        data = b"".join(self._out)
        self._out.clear()
        self.gathered = 0
        self._space = GATHER
        return data

    def block(self) -> None:
        """The connection below takes no more for now: gather no more data."""
        self.blocked = True
        self._space = 0

    def unblock(self) -> None:
        self.blocked = False
        self._space = GATHER


def _reset(number: int, reason: str) -> bytes:
    return _HEADER.pack(number, len(reason) << 8 | RST) + reason.encode()


def _decode(payload: bytes, kind: type[T], name: str) -> T:
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Violation(f"a {name} frame that can't be read: {error}") from None
