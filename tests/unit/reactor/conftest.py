"""A reactor whose clock belongs to the test, and owners that remember what they were told."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import Transport


class Clock:
    """Stands still, unless ``step`` says what each look at it costs."""

    now = 1000.0
    step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Ear:
    """The owner of a transport: remembers all it hears. ``on`` may do something at a call."""

    def __init__(self) -> None:
        self.transport: Transport
        self.got = b""
        self.heard: list[str] = []
        self.on: dict[str, Callable[[], object]] = {}

    def _hear(self, word: str) -> None:
        self.heard.append(word)
        action = self.on.get(word.split(":", maxsplit=1)[0])
        if action is not None:
            action()

    def received(self, data: bytes) -> None:
        assert data
        self.got += data
        action = self.on.get("received")
        if action is not None:
            action()

    def ended(self) -> None:
        self._hear("ended")

    def lost(self, reason: str) -> None:
        assert self.transport.closed
        self._hear(f"lost: {reason}")

    def drained(self) -> None:
        self._hear("drained")

    def on_crash(self, error: Exception) -> None:
        self._hear(f"crashed: {error}")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reactor(clock: Clock) -> Iterator[Reactor]:
    reactor = Reactor(clock=clock)
    yield reactor
    reactor.close()


@pytest.fixture
def ear(reactor: Reactor, sockets: object) -> Iterator[Callable[[], Ear]]:
    """Makes owners; what they still hold at the end is closed."""
    made: list[Ear] = []

    def make() -> Ear:
        made.append(Ear())
        return made[-1]

    yield make
    for each in made:
        if hasattr(each, "transport"):
            each.transport.abort()


@pytest.fixture
def sockets() -> Iterator[Callable[..., tuple[socket.socket, socket.socket]]]:
    """Pairs of connected, non-blocking sockets: TCP unless ``unix``. What the test left open is closed."""
    made: list[socket.socket] = []

    def pair(*, unix: bool = False) -> tuple[socket.socket, socket.socket]:
        if unix:
            two = socket.socketpair()
        else:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                # small, so that backpressure sets in soon
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
                one = socket.create_connection(listener.getsockname())
                two = (one, listener.accept()[0])
        for each in two:
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        made.extend(two)
        return two

    yield pair
    for each in made:
        each.close()
