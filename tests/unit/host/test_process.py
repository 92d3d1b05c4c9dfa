"""Engine processes, as real processes."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys

import pytest
import trio

from llmgw.engines.types import Command
from llmgw.host.process import (
    NoOutput,
    Silence,
    _may_begin,
    advise_exit,
    describe_exit,
    find_marked,
    find_tree,
    hash_argv,
    is_killed,
    read_boot_id,
    read_marker,
    read_stat,
    run_probe,
    split_exit,
    start_process,
    take_over,
)

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
MANY_THREADS = """
import os, signal, threading, time
signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
for _ in range(40):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("up", os.getpid(), "", flush=True)
time.sleep(600)
"""
FIRST_THREAD_LEAVES = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("up", flush=True)
ctypes.CDLL(None).syscall(60 if __import__("platform").machine() == "x86_64" else 93, 0)
"""
PARENT_LEAVES = """
import os, signal, time
if os.fork() == 0:
    signal.signal(15, signal.SIG_IGN)
    print("child", os.getpid(), flush=True)
    time.sleep(600)
"""
CHILD_LEAVES_WHEN_ASKED_TO_END = """
import os, signal, time
if os.fork() == 0:
    signal.signal(15, lambda *_: os.getpid() != os.getsid(0) and os.setsid())
    print("child", os.getpid(), flush=True)
    while True:
        time.sleep(600)
time.sleep(600)
"""
FORKS_WITHOUT_END = """
import os, time
print("up", flush=True)
while True:
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    time.sleep(0.01)
"""
CHILD_LEAVES_THE_GROUP = """
import os, time
if os.fork() == 0:
    os.setsid()
    print("child", os.getpid(), flush=True)
time.sleep(600)
"""


def is_gone(pid):
    stat = read_stat(pid)
    return stat is None or stat.state in "ZX"


def test_a_name_with_spaces_and_brackets_is_read_past(tmp_path):
    odd = tmp_path / "a) R (b"
    odd.symlink_to("/bin/sleep")
    process = start_process(Command(argv=(str(odd), "60")), log=tmp_path / "log", marker="x")
    try:
        stat = read_stat(process.pid)
        assert (stat.parent, stat.group, stat.session) == (os.getpid(), process.pid, process.pid)
        assert stat.start_time == process.start_time
    finally:
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        process.close()


@pytest.mark.slow
async def test_the_exit_code_of_a_child_is_known(start):
    process = start("raise SystemExit(7)")
    with trio.fail_after(60):
        assert await process.wait_exit() == 7
        assert await process.wait_exit() == 7
    assert read_stat(process.pid) is None


@pytest.mark.slow
async def test_a_signal_is_told_from_an_exit_code(start, wait_for_line):
    process = start(SLEEP)
    await wait_for_line("up")
    os.kill(process.pid, signal.SIGKILL)
    with trio.fail_after(60):
        assert await process.wait_exit() == -signal.SIGKILL


@pytest.mark.slow
async def test_output_of_both_kinds_goes_to_the_end_of_the_file(start, tmp_path):
    (tmp_path / "log").write_text("before\n")
    process = start(
        "import sys; print('out', flush=True); print('err', file=sys.stderr); print(repr(sys.stdin.read()))"
    )
    with trio.fail_after(60):
        await process.wait_exit()
    assert (tmp_path / "log").read_text().splitlines() == ["before", "out", "err", "''"]


