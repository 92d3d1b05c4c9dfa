"""A door without sockets: the client's and the engine's ends are in memory, and the tests own the clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import h11
import pytest

from llmgw.config.node import Limits, Timeouts
from llmgw.core.identity import ANYONE, Caller
from llmgw.core.model import Lora, Model, ModelName, Task
from llmgw.dialects.refusal import Refusal
from llmgw.door.client import Client
from llmgw.door.exchange import Route
from llmgw.door.listener import Door
from llmgw.door.origin import Origins
from llmgw.door.request import Request
from llmgw.door.upstream import Pool, Upstream
from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import Address, Memory, memory_pair

MODEL = Model(
    name=ModelName("tiny"),
    source="tiny.gguf",
    aliases=("gpt",),
    loras=(Lora(name=ModelName("sql"), source="sql.gguf"),),
)


VECTORS = Model(name=ModelName("vectors"), source="vectors.gguf", task=Task.EMBED)
RANKS = Model(name=ModelName("ranks"), source="ranks.gguf", task=Task.RERANK)


@dataclass
class FakeGateway:
    """What an exchange may ask, answered from lists; it remembers what it was told."""

    routes: list[Route] = field(default_factory=lambda: [Route("rep-1", ("10.0.0.9", 1), "tiny")])
    ready_after_wait: bool = False
    pages_at: str | None = None
    settled: list[Request] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    ejected: list[tuple[str, str]] = field(default_factory=list)
    on_settle: Callable[[Request], None] = lambda request: None

    def identify(self, headers: Mapping[bytes, bytes]) -> Caller | Refusal:
        if headers.get(b"authorization") == b"Bearer wrong":
            return Refusal(status=401, code="invalid_api_key", message="No.")
        return ANYONE

    def resolve(self, name: str) -> Model | None:
        return next((model for model in (MODEL, VECTORS, RANKS) if name in model.names()), None)

    def models(self) -> list[Model]:
        return [MODEL]

    def created(self) -> int:
        return 17

    def choose(self, model: Model, without: Container[str]) -> Route | None:
        for route in self.routes:
            if route.replica not in without:
                self.taken.append(route.replica)
                return route
        return None

    def release(self, route: Route, *, answered: bool) -> None:
        self.released.append(route.replica)

    def eject(self, route: Route, reason: str) -> None:
        self.ejected.append((route.replica, reason))

    async def wait_ready(self, model: Model) -> bool:
        return self.ready_after_wait

    def absent(self, model: Model) -> Refusal:
        return Refusal(status=503, code="model_loading", message="It is loading.", retry_after=7)

    def pages(self) -> Address | None:
        return self.pages_at

    def settle(self, request: Request) -> None:
        self.settled.append(request)
        self.on_settle(request)


class Far:
    """The far end of a connection: a client's, or an engine's."""

    def __init__(self) -> None:
        self.transport: Memory
        self.got = b""
        self.over = False
        self.reset = False

    def received(self, data: bytes) -> None:
        self.got += data

    def ended(self) -> None:
        self.over = True

    def lost(self, reason: str) -> None:
        self.over = self.reset = True

    def drained(self) -> None:
        pass

    def on_crash(self, error: Exception) -> None:
        raise error

    def say(self, data: bytes) -> None:
        self.transport.send(data)

    def take(self) -> bytes:
        got, self.got = self.got, b""
        return got


@dataclass
class Answer:
    """One reply as a client reads it; ``complete`` as its framing says."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """A door, its clock, and whoever is connected to it."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        timeouts: Timeouts | None = None,
        spawn: Callable[..., object] | None = None,
        capacity: int = 65536,
        cors_origins: tuple[str, ...] = (),
    ) -> None:
        self.clock = Clock()
        self.reactor = Reactor(clock=self.clock)
        self.gateway = FakeGateway()
        self.capacity = capacity
        self.engines: list[Far] = []
        self.dialled: list[Address] = []
        # what dialling comes to, by address: an OSError to raise, "hang", "mute" (it stands, and reads
        # nothing), or a reason to lose it
        self.dialling: dict[Address, OSError | str] = {}
        self.timeouts = timeouts or Timeouts()
        self.pool = Pool(self.reactor, connect_seconds=self.timeouts.connect, dialer=self.dial)
        self.door = Door(
            self.reactor,
            self.gateway,
            spawn=spawn,
            origins=Origins("127.0.0.1", cors_origins),
            limits=limits or Limits(),
            timeouts=self.timeouts,
            pool=self.pool,
        )

    def dial(self, reactor: Reactor, address: Address, owner: Upstream) -> Memory:
        self.dialled.append(address)
        fate = self.dialling.get(address)
        if isinstance(fate, OSError):
            raise fate
        engine = Far()
        near, engine.transport = memory_pair(reactor, owner, engine, capacity=self.capacity)
        if fate == "mute":
            engine.transport.pause()
        if fate in (None, "mute"):
            reactor.call_soon(owner, owner.connected)
        elif fate != "hang":
            near.closed = True
            reactor.call_soon(owner, owner.lost, fate)
        self.engines.append(engine)
        return near

    def connect(self, peer: str = "10.1.1.1") -> Far:
        client, far = Client(self.door, peer), Far()
        client.transport, far.transport = memory_pair(self.reactor, client, far, capacity=self.capacity)
        self.door.clients.add(client)
        return far

    @property
    def engine(self) -> Far:
        return self.engines[-1]

    @property
    def last(self) -> Request:
        return self.gateway.settled[-1]

    def turn(self) -> None:
        while self.reactor.turn():
            pass

    def wait(self, seconds: float) -> None:
        """Let time pass, a second at a time, as the reactor would see it."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + 1.0)
            self.turn()

    # -- what clients and engines say

    def ask(self, *, connection: Far | None = None, path: str = "/v1/chat/completions", **fields: object) -> Far:
        """A chat request, sent and read."""
        far = connection or self.connect()
        far.say(self.chat(path=path, **fields))
        self.turn()
        return far

    @staticmethod
    def chat(*, path: str = "/v1/chat/completions", version: str = "1.1", **fields: object) -> bytes:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return World.post(json.dumps(body).encode(), path=path, version=version)

    @staticmethod
    def post(body: bytes, *, path: str = "/v1/chat/completions", version: str = "1.1", extra: str = "") -> bytes:
        return (
            f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{extra}\r\n"
        ).encode() + body

    def whole(self, body: bytes = b'{"id":"x"}', *, status: int = 200, extra: str = "") -> None:
        """The engine's whole reply."""
        head = f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        self.engine.say(head.encode() + body)
        self.turn()

    def opens(self) -> None:
        """The engine's stream begins."""
        self.engine.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.turn()

    def sends(self, data: bytes, *, ends: bool = False) -> None:
        """A chunk of the engine's stream."""
        self.engine.say(b"%x\r\n%b\r\n" % (len(data), data) + (b"0\r\n\r\n" if ends else b""))
        self.turn()

    def body_of(self, far: Any) -> bytes:
        """The body of the one answer that came."""
        (answer,) = self.answers(bytes(far.got))
        return bytes(answer.body)

    def error_at_end(self, far: Any) -> str:
        """The code of the error event that a stream ended with, in good order."""
        (answer,) = self.answers(bytes(far.got))
        assert answer.complete
        last = answer.body.rstrip(b"\n").rpartition(b"\n")[2]
        return str(json.loads(last.removeprefix(b"data: "))["error"]["code"])

    @staticmethod
    def answers(data: bytes, *, method: str = "POST") -> list[Answer]:
        """The replies in these bytes, read by somebody else's parser."""
        return read_answers(data, method)


def read_answers(data: bytes, method: str) -> list[Answer]:
    found: list[Answer] = []
    reader = h11.Connection(h11.CLIENT)
    rest = data
    while rest:
        reader = h11.Connection(h11.CLIENT)
        reader.send(h11.Request(method=method, target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
        reader.send(h11.EndOfMessage())
        reader.receive_data(rest)
        answer = None
        while True:
            event = reader.next_event()
            if isinstance(event, h11.Response):
                headers = {name.decode(): value.decode() for name, value in event.headers}
                answer = Answer(event.status_code, headers, b"", complete=False)
                found.append(answer)
            elif isinstance(event, h11.Data):
                assert answer is not None
                answer.body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert answer is not None
                answer.complete = True
                break
            elif event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                break
        rest = reader.trailing_data[0] if answer is not None and answer.complete else b""
    return found


@pytest.fixture
def make_world() -> Callable[..., World]:
    worlds: list[World] = []

    def make(**given: object) -> World:
        worlds.append(World(**given))
        return worlds[-1]

    yield make
    for world in worlds:
        world.reactor.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()
