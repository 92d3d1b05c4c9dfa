"""Heads that are known again: the same events as the parser's, whatever comes, in whatever pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.door.http1 import END, BadResponse, RequestEvent, RequestHead, RequestReader, ResponseReader
from llmgw.door.known import KnownHead, find_end, learn

HEAD = b"POST /v1/x HTTP/1.1\r\nhost: a\r\nContent-Length: %d\r\nx-id: 7\r\n\r\n"


def known(data: bytes) -> KnownHead:
    found = learn(data, find_end(data))
    assert found is not None
    return found


def test_a_head_is_known_again_with_another_length() -> None:
    head = known(HEAD % 5)
    again = HEAD % 12345
    assert head.match(again + b"body") == (12345, len(again))


@pytest.mark.parametrize(
    "other",
    [
        HEAD.replace(b"x-id: 7", b"x-id: 8") % 5,
        HEAD.replace(b"/v1/x", b"/v1/y") % 5,
        HEAD.replace(b"%d", b"+5"),
        HEAD.replace(b"%d", b"5 5"),
        HEAD.replace(b"%d", b"0x5"),
        HEAD.replace(b"%d", b""),
        HEAD.replace(b"%d", b"5" * 16),
        HEAD.replace(b"x-id: 7\r\n", b"x-id: 7\r\ntransfer-encoding: chunked\r\n") % 5,
        (HEAD % 5)[:-1],
        b"",
    ],
)
def test_a_head_that_differs_in_a_byte_is_not(other: bytes) -> None:
    assert known(HEAD % 5).match(other) is None


def test_a_head_without_a_length_is_not_learned() -> None:
    data = b"GET / HTTP/1.1\r\nhost: a\r\nx: content-length: 5\r\n\r\n"
    assert learn(data, find_end(data)) is None


def test_a_length_in_a_body_is_not_the_heads() -> None:
    data = b"GET / HTTP/1.1\r\nhost: a\r\n\r\nx\r\ncontent-length: 5\r\n\r\n"
    assert learn(data, find_end(data)) is None


def test_the_end_is_looked_for_only_behind_a_start() -> None:
    assert find_end(b"\r\n\r\nGET / HTTP/1.1\r\n\r\n") == 0
    assert find_end(b"GET / HTTP/1.1\r\n") == 0


REQUESTS = st.sampled_from(
    [
        HEAD,
        HEAD,
        HEAD,
        HEAD.replace(b"x-id: 7", b"connection: close"),
        HEAD.replace(b"x-id: 7", b"content-length: 5"),
        HEAD.replace(b"x-id: 7", b"transfer-encoding: chunked"),
        HEAD.replace(b"x-id: 7", b"upgrade: h2c\r\nconnection: upgrade"),
        HEAD.replace(b"POST", b"GET"),
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"\r\n" + HEAD,
        HEAD.replace(b"%d", b"1%d"),
        HEAD.replace(b"host: a\r\n", b""),
    ]
)


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """What a client sends, in reads of any size; most often a message a read."""
    reads: list[bytes] = []
    for _ in range(draw(st.integers(1, 8))):
        head = draw(REQUESTS)
        size = draw(st.sampled_from([0, 1, 2, 9, 10, 300]))
        message = head % size + b"b" * size if b"%d" in head else head
        cuts = sorted(draw(st.lists(st.integers(0, len(message)), max_size=2))) if draw(st.booleans()) else []
        reads += [message[a:b] for a, b in zip([0, *cuts], [*cuts, len(message)], strict=True) if b > a]
    if draw(st.booleans()):
        joined = draw(st.integers(0, max(len(reads) - 2, 0)))
        reads[joined : joined + 2] = [b"".join(reads[joined : joined + 2])]
    return reads


def flat(events: Iterator[RequestEvent]) -> list[object]:
    """Events with bodies as one, since how they are cut is nobody's business."""
    found: list[object] = []
    for event in events:
        if isinstance(event, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += event
        else:
            found.append(event)
    return found


@given(conversations())
def test_a_reader_that_remembers_reads_what_one_that_forgets_does(reads: list[bytes]) -> None:
    remembers, forgets = RequestReader(4096), RequestReader(4096)
    one: list[RequestEvent] = []
    two: list[RequestEvent] = []
    for data in reads:
        one += remembers.feed(data)
        forgets.forget()
        two += forgets.feed(data)
        assert remembers.in_head == forgets.in_head
    assert flat(iter(one)) == flat(iter(two))
    assert remembers.problem == forgets.problem


def test_the_parser_rests_while_heads_are_known() -> None:
    reader = RequestReader(4096)
    first = reader.feed(HEAD % 3 + b"abc")
    again = reader.feed(HEAD % 4 + b"abcd")
    assert isinstance(first[0], RequestHead)
    assert isinstance(again[0], RequestHead)
    assert again[0].headers == {**first[0].headers, b"content-length": b"4"}
    assert again[1:] == [b"abcd", END]
    assert reader.feed(HEAD % 3 + b"abc")[0] is first[0]


def test_a_closed_reader_reads_no_known_head() -> None:
    reader = RequestReader(4096)
    reader.feed(HEAD % 3 + b"abc")
    reader.feed(HEAD % 3 + b"a")
    reader.close()
    assert reader.feed(b"bc" + HEAD % 3 + b"abc") == []


ANSWER = b"HTTP/1.1 200 OK\r\ndate: x\r\ncontent-length: %d\r\n\r\n"
ANSWERS = st.sampled_from(
    [
        ANSWER,
        ANSWER,
        ANSWER,
        ANSWER.replace(b"date: x", b"date: y"),
        ANSWER.replace(b"200 OK", b"500 No"),
        b"HTTP/1.1 103 Early\r\n\r\n" + ANSWER,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        ANSWER.replace(b"date: x", b"content-length: 7"),
        ANSWER + b"too much",
        ANSWER.replace(b"date: x", b"connection: close"),
    ]
)


def read_answer(reader: ResponseReader, reads: list[bytes], *, bodyless: bool) -> object:
    reader.begin(bodyless=bodyless)
    body = b""
    try:
        for data in reads:
            body += reader.feed(data)
    except BadResponse as error:
        return str(error)
    return body, reader.head, reader.ended, reader.spoiled


@given(
    st.lists(
        st.tuples(ANSWERS, st.sampled_from([0, 1, 9, 10]), st.none() | st.integers(1, 90), st.integers(0, 9)),
        max_size=8,
    )
)
def test_an_answers_head_that_is_known_reads_the_same(answers: list[tuple[bytes, int, int | None, int]]) -> None:
    remembers, forgets = ResponseReader(), ResponseReader()
    for head, size, cut, bodyless in answers:
        message = head % size + b"b" * size if b"%d" in head else head
        reads = [message] if cut is None or cut >= len(message) else [message[:cut], message[cut:]]
        forgets.forget()
        one = read_answer(remembers, reads, bodyless=bodyless == 0)
        assert one == read_answer(forgets, reads, bodyless=bodyless == 0)
        if not remembers.ended or remembers.spoiled or not remembers.head or not remembers.head.keep_alive:
            return


def test_a_known_answer_is_a_head_of_its_own() -> None:
    reader = ResponseReader()
    reader.begin()
    reader.feed(ANSWER % 2 + b"ab")
    first = reader.head
    reader.begin()
    assert reader.feed(ANSWER % 3 + b"abc") == b"abc"
    assert reader.head is not None
    assert reader.head is not first
    assert (reader.head.content_length, reader.head.get(b"content-length")) == (3, b"3")
