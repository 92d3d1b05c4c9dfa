"""Plugins are found, checked and wrapped; a broken one is named and costs nobody else anything."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmgw.core.model import Model, ModelName, Profile
from llmgw.engines import (
    LOADING,
    READY,
    Command,
    Embedded,
    EngineInfo,
    Launch,
    LogFact,
    Problem,
    RequestRules,
    SourceKind,
    hookimpl,
)
from llmgw.engines.registry import Engine, find_engines, load_engines, open_engine
from llmgw.errors import EngineFailed, LlmgwError

INFO = EngineInfo(
    title="Tiny",
    default_binary="tiny",
    sources=frozenset({SourceKind.FILE}),
    file_suffixes=(".tiny",),
    api_paths=frozenset({"/v1/completions"}),
)
LAUNCH = Launch(program=("tiny",), source="/m.tiny", served_name="m", host="127.0.0.1", port=1)
PROFILE = Profile(name="cpu", engine="tiny")
MODEL = Model(name=ModelName("m"), source="/m.tiny", profiles=(PROFILE,))


def a_plugin(**hooks: Callable[..., object] | None) -> SimpleNamespace:
    """A plugin with the required hooks; each of ``hooks`` replaces or adds one, None takes it away."""

    def engine_describe() -> object:
        return INFO

    def engine_build_command(launch: Launch) -> object:
        return Command(argv=(*launch.program, launch.source))

    def engine_read_health(status: int) -> object:
        return READY if status == 200 else LOADING

    functions: dict[str, Any] = {
        "engine_describe": engine_describe,
        "engine_build_command": engine_build_command,
        "engine_read_health": engine_read_health,
    } | hooks
    return SimpleNamespace(**{name: hookimpl(hook) for name, hook in functions.items() if hook is not None})


def an_engine(**hooks: Callable[..., object] | None) -> Engine:
    return open_engine("tiny", a_plugin(**hooks))


def install(folder: Path, name: str, entry: str, module: str | None = None) -> None:
    """A distribution with one entry point, as pip would leave it; ``module`` is the text of the plugin."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[llmgw.engines]\n{entry}\n")
    if module is not None:
        (folder / f"{name}.py").write_text(module)


GOOD = """
from llmgw.engines import EngineInfo, Command, READY, SourceKind, hookimpl
@hookimpl
def engine_describe():
    return EngineInfo(title="Good", default_binary="good", sources=frozenset({SourceKind.REPOSITORY}))
@hookimpl
def engine_build_command(launch):
    return Command(argv=launch.program)
@hookimpl
def engine_read_health(status):
    return READY
"""


def test_an_engine_answers_through_its_plugin() -> None:
    engine = an_engine(
        engine_embedded=lambda: Embedded(module="tiny.embedded", requires="tiny", install="pip install tiny"),
        engine_read_log=lambda line: LogFact(progress=line),
    )
    assert (engine.name, engine.info) == ("tiny", INFO)
    assert engine.embedded is not None
    assert engine.embedded.module == "tiny.embedded"
    assert engine.build_command(LAUNCH).argv == ("tiny", "/m.tiny")
    assert engine.read_health(200, "") == READY
    assert engine.read_log("loading") == LogFact(progress="loading")


def test_hooks_that_a_plugin_lacks_have_a_neutral_answer() -> None:
    engine = an_engine()
    assert engine.embedded is None
    assert engine.validate(MODEL, PROFILE) == []
    assert engine.build_probe(("tiny",)) is None
    assert engine.build_request(PROFILE) == RequestRules()
    assert engine.read_log("x") is None
    assert engine.read_load("x") is None
    assert engine.read_health(503, "") == LOADING


def test_an_exception_becomes_the_neutral_answer_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(line: str) -> None:
        raise ZeroDivisionError(line)

    engine = an_engine(
        engine_read_log=fail,
        engine_read_health=lambda status: {}[status],
        engine_validate=lambda model: {}[model],
    )
    for _ in range(3):
        assert engine.read_log("x") is None
        assert engine.read_health(200, "") == LOADING
        assert engine.validate(MODEL, PROFILE) == []
    assert len(caplog.records) == 3
    assert "engine tiny: engine_read_log of its plugin is ignored: it raised" in caplog.text
    assert "ZeroDivisionError: x" in caplog.text


