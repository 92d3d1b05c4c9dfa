"""A shard's life, with the fake engine as a real process."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from llmgw.agent.pulse import REMEDY
from llmgw.agent.shards import CAUSE_LINES, SHOWN_LINES, run_shard
from llmgw.core.model import Lora, ModelName, Task
from llmgw.core.node import FabricFound, ForeignUse, Gpu
from llmgw.core.replica import Load, ShardState
from llmgw.engines import BROKEN, Cause, CauseKind, Fabric, Problem
from llmgw.host.gpus import GpusFound
from llmgw.host.http import get
from llmgw.host.ports import Ports
from llmgw.host.process import read_stat
from llmgw.host.usage import Usage
from llmgw.host.weights.errors import FetchFailed, Kind

pytestmark = pytest.mark.slow

P, L, G = ShardState.PREPARING, ShardState.LAUNCHING, ShardState.LOADING
R, S, E = ShardState.READY, ShardState.STOPPING, ShardState.ENDED


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
    assert life.states() == [P, L, G, R, S, E]
    assert life.said[-1].cause is None
    assert is_gone(ready.pid)
    assert tools.state.read() == []


async def test_progress_is_told_while_loading_and_not_after(tools, make_spec, tmp_path):
    spec = make_spec("--ready-when", str(tmp_path / "loaded"), "--print-line", "loading: layer 3 of 9")
    async with living(spec, tools) as life:
        assert (await life.wait(lambda report: report.progress == "layer 3 of 9")).state is G
        (tmp_path / "loaded").touch()
        assert (await life.wait_state(R)).progress is None


async def test_lines_are_read_in_a_thread_so_that_many_keep_nobody_waiting(alter, make_spec):
    threads = set()
    spec = make_spec("--print-line", "loading: layer 3 of 9")
    async with living(spec, alter(read_log=lambda line: threads.add(threading.get_ident()))) as life:
        await life.wait_state(R)
        with trio.fail_after(60):
            # (it may be ready before its line is there)
            while not threads:  # noqa: ASYNC110
                await trio.sleep(0.01)
    assert threading.get_ident() not in threads


async def test_a_flood_of_log_does_not_keep_an_engine_from_being_ready(tools, make_spec):
    async with living(make_spec("--flood-log", "5000000"), tools) as life:
        await life.wait_state(R)


async def test_load_is_told_of_a_ready_engine(tools, make_spec):
    async with living(make_spec(), tools) as life:
        report = await life.wait(lambda report: report.load != Load())
    assert (report.load.running, report.load.waiting) == (0, 0)


async def test_all_that_an_engine_says_of_its_load_is_told(alter, make_spec):
    load = Load(running=3, waiting=0, cache_used=0.5, prompt_tokens=70, cached_tokens=30, steps=11)
    async with living(make_spec(), alter(read_load=lambda text: load)) as life:
        await life.wait(lambda report: report.load == load)


async def test_a_dead_engine_names_its_cause(tools, make_spec):
    lines = ["noise", "giving up: generic", "fatal: the weights are corrupt", "fatal: an echo", "giving up: bye"]
    flags = [flag for line in lines for flag in ("--print-line", line)]
    end, life = await run_to_end(make_spec("--crash-at-start", "--exit-code", "1", *flags), tools)
    assert end.cause == "the weights are corrupt"
    assert end.lines == tuple(lines)
    assert end.endpoint is None
    assert life.states() == [P, L, G, S, E]


async def test_its_last_words_count_when_there_is_no_better_line(tools, make_spec):
    end, _ = await run_to_end(make_spec("--crash-at-start", "--print-line", "giving up: model error"), tools)
    assert end.cause == "model error"


async def test_the_remedy_of_a_cause_is_told_with_it(tools, make_spec):
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"
    spec = make_spec("--crash-at-start", "--exit-code", "1", "--print-line", "noise", "--print-line", line)
    end, _ = await run_to_end(spec, tools)
    assert end.cause == line
    assert "less context" in end.remedy


async def test_how_a_process_ended_is_asked_of_the_plugin(alter, make_spec):
    asked = []

    def read_exit(lines, code, signum):
        asked.append((lines, code, signum))
        return Cause(kind=CauseKind.OTHER, line="so it was", remedy="do so")

    end, _ = await run_to_end(
        make_spec("--crash-at-start", "--exit-code", "7", "--print-line", "last"), alter(read_exit=read_exit)
    )
    assert (end.cause, end.remedy, end.lines) == ("so it was", "do so", ("last",))
    async with living(make_spec(epoch=2), alter(read_exit=read_exit)) as life:
        os.kill((await life.wait_state(R)).pid, signal.SIGSEGV)
        await life.wait_state(E)
    assert asked[0] == (("last",), 7, None)
    assert asked[-1][1:] == (None, signal.SIGSEGV)


async def test_the_plugin_sees_far_more_lines_than_are_shown(alter, make_spec):
    lines = [f"line {at}" for at in range(CAUSE_LINES + 10)]
    flags = [flag for line in lines for flag in ("--print-line", line)]
    cause = Cause(kind=CauseKind.OTHER, line="x")
    seen = []

    def read_exit(lines, code, signum):
        seen.append(lines)
        return cause

    end, _ = await run_to_end(make_spec("--crash-at-start", *flags), alter(read_exit=read_exit))
    assert seen[-1] == tuple(lines[-CAUSE_LINES:])
    assert end.lines == tuple(lines[-SHOWN_LINES:])


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
    assert end.cause.startswith("killed by SIGKILL and nothing in its log")
    assert "kernel's log" in end.remedy


class Kills:
    """A counter of what the kernel has killed for memory."""

    def __init__(self, count=4):
        self.count = count
        self.asked = 0

    def __call__(self):
        self.asked += 1
        return self.count

    async def wait_asked(self):
        """It was looked at once more."""
        before = self.asked
        with trio.fail_after(100):
            while self.asked == before:  # noqa: ASYNC110 - another thread
                await trio.sleep(0.01)


async def test_an_engine_that_the_kernel_killed_for_memory_says_so(make_spec, with_hands):
    kills = Kills()
    spec = make_spec("--print-line", "ImportError: libx.so.1: cannot open shared object")
    async with living(spec, with_hands(count_oom_kills=kills)) as life:
        ready = await life.wait_state(R)
        kills.count += 1
        os.kill(ready.pid, signal.SIGKILL)
        end = await life.wait_state(E)
    assert end.cause.startswith("killed by the kernel's OOM killer")
    assert end.kind == CauseKind.HOST_MEMORY
    assert "less context" in end.remedy


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("words", [(), ("--print-line", "giving up: a worker is dead")], ids=["silent", "generic"])
async def test_an_engine_that_ends_because_its_worker_was_killed_for_memory_says_so(make_spec, code, words, with_hands):
    kills = Kills()
    async with living(make_spec(*words), with_hands(count_oom_kills=kills)) as life:
        ready = await life.wait_state(R)
        kills.count += 1
        # It notices late.
        await kills.wait_asked()
        await post(ready.endpoint.port, "/fake/exit", b'{"code": %d}' % code)
        end = await life.wait_state(E)
    assert end.cause.startswith("killed by the kernel's OOM killer")


async def test_a_worker_that_is_killed_for_memory_while_it_loads_is_told_too(make_spec, tmp_path, with_hands):
    kills = Kills()
    spec = make_spec("--bind-when", str(tmp_path / "never"))
    async with living(spec, with_hands(count_oom_kills=kills)) as life:
        loading = await life.wait_state(G)
        await kills.wait_asked()
        kills.count += 1
        await kills.wait_asked()
        os.kill(loading.pid, signal.SIGTERM)
        end = await life.wait_state(E)
    assert end.cause.startswith("killed by the kernel's OOM killer")


async def test_what_its_log_names_counts_more_than_a_kill_of_another(make_spec, with_hands):
    kills = Kills()
    spec = make_spec("--print-line", "fatal: the weights are corrupt")
    async with living(spec, with_hands(count_oom_kills=kills)) as life:
        ready = await life.wait_state(R)
        kills.count += 1
        await post(ready.endpoint.port, "/fake/exit", b'{"code": 1}')
        end = await life.wait_state(E)
    assert end.cause == "the weights are corrupt"


@pytest.mark.parametrize(("before", "after"), [(4, 4), (None, 5)])
async def test_the_kernel_is_not_accused_without_a_kill(make_spec, before, after, with_hands):
    kills = Kills(before)
    async with living(make_spec(), with_hands(count_oom_kills=kills)) as life:
        ready = await life.wait_state(R)
        kills.count = after
        os.kill(ready.pid, signal.SIGKILL)
        end = await life.wait_state(E)
    assert "OOM killer" not in end.cause


async def test_an_engine_that_we_killed_ourselves_was_not_killed_for_memory(tools, make_spec, with_hands):
    kills = itertools.count()
    counting = with_hands(count_oom_kills=lambda: next(kills))
    async with living(make_spec("--deaf-to-term"), counting) as life:
        await life.wait_state(R)
    assert life.said[-1].state is E
    assert life.said[-1].cause is None
    end, _ = await run_to_end(make_spec("--deaf-to-term", "--never-ready", startup=0.3, epoch=2), counting)
    assert end.cause.startswith("not ready within")


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
    assert "a longer startup_timeout" in end.remedy
    assert is_gone(end.pid)


async def test_what_its_log_names_is_told_of_one_that_never_gets_ready(tools, make_spec):
    line = "NCCL WARN Bootstrap : no socket interface found"
    end, _ = await run_to_end(make_spec("--never-ready", "--print-line", line, startup=1), tools)
    told = f"; {line}" in end.cause
    assert end.cause.startswith("not ready within startup_timeout (1 s)")
    # On a machine so busy that it had printed nothing yet there is nothing to name.
    assert told == (line in end.lines)
    assert not told or "fabric" in end.remedy


async def test_a_refused_connection_may_be_the_end_of_a_try(alter, make_spec, tmp_path):
    asked = []

    def read_health(status, body):
        asked.append((status, body))
        return BROKEN("it has hung up")

    spec = make_spec("--bind-when", str(tmp_path / "never"))
    end, _ = await run_to_end(spec, alter(read_health=read_health))
    assert asked == [(None, "")]
    assert end.cause == "it has hung up"
    assert is_gone(end.pid)


async def test_a_refused_connection_is_waited_out_while_the_plugin_says_so(tools, make_spec, tmp_path):
    async with living(make_spec("--bind-when", str(tmp_path / "go")), tools) as life:
        await life.wait_state(G)
        await trio.sleep(3 * tools.settings.pace.loading)
        assert life.said[-1].state is G
        (tmp_path / "go").touch()
        await life.wait_state(R)


async def test_a_shard_that_serves_nobody_is_ready_while_its_process_lives(tools, alter, make_spec):
    spec = replace(make_spec(), rank=1, count=2)

    def read_health(status, body):
        raise AssertionError("nobody is to ask for its health")

    async with living(spec, alter(read_health=read_health)) as life:
        ready = await life.wait_state(R)
        assert ready.endpoint is None
        assert ready.pid is not None
        (record,) = tools.state.read()
        assert not record.serves
        await trio.sleep(3 * tools.settings.pace.health)
        assert life.said[-1].state is R
        os.kill(ready.pid, signal.SIGKILL)
        end = await life.wait_state(E)
    assert "SIGKILL" in end.cause


@pytest.mark.parametrize("facts", [{"count": 2}, {"on_trial": True}])
async def test_the_first_of_a_group_and_one_on_trial_is_ready_once_it_has_generated_a_token(tools, make_spec, facts):
    async with living(replace(make_spec(), **facts), tools) as life:
        ready = await life.wait_state(R)
        seen = json.loads((await get("127.0.0.1", ready.endpoint.port, "/fake/requests")).body)
        (record,) = tools.state.read()
    assert [(each["path"], each["body"]["max_tokens"]) for each in seen] == [("/v1/chat/completions", 1)]
    assert any("one token" in (report.progress or "") for report in life.said if report.state is G)
    assert record.proven


async def test_a_group_that_can_not_be_asked_for_a_proof_is_believed_and_that_is_told(tools, alter, make_spec, caplog):
    info = replace(tools.engines["fake"].info, api_paths=frozenset({"/v1/embeddings"}))
    async with living(replace(make_spec(), count=2), alter(info=info)) as life:
        ready = await life.wait_state(R)
        assert (await get("127.0.0.1", ready.endpoint.port, "/fake/requests")).body == "[]"
        (record,) = tools.state.read()
    assert not record.proven
    assert "its api_paths have none of /v1/chat/completions, /v1/completions" in caplog.text


async def test_one_that_serves_by_itself_is_asked_for_nothing(tools, make_spec):
    async with living(make_spec(), tools) as life:
        ready = await life.wait_state(R)
        assert (await get("127.0.0.1", ready.endpoint.port, "/fake/requests")).body == "[]"


@pytest.mark.parametrize(("says", "told"), [(1024, True), (2048, False), (0, False)])
async def test_what_its_engine_takes_is_told_and_compared(tools, make_spec, caplog, says, told):
    spec = make_spec("--says-context", str(says))
    spec = replace(spec, model=replace(spec.model, context_length=2048))
    async with living(spec, tools) as life:
        ready = await life.wait_state(R)
    assert ready.context_length == (says or None)
    assert ("takes 1024 tokens a request, and its model promises context_length 2048" in caplog.text) == told


# Healthy, and answers the first requests as it is told: a status each, or silence.
LIAR = """
import http.server, os, sys, time
answers = sys.argv[1].split(",")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200)
    def do_POST(self):
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer == "hang":
            time.sleep(600)
        elif answer == "die":
            os._exit(7)
        else:
            self.reply(int(answer))
    def reply(self, status):
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def lying(engine, answers):
    def build_command(launch):
        argv = (sys.executable, "-c", LIAR, answers, str(launch.port))
        return replace(engine.build_command(launch), argv=argv)

    return build_command


