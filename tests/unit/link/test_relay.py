"""Weights from node to node through the agents' port, over real TLS: for whom, how fast, and what ends what."""

from __future__ import annotations

import dataclasses
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from cryptography import x509

from llmgw.config.agent import ServerAddress
from llmgw.core.node import NodeId
from llmgw.core.weights import RELAY_FROM, FileListed, count_pieces, piece_bytes_of
from llmgw.counters import Counters
from llmgw.host.weights.giver import Giver
from llmgw.link.agentlink import Pace
from llmgw.link.dial import Way, dial_give
from llmgw.link.gives import MAX_BODY_BYTES
from llmgw.link.giving import Giving
from llmgw.link.listener import AgentPort, serve_agents
from llmgw.link.relay import MAX_GIVES, MAX_LINES, MAX_NEWS, MAX_TAKES, Relay, RelayPace
from llmgw.link.tls import client_contexts, server_context
from llmgw.link.trunk import Trunks
from llmgw.reactor.credentials import Credentials, load_files
from llmgw.reactor.loop import Reactor

KEY, COMMIT = "0123456789abcdef" * 2, "c" * 40
AT = f"/llmgw/weights/{KEY}/{COMMIT}"
MIB = 1024 * 1024
# More than the buffers of two connections hold.
CONTENT = random.Random(7).randbytes(24 * MIB)
A, B, C = NodeId("gpu-a"), NodeId("gpu-b"), NodeId("gpu-c")
# What only a hang can miss.
HANG = 60.0

Stream = trio.SSLStream[trio.SocketStream]


class Shelf:
    """One file in memory, whole."""

    order, whole = "whole", True
    files = (FileListed(name="m.gguf", size_bytes=len(CONTENT)),)

    def __init__(self) -> None:
        self.log = tuple((0, piece, f"{piece:064x}") for piece in range(count_pieces(len(CONTENT))))

    def read(self, file: int, piece: int) -> bytes:
        if (file, piece) == (0, 999):
            return CONTENT
        if file or not 0 <= piece < len(self.log):
            raise LookupError
        size = piece_bytes_of(len(CONTENT))
        return CONTENT[piece * size : (piece + 1) * size]


