"""Where the events of an event stream begin and end, whatever packets they come in.

Lines end with LF or CRLF. A lone CR, which the standard allows and no engine sends, is an ordinary byte here.
"""

from __future__ import annotations

import re

# A blank line ends an event; further blank lines belong to the event before them.
_BOUNDARY = re.compile(rb"\n\r?\n(?:\r?\n)*")
_BLANK_BEFORE = re.compile(rb"\A(?:\r?\n)+")
_FIELD = re.compile(rb"^[^:\r\n]", re.MULTILINE)


def last_boundary(data: bytes | bytearray) -> int:
    """The index just after the last complete event, 0 when there is none: ``data[:index]`` ends with a blank line."""
    # What an engine writes at once is what we read at once, nearly always.
    if data.endswith(b"\n\n"):
        return len(data)
    plain = data.rfind(b"\n\n")
    with_return = data.rfind(b"\n\r\n")
    if plain > with_return:
        return plain + 2
    return with_return + 3 if with_return >= 0 else 0


def events(data: bytes | bytearray) -> list[tuple[int, int]]:
    """The spans of the complete events, their blank lines included: side by side from 0 to ``last_boundary(data)``."""
    spans: list[tuple[int, int]] = []
    start = 0
    for boundary in _BOUNDARY.finditer(data):
        spans.append((start, boundary.end()))
        start = boundary.end()
    return spans


def data_of(event: bytes | bytearray) -> bytes:
    """What the event's data lines say, joined by line feeds; empty when it has none."""
    found: list[bytes] = []
    for line in bytes(event).split(b"\n"):
        name, _, value = line.removesuffix(b"\r").partition(b":")
        if name == b"data":
            found.append(value.removeprefix(b" "))
    return b"\n".join(found)


class EventReader:
    """Cuts a stream into its events. Blank lines, and events that are nothing but comments, are left out."""

    __slots__ = ("_rest", "_seen")

    def __init__(self) -> None:
        self._rest = bytearray()
        self._seen = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete now, without the blank line that ends each."""
        rest = self._rest
        rest += data
        found: list[bytes] = []
        start = 0
        # A boundary may have begun in the last two bytes before these; looking at no more than that keeps an event of
        # megabytes that comes byte by byte from being searched from its beginning each time.
        for boundary in _BOUNDARY.finditer(rest, max(self._seen - 2, 0)):
            self._keep(bytes(rest[start : boundary.start()]), found)
            start = boundary.end()
        del rest[:start]
        self._seen = len(rest)
        return found

    def end(self) -> list[bytes]:
        """The last event of a stream that ended without its blank line; empty when nothing is left."""
        found: list[bytes] = []
        self._keep(bytes(self._rest), found)
        self._rest.clear()
        self._seen = 0
        return found

    @staticmethod
    def _keep(event: bytes, found: list[bytes]) -> None:
        # Blank lines stand before an event when they came in a later packet than the event that they follow.
        event = _BLANK_BEFORE.sub(b"", event).removesuffix(b"\n").removesuffix(b"\r")
        if _FIELD.search(event):
            found.append(event)
