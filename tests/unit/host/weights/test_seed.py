"""Giving weights to other nodes, over real TLS: to whom, what, and what becomes of those who behave badly."""

from __future__ import annotations

import logging
import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from llmgw.config.server import Listen
from llmgw.core.node import NodeId
from llmgw.core.weights import FileListed
from llmgw.host.weights.giver import MAX_NEWS, MAX_TRANSFERS, Giver, Pace
from llmgw.host.weights.seed import MAX_OF_ONE_NODE, seed_context, serve_seed
from llmgw.host.weights.shelf import Spoiled
from llmgw.host.weights.strangers import OF_ONE_ADDRESS, SAFE_SECONDS
from llmgw.pki.authority import Authority, certificate_pem, issue_node, issue_server, key_pem, make_authority
from llmgw.reactor.credentials import load_files

KEY, COMMIT = "0123456789abcdef" * 2, "c" * 40
AT = f"/llmgw/weights/{KEY}/{COMMIT}"
ELSE = f"/llmgw/weights/{KEY}/{'d' * 40}"
# More than the buffers of a connection hold.
BIG = 48 * 1024 * 1024
DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Files:
    ca: Path
    cert: Path
    key: Path


class Issuer:
    """An authority and the files of what it issues."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.authority: Authority = make_authority(now=time.time())
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(certificate_pem(self.authority.certificate))

    def issue(self, node: str, *, server: bool = False, days_ago: int = 0, days: int = 30) -> Files:
        """A node's certificate, or a server's; a second one of the same name goes over the first."""
        now = time.time() - days_ago * DAY
        if server:
            issued = issue_server(self.authority, node, (node,), now=now, days=days)
        else:
            issued = issue_node(self.authority, node, now=now, days=days)
        files = Files(ca=self.ca, cert=self._folder / f"{node}.pem", key=self._folder / f"{node}-key.pem")
        files.key.touch(mode=0o600)
        files.key.write_bytes(key_pem(issued.key))
        files.cert.write_bytes(certificate_pem(issued.certificate))
        return files


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "authority")


@dataclass
class Toy:
    """A shelf in memory. ``read`` may be made to wait, or to fail."""

    pieces: dict[tuple[int, int], bytes] = field(default_factory=dict)
    log: list[tuple[int, int, str]] = field(default_factory=list)
    order: str = "first"
    whole: bool = False
    files: tuple[FileListed, ...] = (FileListed(name="m.gguf", size_bytes=BIG, sha256="ab" * 32),)
    gate: threading.Event | None = None
    fault: Exception | None = None
    reading: int = 0

    def put(self, piece: int, data: bytes) -> None:
        self.pieces[0, piece] = data
        self.log.append((0, piece, f"{piece:064x}"))

    def read(self, file: int, piece: int) -> bytes:
        self.reading += 1
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.fault is not None:
            raise self.fault
        return self.pieces[file, piece]


class Node:
    """A node that asks, by its certificate."""

    def __init__(self, address: str, files: Files, *, node: str = "gpu-1") -> None:
        self.address = address
        self.node = node
        self.context = load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
        self.context.hostname_checks_common_name = False
        self.opened: list[trio.SocketStream] = []

    async def ask(self, path: str = AT, method: str = "GET", **more: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.request(method, f"https://{self.address}{path}", extensions=self.as_node, **more)

    @property
    def as_node(self) -> dict[str, str]:
        return {"sni_hostname": self.node}

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(verify=self.context, trust_env=False, timeout=60)

    async def tcp(self) -> trio.SocketStream:
        host, _, port = self.address.rpartition(":")
        self.opened.append(await trio.open_tcp_stream(host, int(port)))
        return self.opened[-1]

    async def connect(self) -> trio.SSLStream[trio.SocketStream]:
        stream = trio.SSLStream(await self.tcp(), self.context, server_hostname=self.node, https_compatible=True)
        await stream.do_handshake()
        return stream


@dataclass
class Seeding:
    """A node ``gpu-1`` that gives weights to ``gpu-2``."""

    issuer: Issuer
    shelf: Toy | None = field(default_factory=Toy)
    members: set[str] = field(default_factory=lambda: {"gpu-2"})
    found: list[tuple[str, str]] = field(default_factory=list)
    fault: Exception | None = None

    def find(self, key: str, commit: str) -> Toy | None:
        self.found.append((key, commit))
        if self.fault is not None:
            raise self.fault
        return self.shelf if (key, commit) == (KEY, COMMIT) else None

    def allowed(self, node: NodeId, key: str) -> bool:
        return node in self.members and key == KEY

    @asynccontextmanager
    async def serve(self, pace: Pace | None = None) -> AsyncIterator[Node]:
        files = self.issuer.issue("gpu-1")
        async with trio.open_nursery() as nursery:

            async def start(*, task_status: trio.TaskStatus[str]) -> None:
                giver = Giver(self.find, self.allowed, pace)
                await serve_seed(Listen(host="127.0.0.1", port=0), files, giver, task_status=task_status)

            with trio.fail_after(120):
                address = await nursery.start(start)
                node = Node(address, self.issuer.issue("gpu-2"))
                try:
                    yield node
                finally:
                    for stream in node.opened:
                        stream.socket.close()
            nursery.cancel_scope.cancel()


@pytest.fixture
def seeding(issuer: Issuer) -> Seeding:
    return Seeding(issuer)


async def wait_until(true: Callable[[], object]) -> None:
    with trio.fail_after(60):
        while True:
            if true():
                return
            await trio.sleep(0.01)


def find_reason(error: BaseException) -> str:
    """What the innermost of a chain of errors says."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error)


