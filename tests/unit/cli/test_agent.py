from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from llmgw.cli.agent import command, serve, stop_all
from llmgw.config.agent import AgentConfig
from llmgw.core.effects import Desire
from llmgw.core.model import Model, ModelName, Profile
from llmgw.core.node import NodeId
from llmgw.core.replica import ReplicaId, ShardId, ShardSpec
from llmgw.engines.registry import Engine
from llmgw.errors import ConfigError, UsageError
from llmgw.host.process import read_boot_id
from llmgw.host.state import ShardRecord, StateFolder

PROFILE = Profile(name="p", engine="toy")
SPEC = ShardSpec(
    id=ShardId("shd-m-1-0"),
    replica=ReplicaId("rep-m-1"),
    epoch=1,
    node=NodeId("n1"),
    model=Model(name=ModelName("m"), source="/m.toy", profiles=(PROFILE,)),
    profile=PROFILE,
)


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "state")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An agent.yaml, and a state folder that is not there yet; of the certificate there is nothing."""
    path = tmp_path / "agent.yaml"
    files = ", ".join(f"{key}: {tmp_path}/{key}.pem" for key in ("ca", "cert", "key"))
    path.write_text(f"node: n1\nserver: https://ctl:7443\nstate: {tmp_path}/state\ntls: {{{files}}}\n")
    return path


def make_certificate(path: Path) -> None:
    for name in ("ca.pem", "cert.pem", "key.pem"):
        path.with_name(name).write_text("pem\n")
        path.with_name(name).chmod(0o600)


def test_what_was_read_is_handed_over(path: Path, engines: dict[str, Engine]) -> None:
    make_certificate(path)
    ran: list[AgentConfig] = []
    serve(config=path, environ={}, engines=engines, run=ran.append)
    serve(config=None, environ={"LLMGW_CONFIG": str(path)}, engines=engines, run=ran.append)
    assert ran[0] == ran[1]
    assert (ran[0].node, ran[0].server.host) == ("n1", "ctl")


def test_a_file_that_is_wrong_starts_nothing(path: Path, engines: dict[str, Engine]) -> None:
    ran: list[AgentConfig] = []
    with pytest.raises(ConfigError, match=r"tls\.ca: .*can't be read(.|\n)*tls\.key: "):
        serve(config=path, environ={}, engines=engines, run=ran.append)
    assert ran == []


def test_engines_are_stopped_without_any_certificate(
    path: Path, engines: dict[str, Engine], state: StateFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    assert stop_all(config=path, environ={}, engines=engines, force=False)
    assert capfd.readouterr().out == f"nothing runs here: there is no state folder {state.path}\n"


def test_what_the_server_wants_is_stopped_by_force_alone(
    path: Path, engines: dict[str, Engine], state: StateFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    state.make()
    state.write_desired(Desire(node=NodeId("n1"), revision=1, shards=(SPEC,)))
    state.write(
        ShardRecord(
            spec=SPEC,
            pid=os.getpid(),
            start_time=0,
            boot_id=read_boot_id(),
            argv_hash="a",
            port=18000,
            log="/l",
            marker=state.marker(SPEC),
        )
    )
    with pytest.raises(UsageError, match=r"shd-m-1-0 \(model m\)"):
        stop_all(config=path, environ={}, engines=engines, force=False)
    assert stop_all(config=path, environ={}, engines=engines, force=True)
    assert capfd.readouterr().out.splitlines() == [
        "shd-m-1-0: had ended before",
        "the server still wants m here: the next agent of this node starts them again",
    ]


def llmgw(*words: str) -> subprocess.CompletedProcess[str]:
    """As a program of its own, for it starts a log."""
    return subprocess.run(
        [sys.executable, "-m", "llmgw", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "LLMGW_CONFIG": ""},
    )


@pytest.mark.slow
def test_the_file_may_be_named_before_and_after_the_word(path: Path, state: StateFolder) -> None:
    state.make()
    for words in (("stop-all", "--config", str(path)), ("--config", str(path), "stop-all")):
        done = llmgw("agent", *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"nothing runs here: there is no engine of {state.path}\n"


@pytest.mark.slow
def test_a_refusal_is_the_operators_to_fix(path: Path, state: StateFolder) -> None:
    state.make()
    state.write_desired(Desire(node=NodeId("n1"), revision=1, shards=(SPEC,)))
    done = llmgw("agent", "stop-all", "--config", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("llmgw: the server wants engines on n1")


def test_an_unknown_word_is_refused() -> None:
    assert isinstance(command, click.Group)
    done = CliRunner().invoke(command, ["stop-al"])
    assert done.exit_code == 2
    assert "stop-al" in done.output


@pytest.mark.slow
def test_a_stdout_that_takes_nothing_is_no_reason_to_let_engines_run(path: Path) -> None:
    line = f"exec {sys.executable} -m llmgw agent stop-all --config {path} >/dev/full"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
