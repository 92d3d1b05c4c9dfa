"""The SHA-256 of a file that comes in pieces, in whatever order they come."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmgw.core.weights import count_pieces


class Sum:
    """As much of one file's SHA-256 as is in order. One thread at a time, which ``hold`` sees to.

    ``next``: the first piece that is not in it yet. ``done_bytes``: how much is.
    """

    __slots__ = ("_hasher", "_lock", "count", "done_bytes", "next")

    def __init__(self, size_bytes: int) -> None:
        self._lock = threading.RLock()
        self.count = count_pieces(size_bytes)
        self.reset()

    def reset(self) -> None:
        """From the beginning."""
        self._hasher = hashlib.sha256()
        self.next = 0
        self.done_bytes = 0

    @property
    def whole(self) -> bool:
        return self.next == self.count

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other threads out, once they are."""
        with self._lock:
            yield

    @contextmanager
    def try_hold(self) -> Iterator[bool]:
        """Whether no other thread is at it; then they are kept out."""
        got = self._lock.acquire(blocking=False)
        try:
            yield got
        finally:
            if got:
                self._lock.release()

    def add(self, content: bytes | bytearray | memoryview) -> None:
        """The next piece."""
        self._hasher.update(content)
        self.next += 1
        self.done_bytes += len(content)

    def follow(self, is_here: Callable[[int], bool], read: Callable[[int], bytes], *, most: int) -> None:
        """Take in up to ``most`` pieces that came before their turn."""
        for _ in range(most):
            if self.whole or not is_here(self.next):
                return
            self.add(read(self.next))

    def digest(self) -> str:
        """In hex, of what is in it."""
        return self._hasher.hexdigest()
