"""What people write and read: durations and byte sizes ("5m", "80GB", "64MiB"), and lines that are one line."""

from __future__ import annotations

import math
import re

_DURATION_UNITS = {"d": 86_400_000.0, "h": 3_600_000.0, "m": 60_000.0, "s": 1_000.0, "ms": 1.0}
_DURATION = re.compile("".join(rf"(?:(?P<{unit}>\d+(?:\.\d+)?){unit}(?![a-z]))?" for unit in _DURATION_UNITS), re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_DURATION_EXAMPLE = 'write it like "250ms", "15s", "5m" or "1h30m", or as a plain number of seconds'

_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE_UNITS: dict[str, int] = {unit.lower(): 1_000**power for power, unit in enumerate(_DECIMAL)} | {
    unit.lower(): 1_024**power for power, unit in enumerate(_BINARY)
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[a-z]+)", re.ASCII)
_SIZE_EXAMPLE = 'write it like "80GB" or "64MiB", or as a plain number of bytes'


def parse_duration(value: str | float) -> float:
    """Seconds; a number, also as text, counts seconds already. ValueError says what was read and what works."""
    # True is a number to Python, and "timeout: yes" in YAML is a mistake rather than one second.
    if isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value) and value >= 0:
            return float(value)
    elif isinstance(value, str):
        text = value.strip()
        if _NUMBER.fullmatch(text):
            return float(text)
        found = _DURATION.fullmatch(text)
        if found and text:
            parts = found.groupdict(default="0")
            # Milliseconds are summed and divided once: adding 0.25 and 0.001 would show digits that nobody wrote.
            return sum(float(number) * _DURATION_UNITS[unit] for unit, number in parts.items()) / 1_000.0
    raise ValueError(f"{value!r} is not a duration: {_DURATION_EXAMPLE}")


def parse_size(value: str | int) -> int:
    """Bytes. kB, MB, GB count thousands and KiB, MiB, GiB 1024s. ValueError says what was read and what works."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= 0:
            return value
    elif isinstance(value, str):
        text = value.strip().lower()
        if text.isascii() and text.isdigit():
            return int(text)
        found = _SIZE.fullmatch(text)
        if found and found["unit"] in _SIZE_UNITS:
            factor = _SIZE_UNITS[found["unit"]]
            number = found["number"]
            # Whole numbers stay whole: beyond 2^53 a float would lose bytes.
            return round(float(number) * factor) if "." in number else int(number) * factor
    raise ValueError(f"{value!r} is not a size: {_SIZE_EXAMPLE}")


def format_duration(seconds: float) -> str:
    """The shortest text that ``parse_duration`` reads back: to the millisecond below a minute, to the second above."""
    milliseconds = round(seconds * 1_000)
    if milliseconds < 1_000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    if milliseconds < 60_000:
        return f"{milliseconds / 1_000:.3f}".rstrip("0").rstrip(".") + "s"
    rest = round(seconds)
    text = ""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        text += f"{count}{unit}" if count else ""
    return text


def format_size(size_bytes: int) -> str:
    """In the family of units that needs no more than one decimal ("64MiB", "80GB"), else rounded to one ("67.2MB")."""
    for units, step in ((_DECIMAL, 1_000), (_BINARY, 1_024)):
        power = _power(size_bytes, step)
        if size_bytes * 10 % step**power == 0:
            return _tenths(size_bytes * 10 // step**power) + units[power]
    return format_decimal(size_bytes)


def format_decimal(size_bytes: int) -> str:
    """In units of thousands, rounded to one decimal ("67.1MB"), for figures that people compare with each other."""
    power = _power(size_bytes, 1_000)
    tenths = round(size_bytes * 10 / 1_000**power)
    if tenths == 10_000 and power + 1 < len(_DECIMAL):
        tenths, power = 10, power + 1
    return _tenths(tenths) + _DECIMAL[power]


def _power(size_bytes: int, step: int) -> int:
    """Which unit of a family leaves at least one before the point."""
    power = 0
    limit = step
    while power + 1 < len(_DECIMAL) and size_bytes >= limit:
        power += 1
        limit *= step
    return power


def _tenths(count: int) -> str:
    whole, tenth = divmod(count, 10)
    return f"{whole}.{tenth}" if tenth else str(whole)


def printable(text: str) -> str:
    """``text`` as it may stand in a line of a log, whatever is not printable escaped: whoever made it makes no line of
    its own, and nothing that a terminal acts on."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode("ascii") for mark in text)
