"""An engine's body on its way to the client: whole events, few named filters, and what usage it told.

Pure: bytes in, bytes out. Events leave whole, so that a comment or an error event can always follow; only an event
larger than ``HOLD_BYTES`` passes in pieces. An event that no filter touches keeps its bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Protocol

from llmgw.core.sse import data_of, events, last_boundary
from llmgw.dialects.openai import Usage, is_error, read_reply_usage, read_usage

HOLD_BYTES = 64 * 1024
KEEP_BYTES = 64 * 1024


class Filter(Protocol):
    """Changes whole events, or a whole reply piece by piece."""

    def feed(self, data: bytes) -> bytes: ...

    def end(self) -> bytes:
        """What was still held back."""


class StripUsage:
    """Takes the usage event out that was asked for on llmgw's own account, and nothing else."""

    __slots__ = ("usage",)

    def __init__(self) -> None:
        self.usage: Usage | None = None

    def feed(self, data: bytes) -> bytes:
        if b'"usage"' not in data:
            return data
        kept: list[bytes] = []
        end = 0
        for start, end in events(data):
            event = data[start:end]
            if b'"usage"' in event:
                usage, lone = read_usage(data_of(event))
                if usage is not None:
                    self.usage = usage
                if lone:
                    continue
            kept.append(event)
        # a piece of an event too large to be held has no end yet
        kept.append(data[end:])
        return b"".join(kept)

    def end(self) -> bytes:
        return b""


class EchoAlias:
    """Gives the name that the client asked for back to it, instead of one that the engine serves under."""

    __slots__ = ("_carry", "_held", "_pattern", "_put", "_whole")

    def __init__(self, served: Iterable[str], asked: str, *, whole: bool) -> None:
        """``served``: the names that the engine may use. ``whole``: a reply that is no stream, so that its pieces may
        cut a name in two."""
        forms = {json.dumps(name, ensure_ascii=escaped).encode() for name in served for escaped in (True, False)}
        names = b"|".join(re.escape(form) for form in sorted(forms))
        self._pattern = re.compile(rb'("model"\s{0,4}:\s{0,4})(?:' + names + rb")")
        self._put = rb"\g<1>" + json.dumps(asked).encode().replace(b"\\", b"\\\\")
        self._carry = max(map(len, forms)) + len(b'"model"') + 9
        self._whole = whole
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        data = self._pattern.sub(self._put, self._held + data)
        # of a stream only an event too large to be held comes in pieces
        if not self._whole and data.endswith((b"\n\n", b"\n\r\n")):
            self._held = b""
            return data
        cut = max(0, len(data) - self._carry)
        self._held = data[cut:]
        return data[:cut]

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return held


_ERROR_EVENT = re.compile(rb"^event: ?error\r?$", re.MULTILINE)


def _is_last_word(event: bytes) -> bool:
    """[DONE], or an error of the engine's own, which no delta that talks of errors is."""
    data = data_of(event).strip()
    if not data or b"error" not in event:
        return data == b"[DONE]"
    return _ERROR_EVENT.search(event) is not None or is_error(data)


class EventRelay:
    """A stream's body: hands on whole events, and remembers the last piece that told the usage.

    ``at_boundary`` False only inside an event too large to be held: then nothing of ours may follow.
    """

    __slots__ = ("_filters", "_held", "_last", "_usage_filters", "at_boundary", "began", "usage_piece")

    def __init__(self, filters: tuple[Filter, ...]) -> None:
        # nearly every piece tells no usage, and then there is nothing to strip
        self._usage_filters = [each for each in filters if isinstance(each, StripUsage)]
        self._filters = [each for each in filters if not isinstance(each, StripUsage)]
        self._held = bytearray()
        self._last = b""
        self.at_boundary = True
        # an event proper has come; comments are no sign of a first token
        self.began = False
        self.usage_piece = b""

    def feed(self, data: bytes) -> bytes:
        """What may leave now; b"" while an event is incomplete."""
        if not self._held and self.at_boundary and data.endswith(b"\n\n"):
            out = data
        else:
            out = self._assemble(data)
            if not out:
                return b""
        if b"data" in out:
            self.began = True
            # what follows [DONE], a comment or a blank line, is not the last word
            self._last = out
        if b'"usage"' in out:
            self.usage_piece = out
            for strip in self._usage_filters:
                out = strip.feed(out)
        if self._filters:
            for each in self._filters:
                out = each.feed(out)
        return out

    def _assemble(self, data: bytes) -> bytes:
        held = self._held
        # a boundary may lie across the seam: look again at the last three bytes before it
        overlap = bytes(held[-3:])
        cut = last_boundary(overlap + data) - len(overlap)
        if cut <= 0:
            held += data
            if len(held) <= HOLD_BYTES:
                return b""
            out = bytes(held[:-3])
            del held[:-3]
            self.at_boundary = False
            return out
        out = bytes(held) + data[:cut]
        held[:] = data[cut:]
        self.at_boundary = True
        return out

    def end(self) -> tuple[bytes, bool]:
        """The engine ended the body in good order: what is left, and whether the stream was complete.

        A stream is complete with [DONE] or an error of the engine's own; one that stops before is broken, however
        cleanly the connection ended.
        """
        out = bytes(self._held)
        self._held.clear()
        if out:
            # a last event without its blank line would be dropped by every reader
            out = self.feed(out.rstrip(b"\r\n") + b"\n\n")
        return out, self.done

    @property
    def done(self) -> bool:
        """The stream has had its last word: nothing that comes, or fails to come, after it matters."""
        if self._held.strip():
            return self.at_boundary and _is_last_word(bytes(self._held))
        told = [event for start, end in events(self._last) if data_of(event := self._last[start:end])]
        return bool(told) and _is_last_word(told[-1])


class WholeRelay:
    """A reply that is no stream: its bytes as they come, through the filters, and its tail for the usage."""

    __slots__ = ("_filters", "_size", "_tail")

    def __init__(self, filters: tuple[Filter, ...]) -> None:
        self._filters = filters
        self._tail: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        tail = self._tail
        tail.append(data)
        self._size += len(data)
        while self._size - len(tail[0]) >= KEEP_BYTES:
            self._size -= len(tail.pop(0))
        for each in self._filters:
            data = each.feed(data)
        return data

    def end(self) -> bytes:
        out = b""
        for each in self._filters:
            out = (each.feed(out) if out else b"") + each.end()
        return out

    @property
    def tail(self) -> bytes:
        return b"".join(self._tail)


_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')


def usage_in_reply(tail: bytes) -> Usage | None:
    """The usage of a whole reply, from the reply or, of a large one, its end."""
    usage = read_reply_usage(tail)
    if usage is not None:
        return usage
    found = None
    for found in _USAGE.finditer(tail):  # noqa: B007 - the last one counts
        pass
    if found is None:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(tail[found.end() :].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return read_usage(json.dumps({"usage": value}).encode())[0]


def usage_in_events(piece: bytes) -> Usage | None:
    """The last usage that a piece of a stream tells."""
    usage = None
    for start, end in events(piece):
        event = piece[start:end]
        if b'"usage"' in event:
            usage = read_usage(data_of(event))[0] or usage
    return usage
