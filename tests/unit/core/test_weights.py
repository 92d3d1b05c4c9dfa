"""What a source means, what it is kept as, and what of it is wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.model import Lora, Model, ModelName
from llmgw.core.weights import (
    MOST_PARTS,
    MOST_PIECE_BYTES,
    MOST_PIECES,
    Cached,
    FileKept,
    FileListed,
    Form,
    Listing,
    Manifest,
    NodeWeights,
    count_pieces,
    find_wanted,
    key_of,
    list_fetched,
    list_parts,
    list_sources,
    parse_source,
    piece_bytes_of,
    tell_too_many_parts,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "form", "fetched", "name"),
    [
        ("/models/x.gguf", Form.PATH, False, "x.gguf"),
        ("hf:org/repo/x.gguf", Form.HUB, True, "x.gguf"),
        ("hf:org/repo/sub/x.gguf@main", Form.HUB, True, "x.gguf"),
        ("https://models.internal/a/x.gguf?sig=1", Form.URL, True, "x.gguf"),
        ("http://10.0.0.1:8000/x.gguf", Form.URL, True, "x.gguf"),
        ("http://10.0.0.1/x.gguf#y?z", Form.URL, True, "x.gguf"),
        ("https://[2001:db8::1]/x.gguf", Form.URL, True, "x.gguf"),
        ("https://[::1]:65535/x.gguf", Form.URL, True, "x.gguf"),
        ("https://models_1.b\u00fccher.example./x.gguf", Form.URL, True, "x.gguf"),
        ("hf:org/repo/x-?.gguf", Form.HUB, True, "x-?.gguf"),
        ("Qwen/Qwen2.5-7B-Instruct", Form.REPOSITORY, False, "Qwen2.5-7B-Instruct"),
    ],
)
def test_a_source_means_one_thing(text: str, form: Form, fetched: bool, name: str) -> None:
    source = parse_source(text)
    assert (source.text, source.form, source.is_fetched, source.name, source.why) == (text, form, fetched, name, "")


@pytest.mark.parametrize("text", ["https://h_/?sig=x", "https://h/a b.gguf?sig=x", "https://h:0/m.gguf?sig=x"])
def test_what_opens_an_address_is_no_part_of_what_is_told_of_it(text: str) -> None:
    source = parse_source(text)
    assert source.form is Form.UNKNOWN
    assert "sig" not in source.text + source.why


def test_a_source_of_the_hub_is_taken_apart() -> None:
    source = parse_source(f"hf:org/repo/sub/x.gguf@{COMMIT}")
    assert (source.repo, source.file, source.revision) == ("org/repo", "sub/x.gguf", COMMIT)
    assert source.is_pinned
    assert not source.is_pattern
    branch = parse_source("hf:org/repo/*.safetensors@refs/pr/1")
    assert (branch.revision, branch.is_pinned, branch.is_pattern) == ("refs/pr/1", False, True)
    assert not parse_source("hf:org/repo/x.gguf").is_pinned


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hf:repo", "write hf:org/repo/file"),
        ("hf:org/repo", "names no file of org/repo"),
        ("hf:org/repo/", "names no file of org/repo"),
        ("hf:org/repo/../x.gguf", "no part of it may be"),
        ("hf:org/repo//x.gguf", "no part of it may be"),
        ("hf:org/repo/a\\b.gguf", "its parts are divided by /"),
        ("hf:org/repo/a\nb.gguf", "holds \\n, which nobody can see"),
        ("https://host/a\x1bb.gguf", "holds \\x1b, which nobody can see"),
        ("org/re\u200bpo", "holds \\u200b, which nobody can see"),
        ("s3://a\rb", "holds \\r, which nobody can see"),
        ("hf:org/repo/x.gguf@", "is no revision"),
        ("hf:org/repo/x.gguf@-x y", "is no revision"),
        ("https://", "is no address of a file"),
        ("https://host", "is no address of a file"),
        ("https://host/folder/", "is no address of a file"),
        ("https://host/a b", "is no address of a file"),
        ("https://h:99999/x.gguf", "99999 is no port: write a number from 1 to 65535"),
        ("https://h:0/x.gguf", "0 is no port"),
        ("https://h:http/x.gguf", "http is no port"),
        ("https://h:/x.gguf", "nothing is no port"),
        ("https://h:1:2/x.gguf", "1:2 is no port"),
        ("https://[::1/x.gguf", "[::1 is no host"),
        ("https://::1/x.gguf", "::1 is no host"),
        ("https://[::1]x/x.gguf", "[::1]x is no host"),
        ("https://[host]/x.gguf", "[host] is no host"),
        ("https://10.0.0.256/x.gguf", "10.0.0.256 is no host"),
        ("https://:80/x.gguf", ":80 is no host"),
        ("https://a..b/x.gguf", "a..b is no host"),
        ("https://a%20b/x.gguf", "a%20b is no host"),
        (f"https://{'a' * 64}/x.gguf", "is no host"),
        (f"https://{'a.' * 127}/x.gguf", "is no host"),
        ("s3://bucket/x.gguf", "s3: is no scheme that is fetched"),
        ("oci:x", "oci: is no scheme"),
        ("x.gguf", "a source is a whole path"),
        ("./x.gguf", "a source is a whole path"),
        ("", "a source is a whole path"),
    ],
)
def test_what_is_no_source_says_why(text: str, why: str) -> None:
    source = parse_source(text)
    assert source.form is Form.UNKNOWN
    assert not source.is_fetched
    assert why in source.why
    assert (source.text + source.why).isprintable()


def test_a_password_in_an_address_is_neither_taken_nor_shown() -> None:
    source = parse_source("https://me:s3cret@host/x.gguf")
    assert source.form is Form.UNKNOWN
    assert "s3cret" not in repr(source)
    assert "s3cret" not in repr(parse_source("https://me:s3cret\n@host/x.gguf"))


@given(st.text())
def test_any_text_is_some_source(text: str) -> None:
    source = parse_source(text)
    assert (source.form is Form.UNKNOWN) == bool(source.why)


def test_a_models_sources_are_named_once() -> None:
    lora = Lora(name=ModelName("sql"), source="hf:org/lora/l.gguf")
    model = Model(name=ModelName("m"), source="hf:org/repo/x.gguf", mmproj="/eyes.gguf", loras=(lora, lora))
    assert list_sources(model) == ("hf:org/repo/x.gguf", "/eyes.gguf", "hf:org/lora/l.gguf")
    assert list_fetched([model, model]) == ("hf:org/repo/x.gguf", "hf:org/lora/l.gguf")
    assert list_sources(Model(name=ModelName("m"), source="org/repo")) == ("org/repo",)


def test_two_sources_have_two_keys() -> None:
    assert key_of("hf:org/repo/x.gguf") != key_of("hf:org/repo/x.gguf@main")
    assert key_of("a").isalnum()


def test_a_file_that_is_one_of_several_brings_the_others() -> None:
    parts = tuple(f"q4/x-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    assert list_parts(parts[1]) == parts
    assert list_parts("x.gguf") == ("x.gguf",)
    assert list_parts("x-00001-of-00000.gguf") == ("x-00001-of-00000.gguf",)


def test_a_name_that_tells_of_more_parts_than_any_model_has_brings_none() -> None:
    most, beyond = (f"x-00001-of-{count:05}.gguf" for count in (MOST_PARTS, MOST_PARTS + 1))
    assert (len(list_parts(most)), list_parts(beyond)) == (MOST_PARTS, (beyond,))
    assert [tell_too_many_parts(name) for name in ("x.gguf", most)] == [None, None]
    assert tell_too_many_parts(beyond) == "says that it is one of 1001 parts: more than 1000 are no model"


@given(st.integers(min_value=0, max_value=2**42))
def test_pieces_cover_a_file(size: int) -> None:
    piece, count = piece_bytes_of(size), count_pieces(size)
    assert (count - 1) * piece < size <= count * piece or size == count == 0
    assert count <= MOST_PIECES or piece == MOST_PIECE_BYTES


def test_sizes_add_up() -> None:
    listed = (FileListed(name="a", size_bytes=2), FileListed(name="b", size_bytes=3))
    assert Listing(source="s", commit="c", files=listed).size_bytes == 5
    kept = tuple(FileKept(name=name, size_bytes=4, sha256="", pieces=()) for name in "ab")
    assert Manifest(source="s", commit="c", files=kept, fetched_at=0.0).size_bytes == 8


def test_the_newest_of_each_source_and_what_is_used_stays() -> None:
    old = Cached(source="hf:o/r/f", commit="1", size_bytes=1, fetched_at=1.0)
    new = replace(old, commit="2", fetched_at=2.0)
    used = replace(old, commit="0", fetched_at=0.5, in_use=True)
    gone = replace(old, source="hf:o/r/gone")
    for cached in ([old, new, used, gone], [gone, used, new, old]):
        assert find_wanted(["hf:o/r/f"], cached) == {("hf:o/r/f", "2"), ("hf:o/r/f", "0")}
    half = replace(old, commit="3", fetched_at=9.0, whole=False)
    # what can be resumed stays as well, and stands in for nothing
    assert find_wanted(["hf:o/r/f"], [old, half]) == {("hf:o/r/f", "1"), ("hf:o/r/f", "3")}
    assert find_wanted([], [half]) == frozenset()
    # what is damaged can be mended, and is not needed where a newer one is whole
    damaged = replace(old, commit="4", fetched_at=1.5, whole=False, wrong="f is missing")
    assert find_wanted(["hf:o/r/f"], [damaged, half]) == {("hf:o/r/f", "4"), ("hf:o/r/f", "3")}
    for cached in ([damaged, new], [new, damaged]):
        assert find_wanted(["hf:o/r/f"], cached) == {("hf:o/r/f", "2")}
    # but while only older ones are, it is the newest, and a wrong read is not to have it removed
    for cached in ([damaged, old, used], [used, old, damaged]):
        assert find_wanted(["hf:o/r/f"], cached) == {("hf:o/r/f", "4"), ("hf:o/r/f", "1"), ("hf:o/r/f", "0")}
    assert find_wanted([], [damaged, old]) == frozenset()
    assert find_wanted([], [replace(damaged, in_use=True), old]) == {("hf:o/r/f", "4")}
    assert NodeWeights(cached=(old, half)).whole == (old,)
    assert find_wanted([], [replace(gone, in_use=True), old]) == {("hf:o/r/gone", "1")}
