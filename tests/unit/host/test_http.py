"""The small GET and POST, against sockets that answer bytes."""

from __future__ import annotations

import json

import pytest
import trio
import trio.lowlevel

from llmgw.host.http import BODY_BYTES, REFUSED, get, post


@pytest.fixture
async def answer(nursery):
    """Serve these bytes to whoever asks, then close; returns the port and what was asked."""

    async def answer(*parts: bytes):
        asked = []
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def serve(stream):
            asked.append(bytes(await stream.receive_some(65536)))
            for part in parts:
                await stream.send_all(part)
                await trio.lowlevel.checkpoint()

        nursery.start_soon(trio.serve_listeners, serve, [listener])
        return listener.socket.getsockname()[1], asked

    return answer


async def ask(port, path="/health"):
    with trio.fail_after(30):
        return await get("127.0.0.1", port, path)


async def test_a_whole_answer_is_read(answer):
    port, asked = await answer(b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\n", b"gr\xc3", b"\xbc")
    reply = await ask(port, "/health?a=1")
    assert (reply.status, reply.body) == (503, "grü")
    assert asked[0].startswith(b"GET /health?a=1 HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_chunks_and_ends_by_close_are_read(answer):
    port, _ = await answer(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", b"0\r\n\r\n")
    assert (await ask(port)).body == "ok"
    port, _ = await answer(b"HTTP/1.0 200 OK\r\n\r\n", b"to the end")
    assert (await ask(port)).body == "to the end"


@pytest.mark.parametrize(
    "octets", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\ncontent-le", b"\0\1\2", b"HTTP/1.1 20"]
)
async def test_what_is_not_an_answer_is_none(answer, octets):
    port, _ = await answer(octets)
    assert await ask(port) is None


async def test_a_refused_connection_is_told_from_one_that_is_silent():
    with trio.socket.socket() as sock:
        await sock.bind(("127.0.0.1", 0))
        assert await ask(sock.getsockname()[1]) == REFUSED
        with trio.fail_after(30):
            assert await post("127.0.0.1", sock.getsockname()[1], "/x", {}) == REFUSED
    assert REFUSED.status is None


async def test_a_body_is_posted_as_json(answer):
    port, asked = await answer(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    with trio.fail_after(30):
        reply = await post("127.0.0.1", port, "/v1/x", {"model": "gr\u00fc\u00df"})
    assert (reply.status, reply.body) == (200, "ok")
    head, _, body = asked[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/x HTTP/1.1\r\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head
    assert json.loads(body) == {"model": "gr\u00fc\u00df"}


async def test_a_body_without_end_is_cut(answer):
    port, _ = await answer(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * (BODY_BYTES + 100_000))
    reply = await ask(port)
    assert BODY_BYTES <= len(reply.body) < BODY_BYTES + 100_000
