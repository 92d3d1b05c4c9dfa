"""One question to a running llmgw, its answer written as it comes: a client like any other."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from llmgw.core.sse import EventReader, data_of
from llmgw.errors import LlmgwError

# A prompt may be read for minutes on a small machine before the first word comes.
TIMEOUT = httpx.Timeout(30.0, read=600.0)
# A model as small as the demo's does not always come to an end by itself.
MAX_TOKENS = 512


async def ask(base_url: str, model: str, text: str, write: Callable[[str], Awaitable[None]]) -> None:
    """Write the answer piece by piece, and a line feed at its end. LlmgwError when it is refused or breaks off."""
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "stream": True}
    url = f"{base_url.rstrip('/')}/v1/chat/completions"
    # No proxy of the environment stands between this program and itself.
    async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client:
        try:
            async with client.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    raise LlmgwError(f"{model} answered {response.status_code}: {_refusal(await response.aread())}")
                await _write_answer(response, model, write)
        except httpx.TransportError as error:
            raise LlmgwError(f"the answer of {model} broke off: {str(error) or type(error).__name__}") from None
    await write("\n")


async def _write_answer(response: httpx.Response, model: str, write: Callable[[str], Awaitable[None]]) -> None:
    reader = EventReader()
    done = False
    failure: LlmgwError | None = None
    try:
        # Read to the end whatever is said: httpx's iterators don't clean up when they are left half way.
        async for chunk in response.aiter_raw():
            for data in map(data_of, reader.feed(chunk)):
                if done or failure:
                    break
                done = data == b"[DONE]"
                try:
                    piece = "" if done else _piece(data, model)
                except LlmgwError as error:
                    failure = error
                    break
                if piece:
                    await write(piece)
    except httpx.TransportError:
        # After an error event the connection is cut: the event says more than the cut does.
        if not (done or failure):
            raise
    if failure:
        raise failure
    if not done:
        raise LlmgwError(f"the answer of {model} broke off before its end")


def _piece(data: bytes, model: str) -> str:
    """The words in one event; empty when it has none."""
    if not data:
        return ""
    try:
        event: Any = json.loads(data)
        if message := _error_message(event):
            raise LlmgwError(f"{model} gave up: {message}")
        choices = event.get("choices") or [{}]
        return str(choices[0].get("delta", {}).get("content") or "")
    except (ValueError, AttributeError, LookupError, TypeError):
        raise LlmgwError(f"{model} sent an event that can't be read: {data[:200]!r}") from None


def _refusal(body: bytes) -> str:
    try:
        message = _error_message(json.loads(body))
    except ValueError:
        message = None
    return message or body[:500].decode(errors="replace").strip() or "no reason given"


def _error_message(event: Any) -> str | None:
    if not isinstance(event, dict) or not event.get("error"):
        return None
    error = event["error"]
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
