"""The certificates that are believed no more: a file of node names and serials, watched while the server runs."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import trio

from llmgw.config.ordinary import read_with_stat
from llmgw.core.node import NodeId
from llmgw.errors import UsageError

log = logging.getLogger("llmgw.link")

POLL_SECONDS = 1.0
# Hundreds of thousands of entries.
MAX_LIST_BYTES = 16 * 1024 * 1024

_Stamp = tuple[int, int, int, int]


class Revoked:
    """The list as it was last read. Absent at the start, the file revokes nobody."""

    __slots__ = ("_complaint", "_entries", "_stamp", "path")

    def __init__(self, path: Path) -> None:
        """Raises UsageError when the file is there and can't be read: then nobody knows who is to be refused."""
        self.path = path
        self._entries: frozenset[str] = frozenset()
        self._stamp: _Stamp | None = None
        self._complaint: str | None = None
        try:
            self._stamp, self._entries = _load(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(
                f"can't read {path}, which lists the revoked certificates: {error.strerror}; make it readable"
            ) from error

    def explain(self, node: NodeId, serial: int) -> str | None:
        """Why the certificate ``serial`` of ``node`` is refused; None when it is not revoked."""
        if f"{serial:x}" in self._entries or node.lower() in self._entries:
            return f"the certificate of node {node} (serial {serial:x}) is revoked"
        return None

    def read_again(self) -> bool:
        """Read the file if it has changed; whether the list has. What can't be read leaves the list as it was."""
        try:
            stamp, entries = _load(self.path) if _stamp_of(os.stat(self.path)) != self._stamp else (self._stamp, None)
        except FileNotFoundError:
            # An editor may be between removing and writing it; nobody is let in again by that.
            if self._stamp is not None:
                self._complain(f"{self.path} is gone; what it revoked stays revoked until it is there again")
            return False
        except OSError as error:
            self._complain(f"can't read {self.path}: {error.strerror}; what it revoked before stays revoked")
            return False
        self._complaint = None
        self._stamp = stamp
        if entries is None or entries == self._entries:
            return False
        log.info("%s has changed: %d entries, before %d", self.path, len(entries), len(self._entries))
        self._entries = entries
        return True

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            log.error("%s", text)

    async def watch(self, changed: Callable[[], None], *, poll_seconds: float = POLL_SECONDS) -> None:
        """Call ``changed`` after each change of the list, for ever."""
        while True:
            await trio.sleep(poll_seconds)
            # In a thread: the file may lie on a disk that does not answer.
            if await trio.to_thread.run_sync(self.read_again, abandon_on_cancel=True):
                changed()


def _load(path: Path) -> tuple[_Stamp, frozenset[str]]:
    # The stamp of what is read, and from before: a change meanwhile is seen at the next look.
    content, facts = read_with_stat(path, MAX_LIST_BYTES + 1)
    if len(content) > MAX_LIST_BYTES:
        # half of it would let the other half in
        raise OSError(errno.EFBIG, f"it has more than {MAX_LIST_BYTES} bytes", str(path))
    return _stamp_of(facts), parse(content.decode("utf-8", "replace"))


def parse(text: str) -> frozenset[str]:
    """The entries, one in a line; ``#`` begins a comment. Serials are hexadecimal, with or without colons and zeros."""
    entries: set[str] = set()
    for line in text.splitlines():
        entry = line.partition("#")[0].strip().lower()
        if not entry:
            continue
        entries.add(entry)
        # A name can look like a serial, and is then taken for both: serials are too long to be hit by chance.
        try:
            entries.add(f"{int(entry.replace(':', ''), 16):x}")
        except ValueError:
            continue
    return frozenset(entries)


def _stamp_of(stat: os.stat_result) -> _Stamp:
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