async def test_one_on_trial_that_answers_no_request_is_not_ready_and_what_it_said_is_the_cause(tools, alter, make_spec):
    altered = alter(build_command=lying(tools.engines["fake"], "400,400,hang"))
    end, life = await run_to_end(replace(make_spec(startup=8), on_trial=True), altered)
    assert R not in life.states()
    assert "it says that it is, but /v1/chat/completions answered 400" in end.cause
    assert "what was changed" in end.remedy


async def test_one_on_trial_that_says_not_now_is_asked_again(tools, alter, make_spec):
    altered = alter(build_command=lying(tools.engines["fake"], "429,500,200"))
    async with living(replace(make_spec(), on_trial=True), altered) as life:
        await life.wait_state(R)
        (record,) = tools.state.read()
    assert record.proven


async def test_a_group_whose_health_lies_is_not_ready_until_it_answers(tools, alter, make_spec):
    altered = alter(build_command=lying(tools.engines["fake"], "500,500,200"))
    async with living(replace(make_spec(), count=2), altered) as life:
        await life.wait_state(R)
    said = [report.progress for report in life.said if report.state is G]
    assert any(text and "does not generate: /v1/chat/completions answered 500" in text for text in said)


async def test_a_group_that_hangs_at_its_first_token_ends_in_time(tools, alter, make_spec):
    altered = alter(build_command=lying(tools.engines["fake"], "hang"))
    end, life = await run_to_end(replace(make_spec(startup=2), count=2), altered)
    assert R not in life.states()
    assert end.cause.startswith("not ready within startup_timeout (2 s)")
    # It had no time to say that it is ready on a machine that busy.
    assert "did not answer a request for one token in time" in end.cause or "it says" not in end.cause
    assert end.remedy


