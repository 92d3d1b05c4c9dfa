"""One request while it runs: what is known of it, filled in as it goes, and what its log line is made of."""

from __future__ import annotations

from enum import StrEnum

from llmgw.dialects.openai import Usage
from llmgw.door.http1 import RequestHead


class Outcome(StrEnum):
    """How a request ended."""

    DONE = "done"
    REFUSED = "refused"
    ENGINE_FAILED = "engine_failed"
    TIMED_OUT = "timed_out"
    CLIENT_LEFT = "client_left"
    CLIENT_STALLED = "client_stalled"
    CRASHED = "crashed"
    STOPPED = "stopped"


class Request:
    """The facts of one request; times are seconds of the reactor's clock. ``status`` is 0 while nothing was sent."""

    __slots__ = (
        "began",
        "body",
        "ended",
        "first_byte_at",
        "head",
        "id",
        "model",
        "opened",
        "outcome",
        "path",
        "peer",
        "problem",
        "replica",
        "status",
        "usage",
    )

    def __init__(self, id: str, head: RequestHead, peer: str, began: float) -> None:
        self.id = id
        self.head = head
        self.path = head.path
        self.peer = peer
        self.began = began
        self.ended = began
        # the whole of it, from when it is read until an engine has answered
        self.body: bytes | None = None
        self.status = 0
        # the client has a 200 and an open event stream: whatever comes now is an event
        self.opened = False
        self.first_byte_at: float | None = None
        self.model: str | None = None
        self.replica: str | None = None
        self.usage: Usage | None = None
        self.outcome: Outcome | None = None
        self.problem: str | None = None
