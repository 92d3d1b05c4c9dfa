"""Makes what the other end said fit to stand in our log: no line of its own making, nothing that a terminal acts on."""

from __future__ import annotations

import traceback

LINE_CHARS = 2000


def clean(text: str, most: int = LINE_CHARS) -> str:
    """``text`` on one line of at most ``most`` characters, whatever is not printable escaped. Cleaning twice is as
    cleaning once."""
    text = text if len(text) <= most else text[: most - 1] + "…"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escape(each) for each in text)


def _escape(mark: str) -> str:
    return mark.encode("unicode_escape").decode("ascii")


def trace(error: BaseException) -> str:
    """Where ``error`` was raised, each line marked: its message may hold the other end's words, and with them ends of
    lines."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "".join(f"\n  | {clean(line)}" for line in lines)
