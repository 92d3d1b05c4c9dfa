"""One client connection: requests off it one at a time, replies onto it in our own framing, and its time limits."""

from __future__ import annotations

import time
from email.utils import formatdate
from enum import Enum, auto
from typing import TYPE_CHECKING

from llmgw.dialects.openai import error_body
from llmgw.dialects.refusal import Refusal
from llmgw.door.drive import BUDGET_WAIT_SECONDS, Run
from llmgw.door.http1 import END, Problem, RequestEvent, RequestHead, RequestReader
from llmgw.door.request import Outcome, Request
from llmgw.door.steps import Headers
from llmgw.reactor.loop import Deadline
from llmgw.reactor.transports import Transport

if TYPE_CHECKING:
    from llmgw.door.listener import Door

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NO_BODY_STATUSES = frozenset({204, 304})
REASONS = {
    200: "OK",
    204: "No Content",
    301: "Moved Permanently",
    302: "Found",
    303: "See Other",
    304: "Not Modified",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    417: "Expectation Failed",
    422: "Unprocessable Content",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
}


class Framing(Enum):
    """How the end of a reply's body is told."""

    NONE = auto()
    LENGTH = auto()
    CHUNKED = auto()
    CLOSE = auto()


FEW_HEADERS = 3
# What is kept of the beginnings of replies, so that those of every day are not made again.
MAX_KNOWN = 256
MAX_KNOWN_BYTES = 512
# What a client may leave unread of its answers before the next request that it has sent is begun.
UNREAD_BYTES = 64 * 1024
# An enum's member is looked up by its class each time; this one is needed for each token.
CHUNKED = Framing.CHUNKED


def first_lines(status: int, headers: Headers) -> bytes:
    """The status line and the headers that an exchange chose."""
    known = _known_lines.get((status, headers))
    return known if known is not None else _make_lines(status, headers)


def _make_lines(status: int, headers: Headers) -> bytes:
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, REASONS.get(status, "Unknown").encode())]
    lines.extend(b"%b: %b\r\n" % header for header in headers)
    made = b"".join(lines)
    # a page's many are never the same twice, and may hold a cookie that is to be kept nowhere
    if len(headers) <= FEW_HEADERS and len(made) <= MAX_KNOWN_BYTES:
        if len(_known_lines) >= MAX_KNOWN:
            _known_lines.clear()
        _known_lines[status, headers] = made
    return made


_known_lines: dict[tuple[int, Headers], bytes] = {}
_date = (0, b"")


def date_line() -> bytes:
    """The Date header, made once a second."""
    global _date
    second = int(time.time())
    if second != _date[0]:
        _date = (second, f"date: {formatdate(second, usegmt=True)}\r\n".encode())
    return _date[1]


