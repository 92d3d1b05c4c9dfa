"""How much a model's layers keep of each token, from the header of its GGUF file or its config.json.

What either does not say, or says in a way that is not known here, is None: a guess would look like a figure. Both are
files of somebody else's, and whatever stands in them nothing here raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

MAX_LAYERS = 10_000
_MAX_COUNT = 10**9

# What a layer does with the tokens before, by the words of config.json.
_FULL_WORDS = {"full_attention", "attention", "full", "global"}
_WINDOW_WORDS = {"sliding_attention", "sliding_window_attention", "local_attention", "sliding", "local"}
_CHUNK_WORDS = {"chunked_attention"}
_STATE_WORDS = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "lightning_attention"}
_NESTED = ("text_config", "llm_config", "language_config")
# Models that read the whole text at once, and keep nothing.
_ENCODERS = {
    "albert",
    "bert",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "new",
    "nomic_bert",
    "roberta",
    "xlm-roberta",
}
_RECURRENT = {"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7"}
_RECURRENT_KEYS = ("mamba_", "ssm_", "linear_", "rwkv_", "state_size", "conv_L_cache", "lru_width")
# Each layer of these has attention and a state side by side.
_BOTH = {"falcon_h1", "falcon-h1"}
# Every so many layers one looks at all tokens, where neither file says so itself.
_PATTERNS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n": 5,
    "gemma3n_text": 5,
    "cohere2": 4,
    "gpt-oss": 2,
    "gpt_oss": 2,
    "olmo2": 4,
    "exaone4": 4,
}
_ALL_WINDOWED = {"mistral", "mixtral", "starcoder2", "phi3", "phimoe"}
# What changes the layers in ways that are not known here.
_STRANGE = ("block_configs", "compress_ratios", "cross_attention_layers", "cross_attention_interval")

Facts = Mapping[str, Any]
# The values and the heads of a layer, by its place and its kind.
Measure = Callable[[int, "Kind"], tuple[int, int]]


class Kind(Enum):
    """What a layer keeps: each token, the last ones, a state of one size for each request, or nothing."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """``values`` numbers of each token, those of ``heads`` heads that may lie on as many GPUs (1: each GPU has all of
    them), for the last ``window`` tokens (None: for all)."""

    values: int
    heads: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``layers`` are those that keep something of each token, None where that is not known; ``states`` counts those
    that keep a state. ``bounded``: there are windows, and which layers have them is not known, so that it is less than
    that. ``context``: how many tokens it was made for; ``heads``: those that ask."""

    architecture: str | None = None
    layers: tuple[Layer, ...] | None = None
    states: int = 0
    bounded: bool = False
    context: int | None = None
    hidden: int | None = None
    vocabulary: int | None = None
    heads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kinds:
    """``window`` is that of the layers with one."""

    of: tuple[Kind, ...]
    window: int | None = None
    states: int = 0
    bounded: bool = False


# config.json


