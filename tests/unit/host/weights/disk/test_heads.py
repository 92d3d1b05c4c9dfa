"""What the beginnings of files say of a commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from weight_files import LLAMA, write_gguf

from llmgw.core.weights import FileKept, Manifest
from llmgw.host.weights.disk.beneath import open_folder
from llmgw.host.weights.disk.heads import FIRST_BYTES, compare_parts, find_bad_head, judge_open

GGUF = write_gguf(LLAMA, (("w", (32, 4), 2),))
LONG = write_gguf({**LLAMA, "tokenizer.ggml.tokens": ["x" * 1000] * (FIRST_BYTES // 500)}, (("w", (32, 4), 2),))


def keep(folder: Path, **files: bytes) -> Manifest:
    """These files, as a commit."""
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    kept = (
        FileKept(name=name.replace("__", "."), size_bytes=len(content), sha256="", pieces=())
        for name, content in files.items()
    )
    return Manifest(source="hf:o/r/*", commit="c" * 40, files=tuple(kept), fetched_at=1.0)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (GGUF, None),
        (LONG, None),
        (bytes(64) + GGUF[64:], "a.gguf is no GGUF"),
        (b"<html>" + GGUF[6:], "a.gguf is an HTML page"),
        (LONG[: len(LONG) - 100_000], "a.gguf ends early"),
        (b"", "a.gguf is empty"),
    ],
)
def test_a_file_that_can_not_be_what_its_name_says_is_named(tmp_path: Path, content: bytes, wrong: str | None) -> None:
    manifest = keep(tmp_path, readme__md=b"of no kind that is known", a__gguf=content)
    with open_folder(tmp_path) as folder:
        found = find_bad_head(folder, manifest)
    assert found is None if wrong is None else found is not None and found.startswith(wrong)


def test_parts_that_are_not_of_one_model_are_named(tmp_path: Path) -> None:
    parts = {
        f"m-0000{number}-of-00002__gguf": write_gguf(
            {**LLAMA, "split.no": number - 1, "split.count": 2}, (("w", (32, 4), 2),)
        )
        for number in (1, 2)
    }
    manifest = keep(tmp_path, **parts)
    with open_folder(tmp_path) as folder:
        found = find_bad_head(folder, manifest)
    assert found is not None
    assert "holds the same tensors" in found
    assert compare_parts({"m-00001-of-00002.gguf": None, "a.gguf": None}) is None


def test_one_that_is_cut_off_just_then_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(LONG)
    file = os.open(tmp_path / "a.gguf", os.O_RDWR)
    try:
        assert judge_open(file, "a.gguf").wrong is None
        os.ftruncate(file, FIRST_BYTES)
        assert (judge_open(file, "a.gguf").wrong or "").startswith("ends early")
    finally:
        os.close(file)


def test_one_that_is_not_there_is_the_callers(tmp_path: Path) -> None:
    manifest = keep(tmp_path, a__gguf=GGUF)
    (tmp_path / "a.gguf").unlink()
    with open_folder(tmp_path) as folder, pytest.raises(FileNotFoundError, match=r"a\.gguf"):
        find_bad_head(folder, manifest)
