"""Room on a disk that is promised to fetches: what others of this program still need counts as taken."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from llmgw.host.weights.disk.faults import NoRoom, show_mount
from llmgw.units import format_decimal


class Claim:
    """What one fetch still needs on its disk."""

    __slots__ = ("_let_go", "left_bytes")

    def __init__(self, left_bytes: int, let_go: Callable[[Claim], None]) -> None:
        self.left_bytes = left_bytes
        self._let_go = let_go

    def use(self, size_bytes: int) -> None:
        """So much of it is written now, and the disk itself says that it is taken."""
        self.left_bytes = max(0, self.left_bytes - size_bytes)

    def close(self) -> None:
        """Nothing more is needed. A second time does nothing."""
        self._let_go(self)


class Reservations:
    """The claims of all fetches that run in this program, by filesystem. May be used from several threads."""

    __slots__ = ("_claims", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[Claim, int] = {}

    def claim(self, file: int, folder: Path, needed_bytes: int, take: Callable[[], int]) -> Claim:
        """Promise room on the filesystem of an open ``file`` (named ``folder`` to people), then have ``take`` take
        from the disk what can be taken at once: it says how much can't. Raises NoRoom."""
        device = os.fstat(file).st_dev
        # What is taken beforehand is missed on the disk at once: a check between that and our note of it would count
        # it twice.
        with self._lock:
            sizes = os.fstatvfs(file)
            # What an ordinary user may still write, not what is kept for root.
            free = sizes.f_bavail * sizes.f_frsize
            others = sum(claim.left_bytes for claim, where in self._claims.items() if where == device)
            if needed_bytes > free - others:
                raise _refuse(folder, needed_bytes, free, others)
            claim = Claim(take(), self._let_go)
            self._claims[claim] = device
        return claim

    def _let_go(self, claim: Claim) -> None:
        with self._lock:
            self._claims.pop(claim, None)


def _refuse(folder: Path, needed: int, free: int, others: int) -> NoRoom:
    promised = f", of which other fetches still need {format_decimal(others)}" if others else ""
    missing = needed - max(0, free - others)
    return NoRoom(
        f"{format_decimal(needed)} are needed in {folder}, and {format_decimal(free)} are free on "
        f"{show_mount(folder)}{promised}",
        f"free {format_decimal(missing)} there (llmgw ctl weights shows what of it llmgw can), or name another folder "
        "in weights.cache",
    )
