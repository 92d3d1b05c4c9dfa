"""OpenAI's shapes: error bodies and events, engines' errors made into them, usage, and the list of models."""

from __future__ import annotations

import codecs
import json
import re
from typing import Annotated, Any

import msgspec

from llmgw.core.model import Model
from llmgw.dialects.refusal import TYPES, Refusal

# What clients look for in a context overflow: the code (LangChain, Codex) or this text (litellm).
OVERFLOW_TYPES = ("exceed_context_size_error",)
OVERFLOW_TEXTS = ("maximum context length is", "exceeds the available context size", "prompt is too long")

# An error that is too long to be read in full is told by the beginning of its message.
MESSAGE_BYTES = 4096
_TEXT = re.compile(rb'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*+')
_MESSAGE = re.compile(rb'"(?:message|detail|error)"\s*:\s*"(' + _TEXT.pattern + rb")")

_encode = msgspec.json.Encoder().encode


# What an engine reports is counted and, later, charged: a number that can't be is no usage.
TOKENS_LIMIT = 2**53
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_LIMIT)]


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request, as engines report them."""

    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens = 0


class _ToldUsage(msgspec.Struct):
    prompt_tokens: _Tokens | msgspec.UnsetType = msgspec.UNSET
    completion_tokens: _Tokens = 0
    total_tokens: Any = None

    def read(self) -> Usage:
        """Some that rank or embed tell the total alone, which then is what they were given to read."""
        prompt, total = self.prompt_tokens, self.total_tokens
        if prompt is msgspec.UNSET:
            known = type(total) is int and self.completion_tokens <= total <= TOKENS_LIMIT
            prompt = total - self.completion_tokens if known else 0
        return Usage(prompt, self.completion_tokens)


class _WithUsage(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw(b"")
    choices: msgspec.Raw = msgspec.Raw(b"")


class _Reply(msgspec.Struct):
    usage: _ToldUsage | None = None


class _WithError(msgspec.Struct):
    error: dict[str, msgspec.Raw] | str | None = None


_decode_with_error = msgspec.json.Decoder(_WithError).decode
_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_with_usage = msgspec.json.Decoder(_WithUsage).decode
_decode_usage = msgspec.json.Decoder(_ToldUsage).decode


def error_body(refusal: Refusal) -> bytes:
    """``{"error": {...}}`` as OpenAI's clients read it."""
    return _encode(
        {
            "error": {
                "message": refusal.message,
                "type": refusal.type,
                "param": refusal.param,
                "code": refusal.code,
            }
        }
    )


def error_event(refusal: Refusal) -> bytes:
    """The same as an event: what a stream that was opened already ends with."""
    return b"data: %b\n\n" % error_body(refusal)


def is_error(document: bytes) -> bool:
    """An event's data is an error of its own: ``error`` is one of its own fields, and says something."""
    try:
        return bool(_decode_with_error(document).error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def read_engine_error(status: int, body: bytes) -> Refusal:
    """An engine's own error in one shape, whichever of theirs it had: nested, flat, a bare string, HTML, nothing.

    ``body`` may be the beginning of one that is too long to be read. A status that is no error's becomes 502.
    """
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = {"message": _beginning_of_message(body)}
    error: Any = (found.get("error") or found) if isinstance(found, dict) else None
    fields: dict[str, Any] = error if isinstance(error, dict) else {}
    message = fields.get("message") or _detail(fields.get("detail")) or (error if isinstance(error, str) else None)
    if not isinstance(message, str) or not message:
        why = " and no explanation" if 400 <= status < 600 else ", which is neither a success nor an error"
        message = f"The engine answered with status {status}{why}."
    if not 400 <= status < 600:
        status = 502
    kind, code, param = fields.get("type"), fields.get("code"), fields.get("param")
    if status == 400 and (kind in OVERFLOW_TYPES or any(text in message for text in OVERFLOW_TEXTS)):
        code = "context_length_exceeded"
    elif not isinstance(code, str) or not code:
        code = kind if isinstance(kind, str) and kind else TYPES.get(status, "engine_error")
    return Refusal(status=status, code=code, message=message, param=param if isinstance(param, str) else None)


def _beginning_of_message(body: bytes) -> str | None:
    """The message of an error that is cut off somewhere behind the beginning of it."""
    found = _MESSAGE.search(body)
    if found is None:
        return None
    try:
        # half a character at the end is left out, as half an escape was
        beginning = _TEXT.match(found[1], 0, MESSAGE_BYTES)
        text = codecs.getincrementaldecoder("utf-8")().decode(beginning[0] if beginning is not None else b"")
        said: str = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return None
    said = said.encode("utf-8", "replace").decode()
    whole = body.startswith(b'"', found.end()) and len(found[1]) <= MESSAGE_BYTES
    return said if whole else f"{said}…"


def _detail(detail: Any) -> Any:
    """FastAPI's word for what is wrong: a text, or a list of findings."""
    if isinstance(detail, list):
        texts = [each.get("msg") for each in detail if isinstance(each, dict)]
        return "; ".join(text for text in texts if isinstance(text, str))
    return detail


def read_usage(document: bytes) -> tuple[Usage | None, bool]:
    """The usage in a reply or an event's data, and whether ``choices`` is there and empty (a usage event proper).

    Odd usage (strings, nulls, floats) is no usage; nothing raises.
    """
    try:
        found = _decode_with_usage(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, False
    lone = bytes(found.choices).strip() in (b"[]", b"[ ]")
    raw = bytes(found.usage)
    if not raw.startswith(b"{"):
        return None, False
    try:
        return _decode_usage(raw).read(), lone
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, lone


def read_reply_usage(document: bytes) -> Usage | None:
    """The usage of a whole reply; odd usage is no usage."""
    try:
        told = _decode_reply(document).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return told.read() if told is not None else None


def list_models(models: list[Model], created: int) -> bytes:
    """The body of GET /v1/models: every name, alias and adapter that can be asked for."""
    return _encode({"object": "list", "data": [row for model in models for row in _rows(model, created)]})


def show_model(model: Model, name: str, created: int) -> bytes:
    """The body of GET /v1/models/{id}, under the name that was asked for."""
    return _encode(_row(model, name, created))


def _rows(model: Model, created: int) -> list[dict[str, Any]]:
    return [_row(model, name, created) for name in model.names()]


def _row(model: Model, name: str, created: int) -> dict[str, Any]:
    row: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "llmgw"}
    if model.context_length is not None:
        # vLLM's and LM Studio's names for the same fact: clients read one or the other
        row["max_model_len"] = row["context_length"] = model.context_length
    if name == model.name and model.aliases:
        row["aliases"] = list(model.aliases)
    if model.find_lora(name) is not None:
        # as servers of adapters have it
        row["parent"] = model.name
    elif name != model.name:
        row["root"] = model.name
    return row
