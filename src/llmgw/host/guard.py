"""Ends what this program has started when this program is killed, and so can't end it itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from llmgw.host.process import find_marked

END_SECONDS = 10.0
PAUSE_SECONDS = 0.05

# Its standard input is a pipe whose other end is open here only: the read returns when that closes, however we end.
# Nothing of llmgw is imported before, for mostly nothing of it is needed.
_WAITING = """
import os, sys
os.read(0, 1)
from llmgw.host.guard import end_marked
end_marked(sys.argv[1])
"""


@contextmanager
def ended_with_us(marker_prefix: str) -> Iterator[None]:
    """While this is open, the end of this process, ``kill -9`` too, is that of all that carries a marker which begins
    so. Where the machine grants no process more there is no such guard."""
    reading, lifeline = os.pipe()
    guard: subprocess.Popen[bytes] | None = None
    try:
        # (a descriptor of Python's is closed in what others start)
        with suppress(OSError):
            guard = subprocess.Popen(
                # -P: a module of this name in the working directory is not the one that is meant.
                [sys.executable, "-P", "-c", _WAITING, marker_prefix],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
    finally:
        os.close(reading)
    try:
        yield
    finally:
        if guard is not None:
            # Before the pipe is closed: whoever leaves here has ended what it started.
            guard.kill()
            guard.wait()
        os.close(lifeline)


def end_marked(prefix: str, seconds: float = END_SECONDS) -> None:
    """Kill all that carries such a marker, and what it starts meanwhile, until there is nothing of it."""
    until = time.monotonic() + seconds
    while (marked := find_marked(prefix)) and time.monotonic() < until:
        for stat in marked:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(stat.pid, signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)
