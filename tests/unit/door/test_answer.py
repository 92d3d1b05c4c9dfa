"""One request to an engine that does as it likes: failures, times, and a client that does not keep up."""

from __future__ import annotations

from typing import Any

import pytest

from llmgw.config.node import Timeouts
from llmgw.door.answer import EARLY_BYTES
from llmgw.door.exchange import Route
from llmgw.door.request import Outcome

EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
ROUTES = [Route("rep-1", ("10.0.0.1", 1), "tiny"), Route("rep-2", ("10.0.0.2", 1), "tiny")]


# -- failures and other replicas


def test_an_engine_that_cannot_be_reached_is_left_for_another(world: Any) -> None:
    world.gateway.routes = ROUTES
    world.dialling[("10.0.0.1", 1)] = "connecting to 10.0.0.1:1: ECONNREFUSED"
    far = world.ask()
    world.whole(b"{}")
    assert world.dialled == [("10.0.0.1", 1), ("10.0.0.2", 1)]
    assert world.body_of(far) == b"{}"
    assert world.last.replica == "rep-2"


def test_no_descriptor_left_is_a_502_that_says_so(world: Any) -> None:
    world.dialling[("10.0.0.9", 1)] = OSError(24, "Too many open files")
    far = world.ask()
    (answer,) = world.answers(far.got)
    assert answer.status == 502
    assert b"Too many open files" in answer.body
    world.wait(20)
    assert world.gateway.released == ["rep-1"]


def test_an_engine_that_does_not_accept_in_time_is_left_for_another(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(connect=5))
    world.gateway.routes = ROUTES
    world.dialling[("10.0.0.1", 1)] = "hang"
    far = world.ask()
    world.wait(4)
    assert len(world.dialled) == 1
    world.wait(3)
    assert len(world.dialled) == 2
    world.whole(b"{}")
    assert world.body_of(far) == b"{}"


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200 OK\r\nContent-Ty", b"garbage\r\n\r\n", b"HTTP/1.1 101 Switching\r\n\r\n"]
)
def test_an_engine_that_breaks_before_its_head_is_left_for_another(world: Any, said: bytes) -> None:
    world.gateway.routes = ROUTES
    far = world.ask()
    if said:
        world.engine.say(said)
    world.engine.transport.close()
    world.turn()
    assert len(world.engines) == 2
    world.whole(b"{}")
    assert world.body_of(far) == b"{}"


def test_when_every_engine_breaks_the_client_hears_of_it_once(world: Any) -> None:
    world.gateway.routes = ROUTES
    far = world.ask()
    for engine in (0, 1):
        world.engines[engine].transport.reset()
        world.turn()
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (502, "engine_failed")
    assert world.last.outcome is Outcome.ENGINE_FAILED
    assert world.gateway.released == ["rep-1", "rep-2"]
    assert not far.over


def test_a_stream_that_breaks_ends_in_an_error_event(world: Any) -> None:
    world.gateway.routes = ROUTES
    far = world.ask(stream=True)
    world.opens()
    world.sends(EVENT + b'data: {"half')
    world.engine.transport.close()
    world.turn()
    assert world.error_at_end(far) == "stream_broken"
    assert world.body_of(far).startswith(EVENT + b'data: {"error"')
    assert len(world.engines) == 1
    assert world.last.outcome is Outcome.ENGINE_FAILED


def test_a_stream_that_ends_without_its_last_word_ends_in_an_error_event(world: Any) -> None:
    far = world.ask(stream=True)
    world.opens()
    world.sends(EVENT, ends=True)
    assert world.error_at_end(far) == "stream_broken"


def test_a_stream_that_breaks_right_after_its_head_ends_in_an_error_event(world: Any) -> None:
    far = world.ask(stream=True)
    world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
    world.engine.transport.close()
    world.turn()
    (answer,) = world.answers(far.got)
    assert answer.status in (200, 502)
    assert b"error" in answer.body
    assert len(world.gateway.settled) == 1


def test_inside_an_event_too_large_to_be_held_the_connection_is_cut(world: Any) -> None:
    far = world.ask(stream=True)
    world.opens()
    world.sends(b'data: {"x":"' + b"y" * 200_000)
    world.engine.transport.close()
    world.turn()
    (answer,) = world.answers(far.got)
    assert not answer.complete
    assert b"error" not in answer.body
    assert far.over


