"""How far weights on their way are, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmgw.cli.ctl.drawing import shown
from llmgw.cli.ctl.figures import lasted, percent
from llmgw.units import format_decimal

_WORDS = {
    "queued": "waits for another program there that fetches it",
    "resolving": "asks what there is to fetch",
    "verifying": "verifying",
    "ready": "ready",
    "failed": "failed",
}


def tell_fetch(fetch: Mapping[str, Any]) -> str:
    """How far it is, and what holds it up: ``fetching 42 %, 34s left``."""
    return tell_pace(fetch) + _tell_cause(fetch)


def tell_doing(fetch: Mapping[str, Any]) -> str:
    """What it does, without the figures that always move: while this is the same nothing is news."""
    stalled = ", stalled" if fetch.get("stalled_seconds") is not None else ""
    return f"{shown(fetch['phase'])}{stalled}{_tell_cause(fetch)}"


def _tell_cause(fetch: Mapping[str, Any]) -> str:
    cause = fetch.get("cause")
    return "" if cause is None else f": {shown(cause)}"


def tell_pace(fetch: Mapping[str, Any]) -> str:
    """How far it is, in a few words: ``fetching 42 %, stalled for 25s``."""
    phase, total = fetch["phase"], fetch.get("total_bytes")
    if phase != "fetching":
        words, left = _WORDS.get(phase, shown(phase)), None
    else:
        # Never as much as is not there yet.
        words = "fetching" if not total else f"fetching {100 * fetch['done_bytes'] // total} %"
        left = fetch.get("left_seconds")
    if (stalled := fetch.get("stalled_seconds")) is not None:
        return f"{words}, stalled for {lasted(stalled)}"
    return words if left is None else f"{words}, {lasted(left)} left"


def tell_whole(fetch: Mapping[str, Any]) -> str:
    """All that is known of it."""
    total, rate = fetch.get("total_bytes"), fetch.get("rate")
    of = "" if total is None else f" of {format_decimal(total)}"
    told = [f"{shown(fetch['source'])}: {tell_pace(fetch)}", f"{format_decimal(fetch['done_bytes'])}{of}"]
    if rate is not None:
        told.append(f"{format_decimal(round(rate))}/s")
    return ", ".join([*told, tell_sources(fetch)]) + _tell_cause(fetch)


def tell_sources(fetch: Mapping[str, Any]) -> str:
    """How much has come from where."""
    origin, peers = format_decimal(fetch["origin_bytes"]), format_decimal(fetch["peer_bytes"])
    return f"{origin} from its origin and {peers} from other nodes"


def tell_sum(source: Mapping[str, Any]) -> str:
    """How far a source is on all nodes that fetch it."""
    nodes, total, left = source["nodes"], source.get("total_bytes"), source.get("left_seconds")
    told = [f"{shown(source['source'])} on {nodes} {'node' if nodes == 1 else 'nodes'}"]
    if total:
        told.append(f"{percent(source['done_bytes'], total)} of {format_decimal(total)}")
    if left is not None:
        told.append(f"{lasted(left)} left")
    if source["stalled"]:
        told.append(f"{source['stalled']} stalled")
    return ", ".join(told)