class Site:
    """A server that relays, and its nodes: ``gpu-a`` and ``gpu-b`` fetch the same."""

    def __init__(self, authority: Any, folder: Path) -> None:
        self.authority = authority
        self.revoked = folder / "revoked.txt"
        self.allowed = {(A, B, KEY), (B, A, KEY)}
        self.asked: list[tuple[str, str]] = []
        self.counters = Counters()
        self.files: dict[str, Any] = {}
        self.address = ServerAddress(host="localhost", port=0)
        self.port: AgentPort
        self.relay: Relay
        self.nursery: trio.Nursery

    def issue(self, node: str) -> Any:
        if node not in self.files:
            self.files[node] = self.authority.issue(node, hosts=(node,))
        return self.files[node]

    def may_take(self, node: NodeId, of: NodeId, key: str) -> bool:
        return (node, of, key) in self.allowed

    def is_allowed(self, node: NodeId, key: str) -> bool:
        """Whom the giving node gives to: what it is told of swarms."""
        self.asked.append((node, key))
        return (node, B, key) in self.allowed

    @asynccontextmanager
    async def serve(
        self, fleet: Any, pace: RelayPace | None = None, *, rate: float = 10**9, max_lines: int = MAX_LINES
    ) -> AsyncIterator[Site]:
        hosted = self.authority.issue("head", hosts=("localhost",), client=False)
        facts: Any = {"counters": self.counters, "pace": pace, "max_lines": max_lines}
        relay = self.relay = Relay(self.may_take, bytes_per_second=rate, **facts)
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
            async with trio.open_nursery() as nursery:
                reactor = Reactor()
                await nursery.start(reactor.serve)

                async def start(*, task_status: trio.TaskStatus[AgentPort]) -> None:
                    await serve_agents(
                        *(listening, fleet),
                        credentials=Credentials(hosted, lambda files: server_context(files, relays=True)),
                        revoked=self.revoked,
                        trunks=Trunks(reactor),
                        reactor=reactor,
                        lease_seconds=15.0,
                        pace=Pace(poll=0.05),
                        relay=relay,
                        task_status=task_status,
                    )

                self.port = await nursery.start(start)
                self.address = ServerAddress(host="localhost", port=listening.getsockname()[1])
                async with trio.open_nursery() as self.nursery:
                    with trio.fail_after(2 * HANG):
                        yield self
                    self.nursery.cancel_scope.cancel()
                nursery.cancel_scope.cancel()

    # -- nodes

    async def dial(self, node: str = B, files: Any = None) -> Stream:
        files = files or self.issue(node)
        return await dial_give(Way(server=self.address, ca=files.ca, contexts=client_contexts(files)))

    def give(self, node: str = B) -> Giving:
        """A node that gives, as agents do."""
        giver = Giver(lambda key, commit: Shelf() if (key, commit) == (KEY, COMMIT) else None, self.is_allowed)
        giving = Giving(lambda: self.dial(node), lambda stream, busy: giver.talk(stream, None, busy))
        giving.want(True)
        self.nursery.start_soon(giving.serve)
        return giving

    async def give_by(self, talk: Callable[[Stream], Awaitable[None]], node: str = B) -> None:
        """One connection of a node that gives in a way of its own."""
        stream = await self.dial(node)

        async def run() -> None:
            try:
                await talk(stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            finally:
                stream.transport_stream.socket.close()

        self.nursery.start_soon(run)

    def client(self, node: str = A, files: Any = None) -> httpx.AsyncClient:
        context = load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files or self.issue(node))
        return httpx.AsyncClient(verify=context, trust_env=False, timeout=HANG, base_url=self.address.url)

    async def ask(self, path: str = AT, *, node: str = A, of: str = B, **more: Any) -> httpx.Response:
        async with self.client(node) as client:
            return await client.get(path, headers={RELAY_FROM: of}, **more)

    async def connect(self, node: str = A) -> Stream:
        """A connection that takes, without a client on it."""
        context = load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.issue(node))
        context.set_alpn_protocols(["http/1.1"])
        tcp = await trio.open_tcp_stream("127.0.0.1", self.address.port)
        stream = trio.SSLStream(tcp, context, server_hostname="localhost", https_compatible=True)
        await stream.do_handshake()
        return stream


@pytest.fixture
def site(authority: Any, tmp_path: Path) -> Site:
    return Site(authority, tmp_path)


async def until(holds: Callable[[], object]) -> None:
    with trio.fail_after(HANG):
        while not holds():  # noqa: ASYNC110 - what is waited for tells nobody
            await trio.sleep(0.01)


async def is_cut(stream: Stream) -> bool:
    """Whether the other end has ended it; what comes before is passed over."""
    with trio.move_on_after(HANG):
        try:
            while await stream.receive_some(65536):
                pass
        except trio.BrokenResourceError:
            pass
        return True
    return False


def say(status: int, length: int, *more: str) -> bytes:
    head = [f"HTTP/1.1 {status} X", f"content-length: {length}", "content-type: x/y", "x-secret: 1", *more]
    return "\r\n".join(head).encode() + b"\r\n\r\n"


async def hear(stream: Stream) -> bytes:
    """The head of a request."""
    heard = b""
    while b"\r\n\r\n" not in heard:
        data = await stream.receive_some()
        if not data:
            raise trio.BrokenResourceError
        heard += data
    return heard


# -- what passes


