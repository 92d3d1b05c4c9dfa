"""TLS on the agents' port: who gets in, certificates that change, and connections that move into the reactor."""

from __future__ import annotations

import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from llmgw.link.tls import (
    CONTROL_ALPN,
    TRUNK_ALPN,
    QuietTls,
    client_contexts,
    hand_over,
    server_context,
)
from llmgw.reactor.credentials import Credentials
from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import Tls

Stream = trio.SSLStream[trio.SocketStream]


async def shake(server: ssl.SSLContext, client: ssl.SSLContext, *, host: str = "server.test") -> tuple[Stream, Stream]:
    """Both ends of a connection over loopback, the handshake done. Raises what the first end raises."""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    async with listener:
        near = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        far = await listener.accept()
    ends = (
        trio.SSLStream(far, server, server_side=True, https_compatible=True),
        trio.SSLStream(near, client, server_hostname=host, https_compatible=True),
    )
    try:
        async with trio.open_nursery() as nursery:
            for end in ends:
                nursery.start_soon(end.do_handshake)
    except BaseException:
        for end in (far, near):
            await trio.aclose_forcefully(end)
        raise
    return ends


async def close(*streams: Stream) -> None:
    for stream in streams:
        await trio.aclose_forcefully(stream)


async def test_both_ends_are_proved_and_agree_on_the_newest_tls(authority: Any) -> None:
    server = server_context(authority.issue("server", hosts=("server.test", "127.0.0.1")))
    client = client_contexts(authority.issue("gpu-1"))
    for context, alpn in ((client.control, CONTROL_ALPN), (client.trunk, TRUNK_ALPN)):
        far, near = await shake(server, context)
        assert far.version() == near.version() == "TLSv1.3"
        assert far.selected_alpn_protocol() == near.selected_alpn_protocol() == alpn
        assert far.getpeercert()["subject"] == ((("commonName", "gpu-1"),),)
        await close(far, near)


async def test_a_server_is_believed_by_its_alternative_names_only(authority: Any) -> None:
    client = client_contexts(authority.issue("gpu-1"))
    by_address = server_context(authority.issue("x", hosts=("127.0.0.1",)))
    await close(*await shake(by_address, client.control, host="127.0.0.1"))
    by_name_only = server_context(authority.issue("server.test"))
    with pytest.raises(BaseExceptionGroup) as caught:
        await shake(by_name_only, client.control)
    assert "Hostname mismatch" in str([error.__cause__ for error in caught.value.exceptions])
    await close(*await shake(by_name_only, client.look))


async def test_older_tls_is_refused(authority: Any) -> None:
    server = server_context(authority.issue("server", hosts=("server.test",)))
    files = authority.issue("gpu-1")
    old = ssl.create_default_context(cafile=files.ca)
    old.load_cert_chain(files.cert, files.key)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(BaseExceptionGroup):
        await shake(server, old)


@pytest.mark.parametrize("wrong", ["other authority", "expired", "not yet valid", "not for clients", "none"])
async def test_a_node_without_a_right_certificate_is_not_heard(authority: Any, make_authority: Any, wrong: str) -> None:
    server = server_context(authority.issue("server", hosts=("server.test",)))
    files = {
        "other authority": lambda: replace(make_authority("other").issue("gpu-1"), ca=authority.ca),
        "expired": lambda: authority.issue("gpu-1", days=(-30, -1)),
        "not yet valid": lambda: authority.issue("gpu-1", days=(1, 30)),
        "not for clients": lambda: authority.issue("gpu-1", client=False),
        "none": lambda: authority.issue("gpu-1"),
    }[wrong]()
    client = client_contexts(files).control
    if wrong == "none":
        client = ssl.create_default_context(cafile=files.ca)
    with pytest.raises(BaseExceptionGroup):
        await shake(server, client)


