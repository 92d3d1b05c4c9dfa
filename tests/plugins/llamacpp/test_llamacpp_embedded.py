"""The embedded program as a process, with a real model where one is installed."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import llmgw_llamacpp
from llmgw.engines import READY, HealthState, Launch
from llmgw.engines.registry import open_engine

pytestmark = pytest.mark.slow

PROGRAM = (sys.executable, "-m", "llmgw_llamacpp.embedded")
ENGINE = open_engine("llamacpp", llmgw_llamacpp)

# Only a hang takes as long.
PATIENCE_SECONDS = 60.0

needs_xllamacpp = pytest.mark.needs_module("xllamacpp", "pip install 'llmgw[demo]'")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((*PROGRAM, *args), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)


def cause_of(done: subprocess.CompletedProcess[str]) -> str | None:
    ended = (
        {"code": done.returncode, "signal": None}
        if done.returncode >= 0
        else {"code": None, "signal": -done.returncode}
    )
    cause = ENGINE.read_exit(done.stderr.splitlines(), **ended)
    return cause.line if cause is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An engine that was started, and the requests one may send it."""

    process: subprocess.Popen[bytes]
    port: int

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def wait_ready(self) -> list[HealthState]:
        """The states that were seen on the way."""
        seen = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the engine ended while it loaded"
            try:
                health = ENGINE.read_health(*self.ask("GET", "/health"))
            except OSError:
                time.sleep(0.01)
                continue
            seen.append(health.state)
            if health == READY:
                return seen
        raise AssertionError("not ready in time")

    def wait_running(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            load = ENGINE.read_load(self.ask("GET", "/metrics")[1])
            if load is not None and load.running == count:
                return
            time.sleep(0.02)
        raise AssertionError(f"never {count} requests at once")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)


@contextmanager
def started(weights: Path, *args: str, context_length: int = 2048) -> Iterator[Running]:
    port = free_port()
    launch = Launch(
        program=PROGRAM,
        source=str(weights),
        served_name="org/smol",
        host="127.0.0.1",
        port=port,
        context_length=context_length,
        threads=2,
        args=args,
    )
    process = subprocess.Popen(ENGINE.build_command(launch).argv, stderr=subprocess.DEVNULL)
    try:
        yield Running(process=process, port=port)
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


@needs_xllamacpp
def test_the_version_is_printed_as_llama_server_prints_it() -> None:
    probe = ENGINE.build_probe(PROGRAM)[0]
    done = subprocess.run(probe.argv, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0
    assert done.stdout == ""
    assert re.match(r"version: \d+\.\d+\S* \(build \d+, commit \S+\)\nbuilt with ", done.stderr)


def test_the_help_is_on_stdout_and_needs_no_xllamacpp() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "--ctx-size, -c N\n" in done.stdout


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--bogus",), "error: invalid argument: --bogus"),
        (("--port", "1"), "error: --model is required: the embedded llama.cpp has no router"),
    ],
)
def test_a_command_line_that_cannot_be_run_ends_with_one_line(args: tuple[str, ...], line: str) -> None:
    done = run(*args)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{line}\n")


@needs_xllamacpp
def test_a_missing_model_is_named_as_the_cause() -> None:
    done = run("--model", "/nowhere/x.gguf", "--port", str(free_port()))
    assert done.returncode == 1
    assert cause_of(done) == "failed to open GGUF file '/nowhere/x.gguf' (No such file or directory)"
    assert "Traceback" not in done.stderr


@pytest.mark.e2e
def test_a_context_too_small_to_warm_up_is_named_as_the_cause(weights: Path) -> None:
    """It ends by an abort, whose backtrace would bury the cause."""
    launch = Launch(
        program=PROGRAM,
        source=str(weights),
        served_name="smol",
        host="127.0.0.1",
        port=free_port(),
        context_length=1,
    )
    command = ENGINE.build_command(launch)
    done = subprocess.run(
        command.argv,
        env=os.environ | command.env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == -signal.SIGABRT
    assert str(cause_of(done)).startswith("failed to add token")
    assert not re.search(r"^#\d+ ", done.stderr + done.stdout, re.MULTILINE)


@needs_xllamacpp
def test_a_port_in_use_is_named_as_the_cause(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--model", str(tmp_path / "x.gguf"), "--port", str(port))
    assert done.returncode == 1
    assert cause_of(done) == f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}"


@pytest.mark.e2e
def test_a_truncated_model_is_named_as_the_cause(tmp_path: Path, weights: Path) -> None:
    short = tmp_path / "short.gguf"
    with open(weights, "rb") as whole:
        short.write_bytes(whole.read(3_000_000))
    done = run("--model", str(short), "--port", str(free_port()))
    assert done.returncode == 1
    assert "model is corrupted or incomplete" in str(cause_of(done))


@pytest.mark.e2e
def test_it_serves_whole_and_streamed_answers_and_ends_when_told(weights: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 4}
    with started(weights) as engine:
        engine.wait_ready()
        status, text = engine.ask("POST", "/v1/chat/completions", asked)
        answer = json.loads(text)
        assert (status, answer["model"], answer["usage"]["completion_tokens"]) == (200, "org/smol", 4)
        streamed = asked | {"stream": True, "stream_options": {"include_usage": True}}
        status, text = engine.ask("POST", "/v1/chat/completions", streamed)
        events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] == 4
        props = json.loads(engine.ask("GET", "/props")[1])
        assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (1, 2048)
        assert engine.stop() == 0


@pytest.mark.e2e
def test_two_slots_serve_two_at_once_and_a_client_that_leaves_frees_its_own(weights: Path) -> None:
    long = json.dumps({"prompt": "Once", "max_tokens": 1900, "stream": True, "ignore_eos": True})
    with started(weights, "--ctx-size", "4096") as engine:
        engine.wait_ready()
        clients = [http.client.HTTPConnection("127.0.0.1", engine.port, timeout=PATIENCE_SECONDS) for _ in range(2)]
        for client in clients:
            client.request("POST", "/v1/completions", long)
            assert client.sock.recv(1)
        engine.wait_running(2)
        clients[0].close()
        engine.wait_running(1)
        # It is told to stop in the middle of the other answer, which must not hold it.
        assert engine.stop(signal.SIGINT) == 0
        clients[1].close()


@pytest.mark.e2e
def test_embeddings_are_served_where_the_profile_asks_for_them(weights: Path) -> None:
    with started(weights, "--embeddings", "--pooling", "mean") as engine:
        engine.wait_ready()
        status, text = engine.ask("POST", "/v1/embeddings", {"input": "x"})
        assert status == 200
        assert len(json.loads(text)["data"][0]["embedding"]) > 100


@pytest.mark.e2e
def test_a_signal_right_after_ready_is_never_lost(weights: Path) -> None:
    with started(weights) as engine:
        states = engine.wait_ready()
        # The model counts as loaded a moment before the program takes signals over: until then one ends it by default.
        assert engine.stop() in (0, -signal.SIGTERM)
    assert set(states) <= {HealthState.LOADING, HealthState.READY}


@pytest.mark.e2e
def test_a_signal_while_it_loads_ends_it_at_once(weights: Path) -> None:
    with started(weights) as engine:
        assert engine.stop() in (0, -signal.SIGTERM)
