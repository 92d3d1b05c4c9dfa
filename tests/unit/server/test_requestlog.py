"""One line per request, in batches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from llmgw.dialects.openai import Usage
from llmgw.door.http1 import RequestHead
from llmgw.door.request import Outcome, Request
from llmgw.server.requestlog import MAX_WAITING, MAX_WHOLE, PAUSE_SECONDS, RequestLog, format_request


def a_request(target: bytes = b"/v1/models?x=1", **facts: Any) -> Request:
    head = RequestHead("GET", target, 1, {}, keep_alive=True, content_length=None, chunked=False)
    request = Request("req-1", head, "1.2.3.4", 10.0)
    for name, value in facts.items():
        setattr(request, name, value)
    return request


def test_a_line_says_who_what_and_how_it_ended() -> None:
    line = format_request(
        0.0,
        a_request(
            ended=12.3456,
            first_byte_at=10.5,
            status=200,
            outcome=Outcome.DONE,
            model="tiny",
            replica="rep-tiny-1",
            usage=Usage(prompt_tokens=3, completion_tokens=4),
        ),
    )
    time_of_day, rest = line.split(" ", 1)
    assert len(time_of_day.split(":")) == 3
    assert rest == (
        "req-1 1.2.3.4 GET /v1/models 200 done 2.346s first=0.500s model=tiny replica=rep-tiny-1 tokens=3+4\n"
    )


def test_what_is_not_known_is_left_out() -> None:
    assert format_request(0.0, a_request(ended=10.0)).endswith("req-1 1.2.3.4 GET /v1/models - - 0.000s\n")


@pytest.mark.parametrize("field", ["path", "model", "problem"])
def test_no_line_is_a_clients_to_make(field: str) -> None:
    request = a_request(**{field: "x\n12:00:00 req-2 forged\x1b[31m\u2028"})
    line = format_request(0.0, request)
    assert line.count("\n") == 1
    assert line.isprintable() or line[:-1].isprintable()
    assert "\\n" in line


def test_long_words_of_others_are_cut() -> None:
    assert len(format_request(0.0, a_request(path="/" + "x" * 5000, problem="y" * 5000))) < 1000


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(30):
        while not condition():  # noqa: ASYNC110 - it comes true in a thread
            await trio.sleep(0.01)


@pytest.mark.slow
async def test_lines_are_written_in_batches() -> None:
    written: list[str] = []
    log = RequestLog(written.append, wall=lambda: 0.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.serve)
        for _ in range(3):
            log.add(a_request())
        await until(lambda: written)
        assert [batch.count("\n") for batch in written] == [3]
        log.add(a_request())
        nursery.cancel_scope.cancel()
    assert [batch.count("\n") for batch in written] == [3, 1]


def test_a_log_that_is_too_slow_loses_lines_and_says_how_many() -> None:
    log = RequestLog(lambda text: None, wall=lambda: 0.0)
    request = a_request()
    for _ in range(MAX_WHOLE + MAX_WAITING + 5):
        log.add(request)
    lines = log.take().splitlines()
    assert len(lines) == MAX_WHOLE + MAX_WAITING + 1
    assert lines[-1].startswith("5 requests are missing")
    assert log.take() == ""


@pytest.mark.slow
async def test_a_log_that_nobody_reads_any_more_stops_nothing() -> None:
    written: list[str] = []
    tries = 0
    broken = True

    def write(text: str) -> None:
        nonlocal tries
        tries += 1
        if broken:
            raise BrokenPipeError("nobody reads")
        written.append(text)

    log = RequestLog(write, wall=lambda: 0.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.serve)
        log.add(a_request())
        await until(lambda: tries)
        broken = False
        log.add(a_request())
        await until(lambda: written)
        nursery.cancel_scope.cancel()
    assert "1 requests are missing" in "".join(written)


async def test_a_log_that_blocks_does_not_hold_the_end(autojump_clock: trio.testing.MockClock) -> None:
    release = threading.Event()
    log = RequestLog(lambda text: release.wait(60), wall=lambda: 0.0)
    try:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(log.serve)
                log.add(a_request())
                await trio.sleep(PAUSE_SECONDS * 2)
                log.add(a_request())
                nursery.cancel_scope.cancel()
    finally:
        release.set()
