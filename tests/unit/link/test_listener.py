"""The agents' port with real TLS: who gets in, who is refused with which words, and that nothing ends the port."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import logging
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography import x509
from trio_websocket import ConnectionClosed, ConnectionRejected, WebSocketConnection

from llmgw.core.events import NodeLost, NodeRegistered, NodeSilent
from llmgw.core.node import NodeId
from llmgw.errors import UsageError
from llmgw.link import listener
from llmgw.link.agentlink import Pace
from llmgw.link.control import NODE_HEADER, PATH, Tap, ask_upgrade
from llmgw.link.listener import AgentPort, serve_agents
from llmgw.link.mux import Mux
from llmgw.link.pending import PLACES
from llmgw.link.refusals import LINES
from llmgw.link.sparing import NODE_LINES
from llmgw.link.tls import CONTROL_ALPN, client_contexts, server_context
from llmgw.link.trunk import Trunks
from llmgw.reactor.credentials import Credentials
from llmgw.reactor.loop import Reactor
from llmgw.wire import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Desired,
    Goaway,
    Hello,
    NodeWord,
    Refused,
    Register,
    ServerMessage,
    Welcome,
    decode_from_server,
    encode,
)

NODE = NodeId("gpu-01")
# What only a hang can miss.
HANG = 60.0
QUICK = Pace(poll=0.05, answer=0.3)

Stream = trio.SSLStream[trio.SocketStream]


class Peer:
    """An agent's control link."""

    def __init__(self, stream: Stream, ws: WebSocketConnection) -> None:
        self.stream = stream
        self.ws = ws

    async def hear(self) -> ServerMessage:
        with trio.fail_after(HANG):
            return decode_from_server(await self.ws.get_message())

    async def greet(self, run: str = "a", dial: int = 1, node: str = NODE) -> ServerMessage:
        await self.ws.send_message(encode(Hello(protocol=PROTOCOL, node=node, run=run, dial=dial, version="1.0")))
        return await self.hear()

    async def wait_closed(self) -> None:
        """Whatever comes before it is passed over."""
        with trio.fail_after(HANG):
            while True:
                try:
                    await self.ws.get_message()
                except ConnectionClosed:
                    return


class Server:
    """A running port, and ways to knock at it."""

    def __init__(self, address: tuple[str, int], port: AgentPort, trunks: Trunks, nursery: trio.Nursery) -> None:
        self.address = address
        self.port = port
        self.trunks = trunks
        self.nursery = nursery
        self._dialled: list[trio.SocketStream] = []

    async def connect(self) -> trio.SocketStream:
        self._dialled.append(await trio.open_tcp_stream(*self.address))
        return self._dialled[-1]

    def hang_up(self) -> None:
        for tcp in self._dialled:
            tcp.socket.close()
        self._dialled.clear()

    async def shake(self, context: ssl.SSLContext) -> Stream:
        tcp = await self.connect()
        stream = trio.SSLStream(tcp, context, server_hostname="localhost", https_compatible=True)
        with trio.fail_after(HANG):
            await stream.do_handshake()
        return stream

    async def dial(self, files: Any, node: str = NODE) -> Peer:
        stream = await self.shake(client_contexts(files).control)
        with trio.fail_after(HANG):
            return Peer(stream, await ask_upgrade(self.nursery, Tap(stream), host="localhost", node=node))

    async def enter(
        self, files: Any, facts: Any, *, run: str = "a", dial: int = 1, node: str = NODE
    ) -> tuple[Peer, str]:
        """An agent that has registered, and its session."""
        peer = await self.dial(files, node)
        welcome = await peer.greet(run, dial, node)
        assert isinstance(welcome, Welcome)
        await peer.ws.send_message(encode(Register(node=facts.node(node), running=())))
        return peer, welcome.session

    async def open_trunk(self, files: Any, token: str, node: str = NODE) -> Stream:
        stream = await self.shake(client_contexts(files).trunk)
        mux = Mux(opener=False)
        mux.say_hello(node=node, session=token)
        await stream.send_all(mux.take())
        return stream

    async def wait_trunks(self, count: int, node: NodeId = NODE) -> None:
        await until(lambda: self.trunks.count(node) == count)


async def until(holds: Callable[[], object]) -> None:
    with trio.fail_after(HANG):
        while not holds():  # noqa: ASYNC110 - what is waited for tells nobody
            await trio.sleep(0.01)


