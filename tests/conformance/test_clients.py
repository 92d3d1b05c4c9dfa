"""The clients that most people use, over an engine that misbehaves: what they make of it is what people see."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from lab.running import Llmgw
from lab.wire import chat

pytestmark = pytest.mark.slow
HELLO: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llmgw(launch: Callable[..., Llmgw]) -> Llmgw:
    return launch()


@pytest.fixture
def client(llmgw: Llmgw) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=llmgw.base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, fake: dict[str, Any], **fields: Any) -> Any:
    return client.chat.completions.create(model="m", messages=HELLO, extra_body={"fake": fake}, **fields)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
        (409, openai.ConflictError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_error_is_the_right_exception(
    client: openai.OpenAI, status: int, error: type[openai.APIStatusError], stream: bool
) -> None:
    with pytest.raises(error) as caught:
        ask(client, {"status": status, "error": "vllm"}, stream=stream)
    assert caught.value.request_id
    assert caught.value.code
    assert "the fake engine was asked to fail" in caught.value.message


@pytest.mark.parametrize(
    "fake", [{"cut": "events"}, {"cut": "frame"}, {"cut": "event"}, {"error_event": 3}, {"no_done": True}], ids=str
)
def test_a_broken_stream_is_an_exception_after_what_came(client: openai.OpenAI, fake: dict[str, Any]) -> None:
    said = []
    stream = iter(ask(client, {**fake, "after": 3}, stream=True))
    for _ in range(3):
        said.append(next(stream).choices[0].delta.content)
    with pytest.raises(openai.APIError):
        list(stream)
    assert said == [None, "Ein ", "Gruß "]


def test_a_broken_reply_is_an_exception(client: openai.OpenAI) -> None:
    for framing in ("chunked", "length"):
        with pytest.raises(openai.APIConnectionError):
            ask(client, {"cut": "frame", "framing": framing})


def test_a_failed_engine_is_worth_another_try(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        ask(client, {"cut": "first_byte"})
    assert caught.value.response.headers["retry-after"] == "5"
    assert ask(client, {}).choices[0].message.content


@pytest.mark.parametrize("fake", [{}, {"bytewise": True}, {"split_unicode": True}, {"crlf": True}], ids=str)
def test_text_arrives_whole(client: openai.OpenAI, fake: dict[str, Any]) -> None:
    whole = ask(client, {"tokens": 12}).choices[0].message.content
    chunks = list(ask(client, {**fake, "tokens": 12}, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert "🚂" in whole


@pytest.mark.parametrize("fake", [{}, {"bytewise": True}, {"split_unicode": True}, {"crlf": True}], ids=str)
def test_tool_calls_that_come_interleaved_arrive_whole(client: openai.OpenAI, fake: dict[str, Any]) -> None:
    calls: dict[int, str] = {}
    for chunk in ask(client, {**fake, "tools": True}, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            calls[call.index] = calls.get(call.index, "") + (call.function.arguments or "")
    assert {at: json.loads(said) for at, said in calls.items()} == {0: {"wort": "grün"}, 1: {"wort": "grün"}}


def test_an_event_larger_than_any_buffer_arrives(client: openai.OpenAI) -> None:
    chunks = list(ask(client, {"line_kb": 300, "tokens": 1}, stream=True))
    assert max(len(chunk.choices[0].delta.content or "") for chunk in chunks) == 300_000


def test_embeddings_arrive(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model="m", input=["a", "b"])
    assert [row.embedding for row in found.data] == [[0.25, -0.5, 1.0]] * 2


@pytest.mark.needs("curl", "curl")
@pytest.mark.parametrize("words", [[], ["--http1.0"], ["-H", "Transfer-Encoding: chunked"], ["--http2"]], ids=str)
def test_curl_sends_a_large_body_and_reads_a_stream(llmgw: Llmgw, words: list[str]) -> None:
    """Above 1 MB it asks for leave first; --http2 asks for an upgrade."""
    body = chat(stream=True, padding="x" * 3_000_000)
    command = ["curl", "-sSN", "--max-time", "60", *words, "--data-binary", "@-", f"{llmgw.base_url}/chat/completions"]
    said = subprocess.run(command, input=body, capture_output=True, timeout=90, check=True).stdout
    assert said.endswith(b"data: [DONE]\n\n")
