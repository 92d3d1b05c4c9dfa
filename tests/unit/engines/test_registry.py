"""Plugins are found, checked and wrapped; a broken one is named and costs nobody else anything."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmgw.core.model import Model, ModelName, Profile
from llmgw.engines import (
    LOADING,
    READY,
    Cause,
    CauseKind,
    Command,
    Embedded,
    EngineInfo,
    Launch,
    Load,
    LogFact,
    Lora,
    ParserFlag,
    ProbeOutput,
    Problem,
    RequestRules,
    SourceKind,
    Task,
    Version,
    hookimpl,
)
from llmgw.engines.registry import Engine, Found, find_engines, find_unable, load_engines, open_engine
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


def test_what_a_plugin_says_of_a_source_has_nothing_that_opens_it() -> None:
    def engine_validate(model: Model) -> list[Problem]:
        return [Problem(key="source", message=f"{model.source} is nothing for me")]

    model = dataclasses.replace(MODEL, source="https://h/m.tiny?sig=x")
    (problem,) = an_engine(engine_validate=engine_validate).validate(model, PROFILE)
    assert problem == Problem(key="source", message="https://h/m.tiny is nothing for me")


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
    assert engine.build_probe(("tiny",)) == ()
    assert engine.build_request(MODEL, PROFILE) == RequestRules()
    assert engine.name_parser(MODEL, PROFILE) is None
    assert engine.read_probe([ProbeOutput(code=0, stdout="1", stderr="")]) is None
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
    with pytest.raises(EngineFailed, match=r"for m: engine_build_command of its plugin returned None$"):
        an_engine(engine_build_command=lambda: None).build_command(LAUNCH)
    assert "AttributeError" in caplog.text


def test_a_command_has_the_environment_of_its_profile_over_the_plugins() -> None:
    engine = an_engine(engine_build_command=lambda launch: Command(argv=launch.program, env={"A": "1", "B": "2"}))
    launch = dataclasses.replace(LAUNCH, env={"B": "3", "C": "4"})
    assert engine.build_command(launch).env == {"A": "1", "B": "3", "C": "4"}


def test_one_probe_or_several_are_some() -> None:
    one, two = Command(argv=("tiny", "--version")), Command(argv=("tiny", "--help"))
    assert an_engine(engine_build_probe=lambda: one).build_probe(("tiny",)) == (one,)
    assert an_engine(engine_build_probe=lambda: (one, two)).build_probe(("tiny",)) == (one, two)
    assert an_engine(engine_build_probe=lambda: (one, "tiny --help")).build_probe(("tiny",)) == (one,)


def test_what_probes_printed_is_read_as_one() -> None:
    outputs = [ProbeOutput(code=0, stdout=text, stderr="") for text in ("1.2", "--host")]
    engine = an_engine(
        engine_read_probe=lambda output, outputs: Version(number=output.stdout + "".join(o.stdout for o in outputs))
    )
    assert engine.read_probe(outputs) == Version(number="1.21.2--host")
    assert engine.read_probe([]) is None


def test_nobody_is_sent_to_where_nothing_listens() -> None:
    engine = an_engine(engine_read_health=lambda: READY)
    assert engine.read_health(None, "") == LOADING
    assert engine.read_health(200, "") == READY


def test_the_common_causes_help_a_plugin_out() -> None:
    own = Cause(kind=CauseKind.FLAG, line=" two\n lines ", remedy="take\nit out")
    engine = an_engine(engine_read_exit=lambda lines, code: own if code == 2 else None)
    assert engine.read_exit(["MemoryError"], 2, None) == Cause(
        kind=CauseKind.FLAG, line="two lines", remedy="take it out"
    )
    # One that has looked and found nothing knows better than rules that know no engine.
    assert engine.read_exit(["MemoryError"], 1, None) is None
    common = an_engine().read_exit(["MemoryError"], 1, None)
    assert common is not None
    assert common.kind is CauseKind.HOST_MEMORY
    assert an_engine().read_exit(["fine"], 1, None) is None


def test_a_load_that_can_not_be_is_left_out() -> None:
    said = Load(running=-1, waiting=2**60, cache_used=float("nan"), prompt_tokens=3, cached_tokens=2, steps=1)
    engine = an_engine(engine_read_load=lambda: said)
    assert engine.read_load("") == Load(prompt_tokens=3, cached_tokens=2, steps=1)
    assert an_engine(engine_read_load=lambda: Load(cache_used=1.5)).read_load("") == Load()


def test_a_cause_without_words_is_none() -> None:
    engine = an_engine(engine_read_exit=lambda: Cause(kind=CauseKind.OTHER, line=" ", remedy=" "))
    assert engine.read_exit(["fine"], 1, None) is None
    engine = an_engine(engine_read_exit=lambda: Cause(kind=CauseKind.OTHER, line="bad", remedy=" "))
    assert engine.read_exit([], 1, None) == Cause(kind=CauseKind.OTHER, line="bad")


def test_the_other_answers_come_as_the_plugin_gives_them() -> None:
    parser = ParserFlag(flag="--parser", given="a")
    engine = an_engine(
        engine_name_parser=lambda: parser,
        engine_read_load=lambda text: Load(running=len(text)),
        engine_build_request=lambda model: RequestRules(loras={model.name: {}}),
    )
    assert engine.name_parser(MODEL, PROFILE) == parser
    assert engine.read_load("abc") == Load(running=3)
    assert engine.build_request(MODEL, PROFILE).loras == {"m": {}}


def test_a_hook_that_ends_the_program_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An ArgumentParser in a plugin leaves by SystemExit."""
    engine = an_engine(engine_validate=lambda profile: argparse.ArgumentParser().parse_args(list(profile.args)))
    assert engine.validate(MODEL, dataclasses.replace(PROFILE, args=("--what",))) == []
    assert "SystemExit" in caplog.text


