"""What comes up to a websocket, and how much of it at once: no peer may make us work for long without a pause.

A frame costs the websocket far more than its bytes, a message costs by its parts, and a peer chooses both: frames of
nothing, messages in a million pieces, pieces of a byte each. So frames are counted before they go up, and go up whole.

Pure: what came goes into ``feed``, and ``take`` gives what may go up next.
"""

from __future__ import annotations

import re

from llmgw.errors import LlmgwError

# Of one message. Ours come in one.
MESSAGE_FRAMES = 256
# That go up at once: about a millisecond of the websocket's work.
TURN_FRAMES = 16
# A frame that is larger goes up in parts of at least this size.
PART_BYTES = 16384

_BLANK_LINE = re.compile(rb"\n\r?\n")
_STATUS_AT, _SWITCHES = slice(8, 12), b" 101"
_FIN, _CONTROL, _LENGTH = 0x80, 0x08, 0x7F


class TooManyFrames(LlmgwError):  # noqa: N818 - named by what it is
    """One message has more frames than any of ours would."""


class Inlet:
    """One direction of a websocket, from the upgrade's head on.

    What follows the peer's head is frames once our own head has been said (``answered``); before, the peer may not send
    any, and the websocket would not take them. An answer that says no has a body instead.
    """

    __slots__ = ("_after_head", "_begin", "_data", "_fragments", "_left", "_tail", "answered")

    def __init__(self) -> None:
        self.answered = False
        self._after_head = False
        self._begin = self._tail = b""
        self._data = bytearray()
        # Of the frame that is going up in parts: what is still to come.
        self._left = 0
        self._fragments = 0

    def feed(self, data: bytes | bytearray) -> bytes:
        """Take what came. The answer goes up at once: it is part of the head."""
        if self._after_head:
            if self.answered:
                self._data += data
            return b""
        if len(self._begin) < _STATUS_AT.stop:
            self._begin = (self._begin + data)[: _STATUS_AT.stop]
        if self._begin.startswith(b"HTTP/") and self._begin[_STATUS_AT] != _SWITCHES[: len(self._begin[_STATUS_AT])]:
            return bytes(data)
        seen = self._tail + data
        match = _BLANK_LINE.search(seen)
        if match is None:
            self._tail = bytes(seen[-2:])
            return bytes(data)
        self._after_head = True
        end = match.end() - len(self._tail)
        self._tail = b""
        if self.answered:
            self._data += data[end:]
        return bytes(data[:end])

    def take(self) -> bytes:
        """What may go up; empty when more has to come first. Raises TooManyFrames."""
        data, left = self._data, self._left
        if left > len(data):
            if len(data) < PART_BYTES:
                return b""
            self._left -= len(data)
            given = bytes(data)
            data.clear()
            return given
        whole, count = left, 0
        while count < TURN_FRAMES and (size := _measure(data, whole)) is not None:
            if whole + size > len(data) and (whole or len(data) < PART_BYTES):
                break
            self._count(data[whole])
            whole += size
            count += 1
        self._left = max(0, whole - len(data))
        given = bytes(data[:whole])
        del data[:whole]
        return given

    def _count(self, first: int) -> None:
        if first & _CONTROL:
            return
        self._fragments = 0 if first & _FIN else self._fragments + 1
        if self._fragments >= MESSAGE_FRAMES:
            raise TooManyFrames(f"it sent a message in more than {MESSAGE_FRAMES} frames")


def _measure(data: bytearray, at: int) -> int | None:
    """The size of the frame that begins at ``at``, head and all; None when its head is not whole."""
    if len(data) < at + 2:
        return None
    second = data[at + 1]
    length, head = second & _LENGTH, 2
    if length >= 126:
        head = 4 if length == 126 else 10
        if len(data) < at + head:
            return None
        length = int.from_bytes(data[at + 2 : at + head], "big")
    return head + (4 if second & 0x80 else 0) + length
