"""What becomes of each fetch of each node, read off the nodes' words: it is announced, and its bytes are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from llmgw.core.effects import Announce, Happening
from llmgw.core.model import ModelName
from llmgw.core.node import NodeId
from llmgw.core.sharing import ACTIVE
from llmgw.core.weights import Fetch, NodeWeights, Phase, SetAside
from llmgw.counters import Counters
from llmgw.host.weights.errors import show_url
from llmgw.units import format_decimal, format_duration

log = logging.getLogger(__name__)

# A pause that nobody has to hear of is shorter.
STALL_SECONDS = 60.0
# It is to come, if only by another program on its folder.
_AWAITED = ACTIVE | {Phase.QUEUED}


@dataclass(slots=True, eq=False)
class _Course:
    """A fetch as it was told last, and what was said of it: that it has ``begun``, that it has ``stalled``."""

    fetch: Fetch
    began_at: float
    begun: bool = False
    stalled: bool = False


class Fetches:
    """Follows all of them. ``announce`` gets what is worth a line, and ``find_model`` whose weights a source is."""

    def __init__(
        self,
        announce: Callable[[Announce], None],
        find_model: Callable[[str], ModelName | None],
        *,
        counters: Counters,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self._announce = announce
        self._find_model = find_model
        self._clock = clock
        self._courses: dict[NodeId, dict[str, _Course]] = {}
        # what each node said the last time
        self._said: dict[NodeId, NodeWeights] = {}
        self._bytes = counters.counter(
            "llmgw_weights_fetched_bytes_total",
            "Bytes of weights that a node has taken, from their origin or from other nodes.",
            ("node", "from"),
        )
        self._ends = counters.counter(
            "llmgw_weights_fetches_total", "Fetches of weights that ended, by how.", ("outcome",)
        )

    def take(self, node: NodeId, weights: NodeWeights) -> None:
        """What a node says now. Its first word may tell of long ago: of that nothing has ended, and no byte counts."""
        before = self._courses.get(node)
        # (of several of one source the one that goes on counts, else the last)
        told = {each.source: each for each in sorted(weights.fetches, key=lambda each: each.phase in ACTIVE)}
        self._courses[node] = {source: self._follow(node, fetch, before) for source, fetch in told.items()}
        for source, course in (before or {}).items():
            if source not in told and course.fetch.phase in ACTIVE:
                self._end(node, course, weights)
        said = self._said.get(node)
        for each in weights.set_aside if said is not None else ():
            if said is not None and each not in said.set_aside:
                self._tell_set_aside(node, each)
        self._said[node] = weights

    def _tell_set_aside(self, node: NodeId, each: SetAside) -> None:
        shown, model = show_url(each.source), self._find_model(each.source)
        text = f"{node}: {shown} ({each.commit[:12]}) was damaged on its disk, and is fetched anew: {each.why}"
        self._announce(Announce(model=model, text=text, warning=True, what=Happening.FETCHING, node=node))

    def forget(self, node: NodeId) -> None:
        self._courses.pop(node, None)
        self._said.pop(node, None)

    def _end(self, node: NodeId, course: _Course, weights: NodeWeights) -> None:
        """One that is not told any more: it has come to its end if all of it is there, or a commit of it that was not
        there before (it may have learned late which one it fetches)."""
        source, said = course.fetch.source, self._said.get(node, NodeWeights())
        before = {each.commit for each in said.whole if each.source == source} - {course.fetch.commit}
        new = (each for each in weights.whole if each.source == source and each.commit not in before)
        kept = max(new, key=lambda each: each.fetched_at, default=None)
        self._ends.bump("stopped" if kept is None else "fetched")
        if kept is not None:
            size, lasted = format_decimal(kept.size_bytes), self._tell_lasted(course)
            text = f"{node} has {show_url(source)}, {size}: it took {lasted}"
            self._say(node, course, text, what=Happening.FETCHED)
        elif course.begun:
            text = f"{node} no longer fetches {show_url(source)}: what has come is kept for a later try"
            self._say(node, course, text)

    def _tell_lasted(self, course: _Course) -> str:
        return format_duration(round(self._clock() - course.began_at))

    def _follow(self, node: NodeId, fetch: Fetch, courses: Mapping[str, _Course] | None) -> _Course:
        known = None if courses is None else courses.get(fetch.source)
        goes_on = known is not None and (known.fetch.phase in _AWAITED or not _is_another(known.fetch, fetch))
        course = known if known is not None and goes_on else _Course(fetch, self._clock())
        if courses is not None:
            self._count(node, fetch, course.fetch if goes_on else None)
        ended = courses is not None and (not goes_on or course.fetch.phase in _AWAITED)
        course.fetch = fetch
        self._tell(node, course, ended=ended)
        return course

    def _count(self, node: NodeId, fetch: Fetch, before: Fetch | None) -> None:
        for origin, now, then in (
            ("origin", fetch.origin_bytes, 0 if before is None else before.origin_bytes),
            ("nodes", fetch.peer_bytes, 0 if before is None else before.peer_bytes),
        ):
            # (less than before: it has begun anew)
            grown = now - then if now >= then else now
            if grown:
                self._bytes.add((node, origin), grown)

    def _tell(self, node: NodeId, course: _Course, *, ended: bool) -> None:
        fetch = course.fetch
        if _is_moving(fetch) and not course.begun and fetch.total_bytes is not None:
            course.begun = True
            self._say(node, course, f"{node} fetches {show_url(fetch.source)}, {_tell_size(fetch)}")
        if fetch.phase in _AWAITED:
            self._tell_stall(node, course)
        elif ended and fetch.phase is Phase.READY:
            if course.begun or fetch.origin_bytes or fetch.peer_bytes:
                self._ends.bump("fetched")
                self._say(node, course, self._tell_end(node, course), what=Happening.FETCHED)
            else:
                # It had the newest already.
                self._ends.bump("unchanged")
        elif ended and fetch.phase is Phase.FAILED:
            self._ends.bump("failed")
            text = f"{node} can't fetch {show_url(fetch.source)}: {fetch.cause or 'it does not say why'}"
            self._say(node, course, text, what=Happening.FAILED, lines=_tell_remedy(fetch), warning=True)

    def _tell_stall(self, node: NodeId, course: _Course) -> None:
        fetch, shown = course.fetch, show_url(course.fetch.source)
        stalled = fetch.stalled_seconds is not None and fetch.stalled_seconds >= STALL_SECONDS
        if stalled and not course.stalled:
            course.stalled = True
            text = (
                f"{node}: nothing of {shown} has come for {STALL_SECONDS:g} s, {_tell_done(fetch)}{tell_cause(fetch)}"
            )
            self._say(node, course, text, lines=_tell_remedy(fetch), warning=True)
        elif course.stalled and fetch.stalled_seconds is None:
            course.stalled = False
            self._say(node, course, f"{node}: {shown} goes on, {_tell_done(fetch)}")

    def _tell_end(self, node: NodeId, course: _Course) -> str:
        fetch = course.fetch
        size = "" if fetch.total_bytes is None else f", {format_decimal(fetch.total_bytes)}"
        return f"{node} has {show_url(fetch.source)}{size}: it took {self._tell_lasted(course)}, {tell_sources(fetch)}"

    def _say(
        self,
        node: NodeId,
        course: _Course,
        text: str,
        *,
        what: Happening = Happening.FETCHING,
        lines: tuple[str, ...] = (),
        warning: bool = False,
    ) -> None:
        model = self._find_model(course.fetch.source)
        self._announce(Announce(model=model, text=text, lines=lines, warning=warning, what=what, node=node))


def _is_moving(fetch: Fetch) -> bool:
    """Whether bytes come. (What lies there already may be compared with its hashes for long, and that is no fetch.)"""
    taken = fetch.origin_bytes or fetch.peer_bytes
    return fetch.phase is Phase.FETCHING or (fetch.phase is Phase.VERIFYING and taken > 0)


def tell_sources(fetch: Fetch) -> str:
    """How much has come from where."""
    return (
        f"{format_decimal(fetch.origin_bytes)} from its origin and {format_decimal(fetch.peer_bytes)} from other nodes"
    )


def tell_cause(fetch: Fetch) -> str:
    """What keeps it from going on, where that is known."""
    return "" if fetch.cause is None else f": {fetch.cause}"


def _tell_remedy(fetch: Fetch) -> tuple[str, ...]:
    return () if fetch.remedy is None else (f"what to do: {fetch.remedy}",)


def _is_another(before: Fetch, now: Fetch) -> bool:
    """Of one that has ended: what is told now is not the same end once more, of another order that it carried out."""
    return _name_end(before) != _name_end(now)


def _name_end(fetch: Fetch) -> tuple[object, ...]:
    taken = fetch.origin_bytes, fetch.peer_bytes
    return (fetch.phase, fetch.commit, fetch.cause, *taken, None if any(taken) else fetch.pull)


def _tell_size(fetch: Fetch) -> str:
    there = f", of which {format_decimal(fetch.done_bytes)} are there already" if fetch.done_bytes else ""
    return f"{format_decimal(fetch.total_bytes or 0)}{there}"


def _tell_done(fetch: Fetch) -> str:
    of = "" if fetch.total_bytes is None else f" of {format_decimal(fetch.total_bytes)}"
    return f"{format_decimal(fetch.done_bytes)}{of} are there"
