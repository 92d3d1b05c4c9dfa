"""What the door reads of a request's body, and the few edits it makes: by bytes, so that all else stays as it came.

A body that is decoded and encoded again loses key order (which changes prompts and prefix caches) and big integers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from llmgw.dialects.refusal import Refusal

ASK_USAGE = b'"stream_options":{"include_usage":true}'
# Possessive, so that the engine of regular expressions keeps no state for each of a million characters or escapes.
_KEY = re.compile(rb'[ \t\r\n,]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"[ \t\r\n]*+:[ \t\r\n]*+', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*")
_ONE_AT_LEAST = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*[^\] \t\r\n]")
_FIELD = re.compile(r" - at `\$\.([^`\[]+)")

# Byte for byte, so that all else keeps its place.
_TO_ASCII = bytes(range(128)) + b"?" * 128

MAX_KEYS = 1000

# Top-level keys of a body, and their values as JSON.
Fields = tuple[tuple[str, bytes], ...]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    messages: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Body).decode


class Asked(msgspec.Struct, frozen=True):
    """What a body asks for, as far as the door needs to know. ``null`` and absent are the same."""

    model: str
    stream: bool
    wants_usage: bool
    names_stream_options: bool


def read_body(body: bytes, *, chat: bool, streams: bool = True) -> Asked | Refusal:
    """Check that ``body`` is a JSON object that names a model, and say what it asks for.

    ``streams``: whether there is a stream to be asked for; where there is none that wish means nothing.
    """
    try:
        found = _decode(body)
    except msgspec.ValidationError as error:
        field = _FIELD.search(str(error))
        return _bad(f"The request's body does not fit: {error}.", field[1] if field is not None else None)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _bad(f"The request's body is not JSON: {error}.")
    except RecursionError:
        return _bad("The request's body is nested too deeply.")
    if not found.model:
        return _bad("The request names no model: set 'model'.", "model")
    if chat and _ONE_AT_LEAST.match(found.messages) is None:
        return _bad("The request has no messages: 'messages' must be a list that holds at least one.", "messages")
    options = found.stream_options
    stream = bool(found.stream) and streams
    wants_usage = bool(stream and options and options.include_usage)
    return Asked(found.model, stream, wants_usage, options is not msgspec.UNSET)


def _bad(message: str, param: str | None = None) -> Refusal:
    return Refusal(status=400, code="invalid_request", message=message, param=param)


def ask_for_usage(body: bytes, *, names_stream_options: bool) -> bytes:
    """The same body with ``stream_options.include_usage`` true."""
    if not names_stream_options:
        return _insert(body, 0, ASK_USAGE)
    start, end = _spans(body, 0)["stream_options"]
    if body[start:end] == b"null":
        return b'%b{"include_usage":true}%b' % (body[:start], body[end:])
    options = _spans(body, start, end)
    constant = options.get("continuous_usage_stats")
    if constant is not None and body[constant[0] : constant[1]] == b"true":
        # without include_usage it means nothing; with ours, usage in every event for a client that wants none
        body = b"%bfalse%b" % (body[: constant[0]], body[constant[1] :])
        end += 1
        options = _spans(body, start, end)
    inner = options.get("include_usage")
    if inner is None:
        return _insert(body, start, b'"include_usage":true', end)
    return b"%btrue%b" % (body[: inner[0]], body[inner[1] :])


def encode_fields(fields: Mapping[str, object]) -> Fields:
    """These as they are written into a body. TypeError or ValueError for what is no JSON."""
    return tuple((key, msgspec.json.encode(value)) for key, value in fields.items())


def set_fields(body: bytes, fields: Fields) -> bytes:
    """The same body with these values at its own keys: in the place of those that it has, the others first.

    No key may come twice.
    """
    spans = _spans(body, 0)
    there = sorted((*spans[key], value) for key, value in fields if key in spans)
    pieces: list[bytes] = []
    at = 0
    for start, end, value in there:
        pieces += (body[at:start], value)
        at = end
    edited = b"".join((*pieces, body[at:]))
    new = [b"%b:%b" % (msgspec.json.encode(key), value) for key, value in fields if key not in spans]
    return _insert(edited, 0, b",".join(new)) if new else edited


def _insert(body: bytes, start: int, field: bytes, end: int | None = None) -> bytes:
    """Put ``field`` first into the object that begins at or after ``start``."""
    brace = body.index(b"{", start, end) + 1
    empty = body[_end(_SPACE, body, brace)] == ord("}")
    return b"%b%b%b%b" % (body[:brace], field, b"" if empty else b",", body[brace:])


class TooManyKeys(Exception):  # noqa: N818 - a fact about a body, told in a sentence
    """Looking for one key among millions takes seconds, and no API has them."""


class _Key:
    """A key of an object as it came. Two of the same name are two, for both have a place in the body."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def _decode_values(document: memoryview) -> dict[_Key, msgspec.Raw]:
    """An object's own keys and values in their order: at the speed of C, whatever the values are made of."""
    left = MAX_KEYS

    def make_key(kind: type, name: str) -> _Key:
        nonlocal left
        left -= 1
        if left < 0:
            raise TooManyKeys(f"The request's body has an object with more than {MAX_KEYS} keys.")
        return _Key(name)

    try:
        return msgspec.json.decode(document, type=dict[_Key, msgspec.Raw], dec_hook=make_key)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # keys that nobody asks for were not decoded before, so they may be no UTF-8; what is asked for is ASCII
        left = MAX_KEYS
        ascii_only = bytes(document).translate(_TO_ASCII)
        return msgspec.json.decode(ascii_only, type=dict[_Key, msgspec.Raw], dec_hook=make_key)


def _spans(body: bytes, start: int, end: int | None = None) -> dict[str, tuple[int, int]]:
    """Where the values of an object's own keys stand; of a key that came twice the last, which is the one that counts.

    ``body`` was decoded before, so the grammar is known to hold. ``start`` and ``end`` are those of the object, with
    space around it at most.
    """
    spans: dict[str, tuple[int, int]] = {}
    at = body.index(b"{", start) + 1
    for key, value in _decode_values(memoryview(body)[start:end]).items():
        begins = _end(_KEY, body, at)
        at = begins + memoryview(value).nbytes
        spans[key.name] = (begins, at)
    return spans


def _end(pattern: re.Pattern[bytes], body: bytes, at: int) -> int:
    found = pattern.match(body, at)
    if found is None:
        raise ValueError(f"no JSON at byte {at}")
    return found.end()