async def test_a_renewed_certificate_is_used_by_the_next_connection(authority: Any) -> None:
    files = authority.issue("server", hosts=("server.test",))
    credentials = Credentials(files, server_context)
    client = client_contexts(authority.issue("gpu-1")).control
    old = await shake(credentials.current, client)
    authority.issue("server", hosts=("server.test",), into=files)
    new = await shake(credentials.current, client)
    assert old[1].getpeercert()["serialNumber"] != new[1].getpeercert()["serialNumber"]
    await old[0].send_all(b"untouched")
    assert await old[1].receive_some() == b"untouched"
    await close(*old, *new)


# -- into the reactor


class Ear:
    """Remembers what came, and sends it back."""

    def __init__(self) -> None:
        self.transport: Tls
        self.got = b""
        self.over: list[str] = []
        self.changed = trio.Event()

    def _change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def received(self, data: bytes) -> None:
        self.got += data
        self.transport.send(data)
        self._change()

    def ended(self) -> None:
        self.over.append("ended")
        self.transport.close()
        self._change()

    def lost(self, reason: str) -> None:
        self.over.append(reason)
        self._change()

    def drained(self) -> None:
        """Nobody feeds it."""

    def on_crash(self, error: Exception) -> None:
        self.lost(f"crashed: {error!r}")


@asynccontextmanager
async def handed_over(authority: Any, early: bytes = b"") -> AsyncIterator[tuple[Ear, Tls, Stream]]:
    """The server's end in a reactor; ``early`` was sent, and perhaps read by trio, before that."""
    server = server_context(authority.issue("server", hosts=("server.test",)))
    far, near = await shake(server, client_contexts(authority.issue("gpu-1")).trunk)
    below = near.transport_stream
    reactor, ear = Reactor(), Ear()
    async with trio.open_nursery() as nursery:
        await nursery.start(reactor.serve)
        if early:
            await near.send_all(early)
        ear.transport = hand_over(reactor, far, ear)
        try:
            yield ear, ear.transport, near
        finally:
            ear.transport.abort()
            below.socket.close()
            nursery.cancel_scope.cancel()


async def read(stream: Stream, size: int) -> bytes:
    got = b""
    while len(got) < size:
        got += await stream.receive_some(65536)
    return got


async def test_a_connection_goes_on_in_the_reactor(authority: Any) -> None:
    async with handed_over(authority) as (ear, transport, near):
        assert transport.peer == "{}:{}".format(*near.transport_stream.socket.getsockname())
        for number in range(5):
            await near.send_all(b"word %d" % number)
            assert await read(near, 6) == b"word %d" % number
        big = os.urandom(2_000_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.send_all, big)
            assert await read(near, len(big)) == big
        assert ear.got.endswith(big)


async def test_what_came_before_the_handover_is_not_lost(authority: Any) -> None:
    early = os.urandom(100_000)
    async with handed_over(authority, early) as (ear, _, near):
        await near.send_all(b"later")
        assert await read(near, len(early) + 5) == early + b"later"
        assert ear.got == early + b"later"


async def test_what_trio_has_decrypted_already_is_handed_over_first(authority: Any) -> None:
    server = server_context(authority.issue("server", hosts=("server.test",)))
    far, near = await shake(server, client_contexts(authority.issue("gpu-1")).trunk)
    await near.send_all(b"one two ")
    # trio reads the whole record and gives a part of it
    assert await far.receive_some(4) == b"one "
    reactor, ear = Reactor(), Ear()
    async with trio.open_nursery() as nursery:
        await nursery.start(reactor.serve)
        ear.transport = hand_over(reactor, far, ear)
        # nothing more comes that would make the descriptor readable
        while ear.got != b"two ":
            await ear.changed.wait()
        ear.transport.abort()
        await close(near)
        nursery.cancel_scope.cancel()


async def test_a_goodbye_is_heard_by_a_connection_that_moved(authority: Any) -> None:
    async with handed_over(authority) as (ear, _, near):
        await near.send_all(b"last words")
        assert await read(near, 10) == b"last words"
        # waits for the goodbye of the other end
        await near.unwrap()
        assert (ear.got, ear.over) == (b"last words", ["ended"])


