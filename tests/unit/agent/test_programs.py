"""Which program runs an engine, and its version."""

from __future__ import annotations

import os
import sys

import pytest
import trio

from llmgw.agent.programs import Programs, find_program
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
    with pytest.raises(EngineFailed, match="not a program"):
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


async def test_a_version_is_asked_for_once_until_the_file_changes(engine, binary, engines):
    programs = Programs(marker_prefix="")
    program = (str(binary),)
    assert (await programs.probe(engine, program)).number == "1.0"
    assert (await programs.probe(engine, program)).number == "1.0"
    assert (binary.parent / "asked").read_text() == "x\n"
    write(binary, "1.1")
    os.utime(binary, (1, 1))
    assert (await programs.probe(engine, program)).number == "1.1"


async def test_a_program_that_says_nothing_has_no_version(engine, engines, tmp_path):
    assert await Programs(marker_prefix="").probe(engine, ("/bin/false",)) is None
    assert await Programs(marker_prefix="").probe(engine, ("/nowhere/x",)) is None


@pytest.mark.slow
async def test_the_embedded_program_tells_its_version(engine, engines):
    program = find_program(engine, {})
    assert (await Programs(marker_prefix="").probe(engine, program)).number == "1.0"


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
        nursery.start_soon(Programs(marker_prefix=prefix).probe, engine, (str(binary),))
        with trio.fail_after(60):
            while not find_marked(f"{prefix}probe-1:"):  # noqa: ASYNC110 - another process
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert find_marked(prefix) == {}
