from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.cli.given import FileOptions, check_runnable, has_program, read_given, safe_name
from llmgw.config.node import EngineConfig, NodeConfig
from llmgw.core.model import Scaling
from llmgw.engines.registry import Engine
from llmgw.errors import ConfigError, UsageError

Engines = dict[str, Engine]


def definition(folder: Path, more: str = "", args: str = "") -> Path:
    (folder / "w.toy").write_bytes(b"weights")
    path = folder / "m.yaml"
    path.write_text(
        f"name: m\nsource: ./w.toy\n{more}profiles:\n- name: a\n  engine: toy\n{args}",
    )
    return path


def test_a_weights_file_is_a_model_with_one_replica(weights: Path, engines: Engines) -> None:
    (found,) = read_given(str(weights), FileOptions(context_length=4096, args=("--x", "1")), engines)
    assert found.model.name == "my-model-q4"
    assert found.model.source == str(weights)
    assert found.model.context_length == 4096
    assert found.model.scaling == Scaling(min=1, max=1)
    assert [(profile.engine, profile.args) for profile in found.model.profiles] == [("toy", ("--x", "1"))]


def test_a_relative_path_is_made_whole(weights: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(weights.parent)
    (found,) = read_given(weights.name, FileOptions(name="other/name"), engines)
    assert found.model.source == str(weights)
    assert found.model.name == "other/name"


def test_a_definition_without_scaling_runs_one_replica(tmp_path: Path, engines: Engines) -> None:
    (found,) = read_given(str(definition(tmp_path)), FileOptions(), engines)
    assert found.model.scaling == Scaling(min=1, max=1)


def test_a_definition_that_says_how_many_is_believed(tmp_path: Path, engines: Engines) -> None:
    (found,) = read_given(str(definition(tmp_path, "scaling: {min: 0, max: 1}\n")), FileOptions(), engines)
    assert found.model.scaling == Scaling(min=0, max=1)


def test_options_of_a_bare_file_do_not_go_with_a_definition(tmp_path: Path, engines: Engines) -> None:
    with pytest.raises(UsageError, match="is a definition: name, context length"):
        read_given(str(definition(tmp_path)), FileOptions(name="x"), engines)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("none.toy", r"^none\.toy: no such file$"),
        ("hf:org/repo", r"^hf:org/repo: names no file of org/repo: write hf:org/repo/FILE, or org/repo alone"),
        (
            "hf:org/repo/m.bin",
            r"^hf:org/repo/m\.bin: no installed engine reads such files; it is to be a \.gguf file or",
        ),
        ("hf:org/repo/*", r"^hf:org/repo/\*: no installed engine reads such files"),
        ("https://models.internal/", "^https://models.internal/: is no address of a file"),
        ("https://me:word@internal/m.toy", "^https://…: holds a name or password: give the file away without one$"),
        ("https://internal/m?key=word", r"^https://internal/m: no installed engine reads such files"),
        ("s3://models/m.gguf", "no such file; llmgw serve fetches hf:org/repo/file and https://… by itself$"),
        ("org/repo", "no such file; if it is a repository, llmgw serve hf:org/repo/FILE fetches one of its files, and"),
        ("folder", r"folder is a folder; give the weights file in it \(a \.gguf file or a \.toy file or a \.yaml"),
        ("empty.toy", "is empty: was its download cut off"),
        (
            "m.bin",
            r"no installed engine reads such files; it is to be a \.gguf file or a \.toy file or a \.yaml definition",
        ),
    ],
)
def test_what_is_no_model_is_refused_with_a_way_out(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch, given: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("empty.toy").touch()
    Path("m.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match=said):
        read_given(given, FileOptions(), engines)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("hf:org/repo/My-Model.Q4.gguf", "my-model.q4"),
        ("hf:org/repo/sub/m.TOY@v1.0", "m"),
        ("hf:org/Some-Repo/*.gguf", "some-repo"),
        ("https://models.internal/a/m.gguf", "m"),
        ("http://127.0.0.1:8000/m.toy?token=word", "m"),
    ],
)
def test_weights_that_are_fetched_are_named_by_their_file(engines: Engines, given: str, name: str) -> None:
    (found,) = read_given(given, FileOptions(context_length=4096), engines)
    assert (found.model.name, found.model.source, found.model.context_length) == (name, given, 4096)
    assert [profile.engine for profile in found.model.profiles] == ["toy"]
    assert "word" not in str(found.places)
    # nobody looks for it here
    check_runnable((found,), engines, NodeConfig())


