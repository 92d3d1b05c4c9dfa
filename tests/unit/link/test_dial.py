"""One dial over loopback: what stands at its end, and what is said when it does not get there."""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from trio_websocket import ConnectionRejected, wrap_server_stream

from llmgw.config.agent import ServerAddress
from llmgw.link.control import Tap
from llmgw.link.dial import (
    Backoff,
    DialFailed,
    Pace,
    Way,
    dial_control,
    dial_give,
    dial_trunk,
    explain_rejection,
    open_upgrade,
)
from llmgw.link.tls import CONTROL_ALPN, GIVE_ALPN, TRUNK_ALPN, client_contexts, server_context

Talk = Callable[[trio.SSLStream[trio.SocketStream]], Awaitable[None]]


async def stay(stream: trio.SSLStream[trio.SocketStream]) -> None:
    await trio.sleep_forever()


@asynccontextmanager
async def a_server(
    context: ssl.SSLContext | None, talk: Talk = stay, *, host: str = "127.0.0.1"
) -> AsyncIterator[ServerAddress]:
    """Shakes hands, then does ``talk``; without a context it does ``talk`` on the bare connection."""

    async def serve(tcp: trio.SocketStream) -> None:
        stream: Any = tcp
        try:
            if context is not None:
                stream = trio.SSLStream(tcp, context, server_side=True, https_compatible=True)
                await stream.do_handshake()
            await talk(stream)
        except trio.BrokenResourceError:
            # A handshake that fails leaves its alert unsent; this server closes, as if it had crashed.
            pass
        finally:
            tcp.socket.close()

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host=host)
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        yield ServerAddress(host=host, port=listeners[0].socket.getsockname()[1])
        nursery.cancel_scope.cancel()


def a_way(server: ServerAddress, files: Any, pace: Pace | None = None) -> Way:
    return Way(server=server, ca=files.ca, contexts=client_contexts(files), pace=pace or Pace())


async def fail(server: ServerAddress, files: Any, pace: Pace | None = None) -> str:
    """What a dial says that does not succeed."""
    with pytest.raises(DialFailed) as caught:
        await dial_control(a_way(server, files, pace))
    return caught.value.message


async def test_a_dial_ends_with_the_protocol_that_was_asked_for(authority: Any) -> None:
    context = server_context(authority.issue("server", hosts=("127.0.0.1",)), relays=True)
    async with a_server(context) as server:
        way = a_way(server, authority.issue("gpu-1"))
        for dial, alpn in ((dial_control, CONTROL_ALPN), (dial_trunk, TRUNK_ALPN), (dial_give, GIVE_ALPN)):
            stream = await dial(way)
            assert stream.selected_alpn_protocol() == alpn
            await trio.aclose_forcefully(stream)


async def test_the_kernel_finds_a_network_that_is_gone_within_15_seconds(authority: Any) -> None:
    files = authority.issue("gpu-1", hosts=("127.0.0.1",))
    async with a_server(server_context(files), stay) as server:
        stream = await dial_control(a_way(server, files))
        read = partial(stream.transport_stream.getsockopt, socket.IPPROTO_TCP)
        # its report comes within 5 s, and stays unacknowledged
        assert 5000 + read(socket.TCP_USER_TIMEOUT) < 15_000
        assert stream.transport_stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        # it says nothing: a probe at the first chance after that time ends it
        assert read(socket.TCP_KEEPIDLE) + read(socket.TCP_USER_TIMEOUT) / 1000 + read(socket.TCP_KEEPINTVL) <= 15
        await trio.aclose_forcefully(stream)