def test_ctrl_c_is_not_the_plugins_to_keep() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        an_engine(engine_read_log=interrupt).read_log("x")
    with pytest.raises(KeyboardInterrupt):
        an_engine(engine_describe=interrupt)


def test_the_version_reaches_the_check_of_a_definition() -> None:
    engine = an_engine(
        engine_validate=lambda version: [Problem(key="args", message=version.number if version else "none")]
    )
    assert [problem.message for problem in engine.validate(MODEL, PROFILE)] == ["none"]
    assert [problem.message for problem in engine.validate(MODEL, PROFILE, Version(number="2"))] == ["2"]


def test_what_an_engine_cannot_do_is_refused_by_key() -> None:
    profile = Profile(name="p", engine="tiny", tp=2, pp=2, nodes=2, tool_parser="t", reasoning_parser="r")
    model = dataclasses.replace(
        MODEL, task=Task.RERANK, mmproj="/p", loras=(Lora(name=ModelName("l"), source="/l"),), profiles=(profile,)
    )
    problems = an_engine().validate(model, profile)
    keys = ["task", "mmproj", "loras", "tp", "pp", "nodes", "tool_parser", "reasoning_parser"]
    assert [problem.key for problem in problems] == keys
    assert problems[0].message == "Tiny has no task rerank: it can chat"
    assert problems[5].message == "Tiny can't span several nodes: take nodes out"
    able = dataclasses.replace(
        INFO,
        tasks=frozenset({Task.RERANK}),
        projector=True,
        loras=True,
        tensor_parallel=True,
        pipeline_parallel=True,
        span_nodes=True,
        tool_parser=True,
        reasoning_parser=True,
    )
    assert [(problem.key, problem.message) for problem in find_unable(able, model, profile)] == [
        ("tool_parser", "tool_parser is for chats, and the task is rerank: take it out"),
        ("reasoning_parser", "reasoning_parser is for chats, and the task is rerank: take it out"),
    ]
    assert (
        find_unable(
            dataclasses.replace(able, tasks=frozenset(Task)), dataclasses.replace(model, task=Task.CHAT), profile
        )
        == []
    )
    assert find_unable(INFO, MODEL, PROFILE) == []


def test_an_engine_that_needs_a_gpu_is_to_be_given_one() -> None:
    (problem,) = an_engine().check_gpus(PROFILE)
    assert problem.key == "gpu_class"
    assert problem.message == (
        "Tiny runs on GPUs alone, and this profile asks for none: "
        "write gpu_class: any (or a class as `llmgw ctl nodes` shows it)"
    )
    for asks in ({"gpu_class": "any"}, {"gpu_memory_gb": 8.0}, {"tp": 2}):
        assert an_engine().check_gpus(dataclasses.replace(PROFILE, **asks)) == []
    able = dataclasses.replace(INFO, cpu=True)
    assert an_engine(engine_describe=lambda: able).check_gpus(PROFILE) == []


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
    with pytest.raises(LlmgwError, match=r"engine_describe raised SystemExit: 3"):
        an_engine(engine_describe=lambda: sys.exit(3))


