"""Files that appear as a whole or not at all, with the mode that they are to have from their first byte."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.errors import LlmgwError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class Staged:
    """Files that are written and not yet in their places."""

    waiting: list[tuple[Path, Path]] = field(default_factory=list)
    placed: list[Path] = field(default_factory=list)

    def add(self, path: Path, data: bytes, mode: int, *, like: os.stat_result | None = None) -> None:
        """Write ``data`` beside its place. ``like``: the file that it replaces, whose owner and group it takes over."""
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        fresh = Path(name)
        self.waiting.append((fresh, path))
        with os.fdopen(number, "wb") as file:
            file.write(data)
            # A server that may read its key as a member of a group could not after a renewal.
            if like is not None and (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(number, like.st_uid, like.st_gid)
            os.fchmod(number, mode)
            file.flush()
            os.fsync(number)

    def place_new(self) -> None:
        """Put all in their places, none of which may be taken. FileExistsError, and then none is placed."""
        for fresh, path in self.waiting:
            os.link(fresh, path)
            self.placed.append(path)
        self._sync_folders()
        self.placed.clear()

    def place(self) -> None:
        """Put all in their places, instead of what is there."""
        for fresh, path in self.waiting:
            fresh.replace(path)
        self._sync_folders()

    def clear(self) -> None:
        """Remove what is left of an attempt."""
        for path in [*(fresh for fresh, _ in self.waiting), *self.placed]:
            path.unlink(missing_ok=True)

    def _sync_folders(self) -> None:
        for folder in {path.parent for _, path in self.waiting}:
            number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(number)
            finally:
                os.close(number)


@contextmanager
def stage() -> Iterator[Staged]:
    """Files on their way; nothing of them is left beside their places when this is over."""
    staged = Staged()
    try:
        yield staged
    finally:
        staged.clear()


@contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """An OSError becomes an error that says which file, why, and what helps; ``doing`` is like "written"."""
    try:
        yield
    except OSError as error:
        reason = "it is a file, not a folder" if isinstance(error, NotADirectoryError) else error.strerror or str(error)
        raise LlmgwError(f"{path} can't be {doing}: {reason}: {_remedy(error)}") from error


def _remedy(error: OSError) -> str:
    if error.errno in _FULL:
        return "free some space and do it again"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "do it as a user who may, or use another folder"
    return "mend that, or use another folder"


def make_folder(path: Path) -> None:
    """With all that lead to it; what is there already keeps its mode. Everybody may enter: certificates are public."""
    with explained(path, "made"):
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file, not a folder: use another one")
        path.mkdir(parents=True, exist_ok=True, mode=0o755)


def append_lines(path: Path, lines: list[str], mode: int) -> None:
    """Add whole lines at the end of a text file; when that fails, it is as it was."""
    is_new = not path.exists()
    number = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        if is_new:
            # whatever the umask says: the server may be another user
            os.fchmod(number, mode)
        size = os.fstat(number).st_size
        # An editor that leaves out the last end of line would join two entries into one that says neither.
        joined = size > 0 and os.pread(number, 1, size - 1) != b"\n"
        data = (("\n" if joined else "") + "".join(f"{line}\n" for line in lines)).encode()
        try:
            _write_all(number, data)
            os.fsync(number)
        except OSError:
            os.ftruncate(number, size)
            raise
    finally:
        os.close(number)


def _write_all(number: int, data: bytes) -> None:
    while data:
        data = data[os.write(number, data) :]
