"""Names that an origin may not give a file."""

from __future__ import annotations

import pytest

from llmgw.host.weights.disk.file_names import find_bad_name, is_commit, is_key


@pytest.mark.parametrize(
    "name",
    [
        "model.gguf",
        "source",
        "a/source",
        "a/.manifest.json",
        ".gitattributes",
        "..hidden",
        "Model.GGUF",
        "fp8/model-00001-of-00002.safetensors",
        "größe (final).gguf",
        "x" * 255,
        ".manifest.json.part",
    ],
)
def test_ordinary_names_are_kept(name):
    assert find_bad_name([name]) is None


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["../x"], "leads out"),
        (["a/../../x"], "leads out"),
        (["/etc/passwd"], "leads out"),
        (["a//b"], "leads out"),
        (["a/"], "leads out"),
        (["."], "leads out"),
        ([""], "leads out"),
        (["a\nb"], "can't be printed"),
        (["a\x00b"], "can't be printed"),
        (["a\x1b[2Jb"], "can't be printed"),
        (["a\udcff"], "can't be printed"),
        (["\u202ea"], "can't be printed"),
        ([".manifest.json"], "llmgw uses itself"),
        ([".pieces"], "llmgw uses itself"),
        ([".pieces/x"], "llmgw uses itself"),
        (["x" * 256], "too long"),
        (["ü" * 128], "too long"),
        (["/".join(["x" * 200] * 11)], "too long"),
        (["a", "b", "a"], "listed twice"),
        (["a", "a/b"], "both a file and a folder"),
        (["a/b/c", "x", "a/b"], "both a file and a folder"),
    ],
)
def test_names_that_lead_elsewhere_or_collide_are_refused(names, why):
    assert why in find_bad_name(names)


def test_a_refusal_is_fit_for_a_terminal():
    said = find_bad_name(["\x1b[2J" + "x" * 5000])
    assert said.isprintable()
    assert len(said) < 300


def test_names_that_differ_only_in_case_are_two():
    assert find_bad_name(["a", "A", "b/c", "B/c"]) is None


def test_folders_of_ours_are_known_by_their_names():
    assert is_key("0123456789abcdef" * 2)
    assert not is_key("0123456789ABCDEF" * 2)
    assert not is_key("lost+found")
    assert is_commit("0123456789abcdef0123456789abcdef01234567")
    assert not any(map(is_commit, ["", "source", ".lock", "abc.part", "a/b", "..", "-x", "a" * 200, "a\n"]))
