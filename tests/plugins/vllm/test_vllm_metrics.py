"""How busy vLLM is: from the metrics of a real one, and from those of older releases."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmgw_vllm
from llmgw.engines import Load
from llmgw.engines.registry import open_engine

ENGINE = open_engine("vllm", llmgw_vllm)
METRICS = Path(__file__).parent / "metrics"


def test_a_chat_model_tells_of_its_prompts_and_steps() -> None:
    """Four prompts of 258 tokens, of which one was the same again; two of the model itself, one of each adapter."""
    load = ENGINE.read_load((METRICS / "0.32.0-chat.txt").read_text(encoding="utf-8"))
    assert load == Load(running=0, waiting=0, cache_used=0.0, prompt_tokens=1032, cached_tokens=256, steps=32)


def test_a_model_for_embeddings_has_a_load_too() -> None:
    load = ENGINE.read_load((METRICS / "0.32.0-embed.txt").read_text(encoding="utf-8"))
    assert load == Load(running=0, waiting=0, cache_used=0.0, prompt_tokens=5, cached_tokens=0, steps=3)


def test_a_cache_that_is_hardly_used_is_not_unknown() -> None:
    load = ENGINE.read_load("vllm:num_requests_running 1.0\nvllm:kv_cache_usage_perc 6.103515625e-05\n")
    assert load == Load(running=1, cache_used=6.103515625e-05)


def test_a_count_stays_one_that_a_message_can_carry() -> None:
    load = ENGINE.read_load("vllm:num_requests_running 1\nvllm:prompt_tokens_total 1e99\n")
    assert load == Load(running=1, prompt_tokens=2**53)


def test_names_of_older_releases_are_known() -> None:
    text = (
        'vllm:num_requests_running{model_name="a"} 3.0\n'
        'vllm:num_requests_waiting{model_name="a"} 1.0\n'
        'vllm:gpu_cache_usage_perc{model_name="a"} 0.25\n'
        'vllm:gpu_prefix_cache_hits_total{model_name="a"} 96.0\n'
        'vllm:prompt_tokens_total{model_name="a"} 1.024e+03\n'
        'vllm:generation_tokens_total{model_name="a"} 7.0\n'
    )
    assert ENGINE.read_load(text) == Load(
        running=3, waiting=1, cache_used=0.25, prompt_tokens=1024, cached_tokens=96, steps=7
    )


def test_several_engines_behind_one_server_are_summed() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{engine}",model_name="a"}} {engine + 1}.0\n'
        f'vllm:num_requests_waiting{{engine="{engine}",model_name="a"}} 2.0\n'
        f'vllm:kv_cache_usage_perc{{engine="{engine}",model_name="a"}} 0.{engine + 1}\n'
        f'vllm:prefix_cache_hits_total{{engine="{engine}",model_name="a"}} 16.0\n'
        for engine in range(2)
    )
    load = ENGINE.read_load(text)
    assert load is not None
    assert (load.running, load.waiting, load.cached_tokens) == (3, 4, 32)
    assert load.cache_used == pytest.approx(0.15)


def test_waiting_by_reason_is_not_waiting_twice() -> None:
    text = (
        'vllm:num_requests_waiting{engine="0"} 2.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0\n'
    )
    assert ENGINE.read_load(text) == Load(waiting=2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "vllm:num_requests_running NaN\n",
        "vllm:num_requests_running -1\n",
        "vllm:kv_cache_usage_perc 0.5\n",
        "llamacpp:requests_processing 1\n",
    ],
)
def test_what_is_no_vllms_is_nothing(text: str) -> None:
    assert ENGINE.read_load(text) is None


def test_a_share_is_never_above_the_whole() -> None:
    load = ENGINE.read_load("vllm:num_requests_running 1\nvllm:kv_cache_usage_perc 1.0000001\n")
    assert load == Load(running=1, cache_used=1.0)
