from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_files import LLAMA, write_gguf, write_safetensors

from llmgw.core.headers import HEAD_BYTES, check_header

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n"


@pytest.mark.parametrize(("name", "raw"), [("m.gguf", write_gguf()), ("M.SafeTensors", write_safetensors())])
def test_nothing_is_said_against_a_whole_file(name: str, raw: bytes) -> None:
    assert check_header(name, raw, len(raw)) is None


@pytest.mark.parametrize("name", ["m.gguf", "m.safetensors", "tokenizer.json"])
def test_a_pointer_is_no_file(name: str) -> None:
    assert "git-lfs pointer" in str(check_header(name, POINTER, len(POINTER)))


@pytest.mark.parametrize("page", [b"<!DOCTYPE html><p>", b"\xef\xbb\xbf\n  <HTML lang='en'>", b"<html>"])
def test_a_page_is_no_file(page: bytes) -> None:
    assert "HTML page" in str(check_header("m.gguf", page, len(page)))
    assert check_header("index.html", page, len(page)) is None


def test_another_kind_of_file_is_told() -> None:
    assert "does not begin with GGUF" in str(check_header("m.gguf", b"PK\x03\x04", 4))
    assert "no safetensors file" in str(check_header("m.safetensors", b"GGUF" + bytes(30), 34))
    assert check_header("m.bin", b"PK\x03\x04", 4) is None
    assert check_header("m.gguf", b"", 0) == "is empty"


def test_a_file_that_ends_early_is_told_in_its_data() -> None:
    for name, raw in (("m.gguf", write_gguf(LLAMA, (("a", (32, 40), 0),))), ("m.safetensors", write_safetensors())):
        assert "ends early" in str(check_header(name, raw[:-32], len(raw) - 32))


@pytest.mark.parametrize(("name", "raw"), [("m.gguf", write_gguf()), ("m.safetensors", write_safetensors())])
def test_a_file_that_ends_early_is_told_in_its_header(name: str, raw: bytes) -> None:
    for length in range(1, 60):
        assert check_header(name, raw[:length], length) is not None
        # (of which only so much is at hand)
        assert check_header(name, raw[:length], len(raw)) is None


def test_a_file_longer_than_its_header_tells_is_broken_where_the_format_says_so() -> None:
    raw = write_safetensors()
    assert "tells of" in str(check_header("m.safetensors", raw + b"x", len(raw) + 1))
    assert check_header("m.gguf", write_gguf() + b"x", len(write_gguf()) + 1) is None


def test_a_file_is_only_looked_at_so_far() -> None:
    head = struct.pack("<Q", 2 * HEAD_BYTES) + b"{" + b" " * HEAD_BYTES
    assert check_header("m.safetensors", head + b"}" * HEAD_BYTES, 4 * HEAD_BYTES) is None


@given(st.sampled_from(["m.gguf", "m.safetensors"]), st.binary(max_size=100), st.integers(0, 2**60))
def test_it_never_raises(name: str, head: bytes, size: int) -> None:
    for raw in (head, b"GGUF\x03\0\0\0" + head, write_gguf()[:40] + head):
        told = check_header(name, raw, size)
        assert told is None or told
