"""What is answered over a connection that stands, whose other end is one node or asks for many. (The answers themselves
are those of test_seed.py.)"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from trio.testing import memory_stream_pair

from llmgw.core.node import NodeId
from llmgw.core.weights import FileListed
from llmgw.host.weights.giver import Giver

KEY, COMMIT = "0123456789abcdef" * 2, "c" * 40


class Shelf:
    files = (FileListed(name="m.gguf", size_bytes=3),)
    log = ((0, 0, "0" * 64),)
    order, whole = "whole", True

    def read(self, file: int, piece: int) -> bytes:
        return b"abc"


class Peer:
    """The other end; ``busy`` is what is told of this one."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.busy: list[bool] = []

    async def ask(self, *headers: str, path: str = "/0/0") -> bytes:
        head = "\r\n".join([f"GET /llmgw/weights/{KEY}/{COMMIT}{path} HTTP/1.1", "host: x", *headers, "", ""])
        await self.stream.send_all(head.encode())
        said = b""
        while not said.endswith((b"abc", b"fetch this\n")):
            said += await self.stream.receive_some()
        return said.split()[1]


@asynccontextmanager
async def talking(node: str | None) -> AsyncIterator[Peer]:
    giver = Giver(lambda key, commit: Shelf(), lambda node, key: node == "gpu-2")
    ours, theirs = memory_stream_pair()
    peer = Peer(theirs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(giver.talk, ours, None if node is None else NodeId(node), peer.busy.append)
        with trio.fail_after(60):
            yield peer
            await theirs.aclose()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["x-llmgw-node: gpu-2"], b"200"),
        (["x-llmgw-node: gpu-3"], b"403"),
        ([], b"403"),
        (["x-llmgw-node: gpu-2", "x-llmgw-node: gpu-2"], b"403"),
    ],
)
async def test_the_server_says_for_whom_it_asks(headers: list[str], status: bytes) -> None:
    async with talking(None) as peer:
        assert await peer.ask(*headers) == status


async def test_a_node_asks_for_itself_whatever_it_says() -> None:
    async with talking("gpu-3") as peer:
        assert await peer.ask("x-llmgw-node: gpu-2") == b"403"
    async with talking("gpu-2") as peer:
        assert await peer.ask("x-llmgw-node: gpu-3") == b"200"


async def test_who_is_named_no_more_while_it_waits_for_news_is_told_none(
    autojump_clock: trio.testing.MockClock,
) -> None:
    named = {NodeId("gpu-2")}
    giver = Giver(lambda key, commit: Shelf(), lambda node, key: node in named)
    ours, theirs = memory_stream_pair()
    answers: list[bytes] = []

    async def ask() -> None:
        answers.append(await Peer(theirs).ask(path="?after=1&log=whole&wait=5"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(giver.talk, ours, NodeId("gpu-2"))
        nursery.start_soon(ask)
        await trio.sleep(1)
        assert answers == []
        named.clear()
        await trio.sleep(10)
        assert answers == [b"403"]
        nursery.cancel_scope.cancel()


async def test_it_is_told_while_a_request_is_answered() -> None:
    async with talking("gpu-2") as peer:
        assert peer.busy == []
        await peer.ask()
        await trio.testing.wait_all_tasks_blocked()
        assert peer.busy == [True, False]
