from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_files import LLAMA, text, value_of, write_gguf

from llmgw.core import gguf
from llmgw.core.gguf import Counted, Header, More, Tensor, Wrong


def header(raw: bytes) -> Header:
    found = gguf.read(raw)
    assert isinstance(found, Header), found
    return found


def why(raw: bytes) -> str:
    found = gguf.read(raw)
    assert isinstance(found, Wrong), found
    return found.why


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_is_read_with_its_tensors(version: int) -> None:
    raw = write_gguf(LLAMA, (("a", (32, 4), 2), ("b", (3, 5), 0)), version=version)
    found = header(raw)
    assert found.version == version
    assert found.metadata["llama.block_count"] == 2
    assert found.metadata["tokenizer.ggml.tokens"] == Counted(length=3)
    assert found.tensors == (
        Tensor(name="a", shape=(32, 4), kind="Q4_0", start=0, size_bytes=72),
        Tensor(name="b", shape=(3, 5), kind="F32", start=96, size_bytes=60),
    )
    assert (found.data_bytes, found.mostly) == (156, "Q4_0")
    assert found.file_bytes is not None
    assert found.file_bytes <= len(raw) < found.file_bytes + 32


def test_every_kind_of_value_is_read() -> None:
    values = {"i": 3, "f": 0.5, "t": True, "s": "ü", "n": [1, 2, 3], "b": [True, False], "e": []}
    found = header(write_gguf(values)).metadata
    assert found == {"i": 3, "f": 0.5, "t": True, "s": "ü", "n": (1, 2, 3), "b": (True, False), "e": ()}


def test_of_a_long_array_only_the_length_is_kept() -> None:
    found = header(write_gguf({"n": [0] * (gguf.MAX_KEPT + 1)})).metadata
    assert found["n"] == Counted(length=gguf.MAX_KEPT + 1)


def test_arrays_in_arrays_are_counted_and_bounded() -> None:
    assert header(write_gguf({"n": [[1, 2], [3]], "after": 1})).metadata == {"n": Counted(length=2), "after": 1}
    deep: object = 1
    for _ in range(gguf.MAX_DEPTH + 2):
        deep = [deep]
    assert "without end" in why(write_gguf({"n": deep}))


def test_the_alignment_of_the_file_is_its_own() -> None:
    raw = write_gguf({"general.alignment": 64}, (("a", (32,), 2), ("b", (32,), 2)), alignment=64)
    assert header(raw).tensors[1].start == 64
    assert header(raw).header_bytes % 64 == 0
    assert "alignment" in why(write_gguf({"general.alignment": 48}))
    assert "alignment" in why(write_gguf({"general.alignment": "x"}))


def test_a_type_that_is_not_known_leaves_the_size_unknown() -> None:
    found = header(write_gguf({}, (("a", (7,), 99),)))
    assert (found.tensors[0].kind, found.tensors[0].size_bytes) == ("99", None)
    assert (found.data_bytes, found.file_bytes) == (None, None)


def test_a_part_without_tensors_is_whole() -> None:
    found = header(write_gguf({"split.count": 2}, ()))
    assert (found.tensors, found.data_bytes, found.mostly) == ((), 0, None)


def test_a_beginning_asks_for_more_until_it_is_enough() -> None:
    raw = write_gguf(LLAMA, (("a", (32, 4), 2), ("b", (3, 5), 0)))
    whole = header(raw)
    end = len(write_gguf(LLAMA, (("a", (32, 4), 2), ("b", (3, 5), 0)), data=False))
    for length in range(end):
        found = gguf.read(raw[:length])
        assert isinstance(found, More)
        assert length < found.at_least <= end
    assert gguf.read(raw[:end]) == whole


def test_a_vocabulary_that_ends_in_a_long_word_asks_for_more() -> None:
    raw = write_gguf({"tokenizer.ggml.tokens": ["x" * 100, "y", "z"]})
    cut = raw.index(b"xxx") + 40
    found = gguf.read(raw[:cut])
    assert isinstance(found, More)
    # at least that word, and the lengths of the others
    assert found.at_least >= cut + 60 + 2 * 8


def test_what_begins_otherwise_is_no_gguf() -> None:
    assert "does not begin with GGUF" in why(b"PK\x03\x04")
    assert isinstance(gguf.read(b"GG"), More)
    assert isinstance(gguf.read(b""), More)


def test_versions_that_cannot_be_read_are_named() -> None:
    assert "big-endian" in why(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "version 1" in why(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    assert "version 4" in why(b"GGUF" + struct.pack("<IQQ", 4, 0, 0))


def start(tensors: int, keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)


def test_counts_that_cannot_be_are_not_waited_for() -> None:
    assert "claims" in why(start(2**63, 0))
    assert "claims" in why(start(0, 2**63))
    assert "claims more than" in why(start(0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**40))
    assert "claims more than" in why(start(0, 1) + struct.pack("<Q", 2**62) + b"k" * 20)
    assert "claims more than" in why(start(0, 1) + text("k") + struct.pack("<IIQ", 9, 0, 2**40))
    assert "claims more than" in why(start(0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 2**20))


def test_what_is_broken_is_told() -> None:
    assert "twice" in why(start(0, 2) + (text("k") + value_of(1)) * 2)
    assert "type 77" in why(start(0, 1) + text("k") + struct.pack("<I", 77))
    assert "name" in why(start(0, 1) + text("") + value_of(1))
    assert "dimensions" in why(start(1, 0) + text("t") + struct.pack("<I", 9) + bytes(100))
    assert "size or place" in why(start(1, 0) + text("t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0))
    assert "size or place" in why(start(1, 0) + text("t") + struct.pack("<IQIQ", 1, 8, 0, 7))
    assert "whole blocks" in why(start(1, 0) + text("t") + struct.pack("<IQIQ", 1, 33, 2, 0))


@given(st.binary(max_size=400))
def test_random_bytes_never_raise(tail: bytes) -> None:
    assert isinstance(gguf.read(b"GGUF" + tail), Header | More | Wrong)
    assert isinstance(gguf.read(start(2, 3) + tail), Header | More | Wrong)


@given(st.data())
def test_a_header_with_bytes_changed_never_raises(data: st.DataObject) -> None:
    raw = bytearray(write_gguf({**LLAMA, "n": [[1, 2], [3]]}))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(4, len(raw) - 1))] = data.draw(st.integers(0, 255))
    found = gguf.read(bytes(raw))
    assert isinstance(found, Header | More | Wrong)
    if isinstance(found, More):
        assert len(raw) < found.at_least <= gguf.MAX_HEADER_BYTES


def test_a_real_file_is_read_to_the_byte(weights: Path) -> None:
    with weights.open("rb") as opened:
        found = header(opened.read(4 * 1024 * 1024))
    assert found.file_bytes == weights.stat().st_size
    assert found.mostly == "Q4_1"
    assert found.metadata["llama.block_count"] == 30