def take_all_descriptors() -> list[int]:
    taken: list[int] = []
    while True:
        try:
            taken.append(os.dup(0))
        except OSError:
            return taken


async def read_to_the_end(stream: trio.abc.ReceiveStream) -> bytes:
    """All that comes until the other end is gone, in whatever way."""
    got = b""
    try:
        with trio.fail_after(60):
            while data := await stream.receive_some(65536):
                got += data
    except trio.BrokenResourceError:
        return got
    return got


# What is given


async def test_a_member_is_told_what_is_here_and_given_it(seeding: Seeding) -> None:
    data = os.urandom(3_000_000)
    assert seeding.shelf is not None
    seeding.shelf.put(4, data)
    async with seeding.serve() as node:
        told = await node.ask(f"{AT}?after=0&wait=20")
        assert (told.status_code, told.headers["content-type"]) == (200, "application/json")
        assert told.json() == {
            "files": [{"name": "m.gguf", "size_bytes": BIG, "sha256": "ab" * 32}],
            "news": [[0, 4, f"{4:064x}"]],
            "next": 1,
            "log": "first",
            "whole": False,
        }
        piece = await node.ask(f"{AT}/0/4")
        assert (piece.status_code, piece.headers["content-length"]) == (200, "3000000")
        assert piece.content == data


async def test_what_is_not_here_yet_is_404(seeding: Seeding) -> None:
    async with seeding.serve() as node:
        assert (await node.ask(f"{AT}/0/4")).status_code == 404
        assert (await node.ask(ELSE)).status_code == 404
        seeding.shelf = None
        assert (await node.ask(AT)).status_code == 404


async def test_many_requests_may_follow_on_one_connection_also_at_once(seeding: Seeding) -> None:
    assert seeding.shelf is not None
    seeding.shelf.put(0, b"piece")
    async with seeding.serve() as node:
        async with node.client() as client:
            for _ in range(3):
                answer = await client.get(f"https://{node.address}{AT}/0/0", extensions=node.as_node)
                assert answer.content == b"piece"
                assert "connection" not in answer.headers
        stream = await node.connect()
        get = f"GET {AT}/0/0 HTTP/1.1\r\nhost: x\r\n"
        await stream.send_all(f"{get}\r\n{get}connection: close\r\n\r\n".encode())
        got = await read_to_the_end(stream)
        assert got.count(b"\r\n\r\npiece") == 2


async def test_news_wake_whoever_waits_for_them(seeding: Seeding) -> None:
    shelf = seeding.shelf
    assert shelf is not None
    shelf.put(1, b"one")
    async with seeding.serve() as node, trio.open_nursery() as nursery:
        seeding.found.clear()
        answers = []

        async def wait_for_news() -> None:
            answers.append(await node.ask(f"{AT}?after=1&wait=30&log=first"))

        nursery.start_soon(wait_for_news)
        # it looks again and again
        await wait_until(lambda: len(seeding.found) > 2)
        assert not answers
        shelf.put(2, b"two")
        await wait_until(lambda: answers)
        assert answers[0].json()["news"] == [[0, 2, f"{2:064x}"]]
        assert answers[0].json()["next"] == 2