async def test_a_port_where_nobody_listens_is_named(authority: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = await fail(ServerAddress(host="127.0.0.1", port=port), authority.issue("gpu-1"))
    assert text.startswith(f"127.0.0.1:{port} refuses connections")


class NoNames(trio.abc.HostnameResolver):
    """A name service that knows none."""

    async def getaddrinfo(self, *args: Any, **named: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def getnameinfo(self, *args: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


async def test_a_name_that_is_none_is_named(authority: Any) -> None:
    trio.socket.set_custom_hostname_resolver(NoNames())
    text = await fail(ServerAddress(host="head.test", port=7443), authority.issue("gpu-1"))
    assert text.startswith("the name head.test can't be resolved (Name or service not known)")


async def test_both_names_are_told_when_they_differ(authority: Any) -> None:
    server_files = authority.issue("server", hosts=("head.test", "10.9.9.9"))
    async with a_server(server_context(server_files)) as server:
        text = await fail(server, authority.issue("gpu-1"))
    assert "dialled 127.0.0.1, it holds head.test, 10.9.9.9;" in text


async def test_a_server_that_is_gone_at_the_second_look_costs_its_names_only(authority: Any) -> None:
    server_files = authority.issue("server", hosts=("head.test",))
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    server = ServerAddress(host="127.0.0.1", port=listener.socket.getsockname()[1])

    async def serve_once() -> None:
        async with listener:
            tcp = await listener.accept()
        stream = trio.SSLStream(tcp, server_context(server_files), server_side=True)
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()
        await trio.aclose_forcefully(tcp)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_once)
        assert "dialled 127.0.0.1, it holds no other name" in await fail(server, authority.issue("gpu-1"))


async def test_a_server_of_another_authority_is_not_believed(authority: Any, make_authority: Any) -> None:
    stranger = make_authority("stranger").issue("server", hosts=("127.0.0.1",))
    async with a_server(server_context(stranger)) as server:
        text = await fail(server, authority.issue("gpu-1"))
    assert f"comes from another authority than {authority.ca}" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"days": (-9, -1)}, "the server's certificate has expired"),
        ({"days": (1, 9)}, "the server's certificate is not valid yet"),
        ({"server": False}, "has no server's certificate"),
    ],
)
async def test_what_is_wrong_with_the_servers_certificate_is_named(
    authority: Any, given: dict[str, Any], words: str
) -> None:
    files = authority.issue("server", hosts=("127.0.0.1",), **given)
    async with a_server(server_context(files)) as server:
        assert words in await fail(server, authority.issue("gpu-1"))


async def test_another_service_is_not_taken_for_the_server(authority: Any) -> None:
    files = authority.issue("server", hosts=("127.0.0.1",))
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    plain.load_cert_chain(files.cert, files.key)
    async with a_server(plain) as server:
        text = await fail(server, authority.issue("gpu-1"))
        assert f"127.0.0.1:{server.port} does not speak {CONTROL_ALPN}" in text


async def test_a_port_without_tls_is_named(authority: Any) -> None:
    async def answer(stream: Any) -> None:
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await stream.receive_some(65536)

    async with a_server(None, answer) as server:
        assert "does not speak TLS as agents do" in await fail(server, authority.issue("gpu-1"))


async def test_a_server_that_closes_during_tls_has_the_reason_in_its_log(authority: Any) -> None:
    async def close(stream: Any) -> None:
        await stream.receive_some(65536)

    async with a_server(None, close) as server:
        text = await fail(server, authority.issue("gpu-1"))
    assert text.endswith("the server closed the connection during TLS; its log line names the reason")


async def test_a_server_that_is_silent_is_given_up(authority: Any) -> None:
    async with a_server(None) as server:
        assert "does not answer in time" in await fail(server, authority.issue("gpu-1"), Pace(tls=0.05))


async def test_a_dial_that_is_given_up_leaves_no_connection(authority: Any) -> None:
    seen = trio.Event()
    gone = trio.Event()

    async def watch(stream: Any) -> None:
        seen.set()
        while await stream.receive_some(65536):
            pass
        gone.set()

    async with a_server(None, watch) as server, trio.open_nursery() as nursery:
        nursery.start_soon(dial_control, a_way(server, authority.issue("gpu-1")))
        await seen.wait()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await gone.wait()


# -- the upgrade