@asynccontextmanager
async def serving(
    files: Any, fleet: Any, revoked: Path, *, lease_seconds: float = 15.0, pace: Pace = QUICK
) -> AsyncIterator[Server]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        async with trio.open_nursery() as nursery:
            reactor = Reactor()
            await nursery.start(reactor.serve)
            trunks = Trunks(reactor)
            serve = functools.partial(
                serve_agents,
                listening,
                fleet,
                credentials=Credentials(files, server_context),
                revoked=revoked,
                trunks=trunks,
                reactor=reactor,
                lease_seconds=lease_seconds,
                pace=pace,
            )
            port = await nursery.start(serve)
            async with trio.open_nursery() as clients:
                server = Server(listening.getsockname(), port, trunks, clients)
                try:
                    yield server
                finally:
                    server.hang_up()
                clients.cancel_scope.cancel()
            # The reactor leaves what is still open to its owner: a trunk ends when it hears that its peer has gone.
            with trio.fail_after(HANG):
                while trunks._all or trunks._closing:
                    trunks.sweep()
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()


@pytest.fixture
def hosted(authority: Any) -> Any:
    return authority.issue("llmgw-ctl", hosts=("localhost",), client=False)


@pytest.fixture
def agent(authority: Any) -> Any:
    return authority.issue(NODE, hosts=(NODE,))


@pytest.fixture
def revoked(tmp_path: Path) -> Path:
    return tmp_path / "revoked.txt"


@pytest.fixture
async def server(hosted: Any, fleet: Any, revoked: Path) -> AsyncIterator[Server]:
    async with serving(hosted, fleet, revoked) as running:
        yield running


def write(path: Path, text: str) -> None:
    path.write_text(text)


def serial(files: Any) -> int:
    return x509.load_pem_x509_certificate(files.cert.read_bytes()).serial_number


async def prove_alive(server: Server, files: Any, dial: int = 1) -> None:
    """The port serves a good agent."""
    peer = await server.dial(files)
    answer = await peer.greet(run="proof", dial=dial)
    assert isinstance(answer, Welcome), answer
    await peer.ws.aclose()
    await until(lambda: not any(view.connected for view in server.port.links()))


async def read_end(stream: trio.abc.ReceiveStream) -> bytes:
    """All that comes; what breaks the connection is raised."""
    got = b""
    with trio.fail_after(HANG):
        while data := await stream.receive_some(65536):
            got += data
    return got


# -- who gets in


async def test_an_agent_is_served_and_seen(server: Server, agent: Any, fleet: Any, facts: Any) -> None:
    fleet.desire(NODE, 1, facts.spec())
    peer, token = await server.enter(agent, facts)
    assert await fleet.wait_events(1) == [NodeRegistered(node=facts.node(), running=())]
    assert await peer.hear() == Desired(revision=1, shards=(facts.spec(),))
    await server.open_trunk(agent, token)
    await server.open_trunk(agent, token)
    await server.wait_trunks(2)
    (view,) = server.port.links()
    assert (view.node, view.connected, view.protocol, view.version, view.trunks) == (NODE, True, PROTOCOL, "1.0", 2)
    assert view.peer.startswith("127.0.0.1:")
    assert 0 <= view.heard_seconds_ago < HANG


async def test_many_agents_are_served_at_once(server: Server, authority: Any, fleet: Any, facts: Any) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(8):
            name = f"gpu-{number:02}"
            nursery.start_soon(functools.partial(server.enter, authority.issue(name), facts, node=name))
    events = await fleet.wait_events(8)
    assert {event.node.id for event in events} == {f"gpu-{number:02}" for number in range(8)}


# -- who does not: by TLS


