"""Each way that the outside can fail, told so that somebody can do something about it."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from fake_origin import FakeOrigin
from trio.testing import MockClock

from llmgw.host.weights.errors import Broken, FetchFailed, Kind
from llmgw.host.weights.sources import connections
from llmgw.host.weights.sources.asker import Asker
from llmgw.host.weights.sources.connections import make_tls
from llmgw.host.weights.sources.redirects import Proxies
from llmgw.host.weights.sources.web import KEPT_BYTES, Web, read_body
from llmgw.pki.authority import certificate_pem, issue_server, key_pem, make_authority

AUTHORITY = make_authority(now=time.time())
DAY = 86400


@pytest.fixture
def ca_file(tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    path.write_bytes(certificate_pem(AUTHORITY.certificate))
    return str(path)


def make_context(tmp_path: Path, host: str = "127.0.0.1", *, now: float | None = None) -> ssl.SSLContext:
    issued = issue_server(AUTHORITY, "origin", (host,), now=time.time() if now is None else now, days=30)
    (tmp_path / "cert.pem").write_bytes(certificate_pem(issued.certificate))
    (tmp_path / "key.pem").write_bytes(key_pem(issued.key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return context


@contextlib.contextmanager
def serve_tls(tmp_path: Path, host: str = "127.0.0.1", *, now: float | None = None) -> Iterator[FakeOrigin]:
    (tmp_path / "x.gguf").write_bytes(b"weights")
    with FakeOrigin(tmp_path, tls=make_context(tmp_path, host, now=now)) as origin:
        yield origin


@contextlib.asynccontextmanager
async def opened(ca_file: str | None = None, **more: Any) -> AsyncIterator[Web]:
    options = {"connect_seconds": 60.0, "read_seconds": 60.0, "user_agent": "llmgw/test", **more}
    web = Web(make_tls(ca_file), options.pop("proxies", Proxies()), **options)
    try:
        yield web
    finally:
        await web.close()


@contextlib.asynccontextmanager
async def serve(answer: Callable[[trio.SocketStream], Awaitable[None]]) -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        yield int(listener.socket.getsockname()[1])
        nursery.cancel_scope.cancel()


async def get(web: Web, url: str) -> bytes:
    with trio.fail_after(60):
        async with web.get(httpx.URL(url), {}) as response, read_body(response) as chunks:
            return b"".join([chunk async for chunk in chunks])


async def failing(web: Web, url: str) -> FetchFailed:
    with pytest.raises(FetchFailed) as raised:
        await get(web, url)
    assert "secret" not in raised.value.message
    return raised.value


async def broken(web: Web, url: str) -> Broken:
    with pytest.raises(Broken) as raised:
        await get(web, url)
    assert "secret" not in f"{raised.value.reason}{raised.value.remedy}"
    assert raised.value.remedy
    return raised.value


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_a_certificate_of_an_authority_that_is_named_is_believed(tmp_path: Path, ca_file: str) -> None:
    with serve_tls(tmp_path) as origin:
        async with opened(ca_file) as web:
            assert await get(web, f"{origin.url}/x.gguf") == b"weights"
    assert origin.requests[0].headers["user-agent"] == "llmgw/test"


async def test_a_large_body_comes_whole_through_tls_and_the_connection_is_kept(tmp_path: Path, ca_file: str) -> None:
    data = os.urandom(3_000_000)
    with serve_tls(tmp_path) as origin:
        (tmp_path / "large.gguf").write_bytes(data)
        async with opened(ca_file) as web:
            for _ in range(3):
                assert await get(web, f"{origin.url}/large.gguf") == data
            origin.fault("large.gguf", short_after=1_000_000)
            assert "ended" in (await broken(web, f"{origin.url}/large.gguf")).reason
    assert origin.connections == 1


@pytest.mark.parametrize("tls", [False, True])
async def test_a_long_body_comes_whole_and_its_end_before_its_time_is_told(
    tmp_path: Path, ca_file: str, tls: bool
) -> None:
    data = os.urandom(KEPT_BYTES + 3_000_001)
    with serve_tls(tmp_path) if tls else FakeOrigin(tmp_path) as origin:
        (tmp_path / "long.gguf").write_bytes(data)
        async with opened(ca_file) as web:
            assert await get(web, f"{origin.url}/long.gguf") == data
            origin.fault("long.gguf", short_after=5_000_000)
            assert "ended its answer early" in (await broken(web, f"{origin.url}/long.gguf")).reason
            origin.clear()
            # (without a length it is framed in another way)
            origin.fault("long.gguf", no_length=True)
            assert await get(web, f"{origin.url}/long.gguf") == data


async def test_a_long_body_that_stops_coming_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "long.gguf").write_bytes(bytes(2 * KEPT_BYTES))
    with FakeOrigin(tmp_path) as origin:
        origin.fault("long.gguf", stall_after=5_000_000)
        async with opened(read_seconds=0.5) as web:
            assert "has sent nothing for 0.5 s" in (await broken(web, f"{origin.url}/long.gguf")).reason


async def test_of_a_long_body_nothing_is_taken_beyond_its_end() -> None:
    data = os.urandom(KEPT_BYTES + 1)

    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data + b"more"))

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        async with opened() as web:
            assert await get(web, f"http://127.0.0.1:{listener.socket.getsockname()[1]}/") == data
        nursery.cancel_scope.cancel()


async def test_an_authority_that_nobody_knows_is_told_with_where_to_name_it(tmp_path: Path) -> None:
    with serve_tls(tmp_path) as origin:
        async with opened() as web:
            error = await failing(web, f"{origin.url}/x.gguf?secret")
    assert error.kind is Kind.TLS
    assert "127.0.0.1's certificate is not valid: unable to get local issuer certificate" in error.message
    assert "SSL_CERT_FILE" in (error.remedy or "")


async def test_a_certificate_for_another_host_is_told(tmp_path: Path, ca_file: str) -> None:
    with serve_tls(tmp_path, "models.internal") as origin:
        async with opened(ca_file) as web:
            error = await failing(web, f"{origin.url}/x.gguf")
    assert (error.kind, "IP address mismatch" in error.message) == (Kind.TLS, True)
    assert "the name that its certificate is for" in (error.remedy or "")


async def test_a_certificate_whose_time_is_over_is_told(tmp_path: Path, ca_file: str) -> None:
    with serve_tls(tmp_path, now=time.time() - 60 * DAY) as origin:
        async with opened(ca_file) as web:
            error = await failing(web, f"{origin.url}/x.gguf")
    assert (error.kind, "certificate has expired" in error.message) == (Kind.TLS, True)
    assert "clock" in (error.remedy or "")


async def test_a_server_without_tls_is_told(tmp_path: Path) -> None:
    with FakeOrigin(tmp_path) as origin:
        async with opened() as web:
            error = await failing(web, f"https://127.0.0.1:{origin.port}/x")
    assert (error.kind, "no common TLS" in error.message) == (Kind.TLS, True)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_server_that_wants_a_certificate_of_ours_is_told(
    tmp_path: Path, ca_file: str, version: ssl.TLSVersion
) -> None:
    context = make_context(tmp_path)
    context.verify_mode, context.maximum_version = ssl.CERT_REQUIRED, version

    async def answer(stream: trio.SocketStream) -> None:
        came, told = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(came, told, server_side=True)
        while data := await stream.receive_some():
            came.write(data)
            with contextlib.suppress(ssl.SSLError):
                tls.do_handshake()
            await stream.send_all(told.read())

    async with serve(answer) as port, opened(ca_file) as web:
        error = await failing(web, f"https://127.0.0.1:{port}/x")
    assert (error.kind, "alert" in error.message) == (Kind.TLS, True)


@pytest.mark.parametrize("size", [3_000_000, KEPT_BYTES + 3_000_000])
async def test_what_was_changed_on_its_way_is_a_connection_that_broke(tmp_path: Path, ca_file: str, size: int) -> None:
    with serve_tls(tmp_path) as origin:
        (tmp_path / "large.gguf").write_bytes(bytes(size))

        async def relay(near: trio.SocketStream) -> None:
            far = await trio.open_tcp_stream("127.0.0.1", origin.port)

            async def answer() -> None:
                came = 0
                async for data in far:
                    is_late = came <= size - 500_000 < came + len(data)
                    came += len(data)
                    await near.send_all(data[:-1] + bytes([data[-1] ^ is_late]))

            async with far, trio.open_nursery() as nursery:
                nursery.start_soon(answer)
                async for data in near:
                    await far.send_all(data)
                nursery.cancel_scope.cancel()

        async with serve(relay) as port, opened(ca_file) as web:
            error = await broken(web, f"https://127.0.0.1:{port}/large.gguf")
    assert "the connection to 127.0.0.1 broke: " in error.reason


DRIPS = [(b"HTTP/1.1 200 OK\r\nx: ", b"y"), (b"", b"HTTP/1.1 102 Processing\r\n\r\n")]


@pytest.mark.parametrize(("first", "more"), DRIPS)
async def test_an_answer_that_never_begins_is_not_waited_for(
    first: bytes, more: bytes, autojump_clock: MockClock
) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(first)
        with contextlib.suppress(trio.BrokenResourceError):
            while True:
                await stream.send_all(more)
                await trio.sleep(5)

    async with serve(answer) as port, opened(read_seconds=30.0) as web:
        with pytest.raises(Broken, match=r"^127\.0\.0\.1 has sent no whole answer for 90 s") as raised:
            async with web.get(httpx.URL(f"http://127.0.0.1:{port}/?secret"), {}):
                pass
    assert raised.value.remedy
    assert trio.current_time() == pytest.approx(90, abs=10)


async def test_whoever_is_told_to_wait_for_a_minute_does(autojump_clock: MockClock) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        for _ in range(12):
            await stream.send_all(b"HTTP/1.1 102 Processing\r\n\r\n")
            await trio.sleep(5)
        await stream.send_all(b"HTTP/1.1 204 Here\r\n\r\n")

    async with serve(answer) as port, opened(read_seconds=30.0) as web:
        async with web.get(httpx.URL(f"http://127.0.0.1:{port}/"), {}) as response:
            assert response.status_code == 204
        assert trio.current_time() >= 60


async def test_the_wait_for_a_connection_that_others_hold_is_not_the_servers(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 1)

    async def answer(stream: trio.SocketStream) -> None:
        async for _ in stream:
            await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")

    async with serve(answer) as port, opened(read_seconds=30.0) as web:
        url = httpx.URL(f"http://127.0.0.1:{port}/")

        async def hold() -> None:
            async with web.get(url, {}):
                await trio.sleep(1000)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            await trio.sleep(1)
            async with web.get(url, {}) as response:
                assert response.status_code == 200
        assert trio.current_time() >= 1000


async def test_a_name_that_nobody_has_is_told() -> None:
    async with opened() as web:
        with pytest.raises((FetchFailed, Broken)) as raised:
            await get(web, "https://nobody.invalid/x?secret")
    error = raised.value if isinstance(raised.value, FetchFailed) else raised.value.give_up()
    assert (error.kind, "nobody.invalid" in error.message) == (Kind.DNS, True)


async def test_a_port_where_nobody_listens_may_be_tried_again(closed_port: int) -> None:
    async with opened() as web:
        error = await broken(web, f"http://127.0.0.1:{closed_port}/x?secret")
    assert f"nobody listens on port {closed_port} of 127.0.0.1" in error.reason
    failure = error.give_up()
    assert failure.kind is Kind.UNREACHABLE
    way = (
        f"see whether curl -I http://127.0.0.1:{closed_port} answers; if only a proxy leads out, name it as HTTPS_PROXY"
    )
    assert failure.remedy == f"{way} in the agent's environment"


async def test_a_server_that_takes_no_call_is_not_waited_for(tmp_path: Path) -> None:
    # Its queue is full: a further call is neither taken nor turned away.
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        async with opened(connect_seconds=0.1) as web:
            error = await broken(web, f"http://127.0.0.1:{listener.getsockname()[1]}/x")
    assert "does not answer on port" in error.reason


async def test_what_is_no_http_is_told(tmp_path: Path) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"SSH-2.0-OpenSSH_9.2\r\n")

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        async with opened() as web:
            error = await broken(web, f"http://127.0.0.1:{listener.socket.getsockname()[1]}/x")
        nursery.cancel_scope.cancel()
    assert "does not speak HTTP" in error.reason


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"407 Proxy Authentication Required", "wants a name and password"),
        (b"403 Forbidden", "does not let us through to models.internal"),
        (b"502 Bad Gateway", "can't reach models.internal"),
    ],
)
async def test_a_proxy_that_refuses_is_told_apart_from_the_host(answer: bytes, words: str) -> None:
    async def refuse(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 " + answer + b"\r\ncontent-length: 0\r\n\r\n")

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, refuse, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        async with opened(proxies=Proxies(https=f"http://me:secret@127.0.0.1:{port}")) as web:
            with pytest.raises((FetchFailed, Broken), match=f"the proxy 127.0.0.1 {words}") as raised:
                await get(web, "https://models.internal/x")
        nursery.cancel_scope.cancel()
    assert "HTTPS_PROXY" in (raised.value.remedy or "")
    assert "secret" not in str(raised.value)


async def test_what_to_do_names_the_environment_of_whoever_asks(tmp_path: Path, closed_port: int) -> None:
    asker = Asker(environment="this command's environment", file=None)
    with serve_tls(tmp_path) as origin:
        async with opened(asker=asker, proxies=Proxies(http=f"http://p.invalid:{closed_port}")) as web:
            errors = [
                await failing(web, f"{origin.url}/x.gguf"),
                (await broken(web, f"http://127.0.0.1:{closed_port}/x")).give_up(),
            ]
    for error in errors:
        assert (error.remedy or "").endswith("in this command's environment")


async def test_a_proxy_where_nobody_listens_is_named(closed_port: int) -> None:
    async with opened(proxies=Proxies(https=f"http://me:secret@127.0.0.1:{closed_port}")) as web:
        error = await broken(web, "https://models.internal/x")
    assert f"nobody listens on port {closed_port} of the proxy 127.0.0.1" in error.reason
