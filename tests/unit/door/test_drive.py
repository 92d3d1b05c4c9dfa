"""What an exchange asks for, carried out between a client and an engine that do as they like, on the tests' clock."""

from __future__ import annotations

import contextlib
import gc
import logging
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.config.node import Limits, Timeouts
from llmgw.door.answer import Answer
from llmgw.door.client import Client
from llmgw.door.drive import Run
from llmgw.door.exchange import Route
from llmgw.door.http1 import RequestReader, ResponseReader
from llmgw.door.relay import HOLD_BYTES
from llmgw.door.request import Outcome
from llmgw.door.upstream import IDLE_SECONDS, Upstream

EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
ROUTES = [Route("rep-1", ("10.0.0.1", 1), "tiny"), Route("rep-2", ("10.0.0.2", 1), "tiny")]


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
    assert world.body_of(far) == b"0123456789"


def test_a_reply_with_an_alias_in_pieces_is_chunked(world: Any) -> None:
    far = world.ask(model="gpt")
    text = b'{"model":"tiny","x":"' + b"y" * 300 + b'"}'
    world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text))
    world.turn()
    for at in range(0, len(text), 7):
        world.engine.say(text[at : at + 7])
        world.turn()
    assert world.body_of(far) == text.replace(b"tiny", b"gpt")


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
    assert world.body_of(far) == EVENT * 3 + DONE
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
    assert world.body_of(far) == EVENT + DONE
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
    assert world.body_of(far) == b"{}"


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


# -- the program ends


def stop(world: Any) -> None:
    world.door.close()
    world.turn()
    assert world.door.clients == set()
    assert world.door.budget.left == world.door.budget.total
    assert sorted(world.gateway.taken) == sorted(world.gateway.released)
    assert all(engine.over for engine in world.engines)
    assert not any(world.reactor._buckets.values())


def assert_stopped(world: Any, status: int) -> None:
    """One request, and it was settled once."""
    assert [(request.outcome, request.status) for request in world.gateway.settled] == [(Outcome.STOPPED, status)]


def assert_told(world: Any, far: Any) -> None:
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (503, "stopping")
    assert (answer.headers["connection"], answer.headers["retry-after"]) == ("close", "5")
    assert answer.complete
    assert far.over
    assert not far.reset
    assert_stopped(world, 503)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("phase", ["opened by a comment", "head", "events", "half an event"])
def test_a_stream_between_events_ends_in_an_error_event(world: Any, phase: str, version: str) -> None:
    far = world.connect()
    far.say(world.chat(version=version, stream=True))
    world.turn()
    if phase == "opened by a comment":
        world.wait(world.timeouts.stream_open_after + 1)
    else:
        world.opens()
        if phase != "head":
            world.sends(EVENT)
        if phase == "half an event":
            # the client has none of it
            world.sends(EVENT[:9])
    stop(world)
    if version == "1.1":
        assert world.error_at_end(far) == "stopping"
    else:
        assert b'"stopping"' in far.got.rpartition(b"data: ")[2]
    assert DONE not in far.got
    assert far.got.count(EVENT) == (phase in ("events", "half an event"))
    assert far.over
    assert not far.reset
    assert_stopped(world, 200)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("phase", ["large event", "length", "chunks"])
def test_what_can_not_be_completed_is_cut(world: Any, phase: str, version: str) -> None:
    far = world.connect()
    far.say(world.chat(version=version, stream=phase == "large event"))
    world.turn()
    if phase == "large event":
        world.opens()
        world.sends(b"data: " + b"x" * 2 * HOLD_BYTES)
    elif phase == "length":
        world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
    else:
        world.engine.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")
    world.turn()
    assert far.got.endswith((b"half", b"half\r\n", b"x", b"x\r\n"))
    stop(world)
    assert b"stopping" not in far.got
    assert far.over
    # an old client that was told no length can't tell a cut from an end
    assert far.reset is (version == "1.0" and phase != "length")
    if version == "1.1":
        assert not world.answers(far.got)[0].complete
    assert_stopped(world, 200)


