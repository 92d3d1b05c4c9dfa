"""What an exchange may ask for, and what it gets back. The mirror of drive.py, which carries it out.

Structs of msgspec rather than dataclasses: several are made per request, and a frozen dataclass takes a microsecond.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from llmgw.core.replica import ShardAddress
from llmgw.dialects.refusal import Refusal
from llmgw.door.http1 import ResponseHead
from llmgw.door.relay import Filter
from llmgw.reactor.transports import Address

Headers = tuple[tuple[bytes, bytes], ...]
# Where a request goes: what can be dialled, or a shard behind its node's trunk.
Destination = Address | ShardAddress


class ReadBody(msgspec.Struct, frozen=True):
    """Resume with the request's whole body, or with the Refusal that reading it ended in."""


class Park(msgspec.Struct, frozen=True):
    """Resume with what ``call(*args)`` returns, run as a task of its own; it is cancelled when the client leaves."""

    call: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...] = ()


class Forward(msgspec.Struct, frozen=True):
    """Send ``request`` to ``address`` and resume with the answer's head, a Failure, or SILENT.

    ``head_seconds``: what the answer's head may take (None: no limit of its own).
    ``silent_seconds``: after this long without a head resume with SILENT; the request goes on, and ``Await`` waits for
    the rest of it.
    """

    address: Destination
    request: bytes
    bodyless: bool = False
    head_seconds: float | None = None
    silent_seconds: float | None = None


class Await(msgspec.Struct, frozen=True):
    """After SILENT: open the stream to the client, keep it alive with comments, resume as Forward does."""


class Silent(msgspec.Struct, frozen=True):
    """The engine has not answered yet."""


SILENT = Silent()


class Failure(msgspec.Struct, frozen=True):
    """A request to an engine that came to nothing: ``reason`` in words.

    ``sent`` False means that the engine can't have seen it; ``timed_out`` tells a silent engine from a broken one.
    ``busy``: this machine had nothing left to reach it with, and no engine can help that. ``unreachable``: its node
    can't be reached now, which says nothing of the engine.
    """

    reason: str
    sent: bool
    timed_out: bool = False
    busy: bool = False
    unreachable: bool = False


class Collect(msgspec.Struct, frozen=True):
    """Resume with up to ``limit`` bytes of the answer's body; what is more is dropped."""

    limit: int


class Relay(msgspec.Struct, frozen=True):
    """Move the answer's body to the client and resume with Relayed when it is over, however it ended.

    ``events``: it is an event stream, whose events leave whole, which is kept alive with comments, and which ends in an
    error event when it breaks.
    """

    head: ResponseHead
    headers: Headers = ()
    events: bool = False
    filters: tuple[Filter, ...] = ()


class Relayed(msgspec.Struct, frozen=True):
    """How a relay ended: ``problem`` None when it was complete. ``last`` holds the piece of the body with the usage."""

    problem: str | None
    last: bytes = b""
    timed_out: bool = False


class Reply(msgspec.Struct, frozen=True):
    """Send a whole answer. Resumes at once."""

    status: int
    body: bytes = b""
    content_type: bytes = b"application/json"
    headers: Headers = ()


class Refuse(msgspec.Struct, frozen=True):
    """Say no in the client's family: as a status while that is open, as an event in a stream that was opened."""

    refusal: Refusal
    headers: Headers = ()


Step = ReadBody | Park | Forward | Await | Collect | Relay | Reply | Refuse
