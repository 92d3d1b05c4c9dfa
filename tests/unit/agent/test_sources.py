"""Which sources an engine can be pointed at."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from weight_files import LLAMA, write_gguf, write_safetensors

from llmgw.agent.sources import SourceMissing, SourceSpoiled, check_source, check_sources, is_file_wanted
from llmgw.core.model import Lora, Model, ModelName
from llmgw.core.weights import parse_source
from llmgw.engines.types import SourceKind
from llmgw.errors import EngineFailed
from llmgw.host.weights.disk.heads import FIRST_BYTES


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
    with pytest.raises(EngineFailed, match=r"source org/repo is a repository, and .* takes a file") as refused:
        check_source("org/repo", file_engine)
    assert "hf:org/repo/FILE" in refused.value.remedy


@pytest.mark.parametrize("source", ["https://host/m.fake", "hf:org/repo/m.fake", "hf:org/repo/*.fake@main"])
def test_what_is_fetched_need_not_be_here(file_engine, source):
    check_source(source, file_engine)


def test_one_file_is_not_fetched_for_an_engine_of_repositories(hub_engine):
    check_source("hf:org/repo/*", hub_engine)
    with pytest.raises(EngineFailed, match=r"is a file, and .* takes a repository") as refused:
        check_source("hf:org/repo/m.fake", hub_engine)
    assert "hf:org/repo/*" in refused.value.remedy
    with pytest.raises(EngineFailed, match=r"source https://host/m\.fake is a file") as refused:
        check_source("https://host/m.fake?token=sekret", hub_engine)
    assert "sekret" not in f"{refused.value} {refused.value.remedy}"


def test_an_engine_is_pointed_at_what_it_takes(engines, file_engine, hub_engine):
    both = Takes(engines["fake"], SourceKind.FILE, SourceKind.REPOSITORY)
    both.info = replace(both.info, file_suffixes=(".fake",))
    one, many, rest = (parse_source(f"hf:org/repo/{file}") for file in ("m.bin", "*.fake", "*"))
    assert all(is_file_wanted(source, file_engine) for source in (one, many, rest))
    assert not any(is_file_wanted(source, hub_engine) for source in (many, rest))
    assert [is_file_wanted(source, both) for source in (one, many, rest)] == [True, True, False]


def test_a_folder_is_taken_by_an_engine_of_repositories_only(hub_engine, file_engine, tmp_path):
    check_source(str(tmp_path), hub_engine)
    with pytest.raises(EngineFailed, match="is not an ordinary file"):
        check_source(str(tmp_path), file_engine)


def test_a_file_is_not_taken_by_an_engine_of_repositories(hub_engine, tmp_path):
    (tmp_path / "m.fake").touch()
    with pytest.raises(EngineFailed, match="takes a repository"):
        check_source(str(tmp_path / "m.fake"), hub_engine)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("hf://org/repo", "write hf:org/repo/file"),
        ("hf:org/repo", "write hf:org/repo/FILE"),
        ("oci://x/y:1", "is no scheme that is fetched"),
        ("llama3:8b", "is no scheme that is fetched"),
        ("m.fake", "a source is a whole path"),
    ],
)
def test_what_means_nothing_is_refused_with_what_to_write(file_engine, source, why):
    with pytest.raises(EngineFailed, match=f"^source {source}.*{why}"):
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


def test_what_can_be_no_path_at_all_is_refused(file_engine):
    with pytest.raises(EngineFailed, match="can't be read: embedded null"):
        check_source("/models/\0.fake", file_engine)


def test_a_pipe_is_not_waited_for(file_engine, tmp_path):
    os.mkfifo(tmp_path / "m.fake")
    with pytest.raises(EngineFailed, match="is not an ordinary file"):
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


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("empty.gguf", b"", "is empty"),
        ("cut.gguf", b"GGUF\x03\x00", "ends early"),
        ("page.fake", b"<!DOCTYPE html><html>log in</html>", "is an HTML page"),
        ("pointer.fake", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a git-lfs pointer"),
    ],
)
def test_what_can_not_be_weights_is_told_before_an_engine_is_launched(file_engine, tmp_path, name, content, why):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SourceSpoiled, match=why) as failed:
        check_source(str(path), file_engine)
    assert str(path) in failed.value.message
    assert failed.value.remedy is not None


def test_a_header_is_read_as_far_as_it_goes(file_engine, tmp_path):
    long = write_gguf({**LLAMA, "tokenizer.ggml.tokens": ["x" * 1000] * (FIRST_BYTES // 500)}, (("w", (32, 4), 2),))
    path = tmp_path / "m.gguf"
    path.write_bytes(long)
    check_source(str(path), file_engine)
    path.write_bytes(long[:-40])
    with pytest.raises(SourceSpoiled, match="ends early"):
        check_source(str(path), file_engine)


@pytest.fixture
def put_parts(tmp_path):
    """A GGUF file in three parts; the path of the first."""

    def put():
        for number in (1, 2, 3):
            facts = {"split.no": number - 1, "split.count": 3, "split.tensors.count": 3}
            raw = write_gguf(facts, ((f"w{number}", (32, 4), 2),))
            (tmp_path / f"m-0000{number}-of-00003.gguf").write_bytes(raw)
        return tmp_path / "m-00001-of-00003.gguf"

    return put


def _cut(path):
    os.truncate(path, path.stat().st_size - 40)


def _replace_by_a_folder(path):
    path.unlink()
    path.mkdir()


def _replace_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "kind", "why"),
    [
        (lambda path: path.unlink(), SourceMissing, r"'.*-00002-of-00003\.gguf' can't be read: No such file"),
        (_cut, SourceSpoiled, r"-00002-of-00003\.gguf ends early"),
        (lambda path: path.write_text("<html>no</html>"), SourceSpoiled, r"-00002-of-00003\.gguf is an HTML page"),
        (_replace_by_a_folder, SourceSpoiled, r"-00002-of-00003\.gguf is not an ordinary file"),
        (_replace_by_a_pipe, SourceSpoiled, r"-00002-of-00003\.gguf is not an ordinary file"),
        (
            lambda path: path.write_bytes(path.with_name("m-00003-of-00003.gguf").read_bytes()),
            SourceSpoiled,
            r"-00002-of-00003\.gguf says in its header that it is part 3 of 3",
        ),
        (
            lambda path: path.write_bytes(
                write_gguf({"split.no": 1, "split.count": 3}, (("w1", (32, 4), 2), ("w2", (32, 4), 2)))
            ),
            SourceSpoiled,
            r"in .* m-00002-of-00003\.gguf holds 'w1', and m-00001-of-00003\.gguf as well",
        ),
    ],
)
def test_every_part_of_a_file_is_looked_at_before_an_engine_is_launched(file_engine, put_parts, spoil, kind, why):
    first = put_parts()
    check_source(str(first), file_engine)
    spoil(first.with_name("m-00002-of-00003.gguf"))
    with pytest.raises(kind, match=why) as failed:
        check_source(str(first), file_engine)
    assert f"source {first}" in failed.value.message
    assert failed.value.remedy is not None


def test_a_part_that_is_not_the_first_names_the_first(file_engine, put_parts):
    first = put_parts()
    with pytest.raises(EngineFailed, match="is one of 3 parts, and not the first") as refused:
        check_source(str(first.with_name("m-00002-of-00003.gguf")), file_engine)
    assert refused.value.remedy == f"write the path of the first: {first}"


def test_a_whole_file_that_is_only_called_a_part_is_taken(file_engine, tmp_path):
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(write_gguf())
    check_source(str(path), file_engine)


def put_shards(folder):
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        (folder / name).write_bytes(write_safetensors({f"w{number}": (8, 4)}))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"w{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}})
    )


def test_the_first_of_several_safetensors_needs_the_others(file_engine, tmp_path):
    put_shards(tmp_path)
    first, second = (str(tmp_path / f"model-0000{number}-of-00002.safetensors") for number in (1, 2))
    check_source(first, file_engine)
    os.truncate(second, 40)
    with pytest.raises(SourceSpoiled, match=r"00002-of-00002\.safetensors ends early"):
        check_source(first, file_engine)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(
        (tmp_path / "model-00001-of-00002.safetensors").read_bytes()
    )
    with pytest.raises(SourceSpoiled, match="holds the same tensors"):
        check_source(first, file_engine)


def test_what_is_in_a_folder_has_to_be_whole(hub_engine, tmp_path):
    put_shards(tmp_path)
    (tmp_path / "._model.safetensors").write_bytes(b"of another system")
    # (what of another layout is named and not there at all is not looked for)
    (tmp_path / "consolidated.safetensors.index.json").write_text('{"weight_map": {"w": "consolidated.safetensors"}}')
    check_source(str(tmp_path), hub_engine)
    second = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(second, 40)
    with pytest.raises(SourceSpoiled, match=r"00002-of-00002\.safetensors ends early"):
        check_source(str(tmp_path), hub_engine)
    second.unlink()
    with pytest.raises(SourceMissing, match=r"is not whole: '.*00002-of-00002\.safetensors' can't be read"):
        check_source(str(tmp_path), hub_engine)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(SourceMissing, match=r"is not whole: '.*00002-of-00002\.safetensors' can't be read"):
        check_source(str(tmp_path), hub_engine)
    second.mkdir()
    with pytest.raises(SourceSpoiled, match="is not an ordinary file"):
        check_source(str(tmp_path), hub_engine)


def test_all_that_an_index_names_is_needed_once_any_of_it_is_there(hub_engine, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}'
    )
    check_source(str(tmp_path), hub_engine)
    (tmp_path / "a.safetensors").write_bytes(write_safetensors({"a": (8, 4)}))
    with pytest.raises(SourceMissing, match=r"b\.safetensors' can't be read"):
        check_source(str(tmp_path), hub_engine)
    (tmp_path / "b.safetensors").write_bytes(write_safetensors({"b": (8, 4)}))
    check_source(str(tmp_path), hub_engine)
    (tmp_path / "model.safetensors.index.json").write_text("<html>")
    with pytest.raises(SourceSpoiled, match=r"model\.safetensors\.index\.json is no index"):
        check_source(str(tmp_path), hub_engine)
    _replace_by_a_folder(tmp_path / "model.safetensors.index.json")
    with pytest.raises(SourceSpoiled, match="is not an ordinary file"):
        check_source(str(tmp_path), hub_engine)
