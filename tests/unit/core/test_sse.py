from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.core.sse import EventReader, data_of, events, last_boundary

# Everything that can meet at a boundary, so that hypothesis finds the odd neighbours soon.
STREAMS = st.lists(
    st.sampled_from([b"data: a", b"data:b", b":c", b"event: x", b"\n", b"\r\n", b"\n\n", b"\r\n\r\n", b"\r", b"id: 1"])
).map(b"".join)


def read(*packets: bytes) -> list[bytes]:
    reader = EventReader()
    found = [event for packet in packets for event in reader.feed(packet)]
    return found + reader.end()


def test_events_are_cut_at_blank_lines() -> None:
    assert read(b"data: 1\n\ndata: 2\n\n") == [b"data: 1", b"data: 2"]


def test_events_with_carriage_returns_are_cut_too() -> None:
    assert read(b"data: 1\r\n\r\nevent: x\r\ndata: 2\r\n\r\n") == [b"data: 1", b"event: x\r\ndata: 2"]


def test_an_event_comes_out_as_soon_as_its_blank_line_is_there() -> None:
    reader = EventReader()
    assert reader.feed(b"data: 1\r\n\r") == []
    assert reader.feed(b"\n") == [b"data: 1"]
    assert reader.feed(b"data: 2\n") == []
    assert reader.feed(b"\ndata: 3\n\ndata") == [b"data: 2", b"data: 3"]
    assert reader.end() == [b"data"]
    assert reader.end() == []


def test_a_stream_that_ends_without_a_blank_line_still_gives_its_last_event() -> None:
    assert read(b"data: 1\n\ndata: 2\n") == [b"data: 1", b"data: 2"]
    assert read(b"data: 1\n\ndata: 2") == [b"data: 1", b"data: 2"]


def test_comments_and_blank_lines_are_no_events() -> None:
    assert read(b"\n\n: keep-alive\n\n:\n: two\n\n\n\ndata: 1\n\n\r\n: bye") == [b"data: 1"]


def test_a_comment_within_an_event_stays_with_it() -> None:
    assert read(b": note\ndata: 1\n\n") == [b": note\ndata: 1"]
    assert data_of(b": note\ndata: 1") == b"1"


def test_a_long_event_in_single_bytes_is_whole() -> None:
    event = b"data: " + b"x" * 5_000
    stream = event + b"\n\n"
    assert read(*(stream[at : at + 1] for at in range(len(stream)))) == [event]


@given(STREAMS, st.lists(st.integers(min_value=0, max_value=80)))
@example(b"data: a\n\r\n\ndata:b", [8, 9, 10, 11])
def test_any_split_gives_the_same_events(stream: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    packets = [stream[start:end] for start, end in pairwise(edges)]
    assert read(*packets) == read(stream)


@given(STREAMS)
def test_spans_lie_side_by_side_up_to_the_last_boundary(stream: bytes) -> None:
    spans = events(stream)
    assert [start for start, _ in spans] == [0, *(end for _, end in spans)][: len(spans)]
    assert last_boundary(stream) == (spans[-1][1] if spans else 0)
    assert all(last_boundary(stream[start:end]) == end - start for start, end in spans)


@given(STREAMS)
def test_after_the_last_boundary_no_event_is_complete(stream: bytes) -> None:
    assert last_boundary(stream[last_boundary(stream) :]) == 0


@given(STREAMS.filter(lambda stream: b"\r\r" not in stream))
def test_spans_and_reader_agree(stream: bytes) -> None:
    # Of two carriage returns at the end of a line the reader takes the second for the line's end, and so does data_of.
    reader = EventReader()
    whole = b"".join(data_of(event) for event in reader.feed(stream))
    assert whole == b"".join(data_of(stream[start:end]) for start, end in events(stream))


@pytest.mark.parametrize(
    ("stream", "index"),
    [
        (b"", 0),
        (b"data: 1", 0),
        (b"data: 1\n", 0),
        (b"data: 1\n\n", 9),
        (b"data: 1\n\ndata", 9),
        (b"data: 1\r\n\r\ndata", 11),
        (b"data: 1\n\r\ndata", 10),
        (b"a\n\nb\r\n\r\nc", 8),
        (b"a\r\n\r\nb\n\nc", 8),
        (bytearray(b"data: 1\n\nx"), 9),
    ],
)
def test_the_last_boundary_is_just_after_the_last_blank_line(stream: bytes, index: int) -> None:
    assert last_boundary(stream) == index


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: 1\n\n", b"1"),
        (b"data:1", b"1"),
        (b"data:  1", b" 1"),
        (b"data", b""),
        (b"data: a: b\r\n\r\n", b"a: b"),
        (b"event: x\ndata: 1\ndata: 2\n\n", b"1\n2"),
        (b"database: 1\n\n", b""),
        (b": comment\n\n", b""),
        (bytearray(b"data: 1\n\n"), b"1"),
    ],
)
def test_the_data_of_an_event(event: bytes, data: bytes) -> None:
    assert data_of(event) == data