class Client:
    """The owner of a client's transport.

    ``replying``: a reply has begun and is not complete; ``replied``: the present exchange's is.
    """

    __slots__ = (
        "_framing",
        "_head_timed",
        "_held",
        "_keep",
        "_queue",
        "_reader",
        "_run",
        "_unread",
        "_waits_for_room",
        "deadline",
        "door",
        "peer",
        "replied",
        "replying",
        "transport",
    )

    transport: Transport

    def __init__(self, door: Door, peer: str) -> None:
        """The caller sets ``transport`` at once, with this as its owner."""
        self.door = door
        self.peer = peer
        self.replying = False
        self.replied = False
        self._reader = RequestReader(door.limits.max_head)
        self._queue: list[RequestEvent] = []
        self._run: Run | None = None
        self._framing = Framing.NONE
        self._held = b""
        self._keep = True
        self._waits_for_room = self._head_timed = False
        self._unread = 0
        self.deadline = Deadline(door.reactor, self, self._look_at_clock)
        self.deadline.set(door.reactor.now + door.timeouts.keep_alive)

    @property
    def busy(self) -> bool:
        """A request of this client is in progress."""
        return self._run is not None

    # -- from the transport

    def received(self, data: bytes) -> None:
        events = self._reader.feed(data)
        self._queue.extend(events)
        run = self._run
        if run is None:
            if events:
                self.door.reactor.call_soon(self, self.pump)
            elif self._reader.in_head and not self._head_timed and not self.transport.pending:
                # from its first byte, however near the end of keep_alive that came
                self._head_timed = True
                self.deadline.set(self.door.reactor.now + self.door.timeouts.head)
        elif run.wants_body:
            self.deadline.set(self.door.reactor.now + self.door.timeouts.body)
            self.door.reactor.call_soon(self, self.pump)
        else:
            # a pipelined request: it can wait in the kernel
            self.transport.pause()
        if self.transport.pending:
            # of answers that are not read either
            self.transport.pause()
        if len(events) > self.door.limits.max_pipelined:
            self._check_pipeline()

    def _check_pipeline(self) -> None:
        limit = self.door.limits.max_pipelined
        heads = 0
        for position, event in enumerate(self._queue):
            heads += isinstance(event, RequestHead)
            if heads > limit:
                del self._queue[position:]
                message = f"More than {limit} requests were sent ahead of their answers (max_pipelined)."
                self._queue.append(Problem(400, "too_many_pipelined", message))
                return

    def ended(self) -> None:
        """The client sent its FIN. While its request runs that means that it left: half-closing is not waited out."""
        self.gone()

    def lost(self, reason: str) -> None:
        self.gone()

    def drained(self) -> None:
        if self._run is not None:
            self._run.drained()
        else:
            self._wait_for_next()

    def on_crash(self, error: Exception) -> None:
        run = self._run
        if run is not None and not run.over:
            run.on_crash(error)
        else:
            self.gone(Outcome.CRASHED)

    # -- requests in

    def pump(self) -> None:
        """Take what has come as far as it can be taken now."""
        queue = self._queue
        while queue and not self.transport.closed:
            run = self._run
            if run is None and self.transport.pending > UNREAD_BYTES:
                # whoever does not read its answers gets no more of them
                return None
            if run is None:
                event = queue.pop(0)
                if isinstance(event, RequestHead):
                    self.replied = False
                    run = self._run = Run(self.door, self, event)
                    self._give_body(run, queue)
                    run.resume(None)
                elif isinstance(event, Problem):
                    return self._refuse_problem(event)
            elif not run.wants_body:
                return None
            else:
                event = queue.pop(0)
                if not run.take(event):
                    queue.insert(0, event)
                    return self._wait_for_room(run)
        run = self._run
        if run is None:
            if not self.transport.pending:
                self.transport.resume()
        elif run.wants_body:
            # all that has come of it is taken
            self.deadline.set(self.door.reactor.now + self.door.timeouts.body)
            self.transport.resume()
        return None

    def _give_body(self, run: Run, queue: list[RequestEvent]) -> None:
        """Hand over the whole body where it came with the head: then nothing has to be waited for."""
        if len(queue) > 1 and queue[1] is END:
            body = queue[0]
            if isinstance(body, bytes) and run.give_body(body):
                del queue[:2]

    def _refuse_problem(self, problem: Problem) -> None:
        """What came is no request: answer it and end, since nobody knows where the next one would begin."""
        head = RequestHead("-", b"-", 1, {}, keep_alive=False, content_length=None, chunked=False)
        request = Request(self.door.next_id(), head, self.peer, self.door.reactor.now)
        request.outcome, request.problem = Outcome.REFUSED, problem.message
        self._queue.clear()
        self.refuse(Refusal(status=problem.status, code=problem.code, message=problem.message), request)
        self.door.gateway.settle(request)
        self.exchange_over()

    def read_body(self, *, expected: bool) -> None:
        """The exchange wants the body; ``expected``: the client waits for leave to send it."""
        if not self._queue:
            if expected:
                self.transport.send(CONTINUE)
            self.deadline.set(self.door.reactor.now + self.door.timeouts.body)
            self.transport.resume()
        else:
            self.door.reactor.call_soon(self, self.pump)

    def forget_head(self) -> None:
        """A long answer begins: its request's head is not kept for the next one's sake."""
        self._reader.forget()

    def body_read(self) -> None:
        """It has it, or wants no more of it."""
        self.deadline.clear()
        self._waits_for_room = False

    def _wait_for_room(self, run: Run) -> None:
        self._waits_for_room = True
        self.transport.pause()
        self.deadline.set(self.door.reactor.now + BUDGET_WAIT_SECONDS)
        self.door.budget.wait(self, self._room_again)

    def _room_again(self) -> None:
        if self._waits_for_room and self._run is not None:
            self._waits_for_room = False
            self.deadline.set(self.door.reactor.now + self.door.timeouts.body)
            self.transport.resume()
            self.pump()

    # -- replies out

    def start(self, request: Request, status: int, headers: Headers, length: int | None) -> None:
        """Begin a reply; its head goes out with the first of its body. ``length`` None: not known yet."""
        head = request.head
        request.status = status
        # an unread body hides where the next request begins
        whole = self._run is None or self._run.body_ended or END in self._queue
        keep = head.keep_alive and whole and not self.door.draining and self._reader.problem is None
        framing = b""
        if head.method == "HEAD" or status in NO_BODY_STATUSES:
            self._framing = Framing.NONE
            if length is not None and status not in NO_BODY_STATUSES:
                framing = b"content-length: %d\r\n" % length
        elif length is not None:
            self._framing = Framing.LENGTH
            framing = b"content-length: %d\r\n" % length
        elif head.minor == 1:
            self._framing = Framing.CHUNKED
            framing = b"transfer-encoding: chunked\r\n"
        else:
            self._framing = Framing.CLOSE
            keep = False
        if not keep:
            framing += b"connection: close\r\n"
        elif head.minor == 0:
            framing += b"connection: keep-alive\r\n"
        self._keep = keep
        self.replying = True
        self._held = b"%b%bx-request-id: %b\r\n%b%b\r\n" % (
            first_lines(status, headers),
            framing,
            request.id.encode(),
            date_line(),
            self.door.origins.headers(head),
        )

    def reply(self, request: Request, status: int, headers: Headers, body: bytes) -> None:
        """A whole reply."""
        head = request.head
        run = self._run
        plain = body and head.minor == 1 and head.method != "HEAD" and status not in NO_BODY_STATUSES
        if not plain or self.door.draining or run is None or not run.body_ended:
            self.start(request, status, headers, len(body))
            self.finish(body)
            return
        request.status = status
        self._keep = head.keep_alive and self._reader.problem is None
        self.replied = True
        self.transport.send(
            b"%bcontent-length: %d\r\n%bx-request-id: %b\r\n%b%b\r\n%b"
            % (
                first_lines(status, headers),
                len(body),
                b"" if self._keep else b"connection: close\r\n",
                request.id.encode(),
                date_line(),
                self.door.origins.headers(head),
                body,
            )
        )

    def write(self, data: bytes) -> bool:
        """Send a piece of the body. False: the client does not keep up; send no more until ``drained``."""
        framing = self._framing
        if framing is CHUNKED:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        elif framing is Framing.NONE:
            return True
        if self._held:
            data, self._held = self._held + data, b""
        return self.transport.send(data)

    def finish(self, data: bytes = b"", *, close: bool = False) -> None:
        """Send the last piece, which may be empty; the reply is complete. ``close``: the connection ends with it."""
        if close:
            self._keep = False
        framing = self._framing
        if framing is Framing.CHUNKED:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        elif framing is Framing.NONE:
            data = b""
        if self._held:
            data, self._held = self._held + data, b""
        self.replying = False
        self.replied = True
        if data:
            self.transport.send(data)

    def flush(self) -> None:
        """Send the head now: the body's first piece is not at hand."""
        if self._held:
            held, self._held = self._held, b""
            self.transport.send(held)

    def cut(self) -> None:
        """The reply can't be completed: end the connection so that the client can tell."""
        self._keep = False
        self._break_off()
        self.replying = False

    def _break_off(self) -> None:
        """End the connection now, whatever is on it."""
        if self._framing is Framing.CLOSE and (self.replying or self.transport.pending):
            # an ordinary end of the connection would be the end of this reply
            self.transport.reset()
        else:
            self.transport.abort()

    def refuse(self, refusal: Refusal, request: Request, headers: Headers = ()) -> None:
        """Answer with an error body."""
        if refusal.retry_after is not None:
            headers += ((b"retry-after", b"%d" % refusal.retry_after),)
        body = error_body(refusal)
        self.reply(request, refusal.status, ((b"content-type", b"application/json"), *headers), body)

    # -- between requests, and the end

    def exchange_over(self) -> None:
        """The reply is out: go on with the next request, or end."""
        self._run = None
        if self.transport.closed:
            return self.transport_over()
        if not self._keep or self.door.draining:
            self.transport.close(linger=True)
            return self.transport_over()
        self._wait_for_next()
        return None

    def _wait_for_next(self) -> None:
        timeouts = self.door.timeouts
        self._unread = self.transport.pending
        # the next request may have begun behind this one
        begun = self._head_timed = self._reader.in_head
        next_seconds = timeouts.head if begun else timeouts.keep_alive
        seconds = timeouts.idle if self._unread else next_seconds
        self.deadline.set(self.door.reactor.now + seconds)
        if self._queue:
            # no more is read before these are answered: a read for each answer would fill the memory
            self.door.reactor.call_soon(self, self.pump)
        elif not self._unread:
            self.transport.resume()

    def gone(self, outcome: Outcome = Outcome.CLIENT_LEFT) -> None:
        """The connection is over, whatever was on it."""
        run = self._run
        self._break_off()
        if run is not None:
            if self.replied:
                # it has its answer, or will never take the rest; the exchange is about to notice and to settle
                run.let_go(outcome)
                return
            self._run = None
            run.close(outcome)
        self.transport_over()

    def close_idle(self) -> None:
        """The program stops: an idle connection ends now, a busy one after its reply."""
        if self._run is None and not self._queue:
            self.transport.close()
            self.transport_over()

    def stop(self) -> None:
        """The program waits no longer: a running request is told so, as well as it still can be."""
        run = self._run
        if run is not None and not self.replied and not self.transport.closed:
            return run.stop()
        # what was answered in full may still be on its way; an exchange that is left is about to notice and to settle
        if run is not None:
            run.let_go(Outcome.STOPPED)
        self.transport.close(linger=run is not None or self.transport.pending > 0)
        return self.transport_over()

    def transport_over(self) -> None:
        """Leave the door's list and the buckets; break the reader's cycle."""
        self.deadline.end()
        self._reader.close()
        self._queue.clear()
        self.door.forget(self)

    def _look_at_clock(self) -> None:
        run = self._run
        if run is not None:
            if self._waits_for_room:
                run.no_room()
            elif run.wants_body:
                run.body_late()
            else:
                run.look_at_clock()
        elif self.transport.pending:
            if self.transport.pending == self._unread:
                return self.gone(Outcome.CLIENT_STALLED)
            self._wait_for_next()
        elif self._reader.in_head:
            seconds = self.door.timeouts.head
            message = f"The request's head was not complete within {seconds:g} s."
            self._refuse_problem(Problem(408, "request_timeout", message))
        elif not self._queue:  # else a request has come at the last moment
            self.transport.close()
            self.transport_over()
        return None
