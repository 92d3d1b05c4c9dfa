"""Makes what the other end said fit to stand in our log: no line of its own making, nothing that a terminal acts on."""

from __future__ import annotations

import traceback

from llmgw.units import printable

LINE_CHARS = 2000


def clean(text: str, most: int = LINE_CHARS) -> str:
    """``text`` on one line of at most ``most`` characters. Cleaning twice is as cleaning once."""
    return printable(text if len(text) <= most else text[: most - 1] + "…")


def trace(error: BaseException) -> str:
    """Where ``error`` was raised, each line marked: its message may hold the other end's words, and with them ends of
    lines."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "".join(f"\n  | {clean(line)}" for line in lines)
