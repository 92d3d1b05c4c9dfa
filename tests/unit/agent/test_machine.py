"""The hands of a real agent, where they do more than pass on."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import trio

from llmgw.agent.machine import Machine
from llmgw.engines.types import Command
from llmgw.host.http import REFUSED
from llmgw.host.ports import is_free
from llmgw.host.usage import Usage


@pytest.fixture
def machine(settings):
    machine = Machine(settings)
    machine.state.make()
    return machine


@pytest.fixture
def start(machine):
    """Start this script; what is left of it is killed."""
    started = []

    def start(script):
        log = machine.state.logs / "shd.log"
        marker = f"{machine.state.marker_prefix()}shd:1"
        process = machine.start(Command(argv=("/bin/sh", "-c", script)), log=log, marker=marker)
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()
        if not process.ended:
            os.killpg(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)


async def test_what_blocks_is_done_in_a_thread(machine):
    assert await machine.run(threading.get_ident) != threading.get_ident()
    assert await machine.run(max, 1, 2) == 2


async def test_all_processes_of_an_engine_are_measured_together(machine, tools, start):
    process = start("sleep 1000 & sleep 1000 & wait")
    usage = Usage()
    with trio.fail_after(60):
        while len(usage.pids) < 3:
            usage = await machine.measure(tools, process)
    assert process.pid in usage.pids
    assert 0 < usage.memory_gb < 0.1
    assert usage.gpu_gb is None


async def test_an_engine_begins_a_log_of_its_own(machine, start):
    path = machine.state.logs / "shd.log"
    with trio.fail_after(60):
        for words in ("one", "two"):
            await start(f"echo {words}").wait_exit()
    assert path.read_text() == "two\n"
    assert path.with_name("shd.log.1").read_text() == "one\n"
    assert machine.state.open_log(path, str.upper).read_last(5) == ("TWO",)


SLEEP = "exec sleep 600"


def wait_for_sleep(pid):
    """Until it is past all that it executes, and has what the kernel lays out for it."""
    folder = Path("/proc") / str(pid)
    deadline = time.monotonic() + 60
    while not ((folder / "cmdline").read_bytes().startswith(b"sleep\0") and (folder / "environ").read_bytes()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_has_its_kill_already_is_not_found(machine, start):
    process, other = start(SLEEP), start(SLEEP)
    for each in (process, other):
        wait_for_sleep(each.pid)
    os.kill(process.pid, signal.SIGKILL)
    found = machine.find_marked(machine.state.marker_prefix())
    assert [stat.pid for stat in found] == [other.pid]


@pytest.mark.parametrize(("machines", "threads"), [(1024, True), (None, False)])
def test_an_engine_is_given_threads_where_it_may_use_a_part_of_the_machine(machine, monkeypatch, machines, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: machines)
    assert (machine.choose_threads() is not None) is threads


async def test_engines_are_asked_on_this_machine(machine):
    port = next(port for port in range(33000, 34000) if is_free(port))
    assert await machine.get(port, "/health") == REFUSED
    assert await machine.post(port, "/v1/completions", {}) == REFUSED


def test_the_clock_since_the_boot_goes_on_while_the_machine_sleeps(machine):
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= machine.boot_seconds() <= time.clock_gettime(time.CLOCK_BOOTTIME)
