"""One GET or POST to an engine on this machine: what its polls need, and no more.

By hand over the parser that llmgw has anyway: a poll needs no pool, and httpx would load a certificate bundle and
heed proxy variables for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import httptools
import msgspec
import trio

BODY_BYTES = 4 * 1024 * 1024

_HEADERS = "Accept: */*\r\nConnection: close\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer; a ``status`` of None is a connection that was refused."""

    status: int | None
    body: str


REFUSED = Reply(status=None, body="")


class _Collector:
    """What the parser calls."""

    __slots__ = ("begun", "body", "complete")

    def __init__(self) -> None:
        self.body = bytearray()
        self.begun = False
        self.complete = False

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, chunk: bytes) -> None:
        self.body += chunk

    def on_message_complete(self) -> None:
        self.complete = True


async def get(host: str, port: int, path: str) -> Reply | None:
    """REFUSED where nobody listens, None where somebody does and does not answer in HTTP.

    Waits as long as the other side does: the caller has the deadline.
    """
    return await _ask(host, port, f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n{_HEADERS}\r\n".encode("ascii"))


async def post(host: str, port: int, path: str, body: object) -> Reply | None:
    """The same for a POST of ``body`` as JSON."""
    content = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n{_HEADERS}\r\n"
    return await _ask(host, port, head.encode("ascii") + content)


async def _ask(host: str, port: int, request: bytes) -> Reply | None:
    collector = _Collector()
    parser = httptools.HttpResponseParser(collector)
    try:
        with trio.socket.socket() as sock:
            await sock.connect((host, port))
            await trio.SocketStream(sock).send_all(request)
            while not collector.complete and len(collector.body) < BODY_BYTES:
                chunk = await sock.recv(65536)
                if not chunk:
                    break
                parser.feed_data(chunk)
    except ConnectionRefusedError:
        return REFUSED
    except (OSError, trio.BrokenResourceError, httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    if not collector.begun:
        return None
    return Reply(status=parser.get_status_code(), body=collector.body.decode(errors="replace"))
