"""HTTP/1.x as values: bytes go in, heads, bodies, ends and problems come out. No socket, no clock; limits live here.

The grammar is llhttp's (by httptools), which refuses what request smuggling needs; what llhttp leaves open is closed
here: Host, versions, codings other than chunked, size and number of header fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

import httptools
import msgspec

from llmgw.door.known import KnownHead, find_end, learn

MAX_FIELDS = 256
# An engine's head is trusted more than a client's, but not with all our memory.
MAX_RESPONSE_HEAD = 256 * 1024
# What the parser says of a version that it does not know, and of the words with which HTTP/2 begins.
VERSION_ERRORS = frozenset({"Invalid HTTP version", "Pause on PRI/Upgrade"})
# A method, of which the parser does not tell before its target has begun, and what may stand before it.
METHOD_BYTES = 32
# A peer whose heads are never the same twice (an id in each) is not looked at for ever.
MAX_MISSES = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """A request that can't be answered as it stands: the status, a code for programs and a sentence for people.

    Whatever follows it on the connection has no known beginning, so the connection ends with the answer.
    """

    status: int
    code: str
    message: str


class End(Enum):
    """The message is complete."""

    END = auto()


END = End.END


class RequestHead(msgspec.Struct):
    """A request's head. Header names are lower case; fields that came twice are joined by ", "."""

    method: str
    target: bytes
    minor: int
    headers: dict[bytes, bytes]
    keep_alive: bool
    content_length: int | None
    chunked: bool

    def without_fields(self) -> RequestHead:
        """The same, small enough to be kept."""
        return RequestHead(self.method, self.target, self.minor, {}, self.keep_alive, self.content_length, self.chunked)

    @property
    def has_body(self) -> bool:
        return self.chunked or bool(self.content_length)

    @property
    def origin_form(self) -> bytes:
        """The target without scheme and authority: path and query, as a server that is no proxy is asked."""
        target = self.target
        if target.startswith(b"/") or b"://" not in target:
            return target
        rest = target.partition(b"://")[2]
        ends = [at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0]
        rest = rest[min(ends) :] if ends else b""
        return rest if rest.startswith(b"/") else b"/" + rest

    @property
    def authority(self) -> bytes:
        """Whom the request is for: an absolute target's own word goes before the Host (RFC 9112, 3.2.2)."""
        host = self.headers.get(b"host", b"")
        if self.target.startswith(b"/") or b"://" not in self.target:
            return host
        # a target that names nobody (http:///x) must not pass for a client that sends no Host
        return re.split(rb"[/?]", self.target.partition(b"://")[2], maxsplit=1)[0] or host

    @property
    def path(self) -> str:
        """The target's path, undecoded, without its query; an absolute target's own path."""
        return self.origin_form.partition(b"?")[0].decode("latin-1")


RequestEvent = RequestHead | bytes | End | Problem


class _Refused(Exception):  # noqa: N818 - carries a Problem out of httptools' callbacks
    def __init__(self, problem: Problem) -> None:
        self.problem = problem