def test_a_whole_reply_that_breaks_is_cut(world: Any) -> None:
    far = world.ask()
    world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    world.turn()
    world.engine.transport.close()
    world.turn()
    (answer,) = world.answers(far.got)
    assert (answer.body, answer.complete) == (b"half", False)
    assert far.over
    assert world.last.outcome is Outcome.ENGINE_FAILED
    assert world.door.clients == set()


def test_an_engines_error_that_breaks_off_is_told_as_far_as_it_came(world: Any) -> None:
    far = world.ask()
    world.engine.say(b'HTTP/1.1 400 X\r\nContent-Length: 100\r\n\r\n{"error":"no"}')
    world.turn()
    world.engine.transport.close()
    world.turn()
    (answer,) = world.answers(far.got)
    assert answer.status == 400
    assert b'"no"' in answer.body


# -- time


def test_a_whole_reply_has_its_time_and_nobody_else_is_asked(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(generation=100))
    world.gateway.routes = ROUTES
    far = world.ask()
    world.wait(99)
    assert far.got == b""
    world.wait(2)
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (504, "engine_timeout")
    assert world.engine.over
    assert world.last.outcome is Outcome.TIMED_OUT
    assert len(world.engines) == 1


def test_a_whole_reply_that_drips_has_its_time_too(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(generation=100, idle=30))
    far = world.ask()
    world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(120):
        world.engine.say(b"x")
        world.wait(1)
    (answer,) = world.answers(far.got)
    assert not answer.complete
    assert 99 <= len(answer.body) <= 102
    assert far.over
    assert world.last.outcome is Outcome.TIMED_OUT
    assert "timeouts.generation" in world.last.problem


def test_a_whole_reply_without_a_limit_may_take_for_ever(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(generation=0))
    far = world.ask()
    world.wait(5000)
    assert far.got == b""
    world.whole(b"{}")
    assert world.body_of(far) == b"{}"


def test_a_whole_reply_that_stops_is_cut_after_the_idle_time(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(generation=0, idle=30))
    far = world.ask()
    world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx")
    world.turn()
    world.wait(29)
    assert not far.over
    world.wait(2)
    assert far.over
    assert "timeouts.idle" in world.last.problem


def test_an_engines_error_that_stops_is_told_after_the_idle_time(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(idle=30))
    far = world.ask()
    world.engine.say(b'HTTP/1.1 400 X\r\nContent-Length: 100\r\n\r\n{"error":"no"}')
    world.turn()
    world.wait(32)
    assert world.answers(far.got)[0].status == 400
    assert world.engine.over


def test_a_silent_stream_is_opened_and_kept_alive_and_then_told_to_have_failed(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(response_header=100, stream_open_after=30, keep_alive_comment=15))
    far = world.ask(stream=True)
    world.wait(29)
    assert far.got == b""
    world.wait(2)
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.body) == (200, b": keep-alive\n\n")
    assert answer.headers["content-type"] == "text/event-stream"
    world.wait(60)
    assert world.body_of(far).count(b": keep-alive\n\n") >= 4
    world.wait(20)
    assert world.error_at_end(far) == "engine_timeout"
    assert world.last.outcome is Outcome.TIMED_OUT
    assert world.engine.over
    # an error event is the last word of a connection
    assert far.over


def test_a_silent_stream_that_was_opened_goes_on_when_the_engine_answers(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(response_header=100, stream_open_after=10))
    far = world.ask(stream=True)
    world.wait(12)
    world.opens()
    world.sends(EVENT)
    world.sends(DONE, ends=True)
    assert world.body_of(far) == b": keep-alive\n\n" + EVENT + DONE
    assert far.got.count(b"HTTP/1.1 200") == 1
    assert world.last.outcome is Outcome.DONE


def test_an_opened_stream_whose_engine_breaks_ends_in_an_error_event(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(stream_open_after=10))
    world.gateway.routes = ROUTES
    far = world.ask(stream=True)
    world.wait(12)
    world.engine.transport.close()
    world.turn()
    assert world.error_at_end(far) == "engine_failed"
    assert len(world.engines) == 1


