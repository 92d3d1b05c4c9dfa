"""Connections to engines: lent, kept, used again, and closed when nobody wants the answer any more."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from llmgw.config.node import Timeouts
from llmgw.core.node import NodeId
from llmgw.core.replica import ShardAddress, ShardId
from llmgw.door.upstream import IDLE_SECONDS, MAX_IDLE, RACE_SECONDS, dial, explain_undialled
from llmgw.reactor.loop import Reactor


def ask_and_answer(world: Any, connection: Any = None, extra: str = "") -> Any:
    far = world.ask(connection=connection)
    world.whole(b"{}", extra=extra)
    return far


def test_a_connection_is_used_again(world: Any) -> None:
    far = ask_and_answer(world)
    ask_and_answer(world, far)
    assert len(world.engines) == 1
    assert [answer.status for answer in world.answers(far.got)] == [200, 200]


def test_the_one_used_last_is_used_first(world: Any) -> None:
    one, two = world.ask(), world.ask()
    for engine in world.engines:
        engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        world.turn()
    assert len(world.answers(one.got + two.got)) == 2
    for engine in world.engines:
        engine.take()
    world.ask()
    assert world.engines[1].got
    assert not world.engines[0].got


@pytest.mark.parametrize("extra", ["Connection: close\r\n", "X: y\r\nConnection: close\r\n"])
def test_an_engine_that_closes_is_not_kept(world: Any, extra: str) -> None:
    far = ask_and_answer(world, extra=extra)
    assert world.engine.over
    ask_and_answer(world, far)
    assert len(world.engines) == 2


def test_an_idle_connection_is_not_kept_long(world: Any) -> None:
    far = ask_and_answer(world)
    world.wait(IDLE_SECONDS + 1)
    assert world.engine.over
    ask_and_answer(world, far)
    assert len(world.engines) == 2


def test_a_connection_too_old_is_not_used_even_if_it_is_still_there(world: Any) -> None:
    ask_and_answer(world)
    # the clock has moved and no turn has seen it yet
    world.clock.now += IDLE_SECONDS + 0.01
    world.ask()
    assert len(world.engines) == 2


def test_an_idle_connection_that_the_engine_closes_is_forgotten(world: Any) -> None:
    far = ask_and_answer(world)
    world.engine.transport.close()
    world.turn()
    ask_and_answer(world, far)
    assert len(world.engines) == 2


@pytest.mark.parametrize("late", [b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
def test_words_that_nobody_asked_for_end_a_kept_connection(world: Any, late: bytes) -> None:
    far = ask_and_answer(world)
    world.engine.say(late)
    world.turn()
    assert world.engine.over
    ask_and_answer(world, far)
    assert len(world.answers(far.got)) == 2


def test_words_behind_an_answer_end_its_connection(world: Any) -> None:
    far = world.ask()
    world.engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nno!")
    world.turn()
    assert world.answers(far.got)[0].body == b"{}"
    assert world.engine.over


def test_an_engine_that_answers_before_it_has_read_all_is_not_kept(make_world: Any) -> None:
    world = make_world(capacity=1000)
    world.dialling[("10.0.0.9", 1)] = "mute"
    far = world.ask(user="x" * 5000)
    assert world.engine.got == b""
    world.whole(b"{}")
    assert world.answers(far.got)[0].status == 200
    assert world.engine.over


def test_a_stale_connection_is_replaced_once_and_nobody_notices(world: Any) -> None:
    """The engine closes just as the next request goes out, and not one byte of an answer came."""
    far = ask_and_answer(world)
    first = world.engine
    world.ask(connection=far)
    first.transport.close()
    world.turn()
    assert len(world.engines) == 2
    assert world.engine.got.startswith(b"POST")
    world.whole(b"{}")
    assert [answer.status for answer in world.answers(far.got)] == [200, 200]
    assert world.gateway.taken == ["rep-1", "rep-1"]


def test_an_engine_that_had_the_request_for_a_while_is_not_asked_again(world: Any) -> None:
    """It ends without a word, and may well have begun to work on it: that is no connection closed as it was reused."""
    far = ask_and_answer(world)
    world.ask(connection=far)
    world.wait(RACE_SECONDS + 0.1)
    world.engine.transport.close()
    world.turn()
    assert len(world.engines) == 1
    assert [answer.status for answer in world.answers(far.got)] == [200, 502]


def test_it_is_replaced_once_only(world: Any) -> None:
    far = ask_and_answer(world)
    world.ask(connection=far)
    for number in (0, 1):
        world.engines[number].transport.close()
        world.turn()
    assert len(world.engines) == 2
    assert [answer.status for answer in world.answers(far.got)] == [200, 502]


def test_a_connection_that_had_begun_to_answer_is_not_replaced(world: Any) -> None:
    far = ask_and_answer(world)
    world.ask(connection=far)
    world.engine.say(b"HTTP/1.1 2")
    world.turn()
    world.engine.transport.close()
    world.turn()
    assert len(world.engines) == 1
    assert world.answers(far.got)[1].status == 502


def test_a_stale_connection_without_a_successor_is_a_failure(world: Any) -> None:
    far = ask_and_answer(world)
    world.ask(connection=far)
    world.dialling[("10.0.0.9", 1)] = OSError(24, "Too many open files")
    world.engine.transport.close()
    world.turn()
    answer = world.answers(far.got)[1]
    assert (answer.status, answer.error) == (503, "server_busy")
    world.wait(20)


def test_a_client_that_leaves_closes_what_replaced_a_stale_connection(world: Any) -> None:
    far = ask_and_answer(world)
    world.ask(connection=far)
    world.engine.transport.close()
    world.turn()
    far.transport.close()
    world.turn()
    assert world.engine.over
    assert len(world.engines) == 2


def test_connecting_has_its_own_time(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(connect=3, generation=1000))
    world.dialling[("10.0.0.9", 1)] = "hang"
    far = world.ask()
    world.wait(5)
    (answer,) = world.answers(far.got)
    assert answer.status == 502
    assert b"no connection within 3 s" in answer.body
    # one that stands has all the time of an answer
    world.dialling.clear()
    far = world.ask()
    world.wait(50)
    assert far.got == b""


def test_a_client_that_leaves_while_its_engine_is_dialled_leaves_nothing(make_world: Any) -> None:
    world = make_world(timeouts=Timeouts(connect=3))
    world.dialling[("10.0.0.9", 1)] = "hang"
    far = world.ask()
    far.transport.close()
    world.turn()
    assert world.engine.over
    world.wait(5)
    assert not any(world.reactor._buckets.values())


def test_no_more_than_so_many_are_kept(world: Any) -> None:
    clients = [world.ask() for _ in range(MAX_IDLE + 10)]
    for engine in world.engines:
        engine.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
    world.turn()
    assert all(world.answers(client.got)[0].status == 200 for client in clients)
    assert sum(not engine.over for engine in world.engines) == MAX_IDLE
    world.pool.close()
    world.turn()
    assert all(engine.over for engine in world.engines)


def test_what_raises_in_an_engines_connection_is_a_500_of_its_request(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    far = world.ask()
    near = world.engine.transport._other
    near.owner.on_crash(RuntimeError("odd"))
    world.turn()
    assert world.answers(far.got)[0].status == 500
    assert world.engine.over


def test_a_socket_is_dialled(tmp_path: Path) -> None:
    class Owner:
        stands = False
        reason = ""

        def connected(self) -> None:
            self.stands = True

        def drained(self) -> None:
            pass

        def lost(self, reason: str) -> None:
            self.reason = reason

    reactor, owner = Reactor(), Owner()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        transport = dial(reactor, str(tmp_path / "s"), owner)  # type: ignore[arg-type]
        while not owner.stands:
            reactor.turn()
        transport.abort()
    reactor.close()
    assert owner.reason == ""


class Borrower:
    """Asks by itself, and fails at the word that it is told to fail at."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at
        self.crashes: list[Exception] = []

    def _hear(self, word: str) -> None:
        if word == self.fails_at:
            raise ValueError(word)

    def answered(self, head: object) -> None:
        self._hear("answered")

    def moved(self, data: bytes, ended: bool) -> None:
        self._hear("ended" if ended else "moved")

    def rebound(self, upstream: object) -> None:
        self._hear("rebound")

    def failed(self, failure: object) -> None:
        self._hear("failed")

    def on_crash(self, error: Exception) -> None:
        self.crashes.append(error)


