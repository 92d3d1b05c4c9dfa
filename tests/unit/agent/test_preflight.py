"""Trying a program before it is launched: shell scripts in the place of an engine's binary."""

from __future__ import annotations

import re
import shutil
import threading
from dataclasses import replace

import pytest

from llmgw.agent.preflight import examine
from llmgw.core.model import Model, ModelName, Profile
from llmgw.engines import (
    LOADING,
    Command,
    EngineInfo,
    Problem,
    SourceKind,
    Version,
    hookimpl,
    read_argparse_help,
)
from llmgw.engines.check import FlagState
from llmgw.engines.registry import open_engine

HELP = "  --model PATH\n  --port N\n  --dtype {auto,half}\n"
MARKER = "/tmp/state:probe-preflight:0"

pytestmark = pytest.mark.slow


class Plugin:
    """An engine that is asked for its version and its help, as two commands."""

    def __init__(self, seconds=60.0):
        self.seconds = seconds

    @hookimpl
    def engine_describe(self):
        return EngineInfo(
            title="Script",
            default_binary="script",
            sources=frozenset({SourceKind.FILE}),
            file_suffixes=(".bin",),
            probe_seconds=self.seconds,
        )

    @hookimpl
    def engine_validate(self, profile, version):
        if version is not None and "--new" in profile.args and version.number < "2":
            return [Problem(key="args", message=f"--new is not in {version.number}")]
        return []

    @hookimpl
    def engine_build_command(self, launch):
        return Command(
            argv=(*launch.program, "--model", launch.source, "--port", str(launch.port), *launch.args),
            env={"BY_LAUNCH": "yes"},
            defaults={"BY_DEFAULT": "yes"},
            scrub=("SCRIPT_",),
        )

    @hookimpl
    def engine_build_probe(self, program):
        return tuple(Command(argv=(*program, flag), env={"BY_PROBE": "yes"}) for flag in ("--version", "--help"))

    @hookimpl
    def engine_read_probe(self, outputs):
        found = re.search(r"^script (\S+)", outputs[0].stdout, re.MULTILINE)
        helped = len(outputs) > 1 and outputs[1].code == 0
        flags = read_argparse_help(outputs[1].stdout) if helped else ()
        return Version(number=found[1], flags=flags) if found else None

    @hookimpl
    def engine_read_health(self):
        return LOADING


def version(text="echo script 1.2"):
    return f'[ "$1" = --version ] && {{ {text}; }}'


def helping(text=f"printf '{HELP}'"):
    return f'[ "$1" = --help ] && {{ {text}; }}'


@pytest.fixture
def write(tmp_path):
    """Write a program of these lines of shell, which end well unless they say otherwise."""

    def write(*lines, mode=0o755):
        path = tmp_path / "engine"
        path.write_text("\n".join(["#!/bin/sh", *lines, "exit 0", ""]))
        path.chmod(mode)
        return (str(path),)

    return write


async def try_out(program, plugin=None, **facts):
    return await examine(open_engine("script", plugin or Plugin()), program, marker=MARKER, **facts)


def a_model(**profile):
    profile = Profile(name="p", engine="script", **profile)
    return Model(name=ModelName("m"), source="/m.bin", profiles=(profile,)), profile


async def test_a_program_that_fits_has_a_version_and_nothing_else(write):
    found = await try_out(write(version(), helping()))
    assert (found.engine, found.version.number, found.version.find("--port").takes) == ("script", "1.2", "one")
    assert (found.broken, found.remedy, found.problems, found.missing_libraries) == (None, None, (), ())
    assert [(each.flag, each.state) for each in found.findings] == [
        ("--model", FlagState.OK),
        ("--port", FlagState.OK),
    ]
    assert not found.undecided


async def test_what_a_program_prints_is_read_in_a_thread(write, monkeypatch):
    engine, threads = open_engine("script", Plugin()), []
    for name in ("read_probe", "read_exit"):
        monkeypatch.setattr(engine, name, lambda *facts: threads.append(threading.get_ident()))
    await examine(engine, write("printf 'script 1.0'"), marker=MARKER)
    await examine(engine, write("exit 3"), marker=MARKER)
    assert len(threads) > 2
    assert threading.get_ident() not in threads


async def test_the_commands_run_in_the_environment_of_a_launch(write, tmp_path, monkeypatch):
    monkeypatch.setenv("SCRIPT_FROM_THE_SHELL", "no")
    monkeypatch.setenv("LLMGW_API_KEYS", "secret")
    env = {"BY_PROFILE": "yes", "BY_LAUNCH": "profile"}
    model, profile = a_model(env=env)
    await try_out(write(f"env >> {tmp_path}/env", version(), helping()), model=model, profile=profile)
    words = (tmp_path / "env").read_text().splitlines()
    for word in ("BY_DEFAULT=yes", "BY_PROBE=yes", "BY_PROFILE=yes", "BY_LAUNCH=profile", f"LLMGW_SHARD={MARKER}"):
        assert words.count(word) == 2
    assert not [word for word in words if word.startswith(("SCRIPT_", "LLMGW_API"))]


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (b"#!/nowhere/python\n", 0o755, "the interpreter /nowhere/python, which its first line names, is not there"),
        (b"#!/bin/sh\n", 0o644, "Permission denied"),
        (
            b"\x7fELF\x02\x01\x01" + b"\0" * 11 + b"\x15\0\1\0\0\0" + b"\0" * 40,
            0o755,
            "wrong CPU architecture: it is built for ppc64",
        ),
    ],
)
async def test_what_can_not_be_executed_is_broken(tmp_path, content, mode, reason):
    path = tmp_path / "engine"
    path.write_bytes(content)
    path.chmod(mode)
    found = await try_out((str(path),))
    assert found.broken.startswith(f"it can't be executed: {reason}")
    assert found.remedy
    assert (found.version, found.findings, found.undecided) == (None, (), False)


