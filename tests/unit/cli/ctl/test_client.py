from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

import pytest

from llmgw.admin import manage
from llmgw.cli.ctl.address import Address
from llmgw.cli.ctl.client import MAX_BODY_BYTES, NoAnswer, Operator, as_node, as_word
from llmgw.errors import ConfigError, LlmgwError, UsageError


@pytest.fixture
def operator(port: Any) -> Operator:
    host, number = port.server.server_address
    return Operator(Address(host=host, port=number, source="LLMGW_ADMIN"))


def test_the_answer_comes_as_it_is(port: Any, operator: Operator) -> None:
    port.will_say("GET", "/nodes", 200, "application/json", b'{"nodes":  []}')
    assert operator.ask("GET", "/nodes") == b'{"nodes":  []}'
    (heard,) = port.heard
    assert heard.headers["Host"] == port.url.removeprefix("http://")
    assert heard.body is None


def test_a_body_goes_as_json(port: Any, operator: Operator) -> None:
    port.will_answer("POST", "/models", {"models": []})
    operator.ask("POST", "/models", {"file": "m.yaml", "text": "näme"})
    (heard,) = port.heard
    assert heard.headers["Content-Type"] == "application/json"
    assert heard.body == {"file": "m.yaml", "text": "näme"}


def test_a_body_that_the_port_does_not_take_is_not_sent(port: Any, operator: Operator) -> None:
    with pytest.raises(UsageError, match="more than the 1024 KiB"):
        operator.ask("POST", "/models", {"text": "x" * MAX_BODY_BYTES})
    assert port.heard == []
    assert MAX_BODY_BYTES == manage.MAX_BODY_BYTES


def test_a_name_is_one_word_of_a_path_whatever_it_holds() -> None:
    assert as_word("org/m+x y?\udcff") == "org%2Fm%2Bx%20y%3F%3F"


def test_nobody_there_is_told_apart_from_a_no() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    with pytest.raises(NoAnswer, match=rf"nothing answers at http://127.0.0.1:{number} \(the default\): .*refused"):
        Operator(Address(host="127.0.0.1", port=number, source="the default")).ask("GET", "/nodes")


def test_a_server_that_hangs_is_not_waited_for_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, number = silent.getsockname()
        operator = Operator(Address(host=host, port=number, source="the default"), timeout_seconds=0.05)
        with pytest.raises(NoAnswer, match=r"\(the default\) did not answer within 0\.05 s"):
            operator.ask("GET", "/nodes")


def drip(listener: socket.socket, begin: bytes, over: threading.Event) -> None:
    """Answer a byte at a time, and never come to the end."""
    connection, _ = listener.accept()
    with connection, suppress(OSError):
        connection.sendall(begin)
        while not over.wait(0.02):
            connection.sendall(b"x")


def test_a_server_that_ends_in_the_middle_of_an_answer_may_come_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_half() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(
                    b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"no'
                )

        answering = threading.Thread(target=answer_half)
        answering.start()
        host, number = listener.getsockname()
        with pytest.raises(NoAnswer, match="hung up in the middle of its answer"):
            Operator(Address(host=host, port=number, source="the default")).ask("GET", "/nodes")
        answering.join()


