"""Keeps one peer from filling the disk by way of our log: so many lines a minute, and then their number."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from llmgw.link.words import clean, trace

log = logging.getLogger("llmgw.link")

WINDOW_SECONDS = 60.0
# Of one node: what a network that is mended says of a link and a few trunks, a few times over.
NODE_LINES = 20
# Nodes that are told apart; their certificates are ours, so there is no end of them only if we made no end.
NODES = 10_000


@dataclass(slots=True)
class _Window:
    until: float
    lines: int = 0
    withheld: int = 0
    level: int = logging.DEBUG
    last: str = ""


class SparingLog:
    """The log, with a few lines in a window for each key (an address, a node). ``now`` is in seconds of one clock."""

    __slots__ = ("_keys", "_lines", "_others", "_summary", "_windows")

    def __init__(
        self,
        *,
        summary: str = "%d more lines about %s within %g s; the last: %s",
        others: str = "other nodes",
        lines: int = NODE_LINES,
        keys: int = NODES,
    ) -> None:
        """``summary`` tells what was withheld: its number, of whom, in how many seconds, and the last. Past ``keys``,
        keys are not told apart any more, and are called ``others``."""
        self._summary = summary
        self._others = others
        self._lines = lines
        self._keys = keys
        self._windows: dict[str, _Window] = {}

    def say(
        self, key: str, level: int, text: str, now: float, *, fault: BaseException | None = None, last: str = ""
    ) -> None:
        """Log a line about ``key``, cleaned, or count it; with ``fault`` it comes with where that was raised.

        ``last``: what stands for it in a summary.
        """
        if not log.isEnabledFor(level):
            return
        key = key if key in self._windows or len(self._windows) < self._keys else self._others
        window = self._windows.get(key)
        if window is None or now >= window.until:
            self.sweep(now)
            window = self._windows[key] = _Window(until=now + WINDOW_SECONDS)
        if window.lines < self._lines:
            window.lines += 1
            log.log(level, "%s%s", clean(text), trace(fault) if fault is not None else "")
        else:
            window.withheld += 1
            window.level = max(window.level, level)
            window.last = (last or text)[:1000]

    def sweep(self, now: float) -> None:
        """Say of each window that is over how much it withheld; call it now and then."""
        for key, window in [*self._windows.items()]:
            if now >= window.until:
                del self._windows[key]
                if window.withheld:
                    log.log(
                        window.level, self._summary, window.withheld, clean(key), WINDOW_SECONDS, clean(window.last)
                    )
