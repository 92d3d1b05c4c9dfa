"""Which models lie in a folder that people put them into, found by their names alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from llmgw.core.weights import list_parts

DEEPEST = 4
MOST_FOUND = 1000
MOST_SECONDS = 5.0
# What a hub's own cache calls the folder of a repository.
HUB_FOLDER = "models--"


def find_models(folder: Path, *, besides: Path | None = None) -> tuple[str, ...]:
    """The models in and below this folder, in the order of their names, as sources that name them: whole paths of
    files, of those in several parts the first, and of folders, and ``org/repo`` of what a hub's cache has.

    Looks four folders deep, finds a thousand at most, and is content with what it has after five seconds. What begins
    with a dot is passed over, and so is ``besides``. A folder that can't be read has none. Blocks, and for ever where a
    file server does not answer.
    """
    look = _Look(besides=None if besides is None else str(besides))
    look.walk(str(folder), DEEPEST)
    return tuple(sorted(look.found))


class _Look:
    """One look through a folder: what it has found, and when it is enough."""

    def __init__(self, *, besides: str | None) -> None:
        self.found: set[str] = set()
        self._besides = besides
        self._until = time.monotonic() + MOST_SECONDS
        # A link may lead to where it has been already.
        self._entered: set[tuple[int, int]] = set()

    @property
    def _is_enough(self) -> bool:
        return len(self.found) >= MOST_FOUND or time.monotonic() > self._until

    def walk(self, folder: str, deep: int) -> None:
        folders = []
        for entry in self._list(folder):
            if _is_folder(entry):
                folders.append(entry)
            elif not _is_file(entry):
                # (a link that leads nowhere, a pipe)
                continue
            elif entry.name == "config.json" or entry.name.endswith(".safetensors"):
                self.found.add(folder)
            elif entry.name.lower().endswith(".gguf") and list_parts(entry.name)[0] == entry.name:
                self.found.add(entry.path)
            if self._is_enough:
                return
        for entry in sorted(folders, key=lambda entry: entry.name):
            if entry.name.startswith(HUB_FOLDER):
                self._look_at_hub_folder(entry)
            elif deep and entry.path != self._besides:
                self.walk(entry.path, deep - 1)
            if self._is_enough:
                return

    def _look_at_hub_folder(self, entry: os.DirEntry[str]) -> None:
        repo = entry.name.removeprefix(HUB_FOLDER).replace("--", "/", 1)
        # (a fetch that was only begun has no snapshot)
        if "/" in repo and any(True for _ in self._list(f"{entry.path}/snapshots")):
            self.found.add(repo)

    def _list(self, folder: str) -> Iterator[os.DirEntry[str]]:
        try:
            stat = os.stat(folder)
            if (stat.st_dev, stat.st_ino) in self._entered:
                return
            self._entered.add((stat.st_dev, stat.st_ino))
            with os.scandir(folder) as entries:
                for entry in entries:
                    # What is no text can't be told to the server, nor be written in a definition.
                    if not entry.name.startswith(".") and entry.name.isprintable():
                        yield entry
        except OSError:
            return


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False
