"""Standard error by its descriptor: a thread that blocks in it holds no lock that the interpreter's end waits for."""

from __future__ import annotations

import os


def write_stderr(text: str, *, fd: int = 2) -> None:
    """Write all of it, which may block for as long as nobody reads. OSError when nobody ever will again."""
    left = memoryview(text.encode("utf-8", "replace"))
    while left:
        left = left[os.write(fd, left) :]
