"""What an exchange asks for, carried out between a client and an engine that do as they like, on the tests' clock."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.config.node import Timeouts
from llmgw.door.drive import EARLY_BYTES
from llmgw.door.exchange import Route
from llmgw.door.request import Outcome

EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
ROUTES = [Route("rep-1", ("10.0.0.1", 1), "tiny"), Route("rep-2", ("10.0.0.2", 1), "tiny")]


def body_of(world: Any, far: Any) -> bytes:
    (answer,) = world.answers(far.got)
    return bytes(answer.body)


def error_at_end(world: Any, far: Any) -> str:
    """The code of the error event that a stream ended with, in good order."""
    (answer,) = world.answers(far.got)
    assert answer.complete
    last = answer.body.rstrip(b"\n").rpartition(b"\n")[2]
    return str(json.loads(last.removeprefix(b"data: "))["error"]["code"])


# -- it works


def test_a_whole_reply_is_passed_on(world: Any) -> None:
    far = world.ask()
    assert world.dialled == [("10.0.0.9", 1)]
    world.whole(b'{"id":"x","usage":{"prompt_tokens":2,"completion_tokens":3}}')
    (answer,) = world.answers(far.got)
    assert answer.body.startswith(b'{"id":"x"')
    assert answer.headers["content-length"] == str(len(answer.body))
    request = world.last
    assert (request.outcome, request.status, request.usage.completion_tokens) == (Outcome.DONE, 200, 3)
    assert world.gateway.released == ["rep-1"]


def test_a_request_that_is_over_holds_no_body(world: Any) -> None:
    world.ask()
    assert world.door.budget.left < world.door.budget.total
    world.whole()
    assert world.last.body is None
    assert world.door.budget.left == world.door.budget.total


def test_a_whole_reply_in_pieces_keeps_its_length(world: Any) -> None:
    far = world.ask()
    world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n")
    world.turn()
    assert b"content-length: 10" in far.got
    for piece in (b"01234", b"56789"):
        world.engine.say(piece)
        world.turn()
    assert body_of(world, far) == b"0123456789"


def test_a_reply_with_an_alias_in_pieces_is_chunked(world: Any) -> None:
    far = world.ask(model="gpt")
    text = b'{"model":"tiny","x":"' + b"y" * 300 + b'"}'
    world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text))
    world.turn()
    for at in range(0, len(text), 7):
        world.engine.say(text[at : at + 7])
        world.turn()
    assert body_of(world, far) == text.replace(b"tiny", b"gpt")


def test_a_reply_may_end_with_its_connection(world: Any) -> None:
    far = world.ask()
    world.engine.say(b"HTTP/1.0 200 OK\r\n\r\n{}")
    world.turn()
    world.engine.transport.close()
    world.turn()
    (answer,) = world.answers(far.got)
    assert (answer.body, answer.complete) == (b"{}", True)


def test_a_stream_passes_as_it_comes(world: Any) -> None:
    far = world.ask(stream=True, stream_options={"include_usage": True})
    world.opens()
    for _ in range(3):
        before = len(far.got)
        world.sends(EVENT)
        assert len(far.got) > before
    world.sends(DONE, ends=True)
    assert body_of(world, far) == EVENT * 3 + DONE
    assert world.last.outcome is Outcome.DONE
    assert world.last.first_byte_at is not None


def test_the_head_of_a_stream_does_not_wait_for_a_whole_event(world: Any) -> None:
    far = world.ask(stream=True)
    world.engine.say(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n"
    )
    world.turn()
    assert world.answers(far.got)[0].headers["content-type"] == "text/event-stream"


def test_all_at_once_is_as_good(world: Any) -> None:
    """Head, events and end in one packet: the exchange hears of the head when all the rest is here."""
    far = world.ask(stream=True)
    body = EVENT + b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n' + DONE
    world.engine.say(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    world.turn()
    assert body_of(world, far) == EVENT + DONE
    assert world.last.usage.prompt_tokens == 1


def test_an_engines_error_is_passed_on_in_our_shape(world: Any) -> None:
    far = world.ask()
    world.whole(b'{"error":{"message":"too long","type":"exceed_context_size_error"}}', status=400)
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (400, "context_length_exceeded")
    assert not far.over


def test_an_engines_error_without_end_is_read_so_far_and_no_further(world: Any) -> None:
    far = world.ask()
    world.engine.say(b"HTTP/1.1 500 X\r\nContent-Length: 99999999\r\n\r\n")
    for _ in range(20):
        world.engine.say(b"x" * 65536)
        world.turn()
    (answer,) = world.answers(far.got)
    assert answer.status == 500
    assert world.engine.over


# -- failures and other replicas


def test_an_engine_that_cannot_be_reached_is_left_for_another(world: Any) -> None:
    world.gateway.routes = ROUTES
    world.dialling[("10.0.0.1", 1)] = "connecting to 10.0.0.1:1: ECONNREFUSED"
    far = world.ask()
    world.whole(b"{}")
    assert world.dialled == [("10.0.0.1", 1), ("10.0.0.2", 1)]
    assert body_of(world, far) == b"{}"
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
    assert body_of(world, far) == b"{}"


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
    assert body_of(world, far) == b"{}"


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
    assert error_at_end(world, far) == "stream_broken"
    assert body_of(world, far).startswith(EVENT + b'data: {"error"')
    assert len(world.engines) == 1
    assert world.last.outcome is Outcome.ENGINE_FAILED


def test_a_stream_that_ends_without_its_last_word_ends_in_an_error_event(world: Any) -> None:
    far = world.ask(stream=True)
    world.opens()
    world.sends(EVENT, ends=True)
    assert error_at_end(world, far) == "stream_broken"


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
    assert body_of(world, far) == b"{}"


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
    assert body_of(world, far).count(b": keep-alive\n\n") >= 4
    world.wait(20)
    assert error_at_end(world, far) == "engine_timeout"
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
    assert body_of(world, far) == b": keep-alive\n\n" + EVENT + DONE
    assert far.got.count(b"HTTP/1.1 200") == 1
    assert world.last.outcome is Outcome.DONE


def test_an_opened_stream_whose_engine_breaks_ends_in_an_error_event(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(stream_open_after=10))
    world.gateway.routes = ROUTES
    far = world.ask(stream=True)
    world.wait(12)
    world.engine.transport.close()
    world.turn()
    assert error_at_end(world, far) == "engine_failed"
    assert len(world.engines) == 1


def test_an_opened_stream_that_is_refused_after_all_ends_in_an_error_event(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(stream_open_after=10))
    far = world.ask(stream=True)
    world.wait(12)
    world.whole(b'{"error":{"message":"no","code":"nope"}}', status=400)
    assert error_at_end(world, far) == "nope"


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
    assert error_at_end(world, far) == "stream_broken"
    assert "timeouts.response_header" in world.last.problem


def test_a_stream_that_falls_silent_is_kept_alive_and_then_broken(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(idle=60, keep_alive_comment=15))
    far = world.ask(stream=True)
    world.opens()
    world.sends(EVENT + b'data: {"begun')
    world.wait(58)
    body = body_of(world, far)
    assert body.startswith(EVENT)
    # the comments stand between events, never inside the one that has begun
    assert body.removeprefix(EVENT) == b": keep-alive\n\n" * 3
    world.wait(3)
    assert error_at_end(world, far) == "stream_broken"
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
    assert b"ping" in body_of(world, far)


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
    assert body_of(world, far) == EVENT * 4000 + DONE
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
    assert len(body_of(world, far)) == size


# -- who waits, who crashes


async def test_who_waits_for_a_model_is_served_when_it_is_ready(make_world: Any, nursery: trio.Nursery) -> None:
    world = make_world(spawn=nursery.start_soon)
    routes, world.gateway.routes = world.gateway.routes, []
    world.gateway.ready_after_wait = True
    far = world.ask()
    world.gateway.routes = routes
    await trio.testing.wait_all_tasks_blocked()
    world.turn()
    world.whole(b"{}")
    assert body_of(world, far) == b"{}"


async def test_a_client_that_leaves_while_it_waits_ends_the_wait(make_world: Any, nursery: trio.Nursery) -> None:
    world = make_world(spawn=nursery.start_soon)
    world.gateway.routes = []
    ended = trio.Event()

    async def wait_ready(model: object) -> bool:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    world.gateway.wait_ready = wait_ready
    far = world.ask()
    await trio.testing.wait_all_tasks_blocked()
    far.transport.close()
    world.turn()
    with trio.fail_after(10):
        await ended.wait()
    assert [request.outcome for request in world.gateway.settled] == [Outcome.CLIENT_LEFT]
    assert world.gateway.taken == world.gateway.released == []


async def test_a_wait_that_fails_is_a_500_of_one_request(
    make_world: Any, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(spawn=nursery.start_soon)
    world.gateway.routes = []

    async def wait_ready(model: object) -> bool:
        raise RuntimeError("the store is gone")

    world.gateway.wait_ready = wait_ready
    far = world.ask()
    await trio.testing.wait_all_tasks_blocked()
    world.turn()
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (500, "internal_error")
    assert world.last.outcome is Outcome.CRASHED
    assert "the store is gone" in caplog.text


def test_a_decision_that_raises_is_a_500_and_the_connection_goes_on(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def resolve(name: str) -> None:
        raise RuntimeError("odd")

    world.gateway.resolve = resolve
    far = world.ask()
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (500, "internal_error")
    assert world.last.id.encode() in answer.body
    far.take()
    far.say(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    world.turn()
    assert world.answers(far.got)[0].status == 200


def test_a_settle_that_raises_does_not_answer_twice(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: object) -> None:
        raise RuntimeError("odd")

    world.gateway.on_settle = fail
    far = world.ask()
    world.whole(b"{}")
    assert [answer.status for answer in world.answers(far.got)] == [200]
    # and whatever it was that failed, a client that leaves leaves nothing behind
    far = world.ask()
    far.transport.close()
    world.turn()
    assert len(world.door.clients) == 1
    assert "its last word failed" in caplog.text


def test_a_crash_in_the_middle_of_a_stream_cuts_it(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    far = world.ask(stream=True)
    world.opens()
    world.sends(EVENT)
    (client,) = world.door.clients
    client.on_crash(RuntimeError("odd"))
    world.turn()
    assert far.over
    assert not world.answers(far.got)[0].complete
    assert world.engine.over
    assert world.door.clients == set()
    assert world.last.outcome is Outcome.CRASHED


# -- whatever happens


REQUESTS = st.sampled_from(
    [
        "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /health HTTP/1.0\r\n\r\n",
        "GET /page HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        "HEAD /page HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "POST /page HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{}",
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 16\r\n\r\n",
        '{"model":"tiny"}',
        *(
            f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}"
            for version in ("1.1", "1.0")
            for body in (
                '{"model":"tiny"}',
                '{"model":"gpt"}',
                '{"model":"tiny","stream":true}',
                '{"model":"gpt","stream":true}',
                '{"model":"none"}',
            )
        ),
        "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        "nonsense\r\n\r\n",
    ]
)
ANSWERS = st.sampled_from(
    [
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        'HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n{"model":"tiny"',
        "HTTP/1.1 200 OK\r\n\r\n{}",
        "HTTP/1.1 100 Continue\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
        "HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\n{}",
        "HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
        "HTTP/1.1 101 Switching\r\n\r\n",
        "data: {}\n\n",
        "a\r\ndata: {}\n\n\r\n",
        "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
        "ffff\r\n" + "x" * 0xFFFF + "\r\n",
        "0\r\n\r\n",
        "\0",
    ]
)
MOVES = st.one_of(
    st.tuples(st.just("connect")),
    st.tuples(st.just("say"), st.integers(0, 3), REQUESTS, st.integers(1, 300)),
    st.tuples(st.just("answer"), st.integers(0, 5), ANSWERS, st.integers(1, 300)),
    st.tuples(st.sampled_from(["pause", "resume", "leave", "reset"]), st.booleans(), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.sampled_from([0.3, 3.0, 20.0, 70.0])),
    st.tuples(st.just("dial"), st.sampled_from(["mute", "hang", "refused", None])),
    st.tuples(st.just("turn")),
)


def play(world: Any, clients: list[Any], move: tuple[Any, ...]) -> None:
    match move:
        case ("connect",):
            clients.append(world.connect())
        case ("say" | "answer" as who, number, text, cut):
            ends = clients if who == "say" else world.engines
            if ends:
                data = text.encode()
                end = ends[number % len(ends)]
                end.say(data[:cut])
                world.turn()
                end.say(data[cut:]) if data[cut:] else None
        case (action, ours, number):
            ends = clients if ours else world.engines
            if ends:
                transport = ends[number % len(ends)].transport
                getattr(transport, "close" if action == "leave" else action)()
        case ("wait", seconds):
            world.wait(seconds)
        case ("dial", fate):
            fates = {"refused": OSError(111, "Connection refused")}
            for address in (("10.0.0.1", 1), "/pages"):
                world.dialling[address] = fates.get(fate, fate)
        case ("turn",):
            world.turn()


@given(moves=st.lists(MOVES, max_size=40), leave=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_whatever_happens_each_request_is_settled_once_and_nothing_is_left(
    make_world: Any, caplog: pytest.LogCaptureFixture, moves: list[tuple[Any, ...]], leave: bool
) -> None:
    caplog.clear()
    world = make_world(capacity=5000, timeouts=Timeouts(stream_open_after=5, response_header=15, idle=60))
    world.gateway.routes, world.gateway.pages_at = ROUTES, "/pages"
    clients = [world.connect()]
    for move in moves:
        play(world, clients, move)
    if leave:
        for client in clients:
            client.transport.close()
        world.turn()
        world.door.close()
    else:
        # every wait has its limit: nobody has to close the door for all of it to end
        for _ in range(200):
            world.clock.now += 10
            world.turn()
    world.turn()
    assert caplog.records == []
    assert len({id(request) for request in world.gateway.settled}) == len(world.gateway.settled)
    assert all(request.outcome is not None for request in world.gateway.settled)
    assert sorted(world.gateway.taken) == sorted(world.gateway.released)
    assert world.door.clients == set()
    assert world.door.budget.left == world.door.budget.total
    assert all(engine.transport._other.closed for engine in world.engines)
    assert not any(world.reactor._buckets.values())
    world.reactor.close()
