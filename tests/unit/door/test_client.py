"""One client's connection: requests one after the other, replies in our own framing, limits of time and size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.config.node import Limits, Timeouts
from llmgw.door.client import (
    MAX_KNOWN,
    MAX_KNOWN_BYTES,
    UNREAD_BYTES,
    Client,
    _known_lines,
    first_lines,
)
from llmgw.door.request import Outcome

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


def send(world: Any, data: bytes) -> Any:
    far = world.connect()
    far.say(data)
    world.turn()
    return far


# -- replies


def test_a_reply_carries_what_every_reply_carries(world: Any) -> None:
    far = send(world, MODELS)
    (answer,) = world.answers(far.got)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == str(len(answer.body))
    assert answer.headers["x-request-id"] == world.last.id
    assert answer.headers["date"].endswith("GMT")
    assert "connection" not in answer.headers
    assert not far.over


def test_the_reply_to_head_has_a_length_and_no_body(world: Any) -> None:
    whole = send(world, MODELS).got
    far = send(world, MODELS.replace(b"GET", b"HEAD"))
    (answer,) = world.answers(far.got, method="HEAD")
    assert answer.headers["content-length"] == world.answers(whole)[0].headers["content-length"]
    assert far.got.endswith(b"\r\n\r\n")
    # and the next reply is where it should be
    far.take()
    far.say(HEALTH)
    world.turn()
    assert world.answers(far.got)[0].status == 200


def test_options_has_no_body_and_no_length(world: Any) -> None:
    far = send(world, b"OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n\r\n")
    (answer,) = world.answers(far.got)
    assert answer.status == 204
    assert "content-length" not in answer.headers
    assert answer.headers["access-control-allow-origin"] == "http://localhost"


@pytest.mark.parametrize(
    ("request_bytes", "connection", "closes"),
    [
        (b"GET /health HTTP/1.0\r\n\r\n", "close", True),
        (b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "keep-alive", False),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", "close", True),
        (HEALTH, None, False),
    ],
)
def test_a_connection_is_kept_as_its_client_asks(
    world: Any, request_bytes: bytes, connection: str | None, closes: bool
) -> None:
    far = send(world, request_bytes)
    (answer,) = world.answers(far.got)
    assert answer.headers.get("connection") == connection
    assert far.over is closes
    assert len(world.door.clients) == (0 if closes else 1)


def test_a_streams_framing_is_chunks_for_new_clients_and_the_end_for_old_ones(world: Any) -> None:
    new = world.ask(stream=True)
    world.opens()
    world.sends(b"data: 1\n\n")
    world.sends(b"data: [DONE]\n\n", ends=True)
    (answer,) = world.answers(new.got)
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.body == b"data: 1\n\ndata: [DONE]\n\n"
    assert answer.complete
    old = send(world, world.chat(version="1.0", stream=True))
    world.opens()
    world.sends(b"data: 1\n\n")
    world.sends(b"data: [DONE]\n\n", ends=True)
    head, _, body = old.got.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert b"connection: close" in head
    assert body == b"data: 1\n\ndata: [DONE]\n\n"
    assert old.over
    assert not old.reset


def test_an_old_client_is_told_of_a_cut_by_a_reset(world: Any) -> None:
    """Nothing else tells a body that ends with its connection from one that broke."""
    old = send(world, world.chat(version="1.0"))
    world.engine.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")
    world.turn()
    assert old.got.endswith(b"half")
    world.engine.transport.close()
    world.turn()
    assert old.reset


# -- one after the other


def test_pipelined_requests_are_answered_in_order(world: Any) -> None:
    far = send(world, HEALTH + world.chat() + MODELS)
    assert len(world.answers(far.got)) == 1
    world.whole(b'{"id":"one"}')
    first, second, third = world.answers(far.got)
    assert (first.body, second.body) == (b"", b'{"id":"one"}')
    assert b'"list"' in third.body
    assert not far.over


def test_a_pipelined_request_after_a_refusal_is_answered(world: Any) -> None:
    far = send(world, world.post(b"{}") + world.post(b"[]") + HEALTH)
    assert [answer.status for answer in world.answers(far.got)] == [400, 400, 200]


def test_pipelining_a_thousand_does_not_recurse_and_is_limited(make_world: Any) -> None:
    world = make_world(limits=Limits(max_pipelined=4))
    far = world.connect()
    far.say(world.chat() + HEALTH * 1000)
    world.turn()
    world.whole()
    answers = world.answers(far.got)
    assert [answer.status for answer in answers[1:-1]] == [200] * (len(answers) - 2)
    assert answers[-1].error == "too_many_pipelined"
    assert len(answers) <= 6
    assert far.over
    generous = make_world(limits=Limits(max_pipelined=5000))
    assert len(generous.answers(send(generous, HEALTH * 1000).got)) == 1000


def test_what_follows_a_running_request_waits_in_the_kernel(world: Any) -> None:
    far = world.ask()
    for _ in range(50):
        far.say(HEALTH * 100)
        world.turn()
    # the first piece was read before the door knew better; the rest stays with the sender
    assert far.transport.pending > 100_000


def test_who_sends_faster_than_it_is_answered_fills_no_memory(world: Any) -> None:
    far = world.ask()
    for _ in range(40):
        far.say(world.chat() * 3)
        world.turn()
    (client,) = world.door.clients
    for number in range(121):
        assert len(client._queue) < 30
        world.whole(b"%d" % number)
    answers = world.answers(far.got)
    assert [answer.body for answer in answers] == [b"%d" % number for number in range(121)]


# -- answers that are not read

PIECE = b'"' + b"x" * 49_998 + b'"'


def ask_unread(world: Any, requests: int) -> Any:
    """A client that sends its requests at once and reads none of the answers, which come as they are asked for."""
    far = world.connect()
    far.transport.pause()
    far.say(world.chat() * requests)
    world.turn()
    answer_all(world)
    return far


def answer_all(world: Any) -> None:
    while len(world.gateway.settled) < len(world.gateway.taken):
        world.whole(PIECE)


def test_who_does_not_read_its_answers_gets_no_more_of_them(make_world: Any) -> None:
    world = make_world(capacity=10_000)
    far = ask_unread(world, 8)
    (client,) = world.door.clients
    # 40 kB were unread when the second was begun, and 90 kB when the third was not
    assert len(world.gateway.taken) == 2
    assert UNREAD_BYTES < client.transport.pending < UNREAD_BYTES + len(PIECE)
    # and what it sends on stays with it
    for _ in range(20):
        far.say(world.chat() * 10)
        world.turn()
    assert far.transport.pending > 20_000
    assert len(world.gateway.taken) == 2


def test_reading_stops_while_an_answer_is_unread(make_world: Any) -> None:
    """A little that is unread does not hold the next answer back, but no more requests are taken in."""
    world = make_world(capacity=10_000)
    far = ask_unread(world, 1)
    for _ in range(2):
        far.say(HEALTH)
        world.turn()
    (client,) = world.door.clients
    assert 0 < client.transport.pending < UNREAD_BYTES
    # what came first was read before the door knew better
    assert len(world.gateway.settled) == 2
    far.transport.resume()
    world.turn()
    assert [answer.status for answer in world.answers(far.got)] == [200] * 3
    far.take()
    far.say(HEALTH)
    world.turn()
    assert world.answers(far.got)[0].status == 200


def test_reading_is_not_taken_up_again_by_an_answer_that_is_unread_too(make_world: Any) -> None:
    world = make_world(capacity=10_000)
    far = world.connect()
    far.transport.pause()
    for _ in range(4):
        world.ask(connection=far)
        while len(world.gateway.settled) < len(world.gateway.taken):
            world.whole(b'"' + b"x" * 14_998 + b'"')
    (client,) = world.door.clients
    assert 0 < client.transport.pending < UNREAD_BYTES
    assert len(world.gateway.taken) == 2


def test_who_reads_again_gets_all_its_answers(make_world: Any) -> None:
    world = make_world(capacity=10_000)
    far = ask_unread(world, 8)
    far.transport.resume()
    world.turn()
    answer_all(world)
    assert [answer.body for answer in world.answers(far.got)] == [PIECE] * 8
    assert not far.over
    far.take()
    far.say(HEALTH)
    world.turn()
    assert world.answers(far.got)[0].status == 200


def test_who_reads_slowly_gets_all_its_answers(make_world: Any) -> None:
    """A piece in each stretch shorter than the time: slow is not stalled."""
    world = make_world(capacity=10_000, timeouts=Timeouts(idle=20, keep_alive=5))
    far = ask_unread(world, 6)
    for _ in range(6):
        world.wait(15)
        assert not far.over
        # one piece
        far.transport._paused = False
        far.transport._deliver()
        far.transport.pause()
        world.turn()
        answer_all(world)
    assert [answer.body for answer in world.answers(far.got)] == [PIECE] * 6
    assert not far.over
    assert [request.outcome for request in world.gateway.settled] == [Outcome.DONE] * 6


def test_who_reads_nothing_is_left_after_its_time(make_world: Any) -> None:
    world = make_world(capacity=10_000, timeouts=Timeouts(idle=20, keep_alive=5))
    ask_unread(world, 8)
    (client,) = world.door.clients
    world.wait(18)
    assert not client.transport.closed
    world.wait(5)
    assert client.transport.closed
    assert world.door.clients == set()
    assert len(world.gateway.taken) == 2
    assert not any(world.reactor._buckets.values())


# -- any packets


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_any_packets_give_the_same_replies(make_world: Callable[..., Any], data: st.DataObject) -> None:
    world = make_world()
    stream = HEALTH + world.post(b"{}") + MODELS + world.post(b'{"model":"x","messages":[1]}') + HEALTH
    cuts = sorted(data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=12)))
    far = world.connect()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        far.say(stream[start:end])
        world.turn()
    assert [answer.status for answer in world.answers(far.got)] == [200, 400, 200, 404, 200]
    world.reactor.close()


# -- bodies


def test_a_body_may_come_in_any_pieces_and_chunks(world: Any) -> None:
    far = world.connect()
    body = b'{"model":"tiny","messages":[{"role":"user"}]}'
    chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for byte in head + chunked:
        far.say(bytes([byte]))
        world.turn()
    assert world.engine.got.endswith(b"\r\n\r\n" + body)
    assert b"content-length: %d" % len(body) in world.engine.got
    world.whole()
    assert world.answers(far.got)[0].status == 200


def test_a_body_that_comes_in_tiny_packets_is_kept_in_few_pieces(world: Any) -> None:
    far = world.connect()
    far.say(world.post(b"x" * 5000)[:-5000])
    world.turn()
    (client,) = world.door.clients
    for _ in range(4000):
        far.say(b"x")
        world.turn()
    assert len(client._run._body) <= 2
    far.say(b"x" * 1000)
    world.turn()
    assert world.answers(far.got)[0].status == 400


def test_leave_to_send_a_body_is_given_when_it_is_wanted(world: Any) -> None:
    far = world.connect()
    body = b'{"model":"tiny","messages":[1]}'
    data = world.post(body, extra="Expect: 100-continue\r\n")
    far.say(data[: -len(body)])
    world.turn()
    assert far.take() == b"HTTP/1.1 100 Continue\r\n\r\n"
    far.say(body)
    world.turn()
    world.whole()
    assert world.answers(far.got)[0].status == 200


def test_who_did_not_wait_for_leave_gets_none(world: Any) -> None:
    far = send(world, world.post(b'{"model":"tiny","messages":[1]}', extra="Expect: 100-continue\r\n"))
    assert far.got == b""
    world.whole()
    assert world.answers(far.got)[0].status == 200


@pytest.mark.parametrize(
    ("extra", "status", "code"),
    [
        ("Expect: 200-maybe\r\n", 417, "expectation_failed"),
        ("Expect: 100-continue\r\nAuthorization: Bearer wrong\r\n", 401, "invalid_api_key"),
    ],
)
def test_a_body_that_is_not_wanted_is_not_asked_for(world: Any, extra: str, status: int, code: str) -> None:
    far = world.connect()
    far.say(world.post(b"x" * 100, extra=extra)[:-100])
    world.turn()
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (status, code)
    assert answer.headers["connection"] == "close"
    assert far.over


def test_an_expectation_counts_when_the_body_came_all_the_same(world: Any) -> None:
    far = send(world, world.post(b"{}", extra="Expect: 200-maybe\r\n"))
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (417, "expectation_failed")
    assert world.door.budget.left == world.door.budget.total


def test_old_clients_are_not_told_to_continue(world: Any) -> None:
    far = world.connect()
    far.say(world.post(b"{}", version="1.0", extra="Expect: 100-continue\r\n")[:-2])
    world.turn()
    assert far.got == b""


def test_a_body_that_is_too_large_is_refused_unread(make_world: Any) -> None:
    world = make_world(limits=Limits(max_body=1000))
    far = world.connect()
    far.say(world.post(b"x" * 1001)[:-1001])
    world.turn()
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (413, "request_too_large")
    assert far.over


def test_a_chunked_body_is_refused_when_it_has_become_too_large(make_world: Any) -> None:
    world = make_world(limits=Limits(max_body=1000))
    far = send(world, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(3):
        far.say(b"190\r\n%b\r\n" % (b"x" * 400))
        world.turn()
    assert world.answers(far.got)[0].status == 413
    assert world.door.budget.left == world.door.budget.total


@pytest.mark.parametrize("rest", [b"zz\r\n", b"0\r\nX: " + b"y" * 70_000])
def test_a_body_that_breaks_in_the_middle_is_answered(world: Any, rest: bytes) -> None:
    far = send(
        world, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
    )
    for at in range(0, len(rest), 10_000):
        far.say(rest[at : at + 10_000])
        world.turn()
    (answer,) = world.answers(far.got)
    assert answer.status in (400, 431)
    assert far.over
    assert len(world.gateway.settled) == 1


def test_bodies_share_one_budget_and_who_waits_too_long_is_told(make_world: Any) -> None:
    world = make_world(limits=Limits(bodies_total=1000))
    first, second = world.connect(), world.connect()
    first.say(world.post(b"x" * 900)[:-100])
    second.say(world.post(b"y" * 900)[:-100])
    world.turn()
    assert second.got == b""
    world.wait(7)
    (answer,) = world.answers(second.got)
    assert (answer.status, answer.error, answer.headers["retry-after"]) == (503, "server_busy", "2")
    first.say(b"x" * 100)
    world.turn()
    assert world.answers(first.got)[0].status == 400
    assert world.door.budget.left == 1000


def test_who_waits_for_room_goes_on_when_there_is_some(make_world: Any) -> None:
    world = make_world(limits=Limits(bodies_total=1000))
    first, second = world.connect(), world.connect()
    first.say(world.post(b"x" * 900)[:-100])
    second.say(world.post(b"y" * 900))
    world.turn()
    first.transport.close()
    world.turn()
    assert world.answers(second.got)[0].status == 400
    world.wait(10)
    assert world.door.budget.left == 1000
    # the connection goes on as any other
    second.take()
    second.say(HEALTH)
    world.turn()
    assert world.answers(second.got)[0].status == 200


# -- what is no request


def test_garbage_is_answered_and_ends_the_connection(world: Any) -> None:
    far = send(world, b"\x16\x03\x01\x02\x00\x01")
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (400, "invalid_http")
    assert answer.headers["connection"] == "close"
    assert far.over
    assert world.last.outcome is Outcome.REFUSED


def test_garbage_behind_a_request_lets_the_request_be_answered(world: Any) -> None:
    far = send(world, world.chat() + b"\0\0\0")
    world.whole(b"{}")
    (answer,) = world.answers(far.got)
    assert answer.status == 200
    assert answer.headers["connection"] == "close"
    assert far.over


def test_an_upgrade_is_answered_as_plain_http_with_its_body(world: Any) -> None:
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    far = send(world, world.post(b'{"model":"tiny","messages":[1]}', extra=upgrade) + HEALTH)
    assert b"upgrade" not in world.engine.got.lower()
    world.whole()
    assert [answer.status for answer in world.answers(far.got)] == [200, 200]


def test_connect_is_refused_and_nothing_is_forwarded(world: Any) -> None:
    world.gateway.pages_at = "/pages"
    far = send(world, b"CONNECT example.org:443 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert world.answers(far.got)[0].status == 501
    assert world.engines == []


# -- time


def test_an_idle_connection_is_closed_after_its_time(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(keep_alive=30))
    far = send(world, HEALTH)
    far.take()
    world.wait(29)
    assert not far.over
    world.wait(3)
    assert (far.over, far.got) == (True, b"")
    assert world.door.clients == set()


def test_a_request_that_comes_at_the_last_moment_is_served(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(keep_alive=30))
    far = send(world, HEALTH)
    far.take()
    far.say(HEALTH)
    # both in one turn: the time is up, and the bytes are here
    (client,) = world.door.clients
    far.transport._other._deliver()
    world.clock.now += 40
    world.reactor.now = world.clock.now
    client.deadline.fire()
    world.turn()
    assert world.answers(far.got)[0].status == 200


def test_a_slow_head_is_answered_after_its_time_however_it_drips(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(head=10, keep_alive=75))
    far = world.connect()
    for byte in HEALTH[:9]:
        far.say(bytes([byte]))
        world.turn()
        world.wait(1)
    assert far.got == b""
    world.wait(3)
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (408, "request_timeout")
    assert far.over


def test_a_blank_line_is_no_slow_head(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(head=10, keep_alive=75))
    far = send(world, HEALTH)
    far.take()
    far.say(b"\r\n")
    world.turn()
    world.wait(20)
    assert not far.over
    far.say(HEALTH)
    world.turn()
    assert world.answers(far.got)[0].status == 200


def test_a_body_that_stops_is_answered_after_its_time_and_one_that_drips_is_not(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(body=10))
    far = world.connect()
    far.say(world.post(b"x" * 10)[:-10])
    world.turn()
    for _ in range(5):
        world.wait(8)
        far.say(b"x")
        world.turn()
    assert far.got == b""
    world.wait(12)
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (408, "request_timeout")
    assert far.over


def test_a_request_that_runs_is_not_idle(world: Any) -> None:
    far = world.ask()
    world.wait(200)
    assert not far.over
    world.whole()
    assert world.answers(far.got)[0].status == 200


# -- the end


@pytest.mark.parametrize("phase", ["idle", "head", "body", "forward", "stream", "whole"])
def test_a_client_that_leaves_takes_everything_with_it(world: Any, phase: str) -> None:
    far = world.connect()
    if phase == "head":
        far.say(HEALTH[:10])
    elif phase == "body":
        far.say(world.chat()[:-5])
    elif phase != "idle":
        far.say(world.chat(stream=phase == "stream"))
    world.turn()
    if phase == "stream":
        world.opens()
        world.sends(b"data: 1\n\n")
    elif phase == "whole":
        world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        world.turn()
    far.transport.close()
    world.turn()
    assert world.door.clients == set()
    assert all(engine.over for engine in world.engines)
    assert world.door.budget.left == world.door.budget.total
    assert [request.outcome for request in world.gateway.settled] == (
        [] if phase in ("idle", "head") else [Outcome.CLIENT_LEFT]
    )
    assert world.gateway.taken == world.gateway.released
    world.wait(700)
    assert not any(world.reactor._buckets.values())


def test_what_crashes_in_the_door_ends_its_connection_only(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    far, other = world.connect(), world.connect()
    client = next(client for client in world.door.clients if client.transport is far.transport._other)
    assert isinstance(client, Client)
    client.on_crash(RuntimeError("odd"))
    other.say(HEALTH)
    world.turn()
    assert far.over
    assert world.answers(other.got)[0].status == 200


# -- what is kept from one reply to the next


def test_few_beginnings_of_replies_are_kept_and_none_that_is_large() -> None:
    for number in range(3 * MAX_KNOWN):
        first_lines(200, ((b"x", b"%d" % number),))
    assert len(_known_lines) <= MAX_KNOWN
    _known_lines.clear()
    first_lines(200, ((b"x", b"y" * MAX_KNOWN_BYTES),))
    assert not _known_lines
    assert first_lines(200, ((b"x", b"y"),)) == first_lines(200, ((b"x", b"y"),)) == b"HTTP/1.1 200 OK\r\nx: y\r\n"
    assert len(_known_lines) == 1


def test_what_a_client_made_up_is_not_kept_for_the_next_one(world: Any) -> None:
    _known_lines.clear()
    asked = (
        b"OPTIONS /x HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
        b"Access-Control-Request-Headers: %b\r\n\r\n"
    )
    far = send(world, asked % b"x-mine")
    (answer,) = world.answers(far.got)
    assert answer.headers["access-control-allow-headers"] == "x-mine"
    assert b"x-mine" not in b"".join(_known_lines.values())
    far = send(world, asked % (b"y" * 60_000))
    (answer,) = world.answers(far.got)
    assert (answer.status, answer.error) == (431, "headers_too_large")
    assert b"yyy" not in far.got


# -- a head's time


def test_a_head_has_its_time_from_its_first_byte(make_world: Any) -> None:
    """Also one that begins when the connection was about to be closed as idle, and however it trickles."""
    world = make_world(timeouts=Timeouts(head=10, keep_alive=20))
    far = send(world, HEALTH)
    world.wait(18)
    far.take()
    for at in range(9):
        far.say(HEALTH[at : at + 1])
        world.wait(1)
    assert not far.got
    world.wait(3)
    assert world.answers(far.got)[0].status == 408
    far = send(world, HEALTH)
    world.wait(18)
    far.say(HEALTH[:9])
    world.wait(8)
    far.say(HEALTH[9:])
    world.turn()
    assert [answer.status for answer in world.answers(far.got)] == [200, 200]
    # and the connection is kept as before
    world.wait(18)
    assert not far.over
    world.wait(4)
    assert far.over


# -- an end that can be told from a cut

HALF = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"


def stall(world: Any, client: Client, far: Any) -> None:
    far.transport.pause()
    world.engine.say(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
    world.turn()
    world.wait(3 * world.timeouts.idle)


def crash(world: Any, client: Client, far: Any) -> None:
    client.on_crash(ValueError("no"))


def stop(world: Any, client: Client, far: Any) -> None:
    world.door.close()


@pytest.mark.parametrize("end", [stall, crash, stop])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_reply_that_ends_with_its_connection_is_never_cut_by_an_ordinary_end(
    make_world: Any, end: Any, version: str
) -> None:
    world = make_world(capacity=1000, timeouts=Timeouts(idle=20))
    far = send(world, world.chat(version=version))
    world.engine.say(HALF)
    world.turn()
    (client,) = world.door.clients
    end(world, client, far)
    world.turn()
    far.transport.resume()
    world.turn()
    assert far.over
    assert far.reset is (version == "1.0")
    if version == "1.1":
        assert not world.answers(far.got)[0].complete
    assert world.last.outcome is not Outcome.DONE
