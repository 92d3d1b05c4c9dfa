"""What is told of weights, cut to what a report may hold: one odd value must not silence all the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llmgw.agent.telling import cut
from llmgw.core.weights import Cached, Collected, Fetch, NodeWeights

# Well below what a message holds (wire.py), all of it together.
MOST_CACHED = 1000
MOST_FETCHES = 500
MOST_KEPT = 500
SEEN_CHARS = 500_000
WRONG_CHARS = 200
MOST_MOMENT = 1e12


def bound(weights: NodeWeights) -> NodeWeights:
    """The same, as far as it may be told: of very much what runs here and what is newest."""
    return replace(
        weights,
        cached=_bound_cached(weights.cached),
        fetches=tuple(map(bound_fetch, weights.fetches[:MOST_FETCHES])),
        seen=tuple(_take(weights.seen, SEEN_CHARS)),
        collected=None if weights.collected is None else _bound_collected(weights.collected),
        set_aside=tuple(
            replace(each, why=cut(each.why), fetched_at=_bound_moment(each.fetched_at)) for each in weights.set_aside
        ),
    )


def bound_fetch(fetch: Fetch) -> Fetch:
    """A fetch whose words can be read at a glance."""
    if fetch.cause is None and fetch.remedy is None:
        return fetch
    return replace(
        fetch,
        cause=None if fetch.cause is None else cut(fetch.cause),
        remedy=None if fetch.remedy is None else cut(fetch.remedy),
    )


def _bound_cached(cached: tuple[Cached, ...]) -> tuple[Cached, ...]:
    if len(cached) > MOST_CACHED:
        cached = tuple(sorted(cached, key=lambda each: (not each.in_use, -each.fetched_at))[:MOST_CACHED])
    return tuple(
        replace(each, fetched_at=_bound_moment(each.fetched_at), wrong=_brief(each.wrong))
        if not 0 <= each.fetched_at <= MOST_MOMENT or each.wrong is not None
        else each
        for each in cached
    )


def _bound_moment(at: float) -> float:
    """A clock without a battery begins before 1970, and one that is wrong may be anywhere."""
    return min(max(at, 0.0), MOST_MOMENT)


def _brief(wrong: str | None) -> str | None:
    return wrong if wrong is None or len(wrong) <= WRONG_CHARS else wrong[:WRONG_CHARS] + "…"


def _bound_collected(collected: Collected) -> Collected:
    more = len(collected.kept) - MOST_KEPT
    kept = tuple(map(cut, collected.kept[:MOST_KEPT]))
    return replace(collected, kept=(*kept, f"and {more} more") if more > 0 else kept)


def _take(texts: Iterable[str], chars: int) -> Iterable[str]:
    for text in texts:
        chars -= len(text)
        if chars < 0:
            return
        yield text
