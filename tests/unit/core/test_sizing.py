"""What models come to, by figures that others have measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmgw.core import gguf
from llmgw.core.attention import Layer, Layout, read_config, read_metadata
from llmgw.core.sizing import GB, Format, Found, GpuNeed, Number, Sizes, find_needs, size_up

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def found(layout: Layout | None = None, **facts: Any) -> Found:
    usual: dict[str, Any] = {
        "source": "org/m",
        "format": Format.SAFETENSORS,
        "files": 1,
        "weights": Number(value=10 * GB, origin="here"),
        "disk": Number(value=11 * GB, origin="here"),
        "told_by": "config.json",
    }
    return Found(layout=layout, **{**usual, **facts})


def size(value: int, context: int | None = None, **facts: Any) -> Sizes:
    return size_up(found(read_config({**TINY, **facts})), context=context or value)


def test_a_tiny_model_takes_what_an_engine_counts_for_it() -> None:
    # 2 layers, 2 heads of 32: vLLM counts 512 bytes for each token.
    sizes = size_up(found(read_config(TINY)))
    assert sizes.kv_token == Number(value=512, origin="config.json, with 16 bits for each value")
    assert sizes.kv is not None
    assert sizes.kv.value == 512 * 4096
    assert sizes.context == sizes.context_most == Number(value=4096, origin="config.json")


def test_a_real_model_takes_what_its_engine_logs(weights: Path) -> None:
    with weights.open("rb") as opened:
        header = gguf.read(opened.read(4 * 1024 * 1024))
    assert isinstance(header, gguf.Header)
    sizes = size_up(found(read_metadata(header.metadata), format=Format.GGUF), context=4096)
    # llama_kv_cache: size = 90.00 MiB (4096 cells, 30 layers)
    assert sizes.kv_token is not None
    assert sizes.kv is not None
    assert (sizes.kv_token.value, sizes.kv.value) == (23_040, 90 * 1024**2)


def test_heads_are_shared_and_not_cut() -> None:
    sizes = size_up(found(read_config(TINY)), context=1000)
    kv = [each.kv for each in sizes.gpus]
    assert kv == [512_000, 256_000, 256_000, None]
    assert [each.weights for each in sizes.gpus[:3]] == [10 * GB, 5 * GB, 5 * GB // 2]
    assert sizes.gpus[3].why == "its 4 attention heads can't be shared by 8"
    assert sizes.gpus[3].total is None


def test_a_latent_lies_on_every_gpu() -> None:
    layout = read_config({**TINY, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    sizes = size_up(found(layout), context=1000)
    assert [each.kv for each in sizes.gpus] == [2 * 1152 * 1000] * 4


def test_a_window_ends_and_a_batch_goes_beyond_it() -> None:
    layout = Layout(layers=(Layer(values=100, heads=1), Layer(values=100, heads=1, window=1000)))
    short = size_up(found(layout), context=500).kv
    long = size_up(found(layout, format=Format.GGUF), context=100_000).kv
    assert short is not None
    assert long is not None
    assert short.value == 2 * 200 * 500
    assert long.value == 200 * 100_000 + 200 * (1000 + 512)
    assert long.origin.startswith("estimated: ")


def test_what_is_unknown_stays_unknown() -> None:
    sizes = size_up(found(None, weights=None, disk=None, told_by=""))
    assert (sizes.kv, sizes.kv_token, sizes.overhead, sizes.total, sizes.context) == (None,) * 5
    assert [(each.weights, each.kv, each.total) for each in sizes.gpus] == [(None, None, None)] * 4
    needs = find_needs(sizes)
    assert (needs.gpus, needs.memory_gb, needs.disk_gb) == ((), None, None)


def test_a_sum_without_all_its_parts_says_so() -> None:
    sizes = size_up(found(Layout(hidden=128, vocabulary=1000, heads=8)))
    assert sizes.total is None
    assert [each.whole for each in sizes.gpus] == [False] * 4
    assert all(each.total is not None and each.weights is not None for each in sizes.gpus)
    assert "what its layers keep of each token does not follow from config.json: the KV cache is unknown" in sizes.notes
    no_context = size_up(found(read_config({**TINY, "max_position_embeddings": None})))
    assert (no_context.kv, no_context.context) == (None, None)
    assert no_context.kv_token is not None


def test_the_sum_is_that_of_its_parts() -> None:
    sizes = size_up(found(read_config(TINY)))
    assert sizes.total is not None
    assert sizes.kv is not None
    assert sizes.overhead is not None
    assert sizes.overhead.origin.startswith("estimated: ")
    assert sizes.total.value == 10 * GB + sizes.kv.value + sizes.overhead.value == sizes.gpus[0].total
    assert all(each.whole for each in sizes.gpus[:3])


def test_an_encoder_keeps_nothing_and_a_state_is_not_nothing() -> None:
    encoder = size_up(found(read_config({**TINY, "model_type": "bert"})))
    assert encoder.kv is not None
    assert (encoder.kv.value, encoder.gpus[0].kv, encoder.gpus[0].whole) == (0, 0, True)
    recurrent = size_up(found(read_config({**TINY, "model_type": "mamba"})))
    assert (recurrent.kv, recurrent.gpus[0].kv, recurrent.gpus[0].whole) == (None, None, False)
    assert "2 of its layers keep a state of one size for each request, which is not counted" in recurrent.notes


def test_what_a_reader_must_know_is_noted() -> None:
    longer = size_up(found(read_config(TINY)), context=5000)
    assert longer.notes == ("it was made for 4096 tokens: a context of 5000 needs more than memory",)
    bounded = size_up(found(read_config({**TINY, "sliding_window": 16}), notes=("before",)))
    assert bounded.notes[0] == "before"
    assert "the cache is smaller" in bounded.notes[1]
    assert bounded.kv is not None
    assert "at most" in bounded.kv.origin


def test_needs_are_the_sums_rounded_up() -> None:
    sizes = size_up(found(read_config(TINY)), context=1000)
    needs = find_needs(sizes, gpu_class="h100-80g")
    total = sizes.gpus[0].total
    assert total is not None
    assert needs.gpus[0] == GpuNeed(tp=1, memory_gb=-(-total // 10**6) / 1000)
    assert [each.tp for each in needs.gpus] == [1, 2, 4]
    assert (needs.memory_gb, needs.disk_gb, needs.gpu_class) == (needs.gpus[0].memory_gb, 11.0, "h100-80g")
    # what lies at a path has its room already
    assert find_needs(replace(sizes, source="/m.gguf")).disk_gb is None


@pytest.mark.parametrize(
    ("facts", "bytes_per_token"),
    [
        # Llama 3.1 70B, Qwen2.5 7B, DeepSeek V3 (by layer and token 1152 bytes)
        ({"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}, 327_680),
        ({"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}, 57_344),
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 61 * 1152),
    ],
)
def test_known_models_come_to_what_is_known_of_them(facts: dict[str, Any], bytes_per_token: int) -> None:
    per_token = size(1, **facts).kv_token
    assert per_token is not None
    assert per_token.value == bytes_per_token
