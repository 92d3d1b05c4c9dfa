from __future__ import annotations

import json
import os
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from llmgw.cli.demo import CONTEXT_LENGTH, NAME, demo, stop_as_interrupt, welcome
from llmgw.config.node import NodeConfig
from llmgw.engines.registry import Engine
from llmgw.errors import UsageError


@pytest.fixture
def call(tmp_path: Path, engines: dict[str, Engine], ran: Any) -> Any:
    def demo_here(model: Path | None = None, **more: Any) -> None:
        def find(config: NodeConfig) -> Path:
            path = tmp_path / "found.gguf"
            path.write_bytes(b"GGUF")
            return path

        environ = {"HOME": str(tmp_path), "LLMGW_CONFIG": ""}
        more = {
            "ask": None,
            "config": None,
            "port": None,
            "environ": environ,
            "engines": engines,
            "find": find,
            "run": ran,
            **more,
        }
        demo(str(model) if model else None, **more)

    return demo_here


def test_the_demos_model_is_found_served_and_explained(
    call: Any, ran: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    call(port=8002)
    (model,) = ran.models
    assert (model.name, model.source, model.context_length) == (NAME, str(tmp_path / "found.gguf"), CONTEXT_LENGTH)
    assert ran.config.port == 8002
    said = capfd.readouterr().out
    assert f"{NAME} is ready at http://127.0.0.1:17434/v1" in said
    assert "Ctrl-C stops it." in said


def test_with_a_question_stdout_is_left_to_the_answer(call: Any, ran: Any, capfd: pytest.CaptureFixture[str]) -> None:
    call(ask="Why?")
    assert ran.ask == "Why?"
    assert capfd.readouterr().out == ""


def test_another_file_goes_by_its_own_name(call: Any, ran: Any, weights: Path) -> None:
    call(weights)
    (model,) = ran.models
    assert (model.name, model.source, model.context_length) == ("my-model-q4", str(weights), None)


def test_nothing_is_fetched_where_no_engine_could_run_it(
    call: Any, ran: Any, engines_without_program: dict[str, Engine]
) -> None:
    def find(config: NodeConfig) -> Path:
        raise AssertionError("fetched all the same")

    with pytest.raises(UsageError, match=r"pip install 'llmgw\[toy\]'"):
        call(engines=engines_without_program, find=find)
    assert ran.calls == 0


def test_a_stop_while_fetching_unwinds_like_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def stopped_while_it_waits() -> None:
        with stop_as_interrupt():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        stopped_while_it_waits()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_lines_to_paste_are_whole_for_a_shell() -> None:
    lines = [line.strip() for line in welcome("http://127.0.0.1:1/", "m").splitlines()]
    curl = shlex.split(next(line for line in lines if line.startswith("curl")))
    assert curl[:2] == ["curl", "http://127.0.0.1:1/v1/chat/completions"]
    assert json.loads(curl[curl.index("-d") + 1])["model"] == "m"
    python = shlex.split(next(line for line in lines if line.startswith("python3")))
    compile(python[2], "pasted", "exec")
    assert "http://127.0.0.1:1/v1" in python[2]


def test_a_definition_is_for_another_command(call: Any, ran: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("name: m\n")
    with pytest.raises(UsageError, match=r"--model takes a weights file, and .*m\.yaml is a definition: llmgw serve "):
        call(path)
    (tmp_path / "m.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"it is to be a \.gguf file or a \.toy file$"):
        call(tmp_path / "m.bin")
    assert ran.calls == 0
