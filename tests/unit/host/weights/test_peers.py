"""Against real sockets with real certificates; the other end answers whatever the test wants."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from fetchers import Files
from trio.testing import MockClock, wait_all_tasks_blocked

from llmgw.config.agent import ServerAddress
from llmgw.core.asked import Take
from llmgw.core.node import NodeId
from llmgw.core.weights import RELAY, FileListed, Member
from llmgw.host.weights.peers import (
    IDLE_SECONDS,
    SILENT_SECONDS,
    NotNow,
    PeerGone,
    Peers,
    PieceMissing,
    Told,
    open_peers,
)
from llmgw.host.weights.seed import seed_context
from llmgw.pki.authority import Authority, certificate_pem, issue_node, key_pem, make_authority
from llmgw.reactor.credentials import load_files

Answer = Callable[[str], tuple[int, dict[str, str], bytes]]
Serve = Callable[..., Awaitable[Member]]

KEY, COMMIT = "k" * 32, "c" * 40
DIGEST = "0123456789abcdef" * 4


def issue(folder: Path, authority: Authority, name: str) -> Files:
    issued = issue_node(authority, name, now=time.time())
    files = Files(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}-key.pem")
    files.ca.write_bytes(certificate_pem(authority.certificate))
    files.cert.write_bytes(certificate_pem(issued.certificate))
    files.key.touch(mode=0o600)
    files.key.write_bytes(key_pem(issued.key))
    return files


@pytest.fixture
def authority() -> Authority:
    return make_authority(now=time.time())


@pytest.fixture
async def peers(tmp_path: Path, authority: Authority) -> AsyncIterator[Peers]:
    context = load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), issue(tmp_path, authority, "me"))
    async with open_peers(NodeId("me"), lambda: context) as opened:
        yield opened


@asynccontextmanager
async def serve(files: Files, answer: Answer, heads: list[str] | None = None) -> AsyncIterator[str]:
    """A node with this certificate, which gives one answer per connection; ``heads`` are those of what it was asked."""

    async def talk(tcp: trio.SocketStream) -> None:
        stream = trio.SSLStream(tcp, seed_context(files), server_side=True, https_compatible=True)
        try:
            await stream.do_handshake()
            heard = b""
            while b"\r\n\r\n" not in heard:
                heard += await stream.receive_some()
            if heads is not None:
                heads.append(heard.decode())
            status, headers, body = answer(heard.split()[1].decode())
            told = {"content-length": str(len(body)), "connection": "close", **headers}
            head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
            await stream.send_all(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body)
            await stream.aclose()
        except trio.BrokenResourceError:
            pass

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, talk, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


def take_from(seed: str, node: str = "a") -> Take:
    return Take(node=NodeId(node), seed=seed, file=2, piece=7, expected=DIGEST)


async def ignore(count: int) -> None: ...


async def test_what_a_node_has_is_heard_from_where_it_was_heard_last(
    tmp_path: Path, authority: Authority, peers: Peers
) -> None:
    asked = []

    def answer(target: str) -> tuple[int, dict[str, str], bytes]:
        asked.append(target)
        files = [{"name": "f", "size_bytes": 3, "sha256": None}]
        told = {"files": files, "news": [[0, 1, DIGEST]], "next": 5, "whole": True, "log": "w1", "more": 1}
        return 200, {}, json.dumps(told).encode()

    async with serve(issue(tmp_path, authority, "a"), answer) as seed:
        member = Member(node=NodeId("a"), seed=seed)
        told = await peers.hear(member, KEY, COMMIT, since=None, wait_seconds=5)
        again = await peers.hear(member, KEY, COMMIT, since=told, wait_seconds=0)
    file = FileListed(name="f", size_bytes=3)
    assert told == again == Told(files=(file,), news=((0, 1, DIGEST),), next=5, whole=True, log="w1")
    assert asked == [
        f"/llmgw/weights/{KEY}/{COMMIT}?after=0&wait=5",
        f"/llmgw/weights/{KEY}/{COMMIT}?after=5&wait=0&log=w1",
    ]


async def test_a_piece_fills_the_buffer(tmp_path: Path, authority: Authority, peers: Peers) -> None:
    asked, counts, into = [], [], bytearray(300_000)
    content = bytes(range(250)) * 1200

    def answer(target: str) -> tuple[int, dict[str, str], bytes]:
        asked.append(target)
        return 200, {}, content

    async def come(count: int) -> None:
        counts.append(count)

    async with serve(issue(tmp_path, authority, "a"), answer) as seed:
        await peers.take(take_from(seed), KEY, COMMIT, into, come)
    assert into == content
    assert sum(counts) == len(content)
    assert asked == [f"/llmgw/weights/{KEY}/{COMMIT}/2/7"]


@pytest.mark.parametrize("status", [403, 404, 503])
async def test_a_node_that_does_not_know_us_yet_may_do_so_soon(
    tmp_path: Path, authority: Authority, peers: Peers, status: int
) -> None:
    async with serve(issue(tmp_path, authority, "a"), lambda _: (status, {}, b"no\n")) as seed:
        with pytest.raises(NotNow, match=str(status)):
            await peers.hear(Member(node=NodeId("a"), seed=seed), KEY, COMMIT, since=None, wait_seconds=0)


@pytest.mark.parametrize(
    ("status", "error"), [(403, NotNow), (503, NotNow), (404, PieceMissing), (500, PeerGone), (302, PeerGone)]
)
async def test_a_piece_that_is_not_given_is_refused_in_one_of_three_ways(
    tmp_path: Path, authority: Authority, peers: Peers, status: int, error: type[Exception]
) -> None:
    async with serve(issue(tmp_path, authority, "a"), lambda _: (status, {"location": "https://x/"}, b"")) as seed:
        with pytest.raises(error):
            await peers.take(take_from(seed), KEY, COMMIT, bytearray(10), ignore)


@pytest.mark.parametrize(
    ("headers", "body"),
    [({}, b"123"), ({}, b"12345678901"), ({"content-length": "10"}, b"123"), ({"content-length": "x"}, b"1234567890")],
)
async def test_a_piece_of_another_length_is_none(
    tmp_path: Path, authority: Authority, peers: Peers, headers: dict[str, str], body: bytes
) -> None:
    into = bytearray(10)
    async with serve(issue(tmp_path, authority, "a"), lambda _: (200, headers, body)) as seed:
        with pytest.raises(PeerGone):
            await peers.take(take_from(seed), KEY, COMMIT, into, ignore)
    assert len(into) == 10


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"news": 3}', b'{"news": [[0, 1, "abc"]]}', b'{"news": [[0, "1", "abc"]]}', b'{"next": "x"}'],
)
async def test_what_a_node_tells_and_nobody_can_read_is_the_end_of_it(
    tmp_path: Path, authority: Authority, peers: Peers, body: bytes
) -> None:
    async with serve(issue(tmp_path, authority, "a"), lambda _: (200, {}, body)) as seed:
        with pytest.raises(PeerGone):
            await peers.hear(Member(node=NodeId("a"), seed=seed), KEY, COMMIT, since=None, wait_seconds=0)


async def test_another_node_at_that_address_is_not_believed(tmp_path: Path, authority: Authority, peers: Peers) -> None:
    asked = []

    def answer(target: str) -> tuple[int, dict[str, str], bytes]:
        asked.append(target)
        return 200, {}, bytes(10)

    async with serve(issue(tmp_path, authority, "b"), answer) as seed:
        with pytest.raises(PeerGone, match="certificate"):
            await peers.take(take_from(seed, "a"), KEY, COMMIT, bytearray(10), ignore)
        await peers.take(take_from(seed, "b"), KEY, COMMIT, bytearray(10), ignore)
    assert len(asked) == 1


async def test_a_stranger_to_the_cluster_is_not_believed(tmp_path: Path, peers: Peers) -> None:
    other = tmp_path / "other"
    other.mkdir()
    files = issue(other, make_authority(now=time.time()), "a")
    async with serve(files, lambda _: (200, {}, bytes(10))) as seed:
        with pytest.raises(PeerGone):
            await peers.take(take_from(seed), KEY, COMMIT, bytearray(10), ignore)


@pytest.mark.parametrize(
    "seed", ["127.0.0.1:1", "127.0.0.1:99999", "", "[::1", "host name:3", "a..b:1", f"{'a' * 90}:1"]
)
async def test_where_nobody_listens_nobody_is(peers: Peers, seed: str) -> None:
    with pytest.raises(PeerGone):
        await peers.take(take_from(seed), KEY, COMMIT, bytearray(10), ignore)


async def test_a_connection_that_is_given_up_while_it_begins_is_closed(peers: Peers) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, trio.open_nursery() as nursery:
        take = take_from(f"127.0.0.1:{listener.socket.getsockname()[1]}")
        nursery.start_soon(peers.take, take, KEY, COMMIT, bytearray(10), ignore)
        async with await listener.accept() as stream:
            assert await stream.receive_some() != b""
            nursery.cancel_scope.cancel()
            with trio.fail_after(30, shield=True):
                assert await stream.receive_some() == b""


async def test_a_renewed_certificate_is_shown_from_then_on(tmp_path: Path, authority: Authority) -> None:
    shown = []
    contexts = [
        load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), issue(tmp_path, authority, name)) for name in ("one", "two")
    ]
    files = issue(tmp_path, authority, "a")

    def answer(target: str) -> tuple[int, dict[str, str], bytes]:
        shown.append(target)
        return 200, {}, bytes(10)

    async with (
        serve(files, answer) as seed,
        open_peers(NodeId("me"), lambda: contexts[len(shown)]) as peers,
    ):
        await peers.take(take_from(seed), KEY, COMMIT, bytearray(10), ignore)
        await peers.take(take_from(seed), KEY, COMMIT, bytearray(10), ignore)
    assert len(shown) == 2


async def test_connections_that_nobody_uses_are_closed_and_made_anew(
    tmp_path: Path, authority: Authority, peers: Peers, mock_clock: MockClock
) -> None:
    opened, closed = [], []

    def talk_as(files: Files) -> Callable[[trio.SocketStream], Awaitable[None]]:
        async def talk(tcp: trio.SocketStream) -> None:
            opened.append(tcp)
            stream = trio.SSLStream(tcp, seed_context(files), server_side=True, https_compatible=True)
            while heard := await stream.receive_some():
                assert heard.endswith(b"\r\n\r\n")
                await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            closed.append(tcp)

        return talk

    async def hear(member: Member) -> None:
        assert await peers.hear(member, KEY, COMMIT, since=None, wait_seconds=0) == Told()

    async with trio.open_nursery() as nursery:
        members = []
        for name in ("a", "b", "c"):
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, talk_as(issue(tmp_path, authority, name)), [listener])
            seed = f"127.0.0.1:{listener.socket.getsockname()[1]}"
            members.append(Member(node=NodeId(name), seed=seed))
        for turn in (1, 2):
            async with trio.open_nursery() as asking:
                for member in members:
                    asking.start_soon(hear, member)
            assert len(opened) == 3 * turn
            async with trio.open_nursery() as tending:
                # (where two are at it, none is closed by both)
                tending.start_soon(peers.leave_idle)
                tending.start_soon(peers.leave_idle)
                # (what passes is told by sockets)
                while len(closed) < 3 * turn:
                    await wait_all_tasks_blocked(0.001)
                    mock_clock.jump(IDLE_SECONDS / 2)
                tending.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


async def test_a_node_that_sends_a_few_bytes_now_and_then_is_gone(
    tmp_path: Path, authority: Authority, peers: Peers, mock_clock: MockClock
) -> None:
    files = issue(tmp_path, authority, "a")
    come: list[int] = []

    async def count(more: int) -> None:
        come.append(more)

    async def drip(tcp: trio.SocketStream) -> None:
        stream = trio.SSLStream(tcp, seed_context(files), server_side=True, https_compatible=True)
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            for number in range(1, 100):
                await stream.send_all(b"0123456789")
                # (what passes is told by sockets)
                while len(come) < number < 3:
                    await wait_all_tasks_blocked(0.001)
                await wait_all_tasks_blocked(0.001)
                mock_clock.jump(SILENT_SECONDS * 0.6)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, drip, [listener])
        take = take_from(f"127.0.0.1:{listener.socket.getsockname()[1]}")
        with pytest.raises(PeerGone, match="it has sent 30 bytes in 12 s"):
            await peers.take(take, KEY, COMMIT, bytearray(1000), count)
        nursery.cancel_scope.cancel()


async def test_without_a_certificate_nobody_is_asked() -> None:
    async with open_peers(NodeId("me"), None) as peers:
        assert not peers.can_ask
        with pytest.raises(PeerGone):
            await peers.take(take_from("127.0.0.1:1"), KEY, COMMIT, bytearray(10), ignore)


async def test_who_can_not_be_reached_is_asked_by_the_server(tmp_path: Path, authority: Authority) -> None:
    heads: list[str] = []
    context = load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), issue(tmp_path, authority, "me"))
    into = bytearray(10)
    # It is the server that proves itself, and not the node.
    async with serve(issue(tmp_path, authority, "localhost"), lambda _: (200, {}, b"0123456789"), heads) as at:
        server = ServerAddress(host="localhost", port=int(at.rpartition(":")[2]))
        async with open_peers(NodeId("me"), lambda: context, server) as peers:
            await peers.take(take_from(RELAY), KEY, COMMIT, into, ignore)
            with pytest.raises(PeerGone, match="Hostname mismatch"):
                await peers.take(take_from(at), KEY, COMMIT, into, ignore)
    assert into == b"0123456789"
    assert heads[0].startswith(f"GET /llmgw/weights/{KEY}/{COMMIT}/2/7 HTTP/1.1\r\n")
    assert "\r\nx-llmgw-from: a\r\n" in heads[0]


@pytest.fixture
def relayed(tmp_path: Path, authority: Authority) -> Callable[[str], Peers]:
    context = load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), issue(tmp_path, authority, "me"))
    return lambda at: Peers(
        NodeId("me"), lambda: context, ServerAddress(host="localhost", port=int(at.rpartition(":")[2]))
    )


async def test_a_server_that_is_away_is_no_fault_of_the_node(relayed: Callable[[str], Peers]) -> None:
    peers = relayed("127.0.0.1:1")
    with pytest.raises(NotNow, match=r"by way of the server: \[Errno \d+\]"):
        await peers.take(take_from(RELAY), KEY, COMMIT, bytearray(10), ignore)
    with pytest.raises(NotNow, match="by way of the server"):
        await peers.hear(Member(node=NodeId("a"), seed=RELAY), KEY, COMMIT, since=None, wait_seconds=0)
    with pytest.raises(PeerGone):
        await peers.take(take_from("127.0.0.1:1"), KEY, COMMIT, bytearray(10), ignore)
    await peers.close()


async def test_a_server_that_ends_in_the_middle_is_no_fault_of_the_node(
    tmp_path: Path, authority: Authority, relayed: Callable[[str], Peers]
) -> None:
    answers = [(200, {"content-length": "10"}, b"0123"), (200, {"content-length": "10"}, b"0123")]
    async with serve(issue(tmp_path, authority, "localhost"), lambda _: answers.pop()) as at:
        peers = relayed(at)
        with pytest.raises(NotNow, match="without sending complete message body") as caught:
            await peers.take(take_from(RELAY), KEY, COMMIT, bytearray(10), ignore)
        assert caught.value.silent_seconds == 0.0
        with pytest.raises(PeerGone):
            await peers.take(take_from(at, "localhost"), KEY, COMMIT, bytearray(10), ignore)
        await peers.close()


async def test_a_server_or_node_behind_it_that_hangs_was_silent_for_so_long(
    tmp_path: Path, authority: Authority, relayed: Callable[[str], Peers], mock_clock: MockClock
) -> None:
    files = issue(tmp_path, authority, "localhost")

    async def hang(tcp: trio.SocketStream) -> None:
        stream = trio.SSLStream(tcp, seed_context(files), server_side=True, https_compatible=True)
        await stream.receive_some()
        await wait_all_tasks_blocked(0.01)
        mock_clock.jump(SILENT_SECONDS + 1)
        await trio.sleep_forever()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, hang, [listener])
        peers = relayed(f"127.0.0.1:{listener.socket.getsockname()[1]}")
        with pytest.raises(NotNow) as caught:
            await peers.take(take_from(RELAY), KEY, COMMIT, bytearray(10), ignore)
        assert caught.value.silent_seconds == SILENT_SECONDS
        await peers.close()
        nursery.cancel_scope.cancel()


async def test_what_a_node_says_by_way_of_the_server_is_its_own_fault(
    tmp_path: Path, authority: Authority, relayed: Callable[[str], Peers]
) -> None:
    async with serve(issue(tmp_path, authority, "localhost"), lambda _: (200, {}, b"01234")) as at:
        peers = relayed(at)
        with pytest.raises(PeerGone, match="5 bytes long"):
            await peers.take(take_from(RELAY), KEY, COMMIT, bytearray(10), ignore)
        await peers.close()


async def test_without_a_server_nobody_is_asked_by_it(peers: Peers) -> None:
    with pytest.raises(PeerGone, match="no server"):
        await peers.take(take_from(RELAY), KEY, COMMIT, bytearray(10), ignore)
