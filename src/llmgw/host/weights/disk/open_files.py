"""The files of one commit, opened as they are needed: a repository may have more of them than a program may open."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llmgw.host.weights.disk.beneath import Folder

MOST_OPEN = 32


class OpenFiles:
    """Files below a folder, by number. May be used from several threads."""

    __slots__ = ("_closed", "_files", "_flags", "_folder", "_lock", "_names", "_used")

    def __init__(self, folder: Folder, names: Sequence[str], flags: int) -> None:
        self._folder = folder.copy()
        self._names = names
        self._flags = flags
        self._lock = threading.Lock()
        # The one used last stands last.
        self._files: OrderedDict[int, int] = OrderedDict()
        self._used: dict[int, int] = {}
        self._closed = False

    @contextmanager
    def use(self, number: int) -> Iterator[int]:
        """The file's descriptor, which stays open in the body. Raises OSError, and LookupError after ``close``."""
        with self._lock:
            if self._closed:
                raise LookupError("these files are closed")
            file = self._files.pop(number, None)
            if file is None:
                file = self._folder.open(self._names[number], self._flags)
            self._files[number] = file
            self._used[number] = self._used.get(number, 0) + 1
        try:
            yield file
        finally:
            with self._lock:
                self._used[number] -= 1
                self._shut()

    def close(self) -> None:
        """What is in use is closed once it is not. A second time does nothing."""
        with self._lock:
            self._closed = True
            self._shut()
            self._folder.close()

    def _shut(self) -> None:
        most = 0 if self._closed else MOST_OPEN
        for number in [each for each in self._files if not self._used.get(each)]:
            if len(self._files) <= most:
                return
            self._used.pop(number, None)
            os.close(self._files.pop(number))
