"""What the door reads of a request's body, and the few edits it makes: by bytes, so that all else stays as it came.

A body that is decoded and encoded again loses key order (which changes prompts and prefix caches) and big integers.
"""

from __future__ import annotations

import re

import msgspec

from llmgw.dialects.refusal import Refusal

ASK_USAGE = b'"stream_options":{"include_usage":true}'
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)
_SPACE = b" \t\r\n"
_OPENING = frozenset({b"{", b"["})
_CLOSING = frozenset({b"}", b"]", b","})


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
    inner = _spans(body, start).get("include_usage")
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
    rest = body[brace:].lstrip(_SPACE)
    return b"%b%b%b%b" % (body[:brace], field, b"" if rest.startswith(b"}") else b",", body[brace:])


def _spans(body: bytes, start: int) -> dict[str, tuple[int, int]]:
    """Where the values of an object's own keys stand; of a key that came twice the last, which is the one that counts.

    ``body`` was decoded before, so the grammar is known to hold.
    """
    spans: dict[str, tuple[int, int]] = {}
    depth = 0
    key: str | None = None
    key_is_next = False
    text: bytes = b""
    value_start = 0
    for token in _TOKEN.finditer(body, body.index(b"{", start)):
        first = token.group()
        if first in _OPENING:
            depth += 1
            key_is_next = depth == 1
        elif first in _CLOSING:
            if depth == 1 and key is not None:
                spans[key] = _trim(body, value_start, token.start())
                key = None
            if first == b",":
                key_is_next = depth == 1
                continue
            depth -= 1
            if depth == 0:
                break
        elif first == b":":
            if depth == 1 and key is None:
                key, value_start = msgspec.json.decode(text, type=str), token.end()
        elif key_is_next and depth == 1:
            text, key_is_next = first, False
    return spans


def _trim(body: bytes, start: int, end: int) -> tuple[int, int]:
    while start < end and body[start] in _SPACE:
        start += 1
    while end > start and body[end - 1] in _SPACE:
        end -= 1
    return start, end