@pytest.mark.parametrize(
    ("name", "rubbish"),
    [
        ("title", None),
        ("tasks", None),
        ("sources", [SourceKind.FILE]),
        ("file_suffixes", ".tiny"),
        ("flag_style", {}),
        ("flag_changes", None),
        ("stop_grace_seconds", "10"),
        ("load_path", 1),
    ],
)
def test_a_description_of_wrong_kinds_is_named(name: str, rubbish: object) -> None:
    info = dataclasses.replace(INFO, **{name: rubbish})  # type: ignore[arg-type]
    kind = type(rubbish).__name__
    with pytest.raises(LlmgwError, match=rf"engine_describe returned an EngineInfo whose {name} is {kind}"):
        an_engine(engine_describe=lambda: info)


@pytest.mark.parametrize(
    ("name", "rubbish", "words"),
    [
        ("probe_seconds", float("nan"), "probe_seconds is nan"),
        ("flag_changes", ("--a",), "flag_changes has str in it, not FlagChange"),
        ("tasks", frozenset({"cook"}), "tasks has str in it, not Task"),
    ],
)
def test_a_description_with_rubbish_in_it_is_named(name: str, rubbish: object, words: str) -> None:
    info = dataclasses.replace(INFO, **{name: rubbish})  # type: ignore[arg-type]
    with pytest.raises(LlmgwError, match=f"engine_describe returned an EngineInfo whose {words}"):
        an_engine(engine_describe=lambda: info)


def test_a_command_that_can_not_be_started_is_a_failed_engine_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = an_engine(engine_build_command=lambda launch: Command(argv=[*launch.program]))  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(EngineFailed, match="for m: engine_build_command of its plugin is at fault: it returned a"):
            engine.build_command(LAUNCH)
    (record,) = caplog.records
    assert "it returned a Command whose argv is not a tuple of text" in record.getMessage()


def test_a_probe_that_can_not_be_started_is_left_out_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Command(argv=("tiny", "--version")), Command(argv=("tiny", 8080))  # type: ignore[arg-type]
    engine = an_engine(engine_build_probe=lambda: (good, bad))
    for _ in range(3):
        assert engine.build_probe(("tiny",)) == (good,)
    (record,) = caplog.records
    assert "engine_build_probe of its plugin is ignored: it returned a Command whose argv" in record.getMessage()


def test_facts_with_rubbish_in_them_are_none() -> None:
    engine = an_engine(
        engine_embedded=lambda: Embedded(module="m", requires=None, install="x"),  # type: ignore[arg-type]
        engine_read_probe=lambda: Version(number=2),  # type: ignore[arg-type]
        engine_read_log=lambda: LogFact(progress=50),  # type: ignore[arg-type]
    )
    assert engine.embedded is None
    assert engine.read_probe([ProbeOutput(code=0, stdout="2", stderr="")]) is None
    assert engine.read_log("x") is None


def test_a_plugin_that_cannot_even_be_looked_at_is_named() -> None:
    class Odd:
        @property
        def engine_describe(self) -> object:
            raise OSError("no such disk")

    with pytest.raises(LlmgwError, match=r"^odd 1.0: its hooks can't be read: OSError: no such disk"):
        open_engine("odd", Odd(), "odd 1.0")
    with pytest.raises(LlmgwError, match=r"missing; every engine needs"):
        open_engine("odd", None)


def test_one_engine_is_never_asked_for_another() -> None:
    first = an_engine(engine_read_log=lambda: LogFact(progress="first"))
    second = open_engine("other", a_plugin(engine_read_log=lambda: LogFact(progress="second")))
    assert first.read_log("x") == LogFact(progress="first")
    assert second.read_log("x") == LogFact(progress="second")


