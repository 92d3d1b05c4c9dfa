"""The lock on a source: who holds it is the only one that fetches it, of all programs that share the folder.

It is the kernel's lock on an open file: whoever dies lets go of it. What stands in the file is only for people, and by
when it was changed last others see whether its holder goes on.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import trio

from llmgw.host.weights.disk.beneath import Folder

LOCK_NAME = ".lock"
POLL_SECONDS = 0.5
# How often somebody may take the file away just while we open it.
_TRIES = 20
_UNKNOWN = "another program"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a lock, in ``words``, and when that last said that it goes on, by the clock of the filesystem."""

    words: str = _UNKNOWN
    moved_ns: int = 0


async def take_lock(open_folder: Callable[[], Folder], waiting: Callable[[str], None]) -> int:
    """The lock of the folder that ``open_folder`` opens (in a thread, anew for each try), as an open file: whoever has
    that closes it. ``waiting`` is told who has it, each time that this changes or that one has gone on. Raises
    OSError."""
    told = None
    while True:
        # Not abandoned when cancelled: what the thread then holds, nobody would ever let go.
        found = await trio.to_thread.run_sync(_try_once, open_folder)
        if isinstance(found, int):
            return found
        if found != told:
            told = found
            waiting(found.words)
        await trio.sleep(POLL_SECONDS)


def _try_once(open_folder: Callable[[], Folder]) -> int | Holder:
    for _ in range(_TRIES):
        try:
            with open_folder() as folder:
                found = try_lock(folder)
        except FileNotFoundError:
            # Whoever had it has removed the folder.
            continue
        if found is not None:
            return found
    return Holder()


def is_held_by(folder: Folder, file: int) -> bool:
    """Whether this open file is still the lock of the folder: whoever removes a source removes it last, and one that
    has no name any more keeps nobody out. Raises OSError."""
    found, ours = folder.status(LOCK_NAME), os.fstat(file)
    return found is not None and (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


def show_life(folder: Folder) -> None:
    """Tell those who wait for the lock of this folder that its holder goes on. Raises OSError."""
    file = folder.open(LOCK_NAME, os.O_RDWR)
    try:
        os.utime(file)
    finally:
        os.close(file)


def try_lock(folder: Folder) -> int | Holder | None:
    """The lock of this folder as an open file, which holds it until it is closed; else who has it. None: it was removed
    meanwhile. Raises OSError."""
    with ExitStack() as held:
        file = folder.open(LOCK_NAME, os.O_RDWR | os.O_CREAT)
        held.callback(os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            words = os.pread(file, 300, 0).decode(errors="replace").strip()
            return Holder(words if words and words.isprintable() else _UNKNOWN, os.fstat(file).st_mtime_ns)
        if not is_held_by(folder, file):
            return None
        # (on a full disk nobody reads who we are)
        with suppress(OSError):
            os.ftruncate(file, 0)
            os.pwrite(file, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)
        held.pop_all()
        return file
