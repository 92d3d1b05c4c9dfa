"""A whole check against endpoints of every kind, and its verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.dialects.toolcheck import (
    MAX_TOKENS,
    UNSEEN_TOKENS,
    Findings,
    Parsers,
    Report,
    Request,
    Verdict,
    advance,
    ask_about_tools,
    judge,
)
from llmgw.dialects.toolreplies import Outcome, Reply

RECORDED = Path(__file__).parent / "recorded"
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
VLLM_REFUSAL = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'

Answer = Callable[[dict[str, Any]], Reply]


@dataclass(frozen=True)
class Flag:
    flag: str
    given: str | None = None
    suggested: str | None = None
    beside: str | None = None


VLLM = Parsers(by_engine={"vLLM": Flag("--tool-call-parser", None, "hermes")}, keyed=frozenset({"vLLM"}), profile="p")


def find(answer: Answer, sent: list[dict[str, Any]] | None = None) -> Findings:
    """Carry the exchange out with an endpoint that is a function."""
    steps = ask_about_tools("m")
    step = advance(steps, None)
    while isinstance(step, Request):
        body = json.loads(step.body)
        assert step.streamed == body.get("stream", False)
        if sent is not None:
            sent.append(body)
        step = advance(steps, answer(body))
    return step


def check(answer: Answer, parsers: Parsers = VLLM) -> Report:
    return judge(find(answer), parsers)


def error(status: int, message: str, **more: Any) -> Reply:
    return Reply(status=status, body=json.dumps({"error": {"message": message, **more}}).encode())


def ok(
    body: dict[str, Any],
    *,
    content: str | None = None,
    call: bool = False,
    finish: str = "stop",
    tokens: int | None = 9,
) -> Reply:
    """A reply in the way that was asked for."""
    streamed = body.get("stream", False)
    message: dict[str, Any] = {"content": content}
    if call:
        message["tool_calls"] = [{"index": 0, **CALL}] if streamed else [CALL]
        finish = "tool_calls"
    usage = {"usage": {"prompt_tokens": tokens}} if tokens is not None else {}
    choice = {"index": 0, "finish_reason": finish, ("delta" if streamed else "message"): message}
    text = json.dumps({"choices": [choice], **usage})
    return Reply(status=200, body=(f"data: {text}\n\ndata: [DONE]\n\n" if streamed else text).encode())


def shows_tools(answer: Answer) -> Answer:
    """The template has the tools: each prompt with them is longer, and the tiny requests come to nothing."""

    def play(body: dict[str, Any]) -> Reply:
        if "tool_choice" not in body:
            return ok(body, content="The", finish="length", tokens=50 if "tools" in body else 9)
        return answer(body)

    return play


def is_auto(body: dict[str, Any]) -> bool:
    return body["tool_choice"] == "auto"


def test_what_is_asked() -> None:
    sent: list[dict[str, Any]] = []
    find(shows_tools(lambda body: ok(body, call=True)), sent)
    assert [("tools" in body, body.get("tool_choice"), body.get("stream")) for body in sent] == [
        (False, None, None),
        (True, None, None),
        (True, "auto", False),
        (True, "auto", True),
        (True, {"type": "function", "function": {"name": "get_weather"}}, False),
        (True, {"type": "function", "function": {"name": "get_weather"}}, True),
    ]
    assert {(body["model"], body["temperature"]) for body in sent} == {("m", 0)}
    assert [body["max_tokens"] for body in sent] == [1, 1, *[MAX_TOKENS] * 4]
    assert len({json.dumps(body["messages"]) for body in sent}) == 1


def test_tool_calls_that_work() -> None:
    report = check(shows_tools(lambda body: ok(body, call=True)))
    assert (report.verdict, report.remedy) == (Verdict.WORKS, None)
    assert (report.tokens_without, report.tokens_with) == (9, 50)
    assert [(each.request, each.outcome) for each in report.exchanges] == [
        ("without tools", Outcome.ANSWERED),
        ("with tools", Outcome.ANSWERED),
        ("auto", Outcome.CALLED),
        ("auto, streamed", Outcome.CALLED),
        ("forced", Outcome.CALLED),
        ("forced, streamed", Outcome.CALLED),
    ]


def test_a_model_that_sees_no_tools_is_not_listened_to_for_long() -> None:
    sent: list[dict[str, Any]] = []
    assert judge(find(lambda body: ok(body, content="Mild."), sent), VLLM).verdict is Verdict.TEMPLATE_DROPS
    assert [body["max_tokens"] for body in sent] == [1, 1, *[UNSEEN_TOKENS] * 4]
    sent.clear()
    find(lambda body: ok(body, content="Mild.", tokens=None), sent)
    assert [body["max_tokens"] for body in sent] == [1, 1, *[MAX_TOKENS] * 4]


def recorded(name: str) -> Answer:
    """What a real engine answered, in the order of the requests."""
    replies = iter(json.loads((RECORDED / f"{name}.json").read_text()))

    def play(body: dict[str, Any]) -> Reply:
        told = next(replies)
        return Reply(status=told["status"], body=told["body"].encode())

    return play


def test_llama_cpp_with_a_template_that_knows_no_tools() -> None:
    report = check(recorded("llamacpp-drops"))
    assert report.verdict is Verdict.TEMPLATE_DROPS
    assert (report.tokens_without, report.tokens_with) == (53, 53)
    assert "53 tokens with them and without" in report.message


def test_llama_cpp_with_a_model_that_has_never_seen_tools() -> None:
    report = check(recorded("llamacpp-ignores"))
    assert report.verdict is Verdict.IGNORES
    assert (report.tokens_without, report.tokens_with) == (31, 201)


def test_a_call_that_nobody_parsed_names_the_parser() -> None:
    report = check(shows_tools(lambda body: ok(body, content=HERMES)))
    assert report.verdict is Verdict.PARSER_MISSED
    assert report.message.endswith("the call comes as text (Hermes (Qwen), <tool_call>)")
    assert report.remedy == "set tool_parser: hermes in profile p (--tool-call-parser of vLLM)"


def test_a_forced_call_does_not_hide_that_the_others_are_not_parsed() -> None:
    report = check(shows_tools(lambda body: ok(body, content=HERMES) if is_auto(body) else ok(body, call=True)))
    assert report.verdict is Verdict.PARSER_MISSED


@pytest.mark.parametrize(
    ("parsers", "remedy"),
    [
        (
            Parsers(
                by_engine={"vLLM": Flag("--tool-call-parser", "mistral", "hermes")},
                keyed=frozenset({"vLLM"}),
                profile="p",
            ),
            "tool_parser is mistral in profile p and does not fit what came; hermes may (vLLM)",
        ),
        (
            Parsers(by_engine={"vLLM": Flag("--tool-call-parser", "hermes", "hermes")}),
            "--tool-call-parser is hermes and does not fit what came (vLLM)",
        ),
        (
            Parsers(by_engine={"llama.cpp": Flag("--chat-template-file")}, profile="p"),
            "put --chat-template-file VALUE into args of profile p (llama.cpp)",
        ),
        (
            Parsers(by_engine={"llama.cpp": Flag("--jinja", "--no-jinja")}),
            "give llama.cpp --jinja in the place of --no-jinja",
        ),
        (
            Parsers(by_engine={"A": Flag("--a", None, "x", "--auto"), "B": Flag("--b")}, sure=False),
            "it depends on the engine: start A with --auto --a x; start B with --b VALUE",
        ),
        (
            Parsers(by_engine={"A": None}),
            "A has no flag for it: it goes by the model's chat template, so give it one that fits",
        ),
        (Parsers(by_engine={}), "look how the engine is told which parser the model's calls need"),
    ],
)
def test_each_remedy_for_a_parser(parsers: Parsers, remedy: str) -> None:
    assert check(shows_tools(lambda body: ok(body, content=HERMES)), parsers).remedy == remedy


def test_vllm_without_a_parser_refuses_and_the_parser_is_named() -> None:
    def play(body: dict[str, Any]) -> Reply:
        return error(400, VLLM_REFUSAL, type="BadRequestError", code=400) if "tools" in body else ok(body, content="x")

    report = check(play)
    assert report.verdict is Verdict.REFUSES
    assert report.message == f"the endpoint refuses tools (400: {VLLM_REFUSAL})"
    assert report.remedy == "set tool_parser: hermes in profile p (--tool-call-parser of vLLM)"
    assert report.tokens_with is None


@pytest.mark.parametrize("status", [400, 403, 404, 500, 501])
def test_an_endpoint_that_refuses_tools_is_quoted(status: int) -> None:
    report = check(lambda body: error(status, "no tools here") if "tools" in body else ok(body, content="x"))
    assert (report.verdict, report.remedy) == (Verdict.REFUSES, None)
    assert f"{status}: no tools here" in report.message


def test_a_refusal_of_many_words_is_clipped() -> None:
    report = check(lambda body: error(400, "no " * 5000) if "tools" in body else ok(body, content="x"))
    assert len(report.message) < 1000


def test_older_vllm_forces_without_a_parser() -> None:
    def play(body: dict[str, Any]) -> Reply:
        return error(400, VLLM_REFUSAL) if is_auto(body) else ok(body, call=True)

    report = check(shows_tools(play))
    assert report.verdict is Verdict.PARTLY
    assert "forced works, forced, streamed works, not auto (400: " in report.message
    assert report.remedy == "set tool_parser: hermes in profile p (--tool-call-parser of vLLM)"


def test_calls_that_work_whole_and_not_streamed() -> None:
    report = check(shows_tools(lambda body: ok(body, content=HERMES) if body["stream"] else ok(body, call=True)))
    assert report.verdict is Verdict.PARTLY
    assert "auto works, forced works, not auto, streamed (a call as text" in report.message


def test_calls_that_a_model_makes_only_when_forced() -> None:
    report = check(shows_tools(lambda body: ok(body, content="Mild.") if is_auto(body) else ok(body, call=True)))
    assert report.verdict is Verdict.PARTLY
    assert 'not auto (no call: "Mild.")' in report.message


def test_faulty_calls_work_in_part() -> None:
    flawed = json.dumps(
        {"choices": [{"message": {"tool_calls": [{**CALL, "id": None}]}, "finish_reason": "tool_calls"}]}
    )
    report = check(
        shows_tools(lambda body: ok(body, call=True) if body["stream"] else Reply(status=200, body=flawed.encode()))
    )
    assert report.verdict is Verdict.PARTLY
    assert "not auto (a faulty call: it has no id)" in report.message


def test_forced_calls_of_a_model_that_never_sees_its_tools() -> None:
    report = check(lambda body: ok(body, call="tool_choice" in body and not is_auto(body), content="Mild."))
    assert report.verdict is Verdict.TEMPLATE_DROPS
    assert "a forced call comes all the same" in report.message


@pytest.mark.parametrize("tokens", [None, 0])
def test_without_counts_a_model_that_ignores_and_a_template_that_drops_are_not_told_apart(tokens: int | None) -> None:
    report = check(lambda body: ok(body, content="Mild.", tokens=tokens))
    assert report.verdict is Verdict.UNTOLD
    assert "does not count its prompt tokens" in report.message


def test_answers_that_were_all_cut_prove_nothing() -> None:
    report = check(shows_tools(lambda body: ok(body, content="Let me think", finish="length")))
    assert report.verdict is Verdict.UNTOLD
    assert "cut before the model came to one" in report.message
    # one that came to its end is enough
    report = check(shows_tools(lambda body: ok(body, content="Mild.", finish="length" if body["stream"] else "stop")))
    assert report.verdict is Verdict.IGNORES


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (error(401, "Invalid API Key"), "401: Invalid API Key"),
        (error(404, "The model `m` does not exist."), "404: The model `m` does not exist."),
        (error(503, "Loading model"), "503: Loading model"),
        (Reply(problem="no answer: connection refused"), "no answer: connection refused"),
        (Reply(status=200, body=b"<html>"), "200 with something that is no chat completion"),
        (Reply(status=302, body=b""), "302: The engine answered with status 302"),
    ],
)
def test_what_fails_without_tools_too_is_not_the_tools_fault(reply: Reply, words: str) -> None:
    sent: list[dict[str, Any]] = []
    report = judge(find(lambda body: reply, sent), VLLM)
    assert report.verdict is Verdict.UNASKED
    assert report.message.startswith(f"it could not be asked (without tools): {words}")
    assert len(sent) == 1


def test_an_engine_that_dies_in_the_middle_was_not_asked() -> None:
    report = check(shows_tools(lambda body: Reply(problem="the engine closed the connection")))
    assert report.verdict is Verdict.UNASKED
    assert report.message == "it could not be asked (auto): the engine closed the connection"
    report = check(shows_tools(lambda body: error(401, "the key was revoked")))
    assert (report.verdict, report.message) == (
        Verdict.UNASKED,
        "it could not be asked (auto): 401: the key was revoked",
    )
    report = check(shows_tools(lambda body: ok(body, call=True) if is_auto(body) else error(503, "gone")))
    assert (report.verdict, report.message) == (Verdict.UNASKED, "it could not be asked (forced): 503: gone")


LOST = Reply(problem="the engine closed the connection")


@pytest.mark.parametrize("dead_after", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("content", [None, HERMES])
def test_whenever_it_dies_the_answers_before_that_prove_nothing(dead_after: int, content: str | None) -> None:
    asked = iter(range(6))
    report = check(lambda body: ok(body, content=content) if next(asked) < dead_after else LOST)
    assert report.verdict is Verdict.UNASKED
    assert report.message.endswith(": the engine closed the connection")


def test_a_stream_that_breaks_off_is_no_answer_either() -> None:
    half = Reply(status=200, body=b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n')
    report = check(lambda body: half if body.get("stream") else ok(body, content="no"))
    assert report.verdict is Verdict.UNASKED
    assert report.message == "it could not be asked (auto, streamed): the stream broke off before its end"


def test_an_answer_in_another_shape_is_one_all_the_same() -> None:
    report = check(
        shows_tools(lambda body: Reply(status=200, body=b"<html>") if body.get("stream") else ok(body, call=True))
    )
    assert report.verdict is Verdict.PARTLY


@pytest.mark.parametrize(
    "refusal",
    [
        error(400, "max_tokens must be at most 400", param="max_tokens"),
        error(400, "'max_tokens' is too large: 2048"),
        error(400, "This model's maximum context length is 512 tokens. However, you requested 2100 tokens."),
        error(422, "extra field max_tokens"),
    ],
)
def test_what_is_refused_by_name_is_left_out(refusal: Reply) -> None:
    sent: list[dict[str, Any]] = []
    found = find(
        shows_tools(lambda body: refusal if body.get("max_tokens", 0) > 400 else ok(body, call=True)),
        sent,
    )
    assert judge(found, VLLM).verdict is Verdict.WORKS
    assert [body.get("max_tokens") for body in sent] == [1, 1, MAX_TOKENS, None, None, None, None]


def test_each_thing_that_can_be_spared_is_left_out_once() -> None:
    def play(body: dict[str, Any]) -> Reply:
        for field in ("temperature", "max_tokens"):
            if field in body:
                return error(400, f"Unsupported parameter: '{field}' is not supported with this model.")
        return ok(body, call="tool_choice" in body, content="x", tokens=9 + 9 * ("tools" in body))

    sent: list[dict[str, Any]] = []
    assert judge(find(play, sent), VLLM).verdict is Verdict.WORKS
    assert len(sent) == 8
    stubborn = error(400, "temperature and max_tokens")
    assert judge(find(lambda body: stubborn), VLLM).verdict is Verdict.UNASKED


REPLIES = st.builds(
    Reply,
    status=st.sampled_from([0, 200, 204, 302, 400, 401, 404, 422, 500, 503]),
    body=st.one_of(
        st.binary(max_size=200),
        st.sampled_from(
            [
                ok({}, call=True).body,
                ok({"stream": True}, call=True).body,
                ok({}, content=HERMES).body,
                ok({"stream": True}, content=HERMES).body,
                ok({}, content="no", tokens=None).body,
                ok({"stream": True}, content="no", finish="length").body,
                error(400, "max_tokens temperature").body,
            ]
        ),
    ),
    problem=st.none() | st.just("gone"),
)


@given(st.lists(REPLIES, min_size=12, max_size=12), st.sampled_from([VLLM, Parsers(by_engine={}, sure=False)]))
def test_every_course_of_events_has_a_verdict(replies: list[Reply], parsers: Parsers) -> None:
    left = iter(replies)
    report = check(lambda body: next(left), parsers)
    assert report.message
    assert (report.verdict is Verdict.WORKS) == (
        [each.outcome for each in report.exchanges][2:] == [Outcome.CALLED] * 4
    )
