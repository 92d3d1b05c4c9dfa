"""Figures of answers as cells of a table."""

from __future__ import annotations

from llmgw.cli.ctl.drawing import UNKNOWN
from llmgw.units import format_duration


def share_gb(free: float | None, total: float | None) -> str:
    """``free/total`` in GB of 10^9 bytes."""
    return UNKNOWN if free is None or total is None else f"{_gb(free)}/{_gb(total)}GB"


def _gb(size: float) -> str:
    return f"{size:.0f}" if size >= 100 else f"{size:.1f}"


def lasted(seconds: float | None) -> str:
    """A duration in whole seconds."""
    return UNKNOWN if seconds is None else format_duration(round(seconds))


def ago(seconds: float | None) -> str:
    if seconds is not None and round(seconds) == 0:
        return "now"
    return UNKNOWN if seconds is None else f"{lasted(seconds)} ago"


def percent(part: float | None, whole: float | None) -> str:
    """A share in whole percents; of nothing there is none."""
    return UNKNOWN if part is None or not whole else f"{part / whole:.0%}"


def free_of(free: int, total: int) -> str:
    """How many of some things nobody has."""
    return f"{free}/{total} free"
