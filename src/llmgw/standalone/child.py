"""A Python module run as a program that never outlives this one: not its end, not its kill -9, not a lost handle."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO

# Its standard input is a pipe whose other end is open here only: when that closes, however this program ends, the whole
# group kills itself.
WATCHED = """
import os, runpy, sys, threading
def end_with_its_parent():
    os.read(0, 1)
    os.killpg(0, 9)
threading.Thread(target=end_with_its_parent, daemon=True).start()
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
END_SECONDS = 10.0


class Child:
    """``python -m MODULE WORDS`` in a session of its own, so that Ctrl-C reaches us alone; ended when this is left.

    Its output goes to ``out``; ``kept`` is a descriptor that it holds as long as it lives. Raises OSError when it can't
    be started.
    """

    def __init__(self, *words: str, environ: Mapping[str, str], out: BinaryIO, kept: int) -> None:
        self.code: int | None = None
        self.ended = False
        reading, self._lifeline = os.pipe()
        try:
            # -P: a module of this name in the working directory is not the one that is meant.
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", WATCHED, *words],
                stdin=reading,
                stdout=out,
                stderr=out,
                env=environ,
                pass_fds=(kept,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(reading)
        # We wait for it ourselves: an interrupt inside subprocess can leave a lock taken that its wait then waits for.
        child.returncode = 0
        self._pid = child.pid
        self._handle = os.pidfd_open(child.pid)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Returns when it is seen gone, or after ten seconds in which the kernel could not do it."""
        os.close(self._lifeline)
        if not self.wait(0):
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            self.wait(END_SECONDS)
        os.close(self._handle)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after so many seconds at most."""
        if not self.ended and select.select([self._handle], [], [], seconds)[0]:
            with suppress(ChildProcessError):
                self.code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            self.ended = True
        return self.ended
