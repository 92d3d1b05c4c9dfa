"""Every limit in time, made short: whoever stands still is refused in words or let go, and all else goes on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lab.running import Llmgw, wait_for
from lab.wire import CHAT, Reply, Wire, chat, error_code, get, post

pytestmark = pytest.mark.slow
# A loaded machine stands still for a second: what must not run into a limit stays far below these.
TIMEOUTS = {
    "response_header": "4s",
    "idle": "3s",
    "generation": "6s",
    "stream_open_after": "1s",
    "keep_alive_comment": "300ms",
    "head": "2s",
    "body": "2s",
    "keep_alive": "4s",
    "drain": "1s",
}


@pytest.fixture(scope="module")
def llmgw(launch: Callable[..., Llmgw]) -> Llmgw:
    return launch(timeouts=TIMEOUTS)


@pytest.fixture(autouse=True)
def _goes_on(llmgw: Llmgw) -> Iterator[None]:
    yield
    llmgw.check_health()


# -- clients that take their time


def test_what_never_comes_is_not_waited_for(llmgw: Llmgw) -> None:
    """All of them wait at the same time."""
    heads = [b"G", b"GET / HTTP/1.1\r\nHost: x\r\n", get() + b"GET /", get() + b"GET / HTTP/1.1\r\nX: "]
    bodies = [
        get(CHAT, way, method="POST") + b"5\r\nhel" for way in ("Content-Length: 9", "Transfer-Encoding: chunked")
    ]
    with contextlib.ExitStack() as stack:
        fresh, used, *wires = (stack.enter_context(Wire(llmgw.address)) for _ in range(8))
        assert used.ask(get()).status == 200
        for wire, said in zip(wires, [*heads, *bodies], strict=True):
            wire.send(said)
        for wire, said in zip(wires, [*heads, *bodies], strict=True):
            if said.startswith(get()):
                assert wire.read_reply().status == 200
            reply = wire.read_reply()
            assert (reply.status, reply.code) == (408, "request_timeout")
            assert reply.get("x-request-id")
            assert wire.over
        assert fresh.over
        assert used.over


def test_a_head_that_comes_in_drops_is_refused(llmgw: Llmgw) -> None:
    """Each drop would begin the time anew, if it were a time between bytes."""
    with llmgw.connect() as wire:
        began = time.monotonic()
        wire.sock.settimeout(0.2)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for byte in get("/health", "X-Long: " + "x" * 10_000):
                wire.send(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    wire.more()
                if wire.buffer:
                    break
                assert time.monotonic() - began < 60
        wire.sock.settimeout(60)
        assert wire.read_reply().status == 408


def test_a_slow_body_is_taken_while_it_comes(llmgw: Llmgw) -> None:
    """Longer in all than the limit between its bytes."""
    request = post(CHAT, chat(padding="x" * 40))
    with llmgw.connect() as wire:
        wire.send(request[:-30])
        for at in range(30, 0, -3):
            time.sleep(0.3)
            wire.send(request[len(request) - at : len(request) - at + 3])
        assert wire.read_reply().status == 200


def test_a_client_that_stops_reading_is_let_go(llmgw: Llmgw) -> None:
    with llmgw.connect(receive_bytes=4096) as wire:
        wire.send(post(CHAT, chat({"flood": -1}, stream=True, user="t-stalled")))
        assert llmgw.engine.wait_ended("t-stalled")["state"] == "left"
        assert (
            "client_stalled" in wait_for(lambda: [line for line in llmgw.log.split("\n") if "stalled" in line], "")[0]
        )


def test_a_client_that_never_reads_its_answers_is_let_go(llmgw: Llmgw) -> None:
    with llmgw.connect(receive_bytes=4096) as wire:
        wire.sock.settimeout(1)
        with contextlib.suppress(TimeoutError, ConnectionError):
            for _ in range(200_000):
                wire.send(get("/v1/models"))

        def gone() -> bool:
            with contextlib.suppress(TimeoutError, BlockingIOError):
                try:
                    wire.sock.send(b"G")
                except ConnectionError:
                    return True
            return False

        wait_for(gone, "the end of a connection")


# -- engines that take their time


def ask_at_once(llmgw: Llmgw, *bodies: bytes) -> list[Reply]:
    """Several chats at the same time, each on a connection that must end with its answer if that is an error."""
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(llmgw.address)) for _ in bodies]
        for wire, body in zip(wires, bodies, strict=True):
            wire.send(post(CHAT, body))
        replies = [wire.read_reply() for wire in wires]
        for wire, reply in zip(wires, replies, strict=True):
            if reply.get("content-type") == "text/event-stream" and b"[DONE]" not in reply.body:
                assert wire.over
    return replies


def test_an_engine_that_never_answers_is_given_up(llmgw: Llmgw) -> None:
    fakes: list[dict[str, Any]] = [{"silence": "head"}, {"tokens": 1, "interval_ms": 60_000}]
    whole = [chat(fake, user=f"t-mute-{at}") for at, fake in enumerate(fakes)]
    *replies, stream = ask_at_once(llmgw, *whole, chat({"silence": "head"}, stream=True, user="t-mute-2"))
    for reply in replies:
        assert (reply.status, reply.code) == (504, "engine_timeout")
    # it was opened after a second, kept alive, and ends in an error event
    assert stream.status == 200
    assert stream.body.count(b": keep-alive\n\n") >= 3
    (event,) = stream.events
    assert error_code(json.loads(event)) == "engine_timeout"
    for at in range(3):
        assert llmgw.engine.wait_ended(f"t-mute-{at}")["state"] == "left"


def test_an_engine_that_falls_silent_is_given_up(llmgw: Llmgw) -> None:
    ways: list[dict[str, Any]] = [{}, {"bytewise": True}, {"crlf": True}, {"framing": "close"}]
    fakes = [{**way, "silence": "events", "after": after} for way in ways for after in (0, 3)]
    replies = ask_at_once(llmgw, *(chat(fake, stream=True, user=f"t-silent-{fake}") for fake in fakes))
    for fake, reply in zip(fakes, replies, strict=True):
        *events, last = reply.events
        assert len(events) == fake["after"]
        assert error_code(json.loads(last)) == "stream_broken"
        assert reply.body.count(b": keep-alive\n\n") >= 3
        assert llmgw.engine.wait_ended(f"t-silent-{fake}")["state"] == "left"


def test_a_slow_first_token_is_waited_for_with_comments(llmgw: Llmgw) -> None:
    reply = llmgw.stream({"head_ms": 2500, "tokens": 2}, stream_options={"include_usage": True})
    assert reply.body.startswith(b": keep-alive\n\n")
    assert reply.get("content-type") == "text/event-stream"
    assert reply.events[-1] == b"[DONE]"
    assert len(reply.events) == 6


def test_a_slow_stream_is_kept_alive_between_its_events_and_is_else_untouched(llmgw: Llmgw) -> None:
    fake = {"tokens": 3, "interval_ms": 900}
    slow, quick = llmgw.stream(fake), llmgw.stream({**fake, "interval_ms": 0})
    assert slow.body.count(b": keep-alive\n\n") >= 3
    assert slow.body.replace(b": keep-alive\n\n", b"") == quick.body


def test_comments_are_not_put_into_the_middle_of_an_event(llmgw: Llmgw) -> None:
    """1-byte writes of an event that takes longer than the time between comments."""
    reply = llmgw.stream({"split_unicode": True, "tokens": 30, "bytewise": True, "text": "ü" * 300})
    for event in reply.events[:-1]:
        json.loads(event)


def test_an_error_after_a_stream_was_opened_is_an_event(llmgw: Llmgw) -> None:
    with llmgw.connect() as wire:
        reply = wire.ask(post(CHAT, chat({"head_ms": 1500, "status": 500, "error": "vllm"}, stream=True)))
        assert reply.status == 200
        (event,) = reply.events
        assert json.loads(event)["error"]["message"] == "the fake engine was asked to fail"
        assert wire.over


def test_a_cut_after_a_stream_was_opened_is_an_event(llmgw: Llmgw) -> None:
    reply = llmgw.stream({"head_ms": 1500, "cut": "first_byte"})
    assert [error_code(json.loads(event)) for event in reply.events] == ["engine_failed"]


def test_a_whole_reply_may_take_longer_than_a_streams_first_event(llmgw: Llmgw) -> None:
    """It is cut by timeouts.generation alone."""
    assert llmgw.chat({"tokens": 1, "interval_ms": 4500}).status == 200