async def test_a_fetch_that_is_over_while_somebody_waits_for_its_news_is_404(seeding: Seeding) -> None:
    async with seeding.serve() as node, trio.open_nursery() as nursery:
        answers = []

        async def wait_for_news() -> None:
            answers.append(await node.ask(f"{AT}?after=0&wait=30&log=first"))

        nursery.start_soon(wait_for_news)
        await wait_until(lambda: len(seeding.found) > 2)
        seeding.shelf = None
        await wait_until(lambda: answers)
        assert answers[0].status_code == 404


@pytest.mark.slow
async def test_without_news_the_answer_comes_when_it_was_asked_for(seeding: Seeding) -> None:
    async with seeding.serve() as node:
        answer = await node.ask(f"{AT}?after=0&wait=1&log=first")
        assert (answer.json()["news"], answer.json()["next"]) == ([], 0)
        # one who does not know this log is told at once that there is nothing in it
        assert (await node.ask(f"{AT}?after=0&wait=30")).json()["log"] == "first"


async def test_another_log_is_told_from_its_beginning(seeding: Seeding) -> None:
    shelf = seeding.shelf
    assert shelf is not None
    for piece in range(3):
        shelf.put(piece, b"x")
    async with seeding.serve() as node:
        for query in ("after=2&log=earlier", "after=2", "after=9&log=first", "after=-1&log=first", "after=x"):
            answer = (await node.ask(f"{AT}?{query}&wait=0")).json()
            assert (len(answer["news"]), answer["next"]) == (3, 3), query
        assert len((await node.ask(f"{AT}?after=2&log=first")).json()["news"]) == 1
        seeding.shelf = replace(shelf, order="whole", whole=True)
        answer = (await node.ask(f"{AT}?after=3&wait=30&log=first")).json()
        assert (len(answer["news"]), answer["whole"], answer["log"]) == (3, True, "whole")


async def test_news_are_told_in_portions(seeding: Seeding) -> None:
    assert seeding.shelf is not None
    seeding.shelf.log = [(0, piece, "0" * 64) for piece in range(MAX_NEWS + 5)]
    async with seeding.serve() as node:
        first = (await node.ask(AT)).json()
        assert (len(first["news"]), first["next"]) == (MAX_NEWS, MAX_NEWS)
        second = (await node.ask(f"{AT}?after={MAX_NEWS}&log=first")).json()
        assert [piece for _, piece, _ in second["news"]] == list(range(MAX_NEWS, MAX_NEWS + 5))


# To whom


async def test_whoever_does_not_fetch_this_is_given_nothing_and_told_nothing(seeding: Seeding) -> None:
    async with seeding.serve() as node:
        seeding.members.clear()
        for path in (AT, f"{AT}/0/0", ELSE):
            assert (await node.ask(path)).status_code == 403
        assert seeding.found == []


async def test_membership_is_looked_at_with_each_request(seeding: Seeding) -> None:
    assert seeding.shelf is not None
    seeding.shelf.put(0, b"piece")
    async with seeding.serve() as node, node.client() as client:
        url = f"https://{node.address}{AT}/0/0"
        assert (await client.get(url, extensions=node.as_node)).status_code == 200
        seeding.members.clear()
        assert (await client.get(url, extensions=node.as_node)).status_code == 403


