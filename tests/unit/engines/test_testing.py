"""The conformance kit: that it fails where a plugin is wrong, method by method."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llmgw.engines import (
    LOADING,
    READY,
    Command,
    Embedded,
    EngineInfo,
    Health,
    HealthState,
    Launch,
    Load,
    LogFact,
    Problem,
    Profile,
    SourceKind,
    hookimpl,
)
from llmgw.engines.testing import EngineContract, flags_in, read_flags

INFO = EngineInfo(
    title="Tiny",
    default_binary="tiny",
    sources=frozenset({SourceKind.FILE}),
    file_suffixes=(".tiny",),
    api_paths=frozenset({"/v1/completions"}),
)
PASSED = ("--host", "--port", "--model", "--name")


def good_command(launch: Launch) -> Command:
    argv = (*launch.program, "--host", launch.host, "--port", str(launch.port), "--model", launch.source)
    return Command(argv=(*argv, "--name", launch.served_name, *launch.args))


def good_validate(profile: Profile) -> list[Problem]:
    given = {word.partition("=")[0] for word in profile.args}
    return [Problem(key="args", message=f"{flag} is set by llmgw") for flag in PASSED if flag in given]


def contract(**hooks: Any) -> EngineContract:
    """The contract over a plugin that is right but for ``hooks``."""
    functions = {
        "engine_describe": lambda: INFO,
        "engine_build_command": good_command,
        "engine_read_health": lambda status: READY if status == 200 else LOADING,
        "engine_validate": good_validate,
    } | hooks
    marked = SimpleNamespace(**{name: hookimpl(hook) for name, hook in functions.items() if hook is not None})
    checked = EngineContract()
    checked.plugin = marked  # type: ignore[misc]
    checked.flag_tables = {"1.0": frozenset(PASSED)}  # type: ignore[misc]
    return checked


def fails(checked: EngineContract, test: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        getattr(checked, test)()


TESTS = [name for name in dir(EngineContract) if name.startswith("test_")]


@pytest.mark.parametrize("test", TESTS)
def test_a_plugin_that_is_right_passes(test: str) -> None:
    getattr(contract(), test)()


def test_a_missing_hook_fails() -> None:
    fails(contract(engine_read_health=None), "test_the_registry_takes_it", "engine_read_health missing")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"title": ""}, "title"),
        ({"file_suffixes": ()}, "file_suffixes"),
        ({"file_suffixes": ("tiny",)}, "begin with a dot"),
        ({"api_paths": frozenset()}, "api_paths"),
        ({"health_path": "health"}, "begin with a slash"),
        ({"stop_signal": "SIGNOTHING"}, "no signal"),
        ({"stop_grace_seconds": 0.0}, "stop_grace_seconds"),
    ],
)
def test_a_description_with_a_hole_fails(change: dict[str, Any], words: str) -> None:
    info = replace(INFO, **change)
    fails(contract(engine_describe=lambda: info), "test_it_describes_itself_in_full", words)


def test_an_embedded_program_that_is_not_there_fails() -> None:
    embedded = Embedded(module="no_such_module_of_tiny", requires="tiny", install="pip install tiny")
    fails(contract(engine_embedded=lambda: embedded), "test_its_embedded_program_exists", "there is no module")


def test_a_command_that_drops_a_fact_fails() -> None:
    def build(launch: Launch) -> Command:
        return Command(argv=(*launch.program, "--port", str(launch.port), *launch.args))

    fails(contract(engine_build_command=build), "test_its_command_carries_every_fact", "is not passed")


def test_args_that_are_not_last_fail() -> None:
    def build(launch: Launch) -> Command:
        good = good_command(launch)
        return Command(argv=(*good.argv, "--late"))

    fails(contract(engine_build_command=build), "test_its_command_carries_every_fact", "args come last")


def test_a_flag_that_a_version_does_not_know_fails() -> None:
    def build(launch: Launch) -> Command:
        return Command(argv=(*launch.program, "--newest", *good_command(launch).argv[1:]))

    fails(contract(engine_build_command=build), "test_its_command_has_only_flags_that_the_engine_knows", "--newest")


def test_a_flag_of_the_house_that_passes_validation_fails() -> None:
    for hook in (None, lambda profile: [] if profile else None):
        fails(contract(engine_validate=hook), "test_args_may_not_repeat_a_flag_of_the_house", "passed")


def test_a_probe_of_another_program_fails() -> None:
    probe = Command(argv=("/usr/bin/other", "--version"))
    fails(contract(engine_build_probe=lambda: probe), "test_its_probe_runs_the_program", "another program")


def test_a_builder_that_raises_fails() -> None:
    def build(launch: Launch) -> Command:
        if launch.port == 0:
            raise ValueError("no port")
        return good_command(launch)

    fails(contract(engine_build_command=build), "test_building_is_pure_and_total", "no port")


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        ({"engine_read_log": lambda line: None if line else line[0]}, "index out of range"),
        ({"engine_read_log": lambda line: LogFact(progress=line)}, "one line"),
        ({"engine_read_load": lambda: Load(running=-1)}, "below 0"),
        ({"engine_read_load": lambda: Load(cache_used=1.5)}, "a share is 0 to 1"),
        ({"engine_read_health": lambda: Health(state=HealthState.BROKEN)}, "BROKEN carries its reason"),
        ({"engine_read_probe": lambda: "1.0"}, "engine_read_probe returned"),
    ],
)
def test_a_reader_that_is_not_total_fails(hooks: dict[str, Any], words: str) -> None:
    fails(contract(**hooks), "test_reading_is_pure_and_total", words)


def test_a_reader_with_a_memory_fails() -> None:
    counter = itertools.count()
    hooks = {"engine_read_load": lambda: Load(running=next(counter))}
    fails(contract(**hooks), "test_reading_is_pure_and_total", "the same question got")


def test_a_flag_table_is_one_flag_a_line() -> None:
    assert read_flags("# version 1\n--host\n\n -p \n") == {"--host", "-p"}


def test_flags_are_told_from_values() -> None:
    assert flags_in(("bin", "--host", "127.0.0.1", "-np", "-1", "--x=1", "-")) == ("--host", "-np", "--x")