async def test_an_end_without_a_goodbye_is_a_loss_for_a_connection_that_moved(authority: Any) -> None:
    async with handed_over(authority) as (ear, transport, near):
        changed = ear.changed
        await near.transport_stream.aclose()
        await changed.wait()
        assert transport.closed
        assert [reason.startswith("TLS: ") for reason in ear.over] == [True]


async def test_a_connection_that_is_gone_is_heard_after_the_handover(authority: Any) -> None:
    server = server_context(authority.issue("server", hosts=("server.test",)))
    far, near = await shake(server, client_contexts(authority.issue("gpu-1")).trunk)
    near.transport_stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    near.transport_stream.socket.close()
    reactor, ear = Reactor(), Ear()
    async with trio.open_nursery() as nursery:
        await nursery.start(reactor.serve)
        ear.transport = hand_over(reactor, far, ear)
        while not ear.over:
            await ear.changed.wait()
        nursery.cancel_scope.cancel()


async def test_a_descriptor_that_is_handed_over_is_freed_with_its_transport(authority: Any) -> None:
    before = set(os.listdir("/proc/self/fd"))
    async with handed_over(authority) as (_, _, _near):
        pass
    assert set(os.listdir("/proc/self/fd")) <= before


# -- a connection that is quiet


@asynccontextmanager
async def quiet(authority: Any) -> AsyncIterator[tuple[QuietTls, Stream, Stream]]:
    """The server's end, heard the cheap way; what it stands on; the agent's end."""
    server, agent = authority.issue("server", hosts=("server.test",)), authority.issue("gpu-1")
    here, there = await shake(server_context(server), client_contexts(agent).control)
    try:
        yield QuietTls(here), here, there
    finally:
        await trio.aclose_forcefully(here)
        await trio.aclose_forcefully(there)


async def test_a_quiet_connection_carries_words_of_any_size_both_ways(authority: Any) -> None:
    async with quiet(authority) as (near, _, far):
        for word in (b"x", b"y" * 300_000):
            heard = bytearray()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(far.send_all, word)
                while len(heard) < len(word):
                    heard += await near.receive_some(65536)
            assert heard == word
        await near.wait_send_all_might_not_block()
        await near.send_all(b"and back")
        assert await far.receive_some(100) == b"and back"


async def test_no_more_than_was_asked_for_is_heard_at_once(authority: Any) -> None:
    async with quiet(authority) as (near, _, far):
        await far.send_all(b"one two")
        assert [await near.receive_some(4), await near.receive_some(4)] == [b"one ", b"two"]


@pytest.mark.parametrize("goodbye", [True, False])
async def test_a_quiet_connection_ends_with_a_goodbye_and_without(authority: Any, goodbye: bool) -> None:
    async with quiet(authority) as (near, _, far):
        await far.send_all(b"last")
        if goodbye:
            spoken = far.pending.__self__
            with pytest.raises(ssl.SSLWantReadError):
                spoken.unwrap()
            await far.transport_stream.send_all(vars(spoken)["bios"][1].read())
        await far.transport_stream.send_eof()
        assert [await near.receive_some(), await near.receive_some(), await near.receive_some()] == [b"last", b"", b""]


async def test_a_quiet_connection_that_is_reset_or_forged_is_broken(authority: Any) -> None:
    async with quiet(authority) as (near, _, far):
        far.transport_stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.transport_stream.socket.close()
        with pytest.raises(trio.BrokenResourceError) as caught:
            await near.receive_some()
        assert isinstance(caught.value.__cause__, ConnectionResetError)
    async with quiet(authority) as (near, _, far):
        await far.transport_stream.send_all(b"\x17\x03\x03\x00\x20" + b"x" * 32)
        with pytest.raises(trio.BrokenResourceError):
            await near.receive_some()


async def test_closing_a_quiet_connection_ends_its_reader_and_leaves_the_socket(authority: Any) -> None:
    async with quiet(authority) as (near, here, far):
        ended = trio.Event()

        async def read() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await near.receive_some()
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            await near.aclose()
        assert ended.is_set()
        await far.transport_stream.send_all(b"raw")
        assert await here.transport_stream.receive_some(100) == b"raw"
