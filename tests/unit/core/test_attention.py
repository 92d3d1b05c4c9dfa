"""What layers keep, by the facts of models that there are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.attention import Layer, Layout, read_config, read_metadata

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}


def layers(**facts: Any) -> tuple[Layer, ...] | None:
    return read_config({**LLAMA, **facts}).layers


def test_heads_are_grouped_or_all_kept() -> None:
    assert layers() == (Layer(values=2 * 8 * 64, heads=8),) * 4
    assert layers(num_key_value_heads=2) == (Layer(values=2 * 2 * 64, heads=2),) * 4
    assert layers(num_key_value_heads=2, head_dim=128) == (Layer(values=2 * 2 * 128, heads=2),) * 4
    assert layers(num_key_value_heads=2, head_dim=192, v_head_dim=128) == (Layer(values=640, heads=2),) * 4
    assert layers(multi_query=True) == (Layer(values=128, heads=1),) * 4
    assert layers(num_kv_heads=[1, 2, 3, 4]) == tuple(Layer(values=128 * heads, heads=heads) for heads in (1, 2, 3, 4))
    assert layers(attn_config={"kv_n_heads": 2}) == (Layer(values=256, heads=2),) * 4


def test_the_other_facts_are_told() -> None:
    facts = {"vocab_size": 32, "max_position_embeddings": 1024}
    found = read_config({**LLAMA, **facts})
    assert (found.architecture, found.context, found.hidden, found.vocabulary, found.heads) == (
        "llama",
        1024,
        512,
        32,
        8,
    )


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_the_part_about_text_is_what_counts(key: str) -> None:
    assert read_config({"model_type": "qwen2_5_vl", key: LLAMA, "num_hidden_layers": 99}) == read_config(LLAMA)
    assert read_config({"thinker_config": {key: LLAMA}}) == read_config(LLAMA)


def test_a_latent_is_kept_once_and_whole() -> None:
    # DeepSeek V3: 576 values of each token in each layer.
    assert layers(kv_lora_rank=512, qk_rope_head_dim=64) == (Layer(values=576, heads=1),) * 4
    assert layers(kv_lora_rank=512) is None
    sparse = layers(kv_lora_rank=512, qk_rope_head_dim=64, index_topk=2048, index_head_dim=128)
    assert sparse == (Layer(values=576 + 66, heads=1),) * 4


def windows(**facts: Any) -> list[int | None]:
    found = layers(**facts)
    assert found is not None
    return [layer.window for layer in found]


def test_windows_are_found_where_they_are_told() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(layer_types=kinds, sliding_window=128) == [128, None, 128, None]
    assert windows(layer_types=kinds) == [None] * 4
    chunked = ["chunked_attention"] * 3 + ["full_attention"]
    assert windows(layer_types=chunked, attention_chunk_size=8192) == [8192] * 3 + [None]
    # (what is no list says nothing)
    for odd in (5, True, float("nan"), {}, "full_attention"):
        assert windows(layer_types=odd, layers_block_type=[], full_attention_interval=2, sliding_window=7) == [None] * 2
    assert windows(sliding_window=16, sliding_window_pattern=4) == [16, 16, 16, None]
    assert windows(sliding_window=16, model_type="gemma2") == [16, None, 16, None]
    assert windows(sliding_window=16, model_type="mistral") == [16] * 4
    assert windows(sliding_window=16, use_sliding_window=False) == [None] * 4
    assert windows(sliding_window=16, use_sliding_window=True, max_window_layers=3) == [None] * 3 + [16]


def test_where_windows_are_is_not_guessed() -> None:
    found = read_config({**LLAMA, "sliding_window": 16})
    assert found.bounded
    assert found.layers == read_config(LLAMA).layers
    assert layers(layer_types=["full_attention"] * 3) is None
    assert layers(layer_types=["full_attention"] * 3 + ["telepathy"]) is None
    assert layers(layer_types=["full_attention"] * 3 + [[]]) is None


def test_layers_with_a_state_keep_no_tokens() -> None:
    for facts in (
        {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        {"full_attention_interval": 4},
        {"layers_block_type": ["mamba", "attention", "mamba", "mamba"]},
        {"hybrid_override_pattern": "MM*M"},
        {"attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 16},
        {"attn_layer_indices": [2]},
    ):
        found = read_config({**LLAMA, **facts})
        assert found.layers == (Layer(values=1024, heads=8),)
        assert found.states == 3
    assert read_config({**LLAMA, "hybrid_override_pattern": "M-*E"}).states == 1
    alone = read_config({**LLAMA, "model_type": "mamba"})
    assert (alone.layers, alone.states) == ((), 4)
    both = read_config({**LLAMA, "model_type": "falcon_h1", "mamba_d_state": 16})
    assert (len(both.layers or ()), both.states) == (4, 4)
    assert layers(mamba_d_state=16) is None


def test_shared_layers_are_counted_once() -> None:
    assert len(layers(num_kv_shared_layers=3) or ()) == 1
    assert layers(num_kv_shared_layers=4) is None


def test_full_layers_may_have_heads_of_their_own() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    found = layers(
        layer_types=kinds,
        sliding_window=16,
        num_key_value_heads=4,
        head_dim=64,
        global_head_dim=128,
        num_global_key_value_heads=2,
    )
    assert found is not None
    assert found[:2] == (Layer(values=512, heads=4, window=16), Layer(values=512, heads=2))


def test_encoders_keep_nothing() -> None:
    assert layers(model_type="bert") == ()
    assert layers(is_encoder_decoder=True) is None
    assert layers(block_configs=[{}]) is None


def test_what_is_not_told_is_unknown() -> None:
    assert read_config({}) == Layout()
    assert read_config({"num_hidden_layers": 4}).layers is None
    assert read_config({**LLAMA, "hidden_size": 100, "num_attention_heads": 7}).layers is None
    assert read_config({**LLAMA, "num_hidden_layers": 10**6}).layers is None
    assert layers(num_key_value_heads=[1, 2]) is None


# GGUF

META = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.attention.head_count": 8,
    "llama.embedding_length": 512,
}


def gguf_layers(**facts: Any) -> tuple[Layer, ...] | None:
    return read_gguf(**facts).layers


def read_gguf(name: str = "llama", **facts: Any) -> Layout:
    told = {f"{name}.{key.replace('__', '.')}": value for key, value in facts.items()}
    usual = {key.replace("llama.", f"{name}."): value for key, value in META.items()}
    return read_metadata({**usual, "general.architecture": name, **told})


def test_a_gguf_header_tells_heads_and_widths() -> None:
    assert gguf_layers() == (Layer(values=1024, heads=8),) * 4
    assert gguf_layers(attention__head_count_kv=2) == (Layer(values=256, heads=2),) * 4
    assert gguf_layers(attention__head_count_kv=(2, 2, 4, 4)) == (
        *(Layer(values=256, heads=2),) * 2,
        *(Layer(values=512, heads=4),) * 2,
    )
    wide = gguf_layers(attention__head_count_kv=2, attention__key_length=192, attention__value_length=128)
    assert wide == (Layer(values=640, heads=2),) * 4
    assert len(gguf_layers(nextn_predict_layers=1) or ()) == 3
    assert len(gguf_layers(attention__shared_kv_layers=3) or ()) == 1


def test_a_gguf_header_tells_a_latent() -> None:
    facts = {"attention__kv_lora_rank": 512, "rope__dimension_count": 64, "attention__key_length": 576}
    assert gguf_layers(**facts, attention__key_length_mla=192) == (Layer(values=576, heads=1),) * 4
    # (an old conversion, which keeps every head)
    old = gguf_layers(**facts, attention__value_length=512)
    assert old == (Layer(values=8 * (576 + 512), heads=8),) * 4


def test_a_gguf_header_tells_windows() -> None:
    def found(name: str, **facts: Any) -> list[int | None]:
        return [layer.window for layer in read_gguf(name, **facts).layers or ()]

    assert found("gpt-oss", attention__sliding_window=128) == [128, None, 128, None]
    told = {"attention__sliding_window": 128, "attention__sliding_window_pattern": (True, True, True, False)}
    assert found("x", **told) == [128, 128, 128, None]
    assert read_gguf("x", attention__sliding_window=128).bounded
    short = read_gguf("gpt-oss", attention__sliding_window=128, attention__key_length_swa=32).layers or ()
    assert [layer.values for layer in short] == [8 * (32 + 64), 1024, 8 * (32 + 64), 1024]


def test_a_gguf_header_tells_states() -> None:
    for facts in (
        {"attention__head_count_kv": (0, 0, 0, 8)},
        {"full_attention_interval": 4, "ssm__state_size": 16},
    ):
        found = read_gguf(**facts)
        assert (found.layers, found.states) == ((Layer(values=1024, heads=8),), 3)
    assert read_gguf("falcon-h1", ssm__state_size=16).states == 4
    assert read_gguf("new", ssm__state_size=16).layers is None


def test_of_a_gguf_header_what_is_not_told_is_unknown() -> None:
    assert read_metadata({}) == Layout()
    assert read_gguf(attention__causal=False).layers == ()
    assert read_gguf(block_count=0).layers is None
    assert read_gguf(attention__head_count_kv=(1,)).layers is None
    assert read_gguf(embedding_length="wide").layers is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    *("num_hidden_layers", "num_attention_heads", "hidden_size", "layer_types", "layers_block_type", "sliding_window"),
    *("head_dim", "num_key_value_heads", "kv_lora_rank", "qk_rope_head_dim", "attn_config", "attn_layer_indices"),
    *("attn_layer_period", "attn_layer_offset", "hybrid_override_pattern", "num_kv_shared_layers", "model_type"),
    *("use_sliding_window", "max_window_layers", "sliding_window_pattern", "thinker_config", "text_config"),
    *("global_head_dim", "full_attention_interval"),
]


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8))
def test_a_config_of_any_shape_never_raises(facts: dict[str, Any]) -> None:
    for config in (facts, {**LLAMA, **facts}):
        found = read_config(config).layers
        assert found is None or all(layer.values > 0 < layer.heads for layer in found)


GGUF_KEYS = [
    *("block_count", "nextn_predict_layers", "full_attention_interval", "ssm.state_size", "rope.dimension_count"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.key_length_mla"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "attention.kv_lora_rank", "attention.causal"),
    "attention.shared_kv_layers",
]


@pytest.mark.parametrize("heads", [0, (2, 2, 2, 0)])
def test_a_layer_that_attends_without_heads_says_nothing(heads: object) -> None:
    facts = {"block_count": 4, "full_attention_interval": 2, "attention.head_count_kv": heads}
    assert read_metadata({**META, **{f"llama.{key}": value for key, value in facts.items()}}).layers is None


@given(
    st.dictionaries(
        st.sampled_from(GGUF_KEYS), st.integers(-1, 9) | st.booleans() | st.tuples(st.integers(-1, 9)), max_size=8
    )
)
def test_metadata_of_any_shape_never_raises(facts: dict[str, Any]) -> None:
    found = read_metadata({**META, **{f"llama.{key}": value for key, value in facts.items()}}).layers
    assert found is None or all(layer.values > 0 < layer.heads for layer in found)
