"""One request to an engine: its answer's head told to the exchange, its body moved to the client, within its times.

An Answer borrows one upstream and lives from a Forward to the next (or to the end of the run). While a body is relayed
the exchange sleeps; every token passes through ``moved`` and nothing else of this room.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from llmgw.dialects.openai import error_event
from llmgw.dialects.refusal import Refusal
from llmgw.door.http1 import ResponseHead
from llmgw.door.relay import EventRelay, WholeRelay
from llmgw.door.request import Outcome
from llmgw.door.steps import SILENT, Collect, Failure, Forward, Relay, Relayed, Silent
from llmgw.door.upstream import Upstream, explain_undialled

if TYPE_CHECKING:
    from llmgw.door.drive import Run

COMMENT = b": keep-alive\n\n"
EVENT_STREAM = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
# How much of an answer waits here while the exchange has not yet said what to do with it.
EARLY_BYTES = 256 * 1024


class Later:
    """A step whose result comes by ``Run.resume``."""


LATER = Later()


class Answer:
    """What is known of one answer, and what is done with it."""

    __slots__ = (
        "_awaiting",
        "_awaits_first",
        "_blocked",
        "_blocked_bytes",
        "_client",
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
        "_reactor",
        "_request",
        "_result",
        "_run",
        "_sent_at",
        "_silent_at",
        "_timeouts",
        "_upstream",
        "_whole",
    )

    def __init__(self, run: Run, step: Forward) -> None:
        now = run.door.reactor.now
        self._run = run
        self._client = run.client
        self._request = run.request
        self._reactor = run.door.reactor
        self._timeouts = run.door.timeouts
        self._upstream: Upstream | None = None
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
        # the exchange waits for the head
        self._awaiting = False
        # how it ended, while the client has not taken the last of it
        self._result: Relayed | None = None
        # the client does not read fast enough
        self._blocked = False
        self._blocked_bytes = 0
        self._forwarded_at = self._heard_at = self._sent_at = now
        self._head_at = now + step.head_seconds if step.head_seconds is not None else math.inf
        self._silent_at = now + step.silent_seconds if step.silent_seconds is not None else math.inf

    # -- the request, and the head

    def begin(self, step: Forward) -> Any:
        """Send the request; the head comes later, a Failure to dial at once."""
        try:
            self._upstream = self._run.door.pool.ask(step.address, step.request, self, bodyless=step.bodyless)
        except OSError as error:
            return explain_undialled(step.address, error)
        self._awaiting = True
        at = min(self._head_at, self._silent_at)
        if at != math.inf:
            self._client.deadline.set(at)
        return LATER

    def wait(self) -> Any:
        """After SILENT: open the stream to the client, then the head or the Failure when it comes."""
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
            self._run.later(answer)

    def _open(self) -> None:
        """Open the stream: from here on everything is an event or a comment."""
        self._request.opened = True
        self._client.start(self._request, 200, EVENT_STREAM, None)
        self._send(COMMENT)

    def answered(self, head: ResponseHead) -> None:
        self._head = head
        self._heard_at = self._reactor.now
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

    @property
    def at_boundary(self) -> bool:
        """An event of ours may follow what the client has."""
        return self._request.opened and (self._events is None or self._events.at_boundary)

    def on_crash(self, error: Exception) -> None:
        self._run.on_crash(error)

    # -- its body

    def moved(self, data: bytes, ended: bool) -> None:
        now = self._heard_at = self._reactor.now
        relay = self._events or self._whole
        if relay is None:
            return self._keep_early(data, ended=ended)
        if not ended:
            # each token of each stream comes through these lines
            out = relay.feed(data)
            if out:
                if self._awaits_first:
                    self._awaits_first = False
                    self._request.first_byte_at = now
                self._sent_at = now
                if not self._client.write(out):
                    self._block()
            return None
        self._upstream = None
        if self._events is not None:
            return self._over(self._end_events(self._events, data))
        if self._whole is not None:
            out = self._whole.feed(data) if data else b""
            self._over(self._end_whole(out + self._whole.end(), self._whole))
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

    def collect(self, step: Collect) -> Any:
        """The body as bytes, when all or enough of it has come."""
        if self._early_ended or self._failure is not None or self._early_size >= step.limit:
            self.drop()
            return self._take_early()[: step.limit]
        self._collect = step
        self._arm()
        return LATER

    def _collect_more(self) -> None:
        step = self._collect
        if step is not None and (self._early_ended or self._early_size >= step.limit):
            self.drop()
            self._collect = None
            self._run.later(self._take_early()[: step.limit])

    def drop(self) -> None:
        """Nothing of this answer is wanted any more: the engine stops when its connection closes."""
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None

    def relay(self, step: Relay) -> Any:
        """Move the body to the client."""
        self._run.drop_body()
        data, ended = self._take_early(), self._early_ended
        head = step.head
        if step.events:
            self._events = EventRelay(step.filters)
            if not self._request.opened:
                self._client.start(self._request, head.status, step.headers, None)
                self._request.opened = True
            # a stream lasts, and nobody looks at what it was asked with any more
            self._request.head = self._request.head.without_fields()
            self._client.forget_head()
        else:
            self._whole = WholeRelay(step.filters)
            length = None if step.filters and not ended else head.content_length
            if ended:
                # all of it is here: its length is known, whatever a filter made of it
                data = self._whole.feed(data) + self._whole.end()
                # (a HEAD's answer has a length and no body)
                known = head.content_length if self._request.head.method == "HEAD" else len(data)
                self._client.start(self._request, head.status, step.headers, known)
                self._over(self._end_whole(data, self._whole))
                return LATER
            self._client.start(self._request, head.status, step.headers, length)
        if data or ended:
            self.moved(data, ended)
        if not ended:
            # also when what came is no whole event yet
            self._client.flush()
        if self._upstream is not None and not self._blocked:
            self._upstream.resume()
        if self._failure is not None and not self._run.over:
            self._broken(self._failure.reason)
        self._arm()
        return LATER

    def _end_events(self, relay: EventRelay, data: bytes) -> Relayed:
        out = relay.feed(data) if data else b""
        rest, complete = relay.end()
        out += rest
        problem = None
        if not complete:
            problem = "the engine ended the stream before it was complete"
            out += error_event(_broken_stream(problem))
        self._events = None
        self._note_first(out)
        self._client.finish(out, close=not complete)
        return Relayed(problem, relay.usage_piece)

    def _over(self, result: Relayed) -> None:
        """The reply is complete, and over when the client has taken it."""
        if self._client.transport.pending:
            self._result = result
            self._blocked = False
            self._sent_at = self._reactor.now
            self._block()
        else:
            self._run.later(result)

    def let_go(self, outcome: Outcome) -> None:
        """The client is not waited for any longer."""
        result, self._result = self._result, None
        if result is not None:
            self._request.outcome = outcome
            self._run.later(result)

    def _end_whole(self, out: bytes, relay: WholeRelay) -> Relayed:
        self._whole = None
        self._note_first(out)
        self._client.finish(out)
        return Relayed(None, relay.tail)

    def _broken(self, reason: str, *, timed_out: bool = False) -> None:
        """The answer breaks off after it has begun: say so in the stream, or cut what can't be completed."""
        relay, self._events, self._whole = self._events, None, None
        self.drop()
        if self._collect is not None:
            self._collect = None
            return self._run.later(self._take_early())
        if relay is None:
            self._client.cut()
            return self._run.later(Relayed(reason, timed_out=timed_out))
        if relay.done:
            # what breaks after the last word breaks nothing
            return self._over(self._end_events(relay, b""))
        if relay.at_boundary:
            self._client.finish(error_event(_broken_stream(reason)), close=True)
        else:
            self._client.cut()
        return self._over(Relayed(reason, relay.usage_piece, timed_out))

    # -- to the client

    def _send(self, data: bytes) -> None:
        self._sent_at = self._reactor.now
        if not self._client.write(data):
            self._block()

    def _block(self) -> None:
        """The client does not keep up: the engine is to wait."""
        if not self._blocked:
            self._blocked = True
            self._blocked_bytes = self._client.transport.pending
            if self._upstream is not None:
                self._upstream.pause()
            self._arm()

    def _note_first(self, data: bytes) -> None:
        if data and self._request.first_byte_at is None:
            self._request.first_byte_at = self._reactor.now

    def drained(self) -> None:
        """The client has taken all that was sent."""
        if self._result is not None:
            result, self._result = self._result, None
            self._run.later(result)
        elif self._blocked:
            self._blocked = False
            self._heard_at = self._sent_at = self._reactor.now
            # the next comment is due before the time that a client who does not read has
            self._arm()
            if self._upstream is not None:
                self._upstream.resume()

    # -- time

    def _arm(self) -> None:
        at = self._next()
        if at != math.inf:
            self._client.deadline.set(at)

    def _next(self) -> float:
        timeouts = self._timeouts
        at = min(self._silent_at, self._head_at)
        if self._request.opened and (self._head is None or self._events is not None) and not self._blocked:
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
        generation = self._timeouts.generation
        return self._forwarded_at + generation if generation and self._request.model is not None else math.inf

    def look_at_clock(self) -> None:
        """The time asked for has come (or another one)."""
        now = self._reactor.now
        if self._blocked:
            self._look_at_slow_client(now)
        elif self._head is None and self._failure is None:
            self._look_for_head(now)
        elif self._events is not None:
            self._look_at_stream(self._events, now)
        elif (self._whole is not None or self._collect is not None) and now >= self._next():
            timeouts = self._timeouts
            reason = f"the engine was silent for {timeouts.idle:g} s (timeouts.idle)"
            if now >= self._whole_limit():
                reason = f"the whole reply took longer than {timeouts.generation:g} s (timeouts.generation)"
            self._broken(reason, timed_out=True)
        if not self._run.over:
            self._arm()

    def _look_at_slow_client(self, now: float) -> None:
        pending = self._client.transport.pending
        if pending != self._blocked_bytes:
            self._blocked_bytes, self._sent_at = pending, now
        elif now >= self._sent_at + self._timeouts.idle:
            self._request.problem = f"the client read nothing for {self._timeouts.idle:g} s"
            self._client.gone(Outcome.CLIENT_STALLED)

    def _look_for_head(self, now: float) -> None:
        if now >= self._head_at:
            seconds = self._head_at - self._forwarded_at
            self.drop()
            self._head_at = self._silent_at = math.inf
            self._failure = Failure(f"no answer within {seconds:g} s", sent=True, timed_out=True)
            self._tell(self._failure)
        elif now >= self._silent_at:
            self._silent_at = math.inf
            self._tell(SILENT)
        elif self._request.opened and now >= self._sent_at + self._timeouts.keep_alive_comment:
            self._send(COMMENT)

    def _look_at_stream(self, relay: EventRelay, now: float) -> None:
        timeouts = self._timeouts
        if now >= self._heard_at + timeouts.idle:
            self._broken(f"the engine was silent for {timeouts.idle:g} s (timeouts.idle)", timed_out=True)
        elif not relay.began and now >= self._forwarded_at + timeouts.response_header:
            seconds = timeouts.response_header
            self._broken(f"the engine sent no event within {seconds:g} s (timeouts.response_header)", timed_out=True)
        elif now >= self._sent_at + timeouts.keep_alive_comment and relay.at_boundary:
            if relay.done:
                # the engine has nothing to say that a client would wait for, and does not end its answer
                self._broken("the engine did not end its stream")
            else:
                self._send(COMMENT)


def _broken_stream(reason: str) -> Refusal:
    return Refusal(status=502, code="stream_broken", message=f"The answer is incomplete: {reason}.")
