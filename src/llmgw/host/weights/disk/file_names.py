"""Which names of files are taken from an origin: those that lie below their own folder, and are no name of ours."""

from __future__ import annotations

import re
from collections.abc import Sequence

MANIFEST_NAME = ".manifest.json"
# The BLAKE3 hashes that belong to a manifest, and when its commit was found to be the newest again.
HASHES_NAME = ".manifest.hashes"
RENEWED_NAME = ".manifest.renewed"
# What was found wrong with it.
DAMAGED_NAME = ".manifest.damaged"
PIECES_NAME = ".pieces"
SOURCE_NAME = "source"

# What llmgw itself keeps in the folder of a commit.
OUR_NAMES = (MANIFEST_NAME, HASHES_NAME, RENEWED_NAME, DAMAGED_NAME, PIECES_NAME)

_MOST_PART_BYTES = 255
# A path may have 4096 bytes, and the folder of the cache has some of them.
_MOST_BYTES = 2048
_KEY = re.compile(r"[0-9a-f]{32}")
_COMMIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def is_key(name: str) -> bool:
    """Whether a folder of the cache can be that of a source."""
    return _KEY.fullmatch(name) is not None


def is_commit(name: str) -> bool:
    """Whether a folder can be that of a whole commit: no dot, so that it is never one of those on its way."""
    return _COMMIT.fullmatch(name) is not None and name != SOURCE_NAME


def find_bad_name(names: Sequence[str]) -> str | None:
    """What is wrong with the first of these that can't be kept; None when all can."""
    seen: set[str] = set()
    folders = {name[: match.start()] for name in names for match in re.finditer("/", name)}
    for name in names:
        why = _refuse(name)
        if why is None and name in seen:
            why = "is listed twice"
        if why is None and name in folders:
            why = "is both a file and a folder"
        if why is not None:
            return f"{name[:200]!r} {why}"
        seen.add(name)
    return None


def _refuse(name: str) -> str | None:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "leads out of its folder, or nowhere"
    if not name.isprintable():
        # (also what is no text at all, and can't be written as bytes)
        return "holds what can't be printed"
    if parts[0] in OUR_NAMES:
        return "is a name that llmgw uses itself"
    if len(name.encode()) > _MOST_BYTES or any(len(part.encode()) > _MOST_PART_BYTES for part in parts):
        return "is too long"
    return None