def bare(files: Any, **given: Any) -> ssl.SSLContext:
    """A client that checks nothing of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.ca)
    context.set_alpn_protocols([CONTROL_ALPN])
    return context


def refused_certificates(authority: Any, make_authority: Any) -> dict[str, tuple[Any, str, str]]:
    """A certificate, what the log says of it, and the alert that the client gets."""
    other = make_authority("other")
    strange = dataclasses.replace(other.issue(NODE), ca=authority.ca)
    return {
        "wrong authority": (strange, "is not signed by this server's authority", "unknown ca"),
        "expired": (authority.issue(NODE, days=(-20, -10)), "its certificate has expired", "certificate expired"),
        "not yet valid": (authority.issue(NODE, days=(10, 20)), "is not valid yet", "bad certificate"),
        "a server's": (authority.issue(NODE, client=False), "clientAuth is missing", "unsupported certificate"),
    }


@pytest.mark.parametrize("case", ["wrong authority", "expired", "not yet valid", "a server's"])
async def test_a_certificate_that_is_refused_is_named_at_both_ends(
    *, server: Server, authority: Any, make_authority: Any, agent: Any, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    files, said, alert = refused_certificates(authority, make_authority)[case]
    context = bare(files)
    context.load_cert_chain(files.cert, files.key)
    stream = await server.shake(context)
    address, port = stream.transport_stream.socket.getsockname()
    with pytest.raises(trio.BrokenResourceError) as broken:
        await read_end(stream)
    assert isinstance(broken.value.__cause__, ssl.SSLError)
    assert alert in str(broken.value.__cause__).lower().replace("_", " ")
    await until(lambda: caplog.messages)
    assert caplog.messages[0].startswith(f"refused a connection from {address} port {port}: ")
    assert said in caplog.messages[0]
    await prove_alive(server, agent)


async def test_who_shows_no_certificate_is_told_so(
    server: Server, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await server.shake(bare(agent))
    with pytest.raises(trio.BrokenResourceError) as broken:
        await read_end(stream)
    assert "certificate required" in str(broken.value.__cause__).lower().replace("_", " ")
    await until(lambda: caplog.messages)
    assert "it showed no certificate (peer did not return a certificate)" in caplog.text


async def test_an_agent_that_does_not_believe_the_server_is_logged(
    server: Server, make_authority: Any, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = dataclasses.replace(agent, ca=make_authority("other").ca)

    def dial() -> None:
        # not by trio, which keeps the alert to itself
        with socket.create_connection(server.address) as tcp, pytest.raises(ssl.SSLCertVerificationError):
            client_contexts(elsewhere).control.wrap_socket(tcp, server_hostname="localhost")

    await trio.to_thread.run_sync(dial)
    await until(lambda: caplog.messages)
    assert "it does not believe this server's certificate" in caplog.text


@pytest.mark.parametrize("alpn", [[], ["h2", "http/1.1"]])
async def test_who_asks_for_neither_protocol_is_refused(
    server: Server, agent: Any, alpn: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(agent.ca)
    context.load_cert_chain(agent.cert, agent.key)
    context.set_alpn_protocols(alpn)
    assert await read_end(await server.shake(context)) == b""
    await until(lambda: caplog.messages)
    assert "node gpu-01: it asks for neither llmgw-control/1 nor llmgw-trunk/1 (by ALPN)" in caplog.text


async def test_who_speaks_an_old_tls_is_refused(server: Server, agent: Any, caplog: pytest.LogCaptureFixture) -> None:
    context = bare(agent)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(trio.BrokenResourceError):
        await server.shake(context)
    await until(lambda: caplog.messages)
    assert "it does not speak TLS 1.3" in caplog.text


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "it speaks plain HTTP, not TLS"),
        (b"\x00" * 3000, "TLS"),
        (os.urandom(5000), "TLS"),
        (b"\x16\x03\x01\xff\xff" + b"\x01" * 70_000, "TLS"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "TLS"),
    ],
)
async def test_garbage_before_tls_is_refused(
    server: Server, agent: Any, sent: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    tcp = await server.connect()
    try:
        await tcp.send_all(sent)
        await read_end(tcp)
    except trio.BrokenResourceError:
        # The rest of it met a closed door.
        assert len(sent) > 65536
    await until(lambda: caplog.messages)
    assert said in caplog.messages[0]
    await prove_alive(server, agent)


async def test_refusals_of_one_address_do_not_fill_the_log(
    server: Server, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        tcp = await server.connect()
        await tcp.send_all(b"no TLS at all\n")
        await read_end(tcp)
    await prove_alive(server, agent)
    refused = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(refused) == LINES


# -- by the upgrade


async def test_another_nodes_name_is_refused_and_both_ends_are_told(
    server: Server, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rejected = await be_rejected(server, agent, "gpu-02")
    message = "the certificate is of node gpu-01, and the agent claims to be gpu-02 (x-llmgw-node)"
    assert rejected.status_code == 403
    assert (b"content-type", b"application/json") in rejected.headers
    assert json.loads(rejected.body or b"") == {"error": {"code": "wrong_node", "message": message}}
    await until(lambda: caplog.messages)
    assert message in caplog.messages[0]
    await prove_alive(server, agent)


async def be_rejected(server: Server, files: Any, node: str = NODE) -> ConnectionRejected:
    stream = await server.shake(client_contexts(files).control)
    rejected: list[ConnectionRejected] = []
    try:
        with trio.fail_after(HANG):
            async with trio.open_nursery() as nursery:
                await ask_upgrade(nursery, Tap(stream), host="localhost", node=node)
    except* ConnectionRejected as group:
        rejected.extend(error for error in group.exceptions if isinstance(error, ConnectionRejected))
    await trio.aclose_forcefully(stream)
    return rejected[0]


async def ask(server: Server, files: Any, request: bytes) -> bytes:
    """The answer to an upgrade request, byte for byte."""
    stream = await server.shake(client_contexts(files).control)
    await stream.send_all(request)
    with trio.fail_after(HANG):
        return bytes(await stream.receive_some(65536))


def upgrade_request(*lines: bytes, target: bytes = PATH.encode(), method: bytes = b"GET") -> bytes:
    head = [
        method + b" " + target + b" HTTP/1.1",
        b"Host: localhost",
        b"Upgrade: WebSocket",
        b"Connection: Upgrade",
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        b"Sec-WebSocket-Version: 13",
    ]
    return b"\r\n".join([*head, *lines, b"", b""])


CLAIM = NODE_HEADER.encode() + b": gpu-01"


@pytest.mark.parametrize(
    ("request_bytes", "status", "said"),
    [
        (upgrade_request(), 403, "claims to be none"),
        (upgrade_request(CLAIM, CLAIM), 403, "gpu-01 and gpu-01"),
        (upgrade_request(NODE_HEADER.encode() + b": gpu-01\xff\xfe"), 403, "gpu-01\ufffd"),
        (upgrade_request(CLAIM, target=b"/v1/models"), 404, "agents ask for /llmgw/link"),
        (upgrade_request(CLAIM, method=b"POST"), 400, "malformed"),
        (upgrade_request(CLAIM).replace(b"Upgrade: WebSocket\r\n", b""), 400, "malformed"),
        (upgrade_request(CLAIM).replace(b"Version: 13", b"Version: 8"), 426, "malformed"),
        (b"complete nonsense\r\n\r\n", 400, "malformed"),
        (upgrade_request(b"x: " + b"y" * 200_000), 400, "malformed"),
    ],
)
async def test_an_upgrade_request_that_is_not_right_is_answered_and_logged(
    *, server: Server, agent: Any, request_bytes: bytes, status: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await ask(server, agent, request_bytes)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    await until(lambda: caplog.messages)
    assert said in caplog.messages[0]
    await prove_alive(server, agent)


@pytest.mark.parametrize(
    "request_bytes",
    [
        upgrade_request(CLAIM).replace(b"Host: localhost", b"Host: \xff\xff"),
        upgrade_request(CLAIM).replace(b"Connection: Upgrade", b"Connection: \xe9\xe9"),
        upgrade_request(CLAIM, target=b"/\xff"),
        upgrade_request(CLAIM, b"Sec-WebSocket-Protocol: \xfe"),
    ],
)
async def test_headers_that_are_no_ascii_end_their_connection_only(
    server: Server, agent: Any, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await ask(server, agent, request_bytes)
    await until(lambda: caplog.messages)
    assert "refused a connection" in caplog.messages[0]
    assert caplog.messages[0].isascii()
    assert "Traceback" not in caplog.text
    await prove_alive(server, agent)


@pytest.mark.slow
async def test_a_node_has_a_bounded_number_of_links(server: Server, agent: Any, authority: Any) -> None:
    for _ in range(listener.LINKS_PER_NODE):
        await server.dial(agent)
    rejected = await be_rejected(server, agent)
    assert rejected.status_code == 429
    other = authority.issue("gpu-02")
    assert isinstance(await (await server.dial(other, "gpu-02")).greet(node="gpu-02"), Welcome)


async def test_who_still_talks_gets_to_read_why_it_is_refused(
    server: Server, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await server.shake(client_contexts(agent).control)
    # closed on unread bytes, the connection would be reset under the client
    with trio.fail_after(HANG):
        await stream.send_all(upgrade_request() + b"x" * 3_000_000)
        assert b"claims to be none" in await read_end(stream)
    assert "claims to be none" in caplog.text


# -- by the list of what is revoked


@pytest.mark.parametrize("by", ["node", "serial"])
async def test_a_revoked_certificate_is_refused(
    *, server: Server, agent: Any, revoked: Path, fleet: Any, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    await prove_alive(server, agent)
    with caplog.at_level(logging.INFO):
        write(revoked, f"{NODE}\n" if by == "node" else f"{serial(agent):X}  # lost\n")
        await until(lambda: "has changed: " in caplog.text)
    rejected = await be_rejected(server, agent)
    assert fleet.refused[-1:] == [NODE]
    message = f"the certificate of node gpu-01 (serial {serial(agent):x}) is revoked"
    assert rejected.status_code == 403
    assert json.loads(rejected.body or b"") == {"error": {"code": "revoked", "message": message}}
    await until(lambda: message in caplog.text)
    trunk = await server.open_trunk(agent, "any")
    assert await read_end(trunk) == b""


@pytest.mark.slow
async def test_a_revoked_node_is_cut_while_it_is_connected(
    *, hosted: Any, agent: Any, authority: Any, revoked: Path, fleet: Any, facts: Any
) -> None:
    other = authority.issue("gpu-02")
    async with serving(hosted, fleet, revoked, pace=Pace()) as server:
        peer, token = await server.enter(agent, facts)
        await server.enter(other, facts, node="gpu-02")
        trunk = await server.open_trunk(agent, token)
        await server.wait_trunks(1)
        began = trio.current_time()
        write(revoked, f"{serial(agent):x}\n")
        refused = await peer.hear()
        # two seconds are promised, and a look each second is what makes it so; the rest is a slow machine's
        assert trio.current_time() - began < HANG
        assert isinstance(refused, Refused)
        assert refused.code == "revoked"
        await peer.wait_closed()
        await server.wait_trunks(0)
        await read_end(trunk)
        await until(lambda: [view.connected for view in server.port.links()] == [False, True])


async def test_a_trunk_is_cut_for_its_own_certificate(
    *, server: Server, agent: Any, authority: Any, revoked: Path, facts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = authority.issue(NODE)
    _, token = await server.enter(renewed, facts)
    await server.open_trunk(agent, token)
    await server.wait_trunks(1)
    write(revoked, f"{serial(agent):x}\n")
    with caplog.at_level(logging.INFO):
        await server.wait_trunks(0)
    assert f"closed: the certificate of node gpu-01 (serial {serial(agent):x}) is revoked" in caplog.text
    assert server.port.links()[0].connected
    await server.open_trunk(renewed, token)
    await server.wait_trunks(1)


def test_a_list_that_cant_be_read_ends_the_start(hosted: Any, fleet: Any, tmp_path: Path) -> None:
    async def start() -> None:
        async with serving(hosted, fleet, tmp_path):
            raise AssertionError("it started")

    with pytest.raises(BaseExceptionGroup) as group:
        trio.run(start)
    assert group.group_contains(UsageError, match="revoked certificates")


# -- time


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["tcp", "half a handshake", "tls", "half a request", "websocket"])
async def test_who_is_slow_is_not_waited_for(
    *, hosted: Any, agent: Any, revoked: Path, fleet: Any, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(hosted, fleet, revoked, pace=Pace(handshake=0.5, hello=0.5)) as server:
        if stage == "websocket":
            refused = await (await server.dial(agent)).hear()
            assert isinstance(refused, Refused)
            assert "no hello" in refused.reason
        elif stage in ("tls", "half a request"):
            stream = await server.shake(client_contexts(agent).control)
            await stream.send_all(b"GET" if stage == "tls" else upgrade_request(CLAIM)[:50])
            assert await read_end(stream) == b""
        else:
            tcp = await server.connect()
            await tcp.send_all(b"" if stage == "tcp" else b"\x16\x03\x01\x02\x00\x01")
            assert await read_end(tcp) == b""
        await until(lambda: [text for text in caplog.messages if text.startswith("refused a connection")])
        assert {"in time", "no hello"} & {part for part in ("in time", "no hello") if part in caplog.text}


@pytest.mark.slow
async def test_who_holds_every_place_and_does_nothing_keeps_nobody_out(
    *, hosted: Any, agent: Any, revoked: Path, fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = count_descriptors()
    async with serving(hosted, fleet, revoked, pace=Pace(handshake=10 * HANG)) as server:
        for _ in range(2 * PLACES):
            await server.connect()
        await prove_alive(server, agent)
        # its own descriptors, and those that the port holds
        assert count_descriptors() - before < 3 * PLACES + 64
        told = [message for message in caplog.messages if "its place was needed" in message]
        assert len(told) == LINES


@pytest.mark.parametrize("stage", ["tcp", "half a handshake", "tls", "half a request", "websocket", "hello"])
async def test_an_end_at_any_stage_leaves_nothing(server: Server, agent: Any, stage: str) -> None:
    for _ in range(3):
        if stage in ("tcp", "half a handshake"):
            tcp = await server.connect()
            await tcp.send_all(b"" if stage == "tcp" else b"\x16\x03\x01\x02\x00\x01")
        elif stage in ("tls", "half a request"):
            stream = await server.shake(client_contexts(agent).control)
            if stage == "half a request":
                await stream.send_all(upgrade_request(CLAIM)[:50])
            tcp = stream.transport_stream
        else:
            peer = await server.dial(agent)
            if stage == "hello":
                await peer.ws.send_message(b'{"type": "hello"')
            tcp = peer.stream.transport_stream
        tcp.socket.close()
    await prove_alive(server, agent)
    await until(lambda: not server.port.presence.links and not server.port._open)


@pytest.mark.slow
async def test_accepting_goes_on_after_an_error(
    hosted: Any, fleet: Any, revoked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class NoDescriptors:
        """A listening socket in a process with too many files open."""

        tries = 0

        async def accept(self) -> trio.SocketStream:
            self.tries += 1
            raise OSError(24, "Too many open files")

    async with serving(hosted, fleet, revoked) as server:
        listening: Any = NoDescriptors()
        server.nursery.start_soon(server.port.accept, listening, server.nursery)
        await until(lambda: listening.tries == 2)
    assert "can't accept agents: [Errno 24] Too many open files" in caplog.text


# -- what is said


async def test_a_message_that_is_too_large_ends_its_link(server: Server, agent: Any, facts: Any) -> None:
    peer, _ = await server.enter(agent, facts)
    await peer.ws.send_message(b"x" * (MAX_MESSAGE_BYTES + 1))
    await peer.wait_closed()
    assert peer.ws.closed is not None
    assert peer.ws.closed.code == 1009
    await until(lambda: not server.port.presence.links)
    await prove_alive(server, agent, dial=9)


async def test_words_that_break_the_protocol_end_the_link(server: Server, agent: Any, facts: Any) -> None:
    peer, _ = await server.enter(agent, facts)
    await peer.ws.send_message(encode(NodeWord(node=facts.node("gpu-02"), applied=None)))
    refused = await peer.hear()
    assert isinstance(refused, Refused)
    assert refused.code == "violation"
    await peer.wait_closed()


async def test_a_fault_of_the_fleet_ends_one_link(
    server: Server, agent: Any, fleet: Any, facts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(event: object) -> None:
        raise ZeroDivisionError("of the fleet")

    report, fleet.report = fleet.report, fail
    peer, _ = await server.enter(agent, facts)
    await peer.wait_closed()
    await until(lambda: caplog.messages)
    assert "an unforeseen end: ZeroDivisionError: of the fleet" in caplog.text
    assert "Traceback" in caplog.text
    fleet.report = report
    await prove_alive(server, agent, dial=2)


# -- sessions


async def test_trunks_need_the_session_of_their_node(server: Server, agent: Any, authority: Any, facts: Any) -> None:
    _, token = await server.enter(agent, facts)
    other = authority.issue("gpu-02")
    await server.enter(other, facts, node="gpu-02")
    for files, shown, node in ((agent, "wrong", NODE), (other, token, "gpu-02"), (other, token, NODE)):
        stream = await server.open_trunk(files, shown, node)
        with suppress(trio.BrokenResourceError):
            await read_end(stream)
    assert [view.trunks for view in server.port.links()] == [0, 0]


@pytest.mark.slow
async def test_a_node_has_a_bounded_number_of_trunks(
    server: Server, agent: Any, facts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, token = await server.enter(agent, facts)
    for _ in range(listener.TRUNKS_PER_NODE):
        await server.open_trunk(agent, token)
    await server.wait_trunks(listener.TRUNKS_PER_NODE)
    assert await read_end(await server.open_trunk(agent, token)) == b""
    await until(lambda: f"node gpu-01 has {listener.TRUNKS_PER_NODE} trunks already" in caplog.text)


@pytest.mark.slow
async def test_trunks_without_a_hello_count_too(server: Server, agent: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = count_descriptors()
    dialled = 2 * listener.TRUNKS_PER_NODE
    for _ in range(dialled):
        await server.shake(client_contexts(agent).trunk)
    await until(lambda: "trunks already" in caplog.text)
    # those beyond are closed after their moment to read why
    await until(lambda: count_descriptors() - before <= dialled + listener.TRUNKS_PER_NODE + 1)
    assert len([message for message in caplog.messages if "trunks already" in message]) == LINES


@pytest.mark.slow
async def test_a_node_that_comes_and_goes_does_not_fill_the_log(
    server: Server, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llmgw.link")
    for dial in range(1, NODE_LINES + 1):
        await prove_alive(server, agent, dial)
    assert len([message for message in caplog.messages if "gpu-01" in message]) == NODE_LINES


async def test_words_of_an_agent_make_no_lines_of_their_own(
    server: Server, agent: Any, facts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llmgw.link")
    peer, token = await server.enter(agent, facts)
    trunk = await server.open_trunk(agent, token)
    await server.wait_trunks(1)
    mux = Mux(opener=False)
    mux.go_away("bye\n2026-11-29 WARNING llmgw: node01 is lost \x1b[31m")
    await trunk.send_all(mux.take())
    await peer.ws.aclose(1000, "enough\n\x1b[31m")
    await until(lambda: "bye" in caplog.text and "has ended" in caplog.text)
    assert all(message.isprintable() for message in caplog.messages)


async def test_trunks_outlive_a_link_and_not_their_agent(server: Server, agent: Any, facts: Any) -> None:
    peer, token = await server.enter(agent, facts, run="a", dial=1)
    await server.open_trunk(agent, token)
    await server.wait_trunks(1)
    await peer.ws.aclose()
    again, _ = await server.enter(agent, facts, run="a", dial=2)
    await server.open_trunk(agent, token)
    await server.wait_trunks(2)
    await again.ws.aclose()
    await until(lambda: not server.port.links()[0].connected)
    await server.enter(agent, facts, run="b", dial=1)
    await server.wait_trunks(0)


@pytest.mark.slow
async def test_another_run_replaces_one_that_hangs(server: Server, agent: Any, facts: Any) -> None:
    stream = await server.shake(client_contexts(agent).control)
    with trio.CancelScope() as life:
        async with trio.open_nursery() as nursery:
            peer = Peer(stream, await ask_upgrade(nursery, Tap(stream), host="localhost", node=NODE))
            await peer.greet(run="hangs")
            # from here on it reads nothing and answers no ping, and its connection stays
            life.cancel()
    await server.enter(agent, facts, run="new")
    await trio.aclose_forcefully(stream)


async def test_another_run_is_refused_while_the_first_answers(server: Server, agent: Any, facts: Any) -> None:
    peer, _ = await server.enter(agent, facts, run="a")
    refused = await (await server.dial(agent)).greet(run="b")
    address, port = peer.stream.transport_stream.socket.getsockname()
    assert refused == Refused(code="connected", reason=f"node gpu-01 is already connected from {address}:{port}")


@pytest.mark.slow
async def test_a_node_that_is_gone_for_a_lease_is_lost_once(
    hosted: Any, agent: Any, revoked: Path, fleet: Any, facts: Any
) -> None:
    async with serving(hosted, fleet, revoked, lease_seconds=0.6) as server:
        peer, token = await server.enter(agent, facts)
        await server.open_trunk(agent, token)
        await server.wait_trunks(1)
        peer.stream.transport_stream.socket.close()
        assert (await fleet.wait_events(3))[1:] == [NodeSilent(node=NODE), NodeLost(node=NODE)]
        await server.wait_trunks(0)
        await trio.sleep(1.5)
        assert len(fleet.events) == 3
        # and it may come back, as who it was
        await server.enter(agent, facts, dial=2)
        await fleet.wait_events(4)


@pytest.mark.slow
async def test_a_link_that_is_open_and_silent_is_lost_and_ended(
    hosted: Any, agent: Any, revoked: Path, fleet: Any, facts: Any
) -> None:
    async with serving(hosted, fleet, revoked, lease_seconds=0.6, pace=Pace(ping=30.0)) as server:
        peer, _ = await server.enter(agent, facts)
        assert (await fleet.wait_events(2))[1] == NodeLost(node=NODE)
        await peer.wait_closed()


async def test_goaway_is_told_to_all_that_are_and_all_that_come(
    server: Server, agent: Any, authority: Any, facts: Any
) -> None:
    peer, token = await server.enter(agent, facts)
    await server.open_trunk(agent, token)
    await server.wait_trunks(1)
    server.port.goaway("the server stops")
    assert await peer.hear() == Goaway(reason="the server stops")
    await server.wait_trunks(0)
    late = await server.dial(authority.issue("gpu-02"), "gpu-02")
    assert await late.hear() == Refused(code="stopping", reason="the server stops")


# -- the server's own certificate


async def test_a_renewed_certificate_is_used_from_the_next_connection_on(
    *, server: Server, hosted: Any, agent: Any, authority: Any, facts: Any, fleet: Any
) -> None:
    peer, _ = await server.enter(agent, facts)
    before = peer.stream.getpeercert()["serialNumber"]
    authority.issue("llmgw-ctl", hosts=("localhost",), client=False, into=hosted)
    stream = await server.shake(client_contexts(agent).control)
    assert int(stream.getpeercert()["serialNumber"], 16) == serial(hosted)
    assert stream.getpeercert()["serialNumber"] != before
    await peer.ws.send_message(encode(NodeWord(node=facts.node(), applied=None)))
    await fleet.wait_events(2)


# -- everything at once


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Cut, flipped, repeated or stuffed."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0:
                del out[at:]
            case 1 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 2:
                out[at:at] = rng.randbytes(rng.randint(1, 40))
            case 3:
                del out[at : at + rng.randint(1, 20)]
            case _:
                out[at:at] = out[: rng.randint(0, 200)]
    return bytes(out)


def frames(rng: random.Random, facts: Any, dial: int) -> list[bytes]:
    """What a client says over a websocket, a frame for each good word."""
    words = [
        encode(Hello(protocol=PROTOCOL, node=NODE, run="fuzz", dial=dial, version="1.0")),
        encode(Register(node=facts.node(), running=())),
        encode(NodeWord(node=facts.node(), applied=rng.randint(0, 9))),
    ]
    out = []
    for word in words:
        mask = rng.randbytes(4)
        size = len(word)
        head = bytes([0x80 | rng.choice([1, 1, 1, 2])])
        head += bytes([0x80 | size]) if size < 126 else bytes([0x80 | 126]) + size.to_bytes(2, "big")
        out.append(head + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(word)))
    return out


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_three_thousand_broken_handshakes_requests_and_frames(
    *, hosted: Any, agent: Any, revoked: Path, fleet: Any, facts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(20260101)
    contexts = client_contexts(agent)
    hello = ssl.MemoryBIO()
    spoken = contexts.control.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        spoken.do_handshake()
    client_hello = hello.read()

    async def throw(stream: trio.abc.Stream, data: bytes) -> None:
        """Send it, in pieces, look at an answer or not, and go."""
        while data:
            size = rng.choice([13, 400, 100_000])
            await stream.send_all(data[:size])
            data = data[size:]
        if rng.random() < 0.3:
            with trio.move_on_after(0.05):
                await stream.receive_some(1000)

    async def one(server: Server, number: int) -> None:
        tcp = await server.connect()
        try:
            if number % 3 == 0:
                return await throw(tcp, mutate(rng, client_hello))
            context = contexts.trunk if number % 12 == 1 else contexts.control
            stream = trio.SSLStream(tcp, context, server_hostname="localhost", https_compatible=True)
            await stream.do_handshake()
            if number % 3 == 1:
                return await throw(stream, mutate(rng, upgrade_request(CLAIM)))
            await stream.send_all(upgrade_request(CLAIM))
            await stream.receive_some(1000)
            good = frames(rng, facts, number)
            kept = rng.randrange(len(good))
            await throw(stream, b"".join(good[:kept]) + mutate(rng, b"".join(good[kept:])))
        except trio.BrokenResourceError:
            # It was refused while it spoke.
            return
        finally:
            tcp.socket.close()

    quick = Pace(handshake=2.0, hello=1.0, poll=5.0)
    async with serving(hosted, fleet, revoked, pace=quick) as server:
        await prove_alive(server, agent)
        gc.collect()
        tasks, descriptors = trio.lowlevel.current_statistics().tasks_living, count_descriptors()
        left = iter(range(3000))

        async def work() -> None:
            for number in left:
                await one(server, number)

        async with trio.open_nursery() as nursery:
            for _ in range(24):
                nursery.start_soon(work)
        await until(lambda: not server.port.presence.links)
        await until(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks)
        await until(lambda: count_descriptors() <= descriptors)
        await prove_alive(server, agent, dial=2)
    # whatever it was, it was foreseen; and some of it came through
    assert "Traceback" not in caplog.text
    assert fleet.events