async def test_a_group_that_dies_of_its_first_token_is_seen_dead(tools, alter, make_spec):
    altered = alter(build_command=lying(tools.engines["fake"], "die"))
    end, _ = await run_to_end(replace(make_spec(), count=2), altered)
    assert end.cause == "ended by itself with exit code 7"


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


# A suspicion comes at once, and what is no sign of life is not waited for; measured at each poll.
HASTY = {"health_limit": 0.5, "suspect": 0.5, "canary": 1.0, "canary_blind": 2.0, "computing": 0.0, "measure": 0.0}


def hasten(tools, **pace):
    settings = tools.settings
    return replace(tools, settings=replace(settings, pace=replace(settings.pace, **{**HASTY, **pace})))


@asynccontextmanager
async def asking(port):
    """A client whose request is in the engine, and is not answered."""
    body = b'{"max_tokens": 1, "messages": []}'
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        await stream.send_all(head.encode() + body)
        yield


async def test_an_engine_that_computes_nothing_while_requests_wait_is_hung(tools, make_spec):
    async with living(make_spec("--behave", "hung", "--print-line", "last"), hasten(tools)) as life:
        ready = await life.wait_state(R)
        async with asking(ready.endpoint.port):
            end = await life.wait_state(E)
    assert re.fullmatch(
        r"hung: a request waits and nothing was computed for \d+ s, and it did not answer a request for one token",
        end.cause,
    )
    assert end.kind == CauseKind.HUNG
    assert end.remedy == REMEDY
    assert "last" in end.lines
    assert any("asked for one token: a request waits" in (report.progress or "") for report in life.said)
    assert life.states() == [P, L, G, R, S, E]
    assert is_gone(ready.pid)


