"""Connections that carry bytes for an owner: Plain (a socket), Tls (over a Plain), Memory (tests and simulations).

All push: what arrives is handed to the owner, and ``pause`` stops it. ``send`` takes everything; its answer tells
whether the peer keeps up, so that whoever feeds it can stop feeding until ``drained``. Nothing here calls the owner
from inside a call that the owner made.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Protocol

from llmgw.reactor.loop import GONE, IN, OUT, RDHUP, Deadline, Owner, Reactor

READ_BYTES = 65536
# After our last word the peer may still be sending; closing on unread bytes makes the kernel send a reset, which can
# overtake the answer. So a little is read and thrown away first.
LINGER_BYTES = 256 * 1024
LINGER_SECONDS = 1.0
# How long a peer may take for what was pending when we closed: one that never reads must not hold a connection.
FLUSH_SECONDS = 20.0

Address = tuple[str, int] | str


class Receiver(Owner, Protocol):
    """Who owns a transport, and hears of it."""

    def received(self, data: bytes) -> None:
        """Bytes came; never empty."""

    def ended(self) -> None:
        """The peer will send nothing more.

        While paused it only means that the peer has closed its side: what it sent before comes after ``resume``, and
        then this once more.
        """

    def lost(self, reason: str) -> None:
        """The connection broke; the transport is closed already."""

    def drained(self) -> None:
        """All that was sent has left us, after a ``send`` that answered False."""


class Transport(Protocol):
    """What the door, the trunks and the tests hold. One that is closed lets go of its owner."""

    owner: Receiver
    peer: str

    @property
    def pending(self) -> int:
        """Bytes taken by ``send`` that the peer has not accepted yet."""

    @property
    def closed(self) -> bool: ...

    def send(self, data: bytes) -> bool:
        """Take all of ``data``. False: some of it waits here; feed no more until ``drained``."""

    def pause(self) -> None:
        """Hand over nothing until ``resume``; the peer's closing is still noticed."""

    def resume(self) -> None: ...

    def close(self, *, linger: bool = False) -> None:
        """Send what is pending, then close. With ``linger`` the peer gets time to read our last words."""

    def abort(self) -> None:
        """Close now; what is pending is lost."""

    def reset(self) -> None:
        """Abort so that the peer can't take it for an end in good order."""


class _Nobody:
    """Whatever comes of the connection, nobody minds."""

    def received(self, data: bytes) -> None: ...

    def ended(self) -> None: ...

    def lost(self, reason: str) -> None: ...

    def drained(self) -> None: ...

    def on_crash(self, error: Exception) -> None: ...


# Who owns a connection that was turned away, or that has ended: one that still named its owner would be named by it,
# and both would stay in memory, with all they hold, until the garbage collector comes by.
NOBODY = _Nobody()