def test_without_any_engine_the_message_still_makes_sense(weights: Path) -> None:
    with pytest.raises(UsageError, match=r"no installed engine reads such files; it is to be a weights file or"):
        read_given(str(weights), FileOptions(), {})


def test_a_name_that_can_not_be_asked_for_is_refused(weights: Path, engines: Engines) -> None:
    with pytest.raises(UsageError, match=r"^--name: 'a b' may hold"):
        read_given(str(weights), FileOptions(name="a b"), engines)


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct.q4_1"),
        ("ü x--", "x"),
        ("...", "model"),
        ("a$(b)", "a-b"),
    ],
)
def test_a_files_stem_becomes_a_name(stem: str, name: str) -> None:
    assert safe_name(stem) == name


def test_what_the_engine_refuses_is_placed_in_the_definition(tmp_path: Path, engines: Engines) -> None:
    path = definition(tmp_path, args="  args: [--bad]\n")
    with pytest.raises(ConfigError, match=rf"^{path}:6:3 m: profiles\[0\]\.args: --bad is not a flag$"):
        check_runnable(read_given(str(path), FileOptions(), engines), engines, NodeConfig())


def test_what_the_engine_refuses_of_a_bare_file_names_the_file(weights: Path, engines: Engines) -> None:
    found = read_given(str(weights), FileOptions(args=("--bad",)), engines)
    with pytest.raises(ConfigError, match=r"My-Model Q4\.toy my-model-q4: args: --bad is not a flag"):
        check_runnable(found, engines, NodeConfig())


def test_what_else_the_engine_reads_has_to_be_there_too(tmp_path: Path, engines: Engines) -> None:
    engines["toy"].info = replace(engines["toy"].info, loras=True, projector=True)
    more = "mmproj: ./eyes.toy\nloras:\n- {name: s, source: ./w.toy}\n- {name: t, source: org/t}\n"
    path = definition(tmp_path, more)
    with pytest.raises(ConfigError) as caught:
        check_runnable(read_given(str(path), FileOptions(), engines), engines, NodeConfig())
    eyes, adapter = map(str, caught.value.problems)
    assert f"m.yaml:3:1 m: mmproj: {tmp_path}/eyes.toy is no file on this machine" in eyes
    assert "m.yaml:6:13 m: loras[1].source: org/t is no path of a file" in adapter


def test_what_the_engine_can_not_read_at_all_is_not_looked_for(tmp_path: Path, engines: Engines) -> None:
    path = definition(tmp_path, "mmproj: ./eyes.toy\nloras:\n- {name: t, source: org/t}\n")
    with pytest.raises(ConfigError) as caught:
        check_runnable(read_given(str(path), FileOptions(), engines), engines, NodeConfig())
    assert [str(problem).partition("m.yaml:")[2] for problem in caught.value.problems] == [
        "3:1 m: mmproj: Toy takes no mmproj: take it out",
        "4:1 m: loras: Toy takes no adapters: take loras out",
    ]


def test_weights_that_are_not_there_are_named(tmp_path: Path, engines: Engines) -> None:
    path = definition(tmp_path)
    (tmp_path / "w.toy").unlink()
    with pytest.raises(ConfigError, match=r":2:1 m: source: .*w\.toy is no file on this machine"):
        check_runnable(read_given(str(path), FileOptions(), engines), engines, NodeConfig())


def test_a_model_that_is_not_to_run_is_not_looked_at(tmp_path: Path, engines_without_program: Engines) -> None:
    path = definition(tmp_path, "scaling: {min: 0, max: 0}\n", args="  args: [--bad]\n")
    engines = engines_without_program
    check_runnable(read_given(str(path), FileOptions(), engines), engines, NodeConfig())


def test_an_engine_without_a_program_says_what_to_install(weights: Path, engines_without_program: Engines) -> None:
    engines = engines_without_program
    found = read_given(str(weights), FileOptions(), engines)
    with pytest.raises(UsageError, match=r"its engine is not on this machine; pip install 'llmgw\[toy\]'; or put "):
        check_runnable(found, engines, NodeConfig())