class RequestReader:
    """Reads requests off one connection, one after the other, as ``feed`` is given bytes.

    After a Problem nothing more comes out. ``close`` breaks the cycle between parser and reader, so that a closed
    connection leaves memory at once.
    """

    __slots__ = (
        "_events",
        "_fed",
        "_fields",
        "_head",
        "_in_body",
        "_known",
        "_left",
        "_looked",
        "_max_head",
        "_misses",
        "_parser",
        "_parts",
        "_repeated",
        "_replaying",
        "_start",
        "_target",
        "_unfinished",
        "_unheard",
        "in_head",
        "problem",
    )

    def __init__(self, max_head: int) -> None:
        self._max_head = max_head
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._events: list[RequestEvent] = []
        self._parts: list[bytes] = []
        self.problem: Problem | None = None
        self._head: RequestHead | None = None
        self._fields: dict[bytes, bytes] = {}
        self._target = b""
        # the bytes in which the present head begins, and perhaps some before them
        self._start: bytes | bytearray = b""
        # how far these were looked at for first lines
        self._looked = 0
        # bytes fed since the last event
        self._unheard = 0
        # lines of fields that had come before
        self._repeated = 0
        # bytes fed while the present head is incomplete, and whether we are past it
        self._fed = 0
        self._in_body = False
        # a head has begun and is not complete
        self.in_head = False
        self._replaying = False
        # a head of this connection, as bytes and as read; tries since one was of use
        self._known: tuple[KnownHead, RequestHead] | None = None
        self._misses = 0
        # bytes that are missing of the parser's present message; None when that can't be told
        self._unfinished: int | None = 0
        # bytes that are missing of a body whose head was known, and which the parser does not see
        self._left = 0

    def feed(self, data: bytes) -> list[RequestEvent]:
        """The events in these bytes, in order."""
        if self._left:
            return self._feed_body(data)
        if self._unfinished == 0:
            if self._known is not None:
                events = self._recall(self._known, data)
                if events is not None:
                    return events
            events = self._parse(data)
            self._learn(events, data)
            return events
        if self._unfinished is not None:
            self._unfinished = None if len(data) > self._unfinished else self._unfinished - len(data)
        return self._parse(data)

    def forget(self) -> None:
        """Keep no head: the connection is idle or busy for long, and its memory is wanted."""
        self._known = None

    def _recall(self, known: tuple[KnownHead, RequestHead], data: bytes) -> list[RequestEvent] | None:
        """The events of a message whose head has come before; None when the parser has to look."""
        found = known[0].match(data)
        if found is None:
            return None
        self._misses = 0
        length, at = found
        head = known[1]
        if length != head.content_length:
            fields = {**head.headers, b"content-length": b"%d" % length}
            head = RequestHead(head.method, head.target, head.minor, fields, head.keep_alive, length, chunked=False)
        left = length - (len(data) - at)
        if left == 0 and length:
            return [head, data[at:], END]
        if left <= 0:
            # nothing of a body, or more than this message
            return [head, END] if not left else None
        self._left = left
        return [head, data[at:]] if len(data) > at else [head]

    def _feed_body(self, data: bytes) -> list[RequestEvent]:
        left = self._left = self._left - len(data)
        if left > 0:
            return [data]
        if left == 0:
            return [data, END]
        self._left = 0
        return [data[:left], END, *self.feed(data[left:])]

    def _learn(self, events: list[RequestEvent], data: bytes) -> None:
        """The parser has seen the start of a message: where does that end, and is its head one to be known again?"""
        size = find_end(data)
        head = events[0] if events else None
        self._unfinished = None
        if not size or not isinstance(head, RequestHead) or head.chunked or b"upgrade" in head.headers:
            return
        if not head.keep_alive:
            # what follows is no message, and the parser's to refuse
            return
        missing = size + (head.content_length or 0) - len(data)
        if missing < 0:
            return
        self._unfinished = missing
        if self._misses < MAX_MISSES and head.content_length is not None:
            self._misses += 1
            known = learn(data, size)
            self._known = None if known is None else (known, head)

    def _parse(self, data: bytes) -> list[RequestEvent]:
        if self._parser is None or self.problem is not None:
            return []
        if not self._start:
            self._start = data
        else:
            if isinstance(self._start, bytes):
                self._start = bytearray(self._start)
            self._start += data
        self._fed += len(data)
        stopped: Exception | None = None
        try:
            self._parser.feed_data(data)
        except Exception as error:
            stopped = error
        if stopped is not None:
            # not inside ``except``: what the parser raises next would have this as its context, in place of its reason
            self._parse_on(stopped, data)
            stopped = None  # whose traceback holds this frame
        if self._parts:
            self._join_parts()
        events = self._events
        self._events = []
        if events and events[-1] is END:
            # (the parser does not tell of a next request that has come no further than its method)
            self.in_head = bool(self._target)
            self._unheard = 0
            rest = self._start[self._looked :]
            self._start = bytes(rest if self._target else rest[-METHOD_BYTES:].rpartition(b"\n")[2])
            self._looked = 0
            return events
        if self._in_body:
            self._start, self._looked = b"", 0
        self._look_at_rest(events, data)
        return events

    def _look_at_rest(self, events: list[RequestEvent], data: bytes) -> None:
        """A message has begun and is not complete: what is it, and is it within its limits?"""
        self._unheard = 0 if events else self._unheard + len(data)
        if not self._in_body:
            # blank lines before a request are no beginning of one
            self.in_head = self.in_head or bool(data.strip(b"\r\n"))
        if (self._unheard if self._in_body else self._fed) > self._max_head and self._is_growing(events):
            self._refuse(_head_too_large(self._max_head))
            events += self._events
            self._events = []

    def _is_growing(self, events: list[RequestEvent]) -> bool:
        """Nothing is complete, and the parser keeps what it is given: a head, or a trailer, that never ends."""
        if self.problem is not None:
            return False
        return not events if self._in_body else not events or events[-1] is not END

    def _parse_on(self, error: Exception, data: bytes) -> None:
        """The parser stopped: refuse what made it, or go on behind a request that asked for an upgrade."""
        stopped: Exception | None = error
        rest: bytes | None = data
        # a loop, for as many of them as fit into one read may follow each other
        while stopped is not None and rest is not None:
            if isinstance(stopped, httptools.HttpParserUpgrade):
                rest = self._decline_upgrade(rest[stopped.args[0] :])
            elif isinstance(stopped, httptools.HttpParserCallbackError):
                reason = stopped.__context__
                if not isinstance(reason, _Refused):
                    raise stopped
                return self._refuse(reason.problem)
            elif str(stopped) in VERSION_ERRORS:
                return self._refuse(_unknown_version())
            elif isinstance(stopped, httptools.HttpParserError):
                message = f"This is not a well-formed HTTP/1.1 request: {stopped}."
                return self._refuse(Problem(400, "invalid_http", message))
            else:
                raise stopped
            stopped = None
            if rest is not None and self._parser is not None:
                try:
                    self._parser.feed_data(rest)
                except Exception as next_error:
                    stopped = next_error
        return None

    def close(self) -> None:
        """No more will be fed."""
        self._parser = None
        self._known = None
        self._left = 0
        self._start = b""

    def _refuse(self, problem: Problem) -> None:
        if self.problem is None:
            self.problem = problem
            self._known = None
            self._join_parts()
            self._events.append(problem)

    def _join_parts(self) -> None:
        """One event for all of the body that came at once: a body of two-byte chunks must not cost forty for each."""
        parts = self._parts
        if len(parts) == 1:
            self._events.append(parts.pop())
        elif parts:
            self._events.append(b"".join(parts))
            parts.clear()

    def _decline_upgrade(self, rest: bytes) -> bytes | None:
        """Answer an upgrade request (h2c, mostly) as plain HTTP/1.1, which the RFC allows.

        llhttp takes all that follows such a head for the other protocol, the request's own body too, so a new parser
        is given the same framing without the upgrade.
        """
        head = self._head
        if head is None or head.method == "CONNECT":
            self._events = [event for event in self._events if event is not head]
            self._refuse(Problem(501, "not_supported", "CONNECT is not served here."))
            return None
        self._parser = httptools.HttpRequestParser(self)
        self._replaying = True
        framing = b""
        if head.chunked:
            framing = b"transfer-encoding: chunked\r\n"
        elif head.content_length is not None:
            framing = b"content-length: %d\r\n" % head.content_length
        if not head.keep_alive:
            framing += b"connection: close\r\n"
        return b"POST / HTTP/1.1\r\nhost: x\r\n%b\r\n%b" % (framing, rest)

    # -- httptools calls these

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            # a trailer: nothing here wants one, and no rule for heads is one for trailers
            return
        name = name.lower()
        fields = self._fields
        if name in fields:
            if name == b"host":
                raise _Refused(Problem(400, "invalid_host", "The request has more than one Host header."))
            self._repeated += 1
            if self._repeated > MAX_FIELDS:  # joining them takes time that grows with their square
                raise _Refused(_too_many_fields())
            value = fields[name] + (b"; " if name == b"cookie" else b", ") + value
        fields[name] = value

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        parser = self._parser
        assert parser is not None  # noqa: S101 - it is calling
        fields = self._fields
        if self._fed > self._max_head:
            self._measure(fields)
        if len(fields) > MAX_FIELDS:
            raise _Refused(_too_many_fields())
        version = parser.get_http_version()
        minor = 1
        if version != "1.1":
            if version != "1.0":
                raise _Refused(_unknown_version())
            minor = 0
        elif b"host" not in fields:
            raise _Refused(Problem(400, "invalid_host", "An HTTP/1.1 request must have a Host header."))
        chunked = b"transfer-encoding" in fields
        if chunked and (minor == 0 or fields[b"transfer-encoding"].strip().lower() != b"chunked"):
            raise _Refused(Problem(501, "coding_not_supported", "Only 'Transfer-Encoding: chunked' is understood."))
        length = None
        if b"content-length" in fields and not chunked:
            length = int(fields[b"content-length"])
        method = parser.get_method().decode()
        # the parser takes relatives of HTTP for it (RTSP, ICE), and says of none which it was
        line = b"%b %b HTTP/1." % (method.encode(), self._target)
        at = self._start.find(line, self._looked)
        self._looked = at + len(line)
        if at < 0:
            message = "The first line of the request is not one of HTTP/1.1: a method, a target, HTTP/1.1."
            raise _Refused(Problem(400, "invalid_http", message))
        self._head = RequestHead(method, self._target, minor, fields, parser.should_keep_alive(), length, chunked)
        self._in_body = True
        self.in_head = False
        self._fields = {}
        self._events.append(self._head)

    def _measure(self, fields: dict[bytes, bytes]) -> None:
        """More was read than a head may have, but part of it may be a body, or an earlier message's end."""
        size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in fields.items())
        if size > self._max_head:
            raise _Refused(_head_too_large(self._max_head))

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._replaying:
            self._replaying = False
        elif self._parser is not None and self._parser.should_upgrade():
            return
        self._fields = {}
        self._target = b""
        self._fed = self._repeated = 0
        self._in_body = False
        parts = self._parts
        if parts:
            if len(parts) == 1:
                self._events.append(parts.pop())
            else:
                self._join_parts()
        self._events.append(END)


