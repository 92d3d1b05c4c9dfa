"""HTTP as values: any split of the bytes gives the same events, and what smuggling needs is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.door.http1 import (
    END,
    MAX_FIELDS,
    MAX_RESPONSE_HEAD,
    BadResponse,
    Problem,
    RequestEvent,
    RequestHead,
    RequestReader,
    ResponseHead,
    ResponseReader,
)

MAX_HEAD = 64 * 1024
HOST = b"Host: a\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


def read(*pieces: bytes, max_head: int = MAX_HEAD) -> list[RequestEvent]:
    reader = RequestReader(max_head)
    return [event for piece in pieces for event in reader.feed(piece)]


def joined(events: list[RequestEvent]) -> list[RequestEvent]:
    """The same, with pieces of one body put together."""
    found: list[RequestEvent] = []
    for event in events:
        if isinstance(event, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += event
        else:
            found.append(event)
    return found


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def problem(data: bytes) -> Problem:
    events = read(data)
    assert isinstance(events[-1], Problem)
    return events[-1]


REQUESTS = (
    b"GET /v1/models?x=1 HTTP/1.1\r\n" + HOST + b"A: 1\r\na: 2\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 11\r\n\r\nhello world",
    b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n1\r\n!\r\n0\r\nX: y\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + HOST + UPGRADE + b"\r\n",
    b"POST / HTTP/1.1\r\n" + HOST + UPGRADE + b"Content-Length: 5\r\n\r\nhello",
    b"POST / HTTP/1.1\r\n" + HOST + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HEAD / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"\r\nOPTIONS * HTTP/1.1\r\n" + HOST + b"Cookie: a=1\r\nCookie: b=2\r\n\r\n",
)


@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=4), st.lists(st.integers(0, 2000), max_size=30))
def test_any_split_of_requests_gives_the_same_events(requests: list[bytes], cuts: list[int]) -> None:
    data = b"".join(requests)
    whole = joined(read(data))
    assert [event for event in whole if isinstance(event, Problem)] == []
    assert whole.count(END) == len(requests)
    assert joined(read(*split(data, cuts))) == whole


@given(st.binary(max_size=300))
def test_garbage_gives_events_or_one_problem_and_never_raises(data: bytes) -> None:
    problems = [event for event in read(data, b"\r\n\r\n") if isinstance(event, Problem)]
    assert len(problems) <= 1


def test_a_head_says_what_the_door_needs() -> None:
    head, end = read(b"GET /v1/models/a%2Fb?x=1 HTTP/1.1\r\nHost: a\r\nAccept: x\r\nACCEPT: y\r\n\r\n")
    assert isinstance(head, RequestHead)
    assert (head.method, head.path, head.minor, head.keep_alive) == ("GET", "/v1/models/a%2Fb", 1, True)
    assert head.headers == {b"host": b"a", b"accept": b"x, y"}
    assert not head.has_body
    assert end is END


def test_cookies_that_came_in_two_fields_stay_two_cookies() -> None:
    head = read(b"GET / HTTP/1.1\r\nHost: a\r\nCookie: a=1\r\nCookie: b=2\r\n\r\n")[0]
    assert isinstance(head, RequestHead)
    assert head.headers[b"cookie"] == b"a=1; b=2"


@pytest.mark.parametrize(
    ("target", "path"),
    [(b"/a?b", "/a"), (b"http://x/a/b?c", "/a/b"), (b"http://x", "/"), (b"*", "*")],
)
def test_the_path_is_the_targets_own(target: bytes, path: str) -> None:
    head = read(b"OPTIONS " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")[0]
    assert isinstance(head, RequestHead)
    assert head.path == path


@pytest.mark.parametrize(
    ("target", "form", "authority"),
    [
        (b"/p?q=http://x/", b"/p?q=http://x/", b"a"),
        (b"http://h:1/p?q", b"/p?q", b"h:1"),
        (b"http://h?q", b"/?q", b"h"),
        (b"http://h?q=/p", b"/?q=/p", b"h"),
        (b"http://[::1/", b"/", b"[::1"),
        (b"http://u@h/p", b"/p", b"u@h"),
        (b"http://h", b"/", b"h"),
        (b"http:///p", b"/p", b"a"),
        (b"*", b"*", b"a"),
    ],
)
def test_an_absolute_target_has_a_form_for_the_server_and_a_name_that_goes_before_the_host(
    target: bytes, form: bytes, authority: bytes
) -> None:
    head = read(b"OPTIONS " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")[0]
    assert isinstance(head, RequestHead)
    assert (head.origin_form, head.authority) == (form, authority)


def test_old_clients_close_unless_they_ask_to_stay() -> None:
    heads = [
        read(b"GET / HTTP/1.0\r\n\r\n")[0],
        read(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")[0],
        read(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")[0],
    ]
    assert [(head.minor, head.keep_alive) for head in heads if isinstance(head, RequestHead)] == [
        (0, False),
        (0, True),
        (1, False),
    ]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("length and chunks", b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("chunks and length", b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n"),
        ("two lengths", b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
        ("the same length twice", b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
        ("lengths in a list", b"Content-Length: 3, 3\r\n\r\nabc"),
        ("a plus", b"Content-Length: +4\r\n\r\nabcd"),
        ("a minus", b"Content-Length: -1\r\n\r\nabcd"),
        ("hexadecimal", b"Content-Length: 0x4\r\n\r\nabcd"),
        ("no number", b"Content-Length: \r\n\r\nabcd"),
        ("a number too great", b"Content-Length: 99999999999999999999999\r\n\r\nabcd"),
        ("space before the colon", b"Content-Length : 4\r\n\r\nabcd"),
        ("space in a name", b"A B: c\r\n\r\n"),
        ("no name", b": c\r\n\r\n"),
        ("a bare line feed", b"X: y\nZ: z\r\n\r\n"),
        ("a bare carriage return", b"X: y\rz\r\n\r\n"),
        ("a folded line", b"X: y\r\n z\r\n\r\n"),
        ("a NUL", b"X: y\0z\r\n\r\n"),
        ("chunked twice", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("a chunk size with more", b"Transfer-Encoding: chunked\r\n\r\n5x\r\nabcde\r\n0\r\n\r\n"),
        ("a negative chunk", b"Transfer-Encoding: chunked\r\n\r\n-1\r\na\r\n0\r\n\r\n"),
        ("a hexadecimal prefix", b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nabcde\r\n0\r\n\r\n"),
        ("a chunk size too great", b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\na\r\n"),
        ("a chunk line that ends in LF", b"Transfer-Encoding: chunked\r\n\r\n5\nabcde\r\n0\r\n\r\n"),
        ("a chunk that is longer than it says", b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcdeXX\r\n0\r\n\r\n"),
    ],
)
def test_what_smuggling_needs_is_refused(name: str, lines: bytes) -> None:
    found = problem(b"POST / HTTP/1.1\r\n" + HOST + lines)
    assert (found.status, found.code) == (400, "invalid_http")


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (400, b"GET / HTTP/1.1\nHost: a\n\n"),
        (400, b"GET / HTTP/1.1\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n"),
        (400, b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"get / HTTP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"NONSENSE / HTTP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"GET /health RTSP/1.0\r\n\r\n"),
        (400, b"GET /health RTSP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"OPTIONS * RTSP/1.0\r\n\r\n"),
        (400, b"SOURCE / ICE/1.0\r\n\r\n"),
        (400, b"GET / FTP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"GET / http/1.1\r\nHost: a\r\n\r\n"),
        (400, b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n"),
        (505, b"GET / HTTP/1.2\r\nHost: a\r\n\r\n"),
        (505, b"GET / HTTP/3.0\r\nHost: a\r\n\r\n"),
        (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        (501, b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        (501, b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n"),
        (501, b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        (501, b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n"),
        (505, b"GET / HTTP/2.0\r\nHost: a\r\n\r\n"),
        (505, b"GET /\r\n\r\n"),
    ],
)
def test_what_is_no_request_of_ours_is_refused(status: int, data: bytes) -> None:
    assert problem(data).status == status
    # also behind another one, and in pieces
    first = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
    whole = first + data
    for at in range(len(first), len(whole)):
        events = read(whole[:at], whole[at:])
        assert events[1:3] == [b"abc", END]
        assert isinstance(events[3], Problem)
        assert events[3].status == status


@pytest.mark.parametrize("together", [True, False])
def test_a_relative_of_http_does_not_pass_for_the_request_before_it(together: bool) -> None:
    good = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    odd = good.replace(b"HTTP", b"RTSP")
    events = read(good + odd) if together else read(good, odd)
    assert events[1] is END
    assert isinstance(events[2], Problem)


def test_a_line_of_another_protocol_in_a_body_is_nobodys_business() -> None:
    body = b"GET / RTSP/1.0\r\n\r\n"
    events = read(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert events[1:] == [body, END]


def test_a_refused_head_is_no_request() -> None:
    # the door would begin to serve it
    assert [type(event) for event in read(b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n")] == [Problem]


def test_after_a_problem_nothing_more_comes_out() -> None:
    reader = RequestReader(MAX_HEAD)
    assert isinstance(reader.feed(b"\n\0\n")[-1], Problem)
    assert reader.problem is not None
    assert reader.feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") == []


def test_what_follows_the_last_request_of_a_connection_is_a_problem() -> None:
    data = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"
    assert [type(event) for event in read(data)][2:] == [Problem]


# -- limits


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"x" * 3000,
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 3000,
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X" * 3000,
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X%d: y\r\n" % number for number in range(200)),
        b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
@pytest.mark.parametrize("piece", [1, 100, 100_000])
def test_a_head_that_is_too_large_is_refused_before_it_is_complete(data: bytes, piece: int) -> None:
    events = read(*(data[at : at + piece] for at in range(0, len(data), piece)), max_head=1024)
    assert [type(event) for event in events] == [Problem]
    assert isinstance(events[0], Problem)
    assert events[0].status == 431


def test_a_large_body_behind_a_small_head_is_no_large_head() -> None:
    data = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n\r\n" + b"x" * 9000
    assert [type(event) for event in read(data, max_head=1024)] == [RequestHead, bytes, type(END)]


def test_too_many_fields_are_refused() -> None:
    different = b"".join(b"X%d: y\r\n" % number for number in range(MAX_FIELDS))
    same = b"X: y\r\n" * (MAX_FIELDS + 2)
    for lines in (different, same):
        found = problem(b"GET / HTTP/1.1\r\nHost: a\r\n" + lines + b"\r\n")
        assert (found.status, found.code) == (431, "headers_too_large")
    few = b"X: y\r\n" * 50
    assert read(b"GET / HTTP/1.1\r\nHost: a\r\n" + few + b"\r\n")[-1] is END


@pytest.mark.parametrize(
    "tail",
    [b"0\r\nX: " + b"y" * 5000, b"0\r\n" + b"X: y\r\n" * 900, b"5;" + b"x" * 5000],
    ids=["a trailer's value", "many trailers", "a chunk's extension"],
)
def test_what_grows_after_a_body_without_end_is_refused(tail: bytes) -> None:
    reader = RequestReader(1024)
    reader.feed(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
    events = [event for at in range(0, len(tail), 100) for event in reader.feed(tail[at : at + 100])]
    assert [event.status for event in events if isinstance(event, Problem)] == [431]


def test_a_long_trailer_of_an_ordinary_size_is_passed_over() -> None:
    data = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nHost: b\r\nX: y\r\n\r\n"
    head, body, end = read(data)
    assert isinstance(head, RequestHead)
    assert b"x" not in head.headers
    assert (body, end) == (b"a", END)


@pytest.mark.parametrize("upgrade", [b"", b"Connection: upgrade\r\nUpgrade: h2c\r\n"])
@pytest.mark.parametrize("trailer", [b"Host: a\r\n", b"Host: a\r\nHost: b\r\n", b"X: 1\r\n" * 300])
def test_a_trailer_is_not_judged_as_a_head(upgrade: bytes, trailer: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n" + upgrade + b"\r\n"
    events = read(head + b"1\r\nx\r\n0\r\n" + trailer + b"\r\n" + head + b"0\r\n\r\n", max_head=10_000)
    assert [type(event) for event in events] == [RequestHead, bytes, type(END), RequestHead, type(END)]


def test_small_chunks_that_come_together_are_one_piece() -> None:
    chunks = b"2\r\nab\r\n" * 5000
    events = read(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert events[1:] == [b"ab" * 5000, END]


def test_a_head_has_begun_with_its_first_byte_and_not_with_a_blank_line() -> None:
    reader = RequestReader(MAX_HEAD)
    reader.feed(b"\r\n")
    assert not reader.in_head
    reader.feed(b"G")
    assert reader.in_head
    reader.feed(b"ET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert not reader.in_head


# -- upgrades


def test_an_upgrade_is_answered_as_plain_http() -> None:
    head, end = read(b"GET / HTTP/1.1\r\n" + HOST + UPGRADE + b"\r\n")
    assert isinstance(head, RequestHead)
    assert head.headers[b"upgrade"] == b"h2c"
    assert head.keep_alive
    assert end is END


def test_the_body_of_an_upgrade_is_read_and_so_is_the_request_behind_it() -> None:
    upgrade = b"POST / HTTP/1.1\r\n" + HOST + UPGRADE + b"Content-Length: 5\r\n\r\nhello"
    events = read(upgrade + b"GET /next HTTP/1.1\r\n" + HOST + b"\r\n")
    assert events[1:3] == [b"hello", END]
    assert isinstance(events[3], RequestHead)
    assert events[3].target == b"/next"


def test_as_many_upgrades_as_fit_into_a_read_are_read() -> None:
    request = b"GET / HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: x\r\n\r\n"
    assert read(request * 900).count(END) == 900


def test_garbage_behind_an_upgrade_is_a_problem() -> None:
    events = read(b"GET / HTTP/1.1\r\n" + HOST + UPGRADE + b"\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert [type(event) for event in events] == [RequestHead, type(END), Problem]


# -- responses


class Heard:
    """What a response came to."""

    def __init__(self, *pieces: bytes, bodyless: bool = False, closes: bool = False) -> None:
        self.reader = ResponseReader()
        self.reader.begin(bodyless=bodyless)
        self.body = b"".join(self.reader.feed(piece) for piece in pieces)
        self.closed_well = self.reader.finish() if closes else None

    @property
    def head(self) -> ResponseHead:
        assert self.reader.head is not None
        return self.reader.head


RESPONSES = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\nHTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n2;a=b\r\nhe\r\n003\r\nllo\r\n0\r\nX-Trailer: y\r\n\r\n",
)


@given(st.sampled_from(RESPONSES), st.lists(st.integers(0, 300), max_size=20))
def test_any_split_of_a_response_gives_the_same(data: bytes, cuts: list[int]) -> None:
    heard = Heard(*split(data, cuts))
    assert (heard.head.status, heard.body, heard.reader.ended) == (200, b"hello", True)
    assert heard.head.keep_alive
    assert not heard.reader.spoiled
    assert b"x-trailer" not in dict(heard.head.headers)
    assert b"link" not in dict(heard.head.headers)


@pytest.mark.parametrize("status", [204, 304])
def test_some_answers_have_no_body(status: int) -> None:
    heard = Heard(b"HTTP/1.1 %d X\r\n\r\n" % status)
    assert heard.reader.ended
    assert heard.head.keep_alive


def test_the_answer_to_head_ends_with_its_head() -> None:
    heard = Heard(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", bodyless=True)
    assert heard.reader.ended
    assert heard.head.content_length == 10
    # llhttp still waits for a body: the connection is not used again
    assert heard.reader.spoiled


def test_a_body_may_end_with_its_connection() -> None:
    heard = Heard(b"HTTP/1.0 200 OK\r\n\r\nabc", closes=True)
    assert heard.body == b"abc"
    assert heard.closed_well
    assert not heard.head.keep_alive


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
def test_a_framed_body_is_not_ended_by_its_connection(data: bytes) -> None:
    assert Heard(data, closes=True).closed_well is False


@pytest.mark.parametrize(
    "lines",
    [
        b"Transfer-Encoding: gzip\r\n\r\nabc",
        b"Transfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_a_body_in_a_transfer_coding_that_is_not_undone_is_bad(lines: bytes) -> None:
    with pytest.raises(BadResponse):
        Heard(b"HTTP/1.1 200 OK\r\n" + lines)


@pytest.mark.parametrize("line", [b"HTTP/2.0 200 OK", b"HTTP/0.9 200 OK", b"HTTP/1.2 200 OK", b"RTSP/1.0 200 OK"])
def test_an_answer_in_another_version_or_protocol_is_bad(line: bytes) -> None:
    data = line + b"\r\nContent-Length: 0\r\n\r\n"
    for at in (1, 3, len(data)):
        with pytest.raises(BadResponse):
            Heard(data[:at], data[at:])


@pytest.mark.parametrize("status", [b"000", b"099"])
def test_a_status_that_is_none_is_named(status: bytes) -> None:
    with pytest.raises(BadResponse, match=status.decode()):
        Heard(b"HTTP/1.1 " + status + b" Odd\r\n\r\n")


def test_a_content_coding_is_told_and_such_a_head_is_not_known_again() -> None:
    reader = ResponseReader()
    for length in (2, 3):
        reader.begin()
        body = b"x" * length
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % length
        assert reader.feed(head + body) == body
        assert reader.head is not None
        assert reader.head.coding == b"gzip"
    reader.begin()
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Length: 0\r\n\r\n")
    assert reader.head is not None
    assert reader.head.coding is None


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
        b"HTTP/1.1 101 Switching\r\n\r\nabc",
        b"HTTP/1.1 200 OK\nContent-Length: 1\n\na",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\na",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 099 Odd\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
    ],
)
def test_what_is_no_answer_is_bad(data: bytes) -> None:
    with pytest.raises(BadResponse):
        Heard(data)


def test_bytes_behind_an_answer_spoil_the_connection_and_not_the_answer() -> None:
    for extra in (b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb"):
        heard = Heard(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na" + extra)
        assert heard.body == b"a"
        assert heard.reader.ended
        assert heard.reader.spoiled


def test_a_field_that_came_twice_stands_there_twice() -> None:
    heard = Heard(b"HTTP/1.1 200 OK\r\nSet-Cookie: a\r\nSet-Cookie: b\r\nContent-Length: 0\r\n\r\n")
    assert [value for name, value in heard.head.headers if name == b"set-cookie"] == [b"a", b"b"]
    assert heard.head.get(b"set-cookie") == b"b"
    assert heard.head.get(b"etag") is None


def test_a_head_without_end_is_bad() -> None:
    reader = ResponseReader()
    reader.begin()
    reader.feed(b"HTTP/1.1 200 OK\r\nX: ")
    for _ in range(MAX_RESPONSE_HEAD // 65536):
        reader.feed(b"y" * 65536)
    with pytest.raises(BadResponse, match="larger than"):
        reader.feed(b"y")


def test_one_connection_carries_answer_after_answer() -> None:
    reader = ResponseReader()
    for body in (b"one", b"two"):
        reader.begin()
        assert reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n" + body) == body
        assert reader.ended
        assert not reader.spoiled
