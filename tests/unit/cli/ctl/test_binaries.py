"""A plugin and a program that are made for it, tried as a real one is."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmgw.host.process import is_killed, read_stat

PATIENCE_SECONDS = 60

PLUGIN = """
from llmgw.engines import (
    READY, Command, EngineInfo, FlagChange, Problem, SourceKind, Version, hookimpl, read_argparse_help,
)

@hookimpl
def engine_describe():
    return EngineInfo(
        title="Toy", default_binary="toy", sources=frozenset({SourceKind.FILE}), file_suffixes=(".toy",),
        flag_changes=(FlagChange(flag="--ctx", gone_in="2.0", instead="--context"),),
    )

@hookimpl
def engine_build_command(launch):
    env = {"TOY_HOME": "/srv/toy"}
    return Command(argv=(*launch.program, "--model", launch.source, "--port", str(launch.port), *launch.args), env=env)

@hookimpl
def engine_build_probe(program):
    return Command(argv=(*program, "--version")), Command(argv=(*program, "--help"))

@hookimpl
def engine_read_probe(output, outputs):
    if output.code:
        return None
    return Version(number=output.stdout.strip(), flags=read_argparse_help(outputs[-1].stdout))

@hookimpl
def engine_validate(model, profile, version):
    if "--never" in profile.args:
        return [Problem(key="args", message="--never is for nobody")]
    if version is not None and "--context" in profile.args:
        return [Problem(key="args", message=f"--context is too large for {version.number}")]
    return []

@hookimpl
def engine_read_health(status, body):
    return READY
"""
POINTS = "toy = toy_engine_of_a_test\nother = toy_engine_of_a_test\nhalf = half_an_engine\n"
HELP = """
  --model MODEL   what to load
  --port PORT     where to listen
  --context N     how much
  --old           deprecated: it does nothing
  --kind {a,b}    which kind
