"""Which state folder is ours, and what is left in another."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.errors import UsageError
from llmgw.host.process import MARKER
from llmgw.host.state import StateFolder, StateTaken, hold_state
from llmgw.standalone.places import hold_own_folder, warn_of_leftovers


def test_two_ports_have_two_folders(tmp_path: Path) -> None:
    with hold_own_folder(tmp_path, 1) as first, hold_own_folder(tmp_path, 2) as second:
        assert first != second


@pytest.mark.parametrize("port", [0, 21010])
def test_the_folder_is_nobody_elses_from_the_choice_on(tmp_path: Path, port: int) -> None:
    with (
        hold_own_folder(tmp_path, port) as folder,
        pytest.raises(StateTaken, match=f"pid {os.getpid()}"),
        hold_state(folder),
    ):
        pass


def test_any_port_takes_the_first_folder_that_nobody_works_with(tmp_path: Path) -> None:
    with hold_own_folder(tmp_path, 0) as first, hold_own_folder(tmp_path, 0) as second:
        assert second != first
    # whoever held it was killed, and its engines are to be found again
    with hold_own_folder(tmp_path, 0) as again:
        assert again == first


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="give another"), hold_own_folder(tmp_path / "file" / "state", 1):
        pass


@pytest.mark.parametrize(("port", "name"), [(0, "serve-any-1"), (21010, "serve-21010")])
def test_a_folder_that_cannot_be_used_says_so(tmp_path: Path, port: int, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UsageError, match=rf"{name} can't be used .*mend that"), hold_own_folder(tmp_path, port):
        pass


@pytest.mark.parametrize("held", [False, True])
def test_engines_that_nobody_watches_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, held: bool) -> None:
    other = tmp_path / "serve-21010"
    other.mkdir()
    marker = f"{StateFolder(other).marker_prefix()}shd-m-1-0:1"
    engine = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={**os.environ, MARKER: marker},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with engine, caplog.at_level(logging.WARNING):
        assert engine.stdout is not None
        assert engine.stdin is not None
        engine.stdout.readline()
        if held:
            with hold_state(other):
                warn_of_leftovers(tmp_path / "serve-21011")
        else:
            warn_of_leftovers(tmp_path / "serve-21011")
        engine.stdin.write(b"\n")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (0 if held else 1)
    if said:
        assert "--port 21010" in said[0]
        assert f"kill {engine.pid}" in said[0]