BROKEN_MODULES = {
    "syntax": ("def engine_describe(:\n", "can't be imported: SyntaxError: "),
    "absent": ("import no_such_module_of_anybody\n", "can't be imported: ModuleNotFoundError: "),
    "quits": ("raise SystemExit(3)\n", "can't be imported: SystemExit: 3"),
    "fails": ("1 / 0\n", "can't be imported: ZeroDivisionError: "),
    "nulls": ("a = '\0'\n", "can't be imported: "),
    "empty": ("", "engine_describe, engine_build_command, engine_read_health missing; every engine needs "),
    "typo": (GOOD + "\n@hookimpl\ndef engine_read_lg(line): ...\n", "engine_read_lg"),
    "argument": (GOOD + "\n@hookimpl\ndef engine_read_log(row): ...\n", "row"),
    "unmarked": (GOOD + "\ndef engine_read_log(line): ...\n", "engine_read_log is not marked with @hookimpl"),
    "raises": (GOOD.replace("return EngineInfo", "return 1 / 0 or EngineInfo"), "engine_describe raised ZeroDivision"),
    "rubbish": (GOOD.replace("return EngineInfo", "return str or EngineInfo"), "engine_describe returned type, it has"),
}


def ours(found: Found) -> dict[str, str]:
    """What is said of each engine that is left out."""
    return {problem.key: problem.message for problem in found.problems}


def test_broken_plugins_are_left_out_by_name_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, "registry_good", "good = registry_good", GOOD)
    install(tmp_path, "registry_gone", "gone = registry_gone")
    install(tmp_path, "registry_attribute", "attribute = registry_attribute:plugin", GOOD)
    for name, (module, _) in BROKEN_MODULES.items():
        install(tmp_path, f"registry_{name}", f"{name} = registry_{name}", module)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_engines({})
    assert {"good", "llamacpp"} <= set(found.engines)
    assert found.origins["good"] == "distribution registry_good 1.0"
    said = ours(found)
    assert said.keys() == {f"engine {name}" for name in (*BROKEN_MODULES, "gone", "attribute")}
    for name, (_, reason) in BROKEN_MODULES.items():
        assert said[f"engine {name}"].startswith(f"plugin registry_{name} of distribution registry_{name} 1.0")
        assert reason in said[f"engine {name}"]
    assert said["engine gone"].startswith(
        "plugin registry_gone of distribution registry_gone 1.0 can't be imported: ModuleNotFoundError"
    )
    assert "can't be imported: AttributeError: " in said["engine attribute"]
    assert found.origins.keys() == found.engines.keys()

    with caplog.at_level(logging.ERROR):
        engines = load_engines({})
    assert engines.keys() == found.engines.keys()
    assert len(caplog.records) == len(said)


def test_a_folder_of_plugins_is_found_beside_the_installed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    # Installed ones keep their name.
    (tmp_path / "llamacpp.py").write_text(GOOD)
    for name, (module, _) in BROKEN_MODULES.items():
        (tmp_path / f"{name}.py").write_text(module)
    environ = {"LLMGW_PLUGINS": str(tmp_path)}
    found = find_engines(environ)
    assert found.engines["mine"].info.title == "Good"
    assert found.engines["llamacpp"].info.title == "llama.cpp"
    assert found.origins["mine"] == str(tmp_path / "mine.py")
    assert found.origins["llamacpp"].startswith("distribution llmgw ")
    said = ours(found)
    assert said.keys() == {f"engine {name}" for name in (*BROKEN_MODULES, "llamacpp")}
    for name, (_, reason) in BROKEN_MODULES.items():
        assert said[f"engine {name}"].startswith(f"plugin {tmp_path / name}.py")
        assert reason in said[f"engine {name}"]
    assert said["engine llamacpp"] == (
        f"plugin {tmp_path / 'llamacpp.py'} is left out: plugin llmgw_llamacpp of "
        f"{found.origins['llamacpp']} has that name already; take one of them away"
    )
    assert "mine" in load_engines(environ)
    monkeypatch.setenv("LLMGW_PLUGINS", str(tmp_path))
    assert "mine" in load_engines()
    monkeypatch.delenv("LLMGW_PLUGINS")
    assert "mine" not in load_engines()


