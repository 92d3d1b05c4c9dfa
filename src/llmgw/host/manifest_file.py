"""The file in a commit's folder that says what lies there; a folder without it holds nothing that can be used."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable

import msgspec

from llmgw.core.weights import Manifest, count_pieces
from llmgw.host.beneath import Folder
from llmgw.host.file_names import MANIFEST_NAME, PIECES_NAME, find_bad_name

# Far more than the largest repositories have; what is larger was not written by us.
_MOST_BYTES = 256 * 1024 * 1024


def mode_of(source: str) -> int:
    """Who may read a file that holds a source: what stands behind the ? of an address may open it."""
    return 0o600 if "?" in source else 0o666


def write_manifest(folder: Folder, manifest: Manifest) -> None:
    """Raises OSError."""
    folder.write(MANIFEST_NAME, msgspec.json.encode(manifest), mode=mode_of(manifest.source))


def read_manifest(folder: Folder) -> Manifest:
    """Raises OSError, and ValueError when it means nothing, or names what does not lie in its folder."""
    text = folder.read(MANIFEST_NAME, _MOST_BYTES)
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its manifest means nothing: {error}") from error
    if (why := find_bad_name([file.name for file in manifest.files])) is not None:
        raise ValueError(f"its manifest is not llmgw's own: {why}")
    for file in manifest.files:
        if file.size_bytes < 0 or len(file.pieces) != count_pieces(file.size_bytes):
            raise ValueError(f"its manifest is not llmgw's own: {file.name!r} can't have {len(file.pieces)} pieces")
    return manifest


def list_foreign(folder: Folder, names: Iterable[str]) -> list[str]:
    """What is in the folder besides these files, their folders and what llmgw itself keeps there; what is in a folder
    before the folder. Raises OSError."""
    wanted = {*names, MANIFEST_NAME, PIECES_NAME}
    folders = {name[: match.start()] for name in wanted for match in re.finditer("/", name)}
    return [name for name, found in folder.walk() if name not in _fitting(found, wanted, folders)]


def _fitting(found: os.stat_result, files: set[str], folders: set[str]) -> set[str]:
    if stat.S_ISDIR(found.st_mode):
        return folders
    # A link in the place of a file is not that file.
    return files if stat.S_ISREG(found.st_mode) else set()


def find_fault(folder: Folder, manifest: Manifest) -> str | None:
    """What of a commit is not there as its manifest says, by sizes alone. Raises OSError."""
    for file in manifest.files:
        found = folder.status(file.name)
        if found is None:
            return f"{file.name} is missing"
        if not stat.S_ISREG(found.st_mode):
            return f"{file.name} is no plain file"
        if found.st_size != file.size_bytes:
            return f"{file.name} has {found.st_size} bytes of {file.size_bytes}"
    return None
