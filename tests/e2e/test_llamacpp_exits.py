"""Real llama.cpp, a binary and the embedded one: what it serves, what it knows, and what it says when it is broken."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from lab.running import free_port

import llmgw_llamacpp
from llmgw.engines import READY, Cause, CauseKind, Command, Launch, Lora, ModelName, Task, Version
from llmgw.engines.check import FlagState, check_launch, launch_of, sample_model
from llmgw.engines.registry import open_engine
from llmgw.engines.samples import definition_of
from llmgw.engines.types import ProbeOutput

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ENGINE = open_engine("llamacpp", llmgw_llamacpp)
EMBEDDED = (sys.executable, "-m", "llmgw_llamacpp.embedded")

# Only a hang takes as long.
PATIENCE_SECONDS = 100.0

Program = tuple[str, ...]


@pytest.fixture(params=["binary", "embedded"])
def program(request: pytest.FixtureRequest) -> Program:
    if request.param == "binary":
        return (str(request.getfixturevalue("llama_server")),)
    if find_spec("xllamacpp") is None:
        pytest.skip("pip install 'llmgw[demo]'")
    return EMBEDDED


@pytest.fixture
def launch(program: Program, weights: Path) -> Launch:
    return Launch(
        program=program,
        source=str(weights),
        served_name="smol",
        host="127.0.0.1",
        port=free_port(),
        context_length=1024,
        threads=2,
        gpus=(),
    )


def environment(command: Command) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(command.scrub or ("\0",))}
    return inherited | command.defaults | command.env


def end_of(launch: Launch, *, memory_kb: int | None = None, env: Mapping[str, str] | None = None) -> Cause:
    """What an engine that can't live ended of, by its own output."""
    command = ENGINE.build_command(launch)
    limited = ("sh", "-c", f'ulimit -v {memory_kb}; exec "$@"', "sh") if memory_kb is not None else ()
    return run_to_end((*limited, *command.argv), environment(command) | (env or {}))


