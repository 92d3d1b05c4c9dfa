"""What one reply to a request with tools holds: a proper call, a faulty one, a call as text, or none.

Nothing here raises, whatever an engine sends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from llmgw.core.sse import EventReader, data_of
from llmgw.dialects.textcalls import find_call

MAX_SHOWN = 80


class Outcome(StrEnum):
    """What came of a request.

    ``called``: as clients need it. ``flawed``: a call, with a fault. ``written``: a call, as text. ``answered``: no
    call. ``cut``: it ended at a limit before a call. ``refused``: the endpoint says no. ``failed``: no answer came.
    """

    CALLED = "called"
    FLAWED = "flawed"
    WRITTEN = "written"
    ANSWERED = "answered"
    CUT = "cut"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back: a whole body, or as much of it as came before the ``problem``."""

    status: int = 0
    body: bytes = b""
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The outcome in one word and in several; ``text``: what the refusal says; ``notation``: that of a call as text;
    ``broken_off``: there was no end to it."""

    outcome: Outcome
    words: str
    text: str = ""
    notation: str | None = None
    broken_off: bool = False


@dataclass(slots=True, kw_only=True)
class _Call:
    """One call, put together; ``faults`` is what a client would stumble over."""

    id: str | None = None
    name: str | None = None
    arguments: str | None = None
    faults: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Message:
    """A reply in one shape, whole or streamed."""

    calls: list[_Call] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    finish: str | None = None
    old_call: bool = False
    error: str | None = None


def read_prompt_tokens(reply: Reply) -> int | None:
    """How many tokens the prompt had; None where that is not told, or can't be so."""
    usage = _dict(_json(reply.body)).get("usage") if reply.problem is None and reply.status == 200 else None
    count = _dict(usage).get("prompt_tokens")
    return count if type(count) is int and count > 0 else None


def read_plain(reply: Reply, tool: str, *, forced: bool) -> Said:
    """What a whole reply of status 200 holds."""
    if reply.problem is not None:
        return Said(outcome=Outcome.FAILED, words=reply.problem)
    found = _dict(_json(reply.body))
    choice = _dict(_first(found.get("choices")))
    message = choice.get("message")
    if not isinstance(message, dict):
        error = _error(found)
        words = f"200 with an error: {error}" if error else "200 with something that is no chat completion"
        return Said(outcome=Outcome.FAILED, words=words)
    heard = _Message(finish=_text(choice.get("finish_reason")))
    _hear_text(heard, message)
    heard.calls = [_whole_call(each) for each in _list(message.get("tool_calls"))]
    return _judge(heard, tool, forced=forced)


def read_streamed(reply: Reply, tool: str, *, forced: bool) -> Said:
    """What the events of a streamed reply of status 200 come to."""
    if reply.problem is not None:
        return Said(outcome=Outcome.FAILED, words=reply.problem)
    heard = _Message()
    calls: dict[object, _Call] = {}
    counted, done = 0, False
    for data in _events(reply.body):
        if data == b"[DONE]":
            done = True
            break
        event = _dict(_json(data))
        heard.error = heard.error or _error(event)
        choice = _dict(_first(event.get("choices")))
        delta = choice.get("delta")
        counted += isinstance(delta, dict)
        _hear_text(heard, _dict(delta))
        for each in _list(_dict(delta).get("tool_calls")):
            _add_piece(calls, _dict(each))
        heard.finish = _text(choice.get("finish_reason")) or heard.finish
    heard.calls = list(calls.values())
    if heard.error:
        return Said(outcome=Outcome.FAILED, words=f"the stream ended in an error: {heard.error}")
    if not counted:
        return Said(outcome=Outcome.FAILED, words="200 with something that is no stream of a chat completion")
    if heard.finish is None and not done:
        return Said(outcome=Outcome.FAILED, words="the stream broke off before its end", broken_off=True)
    return _judge(heard, tool, forced=forced)


def _events(body: bytes) -> Iterator[bytes]:
    reader = EventReader()
    for event in (*reader.feed(body), *reader.end()):
        if data := data_of(event).strip():
            yield data


