"""Who is asked, in which order, and what is remembered of it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from fake_origin import FakeOrigin

from llmgw.host import following
from llmgw.host.following import Following
from llmgw.host.redirects import Proxies
from llmgw.host.web import Web
from llmgw.host.weights_errors import Broken


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