async def test_an_engine_that_is_stopped_in_its_tracks_is_hung_and_cleared_away(tools, make_spec):
    async with living(make_spec(), hasten(tools)) as life:
        ready = await life.wait_state(R)
        os.kill(ready.pid, signal.SIGSTOP)
        end = await life.wait_state(E)
    assert end.cause.startswith("hung: its health check had no good answer for")
    assert end.kind == CauseKind.HUNG
    assert is_gone(ready.pid)


async def test_a_busy_engine_that_answers_nobody_lives(tools, make_spec):
    async with living(make_spec("--behave", "busy"), hasten(tools, health_limit=1000)) as life:
        ready = await life.wait_state(R)
        async with asking(ready.endpoint.port):
            first = (await life.wait(lambda report: report.load.running == 1)).load.steps
            # A hundred of them a second: longer than any patience here.
            await life.wait(lambda report: (report.load.steps or 0) > first + 250)
        assert life.said[-1].state is R
        assert not is_gone(ready.pid)


async def test_an_engine_that_hung_for_a_moment_lives(tools, make_spec):
    async with living(make_spec(), hasten(tools, canary=1000, canary_blind=1000)) as life:
        ready = await life.wait_state(R)
        await post(ready.endpoint.port, "/fake/mode", b'{"mode": "hung"}')
        async with asking(ready.endpoint.port):
            await life.wait(lambda report: "asked for one token" in (report.progress or ""))
            await post(ready.endpoint.port, "/fake/mode", b'{"mode": ""}')
            assert (await life.wait(lambda report: report.progress is None)).state is R


