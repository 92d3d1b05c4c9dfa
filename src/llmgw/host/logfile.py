"""An engine's log file: what is new in it, its last lines, and its size kept in bounds while the engine writes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

CAP_BYTES = 64 * 1024 * 1024
LINE_CHARACTERS = 2000
READ_BYTES = 1024 * 1024
KEPT_LOGS = 50

# Colours and cursor moves; then whatever else a terminal would act on.
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def older(path: Path) -> Path:
    """Where the part before the present one is kept."""
    return path.with_name(path.name + ".1")


class LogFile:
    """A reader of one log that an engine goes on writing. Everything here blocks: call it in a thread.

    ``hide`` takes out of each line what nobody is to read.
    """

    __slots__ = ("_capped", "_hide", "_offset", "_partial", "_skipping", "path")

    def __init__(self, path: Path, hide: Callable[[str], str] = str) -> None:
        self.path = path
        self._hide = hide
        self._offset = 0
        self._partial = b""
        self._skipping = False
        self._capped = False

    def read_new(self) -> list[str]:
        """The complete lines since the last call. When an engine writes faster than that, only the newest of them."""
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:
                    self._offset, self._partial, self._skipping = 0, b"", False
                if size - self._offset > READ_BYTES:
                    self._offset, self._partial, self._skipping = size - READ_BYTES, b"", True
                file.seek(self._offset)
                chunk = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(chunk)
        # Progress bars end their lines with a return only.
        *whole, self._partial = (self._partial + chunk).replace(b"\r", b"\n").split(b"\n")
        if self._skipping and whole:
            whole, self._skipping = whole[1:], False
        # One endless line must not grow memory: its beginning tells what it is.
        self._partial = self._partial[: 4 * LINE_CHARACTERS]
        return [clean(line, self._hide) for line in whole if line.strip()]

    def cap(self, cap_bytes: int = CAP_BYTES) -> None:
        """Move what there is to the older part once it is more than ``cap_bytes``.

        Copied and cut, as the engine holds this file open. Lines written in the moment between are lost.
        """
        try:
            if self.path.stat().st_size <= cap_bytes:
                return
        except FileNotFoundError:
            return
        fresh = self.path.with_name(self.path.name + ".copy")
        with self.path.open("rb+") as file, fresh.open("wb") as copy:
            # More than the cap is there when nobody looked for a while; the newest part is the one that tells.
            file.seek(max(0, os.fstat(file.fileno()).st_size - cap_bytes))
            left = 2 * cap_bytes
            while left > 0 and (chunk := file.read(min(left, READ_BYTES))):
                copy.write(chunk)
                left -= len(chunk)
            file.truncate(0)
        fresh.replace(older(self.path))
        self._capped = True
        self._offset, self._partial, self._skipping = 0, b"", False

    def read_last(self, count: int) -> tuple[str, ...]:
        """The last ``count`` lines, the unfinished one included."""
        lines = _read_tail(self.path, self._hide)
        # Else the older part is that of a run before, and would tell the cause of another end.
        if self._capped and len(lines) < count:
            lines = _read_tail(older(self.path), self._hide) + lines
        return tuple(lines[-count:])


def _read_tail(path: Path, hide: Callable[[str], str]) -> list[str]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - READ_BYTES))
            octets = file.read(READ_BYTES)
    except FileNotFoundError:
        return []
    lines = octets.replace(b"\r", b"\n").split(b"\n")
    # What was not read from its beginning is half a line.
    whole = lines[1:] if size > READ_BYTES and len(lines) > 1 else lines
    return [clean(line, hide) for line in whole if line.strip()]


def clean(line: bytes, hide: Callable[[str], str] = str) -> str:
    """A line as it may be shown anywhere: valid text of bounded length that no terminal acts on."""
    # Hidden before it is cut: of a secret that is cut in two, half would stand there.
    text = hide(strip_controls(line[: 8 * LINE_CHARACTERS].decode("utf-8", errors="replace")).rstrip())
    return text if len(text) <= LINE_CHARACTERS else text[: LINE_CHARACTERS - 1] + "…"


def strip_controls(text: str) -> str:
    """The text without what a terminal would act on."""
    return CONTROLS.sub("", ESCAPES.sub("", text))


def begin_log(path: Path) -> None:
    """Make room for a new run's log; the last run's becomes the older part."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists():
        path.replace(older(path))


def prune_logs(folder: Path, in_use: set[Path], kept: int = KEPT_LOGS) -> None:
    """Remove the oldest logs of engines that run no more."""
    keep = in_use | {older(path) for path in in_use}
    logs = sorted((path for path in folder.glob("*.log*") if path not in keep), key=lambda path: path.stat().st_mtime)
    for path in logs[: max(0, len(logs) - kept)]:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("old log %s can't be removed: %s", path, error.strerror or error)
