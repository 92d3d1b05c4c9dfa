"""``llmgw ctl tool-check`` at a server, and at endpoints that behave in each of the ways there are."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmgw.cli.ctl.tool_check import STATUSES
from llmgw.dialects.toolcheck import Verdict

KEY = "sk-0123456789abcdef"
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
REFUSAL = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'

Answer = tuple[int, dict[str, Any] | bytes]
Play = Callable[[dict[str, Any]], Answer]


class Endpoint:
    """An OpenAI-compatible server whose model is a function."""

    def __init__(self) -> None:
        self.models: Any = {"object": "list", "data": [{"id": "qwen3", "owned_by": "somebody"}]}
        self.play: Play = works
        self.key: str | None = None
        self.location: str | None = None
        self.headers: dict[str, str] = {}
        self.heard: list[tuple[str, Any]] = []
        endpoint = self

        class Answering(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                endpoint.answer(self, None)

            def do_POST(self) -> None:
                endpoint.answer(self, json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        self.heard.append((request.path, body))
        given = request.headers.get("authorization")
        if self.location is not None:
            return self.send(request, 307, b"", location=self.location)
        if self.key is not None and given != f"Bearer {self.key}":
            return self.send(request, 401, {"error": {"message": f"Invalid API Key: {given}", "code": 401}})
        if body is None:
            return self.send(request, 200 if self.models is not None else 404, self.models or {"detail": "Not Found"})
        status, answer = self.play(body)
        return self.send(request, status, answer)

    def send(self, request: BaseHTTPRequestHandler, status: int, answer: Any, **headers: str) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        try:
            request.send_response(status)
            for name, value in {**self.headers, **headers, "content-length": str(len(data))}.items():
                request.send_header(name, value)
            request.end_headers()
            request.wfile.write(data)
        except ConnectionError:
            # it was told enough
            return


def ok(body: dict[str, Any], message: dict[str, Any], finish: str = "stop", tokens: int | None = None) -> Answer:
    streamed = body.get("stream", False)
    if streamed and "tool_calls" in message:
        message = {"tool_calls": [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]}
    choice = {"index": 0, "finish_reason": finish, ("delta" if streamed else "message"): message}
    count = tokens if tokens is not None else 50 if "tools" in body else 9
    reply = {"choices": [choice], "usage": {"prompt_tokens": count}}
    return 200, f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n".encode() if streamed else reply


def saying(text: str) -> Play:
    return lambda body: ok(body, {"content": text if "tool_choice" in body else "The"})


def works(body: dict[str, Any]) -> Answer:
    if "tool_choice" not in body:
        return ok(body, {"content": "The"}, "length")
    return ok(body, {"content": None, "tool_calls": [CALL]}, "tool_calls")


def drops(body: dict[str, Any]) -> Answer:
    return ok(body, {"content": "It is mild."}, tokens=53)


def refuses(body: dict[str, Any]) -> Answer:
    return (400, {"error": {"message": REFUSAL, "code": 400}}) if "tools" in body else ok(body, {"content": "The"})


def partly(body: dict[str, Any]) -> Answer:
    return saying("It is mild.")(body) if body.get("stream") else works(body)


def counts_nothing(body: dict[str, Any]) -> Answer:
    return ok(body, {"content": "It is mild."}, tokens=0)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    made = Endpoint()
    serving = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    yield made
    made.server.shutdown()
    serving.join()
    made.server.server_close()


@pytest.mark.parametrize(
    ("play", "status", "verdict", "words"),
    [
        (works, 0, "works", "whole and streamed, forced and by the model's own choice"),
        (saying(HERMES), 3, "parser_missed", "comes as text (Hermes (Qwen), <tool_call>)"),
        (saying('[get_weather(city="Paris")]'), 3, "parser_missed", "comes as text (a call in Python)"),
        (saying('{"name": "get_weather", "parameters": {}}'), 3, "parser_missed", "comes as text (JSON)"),
        (drops, 4, "template_drops", "53 tokens with them and without"),
        (saying("It is mild."), 5, "ignores", "(50 prompt tokens with them, 9 without)"),
        (refuses, 6, "refuses", f"the endpoint refuses tools (400: {REFUSAL})"),
        (partly, 7, "partly", 'not auto, streamed (no call: "It is mild.")'),
        (counts_nothing, 8, "untold", "does not count its prompt tokens"),
        (lambda body: (200, b"\x00\xff garbage"), 1, "unasked", "200 with something that is no chat completion"),
        (lambda body: (503, {"error": {"message": "Loading model"}}), 1, "unasked", "503: Loading model"),
    ],
)
def test_each_endpoint_has_its_verdict_and_its_exit_status(
    ctl: Any, endpoint: Endpoint, *, play: Play, status: int, verdict: str, words: str
) -> None:
    endpoint.play = play
    ended = ctl("tool-check", "--endpoint", endpoint.url)
    assert (ended.status, ended.err) == (status, "")
    head, empty, columns, *_ = ended.out.splitlines()
    assert (head, empty, columns.split()) == (f"qwen3 at {endpoint.url}", "", ["REQUEST", "ANSWER"])
    line = next(line for line in ended.out.splitlines() if line.startswith(verdict.replace("_", " ") + ":"))
    assert words in line
    told = ctl("tool-check", "--endpoint", endpoint.url, "--json")
    assert told.status == status
    answer = json.loads(told.out)
    assert (answer["model"], answer["endpoint"], answer["check"]["verdict"]) == ("qwen3", endpoint.url, verdict)
    assert "None" not in told.out
    assert "null" not in told.out


def test_every_verdict_has_an_exit_status_of_its_own() -> None:
    assert STATUSES.keys() == set(Verdict)
    assert len(set(STATUSES.values())) == len(STATUSES)
    assert 2 not in STATUSES.values()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_the_url_may_end_as_people_write_it(ctl: Any, endpoint: Endpoint, end: str) -> None:
    assert ctl("tool-check", "--endpoint", endpoint.url + end).status == 0
    assert [path for path, _ in endpoint.heard] == ["/v1/models", *["/v1/chat/completions"] * 6]


def test_a_prefix_of_the_path_stays(ctl: Any, endpoint: Endpoint) -> None:
    assert ctl("tool-check", "--endpoint", f"{endpoint.url}/openai/v1").status == 0
    assert endpoint.heard[-1][0] == "/openai/v1/chat/completions"


def test_of_several_models_one_is_to_be_named(ctl: Any, endpoint: Endpoint) -> None:
    endpoint.models = {"data": [{"id": "a"}, {"id": "b"}]}
    ended = ctl("tool-check", "--endpoint", endpoint.url)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == f"llmgw: {endpoint.url} has 2 models: say which with --model; there is a, b\n"
    assert ctl("tool-check", "--endpoint", endpoint.url, "--model", "b").status == 0
    assert {body["model"] for _, body in endpoint.heard if body} == {"b"}


@pytest.mark.parametrize("models", [None, [], {"data": 7}, {"data": [{"id": 7}]}, {"data": [{}]}])
def test_an_endpoint_without_a_list_of_models_is_asked_for_the_one_that_is_named(
    ctl: Any, endpoint: Endpoint, models: Any
) -> None:
    endpoint.models = models
    ended = ctl("tool-check", "--endpoint", endpoint.url)
    assert ended.status in {1, 2}
    assert "model" in ended.err
    assert ctl("tool-check", "--endpoint", endpoint.url, "--model", "m").status == 0


def test_whose_engine_it_is_tells_which_flag_is_named(ctl: Any, endpoint: Endpoint) -> None:
    endpoint.play = saying(HERMES)
    endpoint.models = {"data": [{"id": "qwen3", "owned_by": "llamacpp"}]}
    out = ctl("tool-check", "--endpoint", endpoint.url).out
    assert "what to do: start llama.cpp with --chat-template-file" in out
    endpoint.models = {"data": [{"id": "qwen3", "owned_by": "llmgw"}]}
    out = ctl("tool-check", "--endpoint", endpoint.url).out
    assert "what to do: it depends on the engine: " in out
    assert "llama.cpp with --chat-template-file" in out


def test_the_key_is_sent_and_never_shown(
    ctl: Any, endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.key = KEY
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(f"{KEY}\nanother line\n")
    assert ctl("tool-check", "--endpoint", endpoint.url, "--key-file", str(file)).status == 0
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    assert ctl("tool-check", "--endpoint", endpoint.url).status == 0
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-wrong-wrong")
    # a file that is named goes before the environment
    assert ctl("tool-check", "--endpoint", endpoint.url, "--key-file", str(file)).status == 0
    for words in ((), ("--json",)):
        ended = ctl("tool-check", "--endpoint", endpoint.url, "--model", "m", *words)
        assert ended.status == 1
        assert "401: Invalid API Key: Bearer …" in ended.out
        assert "wrong" not in ended.out + ended.err
    ended = ctl("tool-check", "--endpoint", endpoint.url)
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == f"llmgw: {endpoint.url}/v1/models does not tell its models (401: Invalid API Key: Bearer …)\n"


def test_a_word_in_the_place_of_a_key_stays_a_word(
    ctl: Any, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "e")
    endpoint.play = saying("It is mild.")
    assert 'no call: "It is mild."' in ctl("tool-check", "--endpoint", endpoint.url).out


def test_a_key_that_is_none_is_not_shown_either(ctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = ("tool-check", "--endpoint", "http://127.0.0.1:1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\nx: y")
    ended = ctl(*at)
    assert (ended.status, "OPENAI_API_KEY holds no key" in ended.err, "secret" in ended.err) == (2, True, False)
    file = tmp_path / "key"
    ended = ctl(*at, "--key-file", str(file))
    assert (ended.status, "can't be read: No such file" in ended.err) == (2, True)
    file.touch(0o600)
    ended = ctl(*at, "--key-file", str(file))
    assert (ended.status, "holds no key" in ended.err) == (2, True)
    file.write_text(KEY)
    file.chmod(0o644)
    ended = ctl(*at, "--key-file", str(file))
    assert (ended.status, f"chmod o-rwx {file}" in ended.err, KEY in ended.err) == (2, True, False)


def test_nobody_is_followed_with_a_key(ctl: Any, endpoint: Endpoint) -> None:
    endpoint.location = "http://evil.example/v1"
    ended = ctl("tool-check", "--endpoint", endpoint.url, "--model", "m")
    assert ended.status == 1
    assert "307: it sends on to http://evil.example/v1: give that URL" in ended.out
    assert len(endpoint.heard) == 2


def test_where_nothing_answers_it_could_not_be_asked(ctl: Any) -> None:
    ended = ctl("tool-check", "--endpoint", "http://127.0.0.1:1")
    assert (ended.status, ended.out) == (1, "")
    assert "http://127.0.0.1:1/v1/models does not tell its models (no answer: " in ended.err
    ended = ctl("tool-check", "--endpoint", "http://127.0.0.1:1", "--model", "m")
    assert (ended.status, ended.err) == (1, "")
    assert "unasked: it could not be asked (without tools): no answer: " in ended.out


def test_an_answer_without_end_and_a_coded_one_are_not_read(ctl: Any, endpoint: Endpoint) -> None:
    endpoint.play = lambda body: (200, b"x" * (6 << 20))
    assert "the answer is longer than 4 MiB" in ctl("tool-check", "--endpoint", endpoint.url).out
    endpoint.headers = {"content-encoding": "gzip"}
    ended = ctl("tool-check", "--endpoint", endpoint.url, "--model", "m")
    assert "the answer is coded as 'gzip', which nobody asked for" in ended.out


def test_what_an_endpoint_says_does_not_move_the_cursor(ctl: Any, endpoint: Endpoint) -> None:
    endpoint.play = lambda body: (418, {"error": {"message": "\x1b[2J\x07tea"}})
    out = ctl("tool-check", "--endpoint", endpoint.url).out
    assert re.search(r"[\x00-\x09\x0b-\x1f]", out) is None
    assert "tea" in out


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8000", "ftp://h/v1", "http://", "http://h:x", "http://h:0", "http://h/?a=b", "http://h/#f"),
        *("http://user:pass@h/v1", "http://[::1", "http://h /v1"),
    ],
)
def test_what_is_no_url_is_refused(ctl: Any, url: str) -> None:
    ended = ctl("tool-check", "--endpoint", url)
    assert (ended.status, ended.out) == (2, "")
    assert "--endpoint" in ended.err
    assert "pass" not in ended.err.replace("password", "")


ANSWER = {
    "model": "qwen3",
    "replica": "rep-qwen3-1",
    "node": "gpu01",
    "engine": "vllm",
    "check": {
        "verdict": "template_drops",
        "message": "the chat template drops the tools",
        "remedy": "give it another",
        "exchanges": [{"request": "auto", "outcome": "answered", "answer": "no call"}],
        "tokens_without": 53,
        "tokens_with": 53,
    },
}


def test_a_server_is_asked_for_its_model(ctl: Any, port: Any) -> None:
    port.will_answer("POST", "/tool-check", ANSWER)
    ended = ctl("tool-check", "coder")
    assert (ended.status, ended.err) == (4, "")
    assert ended.out.splitlines() == [
        "qwen3 at rep-qwen3-1 on gpu01",
        "",
        "REQUEST  ANSWER",
        "auto     no call",
        "",
        "template drops: the chat template drops the tools",
        "what to do: give it another",
    ]
    ended = ctl("tool-check", "coder", "--replica", "rep-qwen3-1", "--json")
    assert (ended.status, json.loads(ended.out)) == (4, ANSWER)
    assert [heard.body for heard in port.heard] == [
        {"model": "coder", "replica": None},
        {"model": "coder", "replica": "rep-qwen3-1"},
    ]


def test_a_server_that_refuses_is_quoted(ctl: Any, port: Any) -> None:
    error = {"error": {"code": "no_replica", "message": "m has no ready replica: it is loading"}}
    port.will_answer("POST", "/tool-check", error, status=503)
    ended = ctl("tool-check", "m")
    assert (ended.status, ended.out, ended.err) == (1, "", "llmgw: m has no ready replica: it is loading\n")


def test_a_stranger_at_the_port_is_told_so(ctl: Any, port: Any) -> None:
    port.will_answer("POST", "/tool-check", {"model": "m", "replica": "r", "node": "n", "check": {"verdict": "?"}})
    ended = ctl("tool-check", "m")
    assert ended.status == 1
    assert "no operator port of llmgw" in ended.err


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("m", "--endpoint", "http://h"),
        ("m", "--model", "x"),
        ("m", "--key-file", "x"),
        ("--endpoint", "http://h", "--replica", "r"),
        ("--endpoint", "http://h", "--server", "http://h"),
        ("--endpoint", "http://h", "--config", "x"),
    ],
)
def test_what_does_not_go_together_is_refused(ctl: Any, words: tuple[str, ...]) -> None:
    ended = ctl("tool-check", *words)
    assert (ended.status, ended.out) == (2, "")
    assert "--endpoint" in ended.err
