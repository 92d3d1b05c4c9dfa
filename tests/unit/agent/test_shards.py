"""A shard's life, with the fake engine as a real process."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from llmgw.agent.shards import run_shard
from llmgw.core.replica import ShardState
from llmgw.host.http import get
from llmgw.host.ports import Ports
from llmgw.host.process import read_stat

pytestmark = pytest.mark.slow

L, G, R, S, E = ShardState.LAUNCHING, ShardState.LOADING, ShardState.READY, ShardState.STOPPING, ShardState.ENDED


class Life:
    """A shard that is being run, and what it said."""

    def __init__(self):
        self.said = []
        self.stop = trio.Event()
        self.changed = trio.Event()
        self.scope = trio.CancelScope()

    def report(self, report):
        self.said.append(report)
        self.changed.set()
        self.changed = trio.Event()

    def states(self):
        return list(dict.fromkeys(report.state for report in self.said))

    async def wait(self, is_so):
        with trio.fail_after(100):
            while not (self.said and is_so(self.said[-1])):
                await self.changed.wait()
        return self.said[-1]

    async def wait_state(self, state):
        return await self.wait(lambda report: report.state is state)


@asynccontextmanager
async def living(spec, tools):
    life = Life()

    async def run():
        with life.scope:
            await run_shard(spec, tools, life.report, stop=life.stop)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield life
        life.stop.set()


async def run_to_end(spec, tools):
    async with living(spec, tools) as life:
        return await life.wait_state(E), life


def is_gone(pid):
    stat = read_stat(pid)
    return stat is None or stat.state in "ZX"


async def test_a_life_from_launch_to_stop(tools, make_spec):
    async with living(make_spec("--load-seconds", "0.3"), tools) as life:
        ready = await life.wait_state(R)
        assert (ready.endpoint.host, ready.endpoint.served_name) == ("127.0.0.1", "m")
        assert (await get("127.0.0.1", ready.endpoint.port, "/health")).status == 200
        (record,) = tools.state.read()
        assert (record.pid, record.port) == (ready.pid, ready.endpoint.port)
    assert life.states() == [L, G, R, S, E]
    assert life.said[-1].cause is None
    assert is_gone(ready.pid)
    assert tools.state.read() == []


async def test_progress_is_told_while_loading_and_not_after(tools, make_spec, tmp_path):
    spec = make_spec("--ready-when", str(tmp_path / "loaded"), "--print-line", "loading: layer 3 of 9")
    async with living(spec, tools) as life:
        assert (await life.wait(lambda report: report.progress == "layer 3 of 9")).state is G
        (tmp_path / "loaded").touch()
        assert (await life.wait_state(R)).progress is None


async def test_a_flood_of_log_does_not_keep_an_engine_from_being_ready(tools, make_spec):
    async with living(make_spec("--flood-log", "5000000"), tools) as life:
        await life.wait_state(R)


async def test_load_is_told_of_a_ready_engine(tools, make_spec):
    async with living(make_spec(), tools) as life:
        report = await life.wait(lambda report: report.running is not None)
    assert (report.running, report.waiting) == (0, 0)


async def test_a_dead_engine_names_its_cause(tools, make_spec):
    lines = ["noise", "giving up: generic", "fatal: the weights are corrupt", "fatal: an echo", "giving up: bye"]
    flags = [flag for line in lines for flag in ("--print-line", line)]
    end, life = await run_to_end(make_spec("--crash-at-start", "--exit-code", "1", *flags), tools)
    assert end.cause == "the weights are corrupt"
    assert end.lines == tuple(lines)
    assert end.endpoint is None
    assert life.states() == [L, G, S, E]


async def test_a_generic_line_counts_when_there_is_no_better_one(tools, make_spec):
    end, _ = await run_to_end(make_spec("--crash-at-start", "--print-line", "giving up: model error"), tools)
    assert end.cause == "model error"


async def test_the_cause_of_the_run_before_is_not_this_ones(tools, make_spec):
    spec = make_spec("--crash-at-start", "--print-line", "fatal: first")
    assert (await run_to_end(spec, tools))[0].cause == "first"
    end, _ = await run_to_end(make_spec("--crash-at-start", "--exit-code", "3", epoch=2), tools)
    assert end.cause == "ended by itself with exit code 3"
    assert end.lines == ()


async def test_an_engine_killed_with_9_says_so(tools, make_spec):
    async with living(make_spec(), tools) as life:
        os.kill((await life.wait_state(R)).pid, signal.SIGKILL)
        end = await life.wait_state(E)
    assert end.cause == "killed by SIGKILL (out of memory?)"


async def test_a_crash_after_ready_ends_the_shard(tools, make_spec):
    async with living(make_spec(), tools) as life:
        ready = await life.wait_state(R)
        await post(ready.endpoint.port, "/fake/exit", b'{"code": 7}')
        end = await life.wait_state(E)
    assert end.cause == "ended by itself with exit code 7"


async def test_the_children_of_a_dead_engine_are_stopped_before_its_end_is_told(tools, make_spec):
    async with living(make_spec("--spawn-child"), tools) as life:
        ready = await life.wait_state(R)
        log = tools.state.log_path(life.said[-1].shard).read_text()
        child = int(log.partition("child: ")[2].split()[0])
        os.kill(ready.pid, signal.SIGKILL)
        await life.wait_state(E)
        assert is_gone(child)


async def test_an_engine_and_child_that_are_deaf_to_term_are_killed(tools, make_spec):
    async with living(make_spec("--deaf-to-term", "--spawn-child"), tools) as life:
        ready = await life.wait_state(R)
        child = int(tools.state.log_path(ready.shard).read_text().partition("child: ")[2].split()[0])
    assert is_gone(ready.pid)
    assert is_gone(child)
    assert life.said[-1].state is E


async def test_a_broken_engine_is_ended_with_its_reason(tools, make_spec):
    end, life = await run_to_end(make_spec("--broken", "no such template"), tools)
    assert end.cause == "no such template"
    assert R not in life.states()
    assert is_gone(end.pid)


async def test_an_engine_that_never_gets_ready_is_ended_after_its_limit(tools, make_spec):
    spec = make_spec("--never-ready", "--print-line", "loading: layer 1", startup=1)
    end, life = await run_to_end(spec, tools)
    told = any(report.progress == "layer 1" for report in life.said)
    assert end.cause == "not ready within startup_timeout (1 s)" + told * "; the last it said: layer 1"
    assert is_gone(end.pid)


async def test_an_engine_that_stops_answering_is_told_of_and_not_killed(tools, make_spec):
    async with living(make_spec(), tools) as life:
        ready = await life.wait_state(R)
        await change_health(ready.endpoint.port, b'{"status": 500, "body": ""}')
        said = await life.wait(lambda report: report.progress is not None)
        assert said.state is R
        assert "health check" in said.progress
        assert not is_gone(ready.pid)
        await change_health(ready.endpoint.port, b'{"status": 200, "body": ""}')
        await life.wait(lambda report: report.progress is None)


async def test_an_engine_that_dies_during_a_silent_poll_is_seen_dead(tools, make_spec):
    async with living(make_spec(), tools) as life:
        ready = await life.wait_state(R)
        await change_health(ready.endpoint.port, b'{"silent": true}')
        await trio.sleep(3 * tools.settings.pace.health)
        os.kill(ready.pid, signal.SIGKILL)
        await life.wait_state(E)


async def test_a_silent_engine_is_told_of(tools, make_spec):
    pace = replace(tools.settings.pace, health_limit=0.2)
    async with living(make_spec(), replace(tools, settings=replace(tools.settings, pace=pace))) as life:
        ready = await life.wait_state(R)
        await change_health(ready.endpoint.port, b'{"silent": true}')
        said = await life.wait(lambda report: report.progress is not None)
    assert said.progress == "runs, but does not answer at its health check (3 times in a row)"


async def change_health(port, body):
    await post(port, "/fake/health", body)


async def post(port, path, body):
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        await stream.send_all(head.encode() + body)
        async for _ in stream:
            pass


async def test_a_cancelled_shard_leaves_its_engine_running(tools, make_spec):
    async with living(make_spec(), tools) as life:
        ready = await life.wait_state(R)
        life.scope.cancel()
    assert not is_gone(ready.pid)
    assert life.said[-1].state is R
    assert len(tools.state.read()) == 1


async def test_an_engine_whose_port_was_taken_gets_another_in_the_same_try(tools, make_spec, tmp_path):
    first, _ = tools.settings.engine_ports
    async with living(make_spec("--bind-when", str(tmp_path / "taken")), tools) as life:
        await life.wait(lambda report: report.endpoint is not None)
        # Between our check and the engine's own, as another program would.
        with socket.create_server(("127.0.0.1", first)):
            (tmp_path / "taken").touch()
            ready = await life.wait_state(R)
    assert ready.endpoint.port == first + 1
    assert life.states() == [L, G, R, S, E]
    assert tools.ports.take() == first + 2


async def test_an_engine_that_is_answered_for_by_another_program_is_not_called_ready(tools, make_spec, tmp_path):
    first, _ = tools.settings.engine_ports
    async with living(make_spec("--bind-when", str(tmp_path / "taken")), tools) as life:
        await life.wait(lambda report: report.endpoint is not None)
        async with another_program(first):
            await life.wait(lambda report: report.endpoint is not None and report.endpoint.port == first + 1)
            (tmp_path / "taken").touch()
            ready = await life.wait_state(R)
    assert ready.endpoint.port == first + 1
    assert {report.endpoint.port for report in life.said if report.state is R} == {first + 1}


@asynccontextmanager
async def another_program(port):
    """A server that says 200 to everybody, on a port that was given to an engine."""

    async def serve(stream):
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, await trio.open_tcp_listeners(port, host="127.0.0.1"))
        yield
        nursery.cancel_scope.cancel()


async def test_without_a_free_port_the_shard_ends(tools, make_spec, listener):
    port = listener.getsockname()[1]
    end, _ = await run_to_end(make_spec(), replace(tools, ports=Ports(port, port)))
    assert "no free port" in end.cause


@pytest.mark.parametrize(
    ("source", "cause"),
    [("/nowhere/m.fake", "can't be read"), ("https://x/m.fake", "not fetched in this version")],
)
async def test_a_source_that_can_not_be_used_ends_the_shard(tools, make_spec, source, cause):
    end, life = await run_to_end(make_spec(source=source), tools)
    assert cause in end.cause
    assert life.states() == [L, E]


async def test_an_engine_that_nobody_installed_ends_the_shard(tools, make_spec):
    spec = make_spec()
    end, _ = await run_to_end(replace(spec, profile=replace(spec.profile, engine="nobody")), tools)
    assert "no engine plugin is called nobody" in end.cause


async def test_a_program_that_can_not_be_started_ends_the_shard(tools, make_spec, tmp_path):
    program = tmp_path / "engine"
    program.write_bytes(b"\x7fELF this is none")
    program.chmod(0o755)
    settings = replace(tools.settings, binaries={"fake": str(program)})
    end, _ = await run_to_end(make_spec(), replace(tools, settings=settings))
    assert "can't be started" in end.cause
    assert tools.ports.take() == tools.settings.engine_ports[0] + 1


async def test_a_fault_of_llmgw_ends_the_shard_and_its_engine(tools, make_spec):
    class Exploding:
        name, embedded = "fake", tools.engines["fake"].embedded

        def __getattr__(self, name):
            if name == "read_health":
                raise ZeroDivisionError("boom")
            return getattr(tools.engines["fake"], name)

    end, _ = await run_to_end(make_spec(), replace(tools, engines={"fake": Exploding()}))
    assert end.cause == "a fault of llmgw itself: ZeroDivisionError: boom"
    assert is_gone(end.pid)
