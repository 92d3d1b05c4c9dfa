"""What an answer's head says of a file."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from llmgw.host.weights.errors import Broken, FetchFailed, Kind, NoRanges
from llmgw.host.weights.sources.answers import Answer, Marks, Target, check_answer, size_of

URL = httpx.URL("https://host/x.gguf?secret")
# More digits than Python makes a number of.
ENDLESS = "9" * 5000
TARGET = Target(url=URL, name="x.gguf", size_bytes=1000, marks=Marks(etag='"m"'))


def answer(status: int, said: dict[str, str] | None = None, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(response=httpx.Response(status, headers=named), url=URL, said=said or {})


@pytest.mark.parametrize(
    ("found", "size"),
    [
        (answer(206, content_range="bytes 0-0/1000", content_length="1"), 1000),
        (answer(206, content_range="bytes 0-0/*", content_length="1"), None),
        (answer(206, content_length="1"), None),
        (answer(200, content_length="1000"), 1000),
        (answer(200), None),
        (answer(200, content_length="70", content_encoding="gzip"), None),
        (answer(200, content_length="-3"), None),
        (answer(200, {"x-linked-size": "1000"}, content_length="3"), 1000),
        (answer(200, content_length=ENDLESS), None),
        (answer(206, content_range=f"bytes 0-0/{ENDLESS}", content_length="1"), None),
        (answer(206, content_range="bytes 0-0/" + "9" * 18, content_length="1"), 10**18 - 1),
        (answer(200, {"x-linked-size": ENDLESS}, content_length="3"), 3),
    ],
)
def test_how_long_a_file_is(found: Answer, size: int | None) -> None:
    assert size_of(found) == size


def test_what_tells_a_file_from_another() -> None:
    assert answer(200, {"x-linked-etag": '"l"'}, etag='"e"').marks.first == '"l"'
    assert answer(200, etag='"e"', last_modified="then").marks.first == '"e"'
    assert answer(200, last_modified="then").marks.first == "then"
    assert answer(200, etag="").marks.first is None


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        (Marks(etag="e", date="then"), Marks(etag="e", date="later"), True),
        (Marks(etag="e", date="then"), Marks(etag="f", date="then"), False),
        (Marks(etag="e", date="then"), Marks(date="then"), True),
        (Marks(etag="e", date="then"), Marks(date="later"), False),
        (Marks(linked="l", etag="e"), Marks(etag="e"), True),
        (Marks(etag="e"), Marks(date="then"), None),
        (Marks(etag="e"), Marks(), None),
        (Marks(), Marks(), None),
    ],
)
def test_an_etag_is_compared_with_an_etag_and_a_date_with_a_date(one: Marks, other: Marks, agree: bool | None) -> None:
    assert (one.agree(other), other.agree(one)) == (agree, agree)


def test_an_answer_that_leaves_out_what_its_like_have_said_may_be_asked_for_again() -> None:
    found = answer(206, content_range="bytes 100-199/1000")
    later = answer(206, content_range="bytes 100-199/1000", last_modified="then")
    for each in (found, later):
        with pytest.raises(Broken, match=r"does not say any more which x\.gguf it sends"):
            check_answer(each, replace(TARGET, status=206), 100, 200)
    # Some servers tell it only with a whole file, and some never.
    assert check_answer(found, replace(TARGET, status=200), 100, 200) == 0
    assert check_answer(found, replace(TARGET, status=206, marks=Marks()), 100, 200) == 0


@pytest.mark.parametrize(
    ("found", "skipped"),
    [
        (answer(206, content_range="bytes 100-199/1000", etag='"m"'), 0),
        (answer(206, content_range="bytes 100-199/*"), 0),
        (answer(206, content_range="bytes 100-150/1000"), 0),
        (answer(200, content_length="1000"), 100),
        (answer(200), 100),
        (answer(200, {"x-linked-size": ENDLESS}, content_length="01000"), 100),
    ],
)
def test_where_the_bytes_begin(found: Answer, skipped: int) -> None:
    assert check_answer(found, TARGET, 100, 200) == skipped


@pytest.mark.parametrize(
    "found",
    [
        answer(206, content_range="bytes 100-199/1001"),
        answer(206, content_range="bytes 100-199/1000", etag='"other"'),
        answer(200, content_length="999"),
        answer(416, content_range="bytes */50"),
        answer(206, {"x-linked-size": "999"}, content_range="bytes 100-199/1000"),
    ],
)
def test_another_file_is_found_out(found: Answer) -> None:
    with pytest.raises(FetchFailed) as raised:
        check_answer(found, TARGET, 100, 200)
    assert raised.value.kind is Kind.CHANGED
    assert "secret" not in raised.value.message


@pytest.mark.parametrize(
    "told",
    [
        "bytes 0-99/1000",
        "bytes 100-200/1000",
        "bytes x",
        "items 100-199/1000",
        f"bytes 100-199/{ENDLESS}",
        f"bytes 100-{ENDLESS}/1000",
    ],
)
def test_other_bytes_are_no_answer(told: str) -> None:
    with pytest.raises(Broken):
        check_answer(answer(206, content_range=told), TARGET, 100, 200)


def test_a_large_start_is_not_read_up_to() -> None:
    large = Target(url=URL, name="x.gguf", size_bytes=10**7)
    with pytest.raises(NoRanges):
        check_answer(answer(200, content_length=str(10**7)), large, 10**6, 10**7)
