"""HTTP as real clients, old and new ones and browsers, speak it to the client port."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from lab.running import Llmgw
from lab.wire import CHAT, Malformed, chat, chunked, get, post

pytestmark = pytest.mark.slow
ORIGIN = "Origin: http://localhost:3000"


@pytest.fixture(scope="module")
def llmgw(launch: Callable[..., Llmgw]) -> Llmgw:
    return launch()


def test_a_connection_serves_one_request_after_the_other(llmgw: Llmgw) -> None:
    with llmgw.connect() as wire:
        for _ in range(3):
            assert wire.ask(get()).status == 200
            assert wire.ask(post(CHAT, chat())).status == 200
            assert wire.ask(post(CHAT, chat(stream=True))).events[-1] == b"[DONE]"
            assert wire.ask(get("/v1/models")).json["data"][0]["id"] == "m"
            assert wire.ask(get("/")).status == 200
            assert wire.ask(get("/nowhere")).code == "unknown_url"


def test_requests_sent_ahead_are_answered_in_order(llmgw: Llmgw) -> None:
    with llmgw.connect() as wire:
        wire.send(b"".join(post(CHAT, chat({"text": f"{n} ", "tokens": 1}, stream=n % 2 > 0)) for n in range(20)))
        wire.send(get("/v1/models") + get("/nowhere") + get("/health"))
        for n in range(20):
            body = wire.read_reply().body
            assert b'"content": "%d "' % n in body
        assert [wire.read_reply().status for _ in range(3)] == [200, 404, 200]


def test_a_refused_request_does_not_hold_up_the_ones_behind_it(llmgw: Llmgw) -> None:
    with llmgw.connect() as wire:
        wire.send(post(CHAT, b"{}") + post("/v1/models", b"x") + get("/v1/models/none") + get())
        assert [wire.read_reply().status for _ in range(4)] == [400, 405, 404, 200]


def test_every_answer_has_a_request_id_of_its_own(llmgw: Llmgw) -> None:
    requests = [
        get(), get("/"), get("/nowhere"), get("/v1/models"), get("/v1/models/none"), post(CHAT, chat()),
        post(CHAT, chat(stream=True)), post(CHAT, b"nonsense"), b"nonsense\r\n\r\n", get(method="OPTIONS"),
        get("/static/../../etc/passwd"), get(method="CONNECT"), get(version="2.0"),
    ]  # fmt: skip
    ids = [llmgw.ask(request).get("x-request-id") for request in requests]
    assert None not in ids
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_host"),
        (get("/health", "Host: localhost"), 400, "invalid_host"),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403, "host_not_allowed"),
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", 403, "host_not_allowed"),
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1@evil.example\r\n\r\n", 403, "host_not_allowed"),
        (get("/health", "Origin: https://evil.example"), 403, "origin_not_allowed"),
        (get("/health", "Origin: null"), 403, "origin_not_allowed"),
        (get("/health", "Origin: http://localhost.evil.example"), 403, "origin_not_allowed"),
        (get("/nowhere"), 404, "unknown_url"),
        (get("/v1/models/none"), 404, "model_not_found"),
        (post("/v1/images/generations", b"{}"), 404, "unknown_url"),
        (get(CHAT), 405, "method_not_allowed"),
        (get(CHAT, method="HEAD"), 405, ""),
        (post("/health", b""), 405, "method_not_allowed"),
        (post(CHAT, b""), 400, "invalid_request"),
        (post(CHAT, b"[]"), 400, "invalid_request"),
        (post(CHAT, b'{"model": 7}'), 400, "invalid_request"),
        (post(CHAT, chat()[:-1]), 400, "invalid_request"),
        (post(CHAT, b"[" * 100_000), 400, "invalid_request"),
        (post(CHAT, chat(messages=[])), 400, "invalid_request"),
        (post(CHAT, chat(stream="yes")), 400, "invalid_request"),
        (post(CHAT, chat(model="none")), 404, "model_not_found"),
        (post(CHAT, chat(), "Content-Encoding: gzip"), 415, "unsupported_encoding"),
        (post(CHAT, chat(), "Content-Type: multipart/form-data; boundary=x"), 415, "unsupported_media_type"),
        (post(CHAT, chat(), "Expect: a-miracle"), 417, "expectation_failed"),
        (get("/health", "X-Long: " + "x" * 70_000), 431, "headers_too_large"),
        (get("/" + "x" * 70_000), 431, "headers_too_large"),
        (get("/health", *(f"X-{n}: y" for n in range(300))), 431, "headers_too_large"),
        (get("/health", method="CONNECT"), 501, "not_supported"),
        (get(CHAT, "Transfer-Encoding: gzip, chunked", method="POST"), 501, "coding_not_supported"),
        (get("/health", version="2.0"), 505, "version_not_supported"),
        (get("/health", "Content-Length: -1"), 400, "invalid_http"),
        (get("/health", "Content-Length: 1", "Content-Length: 2"), 400, "invalid_http"),
        (get("/health", "Content-Length: 5", "Transfer-Encoding: chunked"), 400, "invalid_http"),
        (get("/health", "Bad Name: x"), 400, "invalid_http"),
        (get("/health", "X-Split: a\rb"), 400, "invalid_http"),
        (get(CHAT, "Transfer-Encoding: chunked", method="POST") + b"zz\r\n", 400, "invalid_http"),
    ],
    ids=lambda value: repr(value[:60]) if isinstance(value, bytes) else None,
)  # fmt: skip
def test_a_no_says_what_is_wrong(llmgw: Llmgw, request_bytes: bytes, status: int, code: str) -> None:
    reply = llmgw.ask(request_bytes)
    assert reply.status == status
    assert reply.get("x-request-id")
    assert reply.get("content-type") == "application/json"
    if code:
        assert reply.code == code
    llmgw.check_health()


# -- HTTP/1.0


def test_an_old_client_gets_a_stream_that_ends_with_its_connection(llmgw: Llmgw) -> None:
    with llmgw.connect() as wire:
        reply = wire.ask(post(CHAT, chat(stream=True), version="1.0"))
        assert reply.get("transfer-encoding") is None
        assert reply.events[-1] == b"[DONE]"
    with llmgw.connect() as wire:
        reply = wire.ask(post(CHAT, chat(stream=True), "Connection: keep-alive", version="1.0"))
        assert reply.get("transfer-encoding") is None
        assert reply.events[-1] == b"[DONE]"


def test_an_old_client_gets_a_whole_reply_and_the_end(llmgw: Llmgw) -> None:
    with llmgw.connect() as wire:
        reply = wire.ask(post(CHAT, chat(), version="1.0"))
        assert reply.json["model"] == "m"
        assert wire.over


def test_an_old_client_may_keep_its_connection(llmgw: Llmgw) -> None:
    with llmgw.connect() as wire:
        for _ in range(3):
            reply = wire.ask(post(CHAT, chat(), "Connection: keep-alive", version="1.0"))
            assert reply.get("connection") == "keep-alive"
            assert reply.json["model"] == "m"


def test_an_old_client_needs_no_host(llmgw: Llmgw) -> None:
    assert llmgw.ask(b"GET /v1/models HTTP/1.0\r\n\r\n").status == 200
    assert llmgw.ask(b"GET / HTTP/1.0\r\n\r\n").status == 200


def test_an_old_client_is_not_made_to_believe_a_broken_stream(llmgw: Llmgw) -> None:
    reply = llmgw.ask(post(CHAT, chat({"cut": "events", "after": 2}, stream=True), version="1.0"))
    assert "error" in json.loads(reply.events[-1])


def test_an_old_client_can_tell_a_broken_reply(llmgw: Llmgw) -> None:
    fake = {"cut": "frame", "framing": "chunked"}
    with llmgw.connect() as wire, pytest.raises((Malformed, ConnectionResetError)):
        wire.ask(post(CHAT, chat(fake), version="1.0"))


def test_a_client_that_wants_the_end_gets_it(llmgw: Llmgw) -> None:
    for request in (get("/health", "Connection: close"), post(CHAT, chat(stream=True), "Connection: close")):
        with llmgw.connect() as wire:
            assert wire.ask(request).get("connection") == "close"
            assert wire.over


# -- bodies


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_body_may_come_in_chunks(llmgw: Llmgw, size: int) -> None:
    head = get(CHAT, "Transfer-Encoding: chunked", method="POST")
    with llmgw.connect() as wire:
        for _ in range(2):
            assert wire.ask(head + chunked(chat(padding="x" * 20_000), size)).json["model"] == "m"


def test_chunks_may_have_extensions_and_trailers(llmgw: Llmgw) -> None:
    body = chat()
    head = get(CHAT, "Transfer-Encoding: chunked", method="POST")
    with llmgw.connect() as wire:
        reply = wire.ask(head + b"%x;a=b\r\n%b\r\n0\r\nX-Sum: 7\r\n\r\n" % (len(body), body))
        assert reply.json["model"] == "m"
        assert wire.ask(get()).status == 200


def test_a_body_may_come_byte_by_byte(llmgw: Llmgw) -> None:
    with llmgw.connect() as wire:
        for byte in post(CHAT, chat()):
            wire.send(bytes([byte]))
        assert wire.read_reply().json["model"] == "m"


def test_a_client_that_asks_whether_to_go_on_is_told(llmgw: Llmgw) -> None:
    body = chat()
    with llmgw.connect() as wire:
        for _ in range(2):
            wire.send(post(CHAT, body, "Expect: 100-continue")[: -len(body)])
            assert wire.read_head().status == 100
            assert wire.ask(body).json["model"] == "m"


def test_a_client_that_asks_whether_to_go_on_is_told_no(llmgw: Llmgw) -> None:
    with llmgw.connect() as wire:
        wire.send(get("/v1/images", "Expect: 100-continue", "Content-Length: 1000000000", method="POST"))
        assert wire.read_reply().code == "request_too_large"
        assert wire.over


def test_a_client_that_does_not_wait_for_leave_needs_none(llmgw: Llmgw) -> None:
    with llmgw.connect() as wire:
        reply = wire.ask(post(CHAT, chat(), "Expect: 100-continue"))
        if reply.status == 100:  # (it was asked for, and may be given)
            reply = wire.read_reply()
        assert reply.json["model"] == "m"
        assert wire.ask(get()).status == 200


def test_an_upgrade_is_declined_by_an_answer(llmgw: Llmgw) -> None:
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    with llmgw.connect() as wire:
        assert wire.ask(post(CHAT, chat(), *upgrade)).json["model"] == "m"
        assert wire.ask(get("/v1/models", *upgrade) + get()).status == 200
        assert wire.read_reply().status == 200
        head = get(CHAT, "Transfer-Encoding: chunked", *upgrade, method="POST")
        assert wire.ask(head + chunked(chat(), 9)).json["model"] == "m"
        wire.send(get("/health", *upgrade) + b"xyz")
        assert wire.read_reply().status == 200
    for refused in (get("/health", "Host: again"), get("/health", *(f"X-{n}: y" for n in range(300)))):
        with llmgw.connect() as wire:
            # what follows has no known beginning: the answer before it is the last
            reply = wire.ask(get("/health", *upgrade) + refused)
            assert (reply.status, reply.get("connection")) == (200, "close")
            assert wire.over
    llmgw.check_health()


def test_a_target_may_be_absolute(llmgw: Llmgw) -> None:
    assert llmgw.ask(get("http://127.0.0.1/v1/models")).json["object"] == "list"
    assert llmgw.ask(get("http://127.0.0.1/")).status == 200


def test_a_query_changes_no_route(llmgw: Llmgw) -> None:
    assert llmgw.ask(get("/v1/models?limit=1000")).json["object"] == "list"
    assert llmgw.ask(post(CHAT + "?api-version=1", chat())).json["model"] == "m"


# -- what is asked for


@pytest.mark.parametrize("name", ["other/name", "other%2Fname", "other%2fname"])
def test_a_model_with_a_slash_is_found(llmgw: Llmgw, name: str) -> None:
    assert llmgw.ask(get(f"/v1/models/{name}")).json["id"] == "other/name"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/m", "/", "/nowhere", CHAT])
def test_a_head_is_a_get_without_its_body(llmgw: Llmgw, path: str) -> None:
    with llmgw.connect() as wire:
        whole, head = wire.ask(get(path)), wire.ask(get(path, method="HEAD"))
        assert head.status == whole.status
        assert head.get("content-type") == whole.get("content-type")
        assert wire.ask(get()).status == 200


def test_what_engines_must_not_be_told_stays_here(llmgw: Llmgw) -> None:
    secret = ("Authorization: Bearer secret", "Cookie: a=b", "Accept-Encoding: gzip, br", "X-Forwarded-For: 1.2.3.4")
    llmgw.ask(post(CHAT, chat(user="t-headers"), *secret))
    seen = llmgw.engine.find("t-headers")
    assert seen is not None
    names = {name.lower() for name, _ in seen["headers"]}
    assert names == {"host", "content-type", "content-length", "x-request-id"}


def test_what_the_door_does_not_edit_reaches_the_engine_as_it_came(llmgw: Llmgw) -> None:
    odd = {"z": 2**53 + 1, "a": "🚂", "tools": [{"b": 1, "a": [None, True]}], "stop": '","model":"x"'}
    llmgw.ask(post(CHAT, chat(user="t-odd", model="other/name", stream=True, **odd)))
    seen = llmgw.engine.find("t-odd")
    assert seen is not None
    assert {key: seen["body"][key] for key in odd} == odd
    assert list(seen["body"])[-4:] == list(odd)
    assert (seen["body"]["model"], seen["body"]["stream_options"]) == ("m", {"include_usage": True})


# -- browsers


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/nowhere"])
def test_a_preflight_needs_no_more_than_its_origin(llmgw: Llmgw, path: str) -> None:
    wanted = "authorization,content-type,x-stainless-lang,anthropic-version"
    asked = ("Access-Control-Request-Method: POST", f"Access-Control-Request-Headers: {wanted}")
    reply = llmgw.ask(get(path, ORIGIN, *asked, method="OPTIONS"))
    assert reply.status == 204
    assert reply.get("access-control-allow-origin") == "http://localhost:3000"
    assert reply.get("access-control-allow-headers") == wanted
    assert "POST" in (reply.get("access-control-allow-methods") or "")


@pytest.mark.parametrize(
    "request_bytes",
    [
        get("/v1/models", ORIGIN), get("/nowhere", ORIGIN), get("/", ORIGIN), post(CHAT, chat(), ORIGIN),
        post(CHAT, chat(stream=True), ORIGIN), post(CHAT, b"{", ORIGIN), post(CHAT, chat({"status": 500}), ORIGIN),
        get(CHAT, ORIGIN),
    ],
)  # fmt: skip
def test_a_page_may_read_every_answer_errors_too(llmgw: Llmgw, request_bytes: bytes) -> None:
    reply = llmgw.ask(request_bytes)
    assert reply.get("access-control-allow-origin") == "http://localhost:3000"
    assert reply.get("vary") == "origin"
    assert "x-request-id" in (reply.get("access-control-expose-headers") or "")


def test_a_foreign_page_is_told_nothing(llmgw: Llmgw) -> None:
    reply = llmgw.ask(get("/v1/models", "Origin: https://evil.example", method="OPTIONS"))
    assert reply.status == 403
    assert reply.get("access-control-allow-origin") is None


def test_listed_origins_may_call_and_no_others(launch: Callable[..., Llmgw]) -> None:
    llmgw = launch(cors_origins=["https://app.example"])
    reply = llmgw.ask(post(CHAT, chat(), "Origin: https://app.example"))
    assert (reply.status, reply.get("access-control-allow-origin")) == (200, "https://app.example")
    assert llmgw.ask(get("/v1/models", "Origin: https://other.example")).status == 403


def test_a_page_cannot_post_a_form(llmgw: Llmgw) -> None:
    """A form needs no preflight; its Origin gives it away."""
    form: Any = ("Origin: https://evil.example", "Content-Type: text/plain")
    assert llmgw.ask(post(CHAT, chat(user="t-form"), *form)).status == 403
    assert llmgw.engine.find("t-form") is None
