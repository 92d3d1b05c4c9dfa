"""What happens to an engine's bytes on their way: events leave whole, and filters touch what they name only."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.sse import last_boundary
from llmgw.dialects.openai import Usage
from llmgw.door.relay import (
    HOLD_BYTES,
    KEEP_BYTES,
    EchoAlias,
    EventRelay,
    Filter,
    StripUsage,
    WholeRelay,
    usage_in_events,
    usage_in_reply,
)

cuts = st.lists(st.integers(0, 5000), max_size=40)


def split(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in at), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges) if start < end]


def delta(text: str, **more: object) -> bytes:
    return json.dumps({"id": "c", "choices": [{"delta": {"content": text}}], "model": "served", **more}).encode()


def stream(*data: bytes, end: bytes = b"\n\n") -> bytes:
    return b"".join(b"data: %b%b" % (each, end) for each in data)


LONE = b'{"id":"c","choices":[],"model":"served","usage":{"prompt_tokens":3,"completion_tokens":5}}'
CHUNKS = (delta("h\u00e9"), delta("llo"), delta('"usage":{} \n\n data: [DONE]'))
PLAIN = stream(*CHUNKS, b"[DONE]")
WITH_USAGE = stream(*CHUNKS, LONE, b"[DONE]")


def relayed(pieces: list[bytes], *filters: Filter) -> tuple[bytes, bool]:
    relay = EventRelay(filters)
    out = b"".join(relay.feed(piece) for piece in pieces)
    rest, complete = relay.end()
    return out + rest, complete


# -- whole events


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\n\n"])
@given(at=cuts)
def test_any_split_passes_the_same_bytes_in_whole_events(end: bytes, at: list[int]) -> None:
    data = b": hello" + end + stream(*CHUNKS, b"[DONE]", end=end)
    relay = EventRelay(())
    out = b""
    for piece in split(data, at):
        moved = relay.feed(piece)
        assert relay.at_boundary
        assert not moved or last_boundary(out + moved) == len(out + moved)
        out += moved
    rest, complete = relay.end()
    assert (out + rest).rstrip(b"\r\n") == data.rstrip(b"\r\n")
    assert complete


def test_byte_by_byte_is_as_good_as_at_once() -> None:
    assert relayed([WITH_USAGE[at : at + 1] for at in range(len(WITH_USAGE))]) == relayed([WITH_USAGE])


def test_an_event_too_large_to_hold_passes_in_pieces_and_changes_no_byte() -> None:
    data = stream(delta("x" * 300_000), b"[DONE]")
    relay = EventRelay(())
    out, inside = b"", 0
    for at in range(0, len(data), 5000):
        out += relay.feed(data[at : at + 5000])
        inside += not relay.at_boundary
        assert len(relay._held) <= HOLD_BYTES + 5000
    assert inside > 0
    assert relay.at_boundary
    assert out == data
    assert relay.end() == (b"", True)


def test_the_first_event_is_not_a_comment() -> None:
    relay = EventRelay(())
    relay.feed(b": ping\n\n")
    assert not relay.began
    relay.feed(b"data: x\n\n")
    assert relay.began


# -- how it ends


@pytest.mark.parametrize(
    ("data", "complete"),
    [
        (stream(delta("a"), b"[DONE]"), True),
        (b"data:[DONE]\r\n\r\n", True),
        (
            stream(b"[DONE]") + b": bye, and a rather long farewell it is, longer than anybody would want to read\n\n",
            True,
        ),
        (stream(b"[DONE]") + b"\n", True),
        (b"data: [DONE]", True),
        (stream(b'{"error": {"message": "out of memory"}}'), True),
        (b'event: error\ndata: {"detail":"x"}\n\n', True),
        (stream(b'{"error":"boom"}'), True),
        (b"", False),
        (stream(delta("a")), False),
        (stream(delta("[DONE]")), False),
        (stream(delta("error")), False),
        (stream(delta('{"error": "no"}')), False),
        (stream(b'{"choices":[{"delta":{"error":"no"}}]}'), False),
        (stream(b'{"choices":[{"delta":{"tool_calls":[{"error":{"code":1}}]}}]}'), False),
        (stream(b'{"error":null,"choices":[]}'), False),
        (stream(b'{"error":{}}'), False),
        (stream(b'{"error":{"message":"x"}}', b"[DONE]"), True),
        (stream(b"[DONE]", delta("a")), False),
        (stream(delta("a")) + b'data: {"choi', False),
    ],
)
def test_a_stream_is_complete_with_its_last_word_only(data: bytes, complete: bool) -> None:
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        assert relayed(pieces)[1] is complete


def test_a_last_event_without_its_blank_line_gets_one() -> None:
    out, complete = relayed([b"data: 1\n\ndata: [DONE]\n"])
    assert out == b"data: 1\n\ndata: [DONE]\n\n"
    assert complete


# -- the usage that was asked for on our own account


@given(cuts)
def test_the_lone_usage_event_is_taken_out_under_any_split(at: list[int]) -> None:
    out, complete = relayed(split(WITH_USAGE, at), StripUsage())
    assert out == PLAIN
    assert complete


def test_usage_that_comes_with_text_stays() -> None:
    continuous = stream(
        delta("a", usage={"prompt_tokens": 1, "completion_tokens": 1}), delta("b", usage=None), b"[DONE]"
    )
    assert relayed([continuous], StripUsage())[0] == continuous


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices":[],"usage":null}',
        b'{"choices":[],"prompt_filter_results":[{"usage":1}]}',
        b'{"choices":null,"usage":{"prompt_tokens":1}}',
        b'{"usage":{"prompt_tokens":1}}',
        b'not json with "usage"',
    ],
)
def test_what_is_no_lone_usage_event_stays(event: bytes) -> None:
    data = stream(event, b"[DONE]")
    assert relayed([data], StripUsage())[0] == data


@given(cuts)
def test_no_byte_of_a_huge_event_is_lost_to_the_usage_filter(at: list[int]) -> None:
    data = stream(delta('x"usage"y' + "x" * 2000 + '"usage"', usage={"prompt_tokens": 1}), b"[DONE]")
    pieces = [data[:900], b"x" * (HOLD_BYTES + 1), *split(data[900:], at)]
    assert relayed(pieces, StripUsage())[0] == b"".join(pieces)


def test_a_huge_event_that_talks_of_usage_keeps_its_bytes() -> None:
    text = ('"usage" ' * 20_000).replace('"', "'") + "y" * 100
    data = b'data: {"usage":null,"choices":[{"delta":{"content":"' + text.encode() + b'"}}]}\n\ndata: [DONE]\n\n'
    pieces = [data[at : at + 10_000] for at in range(0, len(data), 10_000)]
    assert relayed(pieces, StripUsage())[0] == data


# -- the name that was asked for


@given(cuts)
def test_the_alias_comes_back_in_every_event_under_any_split(at: list[int]) -> None:
    out, _ = relayed(split(WITH_USAGE, at), StripUsage(), EchoAlias(("served",), "m\u00fcller/x", whole=False))
    documents = [json.loads(line[6:]) for line in out.splitlines() if line.startswith(b"data: {")]
    assert [document["model"] for document in documents] == ["m\u00fcller/x"] * 3
    assert documents[2]["choices"] == json.loads(CHUNKS[2])["choices"]


@given(cuts, st.sampled_from(['"model":"se"rved"', '"model": "se\\rved"', '"model" : "se\u00e9"', 'model":"x']))
def test_the_alias_comes_back_in_a_whole_reply_under_any_split(at: list[int], served: str) -> None:
    reply = {"x": "1" * 40, "model": served, "text": '"model":"' + served, "model2": served}
    for body in (json.dumps(reply).encode(), json.dumps(reply, ensure_ascii=False, indent=1).encode()):
        relay = WholeRelay((EchoAlias((served,), "asked \\1 \\g<1>", whole=True),))
        out = b"".join(relay.feed(piece) for piece in split(body, at)) + relay.end()
        assert json.loads(out) == {**reply, "model": "asked \\1 \\g<1>"}


@given(cuts)
def test_the_alias_comes_back_in_a_huge_event_wherever_it_is_cut(at: list[int]) -> None:
    start = b'data: {"choices":[{"delta":{"content":"' + b"x" * HOLD_BYTES + b'"}}],'
    tail = b'"created":1,"id":"x","model":"served","object":"chunk"}\n\n'
    pieces = [start, *split(tail, at)]
    out, _ = relayed(pieces, EchoAlias(("served",), "asked", whole=False))
    assert out == (start + tail).replace(b"served", b"asked")


def test_words_of_a_reply_are_not_renamed() -> None:
    text = json.dumps({"content": '{"model":"served"}', "other": "served"}).encode()
    assert EchoAlias(("served",), "asked", whole=False).feed(text + b"\n\n") == text + b"\n\n"


# -- whole replies


@given(cuts)
def test_a_whole_reply_keeps_its_bytes(at: list[int]) -> None:
    body = json.dumps({"choices": ["x" * 300], "usage": {"prompt_tokens": 3}}).encode()
    relay = WholeRelay(())
    assert b"".join(relay.feed(piece) for piece in split(body, at)) + relay.end() == body
    assert relay.tail == body


def test_a_usage_filter_takes_nothing_from_a_reply_that_is_no_stream() -> None:
    body = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}'
    relay = WholeRelay((StripUsage(), EchoAlias(("served",), "asked", whole=True)))
    assert relay.feed(body) + relay.end() == body


def test_of_a_large_reply_the_end_is_kept() -> None:
    relay = WholeRelay(())
    for _ in range(100):
        relay.feed(b"x" * 10_000)
    relay.feed(b'"usage": {"prompt_tokens": 4, "completion_tokens": 2}}')
    assert KEEP_BYTES <= len(relay.tail) < KEEP_BYTES + 10_100
    assert usage_in_reply(relay.tail) == Usage(4, 2)


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'{"usage":{"prompt_tokens":1,"completion_tokens":2}}', Usage(1, 2)),
        (b'xyz"}],"usage":{"prompt_tokens":1,"details":{"a":{}}},"x":1}', Usage(1, 0)),
        (b'xyz"usage":{"prompt_tokens":9}} "usage" : {"prompt_tokens":1}', Usage(1, 0)),
        (b'\xff\xfe"usage":{"prompt_tokens":1}', Usage(1, 0)),
        (b'"usage":{"prompt_tokens":', None),
        (b'"usage":{"prompt_tokens":"many"}', None),
        (b'"usage":null', None),
        (b"", None),
        (b'"usage":' + b'{"a":' * 100_000, None),
    ],
)
def test_the_usage_of_a_reply_is_found_at_its_end(tail: bytes, usage: Usage | None) -> None:
    assert usage_in_reply(tail) == usage


def test_the_last_usage_of_a_piece_of_a_stream_counts() -> None:
    assert usage_in_events(WITH_USAGE) == Usage(3, 5)
    assert usage_in_events(stream(LONE, b'{"usage":null}', b'{"usage":{"prompt_tokens":"x"}}')) == Usage(3, 5)
    assert usage_in_events(PLAIN) is None


@given(cuts)
def test_the_usage_is_remembered_whatever_the_packets(at: list[int]) -> None:
    relay = EventRelay((StripUsage(),))
    for piece in split(WITH_USAGE, at):
        relay.feed(piece)
    relay.end()
    assert usage_in_events(relay.usage_piece) == Usage(3, 5)


@pytest.mark.parametrize(
    ("data", "done"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data: [DONE]\n\n\n", True),
        (b"data: [DONE]\n", True),
        (b"data: [DONE]", True),
        (b"data: [DON", False),
        (b"data: [DONE]\n\ndata: 1", False),
        (b"data: 1\n\n", False),
        (b": comment\n\n", False),
        (b"", False),
    ],
)
def test_a_relay_knows_when_nothing_more_matters(data: bytes, done: bool) -> None:
    for at in range(len(data) + 1):
        relay = EventRelay(())
        for piece in (data[:at], data[at:]):
            if piece:
                relay.feed(piece)
        assert relay.done is done
        # and looking changes nothing
        assert relay.done is done
        assert relay.end()[1] is done


@given(at=cuts)
def test_any_of_the_names_that_an_engine_may_use_is_echoed(at: list[int]) -> None:
    data = b'{"model":"base","x":{"model": "base:sql"},"y":{"model":"base:sq"}}'
    relay = WholeRelay((EchoAlias(("base", "base:sql"), "sql", whole=True),))
    out = b"".join(relay.feed(piece) for piece in split(data, at)) + relay.end()
    assert out == b'{"model":"sql","x":{"model": "sql"},"y":{"model":"base:sq"}}'
