"""Whom connections believe, how they find a proxy, and how much is taken of them at once."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from llmgw.errors import ConfigError
from llmgw.host.weights.sources.connections import READ_BYTES, make_tls, open_pool

SIZE = 20 * READ_BYTES


def test_without_a_file_the_usual_authorities_are_believed() -> None:
    tls = make_tls(None)
    assert tls.verify_mode is ssl.CERT_REQUIRED
    assert tls.check_hostname
    assert tls.cert_store_stats()["x509_ca"] > 10


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_file_without_certificates_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="SSL_CERT_FILE"):
        make_tls(str(path))


async def test_what_waits_is_taken_at_once() -> None:
    """Of so much that waits, far fewer pieces come than there are of 64 KiB."""

    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % SIZE)
        await stream.send_all(bytes(SIZE))

    async with trio.open_nursery() as nursery:
        port = await start(nursery, answer)
        url = f"http://127.0.0.1:{port}/"
        async with open_pool(ssl.create_default_context(), None) as pool, pool.stream("GET", url) as response:
            sizes = [len(chunk) async for chunk in response.aiter_stream()]
        nursery.cancel_scope.cancel()
    assert sum(sizes) == SIZE
    assert max(sizes) > 64 * 1024


async def test_a_proxy_is_told_the_name_and_password_in_its_address() -> None:
    heads = []

    async def answer(stream: trio.SocketStream) -> None:
        heads.append(bytes(await stream.receive_some()).lower())
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with trio.open_nursery() as nursery:
        port = await start(nursery, answer)
        async with open_pool(ssl.create_default_context(), f"http://me:p%40ss@127.0.0.1:{port}") as pool:
            await pool.request("GET", "http://models.internal/x")
        nursery.cancel_scope.cancel()
    assert heads[0].startswith(b"get http://models.internal/x http/1.1")
    assert base64.b64encode(b"me:p@ss").lower() in heads[0]


async def start(nursery: trio.Nursery, answer: Callable[[trio.SocketStream], Awaitable[None]]) -> int:
    (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
    return int(listener.socket.getsockname()[1])
