"""What ends without a word, engine or llmgw itself, and what comes after; what ends in order leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.running import EngineProcess, Llmgw, free_port, wait_for
from lab.wire import CHAT, Wire, chat, error_code, get, post

from llmgw.host.process import find_marked
from llmgw.host.state import StateFolder

pytestmark = pytest.mark.slow
# For both engines a stream that goes on until somebody ends it.
LONG = {"stream": True, "max_tokens": 1900, "temperature": 1.5, "ignore_eos": True}
ENDLESS = {"tokens": 100_000, "interval_ms": 20}


def is_alive(pid: int) -> bool:
    """It runs, and is no zombie."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def begin_stream(llmgw: Llmgw) -> Wire:
    wire = Wire(llmgw.address)
    wire.send(post(CHAT, chat(ENDLESS, **LONG)))
    wire.read_until(b"data: ")
    wire.read_until(b"\n\n")
    return wire


def content_of(llmgw: Llmgw) -> str:
    reply = llmgw.chat(max_tokens=8)
    assert reply.status == 200, reply
    return str(reply.json["choices"][0]["message"]["content"])


def test_an_engine_that_is_killed_ends_its_streams_honestly_and_comes_back(
    launch: Callable[..., Llmgw], definition: str
) -> None:
    llmgw = launch("serve", definition, on_demand_wait="90s").start().wait_ready()
    before = llmgw.engine
    with begin_stream(llmgw) as wire, llmgw.connect() as whole:
        whole.send(post(CHAT, chat(ENDLESS, **{**LONG, "stream": False})))
        os.kill(before.pid, signal.SIGKILL)
        events = wire.read_to_end()
        reply = whole.read_reply()
    assert b"[DONE]" not in events
    last = [line for line in events.split(b"\n") if line.startswith(b"data: ")][-1]
    assert error_code(json.loads(last[6:])) == "stream_broken"
    assert (reply.status, reply.code) == (502, "engine_failed")
    # for a moment it is not known to be gone; from then on a request waits for the next one, which comes after a pause
    wait_for(lambda: llmgw.chat(max_tokens=1).status != 502, "the news of its end")
    assert content_of(llmgw)
    after = llmgw.engine
    assert after.pid != before.pid
    assert llmgw.stop() == 0
    wait_for(lambda: not is_alive(after.pid), "the engine's end")
    assert llmgw.engines() == []


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
def test_an_engine_that_is_killed_while_nobody_reads_it_spins_nothing(
    launch: Callable[..., Llmgw], definition: str
) -> None:
    """Its hang-up can't be masked: a loop that watches it on and does not read it would get no rest."""
    llmgw = launch("serve", definition).start().wait_ready()
    with llmgw.connect(receive_bytes=4096) as wire:
        wire.send(post(CHAT, chat({"flood": -1}, stream=True)))
        written = -1

        def is_held() -> bool:
            nonlocal written
            # (it may not have come there yet)
            before, written = written, sum(request["bytes_written"] for request in llmgw.engine.requests())
            return before == written > 100_000

        wait_for(is_held, "the engine to be held")
        os.kill(llmgw.engine.pid, signal.SIGKILL)
        time.sleep(0.3)
        assert llmgw.cpu_share() < 0.3
        said = wire.read_to_end()
    assert b"[DONE]" not in said
    assert b'"stream_broken"' in said[-400:]
    assert llmgw.stop() == 0


