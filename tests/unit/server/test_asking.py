"""Requests of the server's own to engines that listen on real ports, over a trunk of real pieces."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw.core.node import NodeId
from llmgw.core.replica import ShardAddress, ShardId
from llmgw.dialects.toolreplies import Reply
from llmgw.door.http1 import ResponseHead
from llmgw.door.upstream import Pool
from llmgw.link.agent_trunk import AgentTrunk
from llmgw.link.trunk import Trunks
from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import Memory, memory_pair
from llmgw.server.asking import MAX_REPLY_BYTES, ask_engine
from llmgw.server.cluster import dial_by

SHARD = ShardAddress(node=NodeId("n1"), shard=ShardId("shd-m-1-0"), epoch=1)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
Handle = Callable[[trio.SocketStream], Awaitable[None]]


class Engine:
    """Answers each request with the next of its pieces; what it heard, and which connections have ended."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.answers: list[bytes] = []
        self.connections = 0
        self.hangs = self.closes = False
        self.asked = trio.Event()
        self.left = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        buffer = b""
        try:
            while True:
                while b"\r\n\r\n" not in buffer or len(buffer) < _size(buffer):
                    data = await stream.receive_some(65536)
                    if not data:
                        return
                    buffer += data
                head, _, body = buffer.partition(b"\r\n\r\n")
                buffer = b""
                self.heard.append((head.decode(), json.loads(body)))
                self.asked.set()
                for answer in self.answers:
                    await stream.send_all(answer)
                if self.closes:
                    return
                if self.hangs:
                    while await stream.receive_some(65536):
                        pass
                    return
        except trio.BrokenResourceError:
            # a connection that is aborted
            return
        finally:
            self.left.set()
            stream.socket.close()