async def upgrade(server: ServerAddress, files: Any, pace: Pace | None = None) -> None:
    way = a_way(server, files, pace)
    stream = await dial_control(way)
    try:
        async with trio.open_nursery() as nursery:
            await open_upgrade(nursery, way, Tap(stream), "gpu-1")
            nursery.cancel_scope.cancel()
    finally:
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("wrong", ["other authority", "expired", "not for clients"])
async def test_a_refused_certificate_is_a_close_during_tls(authority: Any, make_authority: Any, wrong: str) -> None:
    """The handshake is over for this end before the server looks at what came."""
    files = {
        "other authority": lambda: replace(make_authority("other").issue("gpu-1"), ca=authority.ca),
        "expired": lambda: authority.issue("gpu-1", days=(-30, -1)),
        "not for clients": lambda: authority.issue("gpu-1", client=False),
    }[wrong]()
    async with a_server(server_context(authority.issue("server", hosts=("127.0.0.1",)))) as server:
        with pytest.raises(BaseExceptionGroup) as caught:
            await upgrade(server, files)
    assert caught.group_contains(DialFailed, match="closed the connection during TLS; its log line names the reason")


async def test_an_alert_that_arrives_is_told(authority: Any, make_authority: Any) -> None:
    context = server_context(authority.issue("server", hosts=("127.0.0.1",)))

    async def refuse(tcp: Any) -> None:
        stream = trio.SSLStream(tcp, context, server_side=True)
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()
        _, outgoing = vars(stream.pending.__self__)["bios"]  # type: ignore[attr-defined]
        await tcp.send_all(outgoing.read())
        await tcp.send_eof()
        while await tcp.receive_some(65536):
            pass

    async with a_server(None, refuse) as server:
        with pytest.raises(BaseExceptionGroup) as caught:
            await upgrade(server, replace(make_authority("other").issue("gpu-1"), ca=authority.ca))
    assert caught.group_contains(
        DialFailed, match=r"closed the connection during TLS \(unknown ca\); its log line names"
    )


async def test_a_server_that_does_not_answer_the_upgrade_is_given_up(authority: Any) -> None:
    async with a_server(server_context(authority.issue("server", hosts=("127.0.0.1",)))) as server:
        with pytest.raises(BaseExceptionGroup) as caught:
            await upgrade(server, authority.issue("gpu-1"), Pace(upgrade=0.05))
    assert caught.group_contains(DialFailed, match="does not answer in time")


async def test_a_refused_upgrade_comes_out_of_the_nursery(authority: Any) -> None:
    async def reject(stream: Any) -> None:
        async with trio.open_nursery() as nursery:
            await (await wrap_server_stream(nursery, stream)).reject(403, body=b'{"error": {"message": "no"}}')
            nursery.cancel_scope.cancel()

    async with a_server(server_context(authority.issue("server", hosts=("127.0.0.1",))), reject) as server:
        with pytest.raises(BaseExceptionGroup) as caught:
            await upgrade(server, authority.issue("gpu-1"))
    assert caught.group_contains(ConnectionRejected)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            b'{"error": {"message": "the certificate is of node gpu-2"}}',
            "(status 403): the certificate is of node gpu-2",
        ),
        (b'{"error": {"message": "\\u001b[2J"}}', "(status 403): \\x1b[2J"),
        (b'{"error": "no"}', "(status 403): it gave no reason"),
        (b"[]", "(status 403): it gave no reason"),
        (b"\xff", "(status 403): it gave no reason"),
        (None, "(status 403): it gave no reason"),
    ],
)
def test_a_rejection_is_told_in_the_servers_words(authority: Any, body: bytes | None, words: str) -> None:
    way = a_way(ServerAddress(host="head", port=7443), authority.issue("gpu-1"))
    text = explain_rejection(way, ConnectionRejected(403, (), body))
    assert text == f"head:7443 refuses this node {words}"


# -- how long to wait


def test_waits_double_up_to_a_bound_and_spread() -> None:
    backoff = Backoff(Pace(first_wait=0.5, most_wait=30), random.Random(7))
    waits = [backoff.draw(lived_seconds=0.0) for _ in range(12)]
    for number, wait in enumerate(waits):
        middle = min(0.5 * 2**number, 30)
        assert 0.5 * middle <= wait <= 1.5 * middle
    assert len(set(waits)) == 12


def test_a_connection_that_stood_begins_the_waits_anew() -> None:
    backoff = Backoff(Pace(first_wait=0.5, good=60), random.Random(7))
    for _ in range(8):
        backoff.draw(lived_seconds=59.0)
    assert backoff.draw(lived_seconds=60.0) <= 0.75
