"""What an engine can do to an answer, and what the client then gets: the same bytes, or an honest end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from lab.running import Llmgw, wait_for
from lab.wire import CHAT, Malformed, Reply, Wire, chat, error_code, get, post

pytestmark = pytest.mark.slow
USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def llmgw(launch: Callable[..., Llmgw]) -> Llmgw:
    return launch()


@pytest.fixture(autouse=True)
def _goes_on(llmgw: Llmgw) -> Any:
    """Whatever an engine did: afterwards the next answer is fine and nothing failed in the program."""
    yield
    llmgw.check_health()


def from_engine(llmgw: Llmgw, body: bytes) -> Reply:
    """What the engine itself answers to the same body."""
    with Wire(("127.0.0.1", llmgw.engine.port)) as wire:
        wire.send(post(CHAT, body, "Connection: close"))
        answer = wire.read_to_end()
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head:
        whole, left = b"", rest
        while True:
            size, _, left = left.partition(b"\r\n")
            if not int(size, 16):
                break
            whole, left = whole + left[: int(size, 16)], left[int(size, 16) + 2 :]
        rest = whole
    return Reply(int(head.split(b" ")[1]), [], rest)


def broken_stream(llmgw: Llmgw, fake: dict[str, Any], code: str = "stream_broken", **fields: Any) -> list[bytes]:
    """The good events of a stream that ends in an error event, no [DONE], and a closed connection."""
    with llmgw.connect() as wire:
        reply = wire.ask(post(CHAT, chat(fake, stream=True, **fields)))
        assert reply.status == 200
        *events, last = reply.events
        assert error_code(json.loads(last)) == code
        assert reply.body.endswith(b"\n\n")
        assert b"[DONE]" not in reply.body
        assert wire.over
    return events


# -- errors as statuses


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", ["llamacpp", "vllm", "sglang", "fastapi", "openai", "html", "empty"])
@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
def test_an_engines_error_keeps_its_status_and_gets_our_shape(
    llmgw: Llmgw, status: int, shape: str, stream: bool
) -> None:
    reply = llmgw.chat({"status": status, "error": shape}, stream=stream)
    assert reply.status == status
    assert reply.code
    assert reply.get("content-type") == "application/json"
    assert reply.get("x-request-id")
    assert (reply.get("retry-after") is not None) == (status in (429, 503))
    if shape not in ("html", "empty"):
        assert reply.json["error"]["message"] == "the fake engine was asked to fail"


@pytest.mark.parametrize("status", [301, 418, 502, 504, 599])
def test_an_odd_status_becomes_an_error_that_clients_know(llmgw: Llmgw, status: int) -> None:
    reply = llmgw.chat({"status": status, "error": "html"})
    assert reply.status == (502 if status == 301 else status)
    assert reply.code


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_leaves_the_connection_usable(llmgw: Llmgw, stream: bool) -> None:
    with llmgw.connect() as wire:
        for _ in range(3):
            assert wire.ask(post(CHAT, chat({"status": 500}, stream=stream))).status == 500
        assert wire.ask(get()).status == 200


# -- streams that are fine


FINE: list[dict[str, Any]] = [
    {},
    {"tokens": 0},
    {"tokens": 40, "interval_ms": 5},
    {"bytewise": True},
    {"split_unicode": True},
    {"crlf": True},
    {"crlf": True, "bytewise": True, "tokens": 2},
    {"crlf": True, "split_unicode": True},
    {"line_kb": 300},
    {"line_kb": 300, "crlf": True},
    {"line_kb": 5000},
    {"tools": True},
    {"tools": True, "bytewise": True},
    {"usage": "every_chunk"},
    {"usage": "none"},
    {"usage": "strings"},
    {"usage": "nulls"},
    {"no_finish": True},
    {"pings": True},
    {"framing": "close"},
    {"framing": "http10"},
    {"close": True},
    {"continues": 2},
    {"odd_headers": True},
    {"headers": [["Content-Encoding", "identity"], ["Connection", "keep-alive"], ["X-Accel-Buffering", "yes"]]},
]


@pytest.mark.parametrize("fake", FINE, ids=str)
def test_a_stream_that_asks_for_usage_comes_through_byte_by_byte(llmgw: Llmgw, fake: dict[str, Any]) -> None:
    body = chat(fake, stream=True, stream_options=USAGE)
    reply = llmgw.ask(post(CHAT, body))
    assert reply.status == 200
    assert reply.body == from_engine(llmgw, body).body
    assert reply.events[-1] == b"[DONE]"


@pytest.mark.parametrize("fake", [fake for fake in FINE if "pings" not in fake], ids=str)
def test_a_stream_that_asks_for_none_is_the_same_without_the_usage_event(llmgw: Llmgw, fake: dict[str, Any]) -> None:
    reply = llmgw.stream(fake)
    assert reply.body == from_engine(llmgw, chat(fake, stream=True)).body
    assert not any(json.loads(event)["choices"] == [] for event in reply.events[:-1])


@pytest.mark.parametrize(
    "options", [None, {}, {"include_usage": False}, {"include_usage": None}, {"continuous_usage_stats": True}]
)
def test_usage_that_was_not_asked_for_is_taken_out_and_all_else_stays(llmgw: Llmgw, options: Any) -> None:
    reply = llmgw.stream(stream_options=options)
    assert reply.body == from_engine(llmgw, chat(stream=True, stream_options=options)).body


@pytest.mark.parametrize("fake", [fake for fake in FINE if "pings" not in fake], ids=str)
def test_a_whole_reply_comes_through_byte_by_byte(llmgw: Llmgw, fake: dict[str, Any]) -> None:
    body = chat(fake)
    assert llmgw.ask(post(CHAT, body)).body == from_engine(llmgw, body).body


@pytest.mark.parametrize("framing", ["chunked", "length", "close", "http10"])
def test_a_whole_reply_comes_through_in_any_framing(llmgw: Llmgw, framing: str) -> None:
    body = chat({"framing": framing, "line_kb": 700})
    with llmgw.connect() as wire:
        assert wire.ask(post(CHAT, body)).body == from_engine(llmgw, body).body
        assert wire.ask(get()).status == 200


@pytest.mark.parametrize("way", [{}, {"bytewise": True}, {"line_kb": 300}, {"tools": True}], ids=str)
def test_an_alias_is_echoed_in_every_event(llmgw: Llmgw, way: dict[str, Any]) -> None:
    reply = llmgw.stream(way, model="other/name", stream_options=USAGE)
    assert {json.loads(event)["model"] for event in reply.events[:-1]} == {"other/name"}
    original = from_engine(llmgw, chat(way, stream=True, model="m", stream_options=USAGE)).body
    assert reply.body == original.replace(b'"model": "m"', b'"model": "other/name"')


@pytest.mark.parametrize("framing", ["chunked", "length"])
@pytest.mark.parametrize("way", [{}, {"bytewise": True}, {"line_kb": 300}], ids=str)
def test_an_alias_is_echoed_in_a_whole_reply(llmgw: Llmgw, way: dict[str, Any], framing: str) -> None:
    way = {**way, "framing": framing}
    reply = llmgw.chat(way, model="other/name")
    assert reply.json["model"] == "other/name"
    original = from_engine(llmgw, chat(way, model="m")).body
    assert reply.body == original.replace(b'"model": "m"', b'"model": "other/name"')


def test_a_text_that_names_the_model_is_no_model_name(llmgw: Llmgw) -> None:
    text = '"model": "m" data: [DONE] "usage": {"choices":[]} '
    reply = llmgw.stream({"text": text, "tokens": 2}, model="other/name")
    said = [json.loads(event)["choices"][0]["delta"].get("content") for event in reply.events[:-1]]
    assert "".join(filter(None, said)) == text * 2


def test_an_answer_to_a_stream_that_is_no_stream_is_passed_on_with_its_type(llmgw: Llmgw) -> None:
    reply = llmgw.ask(post("/v1/embeddings", json.dumps({"model": "m", "input": "x", "stream": True}).encode()))
    assert reply.get("content-type") == "application/json"
    assert reply.json["data"][0]["embedding"] == [0.25, -0.5, 1.0]


# -- streams that break


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("cut", ["events", "event", "frame"])
def test_a_cut_stream_ends_in_an_error_event(llmgw: Llmgw, cut: str, after: int, reset: bool) -> None:
    events = broken_stream(llmgw, {"cut": cut, "after": after, "reset": reset, "tokens": 8, "interval_ms": 1})
    assert all(json.loads(event)["choices"] for event in events)
    if not reset:
        # (a reset may overtake what was sent before it)
        assert len(events) == after


@pytest.mark.parametrize("framing", ["close", "http10"])
@pytest.mark.parametrize("cut", ["events", "event", "frame"])
def test_a_stream_without_framing_that_stops_is_broken_too(llmgw: Llmgw, cut: str, framing: str) -> None:
    events = broken_stream(llmgw, {"cut": cut, "after": 3, "framing": framing, "crlf": True})
    assert len(events) >= 3


def test_a_stream_that_only_names_done_in_its_text_is_broken(llmgw: Llmgw) -> None:
    reply = llmgw.stream({"no_done": True, "no_finish": True, "tokens": 1, "text": "[DONE]\n\ndata: [DONE]"})
    assert error_code(json.loads(reply.events[-1])) == "stream_broken"


def test_a_stream_that_only_speaks_of_errors_is_broken(llmgw: Llmgw) -> None:
    broken_stream(llmgw, {"no_done": True, "no_finish": True, "tokens": 1, "text": '{"error": "no"}'})


@pytest.mark.parametrize("fake", [{}, {"bytewise": True}, {"crlf": True}, {"framing": "close"}], ids=str)
def test_a_stream_without_done_is_broken_however_cleanly_it_ends(llmgw: Llmgw, fake: dict[str, Any]) -> None:
    assert len(broken_stream(llmgw, {**fake, "no_done": True, "tokens": 3})) == 5


def test_a_cut_inside_an_event_too_large_to_hold_cuts_the_connection(llmgw: Llmgw) -> None:
    # tokens 1: the large event is the third
    with llmgw.connect() as wire, pytest.raises((Malformed, ConnectionResetError)):
        wire.ask(post(CHAT, chat({"cut": "frame", "after": 2, "line_kb": 300, "tokens": 1}, stream=True)))


def test_a_cut_before_a_large_event_is_told_as_any_other(llmgw: Llmgw) -> None:
    assert len(broken_stream(llmgw, {"cut": "events", "after": 2, "line_kb": 300, "tokens": 1})) == 2


@pytest.mark.parametrize("cut", ["first_byte", "head"])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_before_the_first_byte_is_never_a_clean_end(llmgw: Llmgw, cut: str, reset: bool, stream: bool) -> None:
    fake = {"cut": cut, "reset": reset}
    if cut == "first_byte":
        reply = llmgw.chat(fake, stream=stream)
        assert (reply.status, reply.code, reply.get("retry-after")) == (502, "engine_failed", "5")
    elif stream:
        assert broken_stream(llmgw, fake) == []
    else:
        with llmgw.connect() as wire, pytest.raises((Malformed, ConnectionResetError)):
            wire.ask(post(CHAT, chat(fake)))


@pytest.mark.parametrize("framing", ["chunked", "length"])
@pytest.mark.parametrize("reset", [False, True])
def test_a_whole_reply_that_breaks_is_never_a_complete_one(llmgw: Llmgw, framing: str, reset: bool) -> None:
    with llmgw.connect() as wire, pytest.raises((Malformed, ConnectionResetError)):
        wire.ask(post(CHAT, chat({"cut": "frame", "framing": framing, "reset": reset})))


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("shape", ["llamacpp", "sglang", "openai"])
def test_an_engines_own_error_event_is_passed_on_and_ends_the_stream(llmgw: Llmgw, shape: str, at: int) -> None:
    fake = {"error_event": at, "error": shape, "after": 99}
    reply = llmgw.stream(fake)
    assert reply.status == 200
    assert len(reply.events) == at + 1 if shape != "sglang" else at + 2
    assert b"[DONE]" not in reply.body
    assert "error" in json.loads(reply.events[-1])


def test_what_an_engine_says_after_its_answer_spoils_no_other(llmgw: Llmgw) -> None:
    with llmgw.connect() as wire:
        for fake in ({"close": True}, {}, {"close": True}, {"framing": "close"}, {}):
            assert wire.ask(post(CHAT, chat(fake))).json["id"] == "fake-1"


@pytest.mark.parametrize(("wait_ms", "times"), [(0, 2), (1500, 1)])
def test_a_kept_connection_that_ends_costs_a_request_only_if_it_was_worked_on(
    llmgw: Llmgw, wait_ms: int, times: int
) -> None:
    """Ended at once it had been closed before the request came; later the engine failed on it, and may fail again."""
    tag = f"t-twice-{wait_ms}"
    assert llmgw.chat().status == 200
    assert llmgw.chat({"head_ms": wait_ms, "cut": "first_byte"}, user=tag).code == "engine_failed"
    assert sum(seen["body"].get("user") == tag for seen in llmgw.engine.requests()) == times


@pytest.mark.parametrize("usage", ["none", "strings", "nulls", "every_chunk"])
@pytest.mark.parametrize("stream", [False, True])
def test_odd_usage_is_counted_as_none_and_good_usage_as_it_is(llmgw: Llmgw, usage: str, stream: bool) -> None:
    reply = llmgw.chat({"usage": usage, "tokens": 3}, stream=stream)
    line = wait_for(
        lambda: [line for line in llmgw.log.split("\n") if str(reply.get("x-request-id")) in line], "its line"
    )
    assert ("tokens=7+3" in line[0]) == (usage == "every_chunk")
