"""Which sources an engine can be pointed at."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from llmgw.agent.sources import check_source, check_sources
from llmgw.core.model import Lora, Model, ModelName
from llmgw.engines.types import SourceKind
from llmgw.errors import EngineFailed


class Takes:
    """An engine that takes these kinds."""

    def __init__(self, engine, *kinds):
        self.info = replace(engine.info, sources=frozenset(kinds))


@pytest.fixture
def file_engine(engines):
    return Takes(engines["fake"], SourceKind.FILE)


@pytest.fixture
def hub_engine(engines):
    return Takes(engines["fake"], SourceKind.REPOSITORY)


def test_a_file_that_can_be_read_is_taken(file_engine, tmp_path):
    path = tmp_path / "any.name"
    path.touch()
    check_source(str(path), file_engine)


def test_a_repository_is_taken_by_an_engine_that_fetches_itself(hub_engine, file_engine):
    check_source("org/repo", hub_engine)
    with pytest.raises(EngineFailed, match="not fetched in this version"):
        check_source("org/repo", file_engine)


def test_a_folder_is_taken_by_an_engine_of_repositories_only(hub_engine, file_engine, tmp_path):
    check_source(str(tmp_path), hub_engine)
    with pytest.raises(EngineFailed, match="is not a file"):
        check_source(str(tmp_path), file_engine)


def test_a_file_is_not_taken_by_an_engine_of_repositories(hub_engine, tmp_path):
    (tmp_path / "m.fake").touch()
    with pytest.raises(EngineFailed, match="takes a repository"):
        check_source(str(tmp_path / "m.fake"), hub_engine)


@pytest.mark.parametrize("source", ["https://host/m.fake", "hf://org/repo", "oci://x/y:1", "llama3:8b", "org/repo"])
def test_what_would_have_to_be_fetched_is_refused_with_what_to_do(file_engine, source):
    with pytest.raises(EngineFailed, match="download it"):
        check_source(source, file_engine)


def test_a_file_that_is_not_there_is_named_with_what_to_do(file_engine, tmp_path):
    with pytest.raises(EngineFailed, match=r"'/nowhere/m\.fake' can't be read: No such file") as absent:
        check_source("/nowhere/m.fake", file_engine)
    assert "put it there on this node" in absent.value.remedy
    (tmp_path / "file").touch()
    with pytest.raises(EngineFailed, match="can't be read: Not a directory") as beneath:
        check_source(f"{tmp_path}/file/m.fake", file_engine)
    assert beneath.value.remedy == absent.value.remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_says_who_is_to_be_let(file_engine, tmp_path):
    (tmp_path / "m.fake").touch(mode=0)
    with pytest.raises(EngineFailed, match="can't be read: Permission denied") as refused:
        check_source(str(tmp_path / "m.fake"), file_engine)
    assert "let the user that llmgw runs as read it" in refused.value.remedy


def test_a_path_that_is_not_whole_is_not_looked_for_where_the_agent_was_started(file_engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.fake").touch()
    with pytest.raises(EngineFailed, match=r"source m\.fake is no whole path: write it from / on"):
        check_source("m.fake", file_engine)


def test_what_can_be_no_path_at_all_is_refused(file_engine):
    with pytest.raises(EngineFailed, match="can't be read: embedded null"):
        check_source("/models/\0.fake", file_engine)


def test_a_pipe_is_not_waited_for(file_engine, tmp_path):
    os.mkfifo(tmp_path / "m.fake")
    with pytest.raises(EngineFailed, match="is not a file"):
        check_source(str(tmp_path / "m.fake"), file_engine)


def test_all_that_a_model_is_made_of_is_looked_at_and_named(file_engine, tmp_path):
    for name in ("m.fake", "eyes.fake", "sql.fake"):
        (tmp_path / name).touch()

    def model(mmproj="eyes.fake", lora="sql.fake"):
        loras = (Lora(name=ModelName("sql"), source=str(tmp_path / lora)),)
        source, eyes = str(tmp_path / "m.fake"), str(tmp_path / mmproj)
        return Model(name=ModelName("m"), source=source, mmproj=eyes, loras=loras)

    check_sources(model(), file_engine)
    with pytest.raises(EngineFailed, match=r"^mmproj '.*/gone\.fake' can't be read"):
        check_sources(model(mmproj="gone.fake"), file_engine)
    with pytest.raises(EngineFailed, match=r"^source of the adapter sql: '.*/gone\.fake' can't be read"):
        check_sources(model(lora="gone.fake"), file_engine)