def _hear_text(heard: _Message, said: dict[str, Any]) -> None:
    heard.content += _words(said.get("content"))
    heard.reasoning += _words(said.get("reasoning_content")) or _words(said.get("reasoning"))
    heard.old_call = heard.old_call or isinstance(said.get("function_call"), dict)


def _whole_call(told: object) -> _Call:
    given = _dict(told)
    function = _dict(given.get("function"))
    call = _Call(id=_text(given.get("id")), name=_text(function.get("name")))
    _take_arguments(call, function)
    return call


def _take_arguments(call: _Call, function: dict[str, Any]) -> None:
    piece = function.get("arguments")
    if isinstance(piece, str):
        call.arguments = (call.arguments or "") + piece
    elif piece is not None:
        call.faults.append(f"its arguments are no text but {type(piece).__name__}")


def _add_piece(calls: dict[object, _Call], piece: dict[str, Any]) -> None:
    index = piece.get("index")
    known = type(index) is int
    # Without an index it is at best another piece of the last one.
    key = index if known else next(reversed(calls), None)
    call = calls.setdefault(key, _Call())
    if not known and "a piece of it has no index" not in call.faults:
        call.faults.append("a piece of it has no index")
    function = _dict(piece.get("function"))
    call.id = call.id or _text(piece.get("id"))
    call.name = call.name or _text(function.get("name"))
    _take_arguments(call, function)


def _judge(heard: _Message, tool: str, *, forced: bool) -> Said:
    if heard.calls:
        return _judge_call(heard, tool, forced=forced)
    if heard.old_call:
        return Said(outcome=Outcome.FLAWED, words="a call as function_call, which clients no longer read")
    notation = find_call(heard.content, tool)
    if notation is not None:
        words = f"a call as text, {notation}: {_quote(heard.content)}"
        return Said(outcome=Outcome.WRITTEN, words=words, notation=notation)
    # A model thinks about a call before it makes one: what it thought counts where nothing follows.
    notation = None if heard.content.strip() else find_call(heard.reasoning, tool)
    if notation is not None:
        words = f"a call in its reasoning, {notation}: {_quote(heard.reasoning)}"
        return Said(outcome=Outcome.WRITTEN, words=words, notation=f"{notation}, in its reasoning")
    if heard.finish == "length":
        return Said(outcome=Outcome.CUT, words=f"cut off before a call: {_quote(heard.content or heard.reasoning)}")
    return Said(outcome=Outcome.ANSWERED, words=f"no call: {_quote(heard.content)}")


def _judge_call(heard: _Message, tool: str, *, forced: bool) -> Said:
    call = heard.calls[0]
    faults = [*call.faults]
    if not call.id:
        faults.append("it has no id")
    if call.name != tool:
        faults.append(f"it names {_quote(call.name)}" if call.name else "it names no function")
    if not isinstance(_json((call.arguments or "").encode("utf-8", "replace")), dict) and not call.faults:
        faults.append(f"its arguments are no JSON object: {_quote(call.arguments or '')}")
    # A forced call ends with "stop" at OpenAI too.
    if heard.finish != "tool_calls" and not (forced and heard.finish == "stop"):
        faults.append(f"finish_reason is {_clip(heard.finish) if heard.finish else 'missing'}, not tool_calls")
    if faults:
        return Said(outcome=Outcome.FLAWED, words=f"a faulty call: {'; '.join(faults)}")
    return Said(outcome=Outcome.CALLED, words=f"a call: {tool}({_clip(call.arguments or '')})")


# odd shapes


def _json(data: bytes) -> object:
    try:
        found: object = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _words(value: object) -> str:
    """A text, or those of a list of parts."""
    if isinstance(value, list):
        return "".join(_text(_dict(part).get("text")) or "" for part in value)
    return value if isinstance(value, str) else ""


def _error(found: dict[str, Any]) -> str | None:
    error = found.get("error")
    if not error:
        return None
    message = _dict(error).get("message") or error
    return _clip(message) if isinstance(message, str) else "one without a message"


def _clip(text: str) -> str:
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}…"


def _quote(text: str | None) -> str:
    return f'"{_clip(text)}"' if text and text.strip() else "nothing"