@pytest.mark.parametrize(
    ("fails_at", "answer", "closes"),
    [
        ("answered", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", False),
        ("moved", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", False),
        ("ended", b"HTTP/1.1 200 OK\r\n\r\n{}", True),
    ],
)
def test_whoever_fails_at_an_answer_is_told_and_its_connection_is_closed(
    world: Any, caplog: pytest.LogCaptureFixture, fails_at: str, answer: bytes, closes: bool
) -> None:
    borrower = Borrower(fails_at)
    world.pool.ask(("10.0.0.9", 1), b"GET / HTTP/1.1\r\n\r\n", borrower, bodyless=False)
    world.turn()
    world.engine.say(answer)
    world.turn()
    if closes:
        world.engine.transport.close()
        world.turn()
    assert [str(error) for error in borrower.crashes] == [fails_at]
    assert world.engine.transport._other.closed
    # and it is lent to nobody any more
    world.ask()
    assert len(world.engines) == 2


def test_a_node_without_a_trunk_is_told_from_an_engine_that_refuses() -> None:
    shard = ShardAddress(node=NodeId("n1"), shard=ShardId("shd-m-1-0"), epoch=1)
    failure = explain_undialled(shard, OSError(errno.EHOSTUNREACH, "node n1 has no trunk"))
    assert (failure.unreachable, failure.sent) == (True, False)
    assert failure.reason == "no connection to shd-m-1-0 on n1: node n1 has no trunk"
    assert not explain_undialled(("127.0.0.1", 1), OSError(errno.EHOSTUNREACH, "no route")).unreachable