async def test_a_node_takes_what_another_has_through_the_server(site: Site, fleet: Any) -> None:
    async with site.serve(fleet):
        site.give()
        told = await site.ask(f"{AT}?after=0&wait=0")
        assert told.status_code == 200
        assert told.json()["files"] == [{"name": "m.gguf", "size_bytes": len(CONTENT), "sha256": None}]
        async with site.client() as client:
            taken = [
                (await client.get(f"{AT}/0/{piece}", headers={RELAY_FROM: B})).content
                for _, piece, _ in told.json()["news"]
            ]
        assert b"".join(taken) == CONTENT
        assert set(site.asked) == {(A, KEY)}
        counted = site.counters.by_name["llmgw_relay_bytes_total"].values
        assert counted == {(A,): len(CONTENT) + len(told.content)}


async def test_many_pieces_are_taken_at_a_time_from_a_node_that_keeps_two_connections_free(
    site: Site, fleet: Any
) -> None:
    got: list[bytes] = []

    async def take(piece: int) -> None:
        got.append((await site.ask(f"{AT}/0/{piece}")).content)

    async with site.serve(fleet):
        giving = site.give()
        async with trio.open_nursery() as nursery:
            for piece in range(12):
                nursery.start_soon(take, piece)
        assert sorted(got) == sorted(Shelf().read(0, piece) for piece in range(12))
        await until(lambda: not giving._busy)
        assert 2 <= giving._open <= 14


async def test_what_the_node_refuses_is_refused(site: Site, fleet: Any) -> None:
    async with site.serve(fleet):
        site.give()
        assert (await site.ask(f"{AT}/0/500")).status_code == 404
        site.allowed.discard((A, B, KEY))
        site.may_take = lambda *_: True  # type: ignore[method-assign]
    async with site.serve(fleet):
        # The server would, and the node would not: it has been told of no swarm with that one.
        site.give()
        assert (await site.ask()).status_code == 403


async def test_of_an_answer_its_length_and_kind_pass_and_nothing_else(site: Site, fleet: Any) -> None:
    heads: list[bytes] = []

    async def talk(stream: Stream) -> None:
        while True:
            heads.append(await hear(stream))
            await stream.send_all(say(503, 4, "retry-after: 7") + b"busy")

    async with site.serve(fleet):
        await site.give_by(talk)
        async with site.client() as client:
            for _ in range(3):
                answer = await client.get(AT, headers={RELAY_FROM: B, "x-llmgw-node": C, "cookie": "x"})
                assert (answer.status_code, answer.text, answer.headers["retry-after"]) == (503, "busy", "7")
                assert (answer.headers["content-type"], "x-secret" in answer.headers) == ("x/y", False)
    # who asks is who has shown its certificate, whatever it says of itself
    assert len(heads) == 3
    assert all(b"x-llmgw-node: gpu-a\r\n" in head and b"gpu-c" not in head and b"cookie" not in head for head in heads)


# -- for whom


@pytest.mark.parametrize(("node", "of"), [(C, B), (A, C), (A, A), (A, "")])
async def test_who_is_in_no_swarm_with_a_node_takes_nothing_of_it(site: Site, fleet: Any, node: str, of: str) -> None:
    async with site.serve(fleet):
        site.give()
        answer = await site.ask(node=node, of=of)
    assert answer.status_code == 403
    assert site.asked == []


async def test_what_was_allowed_once_is_asked_anew_each_time(site: Site, fleet: Any) -> None:
    async with site.serve(fleet):
        site.give()
        async with site.client() as client:
            assert (await client.get(AT, headers={RELAY_FROM: B})).status_code == 200
            site.allowed.clear()
            assert (await client.get(AT, headers={RELAY_FROM: B})).status_code == 403


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/llmgw/weights/XYZ/abc", 404),
        ("GET", f"{AT}/0/1/2", 404),
        ("GET", f"{AT}/../x", 404),
        ("POST", AT, 405),
        ("DELETE", AT, 405),
    ],
)
async def test_nothing_else_can_be_asked(site: Site, fleet: Any, method: str, path: str, status: int) -> None:
    async with site.serve(fleet):
        stream = await site.connect()
        await stream.send_all(f"{method} {path} HTTP/1.1\r\nhost: x\r\n{RELAY_FROM}: gpu-b\r\n\r\n".encode())
        assert (await stream.receive_some()).startswith(f"HTTP/1.1 {status} ".encode())
        stream.transport_stream.socket.close()


