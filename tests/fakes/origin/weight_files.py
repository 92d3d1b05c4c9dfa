"""Small files of weights, with the headers that real ones have."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": ["<s>", "a", "b"],
}
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 32,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_of(value: Any) -> bytes:
    """A value with its type, as a header has it."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    items = [value_of(each) for each in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def write_gguf(
    metadata: Mapping[str, Any] = LLAMA,
    tensors: Sequence[tuple[str, Sequence[int], int]] = (("w", (32, 4), 2),),
    *,
    version: int = 3,
    data: bool = True,
    alignment: int = 32,
) -> bytes:
    """``tensors`` are names, shapes and types: 0 is F32, 2 is Q4_0."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text(key) + value_of(value)
    at = 0
    for name, shape, kind in tensors:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at)
        count = 1
        for side in shape:
            count *= side
        size = count * 4 if kind == 0 else count // 32 * 18
        at = -(-(at + size) // alignment) * alignment
    if not data:
        return head
    return head + bytes(-len(head) % alignment) + bytes(at)


def write_safetensors(tensors: Mapping[str, Sequence[int]] | None = None, *, data: bool = True) -> bytes:
    """Names and shapes of BF16."""
    facts: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in (tensors or {"w": (8, 4)}).items():
        count = 1
        for side in shape:
            count *= side
        facts[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * count]}
        at += 2 * count
    head = json.dumps(facts).encode()
    return struct.pack("<Q", len(head)) + head + (bytes(at) if data else b"")
