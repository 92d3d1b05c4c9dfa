"""A client that is under no obligation to behave: raw bytes out, and a strict reader of what comes back."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PATIENCE_SECONDS = 60.0
MODEL = "m"
STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]+\Z")
FIELD = re.compile(rb"([a-z0-9-]+): ?([^\r\n]*)\Z")


class Malformed(Exception):  # noqa: N818 - a fact about what came
    """What came is no HTTP/1.1 response, or is not whole."""


@dataclass(frozen=True)
class Reply:
    """One response; header names are lower case, ``pieces`` are its chunks as they were framed."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    pieces: tuple[bytes, ...] = ()

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error body, whose shape is checked on the way."""
        return error_code(self.json)

    @property
    def events(self) -> list[bytes]:
        """What the data lines of its events say."""
        return data_lines(self.body)


def error_code(document: Any) -> str:
    """The code of an error document; it has OpenAI's shape or this fails."""
    assert list(document) == ["error"], document
    error = document["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["code"], str), error
    assert error["code"], error
    assert isinstance(error["message"], str), error
    assert error["message"], error
    assert isinstance(error["type"], str), error
    return error["code"]


def data_lines(stream: bytes) -> list[bytes]:
    return [line[5:].strip() for line in stream.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data:")]


class Wire:
    """One connection. ``read_reply`` is as strict about the answer as the answer's sender is about requests."""

    def __init__(self, address: tuple[str, int], *, receive_bytes: int | None = None) -> None:
        self.sock = socket.socket()
        if receive_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.settimeout(PATIENCE_SECONDS)
        self.sock.connect(address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reset(self) -> None:
        """Close with RST in place of FIN."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def leave(self, way: str) -> None:
        """Go, by ``fin`` or by ``rst``."""
        if way == "rst":
            self.reset()
        else:
            self.sock.close()

    # -- reading

    def more(self) -> bool:
        """Read what comes next into the buffer; False at the end."""
        data = self.sock.recv(65536)
        self.buffer += data
        return bool(data)

    def read_until(self, mark: bytes) -> bytes:
        """All up to and including ``mark``."""
        searched = 0
        while (at := self.buffer.find(mark, searched)) < 0:
            searched = max(0, len(self.buffer) - len(mark))
            if not self.more():
                raise Malformed(f"the connection ended before {mark!r}: {self.buffer[:500]!r}")
        return self._take(at + len(mark))

    def read(self, count: int) -> bytes:
        while len(self.buffer) < count:
            if not self.more():
                raise Malformed(f"the connection ended {count - len(self.buffer)} bytes early")
        return self._take(count)

    def read_to_end(self) -> bytes:
        """Everything until the other side closes."""
        parts = [self._take(len(self.buffer))]
        while data := self.sock.recv(65536):
            parts.append(data)
        return b"".join(parts)

    def _take(self, count: int) -> bytes:
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    def read_head(self) -> Reply:
        """A response's head alone."""
        status_line, *lines = self.read_until(b"\r\n\r\n")[:-4].split(b"\r\n")
        status = STATUS_LINE.match(status_line)
        if status is None:
            raise Malformed(f"no status line: {status_line[:200]!r}")
        headers = []
        for line in lines:
            field = FIELD.match(line)
            if field is None:
                raise Malformed(f"no header field: {line[:200]!r}")
            headers.append((field[1].decode(), field[2].decode("latin-1")))
        return Reply(int(status[1]), headers)

    def read_reply(self, method: str = "GET") -> Reply:
        """A whole response, by its own framing."""
        head = self.read_head()
        coding, length = head.get("transfer-encoding"), head.get("content-length")
        if coding is not None and length is not None:
            raise Malformed("both a length and chunks")
        if method == "HEAD" or head.status in (100, 204, 304):
            return head
        if coding is not None:
            pieces = tuple(self._read_chunks())
            return Reply(head.status, head.headers, b"".join(pieces), pieces)
        body = self.read(int(length)) if length is not None else self.read_to_end()
        return Reply(head.status, head.headers, body)

    def _read_chunks(self) -> Iterator[bytes]:
        while size := int(self.read_until(b"\r\n"), 16):
            yield self.read(size)
            if self.read(2) != b"\r\n":
                raise Malformed("a chunk does not end where it said")
        if self.read(2) != b"\r\n":
            raise Malformed("something follows the last chunk")

    def ask(self, request: bytes) -> Reply:
        self.send(request)
        return self.read_reply(request.partition(b" ")[0].decode("latin-1"))

    @property
    def over(self) -> bool:
        """The other side closed, and said nothing more."""
        with contextlib.suppress(ConnectionResetError):
            return not self.buffer and not self.more()
        return not self.buffer


def get(path: str = "/health", *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    """A request without a body."""
    lines = [f"{method} {path} HTTP/{version}", "Host: 127.0.0.1", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def post(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    """A request with a body of known length."""
    return get(path, f"Content-Length: {len(body)}", *headers, method="POST", version=version) + body


def chat(fake: dict[str, Any] | None = None, /, **fields: Any) -> bytes:
    """The body of a chat; ``fake`` tells the engine how to misbehave."""
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    if fake:
        body["fake"] = fake
    return json.dumps(body).encode()


def chunked(body: bytes, size: int) -> bytes:
    """A body in chunks of ``size``."""
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


CHAT = "/v1/chat/completions"
