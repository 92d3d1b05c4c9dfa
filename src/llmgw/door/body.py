"""What the door reads of a request's body, and the few edits it makes: by bytes, so that all else stays as it came.

A body that is decoded and encoded again loses key order (which changes prompts and prefix caches) and big integers.
"""

from __future__ import annotations

import json
import re

import msgspec

from llmgw.dialects.refusal import Refusal

ASK_USAGE = b'"stream_options":{"include_usage":true}'
# Possessive, so that the engine of regular expressions keeps no state for each of a million characters or escapes.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_TO_BRACKET = re.compile(rb'[^"{}\[\]]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}\[\]]*+)*+[{}\[\]]', re.DOTALL)
_SCALAR = re.compile(rb"[^,}\]\s]+")
_SPACE = re.compile(rb"[ \t\r\n]*")


MAX_KEYS = 1000


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


def read_body(body: bytes, *, chat: bool) -> Asked | Refusal:
    """Check that ``body`` is a JSON object that names a model, and say what it asks for."""
    try:
        found = _decode(body)
    except msgspec.ValidationError as error:
        return _bad(f"The request's body does not fit: {error}.")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _bad(f"The request's body is not JSON: {error}.")
    except RecursionError:
        return _bad("The request's body is nested too deeply.")
    if not found.model:
        return _bad("The request names no model: set 'model'.", "model")
    if chat and bytes(found.messages).strip() in (b"", b"null", b"[]"):
        return _bad("The request has no messages: 'messages' must hold at least one.", "messages")
    options = found.stream_options
    wants_usage = bool(found.stream and options and options.include_usage)
    return Asked(found.model, bool(found.stream), wants_usage, options is not msgspec.UNSET)


def _bad(message: str, param: str | None = None) -> Refusal:
    return Refusal(status=400, code="invalid_request", message=message, param=param)


def ask_for_usage(body: bytes, *, names_stream_options: bool) -> bytes:
    """The same body with ``stream_options.include_usage`` true."""
    if not names_stream_options:
        return _insert(body, 0, ASK_USAGE)
    start, end = _spans(body, 0)["stream_options"]
    if body[start:end] == b"null":
        return b'%b{"include_usage":true}%b' % (body[:start], body[end:])
    options = _spans(body, start)
    constant = options.get("continuous_usage_stats")
    if constant is not None and body[constant[0] : constant[1]] == b"true":
        # without include_usage it means nothing; with ours, usage in every event for a client that wants none
        body = b"%bfalse%b" % (body[: constant[0]], body[constant[1] :])
        options = _spans(body, start)
    inner = options.get("include_usage")
    if inner is None:
        return _insert(body, start, b'"include_usage":true', end)
    return b"%btrue%b" % (body[: inner[0]], body[inner[1] :])


def rename_model(body: bytes, name: str) -> bytes:
    """The same body with ``model`` replaced."""
    start, end = _spans(body, 0)["model"]
    return b"%b%b%b" % (body[:start], msgspec.json.encode(name), body[end:])


def _insert(body: bytes, start: int, field: bytes, end: int | None = None) -> bytes:
    """Put ``field`` first into the object that begins at or after ``start``."""
    brace = body.index(b"{", start, end) + 1
    empty = body[_end(_SPACE, body, brace)] == ord("}")
    return b"%b%b%b%b" % (body[:brace], field, b"" if empty else b",", body[brace:])


class TooManyKeys(Exception):  # noqa: N818 - a fact about a body, told in a sentence
    """Looking for one key among millions takes seconds, and no API has them."""


def _spans(body: bytes, start: int) -> dict[str, tuple[int, int]]:
    """Where the values of an object's own keys stand; of a key that came twice the last, which is the one that counts.

    ``body`` was decoded before, so the grammar is known to hold.
    """
    spans: dict[str, tuple[int, int]] = {}
    at = _end(_SPACE, body, body.index(b"{", start) + 1)
    count = 0
    while body[at] != ord("}"):
        count += 1
        if count > MAX_KEYS:
            raise TooManyKeys(f"The request's body has an object with more than {MAX_KEYS} keys.")
        key_end = _end(_STRING, body, at)
        value = _end(_SPACE, body, _end(_SPACE, body, key_end) + 1)
        value_end = _value_end(body, value)
        spans[_read_key(body[at:key_end])] = (value, value_end)
        at = _end(_SPACE, body, value_end)
        if body[at] == ord(","):
            at = _end(_SPACE, body, at + 1)
    return spans


def _read_key(text: bytes) -> str:
    # keys that nobody asks for were not decoded before, so they may be no UTF-8
    return str(json.loads(text.decode("utf-8", "replace"), strict=False))


def _value_end(body: bytes, at: int) -> int:
    first = body[at]
    if first == ord('"'):
        return _end(_STRING, body, at)
    if first not in b"{[":
        return _end(_SCALAR, body, at)
    depth, at = 1, at + 1
    while depth:
        at = _end(_TO_BRACKET, body, at)
        depth += 1 if body[at - 1] in b"{[" else -1
    return at


def _end(pattern: re.Pattern[bytes], body: bytes, at: int) -> int:
    found = pattern.match(body, at)
    if found is None:
        raise ValueError(f"no JSON at byte {at}")
    return found.end()
