"""What is said of weights that are on their way, in one line for a person who waits."""

from __future__ import annotations

from llmgw.core.weights import Fetch, Phase, parse_source
from llmgw.host.weights_errors import show_url

MB, GB, TB = 1e6, 1e9, 1e12
MINUTE, HOUR = 60, 3600


def describe_fetch(fetch: Fetch) -> str:
    """How far it is, what comes per second and how long that will take, as far as somebody knows."""
    name = parse_source(fetch.source).name or show_url(fetch.source)
    match fetch.phase:
        case Phase.QUEUED:
            return f"waits for another program on this folder that fetches {name}"
        case Phase.RESOLVING:
            return f"asking what {name} is"
        case Phase.VERIFYING:
            return f"verifying {name}"
        case Phase.READY:
            return f"{name} is here"
        case Phase.FAILED:
            return f"{name} can't be fetched: {fetch.cause or 'nobody knows why'}"
        case Phase.FETCHING:
            return f"fetching {name}: {_tell_progress(fetch)}"


def _tell_progress(fetch: Fetch) -> str:
    if fetch.total_bytes is None:
        parts = [show_bytes(fetch.done_bytes)]
    else:
        # Rounded down, and never all: that is said once it was found whole.
        percent = min(99, fetch.done_bytes * 100 // fetch.total_bytes) if fetch.total_bytes else 99
        parts = [f"{percent} % of {show_bytes(fetch.total_bytes)}"]
    if fetch.stalled_seconds is not None:
        return f"{parts[0]}, stalled for {show_seconds(fetch.stalled_seconds)}"
    if fetch.rate is not None:
        parts.append(f"{show_bytes(fetch.rate)}/s")
    if fetch.left_seconds is not None:
        parts.append(f"{show_seconds(fetch.left_seconds)} left")
    return ", ".join(parts)


def show_bytes(count: float) -> str:
    """In units of thousands, with three digits at most."""
    for unit, name in ((TB, "TB"), (GB, "GB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / MB:.0f} MB" if count >= 10 * MB else f"{count / MB:.1f} MB"


def show_seconds(seconds: float) -> str:
    """In the two largest units that there are of it."""
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE} s"
    return f"{whole // HOUR} h {whole % HOUR // MINUTE} min"