def test_an_answer_of_the_wrong_kind_is_none_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = an_engine(engine_read_log=lambda: "text", engine_validate=lambda: [1, Problem(key="args", message="bad")])
    assert engine.read_log("x") is None
    assert engine.read_log("x") is None
    assert [record.getMessage() for record in caplog.records] == [
        "engine tiny: engine_read_log of its plugin is ignored: it returned str, not LogFact"
    ]
    assert engine.validate(MODEL, PROFILE) == [Problem(key="args", message="bad")]


def test_a_command_that_cannot_be_built_is_a_failed_engine(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EngineFailed, match="engine tiny built no command for m"):
        an_engine(engine_build_command=lambda launch: launch.nothing).build_command(LAUNCH)
    with pytest.raises(EngineFailed):
        an_engine(engine_build_command=lambda: None).build_command(LAUNCH)
    assert "AttributeError" in caplog.text


@pytest.mark.parametrize("hook", ["engine_describe", "engine_build_command", "engine_read_health"])
def test_a_required_hook_that_is_missing_is_named(hook: str) -> None:
    with pytest.raises(LlmgwError, match=f"^tiny 1.0: {hook} missing; every engine needs"):
        open_engine("tiny", a_plugin(**{hook: None}), "tiny 1.0")


def test_a_misspelled_hook_is_named() -> None:
    with pytest.raises(LlmgwError, match=r"engine_read_logs"):
        an_engine(engine_read_logs=lambda line: None)


def test_an_argument_that_the_spec_does_not_have_is_named() -> None:
    with pytest.raises(LlmgwError, match=r"row"):
        an_engine(engine_read_log=lambda row: None)


def test_a_hook_without_its_marker_is_named() -> None:
    plugin = a_plugin()
    plugin.engine_read_log = lambda line: None
    with pytest.raises(LlmgwError, match=r"engine_read_log is not marked with @hookimpl"):
        open_engine("tiny", plugin)


def test_a_description_that_cannot_be_had_is_named() -> None:
    with pytest.raises(LlmgwError, match=r"engine_describe returned str, it has to be an EngineInfo"):
        an_engine(engine_describe=lambda: "Tiny")
    with pytest.raises(LlmgwError, match=r"engine_describe raised KeyError: 1"):
        an_engine(engine_describe=lambda: {}[1])


def test_one_engine_is_never_asked_for_another() -> None:
    first = an_engine(engine_read_log=lambda: LogFact(progress="first"))
    second = open_engine("other", a_plugin(engine_read_log=lambda: LogFact(progress="second")))
    assert first.read_log("x") == LogFact(progress="first")
    assert second.read_log("x") == LogFact(progress="second")


def test_broken_plugins_are_left_out_by_name_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, "registry_good", "good = registry_good", GOOD)
    install(tmp_path, "registry_absent", "absent = registry_absent")
    install(tmp_path, "registry_quits", "quits = registry_quits", "raise SystemExit(3)")
    install(tmp_path, "registry_typo", "typo = registry_typo", GOOD + "\n@hookimpl\ndef engine_read_lg(line): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_engines()
    assert {"good", "llamacpp"} <= set(found.engines)
    said = {problem.key: problem.message for problem in found.problems}
    assert said.keys() == {"engine absent", "engine quits", "engine typo"}
    assert said["engine absent"].startswith(
        "plugin registry_absent of distribution registry_absent 1.0 can't be imported: ModuleNotFoundError"
    )
    assert "SystemExit: 3" in said["engine quits"]
    assert "engine_read_lg" in said["engine typo"]

    with caplog.at_level(logging.ERROR):
        engines = load_engines()
    assert engines.keys() == found.engines.keys()
    assert len(caplog.records) == 3


def test_a_name_that_two_plugins_claim_goes_to_one_and_the_other_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "a", "registry_twin_a", "twin = registry_twin_a", GOOD)
    install(tmp_path / "b", "registry_twin_b", "twin = registry_twin_b", GOOD)
    # The same plugin twice is no quarrel: an editable install lies beside a wheel.
    install(tmp_path / "c", "registry_twin_c", "twin = registry_twin_a")
    for folder in ("a", "b", "c"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    found = find_engines()
    assert "twin" in found.engines
    (problem,) = found.problems
    assert problem.key == "engine twin"
    assert problem.message.startswith("plugin registry_twin_b of distribution registry_twin_b 1.0 is left out")
    assert "registry_twin_a" in problem.message
