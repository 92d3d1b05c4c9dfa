"""Ports for engines: picked from a range, and never given to two at once."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

from llmgw.errors import EngineFailed

HOST = "127.0.0.1"
LISTEN = "0A"


def is_free(port: int) -> bool:
    """Whether an engine could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        # As engines do: connections of the one before, still in their last minute, don't keep the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
        except OSError:
            return False
    return True


def is_taken(address: str) -> bool:
    """Whether it is certain that nobody could listen at ``host:port`` now, because another program does.

    What can't be tried is not certain: a machine need not have the address that it is reached at.
    """
    host, _, port = address.rpartition(":")
    try:
        # No names: one may take minutes to look up.
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=numeric)
        with socket.socket(*found[0][:3]) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(found[0][4])
    except ValueError:
        return False
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


class Ports:
    """The range, and which of it is given out; ``is_free`` tells whether nobody else listens on one."""

    __slots__ = ("_first", "_given", "_is_free", "_last", "_next")

    def __init__(self, first: int, last: int, is_free: Callable[[int], bool] = is_free) -> None:
        self._is_free = is_free
        self._first = first
        self._last = last
        self._next = first
        self._given: set[int] = set()

    def take(self) -> int:
        """A port that nobody holds. Goes round the range, so that one just given back is not the next one given."""
        size = self._last - self._first + 1
        for step in range(size):
            port = self._first + (self._next - self._first + step) % size
            if port not in self._given and self._is_free(port):
                self._given.add(port)
                self._next = port + 1
                return port
        raise EngineFailed(
            f"no free port for an engine between {self._first} and {self._last}: "
            "stop what listens there, or give engine_ports another range"
        )

    def hold(self, port: int) -> None:
        """Count a port as given: an engine that was found running has it."""
        self._given.add(port)

    def give_back(self, port: int) -> None:
        """The engine that had it is seen gone."""
        self._given.discard(port)


def is_foreign(port: int, tree: set[int], proc: Path = Path("/proc")) -> bool:
    """Whether it is certain that a process other than these listens on the port. Blocks.

    Two programs may take the same port at the same moment; the engine that lost the race is then answered for by the
    winner, and its replica would be called ready with another model behind it.
    """
    listeners = _find_listeners(port, proc)
    if not listeners or not tree:
        return bool(listeners)
    readable = False
    for pid in tree:
        try:
            names = os.listdir(proc / str(pid) / "fd")
        except OSError:
            continue
        readable = True
        for name in names:
            try:
                target = os.readlink(proc / str(pid) / "fd" / name)
            except OSError:
                continue
            if target in listeners:
                return False
    return readable


def _find_listeners(port: int, proc: Path) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "self" / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found
