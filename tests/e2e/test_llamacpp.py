"""A real engine with a real model, by the client that most people use."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from lab.running import Llmgw, wait_for
from lab.wire import CHAT, MODEL, chat, get, post

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
HELLO = [{"role": "user", "content": "Say hello to the world."}]


@pytest.fixture(scope="module")
def llmgw(launch: Callable[..., Llmgw], weights: Path) -> Llmgw:
    return launch("serve", str(weights), "--name", MODEL, "--context-length", "512").start().wait_ready()


@pytest.fixture
def client(llmgw: Llmgw) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=llmgw.base_url, api_key="none", max_retries=0, timeout=100) as client:
        yield client


def test_models_are_listed_and_shown(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    shown = client.models.retrieve(MODEL)
    assert (shown.id, shown.object, shown.context_length) == (MODEL, "model", 512)  # type: ignore[attr-defined]


def test_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16)
    assert answer.choices[0].message.content
    assert answer.model == MODEL
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 16
    assert answer._request_id.startswith("req-")


def test_a_streamed_answer(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] in ("stop", "length")
    assert {chunk.model for chunk in chunks} == {MODEL}
    assert not any(chunk.usage for chunk in chunks)


def test_a_streamed_answer_with_its_usage(client: openai.OpenAI) -> None:
    asked = {"include_usage": True}
    *chunks, last = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=16, stream=True, stream_options=asked
    )
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens >= sum(bool(chunk.choices[0].delta.content) for chunk in chunks) - 1


def test_the_same_seed_gives_the_same_text_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "seed": 1}
    whole = client.completions.create(**asked).choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    assert whole == streamed
    assert whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_is_refused_in_words_that_clients_know(client: openai.OpenAI, stream: bool) -> None:
    long = [{"role": "user", "content": "hello " * 1000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=long, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.request_id


def test_errors_are_the_right_exceptions_with_their_request_ids(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="none", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none/such")
    with pytest.raises(openai.BadRequestError) as empty:
        client.chat.completions.create(model=MODEL, messages=[])
    with pytest.raises(openai.NotFoundError) as unknown:
        client.images.generate(prompt="a cat")
    assert unknown.value.code == "unknown_url"
    for caught in (missing, empty, unknown):
        assert (caught.value.request_id or "").startswith("req-")


def test_embeddings_that_the_engine_was_not_started_for_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(model=MODEL, input="hello")
    assert caught.value.code
    assert caught.value.request_id
    assert 400 <= caught.value.status_code < 502


@pytest.mark.timeout(500)
def test_a_template_that_knows_no_tools_is_found_out(launch: Callable[..., Llmgw], weights: Path) -> None:
    # several threads would wait for one another wherever something else runs, and this generates much
    one = ("--arg=--threads", "--arg=1")
    llmgw = launch("serve", str(weights), "--name", MODEL, "--context-length", "512", *one).start().wait_ready()
    words = (sys.executable, "-m", "llmgw", "ctl", "tool-check", "--endpoint", llmgw.base_url)
    checked = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    assert (checked.returncode, checked.stderr) == (4, "")
    assert checked.stdout.startswith(f"{MODEL} at http://127.0.0.1:")
    assert "template drops: the chat template drops the tools" in checked.stdout


def test_an_abandoned_stream_stops_the_engine(llmgw: Llmgw, client: openai.OpenAI) -> None:
    with llmgw.connect() as wire:
        wire.send(post(CHAT, chat(stream=True, max_tokens=480, ignore_eos=True)))
        wire.read_until(b"\n\n")
        wait_for(lambda: processing(llmgw), "the engine's work")
    wait_for(lambda: not processing(llmgw), "the engine to stop")
    wait_for(lambda: "client_left" in llmgw.log, "its line in the log")


def processing(llmgw: Llmgw) -> bool:
    """Some slot of the engine is at work."""
    return any(slot["is_processing"] for slot in llmgw.engine.ask("/slots"))


def test_the_page_says_what_runs(llmgw: Llmgw) -> None:
    assert MODEL in llmgw.ask(get("/")).body.decode()


def test_embeddings_are_served_where_the_engine_was_started_for_them(
    launch: Callable[..., Llmgw], weights: Path
) -> None:
    words = ("--arg=--embeddings", "--arg=--pooling", "--arg=mean")
    llmgw = launch("serve", str(weights), "--name", MODEL, "--context-length", "512", *words).start().wait_ready()
    with openai.OpenAI(base_url=llmgw.base_url, api_key="none", max_retries=0, timeout=100) as client:
        found = client.embeddings.create(model=MODEL, input=["hello", "world"])
        assert [len(row.embedding) for row in found.data] == [576, 576]
        floats = client.embeddings.create(model=MODEL, input="hello", encoding_format="float").data[0].embedding
        assert floats == pytest.approx(found.data[0].embedding, abs=1e-3)
    assert llmgw.stop() == 0


def test_the_demo_says_how_to_talk_to_it_and_does(launch: Callable[..., Llmgw], weights: Path) -> None:
    llmgw = launch("demo").start().wait_ready()
    (curl,) = (line.strip() for line in llmgw.out.splitlines() if line.startswith("  curl "))
    (python,) = (line.strip() for line in llmgw.out.splitlines() if line.startswith("  python3 "))
    # (so small a model may not find an end by itself)
    answer = paste(curl.replace('"messages"', '"max_tokens": 16, "messages"'))
    assert json.loads(answer)["choices"][0]["message"]["content"]
    python = python.replace("python3", sys.executable, 1).replace("messages=", "max_tokens=16, messages=")
    assert paste(python).strip()
    assert llmgw.stop() == 0
    assert llmgw.engines() == []


def paste(line: str) -> str:
    """What a shell makes of it."""
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=100, check=True).stdout


def test_the_demo_answers_one_question_and_ends(launch: Callable[..., Llmgw], weights: Path) -> None:
    llmgw = launch("demo", "--ask", "What is the capital of France?").start()
    assert llmgw.wait_ended() == 0
    assert llmgw.out.strip()
    assert "{" not in llmgw.out
    assert llmgw.engines() == []
