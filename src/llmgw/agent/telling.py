"""What is told of a shard: whole reports, and only when something in them has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmgw.agent.describing import describe_fetch
from llmgw.core.replica import Endpoint, Load, Measured, ShardReport, ShardSpec, ShardState
from llmgw.core.weights import Fetch

WORDS_CHARS = 2000


def first_report(spec: ShardSpec) -> ShardReport:
    """What is known of a shard before its life begins."""
    return ShardReport(shard=spec.id, replica=spec.replica, epoch=spec.epoch, state=ShardState.PLACED)


def cut(words: str) -> str:
    """An engine's line may be as long as it likes; the server takes what can be read at a glance."""
    return words if len(words) <= WORDS_CHARS else words[:WORDS_CHARS] + "…"


class Telling:
    """What was last told of a shard; only what differs is told again, and none of it is what ``hide`` takes out."""

    __slots__ = ("_report", "hide", "last")

    def __init__(
        self, first: ShardReport, report: Callable[[ShardReport], None], hide: Callable[[str], str] = str
    ) -> None:
        self.last = first
        self.hide = hide
        self._report = report

    def state(
        self,
        state: ShardState,
        *,
        cause: str | None = None,
        kind: str | None = None,
        remedy: str | None = None,
        lines: tuple[str, ...] = (),
    ) -> None:
        """A step of the shard's life. What was said of the step before does not hold for this one."""
        said = replace(self.last, state=state, cause=cause, kind=kind, remedy=remedy, lines=lines)
        report = replace(said, progress=None, fetch=None, load=Load())
        if state in (ShardState.STOPPING, ShardState.ENDED):
            report = replace(report, endpoint=None)
        self._tell(report)

    def process(self, pid: int, endpoint: Endpoint | None) -> None:
        """Which process it is, and where it will be reached; None where it serves nobody."""
        self._tell(replace(self.last, pid=pid, endpoint=endpoint))

    def context(self, tokens: int | None) -> None:
        """How many tokens a request may have, as the engine says; told with the next word."""
        self.last = replace(self.last, context_length=tokens)

    def measured(self, measured: Measured) -> None:
        """What its launch has shown."""
        self._tell(replace(self.last, measured=measured))

    def progress(self, progress: str | None) -> None:
        """One line for a person who waits; None when there is nothing to say."""
        self._tell(replace(self.last, progress=progress))

    def fetch(self, fetch: Fetch | None) -> None:
        """The weights that it waits for; None when it waits for none any more."""
        if fetch is not None:
            fetch = replace(fetch, cause=self._shown(fetch.cause), remedy=self._shown(fetch.remedy))
        words = None if fetch is None else describe_fetch(fetch)
        self._tell(replace(self.last, fetch=fetch, progress=words))

    def load(self, load: Load) -> None:
        """How busy the engine says it is."""
        self._tell(replace(self.last, load=load))

    def _tell(self, report: ShardReport) -> None:
        report = replace(
            report,
            cause=self._shown(report.cause),
            remedy=self._shown(report.remedy),
            progress=self._shown(report.progress),
            lines=tuple(map(self.hide, report.lines)),
        )
        if report != self.last:
            self.last = report
            self._report(report)

    def _shown(self, words: str | None) -> str | None:
        return None if words is None else cut(self.hide(words))
