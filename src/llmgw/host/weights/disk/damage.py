"""A commit that lies in the cache and is not what was fetched: how that is found, and told."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from llmgw.core.weights import FileKept, Manifest, piece_bytes_of
from llmgw.host.weights.disk.beneath import Folder
from llmgw.host.weights.errors import FetchFailed, Kind, show_url

# (what is no file there, or is a link, is no copy)
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL)
_SHOWN_FILES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """A commit that is no copy any more, by its manifest, and ``why``: words that begin with a file's name."""

    manifest: Manifest
    why: str


def refuse_used(source: str, commit: str, folder: Path, why: str, users: Sequence[str]) -> FetchFailed:
    """It can't be mended now. ``users``: the shards of this agent that run by it; nobody: it is another program on the
    same folder."""
    shown = show_url(source)
    who = f"{', '.join(users)} of this node" if users else "an engine of another agent on this folder"
    return FetchFailed(
        f"{shown} ({commit[:12]}) in {folder} is damaged: {why}; it stays as it is while {who} runs by it",
        Kind.CORRUPT,
        remedy="see whether that disk is well; stop the model that runs by it there (llmgw ctl stop), then "
        f"`llmgw ctl weights pull {shown}`, and load it again",
    )


def find_wrong(
    folder: Folder, manifest: Manifest, stop: Callable[[], bool], tell: Callable[[int, int], None]
) -> str | None:
    """What of a commit does not have the hashes that it was kept with; None where all does, or ``stop`` says so.
    ``tell``: so many bytes of it were read, and so many are right. Raises OSError."""
    read = right = 0
    told: list[str] = []
    for kept in manifest.files:
        try:
            file = folder.open(kept.name, os.O_RDONLY)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            told.append(f"{kept.name} is missing" if error.errno == errno.ENOENT else f"{kept.name} is no plain file")
            continue
        wrong = 0
        try:
            size = os.fstat(file).st_size
            for number, digest in enumerate(kept.pieces):
                if stop():
                    return None
                content = _read(file, folder.path / kept.name, kept, number)
                read += len(content)
                is_right = blake3(content).hexdigest() == digest
                right += len(content) if is_right else 0
                wrong += not is_right
                tell(read, right)
        finally:
            os.close(file)
        if wrong:
            told.append(f"{kept.name} is not what was fetched in {wrong} of its {len(kept.pieces)} pieces")
        elif size != kept.size_bytes:
            told.append(f"{kept.name} has {size} bytes of {kept.size_bytes}")
    more = f", and {len(told) - _SHOWN_FILES} files more" if len(told) > _SHOWN_FILES else ""
    return ", ".join(told[:_SHOWN_FILES]) + more if told else None


def _read(file: int, path: Path, kept: FileKept, number: int) -> bytes:
    """As much of a piece as is there."""
    length = piece_bytes_of(kept.size_bytes)
    start, content = number * length, b""
    wanted = min(length, kept.size_bytes - start)
    try:
        while len(content) < wanted and (part := os.pread(file, wanted - len(content), start + len(content))):
            content += part
    except OSError as error:
        if error.errno != errno.EIO:
            error.filename = str(path)
            raise
        # (a sector that can't be read any more is mended by being written)
    return content