async def test_a_program_that_is_not_there_is_broken():
    assert (await try_out(("/nowhere/x",))).broken == "it can't be executed: No such file or directory"


@pytest.fixture
def being_written(tmp_path):
    """A binary that somebody has open, as an installer has."""
    path = tmp_path / "engine"
    shutil.copy("/bin/true", path)
    with path.open("ab"):
        yield (str(path),)


async def test_a_program_that_is_being_written_is_tried_again(being_written):
    found = await try_out(being_written)
    assert (found.broken, found.undecided) == (None, True)
    assert found.problems == ("it can't be executed: Text file busy",)


async def test_an_exit_is_told_with_the_line_that_names_its_cause(write):
    lines = ("echo loading", "echo CUDA driver version is insufficient for CUDA runtime version >&2", "echo bye")
    found = await try_out(write(version("; ".join((*lines, "exit 3")))))
    assert found.broken == "CUDA driver version is insufficient for CUDA runtime version (exit code 3 of --version)"
    assert "nvidia-smi" in found.remedy


async def test_an_exit_that_no_line_explains_is_told_with_the_last_one(write):
    found = await try_out(write(version("echo; echo first; echo odd: 17; exit 3")))
    assert found.broken == "ended by itself with exit code 3 (run with --version): odd: 17"
    assert (await try_out(write("exit 3"))).broken == "ended by itself with exit code 3 (run with --version)"


async def test_a_signal_is_told_with_what_it_means(write):
    found = await try_out(write("kill -ILL $$"))
    assert found.broken.startswith("killed by SIGILL: the binary uses instructions that this CPU does not have")
    assert "build for this CPU" in found.remedy


async def test_a_program_that_is_killed_when_asked_for_its_version_is_not_short_of_memory(write):
    found = await try_out(write("kill -KILL $$"))
    assert found.broken == "killed by SIGKILL (run with --version)"
    assert found.remedy == "run it with --version by hand: it is ended by itself, or by a limit that llmgw runs under"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [("kill -SEGV $$", "install a build for this machine"), ("exit 3", "run it with --version by hand")],
)
async def test_an_exit_that_nothing_explains_brings_what_to_do(write, text, remedy):
    assert remedy in (await try_out(write(text))).remedy


async def test_nothing_that_is_told_holds_a_value_of_the_environment(write, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "inherited-sekret")
    model, profile = a_model(env={"MY_MODE": "sekret-value"})

    async def told(*lines):
        return await try_out(write(*lines), model=model, profile=profile)

    assert (await told("echo bad token $MY_MODE; exit 3")).broken.endswith("(run with --version): bad token ***")
    assert (await told("echo Hello $MY_MODE $HF_TOKEN")).broken == "no version is in what it printed: Hello *** ***"
    cause = "echo CUDA driver version is insufficient, $HF_TOKEN; exit 3"
    assert (await told(cause)).broken == "CUDA driver version is insufficient, *** (exit code 3 of --version)"
    # Where it is cut nothing of it is left.
    padding = "x" * 290
    assert "sekret" not in (await told(f"echo {padding}$MY_MODE; exit 3")).broken
    library = "echo error while loading shared libraries: lib$MY_MODE.so.1: cannot open shared object file; exit 127"
    found = await told(library)
    assert "sekret" not in repr((found.broken, found.remedy, found.missing_libraries))


async def test_equal_environments_are_tried_once(write, tmp_path):
    program = write(f"echo >>{tmp_path}/ran", version(), helping())
    runs = []
    for env in ({}, {}, {"A": "1"}, {"A": "1"}):
        model, profile = a_model(env=env)
        found = await try_out(program, model=model, profile=profile, runs=runs)
        assert (found.version.number, found.broken) == ("1.2", None)
    # two commands each
    assert len((tmp_path / "ran").read_text()) == 4


async def test_missing_libraries_are_named_with_what_to_install(write):
    text = "libgomp.so.1: cannot open shared object file: No such file or directory"
    found = await try_out(write(f"echo 'engine: error while loading shared libraries: {text}' >&2", "exit 127"))
    assert found.missing_libraries == ("libgomp.so.1",)
    assert found.broken == "the shared library libgomp.so.1 is missing"
    assert found.remedy == "on Debian and Ubuntu: apt install libgomp1"


