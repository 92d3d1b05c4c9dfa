from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmgw.cli import main
from llmgw.cli.ctl.address import Address
from llmgw.cli.ctl.asking import Asked
from llmgw.cli.ctl.client import Operator

sys.path.insert(0, str(Path(__file__).parents[3] / "fakes" / "origin"))


@dataclass(frozen=True)
class Heard:
    """A request as the port got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class Port:
    """An operator port that answers by heart: for each path the answers in their order, the last one for ever."""

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self.answers: dict[tuple[str, str], list[tuple[int, str, bytes]]] = {}
        port = self

        class Answering(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                port.answer(self)

            do_POST = do_DELETE = do_GET  # noqa: N815 - names of the standard library

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def will_answer(self, method: str, path: str, *answers: object, status: int = 200) -> None:
        encoded = [(status, "application/json", json.dumps(answer).encode()) for answer in answers]
        self.answers.setdefault((method, path), []).extend(encoded)

    def will_say(self, method: str, path: str, status: int, kind: str, body: bytes) -> None:
        self.answers[(method, path)] = [(status, kind, body)]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length", 0))
        body = json.loads(request.rfile.read(length)) if length else None
        self.heard.append(Heard(request.command, request.path, dict(request.headers.items()), body))
        left = self.answers.get((request.command, request.path))
        unknown = (404, "application/json", b'{"error": {"code": "unknown_url", "message": "nothing is served here"}}')
        status, kind, answer = (left.pop(0) if len(left) > 1 else left[0]) if left else unknown
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(answer)))
        request.end_headers()
        request.wfile.write(answer)


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    serving = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    yield made
    made.server.shutdown()
    serving.join()
    made.server.server_close()


@dataclass(frozen=True)
class Ended:
    status: int | str | None
    out: str
    err: str


Ctl = Callable[..., Ended]


@pytest.fixture
def ctl(port: Port, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ctl:
    """``llmgw ctl`` with these words, at the port that answers by heart."""
    monkeypatch.setenv("LLMGW_ADMIN", port.url)

    def run(*words: str) -> Ended:
        with pytest.raises(SystemExit) as caught:
            main(["ctl", *words])
        said = capfd.readouterr()
        return Ended(caught.value.code, said.out, said.err)

    return run


class Scripted(Operator):
    """Answers in their order, whatever it is asked, or fails so; then Ctrl-C. Nothing is waited for in between."""

    def __init__(self, *answers: object) -> None:
        super().__init__(Address(host="127.0.0.1", port=1, source="a test"))
        self.answers = list(answers)
        self.paths: list[str] = []

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        self.paths.append(path)
        if not self.answers:
            raise KeyboardInterrupt
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer).encode()


@pytest.fixture
def scripted() -> Callable[..., Scripted]:
    return Scripted


@pytest.fixture
def asked_of() -> Callable[..., Asked]:
    """What a command has that asks a server which gives these answers."""

    def make(*answers: object, **facts: Any) -> Asked:
        return Asked(operator=Scripted(*answers), sleep=lambda seconds: None, **facts)

    return make
