"""Who is let in, how many, and how the door closes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
import trio.testing

from llmgw.config.node import Limits, Timeouts
from llmgw.door.listener import REST_SECONDS, TELL_SECONDS, Listener, bind, count_descriptors, fit_limits
from llmgw.door.request import Outcome
from llmgw.errors import UsageError

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    sock = bind("127.0.0.1", 0)
    yield sock
    sock.close()


@pytest.fixture
def dial(listening: socket.socket) -> Iterator[Callable[[], socket.socket]]:
    made: list[socket.socket] = []

    def dial() -> socket.socket:
        made.append(socket.create_connection(listening.getsockname()))
        made[-1].setblocking(False)
        return made[-1]

    yield dial
    for sock in made:
        sock.close()


def answer_of(world: Any, sock: socket.socket) -> bytes:
    """What comes on a socket, to its end or to the end of a short reply."""
    got, deadline = b"", time.monotonic() + 10
    while time.monotonic() < deadline:
        world.turn()
        try:
            data = sock.recv(65536)
        except BlockingIOError:
            if got:
                return got
            continue
        if not data:
            return got
        got += data
    raise AssertionError("no answer")


def test_a_client_of_a_socket_is_served(world: Any, listening: socket.socket, dial: Any) -> None:
    listener = Listener(world.reactor, listening, world.door)
    assert listener.address == listening.getsockname()
    client = dial()
    client.send(HEALTH)
    assert answer_of(world, client).startswith(b"HTTP/1.1 200 OK\r\n")
    assert world.last.peer == "127.0.0.1"
    listener.close()
    world.door.close()
    world.turn()
    assert client.recv(1) == b""


def test_one_too_many_is_told_so(make_world: Any, listening: socket.socket, dial: Any) -> None:
    world = make_world(limits=Limits(max_connections=1))
    listener = Listener(world.reactor, listening, world.door)
    first = dial()
    first.send(HEALTH)
    assert answer_of(world, first).startswith(b"HTTP/1.1 200")
    (answer,) = world.answers(answer_of(world, dial()))
    assert (answer.status, answer.error) == (503, "too_many_connections")
    assert answer.headers["retry-after"] == "2"
    assert len(world.door.clients) == 1
    first.close()
    deadline = time.monotonic() + 10
    while world.door.clients and time.monotonic() < deadline:
        world.turn()
    third = dial()
    third.send(HEALTH)
    assert answer_of(world, third).startswith(b"HTTP/1.1 200")
    listener.close()
    world.door.close()
    world.turn()


def test_where_few_connections_are_taken_few_more_are_held(
    make_world: Any, listening: socket.socket, dial: Any
) -> None:
    """Those that are told why have descriptors too: the oldest makes way."""
    world = make_world(limits=Limits(max_connections=1))
    listener = Listener(world.reactor, listening, world.door)
    before = count_descriptors()
    made = [dial() for _ in range(30)]
    deadline = time.monotonic() + 10
    while len(world.door.clients) < 1 and time.monotonic() < deadline:
        world.turn()
    for _ in range(20):
        world.turn()
    assert count_descriptors() <= before + len(made) + 1 + 4
    told = 0
    for sock in made[1:]:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            told += b"too_many_connections" in sock.recv(65536)
    assert told == 29
    listener.close()
    world.door.close()
    world.turn()


def test_without_descriptors_accepting_rests_and_goes_on(
    world: Any, listening: socket.socket, dial: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Poor:
        """A listening socket that fails while ``error`` is set."""

        error: OSError | None = None
        tries = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(listening, name)

        def accept(self) -> Any:
            self.tries += 1
            if self.error is not None:
                raise self.error
            return listening.accept()

    poor = Poor()
    listener = Listener(world.reactor, poor, world.door)  # type: ignore[arg-type]
    for number in (errno.EMFILE, errno.ENETDOWN):
        poor.error, poor.tries = OSError(number, "no"), 0
        client = dial()
        deadline = time.monotonic() + 10
        while not poor.tries and time.monotonic() < deadline:
            world.turn()
        for _ in range(20):
            world.turn()
        assert poor.tries == 1
        poor.error = None
        world.wait(REST_SECONDS + 1)
        client.send(HEALTH)
        assert answer_of(world, client).startswith(b"HTTP/1.1 200")
        assert caplog.text.count("can't accept clients") == 1
        caplog.clear()
        world.wait(TELL_SECONDS)
    listener.close()
    listener.close()
    world.door.close()
    world.turn()


def test_without_descriptors_for_long_that_is_told_once_a_minute(
    world: Any, listening: socket.socket, dial: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Poor:
        def __getattr__(self, name: str) -> Any:
            return getattr(listening, name)

        def accept(self) -> Any:
            raise OSError(errno.EMFILE, "no")

    listener = Listener(world.reactor, Poor(), world.door)  # type: ignore[arg-type]
    dial()
    world.wait(TELL_SECONDS * 2.5)
    assert caplog.text.count("can't accept clients") == 3
    listener.close()
    world.turn()


@pytest.mark.parametrize(
    ("have", "used", "fits"), [(64, 20, 8), (16, 20, 1), (1024, 20, 458), (100_000, 20, 4096), (-1, 20, 4096)]
)
def test_there_are_no_more_clients_than_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, have: int, used: int, fits: int
) -> None:
    """Each client may need one more, for its engine."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (have, have))
    assert fit_limits(Limits(), used) == Limits(max_connections=fits)
    assert ("max_connections" in caplog.text) is (fits < 4096)


