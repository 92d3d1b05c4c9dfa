"""Who may wait at the agents' port before it has proved itself, and who gives way when all places are taken."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
import termios
from collections import Counter
from dataclasses import dataclass, field

import trio

from llmgw.core.node import NodeId

# A handshake costs a millisecond or two, some memory and a descriptor.
PLACES = 256
# How long a place is safe from others. A peer that has said nothing yet is hardly an agent: those speak first. One that
# has spoken may be far away, or busy: a thousand agents come at once when the server is back.
MUTE_SECONDS = 0.5
IDLE_SECONDS = 2.0

# In the kernel's tcp_info: how many bytes have come.
_TCP_INFO_BYTES = 136
_RECEIVED_AT = 128


@dataclass(eq=False, slots=True, kw_only=True)
class Visit:
    """One connection that has not proved itself. ``node``: whose certificate it has shown. ``moved_at``: when it last
    came a step further. ``refused``: it has been told why, and is left a moment to read it."""

    tcp: trio.SocketStream
    peer: tuple[str, int]
    moved_at: float
    node: NodeId | None = None
    evicted: bool = False
    refused: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def origin(self) -> str:
        """What counts as one address: of IPv6 a household has as many as it likes, in one network."""
        try:
            address = ipaddress.ip_address(self.peer[0].partition("%")[0])
        except ValueError:
            return self.peer[0]
        if address.version == 4:
            return str(address)
        return str(ipaddress.ip_network((address, 64), strict=False))

    def may_end(self, now: float) -> bool:
        """Whether it has kept its place for long enough without a word that we have not heard."""
        quiet_seconds = now - self.moved_at
        if quiet_seconds < MUTE_SECONDS:
            return False
        received, unread = _count_bytes(self.tcp.socket)
        return not received or (quiet_seconds >= IDLE_SECONDS and not unread)


class Pending:
    """All visits. Their number is bounded, and whoever comes gets a place soon."""

    def __init__(self, places: int = PLACES) -> None:
        self._places = places
        self._visits: dict[Visit, None] = {}
        self._freed = trio.Event()

    @property
    def is_full(self) -> bool:
        return len(self._visits) >= self._places

    def add(self, visit: Visit) -> None:
        self._visits[visit] = None

    def free(self, visit: Visit) -> None:
        """It has proved itself, or has ended."""
        if visit in self._visits:
            del self._visits[visit]
            self._freed.set()

    def evict(self, now: float) -> Visit | None:
        """End the oldest that may be ended, of the address that has most; None when all deserve their places."""
        counts = Counter(visit.origin for visit in self._visits)
        idle = [visit for visit in self._visits if visit.may_end(now)]
        if not idle:
            return None
        evicted = max(idle, key=lambda visit: counts[visit.origin])
        evicted.evicted = True
        self.free(evicted)
        evicted.scope.cancel()
        return evicted

    async def wait_room(self, seconds: float) -> None:
        """Until a place is free, or for ``seconds``."""
        self._freed = trio.Event()
        with trio.move_on_after(seconds):
            await self._freed.wait()


def _count_bytes(sock: trio.socket.SocketType) -> tuple[int, int]:
    """How many have come from the peer, and how many of them wait to be read. Of a broken connection: none."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        waiting = fcntl.ioctl(sock.fileno(), termios.FIONREAD, struct.pack("i", 0))
    except OSError:
        return 0, 0
    # An older kernel does not count: then nobody is taken for mute.
    received = int.from_bytes(info[_RECEIVED_AT:], sys.byteorder) if len(info) >= _TCP_INFO_BYTES else 1
    return received, struct.unpack("i", waiting)[0]
