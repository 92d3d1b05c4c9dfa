"""A head that has come before: peers that keep a connection send the same one again, save for its Content-Length.

A head that equals one which the parser has accepted, byte for byte but for the digits of that one number, needs no
parser: nothing in it can mean anything else than it did then.
"""

from __future__ import annotations

import re

MAX_DIGITS = 15
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})[ \t]*\r\n", re.IGNORECASE)
_END = b"\r\n\r\n"


class KnownHead:
    """The bytes of a head before and after the number in its Content-Length."""

    __slots__ = ("_prefix", "_start", "_suffix", "_suffix_size")

    def __init__(self, prefix: bytes, suffix: bytes) -> None:
        self._prefix = prefix
        self._suffix = suffix
        self._start = len(prefix)
        self._suffix_size = len(suffix)

    def match(self, data: bytes) -> tuple[int, int] | None:
        """The Content-Length, and where the body begins, when ``data`` starts with this head; else None."""
        start = self._start
        if not data.startswith(self._prefix):
            return None
        end = data.find(b"\r", start, start + MAX_DIGITS + 1)
        digits = data[start:end]
        # (no "\r" there: ``end`` is -1 and the digits run into what follows, or up to the last byte)
        if end < 0 or not digits.isdigit() or not data.startswith(self._suffix, end):
            return None
        return int(digits), end + self._suffix_size


def find_end(data: bytes) -> int:
    """How long the head at the start of ``data`` is; 0 when it is incomplete, or does not start at once."""
    if data.startswith((b"\r", b"\n")):
        return 0
    return data.find(_END) + len(_END) if _END in data else 0


def learn(data: bytes, size: int) -> KnownHead | None:
    """The head in the first ``size`` bytes, to be known again; None when it has no Content-Length of its own."""
    found = _LENGTH.search(data, 0, size)
    # the parser has seen to it that there is no second one
    return None if found is None else KnownHead(data[: found.start(1)], data[found.end(1) : size])
