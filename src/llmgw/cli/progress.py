"""How a fetch is shown: a moving bar on a terminal, now and then a line anywhere else. All of it on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from llmgw.host.output import say

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

# A log wants to know that something happens, not to be filled with it.
STEP_PERCENT = 10


class Shown:
    """Says lines and shows bytes; the bar appears with the first of them and goes when this is left.

    ``terminal`` None: there is none, and no bar.
    """

    def __init__(self, terminal: TextIO | None = None, write_line: Callable[[str], None] = say) -> None:
        self._terminal = terminal
        self._write_line = write_line
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._shown_percent = 0

    def __enter__(self) -> Shown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_bar()

    def say(self, line: str) -> None:
        self._close_bar()
        self._shown_percent = 0
        self._write_line(line)

    def moved(self, done_bytes: int, total_bytes: int) -> None:
        if self._terminal is not None:
            bar, task = self._open_bar(self._terminal, total_bytes)
            bar.update(task, completed=done_bytes)
            return
        percent = 100 * done_bytes // total_bytes
        if percent >= self._shown_percent + STEP_PERCENT:
            self._shown_percent = percent
            self._write_line(f"{percent} % of {total_bytes // 10**6} MB")

    def _open_bar(self, terminal: TextIO, total_bytes: int) -> tuple[Bar, TaskID]:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

            self._bar = Progress(
                BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=Console(file=terminal), transient=True
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=total_bytes)
        return self._bar, self._task

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None


class Bars:
    """The same of several things that move at once, each with its name and what it does.

    ``terminal`` None: there is none, and each has a line when it does something else, and now and then one of how far
    it is.
    """

    def __init__(self, terminal: TextIO | None = None, write_line: Callable[[str], None] = say) -> None:
        self._terminal = terminal
        self._write_line = write_line
        self._bar: Bar | None = None
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, tuple[str, int]] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, line: str) -> None:
        """A line that is about none of them: above the bars."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            self._write_line(line)

    def show(self, name: str, done_bytes: int, total_bytes: int | None, words: str, *, doing: str) -> None:
        """How far this one is, in ``words``; ``total_bytes`` None: nobody knows of what. ``doing``: what of it is news
        when it changes."""
        if self._terminal is not None:
            bar = self._open(self._terminal)
            if name not in self._tasks:
                self._tasks[name] = bar.add_task(name, total=None, words="")
            bar.update(self._tasks[name], completed=done_bytes, total=total_bytes, words=words)
            return
        percent = 100 * done_bytes // (total_bytes or 1)
        before = self._told.get(name)
        if before is None or before[0] != doing or (total_bytes and percent >= before[1] + STEP_PERCENT):
            self._told[name] = doing, percent
            self._write_line(f"{name}: {words}")

    def close(self) -> None:
        """Leave them as they are."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _open(self, terminal: TextIO) -> Bar:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

            name = TextColumn("{task.description}", markup=False)
            words = TextColumn("{task.fields[words]}", markup=False)
            self._bar = Progress(name, BarColumn(), DownloadColumn(), words, console=Console(file=terminal))
            self._bar.start()
        return self._bar


def terminal() -> TextIO | None:
    """Standard error where it is a terminal."""
    return sys.stderr if sys.stderr.isatty() else None
