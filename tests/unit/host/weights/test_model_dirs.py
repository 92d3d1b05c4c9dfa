"""What is found in the folders that people put models into."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmgw.host.weights import model_dirs
from llmgw.host.weights.model_dirs import find_models


@pytest.fixture
def put(tmp_path: Path):
    """Make files below the folder, and the folders above them."""

    def put(*names: str) -> None:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()

    return put


def test_files_and_folders_of_models_are_named_by_their_paths(tmp_path, put):
    put("a.gguf", "sub/b.GGUF", "readme.txt", "llama/config.json", "bare/model-00001-of-00002.safetensors", "empty/x")
    paths = ("a.gguf", "bare", "llama", "sub/b.GGUF")
    assert find_models(tmp_path) == tuple(f"{tmp_path}/{name}" for name in paths)


def test_a_folder_may_be_a_model_itself(tmp_path, put):
    put("config.json")
    assert find_models(tmp_path) == (str(tmp_path),)


def test_of_several_parts_the_first_names_the_model(tmp_path, put):
    put(*(f"x-0000{number}-of-00003.gguf" for number in (1, 2, 3)))
    assert find_models(tmp_path) == (f"{tmp_path}/x-00001-of-00003.gguf",)


def test_repositories_of_a_hubs_cache_are_named_as_such(tmp_path, put):
    put(
        "hub/models--org--re--po/snapshots/abc/config.json",
        "hub/models--org--begun/blobs/x.incomplete",
        "hub/models--gpt2/snapshots/abc/config.json",
    )
    assert find_models(tmp_path) == ("org/re--po",)


def test_what_llmgw_has_fetched_is_not_what_people_have_put_there(tmp_path, put):
    put(".cache/key/commit/a.gguf", "fetched/key/commit/b.gguf", "c.gguf", ".d.gguf")
    assert find_models(tmp_path, besides=tmp_path / "fetched") == (f"{tmp_path}/c.gguf",)


def test_it_looks_only_so_deep(tmp_path, put):
    put("1/2/3/4/near.gguf", "1/2/3/4/5/far.gguf")
    assert find_models(tmp_path) == (f"{tmp_path}/1/2/3/4/near.gguf",)


def test_a_link_that_leads_back_is_followed_once(tmp_path, put):
    put("m/a.gguf")
    (tmp_path / "m" / "loop").symlink_to(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert find_models(tmp_path) == (f"{tmp_path}/m/a.gguf",)


def test_there_is_an_end_to_what_is_found(tmp_path, put, monkeypatch):
    put("a.gguf", "b.gguf", "sub/c.gguf")
    monkeypatch.setattr(model_dirs, "MOST_FOUND", 2)
    assert len(find_models(tmp_path)) == 2


def test_there_is_an_end_to_the_looking(tmp_path, put, monkeypatch):
    put(*(f"{number}/a.gguf" for number in range(9)))
    monkeypatch.setattr(model_dirs, "MOST_SECONDS", -1.0)
    assert len(find_models(tmp_path)) <= 1


def test_what_is_not_there_or_no_text_is_passed_over(tmp_path, put):
    put("a\x07.gguf")
    (tmp_path / os.fsdecode(b"b\xff.gguf")).touch()
    assert find_models(tmp_path) == ()
    assert find_models(tmp_path / "nowhere") == ()


def test_what_only_looks_like_a_file_is_no_model(tmp_path, put):
    put("a.gguf")
    (tmp_path / "dead.gguf").symlink_to(tmp_path / "nowhere.gguf")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "a.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/config.json").symlink_to(tmp_path / "nowhere.json")
    assert find_models(tmp_path) == (f"{tmp_path}/a.gguf", f"{tmp_path}/link.gguf")
