"""The real vLLM, served through a server and an agent, checked, and broken: by what name a cause is told in the end.

One server, one agent and one engine after the other: an engine takes a minute to load, and 3 GB.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from lab.cluster import Agent, Lab, Server, run_llmgw
from lab.running import wait_for, write_model
from lab.wire import post

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LOAD_SECONDS = 600.0
# vLLM on a CPU takes a part of the memory for its cache, and binds its threads, unless it is told otherwise.
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
SMALL = ("--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("lab"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(lab: Lab) -> Server:
    return lab.server()


@pytest.fixture(scope="module")
def agent(lab: Lab, server: Server, vllm: Path) -> Iterator[Agent]:
    made = lab.agent("node-1", server, engines={"vllm": {"bin": str(vllm)}})
    yield made
    # The engines of a test that failed, their workers too.
    made.kill()
    made.stop_all("--force")


def define(
    folder: Path,
    tiny: Path,
    name: str,
    *args: str,
    env: dict[str, str] | None = None,
    profile: dict[str, str] | None = None,
    **fields: Any,
) -> Path:
    """A definition of one replica of the tiny model."""
    fields = {"name": name, "aliases": [], "scaling": {"min": 1, "max": 1}, "context_length": 512, **fields}
    path = write_model(folder, *SMALL, *args, engine="vllm", source=tiny, **fields)
    definition = yaml.safe_load(path.read_text())
    definition["profiles"][0] |= {"env": {**ON_CPU, **(env or {})}, **(profile or {})}
    path.write_text(yaml.safe_dump(definition))
    return path


def wait_failed(server: Server, name: str) -> dict[str, Any]:
    """The replica of a model once it has ended."""

    def look() -> dict[str, Any] | None:
        ended = (replica for replica in server.replicas("ended") if replica["model"] == name)
        return next(ended, None)

    return wait_for(look, f"the end of {name}", LOAD_SECONDS)


def remove(server: Server, name: str) -> None:
    """Take a model away, and wait until its engine has let go of its memory."""
    done = server.ctl("model", "rm", name)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not server.look("replicas")["replicas"], f"the end of {name}", LOAD_SECONDS)


def test_preflight_finds_nothing_wrong(server: Server, agent: Agent) -> None:
    def look() -> dict[str, Any] | None:
        nodes = server.look("engines")["nodes"]
        engines = [engine for node in nodes for engine in node.get("engines", []) if engine["engine"] == "vllm"]
        return next((engine for engine in engines if engine["checked"]), None)

    found = wait_for(look, "the check of vllm", LOAD_SECONDS)
    assert found["version"] == "0.32.0+cpu"
    assert "broken" not in found
    assert not found.get("problems")


def test_it_serves_whole_and_streamed(server: Server, agent: Agent, tiny: Path, tmp_path: Path) -> None:
    server.add(define(tmp_path, tiny, "tiny", context_length=512))
    wait_for(server.replicas, "a ready replica", LOAD_SECONDS)
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello world " * 40}], "max_tokens": 8}
    whole = client.chat.completions.create(**asked)
    assert whole.model == "tiny"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage is not None
    # The second time the beginning of the prompt is in the engine's cache, and it says so because it is told to.
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello " * 2000}])

    def measured() -> dict[str, Any] | None:
        (replica,) = server.replicas()
        return replica if replica.get("steps") else None

    replica = wait_for(measured, "figures of the engine")
    assert replica["running"] == 0
    assert replica["cached_tokens"] > 0
    assert 0 <= replica["cache_used"] <= 1
    told = server.ctl("tool-check", "tiny", "--json")
    assert told.returncode == 6, told.stdout + told.stderr
    check = json.loads(told.stdout)["check"]
    assert check["verdict"] == "refuses"
    assert "tool_parser" in check["remedy"]
    remove(server, "tiny")


def test_it_embeds_and_ranks(server: Server, agent: Agent, tiny: Path, tmp_path: Path) -> None:
    # The last of a flag counts: for pooling on a CPU its workers want whole floats.
    server.add(define(tmp_path, tiny, "vectors", "--dtype", "float32", task="embed"))
    wait_for(server.replicas, "a ready replica", LOAD_SECONDS)
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    found = client.embeddings.create(model="vectors", input=["hello world", "the quick brown fox"])
    assert [len(each.embedding) for each in found.data] == [128, 128]
    asked = {"model": "vectors", "query": "fox", "documents": ["hello", "the fox"]}
    ranked = server.ask(post("/v1/rerank", json.dumps(asked).encode()))
    assert ranked.status == 200, ranked
    assert len(ranked.json["results"]) == 2
    remove(server, "vectors")


def check_failure(server: Server, cause: str, remedy: str) -> None:
    """The model ``broken`` fails for this cause, which stands with its remedy above the engine's last lines."""
    ended = wait_failed(server, "broken")
    assert cause in ended["cause"]
    assert remedy in ended["remedy"]
    shown = server.ctl("replicas").stdout
    assert shown.index(cause) < shown.index("the last lines of its engine")
    remove(server, "broken")


def test_a_flag_that_it_does_not_know_is_named(server: Server, agent: Agent, tiny: Path, tmp_path: Path) -> None:
    server.add(define(tmp_path, tiny, "broken", "--no-such-flag", "3"))
    check_failure(server, "unrecognized arguments: --no-such-flag 3", "engine-check")


def test_a_context_that_the_model_does_not_have_is_named(
    server: Server, agent: Agent, tiny: Path, tmp_path: Path
) -> None:
    server.add(define(tmp_path, tiny, "broken", context_length=4096))
    check_failure(server, "max_model_len (4096) is greater than the derived max_model_len", "context_length")


def test_a_parser_that_it_does_not_have_is_refused_on_the_node(
    server: Server, agent: Agent, tiny: Path, tmp_path: Path
) -> None:
    """The server has no vLLM to ask; the node has, and no engine is started for it."""
    server.add(define(tmp_path, tiny, "broken", profile={"tool_parser": "hermez"}))
    ended = wait_failed(server, "broken")
    assert "hermez" in ended["cause"]
    assert "hermes" in ended["cause"]
    assert not ended.get("lines")
    remove(server, "broken")


def test_weights_that_are_cut_off_are_named(server: Server, agent: Agent, tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(tiny, cut)
    weights = cut / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    server.add(define(tmp_path / "model", cut, "broken"))
    ended = wait_failed(server, "broken")
    assert "file not fully covered" in ended["cause"]
    assert "fetch it again" in ended["remedy"]
    remove(server, "broken")


def test_engine_check_tells_what_would_break(vllm: Path, tiny: Path, tmp_path: Path) -> None:
    good = run_llmgw("ctl", "engine-check", "vllm", "--bin", str(vllm), "--json")
    assert good.returncode == 0, good.stderr
    (check,) = json.loads(good.stdout)["checks"]
    assert {flag["state"] for flag in check["flags"]} == {"ok"}
    bad = define(tmp_path, tiny, "m", "--swap-space", "4", "--no-such-flag", "--dtype", "bf17")
    told = run_llmgw("ctl", "engine-check", "vllm", "--bin", str(vllm), "--profile", str(bad), "--json")
    assert told.returncode == 1, told.stderr
    (check,) = json.loads(told.stdout)["checks"]
    states = {flag["flag"]: flag["state"] for flag in check["flags"]}
    assert states["--swap-space"] == "removed"
    assert states["--no-such-flag"] == "unknown"
    assert states["--dtype"] == "wrong_value"