def test_an_llmgw_that_is_killed_leaves_its_engine_to_the_next_one(
    launch: Callable[..., Llmgw], definition: str
) -> None:
    llmgw = launch("serve", definition, port=free_port()).start().wait_ready()
    engine = llmgw.engine
    with begin_stream(llmgw) as wire:
        llmgw.running.kill()
        llmgw.running.wait()
        with contextlib.suppress(ConnectionResetError):
            assert b"[DONE]" not in wire.read_to_end()
    assert llmgw.engine == engine
    llmgw.start().wait_ready()
    assert llmgw.engine == engine
    assert content_of(llmgw)
    assert llmgw.stop() == 0
    wait_for(lambda: not is_alive(engine.pid), "the engine's end")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_stop_leaves_no_process(launch: Callable[..., Llmgw], definition: str, signum: int) -> None:
    llmgw = launch("serve", definition, timeouts={"drain": "1s"}).start().wait_ready()
    engine = llmgw.engine
    with begin_stream(llmgw):
        llmgw.running.send_signal(signum)
        assert llmgw.wait_ended() == 0
    assert not is_alive(engine.pid)
    assert llmgw.engines() == []
    assert "Traceback" not in llmgw.log


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
def test_a_stop_while_the_engine_starts_leaves_no_process(launch: Callable[..., Llmgw], definition: str) -> None:
    llmgw = launch("serve", definition).start()
    wait_for(llmgw.engines, "the engine's start")
    assert llmgw.stop() == 0
    assert llmgw.engines() == []


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
def test_an_engine_of_a_model_that_is_no_longer_served_is_stopped(
    launch: Callable[..., Llmgw], definition: str
) -> None:
    """The next start is for another model: nothing of the last one stays."""
    llmgw = launch("serve", definition, port=free_port()).start().wait_ready()
    before = llmgw.engine
    llmgw.running.kill()
    llmgw.running.wait()
    with open(definition, encoding="utf-8") as file:
        text = file.read().replace("name: m\n", "name: another\n")
    with open(definition, "w", encoding="utf-8") as file:
        file.write(text)
    llmgw.start().wait_ready()
    wait_for(lambda: not is_alive(before.pid), "the old engine's end")
    assert llmgw.engine.pid != before.pid
    assert llmgw.ask(get("/v1/models/another")).status == 200
    assert llmgw.stop() == 0


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
def test_a_port_serves_one_llmgw_and_the_second_is_told(launch: Callable[..., Llmgw], definition: str) -> None:
    first = launch("serve", definition, port=free_port()).start().wait_ready()
    second = launch("serve", definition, port=first.port).start()
    assert second.wait_ended() == 2
    assert second.log.splitlines()[-1] == (
        f"llmgw: can't listen on 127.0.0.1:{first.port}: Address already in use; choose another with --port"
    )
    assert second.engines() == []
    assert content_of(first)
    assert first.stop() == 0


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
def test_any_free_port_can_be_taken_by_several(launch: Callable[..., Llmgw], definition: str) -> None:
    """One state folder for both, and the engines of one are none of the other's."""
    first = launch("serve", definition).start().wait_ready()
    second = launch("serve", definition, folder=first.folder / "second", state=str(first.state)).start().wait_ready()
    assert second.stop() == 0
    assert "Traceback" not in second.log
    assert content_of(first)
    assert first.stop() == 0


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
def test_several_that_take_any_free_port_may_start_at_once(launch: Callable[..., Llmgw], definition: str) -> None:
    first = launch("serve", definition)
    others = [launch("serve", definition, folder=first.folder / str(n), state=str(first.state)) for n in range(2)]
    several = [each.start() for each in (first, *others)]
    for each in several:
        each.wait_ready()
        assert content_of(each)
    for each in several:
        assert each.stop() == 0


def redirect(llmgw: Llmgw, redirection: str, to: Path = Path("/dev/null")) -> Llmgw:
    """Start it as a shell does, with ``"$0"`` for ``to``."""
    llmgw.words = ["sh", "-c", f'exec "$@" {redirection}', str(to), *llmgw.words]
    return llmgw.start()


@contextlib.contextmanager
def unread(path: Path) -> Iterator[Path]:
    """A pipe that is full, and has a reader who doesn't read."""
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while os.write(held, b"x" * 4096):
                pass
        yield path
    finally:
        os.close(held)


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
def test_a_stdout_that_nobody_reads_stops_nothing_and_no_stop(
    launch: Callable[..., Llmgw], definition: str, tmp_path: Path, signum: int
) -> None:
    llmgw = launch("serve", definition, port=free_port())
    with unread(tmp_path / "unread") as out:
        redirect(llmgw, '>"$0" 2>&1', out)
        wait_for(lambda: answers(llmgw), "an answer", 110)
        llmgw.running.send_signal(signum)
        assert llmgw.wait_ended() == 0
    assert left(llmgw) == []


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_answer_that_nobody_reads_can_be_interrupted(
    launch: Callable[..., Llmgw], definition: str, tmp_path: Path, signum: int
) -> None:
    llmgw = launch("demo", "--model", str(Path(definition).with_name("weights.fake")), "--ask", "hi")
    with unread(tmp_path / "unread") as out:
        redirect(llmgw, '>"$0"', out)
        wait_for(lambda: any(asked(engine) for engine in llmgw.engines()), "the question", 110)
        llmgw.running.send_signal(signum)
        assert llmgw.wait_ended() == 130
    assert left(llmgw) == []
    assert "Traceback" not in llmgw.log


def left(llmgw: Llmgw) -> list[int]:
    """Every process of its folder that runs: engines, and programs that were asked for their version."""
    return [stat.pid for folder in llmgw.state.glob("*") for stat in find_marked(StateFolder(folder).marker_prefix())]


