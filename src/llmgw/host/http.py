"""One GET to an engine on this machine: what health and load polls need, and no more.

By hand over the parser that llmgw has anyway: a poll needs no pool, and httpx would load a certificate bundle and
heed proxy variables for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import httptools
import trio

BODY_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer."""

    status: int
    body: str


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
    """None when nobody answers there in HTTP. Waits as long as the other side does: the caller has the deadline."""
    collector = _Collector()
    parser = httptools.HttpResponseParser(collector)
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    try:
        with trio.socket.socket() as sock:
            await sock.connect((host, port))
            await trio.SocketStream(sock).send_all(request.encode("ascii"))
            while not collector.complete and len(collector.body) < BODY_BYTES:
                chunk = await sock.recv(65536)
                if not chunk:
                    break
                parser.feed_data(chunk)
    except (OSError, trio.BrokenResourceError, httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    if not collector.begun:
        return None
    return Reply(status=parser.get_status_code(), body=collector.body.decode(errors="replace"))