async def test_a_library_that_only_the_help_needs_breaks_all_the_same(write):
    text = "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"
    found = await try_out(write(version(), helping(f"echo '{text}' >&2; exit 1")))
    assert (found.version.number, found.missing_libraries) == ("1.2", ("libcuda.so.1",))
    assert found.broken == "the shared library libcuda.so.1 is missing"
    assert "NVIDIA driver" in found.remedy


async def test_a_program_that_prints_no_version_is_another_one(write):
    found = await try_out(write("echo GNU hello", "echo by somebody"))
    assert found.broken == "no version is in what it printed: GNU hello"
    assert "script" in found.remedy
    assert (await try_out(write())).broken == "no version is in what it printed: nothing"


async def test_a_program_that_takes_too_long_is_not_broken(write):
    found = await try_out(write("exec sleep 600"), Plugin(seconds=0.1))
    assert (found.version, found.broken, found.undecided) == (None, None, True)
    assert found.problems == ("--version took longer than 0.1 s: not all of it is checked",)
    assert {each.state for each in found.findings} == {FlagState.UNCHECKED}


async def test_a_help_that_takes_too_long_leaves_the_version(write):
    found = await try_out(write(version(), helping("exec sleep 600")), Plugin(seconds=5))
    assert (found.version.number, found.broken, found.undecided) == ("1.2", None, True)


async def test_a_help_that_is_called_otherwise_breaks_nothing(write):
    text = "error: unrecognized arguments: --help"
    found = await try_out(write(version(), helping(f"echo {text} >&2; exit 2")))
    assert (found.version.number, found.broken) == ("1.2", None)
    assert found.problems == (f"{text} (exit code 2 of --help)",)
    assert {each.state for each in found.findings} == {FlagState.UNCHECKED}


async def test_a_version_that_nobody_may_ask_for_breaks_it(write):
    text = "error: unrecognized arguments: --version"
    assert (await try_out(write(f"echo {text}; exit 2"))).broken == f"{text} (exit code 2 of --version)"


async def test_a_program_that_prints_without_end_is_told_of(write):
    found = await try_out(write(version(), helping("exec yes")), Plugin(seconds=5))
    assert found.problems == ("--help printed more than can be read: its flags are not checked",)
    assert found.broken is None


async def test_a_flag_of_ours_that_it_does_not_know_breaks_it(write):
    found = await try_out(write(version(), helping("printf '  --model PATH\\n  --ports N\\n'")))
    assert found.broken == "llmgw passes --port: did you mean --ports?"
    assert found.problems == (found.broken,)
    assert found.remedy
    assert found.version.number == "1.2"


async def test_a_flag_of_the_profile_that_it_does_not_know_is_a_problem_only(write):
    model, profile = a_model(args=("--dtype", "hal", "--gone"))
    found = await try_out(write(version(), helping()), model=model, profile=profile)
    assert found.broken is None
    assert found.problems == (
        "the profile passes --dtype: 'hal' is none of auto, half; did you mean half?",
        "the profile passes --gone: unknown",
    )


async def test_what_the_plugin_says_of_this_version_is_a_problem(write):
    program = write(version(), helping("printf '  --model P\\n  --port N\\n  --new\\n'"))
    model, profile = a_model(args=("--new",))
    found = await try_out(program, model=model, profile=profile)
    assert (found.broken, found.problems) == (None, ("args: --new is not in 1.2",))


async def test_a_model_alone_is_tried_by_its_own_profile(write):
    model, _ = a_model(args=("--gone",))
    other = replace(model.profiles[0], name="q", engine="other", args=())
    found = await try_out(write(version(), helping()), model=replace(model, profiles=(other, *model.profiles)))
    assert found.problems == ("the profile passes --gone: unknown",)


async def test_an_engine_without_a_probe_is_not_tried(write, tmp_path):
    class Silent(Plugin):
        @hookimpl
        def engine_build_probe(self):
            return None

    found = await try_out(write(f"touch {tmp_path}/asked"), Silent())
    assert (found.version, found.broken, found.problems) == (None, None, ())
    assert not (tmp_path / "asked").exists()


async def test_a_plugin_that_builds_no_command_can_launch_nothing(write):
    class Empty(Plugin):
        @hookimpl
        def engine_build_command(self):
            return None

    assert "built no command" in (await try_out(write(version()), Empty())).broken


@pytest.mark.parametrize("answer", [[].pop, lambda: 5], ids=["raised", "rubbish"])
async def test_a_plugin_at_fault_is_named_and_not_the_program(write, answer):
    class Reader(Plugin):
        @hookimpl
        def engine_read_probe(self):
            return answer()

    class Asker(Plugin):
        @hookimpl
        def engine_build_probe(self):
            return answer()

    class Checker(Plugin):
        @hookimpl
        def engine_validate(self):
            return answer()

    program = write(version(), helping())
    found = await try_out(program, Reader())
    assert found.broken.startswith("engine_read_probe of its plugin is at fault: it r")
    assert "the program is not to blame" in found.remedy
    for plugin, hook in ((Asker(), "engine_build_probe"), (Checker(), "engine_validate")):
        found = await try_out(program, plugin)
        assert found.broken is None
        assert found.problems[0].startswith(f"{hook} of its plugin is at fault: it r")