@pytest.mark.parametrize("phase", ["body", "engine", "stream", "error", "pages"])
def test_who_has_no_answer_yet_is_told_that_the_server_stops(world: Any, phase: str) -> None:
    world.gateway.pages_at = "/pages"
    far = world.connect()
    if phase == "pages":
        far.say(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    else:
        far.say(world.chat(stream=phase == "stream")[: -5 if phase == "body" else None])
    world.turn()
    if phase == "error":
        world.engine.say(b"HTTP/1.1 500 X\r\nContent-Length: 10\r\n\r\nhalf")
        world.turn()
    stop(world)
    assert_told(world, far)


def test_a_request_whose_answers_head_has_just_come_is_told(world: Any) -> None:
    far = world.ask()
    upstream = world.engine.transport._other.owner
    upstream.received(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
    stop(world)
    assert_told(world, far)


def test_who_waits_for_room_for_its_body_is_told(make_world: Any) -> None:
    world = make_world(limits=Limits(bodies_total=1000))
    first, second = world.connect(), world.connect()
    for far in (first, second):
        far.say(world.post(b"x" * 900)[:-100])
        world.turn()
    stop(world)
    assert [world.answers(far.got)[0].error for far in (first, second)] == ["stopping"] * 2
    assert [request.outcome for request in world.gateway.settled] == [Outcome.STOPPED] * 2


async def test_who_waits_for_a_model_is_told_and_waits_no_longer(make_world: Any, nursery: trio.Nursery) -> None:
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
    stop(world)
    assert_told(world, far)
    with trio.fail_after(10):
        await ended.wait()


def test_who_has_its_whole_answer_keeps_it(world: Any) -> None:
    """The last piece is out, and the exchange has not come round to noticing."""
    far = world.ask(stream=True)
    world.opens()
    world.sends(EVENT)
    upstream = world.engine.transport._other.owner
    upstream.received(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))
    (client,) = world.door.clients
    assert client.replied
    assert client.busy
    stop(world)
    assert world.body_of(far) == EVENT + DONE
    assert far.over
    assert [request.outcome for request in world.gateway.settled] == [Outcome.DONE]


def test_a_stream_that_broke_just_before_is_settled_as_broken(world: Any) -> None:
    far = world.ask()
    world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
    world.turn()
    world.engine.transport._other.owner.lost("it is gone")
    stop(world)
    assert far.got.endswith(b"half")
    assert [(request.outcome, request.status) for request in world.gateway.settled] == [(Outcome.ENGINE_FAILED, 200)]


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


@given(moves=st.lists(MOVES, max_size=40), end=st.sampled_from(["leave", "stop", "wait"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_whatever_happens_each_request_is_settled_once_and_nothing_is_left(
    make_world: Any, caplog: pytest.LogCaptureFixture, moves: list[tuple[Any, ...]], end: str
) -> None:
    caplog.clear()
    world = make_world(capacity=5000, timeouts=Timeouts(stream_open_after=5, response_header=15, idle=60))
    world.gateway.routes, world.gateway.pages_at = ROUTES, "/pages"
    clients = [world.connect()]
    for move in moves:
        play(world, clients, move)
    if end != "wait":
        for client in clients if end == "leave" else ():
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


# -- nothing of it stays

SILENCE: dict[str, str] = {"user": "x" * 60_000}


def left_behind() -> list[object]:
    """What of a request is in memory. (The collector finds these whether or not it would have to end them.)"""
    kinds = (Run, Answer, Client, Upstream, RequestReader, ResponseReader)
    return [each for each in gc.get_objects() if type(each) in kinds]


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Nobody comes to look for what holds itself, and no captured log holds the frames of what failed."""
    gc.collect()
    gc.disable()
    logging.disable(logging.CRITICAL)
    before = len(left_behind())
    try:
        yield
        assert len(left_behind()) == before
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()


@contextlib.contextmanager
def measured(most: int) -> Iterator[None]:
    """What is allocated inside, and is in memory at the end, has no more than ``most`` bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[0] < most
    finally:
        tracemalloc.stop()


def leave_at_once(world: Any, far: Any) -> None:
    far.transport.close()


def leave_with_a_reset(world: Any, far: Any) -> None:
    far.transport.reset()


def engine_closes(world: Any, far: Any) -> None:
    world.engine.transport.close()


def engine_resets(world: Any, far: Any) -> None:
    world.engine.transport.reset()


def engine_says_garbage(world: Any, far: Any) -> None:
    world.engine.say(b"garbage\r\n\r\n")


def engine_says_no_status(world: Any, far: Any) -> None:
    world.engine.say(b"HTTP/1.1 099 Odd\r\n\r\n")


def engine_answers(world: Any, far: Any) -> None:
    world.whole()


def engine_refuses(world: Any, far: Any) -> None:
    world.whole(b'{"error":"no"}', status=400)


def engine_is_too_slow(world: Any, far: Any) -> None:
    world.wait(world.timeouts.generation + 5)


def engine_streams(world: Any, far: Any) -> None:
    world.opens()
    world.sends(EVENT)
    world.sends(DONE, ends=True)


def engine_breaks_its_stream(world: Any, far: Any) -> None:
    world.opens()
    world.sends(EVENT)
    world.engine.transport.close()


def client_leaves_a_stream(world: Any, far: Any) -> None:
    world.opens()
    world.sends(EVENT)
    far.transport.close()


def client_stalls(world: Any, far: Any) -> None:
    far.transport.pause()
    world.opens()
    for _ in range(20):
        world.sends(b"data: " + b"x" * 10_000 + b"\n\n")
    world.wait(3 * world.timeouts.idle)


def program_stops(world: Any, far: Any) -> None:
    world.door.close()


def settling_fails(world: Any, far: Any) -> None:
    def fail(request: Any) -> None:
        raise ValueError("no")

    world.gateway.on_settle = fail
    far.transport.close()


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(
    "end",
    [
        leave_at_once,
        leave_with_a_reset,
        engine_closes,
        engine_resets,
        engine_says_garbage,
        engine_says_no_status,
        engine_answers,
        engine_refuses,
        engine_is_too_slow,
        engine_streams,
        engine_breaks_its_stream,
        client_leaves_a_stream,
        client_stalls,
        program_stops,
        settling_fails,
    ],
)
def test_nothing_of_a_request_outlives_it(make_world: Any, end: Any, in_pieces: bool) -> None:
    """Left to the garbage collector, bodies that no limit counts would fill the memory of an idle program."""
    with without_collector(), measured(300_000):
        world = make_world(timeouts=Timeouts(generation=60, idle=20))
        for _ in range(10):
            far = world.connect()
            request = world.chat(**SILENCE)
            for piece in (request[:100], request[100:2000], request[2000:]) if in_pieces else (request,):
                far.say(piece)
                world.turn()
            world.engine.take()
            end(world, far)
            world.turn()
            far.transport.close()
            world.turn()
            far.take()
            world.door.draining = False
        del request, piece
        world.wait(IDLE_SECONDS + 1)
        assert world.door.budget.left == world.door.budget.total


@pytest.mark.parametrize(
    "said",
    [
        b"GET / RTSP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"garbage\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nab",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
        b"GET",
    ],
)
def test_nothing_of_a_client_outlives_its_connection(world: Any, said: bytes) -> None:
    world.gateway.pages_at = "/run/pages"
    with without_collector():
        for _ in range(3):
            far = world.connect()
            far.say(said)
            world.turn()
            far.transport.close()
            world.turn()


async def test_nothing_of_a_request_outlives_what_it_waited_for(make_world: Any) -> None:
    async def fail(model: Any) -> bool:
        raise ValueError("no")

    with without_collector():
        async with trio.open_nursery() as nursery:
            world = make_world(spawn=nursery.start_soon)
            world.gateway.routes = []
            world.gateway.wait_ready = fail
            far = world.ask()
            await trio.testing.wait_all_tasks_blocked()
            world.turn()
            assert world.answers(far.got)[0].status == 500
            far.transport.close()
            world.turn()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/a-page"])
def test_a_body_is_let_go_when_its_answer_begins(world: Any, path: str) -> None:
    """A stream lasts, and so does the generator that has read the body."""
    world.gateway.pages_at = "/run/pages"
    with measured(50_000):
        far = world.connect()
        request = world.chat(path=path, stream=True, **SILENCE)
        for at in range(0, len(request), 7000):
            far.say(request[at : at + 7000])
            world.turn()
        del request
        assert world.engine.take().startswith(b"POST")
        world.opens()
        world.sends(EVENT)
        assert EVENT in far.got
