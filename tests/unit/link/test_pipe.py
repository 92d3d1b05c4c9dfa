"""Reading a TLS connection that much comes over, over real sockets."""

from __future__ import annotations

import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from llmgw.link.pipe import CHUNK_BYTES, Pipe
from llmgw.link.tls import client_contexts, server_context

CONTENT = random.Random(3).randbytes(3_000_000)
Stream = trio.SSLStream[trio.SocketStream]


@asynccontextmanager
async def pair(authority: Any) -> AsyncIterator[tuple[Pipe, Stream]]:
    """Our end, and the other one."""
    contexts = client_contexts(authority.issue("n1"))
    server = server_context(authority.issue("head", hosts=("localhost",)), relays=True)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    tcp = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
    theirs = trio.SSLStream(tcp, contexts.give, server_hostname="localhost", https_compatible=True)
    accepted = await listener.accept()
    ours = trio.SSLStream(accepted, server, server_side=True, https_compatible=True)
    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(theirs.do_handshake)
        await ours.do_handshake()
    with trio.fail_after(60):
        try:
            yield Pipe(ours), theirs
        finally:
            tcp.socket.close()
            accepted.socket.close()


async def test_all_comes_in_order_and_never_more_than_a_chunk_at_a_time(authority: Any) -> None:
    async with pair(authority) as (pipe, peer), trio.open_nursery() as nursery:
        nursery.start_soon(peer.send_all, CONTENT)
        got, most = b"", 0
        while len(got) < len(CONTENT):
            await pipe.wait_ready()
            data = pipe.read()
            if data is not None:
                got += data
                most = max(most, len(data))
        assert got == CONTENT
        # several records are had at once
        assert 16384 < most <= CHUNK_BYTES
        assert pipe.read() is None


async def test_what_is_sent_arrives(authority: Any) -> None:
    async with pair(authority) as (pipe, peer):
        await pipe.wait_send_all_might_not_block()
        await pipe.send_all(b"hello")
        assert await peer.receive_some() == b"hello"


async def test_few_bytes_may_be_asked_for(authority: Any) -> None:
    async with pair(authority) as (pipe, peer):
        await peer.send_all(b"abcdef")
        assert [await pipe.receive_some(4), await pipe.receive_some(4)] == [b"abcd", b"ef"]


@pytest.mark.parametrize("goodbye", [b"", b"by TLS"])
async def test_the_end_is_told_and_told_again(authority: Any, goodbye: bytes) -> None:
    async with pair(authority) as (pipe, peer):
        await peer.send_all(b"last")
        if goodbye:
            spoken = peer.getpeercert.__self__
            with pytest.raises(ssl.SSLWantReadError):
                spoken.unwrap()
            _, outgoing = vars(spoken)["bios"]
            await peer.transport_stream.send_all(outgoing.read())
        await peer.transport_stream.send_eof()
        assert await pipe.receive_some() == b"last"
        assert [await pipe.receive_some(), await pipe.receive_some()] == [b"", b""]


async def test_what_is_no_tls_breaks_it(authority: Any) -> None:
    async with pair(authority) as (pipe, peer):
        await peer.transport_stream.send_all(b"\x17\x03\x03\x00\x20" + b"x" * 32)
        with pytest.raises(trio.BrokenResourceError):
            await pipe.receive_some()


async def test_whoever_waits_for_it_is_told_when_it_is_closed(authority: Any) -> None:
    ended: list[str] = []

    async def wait() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await pipe.wait_ready()
        ended.append("told")

    async with pair(authority) as (pipe, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            pipe.close()
        assert ended == ["told"]
        # never the connection that has its number by then
        for again in (pipe.wait_ready, pipe.receive_some):
            with pytest.raises(trio.ClosedResourceError):
                await again()
        with pytest.raises(trio.ClosedResourceError):
            pipe.read()
        await pipe.aclose()