"""
SAYS = f'case "$1" in --version) echo 2.1;; *) cat <<EOF\n{HELP}EOF\nesac'

Make = Callable[..., Path]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that Python looks for packages in, with the plugin installed, and one that can't be imported."""
    folder = tmp_path / "site"
    installed = folder / "toy_engine-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[llmgw.engines]\n" + POINTS)
    (folder / "toy_engine_of_a_test.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("toy_engine_of_a_test", None)


@pytest.fixture
def program(tmp_path: Path) -> Make:
    def make(text: str = SAYS, name: str = "toy") -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def definition(tmp_path: Path) -> Make:
    """A file with one model, whose profiles are these lines."""

    def make(*profiles: str) -> Path:
        path = tmp_path / "m.yaml"
        lines = "".join(f"- {{name: p{number}, {profile}}}\n" for number, profile in enumerate(profiles))
        path.write_text(f"name: m\nsource: /srv/m.toy\nprofiles:\n{lines}")
        return path

    return make


pytestmark = pytest.mark.usefixtures("site")


def test_a_binary_is_held_against_what_llmgw_would_pass(ctl: Any, program: Make) -> None:
    path = program()
    ended = ctl("engine-check", "toy", "--bin", str(path))
    assert ended.status == 0
    assert ended.out == (
        f"toy 2.1 at {path}\n"
        "\n"
        "FLAG     GIVEN BY  STATE  DETAIL\n"
        "--model  llmgw     ok\n"
        "--port   llmgw     ok\n"
        "\n"
        "a launch would work\n"
    )


def test_a_profile_adds_its_own_and_those_of_other_engines_are_skipped(
    ctl: Any, program: Make, definition: Make
) -> None:
    path = program()
    file = definition("engine: llamacpp", "engine: toy, args: [--old, --kind, c, --ctx, 1, --portt, 2]")
    ended = ctl("engine-check", "toy", "--bin", str(path), "--profile", str(file))
    assert ended.status == 1
    assert ended.out == (
        f"toy 2.1 at {path}\n"
        "\n"
        f"profile p1 of m ({file}:5:3):\n"
        "\n"
        "FLAG     GIVEN BY  STATE        DETAIL\n"
        "--model  llmgw     ok\n"
        "--port   llmgw     ok\n"
        "--old    profile   deprecated   deprecated: it does nothing\n"
        "--kind   profile   wrong value  'c' is none of a, b\n"
        "--ctx    profile   renamed      this release calls it --context\n"
        "--portt  profile   unknown      did you mean --port?\n"
        "\n"
        "skipped: profile p0 of m is for llamacpp\n"
        "\n"
        "a launch would fail over --kind, --ctx, --portt\n"
    )


def test_what_is_on_its_way_out_breaks_nothing_yet(ctl: Any, program: Make, definition: Make) -> None:
    file = definition("engine: toy, args: [--old]")
    ended = ctl("engine-check", "toy", "--bin", str(program()), "--profile", str(file))
    assert ended.status == 0
    assert ended.out.splitlines()[-1] == "a launch would work; a later release may not take --old"


def test_all_profiles_of_the_engine_are_checked_and_one_that_fails_fails_the_whole(
    ctl: Any, program: Make, definition: Make
) -> None:
    file = definition("engine: toy", "engine: toy, args: [--nothing]")
    ended = ctl("engine-check", "toy", "--bin", str(program()), "--profile", str(file), "--json")
    assert ended.status == 1
    told = json.loads(ended.out)
    assert [(check["profile"], check["works"], check["starts"]) for check in told["checks"]] == [
        ("p0", True, True),
        ("p1", False, True),
    ]
    assert (told["works"], told["starts"]) == (False, True)
    assert told["checks"][1]["flags"][-1] == {"flag": "--nothing", "given_by": "profile", "state": "unknown"}


def test_json_has_everything_under_names_that_stay(ctl: Any, program: Make, definition: Make) -> None:
    path, file = program(), definition("engine: toy, args: [--old]", "engine: other")
    told = json.loads(ctl("engine-check", "toy", "--bin", str(path), "--profile", str(file), "--json").out)
    flags = [
        {"flag": "--model", "given_by": "llmgw", "state": "ok"},
        {"flag": "--port", "given_by": "llmgw", "state": "ok"},
        {"flag": "--old", "given_by": "profile", "state": "deprecated", "detail": "deprecated: it does nothing"},
    ]
    facts = {"works": True, "fails": False, "starts": True, "missing_libraries": [], "problems": []}
    assert told == {
        "engine": "toy",
        "program": [str(path)],
        "version": "2.1",
        **facts,
        "checks": [{"model": "m", "profile": "p0", "where": f"{file}:4:3", **facts, "flags": flags}],
        "skipped": [{"model": "m", "profile": "p1", "engine": "other"}],
    }


def test_a_binary_that_can_not_start_is_told_apart_from_one_that_knows_a_flag_not(ctl: Any, program: Make) -> None:
    path = program('echo "toy: error while loading shared libraries: libtoy.so.3: cannot open" >&2; exit 127')
    ended = ctl("engine-check", "toy", "--bin", str(path))
    assert ended.status == 1
    assert "it can't start: " in ended.out
    assert "libtoy.so.3" in ended.out
    assert "GIVEN BY" not in ended.out
    assert ended.out.splitlines()[-1] == "a launch would fail: the binary can't start, whatever its flags"
    told = json.loads(ctl("engine-check", "toy", "--bin", str(path), "--json").out)
    assert (told["works"], told["starts"], told["checks"][0]["flags"]) == (False, False, [])
    assert "libtoy.so.3" in told["broken"]


def test_a_flag_of_llmgws_own_that_it_does_not_know_is_no_failure_to_start(ctl: Any, program: Make) -> None:
    path = program('[ "$1" = --version ] && echo 3.0 || echo "  --model MODEL  what to load"')
    told = json.loads(ctl("engine-check", "toy", "--bin", str(path), "--json").out)
    assert (told["works"], told["starts"], told.get("broken")) == (False, True, None)
    ended = ctl("engine-check", "toy", "--bin", str(path))
    assert ended.out.splitlines()[-1] == "a launch would fail over --port"
    assert sum("--port" in line for line in ended.out.splitlines()) == 2
    assert "what to do: " in ended.out


def test_a_help_that_tells_nothing_leaves_the_flags_unchecked(ctl: Any, program: Make) -> None:
    ended = ctl("engine-check", "toy", "--bin", str(program('if [ "$1" = --version ]; then echo 1.0; fi')))
    assert "--port   llmgw     unchecked" in ended.out
    assert ended.out.splitlines()[-1] == "nothing is known against a launch, but no flag could be checked"
    assert ended.status == 0


@pytest.mark.slow
@pytest.mark.parametrize("text", ["exec sleep 600", "exec yes"])
def test_a_program_that_never_said_its_version_is_not_known_to_work(
    ctl: Any, program: Make, site: Path, text: str
) -> None:
    plugin = site / "toy_engine_of_a_test.py"
    plugin.write_text(PLUGIN.replace('title="Toy"', 'title="Toy", probe_seconds=0.5'))
    path = program(text)
    ended = ctl("engine-check", "toy", "--bin", str(path))
    assert ended.status == 1
    last = "it is not known whether a launch would work: the binary has not said which release it is"
    assert ended.out.splitlines()[-1] == last
    told = json.loads(ctl("engine-check", "toy", "--bin", str(path), "--json").out)
    assert (told["works"], told["fails"], told["starts"]) == (False, False, True)


def test_a_secret_of_the_profile_is_not_shown(
    ctl: Any, program: Make, definition: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "sekret-inherited")
    file = definition("engine: toy, env: {MY_MODE: sekret-of-the-profile}")
    for text in ("echo bad token $MY_MODE $HF_TOKEN; exit 1", "echo 2.1-$MY_MODE"):
        for more in ((), ("--json",)):
            ended = ctl("engine-check", "toy", "--bin", str(program(text)), "--profile", str(file), *more)
            assert "***" in ended.out
            assert "sekret" not in ended.out + ended.err


def test_profiles_of_equal_environments_are_tried_once_and_more_than_one_is_told(
    ctl: Any, program: Make, definition: Make, tmp_path: Path
) -> None:
    path = program(f"echo >>{tmp_path}/ran; {SAYS}")
    file = definition("engine: toy", "engine: toy, args: [--old]", "engine: toy, env: {A: b}")
    ended = ctl("engine-check", "toy", "--bin", str(path), "--profile", str(file))
    assert ended.status == 0
    # the version and the help, in two environments
    assert len((tmp_path / "ran").read_text()) == 4
    assert f"reading the version and the help of {path}" in ended.err
    assert "3 profiles" in ended.err


def test_what_the_plugin_refuses_of_this_version_is_told_with_its_place(
    ctl: Any, program: Make, definition: Make
) -> None:
    file = definition("engine: toy, args: [--context, 9]")
    ended = ctl("engine-check", "toy", "--bin", str(program()), "--profile", str(file))
    assert ended.status == 1
    assert f"{file}:4:27 m: profiles[0].args: --context is too large for 2.1\n" in ended.out
    assert ended.out.count("too large") == 1
    assert ended.out.splitlines()[-1] == "a launch would fail: see above"


def test_it_runs_in_the_environment_of_a_launch(
    ctl: Any, program: Make, definition: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMGW_API_KEYS", "sk-secret")
    path = program(f'[ "$1" = --version ] && echo "$TOY_HOME-$TOY_KIND-$LLMGW_API_KEYS"\n{SAYS}')
    file = definition("engine: toy, env: {TOY_KIND: b}")
    told = json.loads(ctl("engine-check", "toy", "--bin", str(path), "--profile", str(file), "--json").out)
    assert told["version"].startswith("/srv/toy-b-\n")


@pytest.mark.slow
def test_a_person_is_told_what_is_waited_for(site: Path, program: Make) -> None:
    path = program()
    ours, theirs = pty.openpty()
    try:
        words = [sys.executable, "-m", "llmgw", "ctl", "engine-check", "toy", "--bin", str(path)]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=theirs, env=environment, timeout=PATIENCE_SECONDS, check=True
        )
        assert os.read(ours, 4096).startswith(f"reading the version and the help of {path} (each within".encode())
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.stdout.startswith(b"toy 2.1 at ")


# What can't be begun


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "nothing", "is not there; give the path of the engine's program"),
        (lambda folder: folder, "is a folder; give the program in it"),
        (lambda folder: folder / "plain", "may not be executed; `chmod +x` it, or give the program itself"),
        (lambda folder: "no-such-program-anywhere", "no-such-program-anywhere: there is no such program on PATH"),
    ],
    ids=["missing", "folder", "not executable", "bare name"],
)
def test_a_path_that_is_no_program_is_told_with_what_to_do(
    ctl: Any, tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    (tmp_path / "plain").write_text("no program")
    ended = ctl("engine-check", "toy", "--bin", str(make(tmp_path)))
    assert (ended.status, ended.out) == (2, "")
    assert said in ended.err


def test_a_path_that_is_no_text_is_refused(ctl: Any, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"toy-\xff")
    path.write_text(SAYS)
    path.chmod(0o755)
    ended = ctl("engine-check", "toy", "--bin", str(path))
    assert (ended.status, ended.out) == (2, "")
    assert "is not UTF-8; give the program a path that is" in ended.err


def test_a_bare_name_is_found_where_the_agent_would_find_it(
    ctl: Any, program: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program(name="toy-of-a-test")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert ctl("engine-check", "toy", "--bin", "toy-of-a-test").out.startswith(f"toy 2.1 at {path}\n")


def test_an_engine_that_nobody_installed_is_told_with_those_that_are(ctl: Any, program: Make) -> None:
    ended = ctl("engine-check", "nothing-like-it", "--bin", str(program()))
    assert (ended.status, ended.out) == (2, "")
    assert "no engine 'nothing-like-it' is installed; there is " in ended.err
    assert "toy" in ended.err


def test_a_plugin_that_can_not_be_loaded_is_told_with_its_reason(ctl: Any, program: Make) -> None:
    ended = ctl("engine-check", "half", "--bin", str(program()))
    assert ended.status == 2
    assert "no engine 'half' is installed" in ended.err
    assert "half_an_engine" in ended.err


def test_a_folder_of_plugins_that_can_not_be_read_is_told_whether_or_not_the_engine_is_there(
    ctl: Any, program: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMGW_PLUGINS", "/nowhere/plugins")
    for name, status in (("parrot", 2), ("toy", 0)):
        ended = ctl("engine-check", name, "--bin", str(program()))
        assert ended.status == status
        assert ended.err.count("LLMGW_PLUGINS: /nowhere/plugins can't be read") == 1
        # why another plugin is left out matters to whoever misses one
        assert ("half_an_engine" in ended.err) == (status == 2)


def test_nothing_of_a_definition_reaches_the_terminal_as_it_is(ctl: Any, program: Make, tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text('name: "m\\e[31m"\nsource: /m.toy\nprofiles: [{name: p, engine: toy, "\\e[2J": 1}]\n')
    ended = ctl("engine-check", "toy", "--bin", str(program()), "--profile", str(file))
    assert ended.status == 2
    assert "\x1b" not in ended.err
    assert "\\x1b[2J: unknown key" in ended.err


def test_a_definition_that_is_wrong_is_told_with_every_place(ctl: Any, program: Make, definition: Make) -> None:
    file = definition("engine: toy, argz: []", "engine: toy, args: [--never]")
    ended = ctl("engine-check", "toy", "--bin", str(program()), "--profile", str(file))
    assert (ended.status, ended.out) == (2, "")
    assert f"{file}:4:27 profiles[0].argz: unknown key (args?)" in ended.err


def test_what_the_plugin_refuses_in_any_version_is_told_before_anything_runs(
    ctl: Any, program: Make, definition: Make, tmp_path: Path
) -> None:
    path = program(f"touch {tmp_path}/ran")
    ended = ctl("engine-check", "toy", "--bin", str(path), "--profile", str(definition("engine: toy, args: [--never]")))
    assert (ended.status, ended.out) == (2, "")
    assert "m.yaml:4:27 m: profiles[0].args: --never is for nobody" in ended.err
    assert not (tmp_path / "ran").exists()


def test_a_definition_without_a_profile_for_the_engine_is_refused(ctl: Any, program: Make, definition: Make) -> None:
    file = definition("engine: other", "engine: llamacpp")
    ended = ctl("engine-check", "toy", "--bin", str(program()), "--profile", str(file))
    assert (ended.status, ended.out) == (2, "")
    assert f"{file} has no profile for toy: it has some for llamacpp, other" in ended.err


def test_a_definition_that_is_not_there_is_told(ctl: Any, program: Make, tmp_path: Path) -> None:
    ended = ctl("engine-check", "toy", "--bin", str(program()), "--profile", str(tmp_path / "none.yaml"))
    assert (ended.status, ended.out) == (2, "")
    assert "none.yaml" in ended.err


# The end


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_whoever_stops_it_stops_what_it_has_started(
    site: Path, program: Make, tmp_path: Path, stop: signal.Signals
) -> None:
    pid_file = tmp_path / "pid"
    path = program(f"echo $$ >{tmp_path}/pid.new; mv {tmp_path}/pid.new {pid_file}; exec sleep 600")
    checking = subprocess.Popen(
        [sys.executable, "-m", "llmgw", "ctl", "engine-check", "toy", "--bin", str(path)],
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    until = time.monotonic() + PATIENCE_SECONDS
    while not pid_file.exists():
        assert checking.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    pid = int(pid_file.read_text())
    checking.send_signal(stop)
    out, err = checking.communicate(timeout=PATIENCE_SECONDS)
    assert (checking.returncode, out, err) == (130, b"", b"")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_a_program_that_hangs_does_not_outlive_a_check_that_is_killed(
    site: Path, program: Make, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    path = program(f"echo $$ >{tmp_path}/pid.new; mv {tmp_path}/pid.new {pid_file}; exec sleep 600")
    words = [sys.executable, "-m", "llmgw", "ctl", "engine-check", "toy", "--bin", str(path)]
    checking = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(site)}, stderr=subprocess.DEVNULL)
    until = time.monotonic() + PATIENCE_SECONDS
    while not pid_file.exists():
        assert checking.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    pid = int(pid_file.read_text())
    checking.kill()
    checking.wait(PATIENCE_SECONDS)
    while read_stat(pid) is not None and not is_killed(pid):
        assert time.monotonic() < until
        time.sleep(0.02)