def run_to_end(argv: Sequence[str], env: Mapping[str, str]) -> Cause:
    # llama.cpp writes its log from a thread of its own, which its exit may overtake on a busy machine: then its last
    # words, or all of them, are not there to be judged.
    for _ in range(5):
        done = subprocess.run(
            argv,
            env=dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        lines = done.stdout.splitlines()
        if find_cause(lines, done.returncode) is not None:
            break
    return cause_of(lines, done.returncode)


def find_cause(lines: Sequence[str], status: int) -> Cause | None:
    return ENGINE.read_exit(lines, status if status >= 0 else None, -status if status < 0 else None)


def cause_of(lines: Sequence[str], status: int) -> Cause:
    cause = find_cause(lines, status)
    assert cause is not None, lines
    assert cause.remedy, cause
    return cause


# -- broken


def test_a_missing_model(launch: Launch) -> None:
    cause = end_of(replace(launch, source="/nowhere/x.gguf"))
    assert cause.kind is CauseKind.WEIGHTS_MISSING
    assert cause.line == "failed to open GGUF file '/nowhere/x.gguf' (No such file or directory)"


def test_a_truncated_model(launch: Launch, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    with open(launch.source, "rb") as whole:
        short.write_bytes(whole.read(3_000_000))
    cause = end_of(replace(launch, source=str(short)))
    assert cause.kind is CauseKind.WEIGHTS_CORRUPT
    assert cause.line.endswith("data is not within the file bounds, model is corrupted or incomplete")


def test_a_page_instead_of_a_model(launch: Launch, tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<html>Not found</html>" * 100)
    cause = end_of(replace(launch, source=str(page)))
    assert cause.kind is CauseKind.WEIGHTS_CORRUPT
    assert cause.line == f"the weights {page}: invalid magic characters: '<htm', expected 'GGUF'"


def test_a_page_in_the_place_of_a_part(launch: Launch, tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    write_gguf(first, {"general.architecture": "llama", "split.no": 0, "split.count": 2}, {"a": ((32,), [0.0] * 32)})
    second.write_text("<html>Not found</html>" * 100)
    cause = end_of(replace(launch, source=str(first)))
    assert cause.kind is CauseKind.WEIGHTS_CORRUPT
    assert cause.line == f"the weights {second}: invalid magic characters: '<htm', expected 'GGUF'"
    write_gguf(second, {"split.no": 0, "split.count": 2}, {})
    cause = end_of(replace(launch, source=str(first)))
    assert (cause.kind, str(second) in cause.line) == (CauseKind.WEIGHTS_CORRUPT, True)
    second.unlink()
    cause = end_of(replace(launch, source=str(first)))
    assert (cause.kind, str(second) in cause.line) == (CauseKind.WEIGHTS_MISSING, True)


def test_a_page_beside_a_good_model(launch: Launch, tmp_path: Path) -> None:
    """An adapter or a projector that is none: it is named, and the weights are not blamed."""
    page = tmp_path / "page.gguf"
    page.write_text("<html>Not found</html>" * 100)
    said = f"{page}: invalid magic characters: '<htm', expected 'GGUF'"
    cause = end_of(replace(launch, loras=(Lora(name=ModelName("a"), source=str(page)),)))
    assert (cause.kind, cause.line) == (CauseKind.WEIGHTS_CORRUPT, f"the adapter {said}")
    cause = end_of(replace(launch, mmproj=str(page)))
    assert (cause.kind, cause.line) == (CauseKind.WEIGHTS_CORRUPT, f"the mmproj {said}")


def test_a_model_of_an_unknown_kind(launch: Launch, tmp_path: Path) -> None:
    strange = tmp_path / "strange.gguf"
    write_gguf(strange, {"general.architecture": "nonesuch"}, {})
    cause = end_of(replace(launch, source=str(strange)))
    assert (cause.kind, cause.line) == (CauseKind.ARCHITECTURE, "unknown model architecture: 'nonesuch'")


def test_an_unknown_flag(launch: Launch) -> None:
    cause = end_of(replace(launch, args=("--no-such-flag", "3")))
    assert (cause.kind, cause.line) == (CauseKind.FLAG, "error: invalid argument: --no-such-flag")
    assert "--no-such-flag" in str(cause.remedy)


def test_a_bad_value(launch: Launch) -> None:
    cause = end_of(replace(launch, args=("--batch-size", "many")))
    assert cause.kind is CauseKind.FLAG
    assert cause.line.startswith('error while handling argument "--batch-size": ')


def test_a_removed_flag(llama_server: Path, weights: Path) -> None:
    launch = replace(sample(llama_server, weights), args=("--draft-max", "3"))
    cause = end_of(launch)
    assert cause.kind is CauseKind.FLAG
    assert "the argument has been removed. use --spec-draft-n-max" in cause.line
    (found,) = [each for each in check_launch(ENGINE, replace(launch, version=probe(launch.program))) if each.breaks]
    assert (found.flag, found.state) == ("--draft-max", FlagState.RENAMED)


def test_a_port_in_use(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cause = end_of(replace(launch, port=port))
    assert cause.kind is CauseKind.PORT
    assert cause.line == f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}"


def test_a_binary_without_its_libraries(llama_server: Path, weights: Path, tmp_path: Path) -> None:
    bare = shutil.copy(llama_server, tmp_path / "llama-server")
    launch = sample(Path(bare), weights)
    cause = end_of(launch)
    assert cause.kind is CauseKind.LIBRARY
    assert cause.line == "the shared library libllama-server-impl.so is missing"
    assert probe(launch.program) is None


def test_an_embedded_one_without_its_library(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('libgomp.so.1: cannot open shared object file')\n")
    cause = end_of(replace(sample(Path("unused"), weights), program=EMBEDDED), env={"PYTHONPATH": str(tmp_path)})
    assert cause.kind is CauseKind.LIBRARY
    assert "libgomp.so.1" in cause.line


def test_a_cache_that_does_not_fit(launch: Launch) -> None:
    huge = replace(launch, context_length=15_000, args=("--parallel", "64", "--threads-http", "2"))
    cause = end_of(huge, memory_kb=6_000_000, env={"MALLOC_ARENA_MAX": "1"})
    assert (cause.kind, cause.line) == (CauseKind.KV_CACHE, "failed to allocate buffer for kv cache")


@pytest.mark.parametrize("megabytes", [60, 120, 220, 280])
def test_a_node_without_the_memory_for_it(launch: Launch, megabytes: int) -> None:
    """It stumbles at another step with each, down to its own libraries; whichever, memory is what it lacks."""
    cause = end_of(launch, memory_kb=megabytes * 1000, env={"MALLOC_ARENA_MAX": "1"})
    assert cause.kind is CauseKind.HOST_MEMORY, cause


def test_a_repository_that_may_not_be_fetched(llama_server: Path) -> None:
    """Nothing of llmgw's starts it so; an operator who looks by hand may."""
    argv = (str(llama_server), "-hf", "none/such", "--offline", "--port", str(free_port()))
    cause = run_to_end(argv, os.environ)
    assert cause.kind is CauseKind.OFFLINE


def test_an_adapter_of_another_model_and_one_that_is_missing(launch: Launch, tmp_path: Path) -> None:
    write_adapter(tmp_path / "other.gguf", architecture="qwen2", value=0.1)
    cause = end_of(replace(launch, loras=(Lora(name=ModelName("a"), source=str(tmp_path / "other.gguf")),)))
    said = f"the adapter {tmp_path / 'other.gguf'}: model arch and LoRA arch mismatch"
    assert (cause.kind, cause.line) == (CauseKind.ARCHITECTURE, said)
    cause = end_of(replace(launch, loras=(Lora(name=ModelName("a"), source=launch.source),)))
    assert cause.kind is CauseKind.ARCHITECTURE
    assert cause.line == f"the adapter {launch.source}: expect general.type to be 'adapter', but got: model"
    cause = end_of(replace(launch, loras=(Lora(name=ModelName("a"), source="/nowhere/a.gguf"),)))
    assert cause.kind is CauseKind.WEIGHTS_MISSING
    assert "/nowhere/a.gguf" in cause.line


def test_a_projector_that_is_none(launch: Launch) -> None:
    assert end_of(replace(launch, mmproj="/nowhere/mm.gguf")).kind is CauseKind.WEIGHTS_MISSING
    assert end_of(replace(launch, mmproj=launch.source)).kind is CauseKind.ARCHITECTURE


def test_one_that_the_kernel_killed(launch: Launch, serve: Callable[[Launch], Any]) -> None:
    with serve(launch) as engine:
        engine.process.kill()
        status = engine.process.wait(PATIENCE_SECONDS)
        lines = engine.log.read_text(errors="replace").splitlines()
    assert lines
    cause = cause_of(lines, status)
    assert cause.kind is CauseKind.HOST_MEMORY
    assert cause.line.startswith("killed by SIGKILL")


# -- checked


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"gpus": None},
        {"gpus": (1, 3), "tp": 2, "max_output": 64, "reasoning_parser": "deepseek"},
        {"task": Task.EMBED},
        {"task": Task.RERANK},
        {"mmproj": "/m/mm.gguf"},
        {"loras": (Lora(name=ModelName("a"), source="/l/a.gguf"),)},
    ],
    ids=str,
)
def test_it_takes_every_flag_of_llmgws(program: Program, asked: dict[str, Any]) -> None:
    version = probe(program)
    assert version is not None
    model, profile = sample_model(ENGINE)
    found = check_launch(ENGINE, replace(launch_of(model, profile, program, version), threads=2, **asked))
    assert {each.flag: each.state for each in found if each.state is not FlagState.OK} == {}


def test_its_help_names_choices_that_it_really_has(program: Program, launch: Launch) -> None:
    wrong = replace(launch, version=probe(program), args=("--flash-attn", "perhaps"))
    (finding,) = [each for each in check_launch(ENGINE, wrong) if each.given_by == "profile"]
    assert finding.state is FlagState.WRONG_VALUE
    assert end_of(wrong).kind is CauseKind.FLAG


def probe(program: Program) -> Version | None:
    outputs = []
    for command in ENGINE.build_probe(program):
        done = subprocess.run(
            command.argv,
            env=environment(command),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        outputs.append(ProbeOutput(code=done.returncode, stdout=done.stdout, stderr=done.stderr))
    return ENGINE.read_probe(outputs)


# -- served


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An engine that is ready, and its log."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def ask(self, path: str, body: object = None) -> Any:
        status, text = self.try_to_ask(path, body)
        assert status == 200, text
        return json.loads(text)

    def try_to_ask(self, path: str, body: object = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


@pytest.fixture
def serve(tmp_path: Path) -> Callable[[Launch], Any]:
    return lambda launch: serving(launch, tmp_path / "engine.log")


@contextmanager
def serving(launch: Launch, log: Path) -> Iterator[Served]:
    command = ENGINE.build_command(launch)
    with open(log, "wb") as file:
        process = subprocess.Popen(command.argv, env=environment(command), stdout=file, stderr=subprocess.STDOUT)
    try:
        engine = Served(process=process, port=launch.port, log=log)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while ENGINE.read_health(*_try_health(engine)) != READY:
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, "not ready in time"
            time.sleep(0.02)
        yield engine
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


def _try_health(engine: Served) -> tuple[int | None, str]:
    try:
        return engine.try_to_ask("/health")
    except OSError:
        return None, ""


def test_a_chat_is_served_and_counted(launch: Launch, serve: Callable[[Launch], Any]) -> None:
    asked = {"messages": [{"role": "user", "content": "Say hello to the world."}], "max_tokens": 4, "temperature": 0}
    with serve(launch) as engine:
        first = engine.ask("/v1/chat/completions", asked)
        again = engine.ask("/v1/chat/completions", asked)
        load = ENGINE.read_load(engine.try_to_ask("/metrics")[1])
    assert first["model"] == "smol"
    came_in = first["usage"]["prompt_tokens"] + again["usage"]["prompt_tokens"]
    assert load is not None
    assert load.running == 0
    # (the engine itself warms up with a token or two)
    assert load.prompt_tokens is not None
    assert load.prompt_tokens >= came_in
    assert load.cached_tokens == again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert load.steps


def test_embeddings_are_served_up_to_the_whole_context(launch: Launch, serve: Callable[[Launch], Any]) -> None:
    asked = replace(launch, task=Task.EMBED, args=("--pooling", "mean"))
    with serve(asked) as engine:
        found = engine.ask("/v1/embeddings", {"input": ["hello", "world " * 600]})["data"]
    assert [len(row["embedding"]) for row in found] == [576, 576]


def test_documents_are_ranked(launch: Launch, serve: Callable[[Launch], Any]) -> None:
    with serve(replace(launch, task=Task.RERANK)) as engine:
        found = engine.ask("/v1/rerank", {"query": "a", "documents": ["b", "c"]})["results"]
    assert {each["index"] for each in found} == {0, 1}


def test_adapters_are_chosen_by_request_and_leave_nothing_behind(
    launch: Launch, serve: Callable[[Launch], Any], tmp_path: Path
) -> None:
    """The prompt is the same each time, so that a slot's cache could bring what another adapter made of it."""
    loras = []
    for name, value in (("a", 0.3), ("b", 0.2)):
        write_adapter(tmp_path / f"{name}.gguf", architecture="llama", value=value)
        loras.append(Lora(name=ModelName(name), source=str(tmp_path / f"{name}.gguf")))
    asked = replace(launch, loras=tuple(loras))
    model, profile = definition_of(asked)
    rules = ENGINE.build_request(model, profile)
    prompt = {"prompt": "Once upon a time there was a small boy who lived", "max_tokens": 8, "temperature": 0}
    bodies = {"base": rules.base, "a": rules.loras["a"], "b": rules.loras["b"]}
    order = ("base", "base", "a", "a", "base", "b", "a", "base")
    with serve(asked) as engine:
        said = [engine.ask("/v1/completions", prompt | dict(bodies[name])) for name in order]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for answer in said]
    assert cached == [before == now for before, now in zip((None, *order), order, strict=False)]
    texts = dict(zip(order, (answer["choices"][0]["text"] for answer in said), strict=True))
    assert len(set(texts.values())) == 3


def test_no_adapter_answers_from_what_another_read(
    launch: Launch, serve: Callable[[Launch], Any], tmp_path: Path
) -> None:
    """Long prompts, which a llama-server would keep in RAM when another takes their slot, and find by tokens alone."""
    write_adapter(tmp_path / "a.gguf", architecture="llama", value=0.3)
    asked = replace(launch, loras=(Lora(name=ModelName("a"), source=str(tmp_path / "a.gguf")),))
    rules = ENGINE.build_request(*definition_of(asked))
    fields = {"base": rules.base, **rules.loras}
    end = " Once upon a time there was a small boy who lived"
    facts = {
        what: " ".join(f"Fact {at} of the {what}: {at * 7 % 13}." for at in range(15)) + end for what in ("cat", "sea")
    }
    order = (("a", "cat"), ("base", "sea"), ("base", "cat"), ("a", "sea"), ("a", "cat"))
    with serve(asked) as engine:

        def ask(who: str, what: str, *, keep: bool) -> str:
            body = {"prompt": facts[what], "max_tokens": 8, "temperature": 0, "cache_prompt": keep}
            return str(engine.ask("/v1/completions", body | dict(fields[who]))["choices"][0]["text"])

        # Of one's own state: read anew, and kept by the slot, which is not the same to the last bit.
        own = {each: {ask(*each, keep=False), ask(*each, keep=True)} for each in sorted(set(order))}
        said = [(each, ask(*each, keep=True)) for each in order]
    assert not own["a", "cat"] & own["base", "cat"]
    assert [(each, text) for each, text in said if text not in own[each]] == []


# -- files that llama.cpp reads


def sample(program: Path, weights: Path) -> Launch:
    return Launch(
        program=(str(program),),
        source=str(weights),
        served_name="smol",
        host="127.0.0.1",
        port=free_port(),
        context_length=1024,
        threads=2,
    )


def write_adapter(path: Path, *, architecture: str, value: float) -> None:
    """A LoRA over the last layers of SmolLM2's feed-forward part, of one value all over."""
    tensors = {}
    for layer in range(20, 30):
        for half, shape in (("a", (1536, 2)), ("b", (2, 576))):
            # (its sign alternates, or the sum over a layer would be one number for all tokens)
            values = [value if at % 3 else -value for at in range(shape[0] * shape[1])]
            tensors[f"blk.{layer}.ffn_down.weight.lora_{half}"] = (shape, values)
    facts = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 2.0}
    write_gguf(path, {"general.architecture": architecture, **facts}, tensors)


def write_gguf(
    path: Path, facts: Mapping[str, str | int | float], tensors: Mapping[str, tuple[tuple[int, ...], list[float]]]
) -> None:
    """A GGUF file, version 3, of float32 tensors."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    for key, fact in facts.items():
        head += _text(key)
        if isinstance(fact, str):
            head += struct.pack("<I", 8) + _text(fact)
        else:
            head += struct.pack("<IH", 2, fact) if isinstance(fact, int) else struct.pack("<If", 6, fact)
    data = b""
    for name, (shape, values) in tensors.items():
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data))
        data += _aligned(struct.pack(f"<{len(values)}f", *values))
    path.write_bytes(_aligned(head) + data)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _aligned(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 32)
