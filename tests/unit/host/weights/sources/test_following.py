"""Who is asked, in which order, and what is remembered of it."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from fake_origin import FakeOrigin
from trio.testing import MockClock

from llmgw.host.weights.errors import Broken, FetchFailed, Kind
from llmgw.host.weights.sources import following
from llmgw.host.weights.sources.following import Following
from llmgw.host.weights.sources.redirects import Proxies
from llmgw.host.weights.sources.web import Web


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeOrigin]:
    for name in ("x", "y", "z"):
        (tmp_path / name).write_text(name)
    with FakeOrigin(tmp_path) as found:
        yield found


@pytest.fixture
async def asking(server: FakeOrigin) -> Any:
    web = Web(ssl.create_default_context(), Proxies(), connect_seconds=60, read_seconds=60, user_agent="test")
    yield Following(web, endpoint=httpx.URL(server.url), token="t", allow_hosts=(), proxies=Proxies(), wait_seconds=60)
    await web.close()


async def ask(asking: Following, url: str) -> int:
    with trio.fail_after(60):
        async with asking.ask(httpx.URL(url), {}, keep=True) as answer:
            await answer.response.aread()
            return answer.response.status_code


def paths(server: FakeOrigin) -> list[str]:
    found = [seen.path for seen in server.requests]
    server.forget()
    return found


async def test_where_an_address_has_led_is_asked_at_once(server: FakeOrigin, asking: Following) -> None:
    server.fault("x", redirect="/y")
    assert await ask(asking, f"{server.url}/x") == 200
    assert paths(server) == ["/x", "/y"]
    assert await ask(asking, f"{server.url}/x") == 200
    assert paths(server) == ["/y"]


async def test_a_redirect_with_a_body_is_followed_too(server: FakeOrigin, asking: Following) -> None:
    for status in (301, 303, 307, 308):
        server.fault("x", status=status, body="moved", headers={"location": "/y"}, times=1)
        async with asking.ask(httpx.URL(f"{server.url}/x"), {}) as answer:
            assert (answer.url.path, await answer.response.aread()) == ("/y", b"y")


async def test_the_body_of_a_redirect_is_not_waited_for(asking: Following, autojump_clock: MockClock) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        if b"/x" not in await stream.receive_some():
            await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        await stream.send_all(b"HTTP/1.1 302 Found\r\nlocation: /y\r\ncontent-length: 60000\r\n\r\n")
        with contextlib.suppress(trio.BrokenResourceError):
            while True:
                await stream.send_all(b"x")
                await trio.sleep(0.5)

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        assert await ask(asking, f"http://127.0.0.1:{listener.socket.getsockname()[1]}/x") == 200
        nursery.cancel_scope.cancel()


async def test_a_redirect_that_says_not_where_is_told_with_its_path(server: FakeOrigin, asking: Following) -> None:
    for status in (301, 302, 303, 307, 308):
        server.fault("x", status=status, times=1)
        with pytest.raises(FetchFailed, match=rf"^127\.0\.0\.1 answers {status} for /x, .*no Location") as raised:
            await ask(asking, f"{server.url}/x?secret")
        assert raised.value.kind is Kind.UNSUPPORTED
        assert "curl -I" in str(raised.value.remedy)


async def test_what_broke_is_asked_from_the_start(server: FakeOrigin, asking: Following) -> None:
    server.fault("x", redirect="/y")
    await ask(asking, f"{server.url}/x")
    server.fault("y", reset_after=0, times=1)
    with pytest.raises(Broken):
        await ask(asking, f"{server.url}/x")
    paths(server)
    assert await ask(asking, f"{server.url}/x") == 200
    assert paths(server) == ["/x", "/y"]


async def test_what_was_said_on_the_way_is_remembered_with_it(server: FakeOrigin, asking: Following) -> None:
    server.fault("x", redirect="/y", headers={"x-linked-size": "1", "x-repo-commit": "c"})
    server.fault("y", headers={"x-linked-size": "2"})
    for _ in range(2):
        async with asking.ask(httpx.URL(f"{server.url}/x"), {}, keep=True) as answer:
            assert answer.said == {"x-linked-size": "1", "x-repo-commit": "c"}
            await answer.response.aread()


async def test_only_the_last_few_places_are_remembered(
    server: FakeOrigin, asking: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "MOST_KEPT", 1)
    server.fault("x", redirect="/y")
    server.fault("z", redirect="/y")
    for _ in range(2):
        await ask(asking, f"{server.url}/x")
        await ask(asking, f"{server.url}/z")
    assert paths(server) == ["/x", "/y", "/z", "/y"] * 2


# Names that have another address each time


class Far(trio.socket.SocketType):
    """A socket to anywhere in 203.0.113.0/24, where the tests' own server is."""

    def __init__(self, *args: Any) -> None:
        self.real = trio.socket.from_stdlib_socket(socket.socket(*args))
        self.peer: Any = None

    async def connect(self, address: Any) -> None:
        self.peer = address
        await self.real.connect(("127.0.0.1", address[1]))

    def getpeername(self) -> Any:
        return self.peer

    async def send(self, *args: Any) -> int:
        return await self.real.send(*args)

    async def recv(self, *args: Any) -> bytes:
        return await self.real.recv(*args)

    def setsockopt(self, *args: Any) -> None:
        self.real.setsockopt(*args)

    def getsockopt(self, *args: Any) -> Any:
        return self.real.getsockopt(*args)

    def is_readable(self) -> bool:
        return self.real.is_readable()

    @property
    def did_shutdown_SHUT_WR(self) -> bool:  # noqa: N802 - trio names it so
        return self.real.did_shutdown_SHUT_WR

    @property
    def type(self) -> Any:
        return self.real.type

    def close(self) -> None:
        self.real.close()