def test_a_program_is_the_configured_one_or_on_path_or_embedded(make_engines: Callable[..., Engines]) -> None:
    def runs(binary: str, requires: str | None = None, configured: str | None = None) -> bool:
        config = NodeConfig(engines={"toy": EngineConfig(bin=configured)})
        return has_program(make_engines(binary, requires)["toy"], config)

    assert runs("sh")
    assert not runs("no-such-program-anywhere")
    assert runs("no-such-program-anywhere", configured="/bin/sh")
    assert runs("no-such-program-anywhere", requires="json")
    assert not runs("no-such-program-anywhere", requires="no_such_package_anywhere")


@pytest.mark.parametrize("path", ["/no/such/program", "/etc", "/etc/passwd"])
def test_a_configured_program_that_can_not_run_is_refused(engines: Engines, path: str) -> None:
    with pytest.raises(UsageError, match=rf"engines\.toy\.bin: {path} is not a program that can be run"):
        has_program(engines["toy"], NodeConfig(engines={"toy": EngineConfig(bin=path)}))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.unlink(), "is no file on this machine$"),
        (lambda path: path.write_bytes(b""), "is empty: was its download cut off"),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "can't be read: check its permissions"),
        (lambda path: (path.unlink(), path.symlink_to(path.name)), "can't be read: Too many levels"),
    ],
)
def test_weights_of_a_definition_that_can_not_be_read_are_refused_at_the_start(
    tmp_path: Path, engines: Engines, make: Callable[[Path], object], said: str
) -> None:
    path = definition(tmp_path)
    make(tmp_path / "w.toy")
    with pytest.raises(ConfigError, match=rf":2:1 m: source: .*w\.toy {said}"):
        check_runnable(read_given(str(path), FileOptions(), engines), engines, NodeConfig())


@pytest.mark.parametrize("source", ["hf:org/repo/w.toy", "https://internal/w.toy", "hf:org/repo/*.toy"])
def test_a_definition_may_have_weights_that_are_fetched(tmp_path: Path, engines: Engines, source: str) -> None:
    path = definition(tmp_path)
    path.write_text(path.read_text().replace("./w.toy", source))
    definitions = read_given(str(path), FileOptions(), engines)
    assert definitions[0].model.source == source
    check_runnable(definitions, engines, NodeConfig())


@pytest.mark.parametrize("source", ["org/w.toy"])
def test_a_source_that_is_no_whole_path_is_not_looked_for_in_the_working_directory(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = definition(tmp_path)
    path.write_text(path.read_text().replace("./w.toy", source))
    with pytest.raises(
        ConfigError, match=rf"source: {source} is no path of a file: a path begins with /, ~/ or \./, and"
    ):
        check_runnable(read_given(str(path), FileOptions(), engines), engines, NodeConfig())


def test_what_the_engine_says_of_a_source_is_enough(tmp_path: Path, make_engines: Callable[..., Engines]) -> None:
    path = definition(tmp_path)
    path.write_text(path.read_text().replace("./w.toy", "org/bad"))
    with pytest.raises(ConfigError) as caught:
        check_runnable(read_given(str(path), FileOptions(), make_engines()), make_engines(), NodeConfig())
    assert [problem.message for problem in caught.value.problems] == ["org/bad is not for toys"]


def test_bytes_that_are_no_text_are_refused(tmp_path: Path, weights: Path, engines: Engines) -> None:
    bad = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.toy"))
    bad.write_bytes(b"weights")
    with pytest.raises(UsageError, match=r"^.*/\\xff\.toy is not UTF-8"):
        read_given(str(bad), FileOptions(), engines)
    with pytest.raises(UsageError, match=r"^--arg: \\xff is not UTF-8"):
        read_given(str(weights), FileOptions(args=(os.fsdecode(b"\xff"),)), engines)


def test_bytes_that_are_no_text_in_a_definitions_folder_are_refused(tmp_path: Path, engines: Engines) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    link = tmp_path / "good"
    link.symlink_to(folder)
    (found,) = read_given(str(definition(link)), FileOptions(), engines)
    assert found.model.source == str(link / "w.toy")
    with pytest.raises(UsageError, match="is not UTF-8"):
        read_given(str(definition(folder)), FileOptions(), engines)


def test_a_path_that_can_not_be_followed_is_refused(tmp_path: Path, engines: Engines) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(UsageError, match=r"loop/m\.toy can't be read: Too many levels"):
        read_given(str(loop / "m.toy"), FileOptions(), engines)
