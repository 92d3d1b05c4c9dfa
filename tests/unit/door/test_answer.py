"""One request to an engine that does as it likes: failures, times, and a client that does not keep up."""

from __future__ import annotations

import errno
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


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_no_descriptor_left_is_no_engines_fault(world: Any, number: int) -> None:
    world.gateway.routes = ROUTES
    world.dialling[("10.0.0.1", 1)] = OSError(number, "Too many open files")
    far = world.ask()
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (503, "server_busy")
    assert "retry-after" in answer.headers
    assert b"Too many open files" in answer.body
    world.wait(20)
    assert world.dialled == [("10.0.0.1", 1)]
    assert world.gateway.released == ["rep-1"]
    assert world.last.outcome is Outcome.REFUSED


def test_an_address_that_cannot_be_dialled_is_left_for_another(world: Any) -> None:
    world.gateway.routes = ROUTES
    world.dialling[("10.0.0.1", 1)] = OSError(errno.EHOSTUNREACH, "node has no trunk")
    far = world.ask()
    world.whole(b"{}")
    assert world.body_of(far) == b"{}"


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


# -- the last word of a stream, and what follows it


def cut(world: Any) -> None:
    world.engine.transport.close()


def reset(world: Any) -> None:
    world.engine.transport.reset()


def garble(world: Any) -> None:
    world.engine.say(b"no chunk\r\n")


def stay(world: Any) -> None:
    world.wait(world.timeouts.keep_alive_comment + 2)


@pytest.mark.parametrize("last", [DONE, DONE[:-1], b'data: {"error":{"message":"out of memory"}}\n\n'])
@pytest.mark.parametrize("end", [cut, reset, garble, stay])
def test_after_its_last_word_a_stream_is_complete_whatever_comes(world: Any, end: Any, last: bytes) -> None:
    far = world.ask(stream=True)
    world.opens()
    world.sends(EVENT)
    world.sends(last)
    end(world)
    world.turn()
    (answer,) = world.answers(far.got)
    assert answer.complete
    assert answer.body == EVENT + last.rstrip(b"\n") + b"\n\n"
    assert (world.last.outcome, world.last.problem) == (Outcome.DONE, None)
    assert world.engine.over or world.engine.transport.closed
    far.take()
    world.ask(connection=far)
    world.whole()
    assert world.answers(far.got)[0].status == 200


def test_a_stream_short_of_its_length_is_complete_with_its_last_word(world: Any) -> None:
    far = world.ask(stream=True)
    world.engine.say(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n" + EVENT + DONE
    )
    world.turn()
    world.engine.transport.close()
    world.turn()
    (answer,) = world.answers(far.got)
    assert (answer.body, answer.complete) == (EVENT + DONE, True)


# -- a reply is over when its client has taken it


def answer_at_length(world: Any, *, stream: bool) -> None:
    """Ten times what the client's end holds, and complete."""
    usage = b'"usage":{"prompt_tokens":2,"completion_tokens":3}'
    if stream:
        world.opens()
        world.sends(b"data: {" + usage + b',"x":"' + b"x" * 10_000 + b'"}\n\n' + DONE, ends=True)
    else:
        world.engine.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        world.turn()
        world.sends(b'{"x":"' + b"x" * 10_000 + b'",' + usage + b"}", ends=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_is_over_when_its_client_has_taken_it(make_world: Any, stream: bool) -> None:
    world = make_world(capacity=1000)
    far = world.ask(stream=stream, stream_options={"include_usage": True})
    far.transport.pause()
    answer_at_length(world, stream=stream)
    assert not world.gateway.settled
    assert world.engine.over is False
    world.wait(world.timeouts.idle / 2)
    far.transport.resume()
    world.turn()
    assert world.answers(far.got)[0].complete
    assert world.last.outcome is Outcome.DONE
    assert world.last.usage.completion_tokens == 3
    far.take()
    world.ask(connection=far)
    world.whole()
    assert world.answers(far.got)[0].status == 200


def leave(world: Any, far: Any) -> None:
    far.transport.close()
    world.turn()


def stall(world: Any, far: Any) -> None:
    world.wait(3 * world.timeouts.idle)


def stop(world: Any, far: Any) -> None:
    world.door.close()
    world.turn()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("end", "outcome"), [(leave, Outcome.CLIENT_LEFT), (stall, Outcome.CLIENT_STALLED), (stop, Outcome.STOPPED)]
)
def test_a_reply_whose_end_is_never_taken_is_not_done(
    make_world: Any, stream: bool, end: Any, outcome: Outcome
) -> None:
    world = make_world(capacity=1000, timeouts=Timeouts(idle=30))
    far = world.ask(stream=stream, stream_options={"include_usage": True})
    far.transport.pause()
    answer_at_length(world, stream=stream)
    end(world, far)
    assert world.last.outcome is outcome
    assert world.last.usage.completion_tokens == 3
    assert world.gateway.released == ["rep-1"]
    assert not world.door.clients


def test_a_reply_that_stands_still_is_said_to_stand_still(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(idle=30, generation=40))
    for pause, words in ((31, "was silent for 30 s (timeouts.idle)"), (25, "longer than 40 s (timeouts.generation)")):
        world.ask()
        world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")
        world.turn()
        world.wait(pause)
        world.engine.say(b" ")
        world.turn()
        world.wait(pause)
        assert words in world.last.problem
