"""What is said of weights that are on their way, in one line for a person who waits."""

from __future__ import annotations

from llmgw.core.weights import Fetch, Phase, parse_source
from llmgw.host.weights.errors import show_url
from llmgw.units import format_decimal, format_duration


def describe_fetch(fetch: Fetch) -> str:
    """How far it is, what comes per second and how long that will take, as far as somebody knows."""
    name = parse_source(fetch.source).name or show_url(fetch.source)
    match fetch.phase:
        case Phase.QUEUED:
            return f"waits for another program on this folder that fetches {name}{_tell_stall(fetch)}"
        case Phase.RESOLVING:
            return f"asking what {name} is{_tell_stall(fetch)}"
        case Phase.VERIFYING:
            return f"verifying {name}{_tell_stall(fetch)}"
        case Phase.READY:
            return f"{name} is here"
        case Phase.FAILED:
            return f"{name} can't be fetched: {fetch.cause or 'nobody knows why'}"
        case Phase.FETCHING:
            return f"fetching {name}: {_tell_progress(fetch)}"


def _tell_progress(fetch: Fetch) -> str:
    if fetch.total_bytes is None:
        parts = [format_decimal(fetch.done_bytes)]
    else:
        # Rounded down, and never all: that is said once it was found whole.
        percent = min(99, fetch.done_bytes * 100 // fetch.total_bytes) if fetch.total_bytes else 99
        parts = [f"{percent} % of {format_decimal(fetch.total_bytes)}"]
    if fetch.stalled_seconds is not None:
        return f"{parts[0]}{_tell_stall(fetch)}"
    if fetch.rate is not None:
        parts.append(f"{format_decimal(round(fetch.rate))}/s")
    if fetch.left_seconds is not None:
        parts.append(f"{format_duration(round(fetch.left_seconds))} left")
    return ", ".join(parts)


def _tell_stall(fetch: Fetch) -> str:
    return "" if fetch.stalled_seconds is None else f", stalled for {format_duration(round(fetch.stalled_seconds))}"