async def test_a_certificate_of_another_authority_opens_nothing(
    site: Site, fleet: Any, make_authority: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = dataclasses.replace(make_authority("other").issue(A, hosts=(A,)), ca=site.authority.ca)
    async with site.serve(fleet):
        site.give()
        with pytest.raises(httpx.TransportError):
            async with site.client(files=other) as client:
                await client.get(AT, headers={RELAY_FROM: B})
        stream = await site.dial(files=other)
        assert await is_cut(stream)
        stream.transport_stream.socket.close()
        await until(lambda: caplog.text.count("its certificate is not signed by this server's authority") == 2)
        assert (await site.ask()).status_code == 200


async def test_a_server_that_does_not_relay_takes_no_such_connection(
    authority: Any, fleet: Any, tmp_path: Path
) -> None:
    """It does not even offer its protocols."""
    plain = server_context(authority.issue("head", hosts=("localhost",)))
    files = authority.issue(A)
    for context in (client_contexts(files).give, load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)):
        ours, theirs = trio.testing.memory_stream_pair()
        client = trio.SSLStream(ours, context, server_hostname="localhost")
        server = trio.SSLStream(theirs, plain, server_side=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.do_handshake)
            await client.do_handshake()
        assert client.selected_alpn_protocol() is None


# -- what goes wrong


async def test_without_a_connection_to_the_node_it_is_not_there_yet(site: Site, fleet: Any) -> None:
    async with site.serve(fleet, RelayPace(borrow=0.2)):
        answer = await site.ask()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "gpu-b" in answer.text


async def test_a_request_waits_a_moment_for_a_connection(site: Site, fleet: Any) -> None:
    statuses: list[int] = []

    async def ask() -> None:
        statuses.append((await site.ask()).status_code)

    async with site.serve(fleet, RelayPace(borrow=HANG)), trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(0.1)
        assert statuses == []
        site.give()
        await until(lambda: statuses)
    assert statuses == [200]


async def test_a_node_that_dies_in_the_middle_breaks_the_answer_and_no_other(
    site: Site, fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def die(stream: Stream) -> None:
        await hear(stream)
        await stream.send_all(say(200, 1000) + b"x" * 500)

    async with site.serve(fleet):
        await site.give_by(die)
        with pytest.raises(httpx.TransportError):
            await site.ask(f"{AT}/0/0")
        await until(lambda: "gpu-a took weights, and was cut off: it broke off in the middle" in caplog.text)
        site.give()
        assert (await site.ask(f"{AT}/0/0")).status_code == 200


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        b"HTTP/1.1 200 X\r\n\r\nto the end",
        say(200, MAX_BODY_BYTES + 1),
    ],
)
async def test_an_answer_of_no_length_is_not_handed_on(site: Site, fleet: Any, said: bytes) -> None:
    async def talk(stream: Stream) -> None:
        await hear(stream)
        await stream.send_all(said)
        await trio.sleep_forever()

    async with site.serve(fleet):
        await site.give_by(talk)
        with pytest.raises(httpx.TransportError):
            await site.ask()


@pytest.mark.parametrize("said", [b"nonsense\r\n\r\n", b"", b"HTTP/1.1 200 X\r\n" + b"a: b\r\n" * 10_000])
async def test_who_does_not_answer_as_nodes_do_is_passed_over(site: Site, fleet: Any, said: bytes) -> None:
    async def talk(stream: Stream) -> None:
        await hear(stream)
        if said:
            await stream.send_all(said)

    async with site.serve(fleet, RelayPace(borrow=0.2)):
        await site.give_by(talk)
        assert (await site.ask()).status_code == 503
        # The one that came last is asked first, and then another.
        giving = site.give()
        await until(lambda: giving._open == 2)
        await site.give_by(talk)
        assert (await site.ask()).status_code == 200


