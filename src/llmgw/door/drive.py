"""Carries out what an exchange asks for: a Run per request, the client's body on one side, an Answer on the other.

The generator is resumed from the reactor's run-queue only, never from inside a callback that it may be waiting for.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import trio

from llmgw.dialects.openai import error_event
from llmgw.dialects.refusal import Refusal
from llmgw.door.answer import LATER, Answer
from llmgw.door.exchange import exchange
from llmgw.door.http1 import END, Problem, RequestEvent, RequestHead
from llmgw.door.request import Outcome, Request
from llmgw.door.steps import Await, Collect, Forward, Park, ReadBody, Refuse, Relay, Reply

if TYPE_CHECKING:
    from llmgw.door.client import Client
    from llmgw.door.listener import Door

log = logging.getLogger("llmgw.door")

BUDGET_WAIT_SECONDS = 5.0
# A body that comes two bytes at a time must not cost forty for each, which no budget counts.
SMALL_PIECE_BYTES = 1024
JOINED_BYTES = 64 * 1024


class Run:
    """One exchange in progress."""

    __slots__ = (
        "_answer",
        "_body",
        "_body_size",
        "_scope",
        "_steps",
        "body_ended",
        "client",
        "door",
        "over",
        "request",
        "wants_body",
    )

    def __init__(self, door: Door, client: Client, head: RequestHead) -> None:
        self.door = door
        self.client = client
        self.request = Request(door.next_id(), head, client.peer, door.reactor.now)
        self._steps = exchange(self.request, door.gateway, door.origins, door.timeouts)
        self.over = self.wants_body = False
        self.body_ended = not (head.chunked or head.content_length)
        self._body: list[bytes] = []
        self._body_size = 0
        self._scope: trio.CancelScope | None = None
        self._answer: Answer | None = None

    # -- the generator

    def resume(self, value: Any) -> None:
        """Go on with the result of the last step, as far as results are at hand."""
        if self.over:
            return
        send, carry_out = self._steps.send, _CARRY_OUT
        try:
            while True:
                step = send(value)
                value = carry_out[type(step)](self, step)
                if value is LATER or self.over:
                    return
        except StopIteration:
            self._end()
        self.client.exchange_over()

    def later(self, value: Any) -> None:
        """Resume with ``value`` by the run-queue."""
        self.door.reactor.call_soon(self, self.resume, value)

    def _end(self) -> None:
        self.over = True
        if self._answer is not None:
            self._answer.drop()
            # they hold each other: left so, each request would wait for the garbage collector
            self._answer = None
        if self._scope is not None:
            self._scope.cancel()
            self._scope = None
        if self._body_size:
            self.drop_body()
        self.request.ended = self.door.reactor.now

    def close(self, outcome: Outcome | None = None) -> None:
        """The client is gone (or the program ends): stop everything that it had caused."""
        if self.over:
            return
        self.request.outcome = outcome or self.request.outcome
        self._end()
        try:
            self._steps.close()
        except Exception:
            # whoever closes has a connection to end, which must not stay because the last word on it failed
            log.exception("request %s: its last word failed", self.request.id)

    def on_crash(self, error: Exception) -> None:
        """Something on this request's road raised: a 500 while that is possible, else the connection is cut."""
        client = self.client
        self.close(Outcome.CRASHED)
        if client.replied:
            client.exchange_over()
        elif client.replying:
            client.cut()
            client.transport_over()
        else:
            message = f"llmgw failed on this request; its log has the reason under {self.request.id}."
            client.refuse(Refusal(status=500, code="internal_error", message=message), self.request)
            client.exchange_over()

    def stop(self) -> None:
        """The program ends and waits for this no longer."""
        message = "The server is stopping."
        refusal = Refusal(status=503, code="stopping", message=message, retry_after=5)
        client, answer = self.client, self._answer
        if not client.replying:
            client.refuse(refusal, self.request)
        elif answer is not None and answer.at_boundary:
            client.finish(error_event(refusal), close=True)
        else:
            client.cut()
        # (after it, so that the log has the status that the client got)
        self.close(Outcome.STOPPED)
        client.exchange_over()

    # -- the request's body

    def drop_body(self) -> None:
        """No engine will be asked with it again: a stream, or a line of the log that waits, must not hold it."""
        self.door.budget.give(self._body_size)
        self._body_size = 0
        self._body = []
        self.request.body = None

    def give_body(self, body: bytes) -> bool:
        """The whole body, which came with the head. False: the exchange has to ask for it, and is refused it."""
        size = len(body)
        if b"expect" in self.request.head.headers or size > self.door.limits.max_body:
            return False
        if not self.door.budget.take(size):
            return False
        self._body_size = size
        self.body_ended = True
        self.request.body = body
        return True

    def _read_body(self, step: ReadBody) -> Any:
        if self.body_ended:
            return b""
        head = self.request.head
        expect = head.headers.get(b"expect")
        if expect is not None and expect.strip().lower() != b"100-continue":
            return Refusal(status=417, code="expectation_failed", message="Only 'Expect: 100-continue' is understood.")
        if head.content_length is not None and head.content_length > self.door.limits.max_body:
            return self._too_large()
        self.wants_body = True
        self.client.read_body(expected=expect is not None and head.minor == 1)
        return LATER

    def _too_large(self) -> Refusal:
        limit = self.door.limits.max_body
        message = f"The request's body is larger than {limit} bytes (max_body)."
        return Refusal(status=413, code="request_too_large", message=message)

    def take(self, event: RequestEvent) -> bool:
        """A piece of the body, from the client. False: there is no room for it now, keep it and stop reading."""
        if event is END:
            self.body_ended = True
            body = self._body
            self._body_read(body[0] if len(body) == 1 else b"".join(body))
        elif isinstance(event, bytes):
            if self._body_size + len(event) > self.door.limits.max_body:
                self._body_read(self._too_large())
            elif not self.door.budget.take(len(event)):
                return False
            else:
                self._add(event)
                self._body_size += len(event)
        elif isinstance(event, Problem):
            self._body_read(Refusal(status=event.status, code=event.code, message=event.message))
        return True

    def _add(self, piece: bytes) -> None:
        body = self._body
        if body and len(piece) < SMALL_PIECE_BYTES and len(body[-1]) < JOINED_BYTES:
            body[-1] += piece
        else:
            body.append(piece)

    def _body_read(self, result: bytes | Refusal) -> None:
        self.wants_body = False
        self._body = []
        self.client.body_read()
        self.resume(result)

    def no_room(self) -> None:
        """The wait for room for the body was too long."""
        message = "The bodies of the requests in progress fill the memory set aside for them (bodies_total)."
        self._body_read(Refusal(status=503, code="server_busy", message=message, retry_after=2))

    def body_late(self) -> None:
        """The client stopped sending its body."""
        message = f"The request's body stopped coming for {self.door.timeouts.body:g} s."
        self._body_read(Refusal(status=408, code="request_timeout", message=message))

    # -- parking

    def _park(self, step: Park) -> Any:
        scope = self._scope = trio.CancelScope()
        self.door.spawn(self._parked, scope, step.call, step.args)
        return LATER

    async def _parked(
        self, scope: trio.CancelScope, call: Callable[..., Awaitable[Any]], args: tuple[Any, ...]
    ) -> None:
        value: Any = None
        with scope:
            try:
                value = await call(*args)
            except Exception as error:
                log.error("request %s: what it waited for failed", self.request.id, exc_info=error)
                self._scope = None
                if not self.over:
                    # from here, for an error that outlives this clause and the frame that it names keep each other
                    self.door.reactor.call_soon(self, self.on_crash, error)
                return
        if self.over or scope.cancelled_caught:
            return
        self._scope = None
        self.later(value)

    # -- the engine

    def _forward(self, step: Forward) -> Any:
        if self._answer is not None:
            self._answer.drop()
        answer = self._answer = Answer(self, step)
        return answer.begin(step)

    @property
    def answer(self) -> Answer:
        """What came of the last Forward."""
        if self._answer is None:
            raise RuntimeError("an exchange asked for more of an answer before it asked an engine")
        return self._answer

    def look_at_clock(self) -> None:
        """The time asked for has come (or another one)."""
        if self._answer is not None and not self.over:
            self._answer.look_at_clock()

    def let_go(self, outcome: Outcome) -> None:
        """The client takes no more of a reply that is complete: if some of it still waits, it ends as ``outcome``."""
        if self._answer is not None:
            self._answer.let_go(outcome)

    def drained(self) -> None:
        """The client has taken all that was sent."""
        if self._answer is not None:
            self._answer.drained()

    # -- short answers

    def _reply(self, step: Reply) -> Any:
        headers = step.headers
        if step.body:
            headers += ((b"content-type", step.content_type),)
            self.request.first_byte_at = self.door.reactor.now
        self.client.reply(self.request, step.status, headers, step.body)

    def _refuse(self, step: Refuse) -> Any:
        refusal = step.refusal
        self.request.problem = self.request.problem or refusal.message
        if self.request.opened:
            self.client.finish(error_event(refusal), close=True)
        else:
            self.client.refuse(refusal, self.request, step.headers)


# By the exact type: a chain of isinstance costs more than many a step.
_CARRY_OUT: dict[type, Callable[[Run, Any], Any]] = {
    ReadBody: Run._read_body,
    Park: Run._park,
    Forward: Run._forward,
    Await: lambda run, step: run.answer.wait(),
    Collect: lambda run, step: run.answer.collect(step),
    Relay: lambda run, step: run.answer.relay(step),
    Reply: Run._reply,
    Refuse: Run._refuse,
}
