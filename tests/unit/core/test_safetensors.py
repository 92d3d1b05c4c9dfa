from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_files import write_safetensors

from llmgw.core import safetensors
from llmgw.core.safetensors import Header, Index, More, Tensor, Wrong


def of_json(facts: Any) -> bytes:
    head = facts if isinstance(facts, bytes) else json.dumps(facts).encode()
    return struct.pack("<Q", len(head)) + head


def test_a_header_is_read_with_its_tensors() -> None:
    raw = write_safetensors({"a": (2, 3), "b": ()})
    found = safetensors.read(raw)
    assert isinstance(found, Header)
    assert found.tensors == (
        Tensor(name="a", shape=(2, 3), kind="BF16", start=0, stop=12),
        Tensor(name="b", shape=(), kind="BF16", start=12, stop=14),
    )
    assert (found.data_bytes, found.file_bytes, found.mostly) == (14, len(raw), "BF16")
    assert found.metadata == {"format": "pt"}


def test_a_beginning_asks_for_all_of_the_header() -> None:
    raw = write_safetensors()
    assert safetensors.read(raw[:7]) == More(at_least=8)
    end = 8 + int.from_bytes(raw[:8], "little")
    assert safetensors.read(raw[: end - 1]) == More(at_least=end)
    assert isinstance(safetensors.read(raw[:end]), Header)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"<!doctype html>", "does not begin with the length"),
        (struct.pack("<Q", 100) + b"x" * 100, "no JSON"),
        (of_json(b"{" + b"[" * 5000), "can't be read"),
        (of_json(b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}"), "can't be read"),
        (of_json({"a": 1}), "without a shape"),
        (of_json({"a": {"dtype": "F32", "shape": [2**61, 2**61], "data_offsets": [0, 1]}}), "without a shape"),
        (of_json({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}), "without a shape"),
        (of_json({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}), "without a shape"),
        (of_json({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}), "without a shape"),
    ],
)
def test_what_is_broken_is_told(raw: bytes, words: str) -> None:
    found = safetensors.read(raw)
    assert isinstance(found, Wrong)
    assert words in found.why


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_random_bytes_never_raise(tail: bytes, length: int) -> None:
    assert isinstance(safetensors.read(tail), Header | More | Wrong)
    assert isinstance(safetensors.read(struct.pack("<Q", length) + tail), Header | More | Wrong)
    assert isinstance(safetensors.read(of_json(b"{" + tail)), Header | More | Wrong)
    assert isinstance(safetensors.read_index(tail), Index | Wrong)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON, JSON)
def test_json_of_any_shape_never_raises(one: Any, two: Any, three: Any) -> None:
    told = {"a": {"dtype": one, "shape": two, "data_offsets": three}, "__metadata__": one}
    assert isinstance(safetensors.read(of_json(told)), Header | Wrong)
    index = json.dumps({"weight_map": {"a": one, "b": two}, "metadata": {"total_size": three}}).encode()
    assert isinstance(safetensors.read_index(index), Index | Wrong)


def index_of(**facts: Any) -> Index | Wrong:
    return safetensors.read_index(json.dumps(facts).encode())


def test_an_index_lists_its_files_once() -> None:
    files = {"a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
    listed = ("m-1.safetensors", "m-2.safetensors")
    assert index_of(weight_map=files, metadata={"total_size": 10}) == Index(files=listed, total_bytes=10)
    assert index_of(weight_map=files, metadata={"total_size": 10.0}) == Index(files=listed, total_bytes=10)
    assert index_of(weight_map=files) == Index(files=listed)
    assert index_of(weight_map=files, metadata={"total_size": "many"}) == Index(files=listed)


@pytest.mark.parametrize(
    "facts", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../b"}}]
)
def test_an_index_that_lists_nothing_is_wrong(facts: dict[str, Any]) -> None:
    assert isinstance(index_of(**facts), Wrong)
