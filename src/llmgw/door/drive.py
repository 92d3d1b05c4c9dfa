"""Carries out what an exchange asks for: one Run per request, between one client and, for a while, one upstream.

The generator is resumed from the reactor's run-queue only, never from inside a callback that it may be waiting for.
While bytes are relayed it sleeps; they pass through ``moved`` alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import trio

from llmgw.dialects.openai import error_event
from llmgw.dialects.refusal import Refusal
from llmgw.door.exchange import exchange
from llmgw.door.http1 import END, Problem, RequestEvent, RequestHead, ResponseHead
from llmgw.door.relay import EventRelay, WholeRelay
from llmgw.door.request import Outcome, Request
from llmgw.door.steps import (
    SILENT,
    Await,
    Collect,
    Failure,
    Forward,
    Park,
    ReadBody,
    Refuse,
    Relay,
    Relayed,
    Reply,
    Silent,
)
from llmgw.door.upstream import Upstream

if TYPE_CHECKING:
    from llmgw.door.client import Client
    from llmgw.door.listener import Door

log = logging.getLogger("llmgw.door")

COMMENT = b": keep-alive\n\n"
EVENT_STREAM = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
# How much of an answer waits here while the exchange has not yet said what to do with it.
EARLY_BYTES = 256 * 1024
BUDGET_WAIT_SECONDS = 5.0
# A body that comes two bytes at a time must not cost forty for each, which no budget counts.
SMALL_PIECE_BYTES = 1024
JOINED_BYTES = 64 * 1024


class _Later:
    """A step whose result comes by ``resume``."""


LATER = _Later()


class Run:
    """One exchange in progress."""

    __slots__ = (
        "_awaiting",
        "_awaits_first",
        "_blocked",
        "_blocked_bytes",
        "_body",
        "_body_size",
        "_collect",
        "_early",
        "_early_ended",
        "_early_size",
        "_events",
        "_failure",
        "_forwarded_at",
        "_head",
        "_head_at",
        "_heard_at",
        "_scope",
        "_sent_at",
        "_silent_at",
        "_steps",
        "_upstream",
        "_whole",
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
        self._upstream: Upstream | None = None
        self._heard_at = self._sent_at = 0.0
        self._silent_at = self._head_at = self._forwarded_at = math.inf
        self._reset_answer()

    def _reset_answer(self) -> None:
        """Nothing is known of an answer: none was asked for, or another replica is asked."""
        self._head: ResponseHead | None = None
        self._failure: Failure | None = None
        # what came of the body before the exchange said what to do with it
        self._early: list[bytes] = []
        self._early_size = 0
        self._early_ended = False
        # what is done with it: one of these
        self._events: EventRelay | None = None
        self._whole: WholeRelay | None = None
        self._collect: Collect | None = None
        self._awaits_first = True
        # the exchange waits for the answer's head
        self._awaiting = False
        # the client does not read fast enough
        self._blocked = False
        self._blocked_bytes = 0

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

    def _later(self, value: Any) -> None:
        self.door.reactor.call_soon(self, self.resume, value)

    def _end(self) -> None:
        self.over = True
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None
        if self._scope is not None:
            self._scope.cancel()
            self._scope = None
        if self._body_size:
            self.door.budget.give(self._body_size)
            self._body_size = 0
            # the request waits on for its line in the log, and no budget counts what it holds there
            self.request.body = None
            self._body = []
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
            client.transport.abort()
            client.transport_over()
        else:
            message = f"llmgw failed on this request; its log has the reason under {self.request.id}."
            client.refuse(Refusal(status=500, code="internal_error", message=message), self.request)
            client.exchange_over()

    # -- the request's body

    def give_body(self, body: bytes) -> bool:
        """The whole body, which came with the head. False: the exchange has to ask for it, and is refused it."""
        size = len(body)
        if size > self.door.limits.max_body or not self.door.budget.take(size):
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
        failed: Exception | None = None
        with scope:
            try:
                value = await call(*args)
            except Exception as error:
                log.error("request %s: what it waited for failed", self.request.id, exc_info=error)
                failed = error
        if self._scope is scope:
            self._scope = None
        if self.over or scope.cancelled_caught:
            return
        if failed is not None:
            self.door.reactor.call_soon(self, self.on_crash, failed)
        else:
            self._later(value)

    # -- the engine

    def _forward(self, step: Forward) -> Any:
        now = self.door.reactor.now
        if self._forwarded_at != math.inf:
            self._reset_answer()
        self._forwarded_at = self._heard_at = self._sent_at = now
        self._head_at = now + step.head_seconds if step.head_seconds is not None else math.inf
        self._silent_at = now + step.silent_seconds if step.silent_seconds is not None else math.inf
        try:
            self._upstream = self.door.pool.ask(step.address, step.request, self, bodyless=step.bodyless)
        except OSError as error:
            return Failure(f"no connection to {step.address}: {error.strerror or error}", sent=False)
        self._awaiting = True
        at = min(self._head_at, self._silent_at)
        if at != math.inf:
            self.client.deadline.set(at)
        return LATER

    def _await(self, step: Await) -> Any:
        self._open()
        answer = self._head or self._failure
        if answer is not None:
            return answer
        self._awaiting = True
        self._arm()
        return LATER

    def _tell(self, answer: ResponseHead | Failure | Silent) -> None:
        """Resume the exchange with it, unless it has not come round to waiting: then ``_await`` looks."""
        if self._awaiting:
            self._awaiting = False
            self._later(answer)

    def _open(self) -> None:
        """Open the stream: from here on everything is an event or a comment."""
        self.request.opened = True
        self.client.start(self.request, 200, EVENT_STREAM, None)
        self._send(COMMENT)

    def answered(self, head: ResponseHead) -> None:
        self._head = head
        self._heard_at = self.door.reactor.now
        self._head_at = self._silent_at = math.inf
        if head.body is not None:
            self._upstream = None
            self._early = [head.body]
            self._early_ended = True
        self._tell(head)

    def rebound(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def failed(self, failure: Failure) -> None:
        self._upstream = None
        if self._head is None:
            self._silent_at = self._head_at = math.inf
            self._failure = failure
            self._tell(failure)
        elif self._events is None and self._whole is None and self._collect is None:
            self._failure = failure
        else:
            self._broken(failure.reason)

    # -- its body

    def moved(self, data: bytes, ended: bool) -> None:
        now = self._heard_at = self.door.reactor.now
        relay = self._events or self._whole
        if relay is None:
            return self._keep_early(data, ended=ended)
        if not ended:
            # each token of each stream comes through these lines
            out = relay.feed(data)
            if out:
                if self._awaits_first:
                    self._awaits_first = False
                    self.request.first_byte_at = now
                self._sent_at = now
                if not self.client.write(out):
                    self._block()
            return None
        self._upstream = None
        if self._events is not None:
            return self._end_events(self._events, data)
        if self._whole is not None:
            self._later(self._end_whole(self._whole, data))
        return None

    def _keep_early(self, data: bytes, *, ended: bool) -> None:
        if ended:
            self._upstream = None
        if data:
            self._early.append(data)
            self._early_size += len(data)
        self._early_ended = ended
        if self._collect is not None:
            self._collect_more()
        elif self._early_size > EARLY_BYTES and self._upstream is not None:
            self._upstream.pause()

    def _take_early(self) -> bytes:
        data, self._early, self._early_size = b"".join(self._early), [], 0
        return data

    def _collect_body(self, step: Collect) -> Any:
        if self._early_ended or self._failure is not None or self._early_size >= step.limit:
            self._drop_upstream()
            return self._take_early()[: step.limit]
        self._collect = step
        self._arm()
        return LATER

    def _collect_more(self) -> None:
        step = self._collect
        if step is not None and (self._early_ended or self._early_size >= step.limit):
            self._drop_upstream()
            self._collect = None
            self._later(self._take_early()[: step.limit])

    def _drop_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None

    def _relay(self, step: Relay) -> Any:
        data, ended = self._take_early(), self._early_ended
        head = step.head
        if step.events:
            self._events = EventRelay(step.filters)
            if not self.request.opened:
                self.client.start(self.request, head.status, step.headers, None)
                self.request.opened = True
        else:
            self._whole = WholeRelay(step.filters)
            length = None if step.filters and not ended else head.content_length
            if ended:
                # all of it is here: its length is known, whatever a filter made of it
                data = self._whole.feed(data) + self._whole.end()
                # (a HEAD's answer has a length and no body)
                known = head.content_length if self.request.head.method == "HEAD" else len(data)
                self.client.start(self.request, head.status, step.headers, known)
                return self._over_whole(data, self._whole)
            self.client.start(self.request, head.status, step.headers, length)
        if data or ended:
            self.moved(data, ended)
        if not ended:
            # also when what came is no whole event yet
            self.client.flush()
        if self._upstream is not None and not self._blocked:
            self._upstream.resume()
        if self._failure is not None and not self.over:
            self._broken(self._failure.reason)
        self._arm()
        return LATER

    def _end_events(self, relay: EventRelay, data: bytes) -> None:
        out = relay.feed(data) if data else b""
        rest, complete = relay.end()
        out += rest
        problem = None
        if not complete:
            problem = "the engine ended the stream before it was complete"
            out += error_event(_broken_stream(problem))
        self._events = None
        self._note_first(out)
        self.client.finish(out, close=not complete)
        self._later(Relayed(problem, relay.usage_piece))

    def _end_whole(self, relay: WholeRelay, data: bytes) -> Relayed:
        out = relay.feed(data) if data else b""
        return self._over_whole(out + relay.end(), relay)

    def _over_whole(self, out: bytes, relay: WholeRelay) -> Relayed:
        self._whole = None
        self._note_first(out)
        self.client.finish(out)
        return Relayed(None, relay.tail)

    def _broken(self, reason: str, *, timed_out: bool = False) -> None:
        """The answer breaks off after it has begun: say so in the stream, or cut what can't be completed."""
        relay, self._events, self._whole = self._events, None, None
        self._drop_upstream()
        if self._collect is not None:
            self._collect = None
            return self._later(self._take_early())
        if relay is None:
            self.client.cut()
            return self._later(Relayed(reason, timed_out=timed_out))
        usage_piece = relay.usage_piece
        if relay.at_boundary:
            self.client.finish(error_event(_broken_stream(reason)), close=True)
        else:
            self.client.cut()
        return self._later(Relayed(reason, usage_piece, timed_out))

    # -- to the client

    def _send(self, data: bytes) -> None:
        self._sent_at = self.door.reactor.now
        if not self.client.write(data):
            self._block()

    def _block(self) -> None:
        """The client does not keep up: the engine is to wait."""
        if not self._blocked:
            self._blocked = True
            self._blocked_bytes = self.client.transport.pending
            if self._upstream is not None:
                self._upstream.pause()
            self._arm()

    def _note_first(self, data: bytes) -> None:
        if data and self.request.first_byte_at is None:
            self.request.first_byte_at = self.door.reactor.now

    def drained(self) -> None:
        """The client has taken all that was sent."""
        if self._blocked:
            self._blocked = False
            self._heard_at = self._sent_at = self.door.reactor.now
            # the next comment is due before the time that a client who does not read has
            self._arm()
            if self._upstream is not None:
                self._upstream.resume()

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

    # -- time

    def _arm(self) -> None:
        at = self._next()
        if at != math.inf:
            self.client.deadline.set(at)

    def _next(self) -> float:
        timeouts = self.door.timeouts
        at = min(self._silent_at, self._head_at)
        if self.request.opened and (self._head is None or self._events is not None) and not self._blocked:
            at = min(at, self._sent_at + timeouts.keep_alive_comment)
        if self._blocked:
            return min(at, self._sent_at + timeouts.idle)
        if self._events is not None:
            at = min(at, self._heard_at + timeouts.idle)
            if not self._events.began:
                at = min(at, self._forwarded_at + timeouts.response_header)
        elif self._whole is not None or self._collect is not None:
            at = min(at, self._heard_at + timeouts.idle, self._whole_limit())
        return at

    def _whole_limit(self) -> float:
        generation = self.door.timeouts.generation
        return self._forwarded_at + generation if generation and self.request.model is not None else math.inf

    def look_at_clock(self) -> None:
        """The time asked for has come (or another one)."""
        now = self.door.reactor.now
        if self.over:
            return
        if self._blocked:
            self._look_at_slow_client(now)
        elif self._head is None and self._failure is None:
            self._look_for_head(now)
        elif self._events is not None:
            self._look_at_stream(self._events, now)
        elif (self._whole is not None or self._collect is not None) and now >= self._next():
            which = "generation" if now >= self._whole_limit() else "idle"
            self._broken(f"the whole reply took longer than timeouts.{which}", timed_out=True)
        if not self.over:
            self._arm()

    def _look_at_slow_client(self, now: float) -> None:
        pending = self.client.transport.pending
        if pending != self._blocked_bytes:
            self._blocked_bytes, self._sent_at = pending, now
        elif now >= self._sent_at + self.door.timeouts.idle:
            self.request.problem = f"the client read nothing for {self.door.timeouts.idle:g} s"
            self.client.gone(Outcome.CLIENT_STALLED)

    def _look_for_head(self, now: float) -> None:
        if now >= self._head_at:
            seconds = self._head_at - self._forwarded_at
            self._drop_upstream()
            self._head_at = self._silent_at = math.inf
            self._failure = Failure(f"no answer within {seconds:g} s", sent=True, timed_out=True)
            self._tell(self._failure)
        elif now >= self._silent_at:
            self._silent_at = math.inf
            self._tell(SILENT)
        elif self.request.opened and now >= self._sent_at + self.door.timeouts.keep_alive_comment:
            self._send(COMMENT)

    def _look_at_stream(self, relay: EventRelay, now: float) -> None:
        timeouts = self.door.timeouts
        if now >= self._heard_at + timeouts.idle:
            self._broken(f"the engine was silent for {timeouts.idle:g} s (timeouts.idle)", timed_out=True)
        elif not relay.began and now >= self._forwarded_at + timeouts.response_header:
            seconds = timeouts.response_header
            self._broken(f"the engine sent no event within {seconds:g} s (timeouts.response_header)", timed_out=True)
        elif now >= self._sent_at + timeouts.keep_alive_comment and relay.at_boundary:
            self._send(COMMENT)


def _broken_stream(reason: str) -> Refusal:
    return Refusal(status=502, code="stream_broken", message=f"The answer is incomplete: {reason}.")


# By the exact type: a chain of isinstance costs more than many a step.
_CARRY_OUT: dict[type, Callable[[Run, Any], Any]] = {
    ReadBody: Run._read_body,
    Park: Run._park,
    Forward: Run._forward,
    Await: Run._await,
    Collect: Run._collect_body,
    Relay: Run._relay,
    Reply: Run._reply,
    Refuse: Run._refuse,
}
