from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_files import LLAMA, write_gguf, write_safetensors

from llmgw.core.headers import HEAD_BYTES, Header, check_header, check_parts, judge_header, list_parts_of

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


def part(number: int, count: int, *names: str, total: int | None = None) -> bytes:
    told = {} if total is None else {"split.tensors.count": total}
    facts = {"split.no": number - 1, "split.count": count, **told}
    return write_gguf(facts, tuple((name, (32, 4), 2) for name in names))


def header(name: str, raw: bytes) -> Header:
    judged = judge_header(name, raw, len(raw))
    assert judged.header is not None, judged
    return judged.header


def test_a_header_that_goes_on_says_how_far() -> None:
    for name, raw in (("m.gguf", write_gguf()), ("m.safetensors", write_safetensors())):
        judged = judge_header(name, raw[:30], len(raw))
        assert (judged.wrong, judged.header) == (None, None)
        assert 30 < judged.needs <= len(raw)
        assert judge_header(name, raw, len(raw)).needs == 0


def test_a_part_is_the_one_that_its_name_says() -> None:
    for number in (1, 2):
        raw = part(number, 2, "a")
        assert check_header(f"Q4/m-0000{number}-of-00002.gguf", raw, len(raw)) is None
    raw = part(2, 2, "a")
    for name in ("m.gguf", "m-00001-of-00002.gguf", "m-00002-of-00003.gguf", "m-00003-of-00002.gguf"):
        told = str(check_header(name, raw, len(raw)))
        assert "part 2 of 2" in told
        assert "-00002-of-00002.gguf" in told
    raw = part(9, 2, "a")
    assert "part 9 of 2" in str(check_header("m-00001-of-00002.gguf", raw, len(raw)))


def test_the_parts_of_a_model_are_those_that_its_header_tells_of() -> None:
    name, both = "m-00001-of-00002.gguf", ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert list_parts_of(name, header(name, part(1, 2, "a"))) == both
    # (an engine loads this one by itself, whatever it is called)
    assert list_parts_of(name, header("m.gguf", write_gguf())) == (name,)
    assert list_parts_of(name, None) == both
    assert list_parts_of("m.gguf", header("m.gguf", write_gguf())) == ("m.gguf",)
    name = "m-00001-of-00002.safetensors"
    assert len(list_parts_of(name, header(name, write_safetensors()))) == 2


def test_parts_of_one_model_go_together() -> None:
    def parts(*raws: bytes) -> dict[str, Header]:
        names = [f"m-0000{number}-of-0000{len(raws)}.gguf" for number in range(1, len(raws) + 1)]
        return {name: header(name, raw) for name, raw in zip(names, raws, strict=True)}

    assert check_parts(parts(part(1, 3, total=2), part(2, 3, "a"), part(3, 3, "b"))) is None
    assert check_parts(parts(part(1, 2, "a"), part(2, 2, "b"))) is None
    told = check_parts(parts(part(1, 2, "a", total=2), part(2, 2, "a")))
    assert told == (
        "m-00002-of-00002.gguf holds the same tensors as m-00001-of-00002.gguf: one of them is a copy of the other"
    )
    assert "holds 'a', and m-00001-of-00002.gguf as well" in str(
        check_parts(parts(part(1, 2, "a"), part(2, 2, "a", "b")))
    )
    assert "tells of 3 tensors, and its parts have 2" in str(
        check_parts(parts(part(1, 2, "a", total=3), part(2, 2, "b")))
    )
    assert check_parts({}) is None


def test_of_safetensors_only_a_copy_is_told() -> None:
    def parts(*tensors: dict[str, tuple[int, int]]) -> dict[str, Header]:
        return {f"{number}": header("m.safetensors", write_safetensors(each)) for number, each in enumerate(tensors)}

    assert check_parts(parts({"a": (2, 2)}, {"a": (2, 2), "b": (2, 2)})) is None
    assert "1 holds the same tensors as 0" in str(check_parts(parts({"a": (2, 2)}, {"a": (2, 2)})))
