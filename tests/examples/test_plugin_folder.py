"""The example of an engine plugin in a folder of LLMGW_PLUGINS, installed and used as its README says, by processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.running import Llmgw, Program, free_port, wait_for
from lab.wire import CHAT, Wire, chat, get, post

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "engine-plugin"
HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example is installed into."""
    folder = tmp_path_factory.mktemp("parrot")
    # A copy, for what a build leaves behind.
    shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns(".*", "__pycache__"))
    alone = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip", "install", *alone, "--target", str(folder / "plugins"), str(folder / "source"))
    done = subprocess.run(pip, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "plugins"


@pytest.fixture
def plugins(installed: Path, tmp_path: Path) -> Path:
    """A folder of the test's own, with the example in it."""
    return shutil.copytree(installed, tmp_path / "plugins")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "polly.parrot"
    path.write_text("Ahoy!\n")
    return path


@pytest.fixture
def serve(tmp_path: Path, plugins: Path) -> Iterator[Callable[..., Llmgw]]:
    """``llmgw serve``, told of the folder; what is left of it in the end is killed."""
    made: list[Llmgw] = []

    def serve(given: Path, **node: Any) -> Llmgw:
        llmgw = Llmgw(tmp_path / "served", "serve", str(given), **node)
        llmgw.words = ["env", f"LLMGW_PLUGINS={plugins}", *llmgw.words]
        made.append(llmgw)
        return llmgw.start()

    yield serve
    for llmgw in made:
        llmgw.clean()


@pytest.fixture
def ctl(plugins: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def ctl(*words: str) -> subprocess.CompletedProcess[str]:
        hidden = ("LLMGW_", "OPENAI_", "PYTHONPATH")
        environ = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
        return subprocess.run(
            [sys.executable, "-m", "llmgw", "ctl", *words],
            env={**environ, "LLMGW_PLUGINS": str(plugins)},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )

    return ctl


@pytest.fixture
def parrot(tmp_path: Path, plugins: Path, weights: Path) -> Iterator[Callable[..., str]]:
    """``parrot-server`` by itself, of nobody's llmgw; its address."""
    made: list[Program] = []

    def parrot(*args: str) -> str:
        port = free_port()
        program = Program(tmp_path / f"parrot{len(made)}")
        own = ("--weights", str(weights), "--name", "polly", "--port", str(port))
        program.words = ["env", f"PYTHONPATH={plugins}", sys.executable, "-m", "parrot_server", *own, *args]
        made.append(program)
        program.start()

        # It listens by then.
        program.wait_said("loading the greeting", where=lambda: program.out)

        def is_ready() -> bool:
            with Wire(("127.0.0.1", port)) as wire:
                wire.send(get("/health", "Connection: close"))
                return wire.read_to_end().startswith(b"HTTP/1.1 200")

        wait_for(is_ready, "parrot-server")
        return f"http://127.0.0.1:{port}/v1"

    yield parrot
    for program in made:
        program.clean()


def check_speaks(llmgw: Llmgw) -> None:
    """Whole and streamed, with all that it was told."""
    whole = llmgw.ask(post(CHAT, chat(model="polly", messages=HELLO)))
    assert whole.json["choices"][0]["message"]["content"] == "Ahoy! hello there"
    streamed = llmgw.ask(post(CHAT, chat(model="polly", messages=HELLO, stream=True)))
    assert streamed.status == 200
    assert streamed.events[-1] == b"[DONE]"
    said = b"".join(streamed.events)
    assert all(word in said for word in (b"Ahoy!", b" hello", b" there"))


def define(folder: Path, weights: Path, *args: str) -> Path:
    path = folder / "polly.yaml"
    profile = {"name": "p", "engine": "parrot", "args": list(args)}
    path.write_text(yaml.safe_dump({"name": "polly", "source": str(weights), "profiles": [profile]}, sort_keys=False))
    return path


def test_a_file_of_its_kind_is_served_by_the_program_that_came_with_it(
    serve: Callable[..., Llmgw], weights: Path
) -> None:
    llmgw = serve(weights).wait_ready()
    assert [row["id"] for row in llmgw.ask(get("/v1/models")).json["data"]] == ["polly"]
    check_speaks(llmgw)
    command = Path(f"/proc/{llmgw.engine.pid}/cmdline").read_bytes().decode().split("\0")
    assert command[1:3] == ["-m", "parrot_server"]
    tokens = wait_for(
        lambda: [line for line in llmgw.log.splitlines() if CHAT in line and " tokens=" in line], "the requests' lines"
    )
    assert "model=polly" in tokens[0]
    assert "engine parrot" not in llmgw.log
    assert llmgw.stop() == 0
    assert llmgw.engines() == []


def test_weights_that_vanish_are_named_by_the_engine_with_what_to_do(
    serve: Callable[..., Llmgw], weights: Path, plugins: Path, tmp_path: Path
) -> None:
    binary = tmp_path / "parrot-server"
    own = f"#!/bin/sh\n[ \"$1\" = --weights ] && rm -f '{weights}'\n"
    binary.write_text(f"{own}PYTHONPATH='{plugins}' exec '{sys.executable}' -m parrot_server \"$@\"\n")
    binary.chmod(0o755)
    llmgw = serve(define(tmp_path, weights), engines={"parrot": {"bin": str(binary)}})
    llmgw.wait_said("failure 1 in a row")
    line = next(line for line in llmgw.log.splitlines() if "failure 1 in a row" in line)
    assert f"rep-polly-1 ended on local: weights {weights}: No such file or directory" in line
    assert line.endswith("put the file there on this node, or mend the model's source")
    # Of the next try llmgw itself looks first.
    llmgw.wait_said("failure 2 in a row")
    line = next(line for line in llmgw.log.splitlines() if "failure 2 in a row" in line)
    assert f"source '{weights}' can't be read: No such file or directory" in line
    assert "put it there on this node" in line


def test_weights_that_are_not_there_are_refused_by_their_path(
    serve: Callable[..., Llmgw], weights: Path, tmp_path: Path
) -> None:
    weights.unlink()
    llmgw = serve(weights)
    assert llmgw.wait_ended() == 2
    assert f"{weights}: no such file" in llmgw.log
    llmgw = serve(define(tmp_path, weights))
    assert llmgw.wait_ended() == 2
    assert f"polly.yaml:2:1 polly: source: {weights} is no file on this machine" in " ".join(llmgw.log.split())


def test_a_plugin_that_is_broken_is_named_and_the_other_one_works(
    serve: Callable[..., Llmgw], ctl: Callable[..., Any], plugins: Path, weights: Path
) -> None:
    (plugins / "bad.py").write_text("raise RuntimeError('no beak')\n")
    llmgw = serve(weights).wait_ready()
    reason = f"plugin {plugins / 'bad.py'} can't be imported: RuntimeError: no beak"
    assert llmgw.log.count(f"engine bad: {reason}") == 1
    check_speaks(llmgw)
    assert llmgw.stop() == 0
    refused = ctl("engine-check", "bad", "--bin", str(plugins / "bin" / "parrot-server"))
    assert refused.returncode == 2
    assert "no engine 'bad' is installed" in refused.stderr
    assert reason in refused.stderr


def test_its_program_is_checked_where_it_was_installed(ctl: Callable[..., Any], plugins: Path) -> None:
    checked = ctl("engine-check", "parrot", "--bin", str(plugins / "bin" / "parrot-server"))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.startswith(f"parrot 1.0 at {plugins}/bin/parrot-server\n")
    states = {line.split()[0]: line.split()[2] for line in checked.stdout.splitlines() if line.startswith("--")}
    assert states == dict.fromkeys(("--weights", "--name", "--listen", "--port", "--context"), "ok")
    assert checked.stdout.endswith("a launch would work\n")


def test_its_program_is_served_where_it_was_installed(
    serve: Callable[..., Llmgw], plugins: Path, weights: Path
) -> None:
    binary = plugins / "bin" / "parrot-server"
    llmgw = serve(weights, engines={"parrot": {"bin": str(binary)}}).wait_ready()
    check_speaks(llmgw)
    assert str(binary) in Path(f"/proc/{llmgw.engine.pid}/cmdline").read_text()
    assert llmgw.stop() == 0


def test_a_flag_that_it_does_not_know_breaks_a_launch(
    ctl: Callable[..., Any], plugins: Path, weights: Path, tmp_path: Path
) -> None:
    profile = define(tmp_path, weights, "--sing")
    checked = ctl("engine-check", "parrot", "--bin", str(plugins / "bin" / "parrot-server"), "--profile", str(profile))
    assert (checked.returncode, checked.stderr) == (1, "")
    assert ["--sing", "profile", "unknown"] in [line.split()[:3] for line in checked.stdout.splitlines()]
    assert checked.stdout.endswith("a launch would fail over --sing\n")


def test_tool_calls_that_it_does_not_parse_are_told_from_those_that_it_does(
    ctl: Callable[..., Any], parrot: Callable[..., str]
) -> None:
    missed = ctl("tool-check", "--endpoint", parrot())
    assert (missed.returncode, missed.stderr) == (3, "")
    assert "parser missed: the model calls and the engine does not parse it" in missed.stdout
    assert missed.stdout.endswith("what to do: start Parrot with --parse-calls xml\n")
    works = ctl("tool-check", "--endpoint", parrot("--parse-calls", "xml"))
    assert (works.returncode, works.stderr) == (0, "")
    assert "works: tool calls work" in works.stdout
