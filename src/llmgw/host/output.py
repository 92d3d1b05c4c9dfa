"""Standard input, output and error by their descriptors: open from the first moment, and written in whole texts.

A thread that is blocked in one (nobody reads a terminal that was stopped) holds no lock that the interpreter's end
waits for, and a text that can't be written is an error here and now, not when the program has ended.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from contextlib import suppress

STDIN, STDOUT, STDERR = 0, 1, 2
SAY_SECONDS = 1.0


def open_standard() -> None:
    """Put /dev/null where one of the three came closed: the next socket or file would get its number, and be written to
    with what was meant for a person."""
    for fd, flags in ((STDIN, os.O_RDONLY), (STDOUT, os.O_WRONLY), (STDERR, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, flags)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
    # Python leaves out the streams of descriptors that it found closed.
    sys.stdin = sys.stdin or os.fdopen(STDIN, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(STDOUT, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w", encoding="utf-8", closefd=False)


def give_up_stdout() -> None:
    """What could not be written never will be: the interpreter would try once more at its end, and complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, STDOUT)
    os.close(null)


def write_out(text: str, fd: int = STDOUT) -> None:
    """Write all of it, which may block for as long as nobody reads. OSError when nobody ever will again."""
    left = memoryview(text.encode("utf-8", "replace"))
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            # Another program that has the same terminal or pipe may have made it so.
            select.select([], [fd], [])


def write_err(text: str) -> None:
    """The same to standard error."""
    write_out(text, STDERR)


def say(line: str, seconds: float = SAY_SECONDS) -> None:
    """A line for a person, on standard error. That nobody can read it (a full disk, a closed pipe, a terminal that was
    stopped) stops nothing: after so many seconds it is left to be read, or lost."""
    writer = threading.Thread(target=_try_to_say, args=(f"{line}\n",), daemon=True)
    writer.start()
    writer.join(seconds)


def _try_to_say(text: str) -> None:
    with suppress(OSError):
        write_err(text)