class Plain:
    """A non-blocking stream socket (TCP or unix)."""

    __slots__ = (
        "_broke",
        "_closing",
        "_eof",
        "_fd",
        "_flush_seconds",
        "_inbox",
        "_last_wait",
        "_linger_left",
        "_mask",
        "_on_connected",
        "_out",
        "_paused",
        "_reactor",
        "_recv",
        "_registered",
        "_send",
        "_sock",
        "_watch_hangup",
        "closed",
        "owner",
        "peer",
        "pending",
    )

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        owner: Receiver,
        *,
        watch_hangup: bool = False,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        """Take over a connected, non-blocking socket. ``watch_hangup``: notice a peer that closes while paused.

        ``flush_seconds``: how long a peer may take nothing of what was pending at ``close``; then it is reset, so that
        what it got does not look whole.
        """
        self._take(reactor, sock, owner)
        self._flush_seconds = flush_seconds
        self._watch_hangup = RDHUP if watch_hangup else 0
        self._mask = IN | self._watch_hangup
        reactor.register(self._fd, self._mask, self)
        self._registered = True

    def _take(self, reactor: Reactor, sock: socket.socket, owner: Receiver) -> None:
        self._reactor = reactor
        self._sock = sock
        self._fd = sock.fileno()
        self._recv = sock.recv
        self._send = sock.send
        self.owner = owner
        self.peer = ""
        self.closed = False
        self._out: list[bytes | memoryview] = []
        self.pending = 0
        self._paused = self._closing = self._eof = self._registered = False
        self._inbox: list[bytes] = []
        self._last_wait: Deadline | None = None
        self._linger_left = 0
        self._flush_seconds = FLUSH_SECONDS
        self._on_connected: Callable[[], None] | None = None
        self._watch_hangup = 0
        # why it broke, while what came before that is still to be handed over
        self._broke: str | None = None

    @classmethod
    def connect(
        cls, reactor: Reactor, address: Address, owner: Receiver, *, connected: Callable[[], None] | None = None
    ) -> Plain:
        """Dial ``address``: ``(ip, port)`` or a unix socket's path. What is sent meanwhile waits.

        ``connected`` is called once it stands; a refusal comes as ``lost``. OSError when not even a socket can be had.
        """
        unix = isinstance(address, str)
        family = socket.AF_UNIX if unix else (socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        if not unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(address)
        self = cls.__new__(cls)
        self._take(reactor, sock, owner)
        self.peer = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        self._on_connected = connected or _nothing
        self._mask = OUT
        if code in (0, errno.EINPROGRESS):
            reactor.register(self._fd, OUT, self)
            self._registered = True
        else:
            reactor.call_soon(owner, self._lose, f"connecting to {self.peer}: {errno.errorcode.get(code, code)}")
        return self

    def _set_mask(self, mask: int) -> None:
        if mask != self._mask and self._registered:
            self._mask = mask
            self._reactor.modify(self._fd, mask)

    def _forget(self) -> None:
        if self._registered:
            self._registered = False
            self._reactor.unregister(self._fd)

    def on_crash(self, error: Exception) -> None:
        owner = self.owner
        self.abort()
        owner.on_crash(error)

    # -- what epoll says

    def on_event(self, mask: int) -> None:
        if mask & OUT:
            if self._on_connected is not None and not self._connected():
                return
            self._flush()
        if not self._registered:
            return
        if mask & IN and not self._paused:
            try:
                data = self._recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                return self._lose(_words(error))
            if data:
                if self._closing:
                    self._discard(data)
                else:
                    self.owner.received(data)
            else:
                self._end()
        elif mask & (RDHUP | GONE):
            self._hung_up(mask)

    def _connected(self) -> bool:
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._lose(f"connecting to {self.peer}: {errno.errorcode.get(code, code)}")
            return False
        call, self._on_connected = self._on_connected, None
        self._set_mask(OUT if self._paused or self._closing else IN | OUT)
        if call is not None:
            call()
        return not self.closed

    def _end(self) -> None:
        self._eof = True
        if self._closing:
            return self._shut()
        # level-triggered: an end that stays registered would be reported for ever
        self._set_mask(self._mask & ~(IN | RDHUP))
        self.owner.ended()

    def _hung_up(self, mask: int) -> None:
        if self._closing:
            # what is still pending can't be delivered, and nobody waits for more
            self._shut()
        elif mask & GONE and not self._watch_hangup and not self._eof:
            self._read_to_end()
        elif mask & GONE:
            # both directions are over and can't be masked: whoever is told now has nothing more to lose
            self._lose("the peer closed the connection")
        else:
            self._set_mask(self._mask & ~RDHUP)
            self.owner.ended()

    def _read_to_end(self) -> None:
        """The peer is gone: keep what it had sent, for ``resume`` if paused, and stop watching, or epoll would spin."""
        if self.closed or self._eof:
            return
        self._forget()
        try:
            while data := self._recv(READ_BYTES):
                self._inbox.append(data)
        except (BlockingIOError, InterruptedError):
            self._broke = self._broke or "the peer closed the connection"
        except OSError as error:
            # a reset is no end in good order: a body that ends with its connection is incomplete
            self._broke = self._broke or _words(error)
        self._eof = True
        if not self._paused:
            self._hand_over()

    def _hand_over(self) -> None:
        while self._inbox and not self._paused and not self.closed:
            self.owner.received(self._inbox.pop(0))
        if self._inbox or self._paused or self.closed:
            return
        if self._broke is not None:
            self._lose(self._broke)
        else:
            self.owner.ended()

    # -- out

    def send(self, data: bytes) -> bool:
        if self.closed or self._closing:
            return True
        if self._out or self._on_connected is not None:
            self._out.append(data)
            self.pending += len(data)
            return False
        try:
            sent = self._send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._reactor.call_soon(self, self._unsendable, _words(error))
            return False
        if sent == len(data):
            return True
        self._out.append(memoryview(data)[sent:])
        self.pending = len(data) - sent
        self._set_mask(self._mask | OUT)
        return False

    def _flush(self) -> None:
        out = self._out
        while out:
            data = out[0]
            try:
                sent = self._send(data)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                return self._unsendable(_words(error))
            if self._closing and sent and self._last_wait is not None:
                # slow is not stuck
                self._last_wait.set(self._reactor.now + self._flush_seconds)
            self.pending -= sent
            if sent < len(data):
                out[0] = memoryview(data)[sent:]
                return
            out.pop(0)
        self._set_mask(self._mask & ~OUT)
        if self._closing:
            self._finish()
        else:
            self.owner.drained()

    def _unsendable(self, reason: str) -> None:
        """The peer takes nothing more; its last words may be here: an engine that refuses a body does not read it."""
        if self._closing or self._watch_hangup:
            return self._lose(reason)
        self._broke = self._broke or reason
        self._out.clear()
        self.pending = 0
        self._read_to_end()

    # -- pausing and closing

    def pause(self) -> None:
        if not self._paused and not self._closing:
            self._paused = True
            if self._mask & IN:
                self._set_mask(self._mask & ~IN)

    def resume(self) -> None:
        if not self._paused or self.closed or self._closing:
            return
        self._paused = False
        if self._inbox or not self._registered:
            self._reactor.call_soon(self, self._hand_over)
        elif not self._eof and self._on_connected is None:
            self._set_mask(self._mask | IN)

    def close(self, *, linger: bool = False) -> None:
        if self.closed or self._closing:
            return
        self._closing = True
        self._linger_left = LINGER_BYTES if linger else 0
        self._last_wait = Deadline(self._reactor, self, self._wait_no_longer)
        if self._out and self._registered:
            self._last_wait.set(self._reactor.now + self._flush_seconds)
            self._set_mask(OUT)
        else:
            self._finish()

    def _finish(self) -> None:
        if not self._linger_left or self._eof or self._last_wait is None:
            return self._shut()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self._paused = False
        self._last_wait.set(self._reactor.now + LINGER_SECONDS)
        self._set_mask(IN)

    def _wait_no_longer(self) -> None:
        if self.pending:
            self.reset()
        else:
            self._shut()

    def _discard(self, data: bytes) -> None:
        self._linger_left -= len(data)
        if self._linger_left <= 0:
            self._shut()

    def abort(self) -> None:
        self._shut()

    def reset(self) -> None:
        if not self.closed:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._shut()

    def _shut(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._out.clear()
        self._inbox.clear()
        self.pending = 0
        if self._last_wait is not None:
            self._last_wait.end()
            self._last_wait = None
        self.owner = NOBODY
        self._on_connected = None
        self._forget()
        self._reactor.close_later(self._sock)

    def _lose(self, reason: str) -> None:
        if self.closed:
            return
        silent, owner = self._closing, self.owner
        self._shut()
        if not silent:
            owner.lost(reason)


def _nothing() -> None:
    """Nobody wants to know."""


def _name_peer(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError:  # it is gone already; the first read says so
        return ""
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""


def _words(error: OSError) -> str:
    return error.strerror or str(error)


class Tls:
    """TLS over a Plain, by SSLObject and memory BIOs: no state of a half-written record, whatever the socket does.

    It owns the Plain below it and is a Transport for the owner above.
    """

    __slots__ = (
        "_below",
        "_closing",
        "_dead",
        "_handshaking",
        "_incoming",
        "_last_wait",
        "_on_ready",
        "_outgoing",
        "_over",
        "_paused",
        "_reactor",
        "_ssl",
        "_waiting",
        "owner",
        "peer",
    )

    def __init__(
        self,
        reactor: Reactor,
        context: ssl.SSLContext,
        owner: Receiver,
        *,
        server_side: bool = False,
        server_hostname: str | None = None,
        ready: Callable[[], None] | None = None,
    ) -> None:
        """``ready`` is called when the handshake is done. ``attach`` gives it the connection below."""
        self._reactor = reactor
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self.owner = owner
        self.peer = ""
        self._on_ready = ready
        self._below: Transport | None = None
        self._handshaking = True
        self._paused = self._closing = self._over = self._dead = False
        self._waiting: list[bytes] = []
        self._last_wait: Deadline | None = None

    @classmethod
    def adopt(
        cls,
        reactor: Reactor,
        sock: socket.socket,
        spoken: ssl.SSLObject,
        bios: tuple[ssl.MemoryBIO, ssl.MemoryBIO],
        owner: Receiver,
    ) -> Tls:
        """Take over a connection whose handshake was made elsewhere: its non-blocking socket, and the object that spoke
        over ``bios`` (what comes in, what goes out). What they hold already is handed over in a later turn."""
        self = cls.__new__(cls)
        self._reactor = reactor
        self._incoming, self._outgoing = bios
        self._ssl = spoken
        self.owner = owner
        self._on_ready = None
        self._handshaking = self._paused = self._closing = self._over = self._dead = False
        self._waiting = []
        self._last_wait = None
        self._below = Plain(reactor, sock, self)
        self._below.peer = self.peer = _name_peer(sock)
        reactor.call_soon(self, self._pump_again)
        return self

    def attach(self, below: Transport) -> None:
        """Start the handshake over ``below``, whose owner this must be."""
        self._below = below
        self.peer = below.peer
        self._pump()

    @property
    def object(self) -> ssl.SSLObject:
        """For the peer's certificate, the protocol agreed on and the like."""
        return self._ssl

    @property
    def below(self) -> Transport:
        if self._below is None:
            raise RuntimeError("attach() comes first")
        return self._below

    @property
    def pending(self) -> int:
        return self.below.pending + sum(map(len, self._waiting))

    @property
    def closed(self) -> bool:
        return self._dead or self.below.closed

    # -- from below

    def on_crash(self, error: Exception) -> None:
        self.abort()
        self.owner.on_crash(error)

    def received(self, data: bytes) -> None:
        self._incoming.write(data)
        self._pump()

    def ended(self) -> None:
        if self._paused:
            # what was sent before the end is still below
            if not self._closing:
                self.owner.ended()
            return
        self._incoming.write_eof()
        self._pump()

    def lost(self, reason: str) -> None:
        self._die(reason)

    def drained(self) -> None:
        if not self._handshaking and not self._closing:
            self.owner.drained()

    def _pump(self) -> None:
        """Handshake, then decrypt until OpenSSL wants more or the owner wants less."""
        if self._handshaking and not self._shake():
            return
        incoming, spoken, below = self._incoming, self._ssl, self.below
        while not (self._paused or self._over or self._closing or self._dead or below.closed):
            # asking when nothing is there costs an exception, as much as a small read does
            if not incoming.pending and not spoken.pending() and not incoming.eof:
                break
            try:
                data = spoken.read(READ_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError as error:
                # a FIN without close_notify may be a cut made by anybody: only the goodbye is a clean end
                data = b""
                if not isinstance(error, ssl.SSLZeroReturnError):
                    self._flush()
                    return self._fail(error)
            if not data:
                self._over = True
                self._flush()
                return self.owner.ended()
            self.owner.received(data)
        if self._outgoing.pending:
            self._flush()

    def _shake(self) -> bool:
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._flush()
            self._fail(error)
            return False
        self._handshaking = False
        self._flush()
        waiting, self._waiting = self._waiting, []
        if self._on_ready is not None and not self._closing:
            self._on_ready()
        for data in waiting:
            self._encrypt(data)
        if self._closing:
            self._say_goodbye()
        elif waiting and not self.closed and not self.below.pending:
            self.owner.drained()
        return not self.closed

    def _fail(self, error: ssl.SSLError) -> None:
        if not self._dead:
            self.below.close()
            self._die(f"TLS: {error.reason or error}")

    def _die(self, reason: str) -> None:
        if self._dead:
            return
        self._dead = True
        if self._last_wait is not None:
            self._last_wait.drop()
        if not self._closing:
            self.owner.lost(reason)

    def _flush(self) -> bool:
        data = self._outgoing.read()
        return self.below.send(data) if data else not self.below.pending

    # -- from above

    def send(self, data: bytes) -> bool:
        if self._closing or self._dead or not data:
            return True
        if self._handshaking:
            self._waiting.append(data)
            return False
        return self._encrypt(data)

    def _encrypt(self, data: bytes) -> bool:
        if self.closed:
            return True
        try:
            self._ssl.write(data)
        except ssl.SSLError as error:
            self._reactor.call_soon(self, self._fail, error)
            return False
        return self._flush()

    def pause(self) -> None:
        self._paused = True
        self.below.pause()

    def resume(self) -> None:
        self._paused = False
        self.below.resume()
        # what is decrypted already makes no descriptor readable
        self._reactor.call_soon(self, self._pump_again)

    def _pump_again(self) -> None:
        if not self._paused and not self.closed:
            self._pump()

    def close(self, *, linger: bool = False) -> None:
        if self._closing or self._dead:
            return
        self._closing = True
        if not self._handshaking:
            self._say_goodbye()
        elif self._waiting:
            # after the handshake, if that comes to an end
            self._last_wait = Deadline(self._reactor, self, self.abort)
            self._last_wait.set(self._reactor.now + FLUSH_SECONDS)
            if self._paused:
                self.below.resume()
        else:
            self.below.close()

    def _say_goodbye(self) -> None:
        if self._last_wait is not None:
            self._last_wait.drop()
        with contextlib.suppress(ssl.SSLError):
            self._ssl.unwrap()
        self._flush()
        # the peer says goodbye too, and its word on a closed socket would reset ours away
        self.below.close(linger=True)

    def abort(self) -> None:
        self._dead = True
        if self._last_wait is not None:
            self._last_wait.drop()
        if self._below is not None:
            self._below.abort()

    def reset(self) -> None:
        # without its goodbye no end of TLS is in good order
        self.abort()


class Memory:
    """One end of a pair in memory, with a bounded buffer, so that backpressure is real without a socket."""

    __slots__ = (
        "_capacity",
        "_closing",
        "_eof",
        "_inbox",
        "_other",
        "_paused",
        "_reactor",
        "_size",
        "_stopped",
        "closed",
        "owner",
        "peer",
    )

    def __init__(self, reactor: Reactor, owner: Receiver, capacity: int) -> None:
        self._reactor = reactor
        self.owner = owner
        self.peer = "memory"
        self.closed = False
        self._capacity = capacity
        self._other: Memory | None = None
        self._inbox: list[bytes] = []
        self._size = 0
        self._paused = self._eof = self._closing = self._stopped = False

    @property
    def pending(self) -> int:
        """What the other end has not taken beyond its capacity (a socket's own buffer does not count either)."""
        other = self._other
        return max(0, other._size - other._capacity) if other is not None else 0

    def on_crash(self, error: Exception) -> None:
        owner = self.owner
        self.abort()
        owner.on_crash(error)

    def send(self, data: bytes) -> bool:
        other = self._other
        if self.closed or self._closing or other is None or other.closed:
            return True
        other._inbox.append(data)
        other._size += len(data)
        self._reactor.call_soon(other, other._deliver)
        self._stopped = other._size > other._capacity
        return not self._stopped

    def _deliver(self) -> None:
        # a piece at a time, as a socket would be read: what the owner puts on the run-queue comes before the next
        if self._inbox and not self._paused and not self.closed:
            data = self._inbox.pop(0)
            self._size -= len(data)
            self.owner.received(data)
            if self._inbox:
                self._reactor.call_soon(self, self._deliver)
        other = self._other
        if other is not None and other._stopped and self._size <= self._capacity and not other.closed:
            other._stopped = False
            self._reactor.call_soon(other, other._say_drained)
        if self._eof and not self._inbox and not self._paused and not self.closed:
            self._eof = False
            self.owner.ended()

    def _say_drained(self) -> None:
        if not self.closed:
            self.owner.drained()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._reactor.call_soon(self, self._deliver)

    def close(self, *, linger: bool = False) -> None:
        self._closing = True
        self.abort()

    def abort(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.owner = NOBODY
        self._inbox.clear()
        other = self._other
        if other is not None and not other.closed:
            other._eof = True
            self._reactor.call_soon(other, other._notice_end)

    def reset(self) -> None:
        other = self._other
        if self.closed:
            return
        self.closed = True
        self.owner = NOBODY
        self._inbox.clear()
        if other is not None:
            self._reactor.call_soon(other, other._lose)

    def _lose(self) -> None:
        if not self.closed:
            owner, self.owner = self.owner, NOBODY
            self.closed = True
            self._inbox.clear()
            owner.lost("the peer reset the connection")

    def _notice_end(self) -> None:
        if self._paused and not self.closed and self._eof:
            self.owner.ended()
        else:
            self._deliver()


def memory_pair(reactor: Reactor, first: Receiver, second: Receiver, *, capacity: int = 65536) -> tuple[Memory, Memory]:
    """Two connected ends; what one sends the other's owner receives, in a later turn."""
    one, two = Memory(reactor, first, capacity), Memory(reactor, second, capacity)
    one._other, two._other = two, one
    return one, two
