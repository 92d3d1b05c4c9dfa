"""Who may call from a browser."""

from __future__ import annotations

import pytest

from llmgw.dialects.refusal import Refusal
from llmgw.door.http1 import RequestHead
from llmgw.door.origin import MAX_WANTED_BYTES, Origins


def head(**fields: str) -> RequestHead:
    headers = {name.replace("_", "-").encode(): value.encode() for name, value in fields.items()}
    return RequestHead("GET", b"/", 1, headers, keep_alive=True, content_length=None, chunked=False)


def code(origins: Origins, **fields: str) -> str | None:
    refusal = origins.refuse(head(**fields))
    return None if refusal is None else refusal.code


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:17434", "localhost:17434", "LOCALHOST", "[::1]:17434", "[::1]", "127.1.2.3:1", ""]
)
def test_loopback_names_are_ours(host: str) -> None:
    assert code(Origins("127.0.0.1"), host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:17434",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "localhost:1@evil.example",
        "192.168.1.5",
        "evil.example#localhost",
        "[::2]",
        "127.0.0.1:@evil.com",
        "127.0.0.1:80/evil",
        "127.0.0.1:80@evil.com",
        "127.0.0.1:x",
        "127.0.0.1:123456",
        "127.0.0.1\n",
    ],
)
def test_another_name_is_refused_with_what_to_do(host: str) -> None:
    refusal = Origins("127.0.0.1").refuse(head(host=host))
    assert refusal is not None
    assert (refusal.status, refusal.code) == (403, "host_not_allowed")
    assert "http://127.0.0.1" in refusal.message


def test_the_configured_name_is_ours() -> None:
    origins = Origins("llm.home")
    assert code(origins, host="LLM.home:8080") is None
    assert code(origins, host="other.home") == "host_not_allowed"


@pytest.mark.parametrize(
    ("own", "host", "admitted"),
    [
        ("192.168.1.5", "192.168.1.5", True),
        ("192.168.1.5", "192.168.1.5:17434", True),
        ("192.168.1.5", "192.168.1.5:x", False),
        ("192.168.1.5", "192.168.1.5:80@evil.com", False),
        ("192.168.1.5", "192.168.1.5:@evil.com", False),
        ("192.168.1.5", "192.168.1.5:80/evil", False),
        ("192.168.1.5", "192x168.1.5", False),
        ("::1", "[::1]:17434", True),
        ("fd00::7", "[FD00::7]:17434", True),
        ("fd00::7", "[fd00::7]", True),
        ("fd00::7", "fd00::7:17434", False),
    ],
)
def test_the_configured_address_is_ours_with_a_port_of_digits_only(own: str, host: str, admitted: bool) -> None:
    assert code(Origins(own), host=host) == (None if admitted else "host_not_allowed")


@pytest.mark.parametrize(
    ("target", "host", "admitted"),
    [
        (b"http://127.0.0.1:17434/p", "evil.example", True),
        (b"http://evil.example/p", "localhost", False),
        (b"http://localhost@evil.example/p", "localhost", False),
        (b"http://[::1/", "localhost", False),
        (b"http:///p", "evil.example", False),
        (b"http:///p", "localhost", True),
    ],
)
def test_an_absolute_targets_own_name_counts_instead_of_the_host(target: bytes, host: str, admitted: bool) -> None:
    asked = head(host=host)
    asked.target = target
    refusal = Origins("127.0.0.1").refuse(asked)
    assert (refusal.code if refusal else None) == (None if admitted else "host_not_allowed")


def test_a_client_that_sends_no_host_is_no_browser() -> None:
    assert code(Origins("127.0.0.1")) is None


def test_the_memory_of_known_hosts_is_bounded() -> None:
    origins = Origins("127.0.0.1")
    for port in range(500):
        assert code(origins, host=f"localhost:{port}") is None
    assert len(origins._known_hosts) <= 100
    assert code(origins, host="localhost:499") is None


def test_pages_of_loopback_may_call_and_others_may_not() -> None:
    origins = Origins("127.0.0.1")
    for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:80"):
        assert code(origins, host="localhost", origin=origin) is None
    for origin in (
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "http://localhost:3000@evil.example",
    ):
        assert code(origins, host="localhost", origin=origin) == "origin_not_allowed"


def test_listed_origins_take_the_place_of_loopback() -> None:
    origins = Origins("127.0.0.1", ("https://Chat.example/",))
    assert origins.allows(b"https://chat.example")
    assert not origins.allows(b"http://localhost:3000")


def test_a_star_allows_every_page() -> None:
    assert Origins("127.0.0.1", ("*",)).allows(b"https://any.example")


def test_answers_to_a_page_carry_its_origin_and_those_to_others_nothing() -> None:
    origins = Origins("127.0.0.1")
    lines = origins.headers(head(origin="http://localhost:3000"))
    assert b"access-control-allow-origin: http://localhost:3000\r\n" in lines
    assert b"vary: origin\r\n" in lines
    assert b"x-request-id" in lines
    assert origins.headers(head()) == b""
    assert origins.headers(head(origin="https://evil.example")) == b""


def test_a_preflight_allows_the_headers_it_names() -> None:
    asked = head(origin="http://localhost", access_control_request_headers="authorization, x-stainless-os")
    asked.method = "OPTIONS"
    origins = Origins("127.0.0.1")
    assert b"POST" in dict(origins.preflight(asked))[b"access-control-allow-methods"]
    assert b"access-control-allow-headers: authorization, x-stainless-os\r\n" in origins.headers(asked)
    asked.method = "GET"
    assert b"access-control-allow-headers" not in origins.headers(asked)


def test_a_preflight_that_names_too_many_headers_is_refused() -> None:
    asked = head(origin="http://localhost", access_control_request_headers="x" * (MAX_WANTED_BYTES + 1))
    asked.method = "OPTIONS"
    refusal = Origins("127.0.0.1").preflight(asked)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 431
    assert b"xxx" not in Origins("127.0.0.1").headers(asked)