async def test_an_idle_group_is_asked_for_a_token_now_and_then(tools, make_spec):
    async with living(
        replace(make_spec(), count=2), hasten(tools, idle=0.5, canary=1000, canary_blind=1000, health_limit=1000)
    ) as life:
        await life.wait_state(R)
        # Each is seven tokens of prompts.
        assert (await life.wait(lambda report: (report.load.prompt_tokens or 0) >= 3 * 7)).state is R


async def test_an_idle_group_that_has_lost_a_rank_is_hung(tools, make_spec, tmp_path):
    mode = tmp_path / "mode"
    spec = replace(make_spec("--behave-file", str(mode)), count=2)
    async with living(spec, hasten(tools, idle=0.5)) as life:
        await life.wait_state(R)
        mode.write_text("hung")
        end = await life.wait_state(E)
    assert end.cause.startswith("hung: ")
    assert end.kind == CauseKind.HUNG


async def test_what_a_launch_has_shown_is_told_with_the_word_that_it_is_ready(tools, make_spec):
    async with living(make_spec("--load-seconds", "0.3", "--hold-mb", "150"), tools) as life:
        ready = await life.wait_state(R)
    assert ready.measured.version == "1.0"
    assert ready.measured.load_seconds >= 0.3
    assert 0.15 < ready.measured.memory_gb < 0.4
    assert ready.measured.gpu_gb is None


async def test_what_has_grown_since_is_told_again(make_spec, with_hands):
    takes = iter([(1.0, None), (1.05, 20.0), (1.05, 20.1), (1.05, 60.0)])
    last = Usage()

    async def measure(tools, process):
        nonlocal last
        memory_gb, gpu_gb = next(takes, (last.memory_gb, last.gpu_gb))
        last = Usage(pids=frozenset({process.pid}), memory_gb=memory_gb, gpu_gb=gpu_gb)
        return last

    async with living(make_spec(), hasten(with_hands(measure=measure), suspect=1000)) as life:
        await life.wait(lambda report: report.measured is not None and report.measured.gpu_gb == 60.0)
    told = dict.fromkeys((said.measured.memory_gb, said.measured.gpu_gb) for said in life.said if said.measured)
    assert list(told)[-2:] == [(1.05, 20.0), (1.05, 60.0)] or list(told)[-1:] == [(1.05, 60.0)]


async def test_one_of_a_group_that_serves_nobody_tells_what_it_holds_and_no_time(tools, make_spec):
    spec = replace(make_spec("--hold-mb", "400"), rank=1, count=2, rendezvous="127.0.0.1:1")
    async with living(spec, hasten(tools)) as life:
        said = await life.wait(lambda report: report.measured is not None and (report.measured.memory_gb or 0) > 0.25)
    assert said.measured.load_seconds is None


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
    assert life.states() == [P, L, G, R, S, E]
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
    ("source", "cause", "kind"),
    [
        ("/nowhere/m.fake", "can't be read", CauseKind.WEIGHTS_MISSING),
        ("oci://x/y:1", "is no scheme that is fetched", None),
    ],
)
async def test_a_source_that_can_not_be_used_ends_the_shard(tools, make_spec, source, cause, kind):
    end, life = await run_to_end(make_spec(source=source), tools)
    assert cause in end.cause
    assert end.kind == kind
    assert life.states() == [P, E]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Kind.NO_FILE, CauseKind.WEIGHTS_MISSING),
        (Kind.GATED, CauseKind.UNAUTHORISED),
        (Kind.DNS, CauseKind.OFFLINE),
        (Kind.DISK, CauseKind.DISK),
        (Kind.CORRUPT, CauseKind.WEIGHTS_CORRUPT),
        (Kind.CHANGED, None),
    ],
)
async def test_weights_that_can_not_be_fetched_end_the_shard_with_what_to_do(tools, make_spec, kind, told):
    class Without:
        def __init__(self):
            self.given_back = []

        async def obtain(self, source, engine, tell, *, by):
            await trio.lowlevel.checkpoint()
            raise FetchFailed("org/repo has no m.fake", kind, remedy="mend it")

        def give_back(self, shard):
            self.given_back.append(shard)

    weights = Without()
    end, life = await run_to_end(make_spec(source="hf:org/repo/m.fake"), replace(tools, weights=weights))
    assert (end.cause, end.remedy, end.kind) == ("org/repo has no m.fake", "mend it", told)
    assert life.states() == [P, E]
    assert weights.given_back == ["shd-m-1-0"]


