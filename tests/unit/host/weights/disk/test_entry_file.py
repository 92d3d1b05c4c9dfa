"""What an engine is pointed at."""

from __future__ import annotations

import pytest

from llmgw.core.weights import FileKept, Manifest
from llmgw.host.weights.disk.entry_file import find_entry_file, find_entry_folder
from llmgw.host.weights.errors import FetchFailed, Kind


def made_of(*names, source="hf:org/repo/*"):
    files = tuple(FileKept(name=name, size_bytes=0, sha256="", pieces=()) for name in names)
    return Manifest(source=source, commit="c1", files=files, fetched_at=0)


@pytest.mark.parametrize(
    ("source", "names", "found"),
    [
        ("hf:org/repo/a.gguf", ["a.gguf"], "a.gguf"),
        ("hf:org/repo/q4/a.gguf@main", ["q4/a.gguf"], "q4/a.gguf"),
        ("https://host/a.bin?x=1", ["a.bin"], "a.bin"),
        ("hf:o/r/a-00001-of-00002.gguf", ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "a-00001-of-00002.gguf"),
        ("hf:o/r/a-00002-of-00002.gguf", ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "a-00001-of-00002.gguf"),
        ("hf:org/repo/Q4/*", ["Q4/b-00002-of-00002.gguf", "Q4/b-00001-of-00002.gguf"], "Q4/b-00001-of-00002.gguf"),
        ("hf:org/repo/*", ["README.md", "a.gguf", "mmproj-F16.gguf"], "a.gguf"),
        ("hf:org/repo/mm*", ["mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("hf:org/repo/*", ["README.md", "config.json", "model.safetensors"], "model.safetensors"),
        # (a part whose first is not here stands for itself)
        ("hf:org/repo/*2-of*", ["a-00002-of-00002.gguf"], "a-00002-of-00002.gguf"),
    ],
)  # fmt: skip
def test_one_model_is_found_among_its_files(source, names, found):
    assert find_entry_file(made_of(*names, source=source)) == found


@pytest.mark.parametrize("names", [["a-Q4.gguf", "b-Q8.gguf"], ["a.txt", "b.txt"], [f"{n}.gguf" for n in range(9)]])
def test_several_are_named_and_nobody_guesses(names):
    with pytest.raises(FetchFailed, match=f"takes one file, and .* is several: {names[0]}, {names[1]}") as raised:
        find_entry_file(made_of(*names))
    assert raised.value.kind is Kind.NO_FILE
    assert raised.value.remedy == f"name one of them, as hf:org/repo/{names[0]}"


def test_the_folder_is_the_one_that_holds_all():
    assert find_entry_folder(made_of("a", "b")) == ""
    assert find_entry_folder(made_of("fp8/a", "fp8/b")) == "fp8"
    assert find_entry_folder(made_of("fp8/a", "fp8/x/b")) == "fp8"
    assert find_entry_folder(made_of("fp8/a", "config.json")) == ""
