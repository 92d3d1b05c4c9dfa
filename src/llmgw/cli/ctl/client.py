"""Asks the operator port, and says in plain words when it does not answer or says no."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from llmgw.cli.ctl.address import Address
from llmgw.errors import ConfigError, LlmgwError, Problem, UsageError

TIMEOUT_SECONDS = 30.0
MAX_BODY_BYTES = 1024 * 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024
# Of a name that can't be one.
MAX_SHOWN = 200


class NoAnswer(LlmgwError):  # noqa: N818 - named by what happens next, like all of them
    """Nothing answers there now; it may later."""


class ToldNo(LlmgwError):  # noqa: N818 - named by what happened, like all of them
    """The server says no; ``code`` is for programs."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class _Impatient(socket.socket):
    """A connection with one limit for all that is read: a server that drips would begin it anew with each byte."""

    until = 0.0

    @classmethod
    def connect_to(cls, host: str, port: int, *, until: float) -> _Impatient:
        made = cls(fileno=socket.create_connection((host, port), timeout=_left(until)).detach())
        made.until = until
        made.settimeout(_left(until))
        return made

    def recv_into(self, *args: Any) -> int:
        self.settimeout(_left(self.until))
        return super().recv_into(*args)


def _left(until: float) -> float:
    # A limit of 0 would mean not to wait at all, which is another error.
    return max(until - time.monotonic(), 0.001)


class Operator:
    """The operator port at an address."""

    def __init__(self, address: Address, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.address = address
        self._timeout_seconds = timeout_seconds

    def ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> bytes:
        """The answer, JSON. NoAnswer; ConfigError or UsageError where what was sent is wrong; LlmgwError for any other
        no."""
        text = json.dumps(body, ensure_ascii=False).encode() if body is not None else None
        if text is not None and len(text) > MAX_BODY_BYTES:
            # The port would hang up in the middle of it, which looks as if nobody were there.
            raise UsageError(f"that is more than the {MAX_BODY_BYTES // 1024} KiB that the operator port takes")
        status, kind, answer = self._exchange(method, path, text)
        if kind != "application/json":
            raise self.stranger(f"{status} {kind or 'without a type'}")
        if status >= 300:
            raise self._told_no(answer)
        return answer

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, str, bytes]:
        import http.client  # brings ssl along, which --help can do without

        at = self.address
        connection = http.client.HTTPConnection(at.host, at.port)
        until = time.monotonic() + self._timeout_seconds
        try:
            connection.sock = _Impatient.connect_to(at.host, at.port, until=until)
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            answer = response.read(MAX_ANSWER_BYTES + 1)
        except TimeoutError:
            raise NoAnswer(f"{at.url} ({at.source}) did not answer within {self._timeout_seconds:g} s") from None
        except UnicodeError:
            raise UsageError(f"{at.url} ({at.source}): {at.host!r} can't be the name of a machine") from None
        except OSError as error:
            raise NoAnswer(
                f"nothing answers at {at.url} ({at.source}): {error.strerror or error}. "
                "Start it there with `llmgw server`, or say where it is with --server URL or LLMGW_ADMIN"
            ) from None
        except http.client.HTTPException:
            raise self.stranger("no HTTP") from None
        finally:
            connection.close()
        if len(answer) > MAX_ANSWER_BYTES:
            raise self.stranger("more than 64 MiB")
        if response.length:
            raise NoAnswer(f"{at.url} ({at.source}) hung up in the middle of its answer")
        return response.status, response.headers.get_content_type() if response.headers else "", answer

    def _told_no(self, answer: bytes) -> LlmgwError:
        try:
            error = json.loads(answer)["error"]
            message, code = str(error["message"]), str(error["code"])
            problems = [_problem(each) for each in error.get("problems", ())]
        except (ValueError, KeyError, TypeError, AttributeError):
            return self.stranger("an error that is not llmgw's")
        if problems:
            return ConfigError(problems)
        # What was sent is wrong, and no server would take it.
        return UsageError(message) if code.startswith("invalid_") else ToldNo(message, code)

    def stranger(self, got: str) -> LlmgwError:
        """What to say of an answer that no llmgw gives; ``got`` says what it is."""
        return LlmgwError(
            f"what answers at {self.address.url} ({self.address.source}) is no operator port of llmgw ({got}): "
            "another program has that port; say where the server is with --server URL or LLMGW_ADMIN"
        )


def as_name(name: str) -> str:
    """A name as it is sent in a body. UsageError where nothing can be called so, before anybody is asked."""
    if not name.strip():
        raise UsageError(f"{name!r} can't be a name")
    return name


def as_word(name: str) -> str:
    """A name as one segment of a path, or the value of a query. UsageError where it would be another path."""
    if not name.strip() or name.startswith("/") or name in {".", ".."}:
        raise UsageError(f"{name!r} can't be a name")
    return quote(name, safe="", errors="replace")


def as_node(name: str) -> str:
    """The same of a node's name. UsageError where no node can have it."""
    from llmgw.config.addresses import wrong_node  # brings YAML along, which --help can do without

    if (why := wrong_node(name)) is not None:
        raise UsageError(f"node {name[:MAX_SHOWN]!r} {why.removeprefix(f'{name!r} ')}")
    return as_word(name)


def _problem(told: Mapping[str, Any]) -> Problem:
    return Problem(key=str(told.get("key", "")), message=str(told["message"]), where=str(told.get("where", "")))