def test_what_the_log_asks_for_is_enough(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    fit_limits(Limits(), 20)
    enough = int(caplog.text.split("(ulimit -n) to ")[1].split()[0])
    monkeypatch.setattr(resource, "getrlimit", lambda which: (enough, enough))
    assert fit_limits(Limits(), 20) == Limits()


def test_open_descriptors_are_counted(listening: socket.socket) -> None:
    before = count_descriptors()
    with socket.socket():
        assert count_descriptors() == before + 1


# What no socket's buffers hold.
MANY_MODELS = 60_000


@pytest.mark.slow
def test_a_last_reply_is_waited_for_as_long_as_any_other(make_world: Any, listening: socket.socket, dial: Any) -> None:
    world = make_world(timeouts=Timeouts(idle=120))
    many = world.gateway.models() * MANY_MODELS
    world.gateway.models = lambda: many
    listener = Listener(world.reactor, listening, world.door)
    client = dial()
    client.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    deadline = time.monotonic() + 30
    while not world.gateway.settled and time.monotonic() < deadline:
        world.turn()
    world.wait(110)
    got = bytearray()
    while time.monotonic() < deadline:
        world.turn()
        with contextlib.suppress(BlockingIOError):
            data = client.recv(1_000_000)
            if not data:
                break
            got += data
    listener.close()
    world.wait(3)
    (answer,) = world.answers(bytes(got))
    assert answer.complete


def read_to_end(sock: socket.socket) -> None:
    while sock.recv(1_000_000):
        pass


@pytest.mark.slow
def test_the_end_of_the_program_is_not_the_end_of_a_reply_that_is_not_out(
    make_world: Any, listening: socket.socket, dial: Any
) -> None:
    world = make_world()
    many = world.gateway.models() * MANY_MODELS
    world.gateway.models = lambda: many
    listener = Listener(world.reactor, listening, world.door)
    client = dial()
    client.send(b"GET /v1/models HTTP/1.0\r\n\r\n")
    deadline = time.monotonic() + 30
    while not world.gateway.settled and time.monotonic() < deadline:
        world.turn()
    listener.close()
    world.door.close()
    world.turn()
    world.door.reset_unsent()
    world.turn()
    client.setblocking(True)
    client.settimeout(30)
    with pytest.raises(ConnectionResetError):
        read_to_end(client)


def test_an_address_that_is_taken_is_said_with_a_way_out(listening: socket.socket) -> None:
    with pytest.raises(UsageError, match="--port"):
        bind("127.0.0.1", listening.getsockname()[1])
    with pytest.raises(UsageError, match="check the address"):
        bind("203.0.113.7", 1)


def test_request_ids_differ(world: Any) -> None:
    ids = {world.door.next_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(each.startswith("req-") for each in ids)


# -- draining


class Draining:
    """``door.drain()`` beside a reactor that is turned by hand."""

    def __init__(self, nursery: trio.Nursery, world: Any) -> None:
        self.done = trio.Event()
        self.world = world
        nursery.start_soon(self._drain)

    async def _drain(self) -> None:
        await self.world.door.drain()
        self.done.set()

    async def step(self) -> None:
        await trio.testing.wait_all_tasks_blocked()
        self.world.turn()
        await trio.testing.wait_all_tasks_blocked()


async def test_an_empty_door_is_drained_at_once(world: Any) -> None:
    with trio.fail_after(10):
        await world.door.drain()


async def test_running_requests_end_and_idle_connections_go(world: Any, nursery: trio.Nursery) -> None:
    idle, busy = world.connect(), world.ask()
    draining = Draining(nursery, world)
    await draining.step()
    assert idle.over
    assert not busy.over
    assert not draining.done.is_set()
    world.whole(b"{}")
    (answer,) = world.answers(busy.got)
    assert answer.headers["connection"] == "close"
    assert busy.over
    with trio.fail_after(10):
        await draining.done.wait()


async def test_a_request_that_has_just_come_is_served_before_the_door_closes(world: Any, nursery: trio.Nursery) -> None:
    far = world.connect()
    far.say(HEALTH)
    # read, and not yet begun
    far.transport._other._deliver()
    draining = Draining(nursery, world)
    await draining.step()
    (answer,) = world.answers(far.got)
    assert answer.headers["connection"] == "close"
    with trio.fail_after(10):
        await draining.done.wait()


async def test_a_request_behind_a_running_one_is_not_begun_while_draining(world: Any, nursery: trio.Nursery) -> None:
    far = world.connect()
    far.say(world.chat() + HEALTH)
    world.turn()
    draining = Draining(nursery, world)
    await draining.step()
    world.whole(b"{}")
    assert len(world.answers(far.got)) == 1
    with trio.fail_after(10):
        await draining.done.wait()


async def test_a_reply_that_is_not_out_yet_is_waited_for(
    make_world: Any, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """The exchange is over, and most of its reply still waits here for a client that reads slowly."""

    class Slow:
        pending = 5
        closed = False

    world = make_world()
    far = world.ask()
    (client,) = world.door.clients
    draining = Draining(nursery, world)
    await draining.step()
    slow = Slow()
    world.door.clients.discard(client)
    client.transport, real = slow, client.transport
    world.door.forget(client)
    await trio.sleep(5)
    assert not draining.done.is_set()
    slow.pending = 0
    with trio.fail_after(10):
        await draining.done.wait()
    client.transport = real
    far.transport.close()
    world.turn()


class Reader(threading.Thread):
    """A client that begins to read when it is told to, and reads to the end."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(daemon=True)
        self.sock = sock
        self.got = b""

    def run(self) -> None:
        self.sock.settimeout(60)
        while data := self.sock.recv(65536):
            self.got += data


@pytest.mark.parametrize("phase", ["answered", "stream"])
async def test_the_last_words_get_out_to_who_reads_late(make_world: Any, phase: str) -> None:
    """More than a socket holds: closing must lose none of a whole answer, nor the event that says why a stream ends."""
    world = make_world()
    near, far = socket.socketpair()
    near.setblocking(False)
    world.door.admit(near, "10.0.0.1")
    (client,) = world.door.clients
    event = b"data: " + b"x" * 30_000 + b"\n\n"
    text = b'"' + b"x" * 2_000_000 + b'"'
    far.send(world.chat(stream=phase == "stream"))
    while not world.engines:
        world.turn()
    world.turn()
    if phase == "answered":
        world.whole(text)
    else:
        world.opens()
        while not client.transport.pending:
            world.sends(event)
    assert client.transport.pending
    reader = Reader(far)
    world.door.close()
    assert world.door.clients == set()
    reader.start()
    waited = trio.Event()

    async def wait_sent() -> None:
        await world.door.wait_sent()
        waited.set()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_sent)
            await trio.testing.wait_all_tasks_blocked()
            assert not waited.is_set()
            while not waited.is_set():
                world.turn()
                await trio.sleep(0.001)
        while reader.is_alive():
            world.turn()
            await trio.sleep(0.001)
    far.close()
    world.turn()
    world.wait(2)
    (answer,) = world.answers(reader.got)
    assert answer.complete
    (request,) = world.gateway.settled
    if phase == "answered":
        assert (answer.body, request.outcome) == (text, Outcome.DONE)
    else:
        assert b'"stopping"' in answer.body.rpartition(b"data: ")[2]
        assert request.outcome is Outcome.STOPPED


async def test_last_words_that_nobody_reads_are_waited_for_no_longer_than_their_caller_likes(
    make_world: Any, nursery: trio.Nursery
) -> None:
    world = make_world()
    near, far = socket.socketpair()
    near.setblocking(False)
    world.door.admit(near, "10.0.0.1")
    far.send(world.chat())
    while not world.engines:
        world.turn()
    world.turn()
    world.whole(b'"' + b"x" * 2_000_000 + b'"')
    world.door.close()
    with trio.move_on_after(0.1) as patience:
        await world.door.wait_sent()
    assert patience.cancelled_caught
    world.door.hurry()
    with trio.fail_after(10):
        await world.door.wait_sent()
    far.close()
    world.wait(30)


async def test_who_hurries_waits_for_nothing_and_closing_ends_what_is_left(
    make_world: Any, nursery: trio.Nursery
) -> None:
    world = make_world(timeouts=Timeouts())
    far = world.ask(stream=True)
    world.opens()
    draining = Draining(nursery, world)
    await draining.step()
    world.door.hurry()
    with trio.fail_after(10):
        await draining.done.wait()
    world.door.close()
    world.turn()
    assert world.error_at_end(far) == "stopping"
    assert far.over
    assert world.engine.over
    assert [request.outcome for request in world.gateway.settled] == [Outcome.STOPPED]
    assert world.door.clients == set()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_port_that_is_kept_for_root_is_said_with_a_way_out() -> None:
    program = (
        "import os, sys\nfrom llmgw.door.listener import bind\nfrom llmgw.errors import UsageError\nos.setuid(54321)\n"
        "try:\n    bind('127.0.0.1', 1)\nexcept UsageError as error:\n    print(error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    if not done.stdout:
        pytest.skip("this machine keeps no ports for root")
    said = (
        "can't listen on 127.0.0.1:1: Permission denied; ports this low are kept for root; choose another with --port"
    )
    assert done.stdout.strip() == said
