from __future__ import annotations

import pytest

from llmgw.config.addresses import (
    is_loopback,
    overlap,
    read_listen,
    read_server,
    show_listen,
    wrong_host,
    wrong_node,
)
from llmgw.config.agent import ServerAddress
from llmgw.config.document import parse_document
from llmgw.config.server import Listen

DEFAULT = Listen(host="127.0.0.1", port=8080)


def listen(text: str) -> Listen | str:
    """What is read, or what is said against it."""
    section, findings = parse_document(f"a: '{text}'", "f")
    found = read_listen(section, "a", DEFAULT)
    return found if not findings.problems() else findings.problems()[0].message


def server(text: str) -> ServerAddress | str:
    section, findings = parse_document(f"a: '{text}'", "f")
    found = read_server(section, "a")
    return found if not findings.problems() else findings.problems()[0].message


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (":7443", "", 7443),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("localhost:80", "127.0.0.1", 80),
        ("[::1]:65535", "::1", 65535),
        ("[::]:1", "::", 1),
    ],
)
def test_an_address_to_listen_on_is_read(text: str, host: str, port: int) -> None:
    assert listen(text) == Listen(host=host, port=port)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("127.0.0.1", "'127.0.0.1' has no port at its end; write it as 127.0.0.1:8080"),
        ("127.0.0.1:", "'127.0.0.1:' has no port at its end"),
        ("127.0.0.1:65536", "'127.0.0.1:65536' has no port at its end"),
        ("127.0.0.1:-1", "'127.0.0.1:-1' has no port at its end"),
        ("127.0.0.1:８０", "'127.0.0.1:８０' has no port at its end"),
        ("::1:80", "'::1:80': an IPv6 address stands in brackets; write it as [::1]:80"),
        ("[::1:80", "'[::1:80': an IPv6 address stands in brackets"),
        ("http://127.0.0.1:80", "'http://127.0.0.1:80': an IPv6 address stands in brackets"),
        ("host:80", "'host' is not an IP address; write it as 127.0.0.1:8080"),
        ("[host]:80", "'host' is not an IP address"),
    ],
)
def test_what_is_no_address_to_listen_on_is_told_so(text: str, said: str) -> None:
    assert str(listen(text)).startswith(said)


def test_without_the_key_there_is_the_default() -> None:
    section, findings = parse_document("b: 1", "f")
    assert read_listen(section, "a", DEFAULT) == DEFAULT
    assert findings.problems() == []


@pytest.mark.parametrize("text", [":7443", "127.0.0.1:80", "[::1]:80"])
def test_an_address_is_shown_as_it_is_written(text: str) -> None:
    found = listen(text)
    assert isinstance(found, Listen)
    assert show_listen(found) == text


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ("127.0.0.1:80", "127.0.0.1:80", True),
        ("127.0.0.1:80", ":80", True),
        ("[::]:80", "127.0.0.1:80", True),
        ("127.0.0.1:80", "127.0.0.1:81", False),
        ("127.0.0.1:80", "127.0.0.2:80", False),
        # Any free port is always another one.
        ("127.0.0.1:0", "127.0.0.1:0", False),
    ],
)
def test_two_addresses_that_can_not_both_be_had(one: str, other: str, clash: bool) -> None:
    first, second = listen(one), listen(other)
    assert isinstance(first, Listen)
    assert isinstance(second, Listen)
    assert overlap(first, second) is clash
    assert overlap(second, first) is clash


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("::", False),
        ("h", None),
        ("", None),
    ],
)
def test_only_some_addresses_are_this_machines_alone(host: str, loopback: bool | None) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("https://ctl:7443", "ctl", 7443),
        ("https://CTL.example.com:1/", "ctl.example.com", 1),
        ("https://10.0.0.1:7443", "10.0.0.1", 7443),
        ("https://[fd00::1]:7443", "fd00::1", 7443),
    ],
)
def test_a_server_is_read(text: str, host: str, port: int) -> None:
    assert server(text) == ServerAddress(host=host, port=port)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ctl:7443", "does not begin with https://"),
        ("http://ctl:7443", "does not begin with https://"),
        ("https://ctl", "has no port"),
        ("https://ctl:0", "has no port"),
        ("https://ctl:70000", "Port out of range"),
        ("https://ctl:seven", "is not an address"),
        ("https://[::1:7443", "is not an address"),
        ("https://:7443", "has no host"),
        ("https://me@ctl:7443", "has a user in it"),
        ("https://ctl:7443/x", "has more than a host and a port"),
        ("https://ctl:7443?x=1", "has more than a host and a port"),
        ("https://a_b:7443", "has 'a_b' for a host"),
        ("https://a..b:7443", "has 'a..b' for a host"),
    ],
)
def test_what_is_no_server_is_told_so(text: str, said: str) -> None:
    found = server(text)
    assert isinstance(found, str)
    assert found.startswith(f"'{text}' ")
    assert said in found
    assert found.endswith("; write it as https://HOST:7443")


def test_a_server_that_is_missing_is_told_once() -> None:
    section, findings = parse_document("b: 1", "f")
    read_server(section, "a")
    assert [problem.message for problem in findings.problems()] == ["is missing"]


@pytest.mark.parametrize("name", ["n", "node-1", "gpu-1.rack-2.example", "1a", "localhost"])
def test_names_of_nodes_are_taken(name: str) -> None:
    assert wrong_node(name) is None


@pytest.mark.parametrize(
    "name",
    ["N1", "-a", "a-", "a_b", "a b", "a/b", "a..b", "a.", ".", "ü", "x" * 64, "10.0.0.1", "::1", "a." * 32 + "b"],
)
def test_what_no_certificate_would_hold_is_no_nodes_name(name: str) -> None:
    assert wrong_node(name) is not None


@pytest.mark.parametrize("host", ["\u212aelvin", "a" * 64, "a." * 130, "a b"])
def test_what_nobody_can_look_up_is_no_host(host: str) -> None:
    assert wrong_host(host) is not None