def test_an_opened_stream_that_is_refused_after_all_ends_in_an_error_event(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(stream_open_after=10))
    far = world.ask(stream=True)
    world.wait(12)
    world.whole(b'{"error":{"message":"no","code":"nope"}}', status=400)
    assert world.error_at_end(far) == "nope"


def test_a_stream_whose_head_came_has_its_time_to_the_first_event(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(response_header=60, idle=120, stream_open_after=30))
    far = world.ask(stream=True)
    world.wait(20)
    world.opens()
    for _ in range(38):
        world.sends(b": still here\n\n")
        world.wait(1)
    assert not far.over
    world.wait(5)
    assert world.error_at_end(far) == "stream_broken"
    assert "timeouts.response_header" in world.last.problem


def test_a_stream_that_falls_silent_is_kept_alive_and_then_broken(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(idle=60, keep_alive_comment=15))
    far = world.ask(stream=True)
    world.opens()
    world.sends(EVENT + b'data: {"begun')
    world.wait(58)
    body = world.body_of(far)
    assert body.startswith(EVENT)
    # the comments stand between events, never inside the one that has begun
    assert body.removeprefix(EVENT) == b": keep-alive\n\n" * 3
    world.wait(3)
    assert world.error_at_end(far) == "stream_broken"
    assert world.last.outcome is Outcome.TIMED_OUT
    assert world.engine.over


def test_an_engine_that_keeps_its_stream_alive_is_not_silent(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(idle=20))
    far = world.ask(stream=True)
    world.opens()
    world.sends(EVENT)
    for _ in range(20):
        world.wait(10)
        world.sends(b": ping\n\n")
    world.sends(DONE, ends=True)
    assert world.last.outcome is Outcome.DONE
    assert b"ping" in world.body_of(far)


# -- backpressure


def test_a_client_that_does_not_read_holds_its_engine_back(make_world: Any) -> None:
    world = make_world(capacity=10_000)
    far = world.ask(stream=True)
    far.transport.pause()
    world.opens()
    for _ in range(200):
        world.sends(EVENT * 20)
    assert world.engine.transport.pending > 100_000
    assert far.transport._other.pending < 30_000
    far.transport.resume()
    world.turn()
    world.sends(DONE, ends=True)
    assert world.body_of(far) == EVENT * 4000 + DONE
    assert world.last.outcome is Outcome.DONE


def test_a_client_that_never_reads_is_left_after_the_idle_time(make_world: Any) -> None:
    world = make_world(capacity=1000, timeouts=Timeouts(idle=30))
    far = world.ask(stream=True)
    far.transport.pause()
    world.opens()
    world.sends(EVENT * 100)
    world.wait(29)
    assert world.door.clients
    world.wait(3)
    assert world.door.clients == set()
    assert world.last.outcome is Outcome.CLIENT_STALLED
    assert world.engine.over


def test_a_client_that_reads_slowly_is_not_left(make_world: Any) -> None:
    world = make_world(capacity=1000, timeouts=Timeouts(idle=30))
    far = world.ask(stream=True)
    far.transport.pause()
    world.opens()
    for _ in range(8):
        world.sends(EVENT * 40)
        world.wait(20)
        far.transport.resume()
        world.turn()
        far.transport.pause()
    far.transport.resume()
    world.turn()
    world.sends(DONE, ends=True)
    assert world.last.outcome is Outcome.DONE


def test_a_client_that_reads_again_is_kept_alive_as_any_other(make_world: Any) -> None:
    world = make_world(capacity=1000, timeouts=Timeouts(idle=120, keep_alive_comment=15))
    far = world.ask(stream=True)
    far.transport.pause()
    world.opens()
    world.sends(EVENT * 100)
    far.transport.resume()
    world.turn()
    far.take()
    world.wait(17)
    assert b": keep-alive" in far.got


def test_an_answer_that_runs_ahead_of_its_exchange_is_held_back(world: Any) -> None:
    """The head and much of the body come in one turn, before the exchange has heard of the head."""
    far = world.ask()
    size = EARLY_BYTES * 4
    world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
    for at in range(0, size, 65536):
        world.engine.say(b"x" * min(65536, size - at))
    world.turn()
    assert len(world.body_of(far)) == size