def _size(buffer: bytes) -> int:
    head, _, _ = buffer.partition(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return len(head) + 4 + int(length.partition(b":")[2])


class World:
    """A server's pool over the trunk of an agent, and the engine of one shard there."""

    def __init__(self, reactor: Reactor, port: int) -> None:
        self.engine = Engine()
        self.opened = trio.Event()
        self.reactor = reactor
        self.ports: dict[tuple[str, int], int] = {(SHARD.shard, 1): port}
        self.trunks = Trunks(reactor, opened=self.opened.set)
        self.pool = Pool(reactor, connect_seconds=60, dialer=dial_by(self.trunks))
        self.agent = AgentTrunk(
            reactor,
            node=SHARD.node,
            session="s",
            find_port=lambda shard, epoch: self.ports.get((shard, epoch), "wrong_epoch"),
            ready=lambda: None,
            goaway=lambda reason: None,
            over=lambda reason: None,
        )

        def hand_over(owner: Any) -> Memory:
            near, far = memory_pair(reactor, owner, self.agent.carrier)
            self.agent.attach(far)
            return near

        self.trunk = self.trunks.admit(SHARD.node, hand_over, refuse=lambda session: None)

    async def ask(self, address: ShardAddress = SHARD, *, seconds: float = 60) -> Reply:
        with trio.fail_after(100):
            return await ask_engine(self.pool, address, "/v1/chat/completions", b'{"model":"m"}', seconds=seconds)


@pytest.fixture
async def world(nursery: trio.Nursery) -> AsyncIterator[World]:
    reactor = Reactor()
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    made = World(reactor, listener.socket.getsockname()[1])
    nursery.start_soon(trio.serve_listeners, made.engine.serve, [listener])
    await nursery.start(reactor.serve)
    await made.opened.wait()
    yield made
    made.pool.close()
    made.agent.abort("the test is over")
    await trio.sleep(0.01)


def whole(body: bytes) -> bytes:
    return b"%bcontent-length: %d\r\n\r\n%b" % (HEAD, len(body), body)


async def test_a_reply_comes_over_the_trunk(world: World) -> None:
    world.engine.answers = [whole(b'{"a": 1}')]
    assert await world.ask() == Reply(status=200, body=b'{"a": 1}')
    ((head, body),) = world.engine.heard
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "content-type: application/json" in head
    assert body == {"model": "m"}


async def test_a_connection_is_used_again(world: World) -> None:
    world.engine.answers = [whole(b"{}")]
    assert [await world.ask() for _ in range(3)] == [Reply(status=200, body=b"{}")] * 3
    assert world.engine.connections == 1


async def test_a_stream_is_read_to_its_end(world: World) -> None:
    world.engine.answers = [
        HEAD + b"transfer-encoding: chunked\r\n\r\n",
        b"6\r\ndata: \r\n",
        b"3\r\n{}\n\r\n",
        b"0\r\n\r\n",
    ]
    assert await world.ask() == Reply(status=200, body=b"data: {}\n")
    world.engine.answers = [HEAD + b"\r\n", b"up to the end"]
    world.engine.closes = True
    assert await world.ask() == Reply(status=200, body=b"up to the end")


async def test_an_error_is_a_reply(world: World) -> None:
    world.engine.answers = [b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}"]
    assert await world.ask() == Reply(status=400, body=b"{}")


async def test_a_node_without_a_trunk_is_named(world: World) -> None:
    elsewhere = ShardAddress(node=NodeId("n2"), shard=SHARD.shard, epoch=1)
    reply = await world.ask(elsewhere)
    assert reply == Reply(problem="no connection to shd-m-1-0 on n2: node n2 has no trunk")


async def test_another_try_of_the_shard_is_not_taken_for_this_one(world: World) -> None:
    reply = await world.ask(ShardAddress(node=SHARD.node, shard=SHARD.shard, epoch=2))
    assert reply == Reply(problem="the node runs another try of this shard")


async def test_an_engine_that_dies_in_the_middle_is_told(world: World) -> None:
    world.engine.answers = [HEAD + b"content-length: 100\r\n\r\n", b'{"a":']
    world.engine.closes = True
    reply = await world.ask()
    assert (reply.status, reply.body) == (200, b'{"a":')
    assert reply.problem is not None
    assert reply.problem.startswith("the engine closed the connection")


async def test_a_trunk_that_is_lost_in_the_middle_is_told(world: World, nursery: trio.Nursery) -> None:
    world.engine.hangs = True

    async def cut() -> None:
        await world.engine.asked.wait()
        world.agent.abort("the cable was pulled")

    nursery.start_soon(cut)
    assert await world.ask() == Reply(problem="the connection to shd-m-1-0 on n1 was lost")


@pytest.mark.parametrize(("begun", "words"), [(False, "did not begin"), (True, "came to no end")])
async def test_an_engine_that_hangs_is_not_waited_for_longer(
    autojump_clock: MockClock, begun: bool, words: str
) -> None:
    reactor = Silent(begun)
    reply = await ask_engine(Pool(reactor, connect_seconds=60), SHARD, "/", b"{}", seconds=120)
    assert reply == Reply(status=200 if begun else 0, problem=f"the answer {words} within 120 s")
    assert trio.current_time() == pytest.approx(120)
    reactor.close()


class Silent(Reactor):
    """Has a request's answer begin at best."""

    def __init__(self, begun: bool) -> None:
        super().__init__()
        self.begun = begun

    def call_soon(self, owner: Any, call: Callable[..., None], *args: Any) -> None:
        if self.begun:
            owner.answered(ResponseHead(200))


async def test_whoever_is_cancelled_stops_the_engine(world: World, nursery: trio.Nursery) -> None:
    world.engine.hangs = True
    with trio.CancelScope() as scope:

        async def cancel() -> None:
            await world.engine.asked.wait()
            scope.cancel()

        nursery.start_soon(cancel)
        await world.ask()
    assert scope.cancelled_caught
    with trio.fail_after(60):
        await world.engine.left.wait()
    assert world.trunk.streams == 0


async def test_whoever_leaves_before_it_began_asks_nobody() -> None:
    reactor, dialled = Reactor(), []
    pool = Pool(reactor, connect_seconds=60, dialer=lambda *address: dialled.append(address))  # type: ignore[arg-type,func-returns-value]
    with trio.CancelScope() as scope:
        scope.cancel()
        await ask_engine(pool, SHARD, "/", b"{}", seconds=60)
    while reactor.turn():
        pass
    assert dialled == []
    reactor.close()


async def test_an_answer_without_an_end_is_cut(world: World) -> None:
    piece = b"%x\r\n%b\r\n" % (1 << 20, b"x" * (1 << 20))
    world.engine.answers = [HEAD + b"transfer-encoding: chunked\r\n\r\n", *[piece] * 64]
    reply = await world.ask()
    assert reply.problem == "the answer can't be used: it is longer than 4 MiB"
    with trio.fail_after(60):
        await world.engine.left.wait()
    world.engine.answers = [whole(b"x" * (MAX_REPLY_BYTES + 1))]
    assert (await world.ask()).problem == reply.problem
    world.engine.answers = [whole(b"x" * MAX_REPLY_BYTES)]
    assert (await world.ask()).problem is None


async def test_a_compressed_answer_is_none(world: World) -> None:
    world.engine.answers = [HEAD + b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\n1234"]
    reply = await world.ask()
    assert (reply.body, reply.problem) == (
        b"",
        "the answer can't be used: it is compressed, which nobody asked for",
    )
    world.engine.answers = [HEAD + b"content-encoding: br\r\ncontent-length: 4\r\n\r\n", b"1", b"234"]
    assert (await world.ask()).body == b""


async def test_a_fault_of_ours_ends_this_request_and_no_other(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "llmgw.reactor")

    def fail(*_: object) -> Any:
        raise RuntimeError("no")

    pool = Pool(world.reactor, connect_seconds=60, dialer=fail)
    reply = await ask_engine(pool, SHARD, "/", b"{}", seconds=60)
    assert reply == Reply(problem="llmgw failed at this: its log says why")
    world.engine.answers = [whole(b"{}")]
    assert (await world.ask()).problem is None
