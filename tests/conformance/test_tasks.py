"""What is no chat: embeddings and rankings, whole and untouched on both ways, with their tokens counted."""

from __future__ import annotations

import hashlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from lab.running import EngineProcess, Llmgw, wait_for
from lab.wire import get, post

pytestmark = pytest.mark.slow
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
# Odd on purpose: spaces, escapes, fields that nobody knows, a number that no float holds.
VECTORS = (
    '{"model" : "vectors","input":["a","Gr\\u00fc\\u00dfe \\ud83d\\ude82"], "x":{"y":[1e400, null]} ,"user":"%s"}\n'
)
RANKING = '{ "query":"Köln","documents":["a","abc","ab"],"top_n":2,"model":"ranks" , "user":"%s", "z":0.10}'
ROADS = {
    EMBEDDINGS: ("vectors", VECTORS, 6),
    # of these the engine tells the total alone
    RERANK: ("ranks", RANKING, 12),
}


def define(folder: Path, **models: dict[str, Any]) -> Path:
    """A definition of these models, which the fake engine serves."""
    source = folder / "weights.fake"
    source.write_text("weights")
    profiles = [{"name": "p", "engine": "fake"}]
    entries = [{"name": name, "source": str(source), "profiles": profiles, **more} for name, more in models.items()]
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": entries}, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def llmgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llmgw]:
    folder = tmp_path_factory.mktemp("tasks")
    models = define(folder, vectors={"task": "embed", "aliases": ["embed-1"]}, ranks={"task": "rerank"})
    llmgw = Llmgw(folder, "serve", str(models))
    try:
        yield llmgw.start().wait_ready()
        for word in ("Traceback", "callback of", "failed too", " crashed "):
            assert word not in llmgw.log
    finally:
        llmgw.clean()


@pytest.fixture(scope="module")
def engines(llmgw: Llmgw) -> dict[str, EngineProcess]:
    """By the model that each serves."""
    return {engine.ask("/v1/models")["data"][0]["id"]: engine for engine in llmgw.engines()}


def wait_line(llmgw: Llmgw, request_id: str | None) -> str:
    """The line of a request, which has this id in its answer."""
    assert request_id
    found = wait_for(lambda: [line for line in llmgw.log.splitlines() if f" {request_id} " in line], "its line")
    return found[0]


@pytest.mark.parametrize("path", ROADS)
def test_bodies_pass_as_they_are_and_their_tokens_are_counted(
    llmgw: Llmgw, engines: dict[str, EngineProcess], path: str
) -> None:
    model, text, tokens = ROADS[path]
    body = (text % "whole").encode()
    reply = llmgw.ask(post(path, body, "Content-Type: application/json"))
    assert reply.status == 200
    seen = engines[model].wait_ended("whole")
    assert (seen["path"], seen["sha256"]) == (path, hashlib.sha256(body).hexdigest())
    with urllib.request.urlopen(f"http://127.0.0.1:{engines[model].port}{path}", body, timeout=60) as direct:
        assert reply.body == direct.read()
    line = wait_line(llmgw, reply.get("x-request-id"))
    assert f" POST {path} 200 done " in line
    assert f" model={model} replica=rep-{model}-1 tokens={tokens}+0" in line


def test_an_alias_is_put_to_the_engine_by_its_own_name(llmgw: Llmgw, engines: dict[str, EngineProcess]) -> None:
    reply = llmgw.ask(post(EMBEDDINGS, json.dumps({"model": "embed-1", "input": "a", "user": "alias"}).encode()))
    assert engines["vectors"].wait_ended("alias")["body"] == {"model": "vectors", "input": "a", "user": "alias"}
    # who asked by that name is answered by it
    assert (reply.json["model"], len(reply.json["data"])) == ("embed-1", 1)
    assert "model=vectors" in wait_line(llmgw, reply.get("x-request-id"))


@pytest.mark.parametrize("path", ROADS)
def test_a_large_body_passes_as_it_is(llmgw: Llmgw, engines: dict[str, EngineProcess], path: str) -> None:
    model, text, tokens = ROADS[path]
    body = (text % "large").encode().replace(b"0.10", b"0.10" + b"0" * 3_000_000)
    body += b" " * (3_000_000 - len(body))
    reply = llmgw.ask(post(path, body))
    assert reply.status == 200
    assert engines[model].wait_ended("large")["sha256"] == hashlib.sha256(body).hexdigest()
    assert f" tokens={tokens}+0" in wait_line(llmgw, reply.get("x-request-id"))


@pytest.mark.parametrize("path", ROADS)
@pytest.mark.parametrize(("status", "error"), [(400, "vllm"), (422, "fastapi"), (500, "html")])
def test_an_engines_error_has_the_usual_shape(llmgw: Llmgw, path: str, status: int, error: str) -> None:
    body = {"model": ROADS[path][0], "input": "a", "fake": {"status": status, "error": error}}
    reply = llmgw.ask(post(path, json.dumps(body).encode()))
    assert reply.status == status
    assert reply.code


@pytest.mark.parametrize("path", ROADS)
def test_there_is_nothing_to_get_and_no_model_by_another_name(llmgw: Llmgw, path: str) -> None:
    refused = llmgw.ask(get(path))
    assert (refused.status, refused.code) == (405, "method_not_allowed")
    assert refused.get("allow") == "POST, OPTIONS"
    unknown = llmgw.ask(post(path, b'{"model":"none","input":"a"}'))
    assert (unknown.status, unknown.code) == (404, "model_not_found")


@pytest.fixture
def client(llmgw: Llmgw) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=llmgw.base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("packed", [True, False])
def test_the_sdk_reads_vectors_in_either_encoding(
    client: openai.OpenAI, engines: dict[str, EngineProcess], packed: bool
) -> None:
    how: Any = {} if packed else {"encoding_format": "float"}
    user = f"packed {packed}"
    found = client.embeddings.create(model="vectors", input=["a", "b"], user=user, **how)
    assert [row.embedding for row in found.data] == [[0.25, -0.5, 1.0]] * 2
    assert (found.model, found.usage.prompt_tokens, found.usage.total_tokens) == ("vectors", 6, 6)
    # its own way, unless it is told otherwise
    assert engines["vectors"].wait_ended(user)["body"]["encoding_format"] == ("base64" if packed else "float")


def test_the_sdk_gets_a_ranking_by_its_road_for_all_else(client: openai.OpenAI) -> None:
    asked = {"model": "ranks", "query": "q", "documents": ["a", "abc"]}
    found: Any = client.post("/rerank", body=asked, cast_to=object)
    assert [(each["index"], each["relevance_score"]) for each in found["results"]] == [(1, 0.03), (0, 0.01)]