@pytest.mark.slow
def test_an_embedded_program_of_the_folder_is_found_by_its_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded = "from llmgw.engines import Embedded\n@hookimpl\ndef engine_embedded():\n"
    embedded += "    return Embedded(module='_registry_served', requires='json', install='nothing')\n"
    probe = "@hookimpl\ndef engine_build_probe(program):\n    return Command(argv=(*program, '--version'))\n"
    (tmp_path / "mine.py").write_text(f"{GOOD}\n{embedded}{probe}")
    (tmp_path / "_registry_served.py").write_text("print('served')\n")
    engine = find_engines({"LLMGW_PLUGINS": str(tmp_path)}).engines["mine"]
    program = (sys.executable, "-m", "_registry_served")
    (asked,) = engine.build_probe(program)
    for command in (engine.build_command(dataclasses.replace(LAUNCH, program=program)), asked):
        environ = os.environ | command.env
        done = subprocess.run(command.argv, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "served\n"
    monkeypatch.setenv("PYTHONPATH", "/above")
    assert engine.build_probe(program)[0].env == {"PYTHONPATH": f"{tmp_path}{os.pathsep}/above"}
    # A binary's own Python has no business there.
    assert engine.build_probe(("/opt/mine",))[0].env == {}


def test_a_script_that_was_installed_into_the_folder_finds_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = "@hookimpl\ndef engine_build_probe(program):\n    return Command(argv=(*program, '--version'))\n"
    (tmp_path / "mine.py").write_text(f"{GOOD}\n{probe}")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    engine = find_engines({"LLMGW_PLUGINS": str(tmp_path)}).engines["mine"]
    (asked,) = engine.build_probe((str(tmp_path / "bin" / "mine-server"),))
    assert asked.env == {"PYTHONPATH": str(tmp_path)}
    # A folder beside it whose name begins alike is another one.
    (asked,) = engine.build_probe((f"{tmp_path}-old/bin/mine-server",))
    assert asked.env == {}


def test_a_folder_that_cannot_be_read_takes_nobody_along(tmp_path: Path) -> None:
    found = find_engines({"LLMGW_PLUGINS": str(tmp_path / "absent")})
    assert "llamacpp" in found.engines
    assert ours(found).keys() == {"LLMGW_PLUGINS"}


def test_ctrl_c_while_a_plugin_is_imported_ends_llmgw(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        find_engines({"LLMGW_PLUGINS": str(tmp_path)})


def test_a_name_that_two_plugins_claim_goes_to_one_and_the_other_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "a", "registry_twin_a", "twin = registry_twin_a", GOOD)
    install(tmp_path / "b", "registry_twin_b", "twin = registry_twin_b", GOOD)
    # The same plugin twice is no quarrel: an editable install lies beside a wheel.
    install(tmp_path / "c", "registry_twin_c", "twin = registry_twin_a")
    for folder in ("a", "b", "c"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    found = find_engines({})
    assert found.origins["twin"] == "distribution registry_twin_a 1.0"
    assert ours(found) == {
        "engine twin": "plugin registry_twin_b of distribution registry_twin_b 1.0 is left out: plugin registry_twin_a "
        "of distribution registry_twin_a 1.0 has that name already; take one of them away"
    }


def test_a_hook_at_fault_is_named_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[object] = ["rubbish", None, Version(number="1")]

    def read() -> object:
        answer = answers.pop(0)
        if answer == "rubbish":
            raise ValueError("two\nlines")
        return answer

    engine = an_engine(engine_read_probe=read)
    outputs = [ProbeOutput(code=0, stdout="", stderr="")]
    assert engine.find_fault("engine_read_probe") is None
    assert engine.read_probe(outputs) is None
    words = "engine_read_probe of its plugin is at fault: it raised ValueError: two lines"
    assert engine.find_fault("engine_read_probe") == words
    assert engine.read_probe(outputs) is None
    assert engine.find_fault("engine_read_probe") is None
    assert engine.read_probe(outputs) == Version(number="1")
    assert len(caplog.records) == 1


def test_rubbish_among_problems_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    sound = Problem(key="args", message="bad")
    engine = an_engine(engine_validate=lambda: [1, sound, None])
    for _ in range(3):
        assert engine.validate(MODEL, PROFILE) == [sound]
    assert [record.getMessage() for record in caplog.records] == [
        "engine tiny: engine_validate of its plugin is ignored: it returned a list with int in it, not Problem"
    ]
    assert engine.find_fault("engine_validate") is not None
    for rubbish in ([None], [sound, None]):
        assert an_engine(engine_validate=lambda rubbish=rubbish: rubbish).validate(MODEL, PROFILE) == rubbish[:-1]