async def test_a_shard_that_is_not_wanted_any_more_waits_for_no_weights(tools, make_spec):
    class Never:
        left = False

        def __init__(self):
            self.asked = trio.Event()

        async def obtain(self, source, engine, tell, *, by):
            self.asked.set()
            try:
                await trio.sleep_forever()
            finally:
                self.left = True

        def give_back(self, shard):
            assert self.left

    weights = Never()
    async with living(make_spec(source="hf:org/repo/m.fake"), replace(tools, weights=weights)) as life:
        with trio.fail_after(60):
            await weights.asked.wait()
    assert weights.left
    assert life.states() == [P, S, E]


async def test_the_sources_of_what_comes_with_the_weights_are_looked_at_too(tools, make_spec):
    end, _ = await run_to_end(make_spec(mmproj="/nowhere/eyes.fake"), tools)
    assert end.cause == "mmproj '/nowhere/eyes.fake' can't be read: No such file or directory"
    lora = Lora(name=ModelName("sql"), source="/nowhere/sql.fake")
    end, _ = await run_to_end(make_spec(loras=(lora,), epoch=2), tools)
    assert end.cause == "source of the adapter sql: '/nowhere/sql.fake' can't be read: No such file or directory"


async def test_an_engine_is_told_all_that_there_is_to_tell(tools, alter, make_spec, tmp_path):
    launches = []

    def build_command(launch):
        launches.append(launch)
        return tools.engines["fake"].build_command(launch)

    (tmp_path / "eyes.fake").touch()
    (tmp_path / "sql.fake").touch()
    lora = Lora(name=ModelName("sql"), source=str(tmp_path / "sql.fake"))
    spec = make_spec(
        env={"FAKE_ENV": "yes"}, mmproj=str(tmp_path / "eyes.fake"), loras=(lora,), context_length=512, max_output=64
    )
    profile = replace(spec.profile, tp=2, pp=3, tool_parser="parrot", reasoning_parser="r")
    spec = replace(spec, profile=profile, model=replace(spec.model, task=Task.EMBED), rank=1, count=2)
    async with living(spec, alter(build_command=build_command, validate=lambda *facts: [])) as life:
        ready = await life.wait_state(R)
        environment = (Path("/proc") / str(ready.pid) / "environ").read_bytes().split(b"\0")
        (record,) = tools.state.read()
    launch = launches[-1]
    assert (launch.task, launch.mmproj, launch.loras) == (Task.EMBED, str(tmp_path / "eyes.fake"), (lora,))
    assert (launch.tp, launch.pp, launch.rank, launch.count) == (2, 3, 1, 2)
    assert (launch.tool_parser, launch.reasoning_parser) == ("parrot", "r")
    assert (launch.context_length, launch.max_output) == (512, 64)
    assert (launch.host, launch.port, launch.served_name) == ("127.0.0.1", record.port, "m")
    assert launch.version.number == "1.0"
    assert launch.cache == str(tools.state.path / "cache")
    assert tools.state.cache.stat().st_mode & 0o777 == 0o700
    assert b"FAKE_ENV=yes" in environment


def see(*uuids, **changes):
    """A look that finds these GPUs, in this order."""
    gpu = Gpu(uuid="", index=0, gpu_class="h100-80g", name="H100", memory_gb=80.0, memory_used_gb=0.0)

    async def look_at_gpus(tools):
        return GpusFound(gpus=tuple(replace(gpu, uuid=uuid, index=at, **changes) for at, uuid in enumerate(uuids)))

    return look_at_gpus


def read_environment(pid):
    entries = (Path("/proc") / str(pid) / "environ").read_text().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries if entry)