def answers(llmgw: Llmgw) -> bool:
    with socket.socket() as probe:
        listens = probe.connect_ex(llmgw.address) == 0
    return listens and llmgw.chat(max_tokens=1).status == 200


def asked(engine: EngineProcess) -> bool:
    with contextlib.suppress(OSError):
        return any(seen["body"] for seen in engine.requests())
    return False


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_whatever_is_behind_the_three_descriptors_it_serves(
    launch: Callable[..., Llmgw], definition: str, redirection: str
) -> None:
    llmgw = redirect(launch("serve", definition, port=free_port()), redirection)
    wait_for(lambda: answers(llmgw), "an answer", 110)
    assert llmgw.stop() == 0
    assert left(llmgw) == []
    assert "Traceback" not in llmgw.log


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
@pytest.mark.parametrize("redirection", ["<&- 2>&-", "2>/dev/full"])
def test_an_answer_needs_nothing_but_stdout(launch: Callable[..., Llmgw], definition: str, redirection: str) -> None:
    weights = str(Path(definition).with_name("weights.fake"))
    llmgw = redirect(launch("demo", "--model", weights, "--ask", "hi"), redirection)
    assert llmgw.wait_ended() == 0
    assert llmgw.out.strip()


@pytest.fixture
def slow_version(tmp_path: Path) -> Path:
    """A binary of the fake engine that does not tell its version as long as the file ``slow`` is beside it."""
    path = tmp_path / "bin" / "fake"
    path.parent.mkdir()
    path.with_name("slow").touch()
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && [ -e {path.parent}/slow ] && sleep 600\n'
        f'exec {sys.executable} -m fake_engine "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_is_asked_for_its_version_is_not_left_behind(
    launch: Callable[..., Llmgw], definition: str, slow_version: Path, signum: int
) -> None:
    """Not by a kill -9 either, once llmgw is started again."""
    llmgw = launch("serve", definition, port=free_port(), engines={"fake": {"bin": str(slow_version)}}).start()
    asked = wait_for(lambda: left(llmgw), "the question for its version")
    llmgw.running.send_signal(signum)
    ended = llmgw.wait_ended()
    if signum == signal.SIGKILL:
        slow_version.with_name("slow").unlink()
        llmgw.start().wait_ready()
        assert set(asked).isdisjoint(left(llmgw))
        ended = llmgw.stop()
    assert ended == 0
    assert left(llmgw) == []


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
@pytest.mark.parametrize("rotten", ["serve-{port}", "serve-{port}/pages", "serve-{port}/shards", "serve-{port}/lock/x"])
def test_a_state_folder_that_can_not_be_used_is_told_in_words(
    launch: Callable[..., Llmgw], definition: str, rotten: str
) -> None:
    port = free_port()
    llmgw = launch("serve", definition, port=port)
    path = llmgw.state / rotten.format(port=port)
    path.parent.mkdir(parents=True)
    path.touch()
    assert llmgw.start().wait_ended() in (1, 2)
    assert "Traceback" not in llmgw.log
    assert "mend that" in llmgw.log.splitlines()[-1]
    assert left(llmgw) == []


@pytest.mark.parametrize("definition", ["fake"], indirect=True)
def test_what_fails_in_the_same_way_is_told_in_full_once(launch: Callable[..., Llmgw], definition: str) -> None:
    with open(definition, encoding="utf-8") as file:
        text = file.read().replace("args: []", "args: [--no-such-flag]")
    with open(definition, "w", encoding="utf-8") as file:
        file.write(text)
    llmgw = launch("serve", definition).start()
    llmgw.wait_said("failure 2 in a row")
    assert llmgw.stop() == 0
    assert sum("unrecognized" in line for line in llmgw.log.splitlines() if line.startswith("    ")) == 1


@pytest.mark.e2e
def test_a_question_that_is_refused_leaves_no_process(launch: Callable[..., Llmgw], weights: Path) -> None:
    llmgw = launch("demo", "--model", str(weights), "--ask", "hello world " * 9000).start()
    assert llmgw.wait_ended() == 1
    assert "exceeds the available context" in llmgw.log
    assert llmgw.engines() == []
    assert "Traceback" not in llmgw.log


@pytest.mark.e2e
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_question_that_is_interrupted_has_no_answer(launch: Callable[..., Llmgw], weights: Path, signum: int) -> None:
    llmgw = launch("demo", "--model", str(weights), "--ask", "Write a very long story.").start()
    wait_for(llmgw.engines, "the engine's start")
    llmgw.running.send_signal(signum)
    assert llmgw.wait_ended() == 130
    assert llmgw.engines() == []
    assert "Traceback" not in llmgw.log