@pytest.mark.slow
async def test_the_environment_is_scrubbed_then_set(start, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGW_API_KEYS", "secret")
    monkeypatch.setenv("LLAMA_ARG_PORT", "1")
    monkeypatch.setenv("KEPT", "yes")
    code = "import os; print(*(os.environ.get(n) for n in ('LLMGW_API_KEYS', 'LLAMA_ARG_PORT', 'KEPT', 'NEW')))"
    process = start(code, env={"NEW": "set"}, scrub=("LLAMA_ARG_",))
    with trio.fail_after(60):
        await process.wait_exit()
    assert (tmp_path / "log").read_text() == "None None yes set\n"


@pytest.mark.slow
async def test_a_default_is_set_where_nobody_says_otherwise(start, tmp_path, monkeypatch):
    monkeypatch.setenv("BY_THE_MACHINE", "machine")
    monkeypatch.setenv("FAKE_SCRUBBED", "machine")
    names = ("BY_THE_MACHINE", "BY_THE_PROFILE", "FAKE_SCRUBBED", "BY_NOBODY")
    process = start(
        f"import os; print(*(os.environ[n] for n in {names}))",
        env={"BY_THE_PROFILE": "profile"},
        defaults=dict.fromkeys(names, "default"),
        scrub=("FAKE_",),
    )
    with trio.fail_after(60):
        await process.wait_exit()
    assert (tmp_path / "log").read_text() == "machine profile default default\n"


@pytest.mark.slow
async def test_stopping_ends_a_process_that_listens_to_its_signal(start, wait_for_line):
    process = start(SLEEP)
    await wait_for_line("up")
    with trio.fail_after(60):
        assert await process.stop(signal.SIGINT, 30)
    assert is_gone(process.pid)
    assert process.code is not None


@pytest.mark.slow
async def test_a_process_that_is_deaf_to_term_is_killed(start, wait_for_line):
    process = start(DEAF)
    await wait_for_line("up")
    with trio.fail_after(60):
        assert await process.stop(signal.SIGTERM, 0.2)
    assert is_gone(process.pid)
    assert process.code == -signal.SIGKILL


@pytest.mark.slow
async def test_nothing_is_left_of_a_process_of_many_threads(start, wait_for_line):
    for first in (signal.SIGTERM, signal.SIGKILL, None):
        process = start(MANY_THREADS)
        await wait_for_line(f"up {process.pid} ")
        if first is None:
            os.kill(process.pid, signal.SIGUSR1)
            with trio.fail_after(60):
                assert await process.wait_exit() == 3
        with trio.fail_after(60):
            assert await process.stop(first or signal.SIGTERM, 30)
        assert read_stat(process.pid) is None
        assert process.code in (3, -signal.SIGTERM, -signal.SIGKILL)


@pytest.mark.slow
async def test_a_process_whose_first_thread_is_dead_lives_on_in_the_others(start, wait_for_line):
    process = start(FIRST_THREAD_LEAVES)
    await wait_for_line("up")
    with trio.fail_after(60):
        while read_stat(process.pid).state != "Z":  # noqa: ASYNC110 - the kernel has no event for it
            await trio.sleep(0.01)
        # What looks like a zombie still holds its memory and its port.
        assert process.pid in await process.find_alive()
        assert not process.ended
        assert await process.stop(signal.SIGTERM, 30)
    assert read_stat(process.pid) is None
    assert process.code == -signal.SIGTERM


@pytest.mark.slow
async def test_the_exit_code_is_known_when_another_thread_looks_at_the_same_time(start):
    for _ in range(10):
        process = start("raise SystemExit(7)")
        codes = []

        async def wait(process=process, codes=codes):
            codes.append(await process.wait_exit())

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                while await process.find_alive():
                    pass
        assert codes == [7]


@pytest.mark.slow
async def test_a_killed_process_is_known_as_such_at_once(start, wait_for_line):
    process = start(SLEEP)
    await wait_for_line("up")
    assert not is_killed(process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    assert not is_killed(process.pid)
    with trio.fail_after(60):
        assert await process.stop(signal.SIGKILL, 30)
    assert is_killed(process.pid)


@pytest.mark.slow
async def test_children_are_stopped_even_when_their_leader_is_dead(start, wait_for_line):
    process = start(PARENT_LEAVES)
    child = int((await wait_for_line("child")).split()[1])
    with trio.fail_after(60):
        await process.wait_exit()
        assert not is_gone(child)
        assert await process.stop(signal.SIGTERM, 0.2)
    assert is_gone(child)


@pytest.mark.slow
async def test_a_child_that_left_the_group_is_found(start, wait_for_line):
    process = start(CHILD_LEAVES_THE_GROUP)
    child = int((await wait_for_line("child")).split()[1])
    assert child in find_tree(process.pid)
    with trio.fail_after(60):
        assert await process.stop(signal.SIGTERM, 5)
    assert is_gone(child)


@pytest.mark.slow
async def test_a_child_that_left_the_group_of_a_dead_leader_is_found_by_its_marker(start, wait_for_line):
    process = start(CHILD_LEAVES_THE_GROUP)
    child = int((await wait_for_line("child")).split()[1])
    os.kill(process.pid, signal.SIGKILL)
    with trio.fail_after(60):
        await process.wait_exit()
        assert not is_gone(child)
        assert await process.stop(signal.SIGTERM, 5)
    assert is_gone(child)


@pytest.mark.slow
async def test_a_child_that_leaves_the_group_while_it_is_stopped_is_killed(start, wait_for_line):
    process = start(CHILD_LEAVES_WHEN_ASKED_TO_END)
    child = int((await wait_for_line("child")).split()[1])
    with trio.fail_after(60):
        assert await process.stop(signal.SIGTERM, 0.2)
    assert is_gone(child)


@pytest.mark.slow
async def test_what_is_forked_while_all_is_killed_is_killed_too(start, wait_for_line):
    process = start(FORKS_WITHOUT_END)
    await wait_for_line("up")
    with trio.fail_after(60):
        assert await process.stop(signal.SIGKILL, 30)
    assert find_marked(process.marker) == {}


@pytest.mark.slow
async def test_a_process_can_be_taken_over_by_its_start_time(start, wait_for_line):
    process = start(SLEEP)
    await wait_for_line("up")
    assert take_over(process.pid, process.start_time + 1, "x") is None
    other = take_over(process.pid, process.start_time, process.marker)
    assert other is not None
    with trio.fail_after(60):
        assert await other.stop(signal.SIGTERM, 30)
        await other.wait_exit()
    other.close()


def test_what_is_gone_can_not_be_taken_over():
    assert take_over(2**22 - 7, 1, "x") is None
    assert take_over(-1, 1, "x") is None


@pytest.mark.slow
async def test_the_marker_is_read_back(start, wait_for_line, tmp_path):
    process = start(SLEEP)
    await wait_for_line("up")
    assert read_marker(process.pid) == f"{tmp_path}:shd-x:0"
    assert read_marker(2**22 - 7) is None


@pytest.fixture
def execs(tmp_path):
    """A program that does nothing but execute itself again and again."""
    script = tmp_path / "again"
    script.write_text('#!/bin/sh\nexec "$0"\n')
    script.chmod(0o700)
    process = start_process(Command(argv=(str(script),)), log=tmp_path / "log", marker=f"{tmp_path}:shd-x:0")
    yield process
    os.kill(process.pid, signal.SIGKILL)
    os.waitpid(process.pid, 0)
    process.close()


@pytest.mark.slow
def test_the_marker_of_what_is_just_being_executed_is_read(execs):
    assert {read_marker(execs.pid) for _ in range(20_000)} == {execs.marker}
    assert {tuple(find_marked(execs.marker).values()) for _ in range(20)} == {(execs.marker,)}


def test_what_has_no_environment_is_not_waited_for(tmp_path):
    with subprocess.Popen(["/usr/bin/env", "-i", "/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bare:
        # it has begun once it answers
        bare.stdin.write(b"up\n")
        bare.stdin.flush()
        assert bare.stdout.readline() == b"up\n"
        assert not _may_begin(bare.pid)
        assert read_marker(bare.pid) is None


def test_a_program_that_is_not_there_raises_and_leaves_no_file_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        start_process(Command(argv=("/nowhere/engine",)), log=tmp_path / "log", marker="x")
    assert len(os.listdir("/proc/self/fd")) == before


PROBE = "/tmp/state:probe-1:0"


def probing(code: str) -> Command:
    return Command(argv=(sys.executable, "-c", code))


@pytest.mark.slow
async def test_a_probe_tells_what_was_printed():
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    output = await run_probe(probing(code), 60, marker=PROBE)
    assert (output.code, output.stdout, output.stderr) == (3, "out\n", "err\n")


@pytest.mark.slow
async def test_a_probe_that_hangs_took_too_long():
    said = await run_probe(probing("print('half', flush=True); import time; time.sleep(600)"), 0.1, marker=PROBE)
    assert said == NoOutput(why=Silence.TIMED_OUT)


async def test_a_probe_that_can_not_be_started_brings_the_error(tmp_path):
    said = await run_probe(Command(argv=("/nowhere/engine",)), 60, marker=PROBE)
    assert (said.why, said.error.errno) == (Silence.NOT_STARTED, errno.ENOENT)
    (tmp_path / "engine").write_bytes(b"\x7fELF this is none")
    (tmp_path / "engine").chmod(0o755)
    said = await run_probe(Command(argv=(str(tmp_path / "engine"),)), 60, marker=PROBE)
    assert (said.why, said.error.errno) == (Silence.NOT_STARTED, errno.ENOEXEC)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_probe_that_prints_without_end_printed_too_much(stream):
    code = f"import sys\nwhile True: print('x' * 1000, file=sys.{stream})"
    assert await run_probe(probing(code), 5, marker=PROBE) == NoOutput(why=Silence.TOO_MUCH)


WITH_A_CHILD = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(float(os.environ["SECONDS"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["by itself", "by cancellation"])
async def test_a_probe_leaves_no_process(tmp_path, monkeypatch, ending):
    """Its children neither, which would hold what they have for ever."""
    monkeypatch.setenv("SECONDS", "0" if ending == "by itself" else "600")
    marker = f"{tmp_path}:probe-1:0"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(functools.partial(run_probe, probing(WITH_A_CHILD), 60, marker=marker))
        with trio.fail_after(60):
            while len(find_marked(marker)) < 2 and ending == "by cancellation":  # noqa: ASYNC110 - other processes
                await trio.sleep(0.01)
        if ending == "by cancellation":
            nursery.cancel_scope.cancel()
    assert find_marked(marker) == {}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended by itself with exit code 0"),
        (1, "ended by itself with exit code 1"),
        (127, "ended by itself with exit code 127 (a program or shared library is missing)"),
        (-9, "killed by SIGKILL (out of memory?)"),
        (137, "killed by SIGKILL (out of memory?)"),
        (-11, "killed by SIGSEGV"),
        (255, "ended by itself with exit code 255"),
        (None, "ended with an exit code that is unknown, because an earlier llmgw started it"),
    ],
)
def test_an_exit_code_in_words(code, words):
    assert describe_exit(code) == words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "has to exec the engine"),
        (1, "its last lines"),
        (-11, "it crashed"),
        (134, "it crashed"),
        (-15, "who ended it"),
    ],
)
def test_what_to_do_about_an_exit_that_nothing_explains(code, words):
    assert words in advise_exit(code)


@pytest.mark.parametrize(("number", "facts"), [(0, (0, None)), (3, (3, None)), (-9, (None, 9)), (None, (None, None))])
def test_an_exit_is_a_code_or_a_signal(number, facts):
    assert split_exit(number) == facts


def test_a_command_line_has_a_short_name_of_its_own():
    assert hash_argv(("a", "b c")) != hash_argv(("a", "b", "c"))
    assert hash_argv(("a", "\udcff")) == hash_argv(("a", "\udcff"))


def test_the_boot_id_stays_the_same_until_a_reboot():
    assert read_boot_id() == read_boot_id() != ""