@pytest.mark.parametrize("wrong", ["another authority", "none", "expired", "not yet valid", "a server's", "older TLS"])
async def test_a_stranger_is_not_heard(
    seeding: Seeding, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    async with seeding.serve() as node:
        issuer = seeding.issuer
        files = {
            "another authority": lambda: replace(Issuer(tmp_path / "other").issue("gpu-2"), ca=issuer.ca),
            "expired": lambda: issuer.issue("gpu-2", days_ago=90),
            "not yet valid": lambda: issuer.issue("gpu-2", days_ago=-3),
            "a server's": lambda: issuer.issue("gpu-2", server=True),
        }.get(wrong, lambda: issuer.issue("gpu-2"))()
        stranger = Node(node.address, files)
        if wrong in ("none", "older TLS"):
            stranger.context = ssl.create_default_context(cafile=str(issuer.ca))
        if wrong == "older TLS":
            stranger.context.load_cert_chain(files.cert, files.key)
            stranger.context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(httpx.TransportError):
            await stranger.ask()
        assert seeding.found == []
        await wait_until(lambda: "wanted weights, and was cut off: TLS: " in caplog.text)
        # the others don't notice
        assert (await node.ask()).status_code == 200


async def test_a_node_is_believed_by_its_id_whatever_address_was_dialled(seeding: Seeding) -> None:
    async with seeding.serve() as node:
        assert (await node.ask()).status_code == 200
        node.node = "gpu-3"
        with pytest.raises(httpx.ConnectError) as caught:
            await node.ask()
        assert "Hostname mismatch" in find_reason(caught.value)


async def test_a_certificate_that_names_no_node_is_refused(seeding: Seeding, caplog: pytest.LogCaptureFixture) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    files, authority = seeding.issuer.issue("gpu-9"), seeding.issuer.authority
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(authority.certificate.not_valid_before_utc)
        .not_valid_after(authority.certificate.not_valid_after_utc)
        .sign(authority.key, hashes.SHA256())
    )
    files.key.write_bytes(key_pem(key))
    files.cert.write_bytes(certificate_pem(certificate))
    async with seeding.serve() as node:
        with pytest.raises(httpx.TransportError):
            await Node(node.address, files).ask()
        await wait_until(lambda: "has 0 common names that can be read" in caplog.text)


