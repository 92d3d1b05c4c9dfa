from __future__ import annotations

import hashlib
import random
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llmgw.standalone.pinned import PinnedFile

BODY = b"GGUF" + random.Random(7).randbytes(300_000)
TINY = PinnedFile(
    name="Tiny.gguf",
    size_bytes=len(BODY),
    sha256=hashlib.sha256(BODY).hexdigest(),
    package="llmgw_tiny_model",
    requirement="llmgw-tiny-model==1.0",
    wheel_bytes=len(BODY),
    hub_path="org/repo/resolve/abc/Tiny.gguf",
)


@pytest.fixture
def tiny() -> PinnedFile:
    return TINY


@pytest.fixture
def body() -> bytes:
    return BODY


@dataclass
class Said:
    """Progress that is remembered."""

    lines: list[str] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def moved(self, done_bytes: int, total_bytes: int) -> None:
        self.moves.append((done_bytes, total_bytes))


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[[bytes], Path]:
    """A folder with the wheel of the tiny model, as an index for pip."""

    def make(content: bytes = BODY, member: str = f"{TINY.package}/{TINY.name}") -> Path:
        folder = tmp_path / "index"
        folder.mkdir(exist_ok=True)
        info = f"{TINY.package}-1.0.dist-info"
        wheel = folder / f"{TINY.package}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llmgw-tiny-model\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        return folder

    return make


@dataclass(frozen=True)
class Asked:
    """One request that reached a web server."""

    path: str
    headers: dict[str, str]


@dataclass(frozen=True)
class Reply:
    """What a web server answers; ``cut`` closes the connection after so many bytes of the body."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None


class Web:
    """A web server whose answers are a function; it remembers what it was asked."""

    def __init__(self, answer: Callable[[Asked], Reply]) -> None:
        asked: list[Asked] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(b"")

            def do_POST(self) -> None:
                self.answer(self.rfile.read(int(self.headers["content-length"])))

            def answer(self, body: bytes) -> None:
                request = Asked(self.path, {key.lower(): value for key, value in self.headers.items()})
                asked.append(replace(request, headers=request.headers | {":body": body.decode()}))
                reply = answer(request)
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body[: reply.cut])
                self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.asked = asked
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def serve_web() -> Iterator[Callable[[Callable[[Asked], Reply]], Web]]:
    servers: list[Web] = []

    def serve(answer: Callable[[Asked], Reply]) -> Web:
        servers.append(Web(answer))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


@pytest.fixture
def reply() -> type[Reply]:
    return Reply
