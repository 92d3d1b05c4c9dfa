"""One reply at a time: as engines give them, and as they should not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.dialects.toolreplies import Outcome, Reply, Said, read_plain, read_prompt_tokens, read_streamed

TOOL = "get_weather"
CALL = {"id": "call_1", "type": "function", "function": {"name": TOOL, "arguments": '{"city": "Paris"}'}}


def plain(message: object, finish: object = "stop", **more: Any) -> Reply:
    body = {"choices": [{"index": 0, "message": message, "finish_reason": finish}], **more}
    return Reply(status=200, body=json.dumps(body).encode())


def calling(*calls: object, finish: object = "tool_calls") -> Reply:
    return plain({"role": "assistant", "content": None, "tool_calls": list(calls)}, finish)


def changed(**function: object) -> dict[str, object]:
    return {**CALL, "function": {**CALL["function"], **function}}  # type: ignore[dict-item]


def streamed(*deltas: object, finish: object = "tool_calls", end: bytes = b"data: [DONE]\n\n") -> Reply:
    events: list[object] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if finish is not None:
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return Reply(status=200, body=b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + end)


def pieces(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The deltas of one call in so many pieces."""
    return [{"role": "assistant", "content": ""}, *({"tool_calls": [part]} for part in parts)]


def heard(reply: Reply, *, forced: bool = False) -> Said:
    return read_plain(reply, TOOL, forced=forced)


def seen(reply: Reply, *, forced: bool = False) -> Said:
    return read_streamed(reply, TOOL, forced=forced)


def test_a_call_as_clients_need_it() -> None:
    said = heard(calling(CALL))
    assert (said.outcome, said.words) == (Outcome.CALLED, 'a call: get_weather({"city": "Paris"})')


def test_a_forced_call_may_end_as_openais_do() -> None:
    assert heard(calling(CALL, finish="stop"), forced=True).outcome is Outcome.CALLED
    said = heard(calling(CALL, finish="stop"))
    assert (said.outcome, said.words) == (Outcome.FLAWED, "a faulty call: finish_reason is stop, not tool_calls")


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ({**CALL, "id": None}, "it has no id"),
        ({**CALL, "id": ""}, "it has no id"),
        (changed(name="weather"), 'it names "weather"'),
        (changed(name=None), "it names no function"),
        (changed(arguments={"city": "Paris"}), "its arguments are no text but dict"),
        (changed(arguments='{"city": '), 'its arguments are no JSON object: "{"city":"'),
        (changed(arguments='"Paris"'), 'its arguments are no JSON object: ""Paris""'),
        (changed(arguments=""), "its arguments are no JSON object: nothing"),
    ],
)
def test_what_a_client_would_stumble_over_is_named(call: dict[str, object], fault: str) -> None:
    said = heard(calling(call))
    assert (said.outcome, said.words) == (Outcome.FLAWED, f"a faulty call: {fault}")


def test_a_call_of_the_old_kind_is_no_call_to_a_client_of_today() -> None:
    said = heard(plain({"content": None, "function_call": {"name": TOOL, "arguments": "{}"}}, "function_call"))
    assert said.outcome is Outcome.FLAWED


def test_a_call_as_text_has_its_notation() -> None:
    said = heard(plain({"content": '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'}))
    assert (said.outcome, said.notation) == (Outcome.WRITTEN, "Hermes (Qwen), <tool_call>")
    assert '<tool_call>{"name"' in said.words


def test_text_may_come_in_parts() -> None:
    said = heard(plain({"content": [{"type": "text", "text": "[get_weather("}, 7, {"text": 'city="Paris")]'}]}))
    assert (said.outcome, said.notation) == (Outcome.WRITTEN, "a call in Python")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_call_that_ended_in_the_reasoning_is_found_where_nothing_follows(field: str) -> None:
    thought = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    said = heard(plain({"content": "", field: thought}))
    assert (said.outcome, said.notation) == (Outcome.WRITTEN, "Hermes (Qwen), <tool_call>, in its reasoning")
    assert heard(plain({"content": "It is mild.", field: thought})).outcome is Outcome.ANSWERED


def test_an_answer_without_a_call_and_one_that_was_cut_differ() -> None:
    said = heard(plain({"content": "It is\nmild."}))
    assert (said.outcome, said.words) == (Outcome.ANSWERED, 'no call: "It is mild."')
    said = heard(plain({"content": None, "reasoning_content": "Let me think"}, "length"))
    assert (said.outcome, said.words) == (Outcome.CUT, 'cut off before a call: "Let me think"')
    assert heard(plain({"content": None})).words == "no call: nothing"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "200 with something that is no chat completion"),
        (b"<html>", "200 with something that is no chat completion"),
        (b"[" * 100_000, "200 with something that is no chat completion"),
        (b'{"choices": []}', "200 with something that is no chat completion"),
        (b'{"choices": {"0": 1}}', "200 with something that is no chat completion"),
        (b'{"error": {"message": "out of memory"}}', "200 with an error: out of memory"),
        (b'{"error": "out of memory"}', "200 with an error: out of memory"),
        (b'{"error": {"code": 1}}', "200 with an error: one without a message"),
    ],
)
def test_what_is_no_answer_failed(body: bytes, words: str) -> None:
    assert heard(Reply(status=200, body=body)) == Said(outcome=Outcome.FAILED, words=words)


