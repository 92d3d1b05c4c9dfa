"""Which program runs an engine, and what came of trying it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
import trio
import trio.testing

from llmgw.agent.machine import Machine
from llmgw.agent.programs import LONGEST_PAUSE, RETRY_SECONDS, Programs, find_program
from llmgw.agent.settings import AgentSettings, WeightsSettings
from llmgw.core.node import NodeId
from llmgw.engines.types import Embedded
from llmgw.errors import EngineFailed
from llmgw.host.process import find_marked


@pytest.fixture
def engine(engines):
    return engines["fake"]


@pytest.fixture
def binary(tmp_path):
    """A program that prints a version and counts how often it was asked."""
    path = tmp_path / "bin" / "llmgw-fake-engine"
    path.parent.mkdir()
    write(path, "1.0")
    return path


def write(path, version):
    path.write_text(f"#!/bin/sh\necho x >> {path.parent}/asked\necho fake_engine {version}\n")
    path.chmod(0o755)


def test_a_configured_binary_is_the_one(engine, binary, monkeypatch):
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    assert find_program(engine, {"fake": str(binary)}) == (str(binary),)


def test_a_configured_binary_that_is_not_there_is_not_replaced_by_another(engine, binary, monkeypatch):
    monkeypatch.setenv("PATH", str(binary.parent))
    with pytest.raises(EngineFailed, match=r"engines\.fake\.bin: /nowhere/x"):
        find_program(engine, {"fake": "/nowhere/x"})
    binary.chmod(0o644)
    with pytest.raises(EngineFailed, match="it may not be executed"):
        find_program(engine, {"fake": str(binary)})


def test_the_binary_on_the_path_comes_before_the_embedded_one(engine, binary, monkeypatch):
    monkeypatch.setenv("PATH", str(binary.parent))
    assert find_program(engine, {}) == (str(binary),)


def test_the_embedded_program_is_run_by_this_python(engine):
    assert find_program(engine, {}) == (sys.executable, "-m", "fake_engine")


@pytest.mark.parametrize("requires", ["no_such_module_of_anybody", "no_such.module", ""])
def test_without_any_the_cause_says_what_to_install(engine, requires):
    engine.embedded = Embedded(module="m", requires=requires, install="pip install it")
    with pytest.raises(EngineFailed, match=r"no llmgw-fake-engine on PATH.*engines\.fake\.bin.*pip install it"):
        find_program(engine, {})


def test_without_an_embedded_program_only_the_binary_is_named(engine):
    engine.embedded = None
    with pytest.raises(EngineFailed, match=r"on PATH; put it there, set engines\.fake\.bin$"):
        find_program(engine, {})


def programs_of(state, retry_seconds=1e9):
    settings = AgentSettings(node_id=NodeId("n1"), state=state, weights=WeightsSettings(cache=state / "weights"))
    return Programs(Machine(settings), retry_seconds=retry_seconds)


def asked(binary):
    return (binary.parent / "asked").read_text().count("x")


@pytest.mark.slow
async def test_a_program_is_tried_once_until_its_file_changes(engine, binary, tmp_path):
    programs, program = programs_of(tmp_path), (str(binary),)
    assert await programs.find(engine, program) is None
    found = await programs.check(engine, program)
    assert found.version.number == "1.0"
    times = asked(binary)
    assert await programs.check(engine, program) is found
    assert await programs.find(engine, program) is found
    assert asked(binary) == times
    write(binary, "1.1")
    os.utime(binary, (1, 1))
    assert await programs.find(engine, program) is None
    assert (await programs.check(engine, program)).version.number == "1.1"


@pytest.mark.slow
async def test_who_asks_while_a_program_is_tried_waits_for_that_one_try(engine, binary, tmp_path):
    programs, found = programs_of(tmp_path), []

    async def check():
        found.append(await programs.check(engine, (str(binary),)))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(check)
    assert found[0] is found[1] is found[2]
    assert programs.changes == 1


@pytest.mark.slow
async def test_a_broken_program_is_left_alone_for_a_while_and_tried_again(engine, binary, tmp_path):
    program = (str(binary),)
    binary.write_text(f"#!/bin/sh\necho x >> {binary.parent}/asked\nexit 3\n")
    patient = programs_of(tmp_path)
    for _ in range(2):
        assert "exit code 3" in (await patient.check(engine, program)).broken
    assert asked(binary) == 1
    eager = programs_of(tmp_path, retry_seconds=0)
    for _ in range(2):
        assert (await eager.check(engine, program)).broken
    assert asked(binary) == 3


@pytest.mark.slow
async def test_a_program_that_can_not_start_is_tried_ever_more_rarely(engine, binary, tmp_path, mock_clock):
    binary.write_text(f"#!/bin/sh\necho x >> {binary.parent}/asked\nexit 3\n")
    programs, program = programs_of(tmp_path, RETRY_SECONDS), (str(binary),)
    pauses, tried_at = [], mock_clock.current_time()
    await programs.check(engine, program)
    for _ in range(80):
        mock_clock.jump(60)
        changes = programs.changes
        await programs.check(engine, program)
        if programs.changes > changes:
            pauses.append(mock_clock.current_time() - tried_at)
            tried_at = mock_clock.current_time()
    assert pauses == [60, 120, 240, 480, 960, 960, 960, 960]
    assert max(pauses) == LONGEST_PAUSE * RETRY_SECONDS
    # Another file may be another program: it is tried at once, and the pauses begin anew.
    os.utime(binary, (1, 1))
    before = asked(binary)
    await programs.check(engine, program)
    assert asked(binary) == before + 1
    mock_clock.jump(60)
    await programs.check(engine, program)
    assert asked(binary) == before + 2


@pytest.mark.slow
async def test_one_that_was_undecided_is_tried_ever_more_rarely_too(engine, binary, tmp_path, mock_clock):
    def fail(launch):
        raise ZeroDivisionError("a plugin's fault")

    programs, program = programs_of(tmp_path, RETRY_SECONDS), (str(binary),)
    # (Engine answers for a plugin that raises; this is one that llmgw has no answer for.)
    engine.build_command = fail
    found = await programs.check(engine, program, again=True)
    assert (found.undecided, found.starts, found.broken) == (True, True, None)
    tries = []
    for minute in range(1, 20):
        mock_clock.jump(60)
        changes = programs.changes
        await programs.check(engine, program, again=True)
        tries += [minute] if programs.changes > changes else []
    assert tries == [1, 3, 7, 15]


@pytest.mark.slow
async def test_one_that_only_does_not_know_our_flags_is_tried_again_when_it_has_changed(
    engine, binary, tmp_path, mock_clock
):
    text = "usage: x\n  --host H\n  --port N\n  --alias A\n"
    binary.write_text(
        f"#!/bin/sh\necho x >> {binary.parent}/asked\n[ $1 = --help ] && printf '{text}' || echo fake_engine 1.0\n"
    )
    programs, program = programs_of(tmp_path, RETRY_SECONDS), (str(binary),)
    found = await programs.check(engine, program)
    assert found.starts
    assert "llmgw passes --model" in found.broken
    before = asked(binary)
    mock_clock.jump(1e6)
    assert await programs.check(engine, program, again=True) is found
    assert asked(binary) == before
    os.utime(binary, (1, 1))
    await programs.check(engine, program)
    assert asked(binary) > before


@pytest.mark.slow
@pytest.mark.parametrize("packages", ["lib/python3.12/site-packages", "lib/python3/dist-packages"])
async def test_an_upgrade_of_the_packages_beside_it_makes_it_another_program(engine, binary, tmp_path, packages):
    folder = tmp_path / packages
    folder.mkdir(parents=True)
    os.utime(folder, (1, 1))
    # PATH has a link into the environment.
    link = tmp_path / "local" / "engine"
    link.parent.mkdir()
    link.symlink_to(binary)
    programs = programs_of(tmp_path)
    found = [await programs.check(engine, (str(path),)) for path in (binary, link)]
    assert await programs.check(engine, (str(binary),)) is found[0]
    (folder / "engine-2.dist-info").mkdir()
    for path, earlier in zip((binary, link), found, strict=True):
        assert await programs.find(engine, (str(path),)) is None
        assert await programs.check(engine, (str(path),)) is not earlier
    folder.rename(tmp_path / "gone")
    assert await programs.find(engine, (str(binary),)) is None


@pytest.mark.slow
async def test_an_interpreter_that_is_a_link_out_of_its_environment_has_the_packages_of_that(engine, binary, tmp_path):
    environment = tmp_path / "venv"
    folder = environment / "lib/python3.12/site-packages"
    folder.mkdir(parents=True)
    os.utime(folder, (1, 1))
    (environment / "bin").mkdir()
    python = environment / "bin" / "python"
    python.symlink_to(binary)
    programs = programs_of(tmp_path)
    await programs.check(engine, (str(python),))
    os.utime(folder, (2, 2))
    assert await programs.find(engine, (str(python),)) is None


@pytest.mark.slow
async def test_a_fault_of_whoever_reads_it_is_told_once_and_breaks_nothing(engine, binary, tmp_path, caplog):
    def fail(launch):
        raise ZeroDivisionError("a plugin's\nfault")

    engine.build_command = fail
    programs, program = programs_of(tmp_path, retry_seconds=0), (str(binary),)
    for _ in range(3):
        found = await programs.check(engine, program, again=True)
    assert programs.changes == 3
    reason = "it is not checked, by a fault of the plugin or of llmgw: ZeroDivisionError: a plugin's fault"
    assert (found.broken, found.problems) == (None, (reason,))
    (record,) = caplog.records
    assert record.getMessage() == f"engine fake: {binary}: {reason}"
    assert record.exc_info is not None
    del engine.build_command
    assert (await programs.check(engine, program, again=True)).version.number == "1.0"


@pytest.mark.slow
async def test_one_that_took_too_long_is_not_tried_again_by_a_launch(engine, binary, tmp_path):
    (tmp_path / "busy").touch()
    binary.write_text(f"#!/bin/sh\n[ -e {tmp_path}/busy ] && exec sleep 600\necho fake_engine 1.0\n")
    engine.info = replace(engine.info, probe_seconds=0.1)
    programs, program = programs_of(tmp_path, retry_seconds=0), (str(binary),)
    first = await programs.check(engine, program)
    assert first.undecided
    (tmp_path / "busy").unlink()
    engine.info = replace(engine.info, probe_seconds=60)
    assert await programs.check(engine, program) is first
    assert (await programs.check(engine, program, again=True)).version.number == "1.0"


@pytest.mark.slow
async def test_a_problem_is_logged_once_and_again_when_it_comes_back(engine, binary, tmp_path, caplog):
    programs, program = programs_of(tmp_path, retry_seconds=0), (str(binary),)
    library = "libgomp.so.1: cannot open shared object file: No such file or directory"

    async def break_it():
        binary.write_text(f"#!/bin/sh\necho 'x: error while loading shared libraries: {library}' >&2\nexit 127\n")
        for _ in range(2):
            await programs.check(engine, program)

    await break_it()
    said = [record.message for record in caplog.records]
    assert said == [
        f"engine fake: {binary}: the shared library libgomp.so.1 is missing; on Debian and Ubuntu: apt install libgomp1"
    ]
    write(binary, "1.0")
    assert (await programs.check(engine, program)).broken is None
    await break_it()
    assert len(caplog.records) == 2


@pytest.mark.slow
async def test_whoever_waits_for_news_hears_of_every_try(engine, binary, tmp_path):
    programs = programs_of(tmp_path)
    heard = trio.Event()

    async def listen():
        await programs.wait_changed(0)
        heard.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await trio.testing.wait_all_tasks_blocked()
        assert not heard.is_set()
        await programs.check(engine, (str(binary),))
        with trio.fail_after(60):
            await heard.wait()
    # It has changed already.
    await programs.wait_changed(0)


@pytest.mark.slow
async def test_the_embedded_program_tells_its_version(engine, tmp_path):
    assert (await programs_of(tmp_path).check(engine, find_program(engine, {}))).version.number == "1.0"


def test_a_program_at_a_path_that_is_no_text_is_refused(engine, binary, monkeypatch):
    folder = os.fsdecode(os.fsencode(binary.parent) + b"-\xff")
    os.rename(binary.parent, folder)
    monkeypatch.setenv("PATH", folder)
    with pytest.raises(EngineFailed, match=r"bin-\\xff/.* is not UTF-8"):
        find_program(engine, {})


@pytest.mark.slow
async def test_a_probe_that_is_given_up_is_ended_and_bears_the_folders_marker(engine, binary, tmp_path):
    binary.write_text("#!/bin/sh\nsleep 600\n")
    prefix = f"{tmp_path}:"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(programs_of(tmp_path).check, engine, (str(binary),))
        with trio.fail_after(60):
            while not find_marked(f"{prefix}probe-1:"):  # noqa: ASYNC110 - another process
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert find_marked(prefix) == {}