class Streets(trio.abc.HostnameResolver, trio.abc.SocketFactory):
    """Each name has its addresses in turn, and the last one from then on."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}

    async def getaddrinfo(self, host: Any, port: Any, *_: Any, **__: Any) -> Any:
        await trio.lowlevel.checkpoint()
        left = self.addresses[host.decode() if isinstance(host, bytes) else host]
        address = left.pop(0) if len(left) > 1 else left[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, int(port)))]

    async def getnameinfo(self, sockaddr: Any, flags: Any) -> Any:
        raise OSError

    def socket(self, *args: Any) -> Any:
        return Far(*args)


@pytest.fixture
async def streets() -> Any:
    found = Streets()
    trio.socket.set_custom_hostname_resolver(found)
    trio.socket.set_custom_socket_factory(found)
    yield found
    trio.socket.set_custom_hostname_resolver(None)
    trio.socket.set_custom_socket_factory(None)


async def refused(asking: Following, url: str) -> None:
    with pytest.raises(FetchFailed, match="this machine's own address: not followed") as raised:
        await ask(asking, url)
    assert raised.value.kind is Kind.REFUSED


async def test_a_redirect_to_another_host_is_followed_by_name(
    server: FakeOrigin, asking: Following, streets: Streets
) -> None:
    streets.addresses = {"hub.example": ["203.0.113.7"], "cdn.example": ["203.0.113.8"]}
    server.fault("x", redirect=f"http://cdn.example:{server.port}/y")
    for _ in range(2):
        assert await ask(asking, f"http://hub.example:{server.port}/x") == 200
    assert paths(server) == ["/x", "/y", "/y"]


async def test_a_name_that_has_moved_here_after_it_was_looked_at_is_not_asked(
    server: FakeOrigin, asking: Following, streets: Streets
) -> None:
    streets.addresses = {"hub.example": ["203.0.113.7"], "cdn.example": ["203.0.113.8", "127.0.0.1"]}
    server.fault("x", redirect=f"http://cdn.example:{server.port}/y")
    await refused(asking, f"http://hub.example:{server.port}/x")
    assert paths(server) == ["/x"]


async def test_a_name_that_leads_to_itself_may_not_move_here(
    server: FakeOrigin, asking: Following, streets: Streets
) -> None:
    streets.addresses = {"hub.example": ["203.0.113.7", "127.0.0.1"]}
    server.fault("x", redirect="/y")
    await refused(asking, f"http://hub.example:{server.port}/x")
    assert paths(server) == ["/x"]


async def test_a_source_that_says_later_that_it_is_here_may_not_lead_here(
    server: FakeOrigin, asking: Following, streets: Streets
) -> None:
    streets.addresses = {"hub.example": ["203.0.113.7", "127.0.0.1"]}
    server.fault("x", redirect=f"http://127.0.0.1:{server.port}/y")
    await refused(asking, f"http://hub.example:{server.port}/x")
    assert paths(server) == ["/x"]


async def test_a_connection_that_a_source_has_made_is_not_one_to_be_led_to(
    server: FakeOrigin, asking: Following, streets: Streets
) -> None:
    streets.addresses = {
        "hub.example": ["203.0.113.7"],
        "mine.example": ["127.0.0.1", "203.0.113.8", "127.0.0.1"],
    }
    assert await ask(asking, f"http://mine.example:{server.port}/z") == 200
    server.fault("x", redirect=f"http://mine.example:{server.port}/y")
    await refused(asking, f"http://hub.example:{server.port}/x")
    assert paths(server) == ["/z", "/x"]


async def test_where_a_source_on_this_machine_has_led_is_asked_again(
    server: FakeOrigin, asking: Following, streets: Streets
) -> None:
    streets.addresses = {"mine.example": ["127.0.0.1"], "too.example": ["127.0.0.1"]}
    server.fault("x", redirect=f"http://too.example:{server.port}/y")
    for _ in range(2):
        assert await ask(asking, f"http://mine.example:{server.port}/x") == 200
    assert paths(server) == ["/x", "/y", "/y"]