def test_what_did_not_come_failed_with_its_reason() -> None:
    late = Reply(status=200, problem="the answer came to no end within 120 s")
    assert heard(late) == seen(late) == Said(outcome=Outcome.FAILED, words="the answer came to no end within 120 s")


def test_a_streamed_call_is_put_together() -> None:
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": TOOL, "arguments": ""}}
    parts = [{"index": 0, "function": {"arguments": piece}} for piece in ('{"ci', 'ty": "Par', 'is"}')]
    said = seen(streamed(*pieces(first, *parts)))
    assert (said.outcome, said.words) == (Outcome.CALLED, 'a call: get_weather({"city": "Paris"})')
    assert seen(streamed(*pieces({"index": 0, **CALL}))).outcome is Outcome.CALLED


def test_two_streamed_calls_are_kept_apart() -> None:
    one, two = ({"index": index, "id": f"c{index}", "function": {"name": TOOL, "arguments": "{"}} for index in (0, 1))
    ends = [{"index": index, "function": {"arguments": "}"}} for index in (1, 0)]
    assert seen(streamed(*pieces(one, two, *ends))).outcome is Outcome.CALLED


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([CALL], "a piece of it has no index"),
        ([{"index": "0", **CALL}], "a piece of it has no index"),
        ([{"index": [], **CALL}], "a piece of it has no index"),
        ([{"index": 0, **changed(arguments="")}, {"function": {"arguments": "{}"}}], "a piece of it has no index"),
        ([{"index": 0, "function": {"name": TOOL, "arguments": "{}"}}], "it has no id"),
        ([{"index": 0, "id": "c", "function": {"arguments": "{}"}}], "it names no function"),
        ([{"index": 0, **changed(arguments='{"ci')}], 'its arguments are no JSON object: "{"ci"'),
    ],
)
def test_what_a_reader_of_streams_would_stumble_over_is_named(parts: list[Any], fault: str) -> None:
    said = seen(streamed(*pieces(*parts)))
    assert (said.outcome, said.words) == (Outcome.FLAWED, f"a faulty call: {fault}")


def test_a_streamed_call_as_text_is_found_over_its_pieces() -> None:
    parts = [{"content": piece} for piece in ("<tool", '_call>{"name": "get_', 'weather", "argu', 'ments": {}}')]
    assert seen(streamed(*parts, finish="stop")).notation == "Hermes (Qwen), <tool_call>"


def test_a_stream_that_ends_early_or_in_an_error_failed() -> None:
    cut = streamed({"content": "It is"}, finish=None, end=b"")
    assert seen(cut).words == "the stream broke off before its end"
    assert seen(streamed({"content": "It is"}, finish=None)).outcome is Outcome.ANSWERED
    broken = streamed({"content": "It"}, finish=None, end=b'data: {"error": {"message": "engine died"}}\n\n')
    assert seen(broken).words == "the stream ended in an error: engine died"
    assert seen(plain({"content": "no stream"})).words == "200 with something that is no stream of a chat completion"
    assert seen(streamed({"content": "It"}, finish="length")).outcome is Outcome.CUT


@pytest.mark.parametrize(
    ("usage", "count"),
    [
        ({"prompt_tokens": 53}, 53),
        ({"prompt_tokens": 0}, None),
        ({"prompt_tokens": -1}, None),
        ({"prompt_tokens": True}, None),
        ({"prompt_tokens": 5.0}, None),
        ({"prompt_tokens": "53"}, None),
        ({}, None),
        (None, None),
        ([], None),
    ],
)
def test_prompt_tokens_are_told_or_not_known(usage: object, count: int | None) -> None:
    assert read_prompt_tokens(plain({"content": "x"}, usage=usage)) == count


def test_of_no_reply_no_tokens_are_known() -> None:
    reply = plain({"content": "x"}, usage={"prompt_tokens": 5})
    assert read_prompt_tokens(Reply(status=500, body=reply.body)) is None
    assert read_prompt_tokens(Reply(status=200, body=reply.body, problem="cut")) is None


KEYS = st.sampled_from(
    [
        *("choices", "message", "delta", "tool_calls", "function", "name", "arguments", "index", "id", "content"),
        *("reasoning_content", "finish_reason", "error", "function_call", "usage", "prompt_tokens", "text"),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=30,
)
DOCUMENTS = JSON.map(lambda value: json.dumps(value).encode())
MESSAGES = st.dictionaries(KEYS, JSON, max_size=6).map(
    lambda inner: json.dumps({"choices": [{"message": inner, "delta": inner, **inner}], **inner}).encode()
)


@given(
    body=st.one_of(
        st.binary(),
        DOCUMENTS,
        MESSAGES,
        st.lists(st.one_of(DOCUMENTS, MESSAGES, st.binary(max_size=20)), max_size=4).map(
            lambda events: b"".join(b"data: %b\n\n" % event for event in events)
        ),
    ),
    forced=st.booleans(),
)
def test_whatever_comes_is_read(body: bytes, forced: bool) -> None:
    reply = Reply(status=200, body=body)
    for said in (heard(reply, forced=forced), seen(reply, forced=forced)):
        assert said.words
        said.words.encode()
        assert len(said.words) < 1000
    read_prompt_tokens(reply)
