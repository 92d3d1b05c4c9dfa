"""What a launch has shown: how long it took to be ready, and the most that it has held since it began."""

from __future__ import annotations

from llmgw.core.replica import Measured
from llmgw.host.usage import Usage

# What is less than that is no news: an engine's memory breathes, and each report goes to the server.
NEWS_SHARE = 0.02
NEWS_GB = 0.1


class Peaks:
    """The figures of one launch, whose process was started at ``began_at``; None: by an earlier agent, which has told
    what it saw, and there is nothing more to tell."""

    __slots__ = ("_began_at", "_gpu_gb", "_load_seconds", "_memory_gb", "_told", "_version")

    def __init__(self, began_at: float | None, version: str | None = None) -> None:
        self._began_at = began_at
        self._version = version
        self._load_seconds: float | None = None
        self._gpu_gb: float | None = None
        self._memory_gb: float | None = None
        self._told: Measured | None = None

    def note(self, usage: Usage) -> None:
        """What it takes now."""
        if usage.pids:
            self._gpu_gb = _most(self._gpu_gb, usage.gpu_gb)
            self._memory_gb = _most(self._memory_gb, usage.memory_gb)

    def note_ready(self, now: float) -> None:
        """It has loaded, and now serves."""
        if self._began_at is not None:
            self._load_seconds = now - self._began_at

    def find_news(self) -> Measured | None:
        """What is to be told of an engine that is ready, where that is more than was told before."""
        told = self._told
        if self._began_at is None:
            return None
        if told is not None and not (_is_news(told.gpu_gb, self._gpu_gb) or _is_news(told.memory_gb, self._memory_gb)):
            return None
        self._told = Measured(
            load_seconds=None if self._load_seconds is None else round(self._load_seconds, 1),
            gpu_gb=None if self._gpu_gb is None else round(self._gpu_gb, 2),
            memory_gb=None if self._memory_gb is None else round(self._memory_gb, 2),
            version=self._version,
        )
        return self._told


def _most(known_gb: float | None, seen_gb: float | None) -> float | None:
    return seen_gb if known_gb is None else known_gb if seen_gb is None else max(known_gb, seen_gb)


def _is_news(told_gb: float | None, now_gb: float | None) -> bool:
    if now_gb is None or told_gb is None:
        return now_gb is not None
    return now_gb - told_gb > max(NEWS_GB, NEWS_SHARE * told_gb)