def read_config(config: Facts) -> Layout:
    """What config.json says, or the part of it that is about text."""
    facts = _find_text(config)
    name = facts.get("model_type", config.get("model_type"))
    model_type = name if isinstance(name, str) else None
    layout = Layout(
        architecture=model_type,
        context=_count(facts, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
        hidden=_count(facts, "hidden_size", "n_embd", "d_model"),
        vocabulary=_count(facts, "vocab_size"),
        heads=_count(facts, "num_attention_heads", "n_head", "n_heads"),
    )
    if model_type in _ENCODERS:
        return replace(layout, layers=())
    kinds = _find_kinds(facts, model_type)
    if kinds is None or facts.get("is_encoder_decoder") or any(facts.get(key) for key in _STRANGE):
        return layout
    layers = _find_layers(facts, layout, kinds)
    return replace(layout, layers=layers, states=kinds.states, bounded=kinds.bounded)


def _find_text(config: Facts) -> Facts:
    facts = config
    # (one that listens and speaks has a part that thinks, which has its text)
    for key in ("thinker_config", *_NESTED):
        inner = facts.get(key)
        if isinstance(inner, dict):
            facts = inner
    return facts


def _find_layers(facts: Facts, layout: Layout, kinds: _Kinds) -> tuple[Layer, ...] | None:
    latent, rope = _count(facts, "kv_lora_rank"), _count(facts, "qk_rope_head_dim")
    if latent is not None:
        if rope is None:
            return None
        # (what sparse attention finds its keys by is kept beside them: a byte each, and a scale)
        index = _count(facts, "index_head_dim") if facts.get("index_topk") else None
        return _lay(kinds, lambda _, __: (latent + rope + ((index + 4) // 2 if index else 0), 1))
    attention = facts.get("attn_config")
    groups = _find_groups(facts if not isinstance(attention, dict) else {**attention, **facts}, layout.heads, kinds)
    width = _count(facts, "head_dim", "kv_channels")
    if width is None and layout.hidden and layout.heads and layout.hidden % layout.heads == 0:
        width = layout.hidden // layout.heads
    value, full = _count(facts, "v_head_dim"), _count(facts, "global_head_dim")
    full_groups = _count(facts, "num_global_key_value_heads")
    if groups is None or width is None:
        return None

    def measure(at: int, kind: Kind) -> tuple[int, int]:
        if kind is Kind.FULL and full is not None:
            heads = full_groups or groups[at]
            return 2 * heads * full, heads
        return groups[at] * (width + (value or width)), groups[at]

    return _lay(kinds, measure, shared=_count(facts, "num_kv_shared_layers") or 0)


def _find_groups(facts: Facts, heads: int | None, kinds: _Kinds) -> tuple[int, ...] | None:
    """How many heads are kept, for each layer."""
    count = len(kinds.of)
    for key in ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num"):
        told = facts.get(key)
        if isinstance(told, list):
            return tuple(told) if len(told) >= count and all(map(_is_count, told)) else None
        if isinstance(told, int) and _is_count(told):
            return (told,) * count
    if facts.get("multi_query") is True:
        return (1,) * count
    return (heads,) * count if heads is not None else None


def _find_kinds(facts: Facts, model_type: str | None) -> _Kinds | None:
    count = _count(facts, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count is None or count > MAX_LAYERS:
        return None
    window = _count(facts, "sliding_window") if facts.get("use_sliding_window") is not False else None
    told = _told_kinds(facts, count)
    if told is not None:
        if None in told or len(told) < count:
            return None
        words = facts.get("layer_types")
        if isinstance(words, list) and any(isinstance(word, str) and word in _CHUNK_WORDS for word in words):
            window = _count(facts, "attention_chunk_size")
        return _kinds([kind for kind in told[:count] if kind is not None], window)
    if model_type in _BOTH:
        return _Kinds(of=(Kind.FULL,) * count, states=count)
    if model_type in _RECURRENT:
        return _kinds([Kind.STATE] * count, None)
    if any(key.startswith(_RECURRENT_KEYS) for key in facts):
        return None
    return _find_windows(facts, model_type, count, window)


def _told_kinds(facts: Facts, count: int) -> list[Kind | None] | None:
    """The kind of each layer, None for a word that is not known; None where nothing is said of single layers."""
    words = facts.get("layer_types", facts.get("layers_block_type"))
    if isinstance(words, list):
        return [_read_word(word) for word in words]
    signs = facts.get("hybrid_override_pattern")
    if isinstance(signs, str):
        meant = {"M": Kind.STATE, "*": Kind.FULL, "-": Kind.NOTHING, "E": Kind.NOTHING}
        return [meant.get(sign) for sign in signs]
    chosen = facts.get("attn_layer_indices", facts.get("full_attn_idxs"))
    if isinstance(chosen, list):
        places = {at for at in chosen if isinstance(at, int)}
        return [Kind.FULL if at in places else Kind.STATE for at in range(count)]
    if (every := _count(facts, "full_attention_interval")) is not None:
        return [Kind.STATE if (at + 1) % every else Kind.FULL for at in range(count)]
    if (period := _count(facts, "attn_layer_period")) is not None:
        offset = facts.get("attn_layer_offset", 0)
        return [Kind.FULL if at % period == offset else Kind.STATE for at in range(count)]
    return None


def _read_word(word: object) -> Kind | None:
    if not isinstance(word, str):
        return None
    if word in _FULL_WORDS:
        return Kind.FULL
    if word in _WINDOW_WORDS or word in _CHUNK_WORDS:
        return Kind.WINDOW
    return Kind.STATE if word in _STATE_WORDS else None


def _find_windows(facts: Facts, model_type: str | None, count: int, window: int | None) -> _Kinds:
    if window is None:
        return _Kinds(of=(Kind.FULL,) * count)
    first = _count(facts, "max_window_layers")
    if facts.get("use_sliding_window") is True and first is not None:
        return _kinds([Kind.WINDOW if at >= first else Kind.FULL for at in range(count)], window)
    every = _count(facts, "sliding_window_pattern", "_sliding_window_pattern") or _PATTERNS.get(model_type or "")
    if every is not None:
        return _kinds(_repeat(count, every), window)
    if model_type in _ALL_WINDOWED:
        return _kinds([Kind.WINDOW] * count, window)
    return _Kinds(of=(Kind.FULL,) * count, bounded=True)


# GGUF


def read_metadata(metadata: Facts) -> Layout:
    """What the header of a GGUF file says."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        return Layout()
    start = f"{name}."
    facts = {key.removeprefix(start): value for key, value in metadata.items() if key.startswith(start)}
    tokens = metadata.get("tokenizer.ggml.tokens")
    heads = facts.get("attention.head_count")
    layout = Layout(
        architecture=name,
        context=_count(facts, "context_length"),
        hidden=_count(facts, "embedding_length"),
        vocabulary=_count(facts, "vocab_size") or getattr(tokens, "length", None),
        heads=heads if _is_count(heads) else None,
    )
    if facts.get("attention.causal") is False:
        return replace(layout, layers=())
    count = _count(facts, "block_count")
    if count is None or count > MAX_LAYERS:
        return layout
    # The last ones only guess tokens ahead, and keep nothing.
    count -= min(_count(facts, "nextn_predict_layers") or 0, count)
    groups = _spread(facts.get("attention.head_count_kv", heads), count)
    kinds = _find_gguf_kinds(facts, name, groups, count)
    if groups is None or kinds is None:
        return layout
    layers = _find_gguf_layers(facts, layout, groups, kinds)
    return replace(layout, layers=layers, states=kinds.states, bounded=kinds.bounded)


def _find_gguf_layers(facts: Facts, layout: Layout, groups: Sequence[int], kinds: _Kinds) -> tuple[Layer, ...] | None:
    latent, rope = _count(facts, "attention.kv_lora_rank"), _count(facts, "rope.dimension_count")
    if latent is not None and "attention.key_length_mla" in facts:
        return None if rope is None else _lay(kinds, lambda _, __: (latent + rope, 1))
    key, value = _count(facts, "attention.key_length"), _count(facts, "attention.value_length")
    if layout.hidden and layout.heads and layout.hidden % layout.heads == 0:
        key, value = key or layout.hidden // layout.heads, value or layout.hidden // layout.heads
    short_key = _count(facts, "attention.key_length_swa") or key
    short_value = _count(facts, "attention.value_length_swa") or value
    if key is None or value is None or short_key is None or short_value is None:
        return None

    def measure(at: int, kind: Kind) -> tuple[int, int]:
        width = short_key + short_value if kind is Kind.WINDOW else key + value
        return groups[at] * width, groups[at]

    return _lay(kinds, measure, shared=_count(facts, "attention.shared_kv_layers") or 0)


def _find_gguf_kinds(facts: Facts, name: str, groups: Sequence[int] | None, count: int) -> _Kinds | None:
    if groups is None:
        return None
    window = _count(facts, "attention.sliding_window")
    if 0 in groups or any(key.startswith(("ssm.", "shortconv.", "wkv.")) for key in facts):
        if name in _BOTH:
            return _Kinds(of=(Kind.FULL,) * count, states=count)
        every = _count(facts, "full_attention_interval")
        if every is None and 0 not in groups:
            return None
        attends = [group > 0 if every is None else not (at + 1) % every for at, group in enumerate(groups)]
        return _kinds([Kind.FULL if each else Kind.STATE for each in attends], None)
    if window is None:
        return _Kinds(of=(Kind.FULL,) * count)
    pattern = facts.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple) and len(pattern) >= count:
        return _kinds([Kind.WINDOW if each else Kind.FULL for each in pattern[:count]], window)
    every = pattern if _is_count(pattern) else _PATTERNS.get(name)
    if every is None:
        return _Kinds(of=(Kind.FULL,) * count, bounded=True)
    return _kinds(_repeat(count, every), window)


# Both


def _kinds(of: Sequence[Kind], window: int | None) -> _Kinds:
    # A window that nobody knows the width of is none.
    kinds = tuple(Kind.FULL if kind is Kind.WINDOW and window is None else kind for kind in of)
    return _Kinds(of=kinds, window=window, states=kinds.count(Kind.STATE))


def _repeat(count: int, every: int) -> list[Kind]:
    return [Kind.WINDOW if (at + 1) % every else Kind.FULL for at in range(count)]


def _lay(kinds: _Kinds, measure: Measure, *, shared: int = 0) -> tuple[Layer, ...] | None:
    """The layers that keep something of each token, by what ``measure`` says of each. The last ``shared`` of all look
    at what those before them keep."""
    if shared >= len(kinds.of):
        return None
    found = []
    for at, kind in enumerate(kinds.of[: len(kinds.of) - shared]):
        if kind in (Kind.FULL, Kind.WINDOW):
            values, heads = measure(at, kind)
            if heads == 0:
                # One word of the file says that it keeps tokens, another that it has nothing to keep them with.
                return None
            found.append(Layer(values=values, heads=heads, window=kinds.window if kind is Kind.WINDOW else None))
    return tuple(found)


def _spread(told: object, count: int) -> tuple[int, ...] | None:
    """One number for each layer, of one for all or of a list."""
    if isinstance(told, int) and 0 <= told <= _MAX_COUNT:
        return (told,) * count
    if isinstance(told, tuple) and len(told) >= count and all(_is_count(each) or each == 0 for each in told):
        return told[:count]
    return None


def _count(facts: Facts, *keys: str) -> int | None:
    """The first of these that is a number of things."""
    return next((facts[key] for key in keys if _is_count(facts.get(key))), None)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= _MAX_COUNT
