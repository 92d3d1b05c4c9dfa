"""Asks an OpenAI-compatible endpoint wherever it is, whatever stands behind it, with a key that is never shown."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx
import trio

from llmgw.config.ordinary import read_with_stat
from llmgw.dialects.openai import read_engine_error
from llmgw.dialects.toolcheck import CHAT_PATH, Findings, Request, advance, ask_about_tools
from llmgw.dialects.toolreplies import Reply
from llmgw.errors import LlmgwError, UsageError
from llmgw.units import printable

KEY_VARIABLE = "OPENAI_API_KEY"
MAX_KEY_BYTES = 4096
MAX_REPLY_BYTES = 4 * 1024 * 1024
# It is no more than a look at a table.
LIST_SECONDS = 30.0
SECRET_LENGTH = 6
_READ_BY_OTHERS = 0o004
_MODELS_PATH = "/v1/models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where it is, up to ``/v1``, and the key for it."""

    url: str
    key: str | None = field(default=None, repr=False)

    def hide(self, text: str) -> str:
        """The text without the key, which a server may say back."""
        # A short one is a word that stands for none, as "x" or "none", and stands in other words too.
        return text.replace(self.key, "…") if self.key and len(self.key) >= SECRET_LENGTH else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model as ``/v1/models`` has it. ``root`` is what it was loaded from, where that is told."""

    name: str
    owned_by: str | None = None
    root: str | None = None


def read_endpoint(url: str, key_file: Path | None, *, environ: Mapping[str, str]) -> Endpoint:
    """The endpoint that this URL means, with or without ``/v1``. UsageError for what is none, or a key that is none."""
    try:
        parts = urlsplit(url.strip())
        fits = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise UsageError("--endpoint: that is no URL; write it as http://127.0.0.1:8000/v1") from None
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"--endpoint: put no password into the URL: {KEY_VARIABLE} or --key-file has the key")
    if not fits or parts.query or parts.fragment or not url.strip().isprintable() or " " in url.strip():
        raise UsageError(f"--endpoint: {url!r} is no URL of an endpoint; write it as http://127.0.0.1:8000/v1")
    path = parts.path.rstrip("/").removesuffix(CHAT_PATH.removeprefix("/v1")).removesuffix("/v1")
    return Endpoint(url=f"{parts.scheme}://{parts.netloc}{path}", key=_read_key(key_file, environ))


def _read_key(file: Path | None, environ: Mapping[str, str]) -> str | None:
    source = KEY_VARIABLE if file is None else f"--key-file: {file}"
    if file is None:
        text = environ.get(KEY_VARIABLE, "")
        if not text.strip():
            return None
    else:
        text = _read_file(file)
    key = text.strip()
    # (nothing of it is shown: what is wrong with it may be all that is)
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"{source} holds no key: it is one line of letters, digits and signs")
    return key


def _read_file(file: Path) -> str:
    try:
        data, facts = read_with_stat(file, MAX_KEY_BYTES)
    except OSError as error:
        raise UsageError(f"--key-file: {file} can't be read: {error.strerror}") from None
    if facts.st_mode & _READ_BY_OTHERS:
        raise UsageError(f"--key-file: {file} can be read by everybody on this machine: chmod o-rwx {file}")
    return data.decode("utf-8", "replace").strip().partition("\n")[0]


async def ask_endpoint(
    endpoint: Endpoint, name: str | None, *, exchange_seconds: float, check_seconds: float
) -> tuple[Served, Findings]:
    """Ask the model of that name, or the only one, about its tools. LlmgwError when it can't be told which that is."""
    until = trio.current_time() + check_seconds
    async with Client(endpoint) as client:
        served = await client.find_model(name, seconds=min(exchange_seconds, LIST_SECONDS))
        steps = ask_about_tools(served.name)
        step = advance(steps, None)
        while isinstance(step, Request):
            left = until - trio.current_time()
            if left > 0:
                reply = await client.ask(step.body, seconds=min(left, exchange_seconds))
            else:
                reply = Reply(problem=f"not asked: the check has taken its {check_seconds:g} s")
            step = advance(steps, reply)
        return served, step