# What is asked


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/metrics",
        "/llmgw/weights/",
        f"/llmgw/weights/{KEY}",
        f"/llmgw/weights/{KEY}/",
        f"/llmgw/weights/{KEY}/..",
        f"/llmgw/weights/{KEY}/%2e%2e",
        f"/llmgw/weights/{KEY}/../{COMMIT}",
        f"/llmgw/weights/..%2f{KEY}/{COMMIT}",
        f"/llmgw/weights/{KEY.upper()}/{COMMIT}",
        f"/llmgw/weights/{KEY}/{COMMIT}.part",
        f"/llmgw/weights/{KEY}/{COMMIT}/",
        f"/llmgw/weights/{KEY}/{COMMIT}/0",
        f"/llmgw/weights/{KEY}/{COMMIT}/0/-1",
        f"/llmgw/weights/{KEY}/{COMMIT}/0/0/",
        f"/llmgw/weights/{KEY}/{COMMIT}/0/.manifest.json",
        f"/llmgw/weights/{KEY}/{COMMIT}/0/1234567",
        f"//llmgw/weights/{KEY}/{COMMIT}",
        f"https://elsewhere{AT}",
        f"{AT}#x",
        "*",
    ],
)
async def test_what_is_not_written_as_we_write_it_is_not_here(seeding: Seeding, target: str) -> None:
    async with seeding.serve() as node:
        stream = await node.connect()
        await stream.send_all(f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert (await read_to_the_end(stream)).startswith(b"HTTP/1.1 404 ")
        assert seeding.found == []


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (f"POST {AT} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", b"405"),
        (f"HEAD {AT} HTTP/1.1\r\nhost: x\r\n\r\n", b"405"),
        (f"DELETE {AT} HTTP/1.1\r\nhost: x\r\n\r\n", b"405"),
        (f"GET {AT} HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc", b"400"),
        (f"GET {AT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"400"),
        ("garbage\r\n\r\n", b"400"),
        (f"GET {AT} HTTP/1.1\r\n\r\n", b"400"),
        (f"GET {AT} HTTP/1.1\r\nhost: x\r\nx: {'y' * 20_000}", b"431"),
        (f"GET {AT}?{'&'.join(['a=b'] * 500)} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"200"),
    ],
)
async def test_odd_requests_are_answered_and_end_their_connection(seeding: Seeding, sent: str, status: bytes) -> None:
    async with seeding.serve() as node:
        stream = await node.connect()
        await stream.send_all(sent.encode())
        got = await read_to_the_end(stream)
        assert got.startswith(b"HTTP/1.1 " + status)
        assert b"connection: close" in got.lower()


# Those who behave badly


async def test_no_more_than_so_many_pieces_are_read_at_a_time(seeding: Seeding) -> None:
    shelf = seeding.shelf
    assert shelf is not None
    shelf.put(0, b"piece")
    shelf.gate = threading.Event()
    statuses: list[int] = []

    async def take(node: Node) -> None:
        statuses.append((await node.ask(f"{AT}/0/0")).status_code)

    async with seeding.serve() as node, trio.open_nursery() as nursery:
        try:
            for _ in range(MAX_TRANSFERS):
                nursery.start_soon(take, node)
            await wait_until(lambda: shelf.reading == MAX_TRANSFERS)
            refused = await node.ask(f"{AT}/0/0")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            # what is said of it takes no place
            assert (await node.ask()).status_code == 200
        finally:
            shelf.gate.set()
        await wait_until(lambda: len(statuses) == MAX_TRANSFERS)
        assert set(statuses) == {200}
        assert (await node.ask(f"{AT}/0/0")).status_code == 200


async def test_a_reader_that_takes_nothing_is_cut_off(seeding: Seeding, caplog: pytest.LogCaptureFixture) -> None:
    assert seeding.shelf is not None
    seeding.shelf.put(0, bytes(BIG))
    async with seeding.serve(Pace(stall=0.3)) as node:
        stream = await node.connect()
        await stream.send_all(f"GET {AT}/0/0 HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        await wait_until(lambda: "it took nothing for 0.3 s" in caplog.text)
        assert len(await read_to_the_end(stream)) < BIG
        seeding.shelf.put(1, b"small")
        assert (await node.ask(f"{AT}/0/1")).content == b"small"


async def test_whoever_goes_in_the_middle_of_a_piece_takes_nobody_along(seeding: Seeding) -> None:
    assert seeding.shelf is not None
    seeding.shelf.put(0, bytes(BIG))
    seeding.shelf.put(1, b"small")
    async with seeding.serve() as node:
        # more often than there are places
        for _ in range(MAX_TRANSFERS + 2):
            stream = await node.connect()
            await stream.send_all(f"GET {AT}/0/0 HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert await stream.receive_some(1000)
            tcp = stream.transport_stream
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            tcp.socket.close()
        assert (await node.ask(f"{AT}/0/1")).content == b"small"


@pytest.mark.parametrize("said", ["", "GET /llmgw"])
async def test_half_a_handshake_and_half_a_head_have_their_time(
    seeding: Seeding, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    pace = Pace(head=0.3) if said else Pace(handshake=0.3)
    async with seeding.serve(pace) as node:
        stream = await node.connect() if said else await node.tcp()
        if said:
            await stream.send_all(said.encode())
        assert await read_to_the_end(stream) == b""
        why = "it sent half a request" if said else "it did not finish the TLS handshake in time"
        await wait_until(lambda: why in caplog.text)


async def test_a_connection_that_asks_nothing_ends(seeding: Seeding, caplog: pytest.LogCaptureFixture) -> None:
    async with seeding.serve(Pace(idle=0.3)) as node:
        assert await read_to_the_end(await node.connect()) == b""
        assert "cut off" not in caplog.text


@pytest.mark.slow
async def test_whoever_holds_connections_open_without_a_certificate_keeps_nobody_out(
    seeding: Seeding, caplog: pytest.LogCaptureFixture
) -> None:
    async with seeding.serve() as node:
        for _ in range(4 * OF_ONE_ADDRESS):
            await (await node.tcp()).send_all(b"\x16\x03\x01")
        await wait_until(lambda: "is turned away" in caplog.text)
        # (told once, and not for each of them)
        assert sum("have not shown whose they are" in each.message for each in caplog.records) == 1
        await trio.sleep(SAFE_SECONDS)
        assert (await node.ask()).status_code == 200
        await wait_until(lambda: "its place was needed" in caplog.text)


@pytest.mark.slow
async def test_one_node_does_not_take_all_connections(seeding: Seeding) -> None:
    async with seeding.serve() as node:
        held = [await node.connect() for _ in range(MAX_OF_ONE_NODE)]
        for stream in held:
            await stream.send_all(f"GET {AT} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert await stream.receive_some(1000)
        with pytest.raises(httpx.TransportError):
            await node.ask()
        seeding.members.add("gpu-3")
        assert (await Node(node.address, seeding.issuer.issue("gpu-3")).ask()).status_code == 200


async def test_a_fault_ends_one_connection(seeding: Seeding, caplog: pytest.LogCaptureFixture) -> None:
    async with seeding.serve() as node:
        seeding.fault = ValueError("odd")
        for _ in range(3):
            with pytest.raises(httpx.TransportError):
                await node.ask()
        seeding.fault = None
        assert (await node.ask()).status_code == 200
        # told once, with what there is to be seen of it
        assert [bool(record.exc_info) for record in caplog.records if record.levelno == logging.WARNING] == [True]


async def test_what_is_spoiled_on_this_disk_is_not_given_and_told_once(
    seeding: Seeding, caplog: pytest.LogCaptureFixture
) -> None:
    assert seeding.shelf is not None
    async with seeding.serve() as node:
        for piece in range(3):
            seeding.shelf.fault = Spoiled(f"m.gguf is not what was fetched (piece {piece})", Path("/cache/m"))
            answer = await node.ask(f"{AT}/0/{piece}")
            assert (answer.status_code, b"m.gguf" in answer.content) == (404, False)
    assert caplog.text.count("m.gguf is not what was fetched") == 1


async def test_what_is_told_of_one_folder_hides_no_other(seeding: Seeding, caplog: pytest.LogCaptureFixture) -> None:
    assert seeding.shelf is not None
    async with seeding.serve() as node:
        for name in ("a.gguf", "b.gguf", "a.gguf"):
            seeding.shelf.fault = Spoiled(f"{name} is spoiled", Path(f"/cache/{name}"))
            await node.ask(f"{AT}/0/0")
    warned = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert warned == ["a.gguf is spoiled", "b.gguf is spoiled"]


async def test_without_descriptors_nobody_comes_in_and_later_everybody_does(
    seeding: Seeding, caplog: pytest.LogCaptureFixture
) -> None:
    async with seeding.serve() as node:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        sock = trio.socket.socket()
        host, _, port = node.address.rpartition(":")
        taken: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
        try:
            taken += take_all_descriptors()
            await sock.connect((host, int(port)))
            await wait_until(lambda: "no node can connect to take weights: Too many open files" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for number in taken:
                os.close(number)
        sock.close()
        assert (await node.ask()).status_code == 200


# Certificates and addresses


async def test_a_renewed_certificate_is_shown_to_the_next_connection(seeding: Seeding) -> None:
    async with seeding.serve() as node:
        old = await node.connect()
        seeding.issuer.issue("gpu-1")
        new = await node.connect()
        assert old.getpeercert()["serialNumber"] != new.getpeercert()["serialNumber"]
        await old.send_all(f"GET {AT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert (await read_to_the_end(old)).startswith(b"HTTP/1.1 200 ")


async def test_an_expired_certificate_is_mended_without_a_restart(seeding: Seeding) -> None:
    async with seeding.serve() as node:
        seeding.issuer.issue("gpu-1", days_ago=90)
        with pytest.raises(httpx.ConnectError) as caught:
            await node.ask()
        assert "certificate has expired" in find_reason(caught.value)
        seeding.issuer.issue("gpu-1")
        assert (await node.ask()).status_code == 200


async def test_a_connection_does_not_outlive_what_it_was_let_in_for(seeding: Seeding) -> None:
    async with seeding.serve(Pace(age=0.0)) as node:
        assert (await node.ask()).headers["connection"] == "close"


def test_a_seed_speaks_the_newest_tls_alone_and_asks_for_a_certificate(issuer: Issuer) -> None:
    context = seed_context(issuer.issue("gpu-1"))
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.verify_mode is ssl.CERT_REQUIRED


async def test_an_address_that_is_taken_is_tried_again(seeding: Seeding, caplog: pytest.LogCaptureFixture) -> None:
    files = seeding.issuer.issue("gpu-1")
    started: list[str] = []

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def start(*, task_status: trio.TaskStatus[str]) -> None:
            giver = Giver(seeding.find, seeding.allowed, Pace(bind=0.05))
            await serve_seed(Listen(host="127.0.0.1", port=port), files, giver, task_status=task_status)

        async def wait_for_it(nursery: trio.Nursery) -> None:
            started.append(await nursery.start(start))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_it, nursery)
            await wait_until(lambda: "no node can take weights at 127.0.0.1" in caplog.text)
            await trio.sleep(0.2)
            assert not started
            taken.close()
            await wait_until(lambda: started)
            nursery.cancel_scope.cancel()
    assert started == [f"127.0.0.1:{port}"]
    # told once
    assert caplog.text.count("no node can take weights at") == 1