def _unknown_version() -> Problem:
    return Problem(505, "version_not_supported", "This version of HTTP is not served here: use HTTP/1.1.")


def _too_many_fields() -> Problem:
    return Problem(431, "headers_too_large", f"The request has more than {MAX_FIELDS} header fields.")


def _head_too_large(limit: int) -> Problem:
    return Problem(431, "headers_too_large", f"The request's head is larger than {limit} bytes.")


# An answer's first byte, or one that may stand before it; nothing yet is as good.
_BEGINNINGS = (b"H", b"\r", b"\n", b"")


def _cause_of(error: Exception) -> BaseException:
    """What a callback of ours raised. (Not a local of the frame that raises it again: they would keep each other.)"""
    return error.__context__ or error


def _show(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))


class BadResponse(Exception):  # noqa: N818 - a fact about an engine, told in a sentence
    """What came from an engine is not HTTP, or not what was asked for."""


class ResponseHead(msgspec.Struct):
    """A response's head; header names are lower case, and a field that came twice (Set-Cookie) stands here twice."""

    status: int
    headers: list[tuple[bytes, bytes]] = []
    keep_alive: bool = False
    content_length: int | None = None
    # its Content-Encoding, which nobody asked for
    coding: bytes | None = None
    # the whole body, where it came with the head
    body: bytes | None = None

    def get(self, name: bytes) -> bytes | None:
        """The last value of that field."""
        found = None
        for key, value in self.headers:
            if key == name:
                found = value
        return found