@pytest.mark.slow
async def test_a_node_that_says_nothing_is_not_waited_for_for_ever(site: Site, fleet: Any) -> None:
    async def begin(stream: Stream) -> None:
        await hear(stream)
        await stream.send_all(say(200, 1000) + b"x")
        await trio.sleep_forever()

    async def hang(stream: Stream) -> None:
        await trio.sleep_forever()

    async with site.serve(fleet, RelayPace(answer=0.2, silence=0.2, borrow=0.2)):
        await site.give_by(hang)
        answer = await site.ask()
        assert answer.status_code == 503
        await site.give_by(begin)
        with pytest.raises(httpx.TransportError):
            await site.ask()


@pytest.mark.slow
async def test_a_reader_that_takes_nothing_is_cut_and_the_node_is_free_again(
    site: Site, fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with site.serve(fleet, RelayPace(stall=0.3)):
        giving = site.give()
        stream = await site.connect()
        await stream.send_all(f"GET {AT}/0/999 HTTP/1.1\r\nhost: x\r\n{RELAY_FROM}: gpu-b\r\n\r\n".encode())
        await until(lambda: "was cut off: it took nothing for 0.3 s" in caplog.text)
        assert await is_cut(stream)
        stream.transport_stream.socket.close()
        await until(lambda: not giving._busy)
        assert (await site.ask(f"{AT}/0/999")).content == CONTENT


@pytest.mark.slow
async def test_who_goes_before_the_end_leaves_nothing_behind(site: Site, fleet: Any) -> None:
    async with site.serve(fleet):
        giving = site.give()
        for _ in range(3):
            stream = await site.connect()
            await stream.send_all(f"GET {AT}/0/999 HTTP/1.1\r\nhost: x\r\n{RELAY_FROM}: gpu-b\r\n\r\n".encode())
            await stream.receive_some()
            stream.transport_stream.socket.close()
        await until(lambda: not giving._busy)
        assert (await site.ask(f"{AT}/0/999")).content == CONTENT


async def test_a_connection_that_went_while_it_waited_is_not_used(site: Site, fleet: Any) -> None:
    async with site.serve(fleet):
        gone = [await site.dial() for _ in range(3)]
        giving = site.give()
        await until(lambda: giving._open == 2)
        for stream in gone:
            stream.transport_stream.socket.close()
        for _ in range(4):
            assert (await site.ask()).status_code == 200


@pytest.mark.slow
async def test_half_a_request_and_silence_end_a_connection(site: Site, fleet: Any) -> None:
    async with site.serve(fleet, RelayPace(head=0.2, idle=0.4)):
        for said in (b"GET /llmgw", b""):
            stream = await site.connect()
            if said:
                await stream.send_all(said)
            assert await is_cut(stream)
            stream.transport_stream.socket.close()


# -- bounds


@pytest.mark.slow
async def test_a_node_has_so_many_connections_of_a_kind(
    site: Site, fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with site.serve(fleet):
        for open_one, most, kind in (
            (lambda: site.dial(C), MAX_GIVES, "give"),
            (lambda: site.connect(C), MAX_TAKES, "take"),
        ):
            opened = [await open_one() for _ in range(most)]
            await until(lambda most=most: len(site.relay._lines) == most)
            late = await open_one()
            assert await is_cut(late)
            assert f"node gpu-c has {most} connections open already to {kind} weights" in caplog.text
            for stream in (*opened, late):
                stream.transport_stream.socket.close()
            await until(lambda: not site.relay._lines)
        # others are not concerned
        site.give()
        assert (await site.ask()).status_code == 200


async def test_all_nodes_together_have_so_many_connections(
    site: Site, fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with site.serve(fleet, max_lines=3):
        opened = [await site.dial(B), await site.connect(A), await site.connect(C)]
        await until(lambda: len(site.relay._lines) == 3)
        late = await site.connect(C)
        assert await is_cut(late)
        assert "node gpu-c: 3 connections that give or take weights are open already" in caplog.text
        for stream in (*opened, late):
            stream.transport_stream.socket.close()


@pytest.mark.slow
async def test_those_that_wait_for_news_leave_room_for_pieces(site: Site, fleet: Any) -> None:
    statuses: list[int] = []

    async def wait_for_news() -> None:
        statuses.append((await site.ask(f"{AT}?after={len(Shelf().log)}&wait=30&log=whole")).status_code)

    async with site.serve(fleet):
        giving = site.give()
        async with trio.open_nursery() as nursery:
            for _ in range(MAX_NEWS + 3):
                nursery.start_soon(wait_for_news)
            await until(lambda: giving._busy == MAX_NEWS and statuses == [503] * 3)
            assert (await site.ask(f"{AT}/0/1")).content == Shelf().read(0, 1)
            nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_all_together_go_no_faster_than_they_may(site: Site, fleet: Any) -> None:
    rate, took = 8 * MIB, []

    async def take(piece: int) -> None:
        assert (await site.ask(f"{AT}/0/{piece}")).content == Shelf().read(0, piece)

    async with site.serve(fleet, rate=rate):
        site.give()
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for piece in range(8):
                nursery.start_soon(take, piece)
        took.append(trio.current_time() - began)
    # (what has not been used for a quarter of a second is had at once)
    assert took[0] >= 8 * MIB / rate - 0.3


@pytest.mark.slow
async def test_two_that_take_have_their_turns(site: Site, fleet: Any) -> None:
    """A long answer does not hold up a short one that begins after it."""
    ends: list[str] = []

    async def take(name: str, path: str) -> None:
        await site.ask(path)
        ends.append(name)

    async with site.serve(fleet, rate=8 * MIB):
        site.give()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, "long", f"{AT}/0/999")
            await until(lambda: sum(site.counters.by_name["llmgw_relay_bytes_total"].values.values()) > MIB)
            nursery.start_soon(take, "short", f"{AT}/0/1")
    assert ends == ["short", "long"]


# -- ends


@pytest.mark.parametrize("which", [A, B])
async def test_a_certificate_that_is_revoked_ends_what_is_open(
    site: Site, fleet: Any, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with site.serve(fleet, rate=4 * MIB):
        site.give()
        serial = x509.load_pem_x509_certificate(site.issue(which).cert.read_bytes()).serial_number

        async def revoke() -> None:
            await until(lambda: sum(site.counters.by_name["llmgw_relay_bytes_total"].values.values()) > 0)
            site.revoked.write_text(f"{serial:x}\n")

        site.nursery.start_soon(revoke)
        with pytest.raises(httpx.TransportError):
            await site.ask(f"{AT}/0/999")
        await until(lambda: f"the certificate of node {which} (serial {serial:x}) is revoked" in caplog.text)
        # and nothing new begins
        stream = await (site.connect(A) if which == A else site.dial(B))
        assert await is_cut(stream)
        stream.transport_stream.socket.close()


async def test_a_node_that_is_removed_is_let_go_by_all_of_its_connections(site: Site, fleet: Any) -> None:
    async with site.serve(fleet):
        opened = [await site.dial(C), await site.connect(C)]
        other = await site.dial(B)
        await until(lambda: len(site.relay._lines) == 3)
        site.port.let_go(C, "it was removed")
        assert [await is_cut(stream) for stream in opened] == [True, True]
        with trio.move_on_after(0.2) as limit:
            await other.receive_some()
        assert limit.cancelled_caught
        for stream in (*opened, other):
            stream.transport_stream.socket.close()


async def test_a_server_that_stops_lets_nobody_in(site: Site, fleet: Any) -> None:
    async with site.serve(fleet):
        site.port.goaway("the server stops")
        for stream in (await site.dial(B), await site.connect(A)):
            assert await is_cut(stream)
            stream.transport_stream.socket.close()