class Client:
    """Speaks to one endpoint; use it as an async context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        headers = {"accept-encoding": "identity"}
        if endpoint.key:
            headers["authorization"] = f"Bearer {endpoint.key}"
        # The deadlines are the callers': a server that drips would begin one of each read anew with every byte.
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=None,  # noqa: S113
            trust_env=not _is_here(urlsplit(endpoint.url)),
        )

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *why: Any) -> None:
        await self._http.__aexit__(*why)

    async def ask(self, body: bytes, *, seconds: float) -> Reply:
        """POST to the chat endpoint; the whole reply, or what came of it instead."""
        return await self._exchange("POST", CHAT_PATH, body, seconds)

    async def find_model(self, name: str | None, *, seconds: float) -> Served:
        """The model of that name, or the only one. LlmgwError when neither can be told."""
        reply = await self._exchange("GET", _MODELS_PATH, None, seconds)
        found = _read_models(reply)
        if name is not None:
            # Whoever names it needs no list: that only tells whose engine it is.
            return next((each for each in found or () if each.name == name), Served(name=name))
        if found is None:
            url = self.endpoint.url + _MODELS_PATH
            raise LlmgwError(self.endpoint.hide(f"{url} does not tell its models ({_why_none(reply)})"))
        if not found:
            raise LlmgwError(f"{self.endpoint.url} has no models: load one there, or name it with --model")
        if len(found) != 1:
            names = ", ".join(printable(each.name) for each in found)
            raise UsageError(f"{self.endpoint.url} has {len(found)} models: say which with --model; there is {names}")
        return found[0]

    async def _exchange(self, method: str, path: str, body: bytes | None, seconds: float) -> Reply:
        headers = {"content-type": "application/json"} if body is not None else {}
        status, data, problem = 0, bytearray(), None
        with trio.move_on_after(seconds) as limit:
            try:
                async with self._http.stream(
                    method, self.endpoint.url + path, content=body, headers=headers
                ) as response:
                    status = response.status_code
                    problem = _find_problem(response)
                    async for piece in response.aiter_raw():
                        data += piece
                        if problem is None and len(data) > MAX_REPLY_BYTES:
                            problem = f"the answer is longer than {MAX_REPLY_BYTES // 1024**2} MiB"
                        if problem is not None:
                            # httpx's iterators are not closed when they are left half way: this ends them from inside
                            limit.cancel()
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                problem = problem or f"no answer: {str(error) or type(error).__name__}"
        if limit.cancelled_caught and problem is None:
            problem = f"the answer {'came to no end' if status else 'did not begin'} within {seconds:g} s"
        if problem is not None:
            return Reply(status=status, problem=self.endpoint.hide(problem))
        return Reply(
            status=status,
            body=self.endpoint.hide(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape"),
        )


def _find_problem(response: httpx.Response) -> str | None:
    """What makes an answer one of no use, whatever its body is."""
    if 300 <= response.status_code < 400:
        # Nobody is followed with a key.
        at = response.headers.get("location", "nowhere")
        return f"{response.status_code}: it sends on to {at}: give that URL"
    coding = response.headers.get("content-encoding", "identity")
    return None if coding == "identity" else f"the answer is coded as {coding!r}, which nobody asked for"


def _is_here(parts: SplitResult) -> bool:
    """Loopback: a proxy that the environment names would not find it."""
    host = parts.hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _why_none(reply: Reply) -> str:
    # (a problem tells the status itself, where that is what is wrong)
    if reply.problem is not None:
        return reply.problem
    if reply.status == 200:
        return "200: that is no list of models"
    return f"{reply.status}: {read_engine_error(reply.status, reply.body).message}"


def _read_models(reply: Reply) -> list[Served] | None:
    """None where it is no list of models."""
    if reply.problem is not None or reply.status != 200:
        return None
    try:
        rows = json.loads(reply.body)["data"]
        return [
            Served(name=row["id"], owned_by=_text(row.get("owned_by")), root=_text(row.get("root")))
            for row in rows
            if isinstance(row["id"], str) and row["id"]
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