@pytest.mark.parametrize(
    "begin", [b"HTTP/1.1 200 OK\r\nX-Head: ", b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n"]
)
def test_a_server_that_drips_has_no_more_time_than_one_that_hangs(begin: bytes) -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dripping = threading.Thread(target=drip, args=(listener, begin, over))
        dripping.start()
        host, number = listener.getsockname()
        operator = Operator(Address(host=host, port=number, source="the default"), timeout_seconds=0.3)
        try:
            with pytest.raises(NoAnswer, match=r"did not answer within 0\.3 s"):
                operator.ask("GET", "/nodes")
        finally:
            over.set()
            dripping.join()


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_that_can_be_none_is_told(host: str) -> None:
    with pytest.raises((UsageError, NoAnswer), match=host):
        Operator(Address(host=host, port=1, source="--server")).ask("GET", "/nodes")


def test_a_host_that_is_none_is_told() -> None:
    with pytest.raises(NoAnswer, match=r"nothing answers at http://no-such-host\.invalid:1"):
        Operator(Address(host="no-such-host.invalid", port=1, source="--server")).ask("GET", "/nodes")


def test_a_no_is_told_in_the_servers_words(port: Any, operator: Operator) -> None:
    port.will_answer("GET", "/models/x", {"error": {"code": "unknown_model", "message": "no model x"}}, status=404)
    with pytest.raises(LlmgwError, match=r"^no model x$") as caught:
        operator.ask("GET", "/models/x")
    assert not isinstance(caught.value, NoAnswer | ConfigError)


def test_what_is_written_wrong_is_told_with_every_place(port: Any, operator: Operator) -> None:
    problems = [{"key": "nmae", "where": "m.yaml:1:1", "message": "unknown key"}, {"message": "and more"}]
    error = {"error": {"code": "invalid_config", "message": "wrong", "problems": problems}}
    port.will_answer("POST", "/models", error, status=400)
    with pytest.raises(ConfigError) as caught:
        operator.ask("POST", "/models", {})
    assert caught.value.message == "m.yaml:1:1 nmae: unknown key\nand more"


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (404, "text/html", b"<h1>Prometheus</h1>"),
        (200, "text/plain", b"ok"),
        (500, "application/json", b"not json"),
        (404, "application/json", b'{"error": "not found"}'),
        (404, "application/json", b"[]"),
    ],
)
def test_another_program_on_that_port_is_recognised(
    port: Any, operator: Operator, status: int, kind: str, body: bytes
) -> None:
    port.will_say("GET", "/nodes", status, kind, body)
    with pytest.raises(LlmgwError, match=r"is no operator port of llmgw .* another program has that port"):
        operator.ask("GET", "/nodes")


def test_a_port_that_does_not_speak_http_is_recognised() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                connection.recv(65536)

        greeting = threading.Thread(target=greet)
        greeting.start()
        host, number = listener.getsockname()
        with pytest.raises(LlmgwError, match=r"is no operator port of llmgw \(no HTTP\)"):
            Operator(Address(host=host, port=number, source="the default")).ask("GET", "/nodes")
        greeting.join()


@pytest.mark.parametrize("name", ["", ".", "..", "/x"])
def test_a_name_that_would_be_another_path_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"can't be a name$"):
        as_word(name)


@pytest.mark.parametrize("words", [("explain-placement", ""), ("model", "show", ""), ("model", "rm", "..")])
def test_an_odd_name_is_told_before_anybody_is_asked(port: Any, ctl: Any, words: tuple[str, ...]) -> None:
    ended = ctl(*words)
    assert (ended.status, "can't be a name" in ended.err, port.heard) == (2, True, [])


def test_a_word_of_a_path_has_no_path_in_it() -> None:
    assert as_word("org/m+x") == "org%2Fm%2Bx"
    assert as_node("gpu01.lab") == "gpu01.lab"
    with pytest.raises(UsageError, match=r"^node '\.\./x' is not a DNS name"):
        as_node("../x")


@pytest.mark.parametrize(
    "words",
    [
        ("stop", ""),
        ("load", " "),
        ("model", "rollback", ""),
        ("model", "show", " "),
        ("tool-check", ""),
        ("tool-check", "m", "--replica", ""),
        ("events", "--model", ""),
        ("events", "--node", " "),
        ("engine-check", "vllm", "--node", ""),
        ("explain-placement", ""),
        ("replicas", ""),
    ],
)
def test_an_empty_name_is_wrong_before_anybody_is_asked(port: Any, ctl: Any, words: tuple[str, ...]) -> None:
    ended = ctl(*words)
    assert (ended.status, ended.out, port.heard) == (2, "", [])
    assert "can't be a name" in ended.err
