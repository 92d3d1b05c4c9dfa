"""Adapters, asked for by names of their own: whole and streamed, one engine for all of them and for their model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from lab.running import Llmgw, wait_for, write_model
from lab.wire import CHAT, chat, data_lines, get, post

pytestmark = pytest.mark.slow
NAMES = ("sql", "org/poet")
COMPLETIONS = "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llmgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llmgw]:
    folder = tmp_path_factory.mktemp("adapters")
    loras = [{"name": name, "source": str(_touch(folder / f"{number}.fake"))} for number, name in enumerate(NAMES)]
    llmgw = Llmgw(folder, "serve", str(write_model(folder, loras=loras)))
    try:
        yield llmgw.start().wait_ready()
        llmgw.check_health()
    finally:
        llmgw.clean()


def _touch(path: Path) -> Path:
    path.write_text("adapter")
    return path


def body_at_engine(llmgw: Llmgw, tag: str) -> dict[str, Any]:
    body: dict[str, Any] = llmgw.engine.wait_ended(tag)["body"]
    return body


def test_the_engine_is_started_with_all_of_them(llmgw: Llmgw) -> None:
    words = Path(f"/proc/{llmgw.engine.pid}/cmdline").read_bytes().decode().split("\0")
    given = [words[at + 1] for at, word in enumerate(words) if word == "--lora"]
    assert [one.partition("=")[0] for one in given] == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_one_that_is_asked_for_answers_under_its_name(llmgw: Llmgw, path: str, name: str) -> None:
    tag = f"whole {path} {name}"
    asked = {"model": name, "messages": HELLO, "prompt": "hi", "user": tag, "seed": 1}
    reply = llmgw.ask(post(path, json.dumps(asked).encode()))
    assert (reply.status, reply.json["model"]) == (200, name)
    # the model's own name, and what chooses the adapter, and nothing else
    assert body_at_engine(llmgw, tag) == {**asked, "model": "m", "fake_lora": name}
    line = wait_for(
        lambda: [line for line in llmgw.log.splitlines() if f" {reply.get('x-request-id')} " in line], "its line"
    )
    assert " model=m replica=rep-m-1 tokens=7+5" in line[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fake", [{}, {"bytewise": True}, {"crlf": True, "split_unicode": True}], ids=str)
def test_each_event_of_a_stream_has_its_name(llmgw: Llmgw, path: str, name: str, fake: dict[str, Any]) -> None:
    tag = f"streamed {path} {name} {fake}"
    asked = {
        "model": name,
        "messages": HELLO,
        "prompt": "hi",
        "user": tag,
        "stream": True,
        "fake": {**fake, "tokens": 6},
    }
    reply = llmgw.ask(post(path, json.dumps(asked).encode()))
    *events, last = data_lines(reply.body)
    assert last == b"[DONE]"
    assert len(events) >= 7
    assert {json.loads(event)["model"] for event in events} == {name}
    assert "🚂" in reply.body.decode()
    seen = body_at_engine(llmgw, tag)
    assert (seen["model"], seen["fake_lora"]) == ("m", name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["m", "other/name"])
def test_who_asks_for_the_model_gets_it_without_any(llmgw: Llmgw, name: str, stream: bool) -> None:
    tag = f"base {name} {stream}"
    reply = llmgw.chat(model=name, user=tag, stream=stream)
    documents = [json.loads(event) for event in reply.events[:-1]] if stream else [reply.json]
    assert {document["model"] for document in documents} == {name}
    seen = body_at_engine(llmgw, tag)
    assert "fake_lora" not in seen
    assert seen["model"] == "m"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["poet", "m/sql", "SQL", "m:sql", "other/name/sql"])
def test_one_that_is_not_there_is_refused_by_its_name(llmgw: Llmgw, name: str, stream: bool) -> None:
    tag = f"unknown {name} {stream}"
    reply = llmgw.chat(model=name, user=tag, stream=stream)
    assert (reply.status, reply.code) == (404, "model_not_found")
    assert name in reply.json["error"]["message"]
    assert llmgw.engine.find(tag) is None


def test_an_engines_error_about_one_is_told_as_it_is(llmgw: Llmgw) -> None:
    reply = llmgw.ask(post(CHAT, chat({"status": 400, "error": "llamacpp"}, model="sql")))
    assert reply.status == 400
    assert "the fake engine was asked to fail" in reply.json["error"]["message"]


def test_they_are_listed_with_their_model(llmgw: Llmgw) -> None:
    rows = {row["id"]: row for row in llmgw.ask(get("/v1/models")).json["data"]}
    assert list(rows) == ["m", "other/name", *NAMES]
    assert [rows[name].get("parent") for name in rows] == [None, None, "m", "m"]
    for name in NAMES:
        assert llmgw.ask(get(f"/v1/models/{name}")).json == rows[name]
    assert llmgw.ask(get("/v1/models/poet")).status == 404


def test_the_sdk_asks_for_one_as_for_any_model(llmgw: Llmgw) -> None:
    hello: Any = {"model": "org/poet", "messages": HELLO}
    with openai.OpenAI(base_url=llmgw.base_url, api_key="none", max_retries=0, timeout=60) as client:
        assert {model.id: getattr(model, "parent", None) for model in client.models.list()}["org/poet"] == "m"
        whole = client.chat.completions.create(user="sdk whole", **hello)
        assert (whole.model, whole.choices[0].message.content) == ("org/poet", "Ein Gruß aus Köln 🚂 ")
        chunks = list(client.chat.completions.create(user="sdk stream", stream=True, **hello))
        assert {chunk.model for chunk in chunks} == {"org/poet"}
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert said == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(**{**hello, "model": "poet"})
    assert caught.value.code == "model_not_found"
    assert [body_at_engine(llmgw, f"sdk {how}")["fake_lora"] for how in ("whole", "stream")] == ["org/poet"] * 2
