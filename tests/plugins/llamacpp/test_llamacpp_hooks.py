"""The hooks of the llama.cpp plugin: commands, health, load, versions."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmgw_llamacpp
from llmgw.engines import (
    LOADING,
    READY,
    HealthState,
    Launch,
    Load,
    Model,
    ModelName,
    ProbeOutput,
    Profile,
    Version,
)
from llmgw.engines.registry import open_engine

HERE = Path(__file__).parent
ENGINE = open_engine("llamacpp", llmgw_llamacpp)


def a_launch(*args: str, gpus: tuple[int, ...] = (), threads: int | None = None, context: int | None = 4096) -> Launch:
    return Launch(
        program=("python", "-m", "llmgw_llamacpp.embedded"),
        source="/models/smol.gguf",
        served_name="smol",
        host="127.0.0.1",
        port=18000,
        context_length=context,
        gpus=gpus,
        threads=threads,
        args=args,
    )


def a_probe(stdout: str = "", stderr: str = "", code: int = 0) -> ProbeOutput:
    return ProbeOutput(code=code, stdout=stdout, stderr=stderr)


def problems_of(source: str, *args: str) -> list[tuple[str, str]]:
    profile = Profile(name="cpu", engine="llamacpp", args=args)
    model = Model(name=ModelName("smol"), source=source, context_length=4096, profiles=(profile,))
    return [(problem.key, problem.message) for problem in ENGINE.validate(model, profile)]


def test_the_command_names_model_address_slots_and_metrics() -> None:
    command = ENGINE.build_command(a_launch(threads=6))
    assert command.argv == (
        *("python", "-m", "llmgw_llamacpp.embedded", "--model", "/models/smol.gguf", "--alias", "smol"),
        *("--host", "127.0.0.1", "--port", "18000", "--ctx-size", "4096", "--parallel", "1"),
        *("--threads", "6", "--metrics", "--no-webui"),
    )
    assert command.env == {"GGML_NO_BACKTRACE": "1"}


def test_inherited_settings_of_llama_server_are_scrubbed() -> None:
    command = ENGINE.build_command(a_launch())
    for name in ("LLAMA_ARG_CTX_SIZE", "LLAMA_API_KEY", "LLAMA_SERVER_ROUTER_PORT", "AIP_MODE"):
        assert name.startswith(command.scrub)
    assert not "PATH".startswith(command.scrub)


def test_a_profile_decides_on_its_threads() -> None:
    argv = ENGINE.build_command(a_launch("-t", "2", threads=6)).argv
    assert "--threads" not in argv
    assert argv[-2:] == ("-t", "2")


def test_gpus_are_counted_by_bus_order() -> None:
    assert ENGINE.build_command(a_launch(gpus=(1, 3))).env == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "1,3",
        "GGML_NO_BACKTRACE": "1",
    }


def test_a_repository_is_refused_and_a_file_in_one_is_not() -> None:
    assert [key for key, _ in problems_of("Qwen/Qwen2.5-7B-Instruct")] == ["source"]
    assert problems_of("hf:Qwen/Qwen2.5-GGUF/q4.gguf") == []
    assert problems_of("models/q4.GGUF") == []
    assert problems_of("/models/blobs/sha256-0123") == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("version: 0.1.0-dev (build 1, commit 7e4c0a9)\nbuilt with GNU 11.4.0 for Linux x86_64\n", "0.1.0-dev"),
        ("version: 8672 (3ce7da2)\nbuilt with GNU 11.4.0 for Linux x86_64\n", "8672"),
        ("ggml_cuda_init: found 1 CUDA devices\nversion: 4589 (abc)\n", "4589"),
    ],
)
def test_a_version_is_read_from_stderr(text: str, number: str) -> None:
    assert ENGINE.read_probe(a_probe(stderr=text)) == Version(number=number)


def test_a_probe_that_failed_has_no_version() -> None:
    text = "llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared object file"
    assert ENGINE.read_probe(a_probe(stderr=text, code=127)) is None
    assert ENGINE.read_probe(a_probe(stderr="version: 1 (a)", code=1)) is None


def test_health_tells_loading_ready_and_broken_apart() -> None:
    loading = '{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
    assert ENGINE.read_health(503, loading) == LOADING
    assert ENGINE.read_health(200, '{"status":"ok"}') == READY
    assert ENGINE.read_health(500, "") == LOADING


@pytest.mark.parametrize(("status", "body"), [(200, "<html>It works!</html>"), (200, "[]"), (404, ""), (401, "{}")])
def test_something_else_on_the_port_is_broken(status: int, body: str) -> None:
    health = ENGINE.read_health(status, body)
    assert health.state is HealthState.BROKEN
    assert health.reason


@pytest.mark.parametrize("recorded", sorted((HERE / "metrics").glob("*.txt")), ids=lambda path: path.stem)
def test_the_load_of_each_recorded_version_is_read(recorded: Path) -> None:
    assert ENGINE.read_load(recorded.read_text()) == Load(running=0, waiting=0)


def test_load_counts_requests_and_the_cache_of_older_builds() -> None:
    text = (
        "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1e+01\n"
        "llamacpp:kv_cache_usage_ratio 0.25\nllamacpp:n_tokens_max nan\n"
    )
    assert ENGINE.read_load(text) == Load(running=2, waiting=10, cache_used=0.25)


def test_what_the_metrics_do_not_say_is_none() -> None:
    assert ENGINE.read_load("llamacpp:requests_processing 1\n") == Load(running=1)
    assert ENGINE.read_load('{"error":{"code":501}}') is None
    assert ENGINE.read_load("llamacpp:requests_processing -1\n") is None
    assert ENGINE.read_load("llamacpp:kv_cache_usage_ratio 0.5\n") is None


def test_usage_may_be_asked_for_in_streams() -> None:
    assert ENGINE.build_request(Profile(name="cpu", engine="llamacpp")).usage_in_streams
