"""Progress in logs that vLLM 0.32 really wrote, and in lines of its sources."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmgw_vllm
from llmgw.engines import LogFact
from llmgw.engines.registry import open_engine

ENGINE = open_engine("vllm", llmgw_vllm)
LOGS = Path(__file__).parent / "logs"
GPU = "(Worker_TP0 pid=77) INFO 11-29 23:41:03 [gpu_model_runner.py:5150] "


def progress_of(name: str) -> list[str]:
    lines = (LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines()
    return [fact.progress for fact in map(ENGINE.read_log, lines) if fact is not None]


def test_a_start_that_works_shows_how_far_it_is() -> None:
    assert progress_of("good") == [
        "architecture LlamaForCausalLM",
        "loading tiny",
        "loading the weights: 0 %",
        "loading the weights: 100 %",
        "the weights are loaded (0.01 s)",
        "compiling and warming up",
        "warmed up",
        "KV cache: 2,097,152 tokens",
        "the engine is up (34.48 s)",
        "starting to listen",
    ]


def test_a_node_that_does_not_serve_says_that_it_waits() -> None:
    assert "waiting for the other nodes" in progress_of("headless")


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        ("Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:10<00:10,  5.1s/it]", "the weights: 50 %"),
        ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  43%|####    | 15/35 [00:02<00:02]", "graphs: 43 %"),
        ("Capturing CUDA graphs (decode, FULL): 100%|####| 19/19\r", "capturing graphs: 100 %"),
        ("Fetching 12 files:   8%|8         | 1/12 [00:05<00:58]", "fetching the weights: 8 %"),
        (GPU + "Model loading took 14.99 GiB memory and 8.123456 seconds", "the weights are loaded (14.99 GiB)"),
        (GPU + "Graph capturing finished in 21 secs, took 0.61 GiB", "graphs are captured (21 s)"),
        (GPU + "torch.compile took 31.41 s in total", "compiled in 31.41 s"),
        (GPU + "Dynamo bytecode transform time: 6.20 s", "compiling"),
        (GPU + "Starting to load model org/llama-8b...", "loading llama-8b"),
        ("INFO 07-15 10:00:00 [gpu_model_runner.py:1600] Starting to load model org/old-8b...", "loading old-8b"),
        (GPU + "GPU KV cache size: 123,456 tokens", "KV cache: 123,456 tokens"),
        (
            "Loading pt checkpoint shards:  20% Completed | 1/5\rLoading pt checkpoint shards:  40% Completed | 2/5",
            "40 %",
        ),
    ],
)
def test_each_stage_has_its_words(line: str, progress: str) -> None:
    fact = ENGINE.read_log(line)
    assert fact is not None
    assert fact.progress.endswith(progress)


@pytest.mark.parametrize("line", ["", "INFO:     Application startup complete.", GPU + "Using LBHNC KV cache layout."])
def test_the_rest_tells_nothing(line: str) -> None:
    assert ENGINE.read_log(line) is None


def test_a_line_is_read_once_for_all_its_length() -> None:
    assert ENGINE.read_log("x" * 100_000 + " Warming up done.") == LogFact(progress="warmed up")
