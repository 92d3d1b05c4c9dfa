"""What is read from logs that llama-server b8672 to b11549 really wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.engines import LogFact
from llmgw_llamacpp.logs import read

LOGS = Path(__file__).parent / "logs"
VERSIONS = ("b8672", "b10068", "b10434", "b11549")
CAUSES = {
    "missing": "failed to open GGUF file 'missing.gguf' (No such file or directory)",
    "truncated": "error loading model: tensor 'token_embd.weight' data is not within the file bounds, "
    "model is corrupted or incomplete",
    "junk": "invalid magic characters: 'hell', expected 'GGUF'; the weights are no GGUF file: was the download another "
    "page, or cut off? Fetch it again",
    "port": "couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18342",
    "flag": "error: invalid argument: --bogus",
}


def facts_of(name: str) -> list[LogFact]:
    lines = (LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines()
    return [fact for fact in map(read, lines) if fact is not None]


def first_cause(name: str) -> str | None:
    return next((fact.fatal for fact in facts_of(name) if fact.fatal and not fact.generic), None)


@pytest.mark.parametrize("case", CAUSES)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_first_line_that_is_not_generic_is_the_cause(version: str, case: str) -> None:
    assert first_cause(f"{version}-{case}") == CAUSES[case]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_bad_value_is_named_with_its_flag(version: str) -> None:
    cause = first_cause(f"{version}-value")
    assert cause is not None
    assert cause.startswith('error while handling argument "--ctx-size": ')


@pytest.mark.parametrize("version", ["b8672", "b10434", "b11549"])
def test_a_start_that_works_shows_progress_and_no_cause(version: str) -> None:
    """The log also has two requests that were refused: their errors are not the engine's."""
    facts = facts_of(f"{version}-good")
    assert [fact for fact in facts if fact.fatal] == []
    said = [fact.progress for fact in facts]
    assert said[0] == "loading smollm2.gguf"
    assert str(said[-1]).startswith("slots: 2")


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "/opt/llama.cpp/llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared "
            "object file: No such file or directory",
            "error while loading shared libraries: libgomp.so.1: cannot open shared object file: "
            "No such file or directory",
        ),
        (
            "0.01.300.000 E llama_model_load: error loading model: unknown model architecture: 'qwen9'",
            "error loading model: unknown model architecture: 'qwen9'",
        ),
        (
            "0.01.300.000 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: "
            "cudaMalloc failed: out of memory",
            "allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
        ),
        (
            "0.01.300.000 E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv "
            "cache",
            "failed to initialize the context: failed to allocate buffer for kv cache",
        ),
        ("ggml.c:123: GGML_ASSERT(n > 0) failed", "GGML_ASSERT(n > 0) failed"),
        ("/src/ggml/src/ggml.c:123: GGML_ASSERT(n > 0) failed", "GGML_ASSERT(n > 0) failed"),
        (
            "/workspace/llama.cpp/common/common.cpp:2245: get_sub_batch: failed to add token 2 at index 1 (error -1)",
            "failed to add token 2 at index 1 (error -1)",
        ),
        ("/src/ggml-cuda/mmq.cu:31: unsupported type", "unsupported type"),
        ("/src/ggml-cuda/mmq.cu:31: fatal error", "mmq.cu:31: fatal error"),
        ("/src/ggml-cuda.cu:98: CUDA error: out of memory", "CUDA error: out of memory"),
        ("  what():  std::bad_alloc", "std::bad_alloc"),
        ("ModuleNotFoundError: No module named 'llmgw'", "ModuleNotFoundError: No module named 'llmgw'"),
    ],
)
def test_other_causes_are_known(line: str, cause: str) -> None:
    assert read(line) == LogFact(fatal=cause)


@pytest.mark.parametrize(
    "line",
    [
        "0.00.023.229 E cmn  common_init_: failed to load model 'x.gguf'",
        "0.00.023.236 E srv  llama_server: exiting due to model loading error",
        "0.00.014.351 E common_fit_params: encountered an error while trying to fit params to free memory: failed",
        "init: exiting due to HTTP server error",
    ],
)
def test_what_is_printed_whatever_went_wrong_is_generic(line: str) -> None:
    fact = read(line)
    assert fact is not None
    assert fact.fatal
    assert fact.generic


@pytest.mark.parametrize(
    "line",
    [
        "",
        "/usr/lib/python3/site.py:12: UserWarning: odd",
        "0.01.0.0 I srv  update_slots: all slots are idle",
        "0.00.003.231 W srv  llama_server: -----------------",
    ],
)
def test_most_lines_tell_nothing(line: str) -> None:
    assert read(line) is None