class ResponseReader:
    """Reads one connection's responses: ``begin`` a message, ``feed`` bytes, then look at ``head`` and ``ended``."""

    __slots__ = (
        "_body",
        "_bodyless",
        "_chunked",
        "_coding",
        "_fields",
        "_framed",
        "_interim",
        "_known",
        "_length",
        "_misses",
        "_parser",
        "_parts",
        "_size",
        "ended",
        "head",
        "spoiled",
    )

    def __init__(self) -> None:
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._body = b""
        self._parts: list[bytes] = []
        self.head: ResponseHead | None = None
        self.ended = True
        # bytes that belong to no message came: the connection can't be used again
        self.spoiled = False
        self._bodyless = self._interim = self._framed = False
        self._fields: list[tuple[bytes, bytes]] = []
        self._length: bytes | None = None
        self._coding: bytes | None = None
        self._chunked = False
        self._size = 0
        # a head of this connection, as bytes and as read; tries since one was of use
        self._known: tuple[KnownHead, ResponseHead] | None = None
        self._misses = 0

    def begin(self, *, bodyless: bool = False) -> None:
        """Expect one message; ``bodyless`` for the answer to a HEAD."""
        self.head = None
        self.ended = False
        self._bodyless = bodyless
        self._interim = self._framed = False
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        """The body's bytes in ``data``, de-chunked; raises BadResponse."""
        parser = self._parser
        if parser is None:
            return b""
        first = False
        if self.head is None:
            first = self._size == 0 and not self._bodyless
            if first and self._known is not None:
                body = self._recall(self._known, data)
                if body is not None:
                    return body
            if self._size == 0 and data[:1] not in _BEGINNINGS:
                # RTSP, which the parser takes for HTTP
                raise BadResponse("the engine's answer is not well-formed HTTP: it begins with something else")
            # many interim answers, or one head that never ends
            self._size += len(data)
            if self._size > MAX_RESPONSE_HEAD + len(data):
                raise BadResponse(f"the head of the engine's answer is larger than {MAX_RESPONSE_HEAD} bytes")
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise BadResponse("the engine switched protocols unasked") from None
        except httptools.HttpParserCallbackError as error:
            raise _cause_of(error) from None
        except httptools.HttpParserError as error:
            self.spoiled = True
            if not self.ended:
                raise BadResponse(f"the engine's answer is not well-formed HTTP: {error}") from None
        # nearly always one piece or none: a list for it would be one more object to touch for each token
        body, self._body = self._body, b""
        if self._parts:
            body += b"".join(self._parts)
            self._parts.clear()
        if first and self.ended and not self.spoiled and self._misses < MAX_MISSES:
            self._learn(data)
        return body

    def _recall(self, known: tuple[KnownHead, ResponseHead], data: bytes) -> bytes | None:
        """The body of a whole message whose head has come before; None when the parser has to look."""
        found = known[0].match(data)
        if found is None or found[1] + found[0] != len(data):
            return None
        length, at = found
        head = known[1]
        fields = head.headers
        if length != head.content_length:
            fields = [(name, b"%d" % length if name == b"content-length" else value) for name, value in fields]
        self._misses = 0
        self.head = ResponseHead(head.status, fields, head.keep_alive, length)
        self._framed = self.ended = True
        return data[at:]

    def forget(self) -> None:
        """Keep no head."""
        self._known = None

    def _learn(self, data: bytes) -> None:
        head, size = self.head, find_end(data)
        if head is not None and size and head.content_length == len(data) - size and head.coding is None:
            self._misses += 1
            known = learn(data, size)
            # without the body, which is put into the head on its way
            kept = ResponseHead(head.status, head.headers, head.keep_alive, head.content_length)
            self._known = None if known is None else (known, kept)

    def finish(self) -> bool:
        """The connection ended. True when that completes the message: neither length nor chunks framed it."""
        if self.head is not None and not self.ended and not self._framed:
            self.ended = True
            return True
        return False

    def close(self) -> None:
        """No more will be fed."""
        self._parser = None
        self._known = None

    # -- httptools calls these

    def on_message_begin(self) -> None:
        self._fields = []
        self._length = self._coding = None
        self._chunked = False
        if self.ended:
            self.spoiled = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is not None:  # a trailer: nothing here wants one
            return
        name = name.lower()
        if name == b"content-length":
            self._length = value
        elif name == b"transfer-encoding":
            if self._chunked or value.strip().lower() != b"chunked":
                raise BadResponse(f"the engine's answer is coded as {_show(value)}, which nobody asked for")
            self._chunked = True
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            self._coding = value
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser is None or self.ended:
            self.spoiled = True
            return
        status = parser.get_status_code()
        self._interim = 100 <= status < 200
        if self._interim:
            return
        if status < 100:
            raise BadResponse(f"the engine's answer is not well-formed HTTP: {status:03} is no status")
        if parser.get_http_version() not in ("1.1", "1.0"):
            raise BadResponse(f"the engine answered in HTTP/{parser.get_http_version()}")
        length = self._length
        head = self.head = ResponseHead(status, self._fields, parser.should_keep_alive())
        head.coding = self._coding
        if self._chunked:
            self._framed = True
        elif length is not None:
            self._framed = True
            head.content_length = int(length)
        if self._bodyless:
            # llhttp waits for the body that a HEAD's answer only announces
            self.ended = self.spoiled = True

    def on_body(self, body: bytes) -> None:
        if self.ended:
            return
        if self._body:
            self._parts.append(body)
        else:
            self._body = body

    def on_message_complete(self) -> None:
        if not self._interim:
            self.ended = True
