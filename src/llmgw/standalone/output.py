"""Standard output and error by their descriptors, in whole texts.

A thread that is blocked in one (nobody reads a terminal that was stopped) holds no lock that the interpreter's end
waits for, and a text that can't be written is an error here and now, not when the program has ended.
"""

from __future__ import annotations

import os

STDOUT, STDERR = 1, 2


def write_out(text: str, fd: int = STDOUT) -> None:
    """Write all of it, which may block for as long as nobody reads. OSError when nobody ever will again."""
    left = memoryview(text.encode("utf-8", "replace"))
    while left:
        left = left[os.write(fd, left) :]


def write_err(text: str) -> None:
    """The same to standard error."""
    write_out(text, STDERR)
