"""What is known of a request before anything has happened to it."""

from __future__ import annotations

from llmgw.door.http1 import RequestHead
from llmgw.door.request import Outcome, Request


def test_a_request_that_has_just_come_knows_its_beginning_and_nothing_else() -> None:
    head = RequestHead("GET", b"/v1/models?x=1", 1, {}, keep_alive=True, content_length=None, chunked=False)
    request = Request("req-1", head, "10.0.0.1", 7.0)
    assert (request.id, request.peer, request.path) == ("req-1", "10.0.0.1", "/v1/models")
    assert (request.began, request.ended, request.status) == (7.0, 7.0, 0)
    assert not request.opened
    known = (request.model, request.replica, request.usage, request.outcome, request.problem, request.first_byte_at)
    assert known == (None,) * 6


def test_outcomes_are_the_words_of_logs_and_metrics() -> None:
    assert [str(outcome) for outcome in (Outcome.DONE, Outcome.CLIENT_LEFT)] == ["done", "client_left"]
