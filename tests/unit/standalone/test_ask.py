from __future__ import annotations

import json
from typing import Any

import pytest

from llmgw.errors import LlmgwError
from llmgw.standalone.ask import ask


def stream(*events: object, done: bool = True) -> bytes:
    lines = [f"data: {event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)}" for event in events]
    return "\n\n".join([": alive", *lines, *(["data: [DONE]"] if done else []), ""]).encode()


def delta(**delta: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}]}


async def ignore(piece: str) -> None:
    """Nobody reads it."""


async def answer(serve_web: Any, reply: Any, body: bytes, status: int = 200, **more: Any) -> str:
    web = serve_web(lambda asked: reply(status=status, body=body, **more))
    said: list[str] = []

    async def write(piece: str) -> None:
        said.append(piece)

    try:
        await ask(web.url + "/", "m", "Why?", write)
    finally:
        request = web.asked[0]
        assert request.path == "/v1/chat/completions"
        assert json.loads(request.headers[":body"]) == {
            "model": "m",
            "messages": [{"role": "user", "content": "Why?"}],
            "max_tokens": 512,
            "stream": True,
        }
    return "".join(said)


async def test_the_answer_is_written_as_it_comes(serve_web: Any, reply: Any) -> None:
    body = stream(
        delta(role="assistant", content=None), delta(content="Be"), delta(content="cause\u2028of ü"), {"choices": []}
    )
    assert await answer(serve_web, reply, body) == "Because\u2028of ü\n"


async def test_a_refusal_is_told_with_its_reason(serve_web: Any, reply: Any) -> None:
    body = json.dumps({"error": {"message": "the model is loading", "code": "model_loading"}}).encode()
    with pytest.raises(LlmgwError, match=r"^m answered 503: the model is loading$"):
        await answer(serve_web, reply, body, status=503)


@pytest.mark.parametrize(
    ("body", "said"), [(b"Bad Gateway", "Bad Gateway"), (b"", "no reason given"), (b"[]", r"\[\]")]
)
async def test_a_refusal_that_is_no_json_is_told_as_it_is(serve_web: Any, reply: Any, body: bytes, said: str) -> None:
    with pytest.raises(LlmgwError, match=f"^m answered 502: {said}$"):
        await answer(serve_web, reply, body, status=502)


@pytest.mark.parametrize("error", [{"message": "the engine died"}, "the engine died"])
async def test_an_error_in_the_stream_is_an_error(serve_web: Any, reply: Any, error: object) -> None:
    with pytest.raises(LlmgwError, match=r"^m gave up: the engine died$"):
        await answer(serve_web, reply, stream(delta(content="Be"), {"error": error}, done=False))


async def test_an_error_in_the_stream_outweighs_the_cut_after_it(serve_web: Any, reply: Any) -> None:
    body = stream({"error": {"message": "the engine died"}}, done=False)
    with pytest.raises(LlmgwError, match=r"^m gave up: the engine died$"):
        await answer(serve_web, reply, body + b"more", cut=len(body))


async def test_a_stream_that_just_ends_is_an_error(serve_web: Any, reply: Any) -> None:
    with pytest.raises(LlmgwError, match="broke off before its end"):
        await answer(serve_web, reply, stream(delta(content="Be"), done=False))


async def test_a_connection_that_is_cut_is_an_error(serve_web: Any, reply: Any) -> None:
    with pytest.raises(LlmgwError, match=r"^the answer of m broke off: "):
        await answer(serve_web, reply, stream(delta(content="Be"), delta(content="cause")), cut=20)


@pytest.mark.parametrize("event", ["{not json", '"words"', '{"choices": [3]}', '{"choices": {"a": 1}}'])
async def test_an_event_that_can_not_be_read_is_an_error(serve_web: Any, reply: Any, event: str) -> None:
    with pytest.raises(LlmgwError, match="sent an event that can't be read"):
        await answer(serve_web, reply, stream(event))


async def test_nobody_there_is_an_error(serve_web: Any, reply: Any) -> None:
    web = serve_web(lambda asked: reply())
    web.close()
    with pytest.raises(LlmgwError, match="broke off"):
        await ask(web.url, "m", "Why?", ignore)