async def test_index_of_the_driver_and_of_the_launch_disagree_after_a_reboot_and_the_card_is_the_same(
    make_spec, with_hands
):
    spec = replace(make_spec(), gpus=("GPU-b", "GPU-c"))
    cards = []
    for epoch, order in enumerate((("GPU-a", "GPU-b", "GPU-c"), ("GPU-c", "GPU-b", "GPU-a")), start=1):
        async with living(replace(spec, epoch=epoch), with_hands(look_at_gpus=see(*order))) as life:
            environment = read_environment((await life.wait_state(R)).pid)
        assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        cards.append([order[int(index)] for index in environment["CUDA_VISIBLE_DEVICES"].split(",")])
    assert cards == [["GPU-b", "GPU-c"]] * 2


async def test_no_card_is_shown_to_an_engine_that_none_is_booked_for(tools, make_spec, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    for gpus, shown in (((), ""), (None, "5")):
        async with living(replace(make_spec(), gpus=gpus), tools) as life:
            environment = read_environment((await life.wait_state(R)).pid)
        assert environment["CUDA_VISIBLE_DEVICES"] == shown


async def test_another_port_in_the_same_try_is_no_other_card(make_spec, tmp_path, with_hands):
    tools = with_hands(look_at_gpus=see("GPU-a", "GPU-b"))
    first, _ = tools.settings.engine_ports
    spec = replace(make_spec("--bind-when", str(tmp_path / "taken")), gpus=("GPU-b",))
    async with living(spec, tools) as life:
        await life.wait(lambda report: report.endpoint is not None)
        with socket.create_server(("127.0.0.1", first)):
            (tmp_path / "taken").touch()
            ready = await life.wait_state(R)
        assert ready.endpoint.port == first + 1
        assert read_environment(ready.pid)["CUDA_VISIBLE_DEVICES"] == "1"


async def test_another_program_holds_the_card_and_the_engine_is_not_started(make_spec, with_hands):
    notebook = ForeignUse(memory_gb=72.0, pid=4711, name="jupyter")
    tools = with_hands(look_at_gpus=see("GPU-a", foreign=(notebook,)))
    end, life = await run_to_end(replace(make_spec(), gpus=("GPU-a",)), tools)
    assert life.states() == [P, E]
    assert "in use by pid 4711 (jupyter): 72.0 GB" in end.cause
    assert (end.kind, end.remedy) == (CauseKind.GPU_IN_USE, "end what uses it")


async def test_shards_are_told_where_they_meet_and_over_what(tools, make_spec, with_hands, alter):
    launches = []

    def build_command(launch):
        launches.append(launch)
        return tools.engines["fake"].build_command(launch)

    async def look_at_fabrics(tools):
        return (FabricFound(name="ib-a", interface="ib0", address="10.0.0.2", hcas=("mlx5_0",)),)

    both = replace(with_hands(look_at_fabrics=look_at_fabrics), engines=alter(build_command=build_command).engines)
    spec = replace(make_spec(), rank=1, count=2, fabric="ib-a", rendezvous="10.0.0.1:29500")
    async with living(spec, both) as life:
        await life.wait_state(R)
    assert launches[-1].fabric == Fabric(address="10.0.0.2", interface="ib0", hcas=("mlx5_0",))
    assert launches[-1].rendezvous == "10.0.0.1:29500"


async def test_a_cache_folder_that_can_not_be_made_ends_the_shard(tools, make_spec):
    tools.state.cache.touch()
    end, _ = await run_to_end(make_spec(), tools)
    assert end.cause == f"the cache folder {tools.state.cache} can't be made: File exists"


async def test_a_program_that_can_not_run_is_not_launched(tools, make_spec, tmp_path):
    program = tmp_path / "engine"
    library = "libgomp.so.1: cannot open shared object file: No such file or directory"
    program.write_text(f"#!/bin/sh\necho 'error while loading shared libraries: {library}' >&2\nexit 127\n")
    program.chmod(0o755)
    settings = replace(tools.settings, binaries={"fake": str(program)})
    end, life = await run_to_end(make_spec(), replace(tools, settings=settings))
    assert end.cause == f"{program} can't run Fake engine: the shared library libgomp.so.1 is missing"
    assert end.remedy == "on Debian and Ubuntu: apt install libgomp1"
    assert life.states() == [P, E]
    assert any(report.progress == f"{program} is being checked" for report in life.said)
    _, life = await run_to_end(make_spec(epoch=2), replace(tools, settings=settings))
    assert not any(report.progress for report in life.said)


async def test_a_profile_that_does_not_fit_the_release_here_is_not_launched(tools, alter, make_spec):
    def validate(model, profile, version=None):
        return [] if version is None else [Problem(key="args", message=f"--old is gone in {version.number}")]

    end, life = await run_to_end(make_spec(), alter(validate=validate))
    assert end.cause == "profile p does not fit Fake engine 1.0 on this node: args: --old is gone in 1.0"
    assert life.states() == [P, E]


async def test_a_flag_that_its_help_does_not_list_is_warned_of_and_passed(tools, make_spec, tmp_path, caplog):
    program = tmp_path / "engine"
    listed = "".join(f"  {flag} X\\n" for flag in ("--host", "--port", "--model", "--alias"))
    program.write_text(
        "#!/bin/sh\n"
        "[ $1 = --version ] && echo fake_engine 1.0 && exit\n"
        f"[ $1 = --help ] && printf '{listed}' && exit\n"
        f'exec {sys.executable} -m fake_engine "$@"\n'
    )
    program.chmod(0o755)
    settings = replace(tools.settings, binaries={"fake": str(program)})
    async with living(make_spec("--load-seconds", "0"), replace(tools, settings=settings)) as life:
        await life.wait_state(R)
    said = [record.message for record in caplog.records if "--load-seconds" in record.message]
    assert said == ["shard shd-m-1-0: profile p passes --load-seconds: unknown"]


async def test_an_engine_that_nobody_installed_ends_the_shard(tools, make_spec):
    spec = make_spec()
    end, _ = await run_to_end(replace(spec, profile=replace(spec.profile, engine="nobody")), tools)
    assert "no engine plugin is called nobody" in end.cause


async def test_a_command_that_can_not_be_started_ends_the_shard(tools, alter, make_spec, tmp_path):
    program = tmp_path / "engine"
    program.write_bytes(b"\x7fELF\x02\x01\x01" + b"\0" * 11 + b"\xed\xed\1\0\0\0" + b"\0" * 40)
    program.chmod(0o755)

    def build_command(launch):
        return replace(tools.engines["fake"].build_command(launch), argv=(str(program),))

    end, _ = await run_to_end(make_spec(), alter(build_command=build_command))
    assert end.cause.startswith(f"{program} can't be started: wrong CPU architecture")
    assert end.remedy
    assert tools.ports.take() == tools.settings.engine_ports[0] + 1


async def test_nothing_that_is_told_of_an_engine_holds_a_value_of_its_environment(
    tools, make_spec, monkeypatch, caplog, tmp_path
):
    monkeypatch.setenv("HF_TOKEN", "inherited-sekret")
    caplog.set_level("INFO")
    lines = ("loading: bad token sekret-value", "HF_TOKEN=inherited-sekret", "x" * 1995 + "sekret-value")
    words = [word for line in lines for word in ("--print-line", line)]
    env = {"MY_MODE": "sekret-value"}
    spec = make_spec(*words, "--ready-when", str(tmp_path / "never"), env=env)
    async with living(spec, tools) as life:
        assert (
            await life.wait(lambda report: report.state is G and report.progress is not None)
        ).progress == "bad token ***"
    end, life = await run_to_end(make_spec(*words, "--crash-at-start", "--exit-code", "3", env=env, number=2), tools)
    assert end.lines[:2] == ("loading: bad token ***", "HF_TOKEN=***")
    assert "sekret" not in repr(life.said)
    fatal = ("--print-line", "fatal: port 1 is already in use by sekret-value", "--crash-at-start", "--exit-code", "3")
    end, life = await run_to_end(make_spec(*fatal, env=env, number=3), tools)
    assert end.cause is not None
    assert "sekret" not in repr(life.said)
    assert "sekret" not in caplog.text


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("--print-line", "odd", "--exit-code", "3"), "look at its last lines: what went wrong stands there"),
        (("--print-line", "usage", "--exit-code", "0"), "A wrapper has to exec the engine"),
        (("--exit-code", "3"), "it printed nothing: run its program by hand"),
    ],
)
async def test_an_exit_that_no_line_explains_brings_what_to_do(tools, make_spec, words, remedy):
    end, _ = await run_to_end(make_spec("--crash-at-start", *words), tools)
    assert remedy in end.remedy


async def test_a_fault_of_llmgw_ends_the_shard_and_its_engine(alter, make_spec):
    def read_health(status, body):
        raise ZeroDivisionError("boom")

    end, _ = await run_to_end(make_spec(), alter(read_health=read_health))
    assert end.cause == "a fault of llmgw itself: ZeroDivisionError: boom"
    assert is_gone(end.pid)
