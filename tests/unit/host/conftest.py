"""Programs to start: each a few lines of Python, so that what it does is read beside the test."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from llmgw.engines.types import Command
from llmgw.host.process import Process, find_marked, start_process


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start Python code as an engine would be; whatever is left of it at the end is killed."""
    started: list[Process] = []

    def start(code: str, **command: object) -> Process:
        argv = (sys.executable, "-c", code)
        marker = f"{tmp_path}:shd-x:{len(started)}"
        started.append(start_process(Command(argv=argv, **command), log=tmp_path / "log", marker=marker))
        return started[-1]

    yield start
    for stat in find_marked(f"{tmp_path}:"):
        with suppress(ProcessLookupError):
            os.kill(stat.pid, signal.SIGKILL)
    for process in started:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, 0)
        with suppress(OSError):
            process.close()


@pytest.fixture
def wait_for_line(tmp_path: Path) -> Callable[[str], object]:
    """Wait until a line that holds the text is in the log, and return it."""

    async def wait(text: str) -> str:
        with trio.fail_after(60):
            while True:
                for line in (tmp_path / "log").read_text(errors="replace").splitlines():
                    if text in line:
                        return line
                await trio.sleep(0.02)

    return wait
