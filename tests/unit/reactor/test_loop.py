"""One epoll, one task: who is called, when, and what a failure ends."""

from __future__ import annotations

import gc
import logging
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
import trio.testing

from llmgw.reactor.loop import GATHER_AGAIN, IN, LOOK_EVERY, OUT, TICK_SECONDS, TURN_SECONDS, Deadline, Reactor


class Watcher:
    """Watches one socket; ``act`` is done at each event."""

    def __init__(self, reactor: Reactor, sock: socket.socket, act: Callable[[int], object] = lambda mask: None) -> None:
        self.sock, self.act = sock, act
        self.events: list[int] = []
        self.crashes: list[Exception] = []
        reactor.register(sock.fileno(), IN, self)

    def on_event(self, mask: int) -> None:
        self.events.append(mask)
        self.act(mask)

    def on_crash(self, error: Exception) -> None:
        self.crashes.append(error)


class Owner:
    """Owns callbacks that may fail."""

    def __init__(self) -> None:
        self.crashes: list[Exception] = []

    def on_crash(self, error: Exception) -> None:
        self.crashes.append(error)


@pytest.fixture
def pair() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    made: list[socket.socket] = []

    def pair() -> tuple[socket.socket, socket.socket]:
        two = socket.socketpair()
        for each in two:
            each.setblocking(False)
        made.extend(two)
        return two

    yield pair
    for each in made:
        each.close()


Pair = Callable[[], tuple[socket.socket, socket.socket]]


# -- events


def test_a_watcher_is_called_while_its_descriptor_is_ready(reactor: Reactor, pair: Pair) -> None:
    near, far = pair()
    watcher = Watcher(reactor, near, lambda mask: near.recv(1))
    assert not reactor.turn()
    far.send(b"abc")
    assert not reactor.turn()
    assert watcher.events == [IN, IN, IN]


def test_a_changed_mask_and_an_end_of_watching_hold(reactor: Reactor, pair: Pair) -> None:
    near, far = pair()
    watcher = Watcher(reactor, near, lambda mask: reactor.modify(near.fileno(), 0))
    far.send(b"a")
    reactor.turn()
    assert watcher.events == [IN]
    reactor.unregister(near.fileno())
    reactor.unregister(near.fileno())
    reactor.register(near.fileno(), OUT, watcher)
    watcher.act = lambda mask: reactor.unregister(near.fileno())
    reactor.turn()
    assert watcher.events == [IN, OUT]


def test_a_stale_event_does_not_hit_a_new_connection_on_the_same_number(reactor: Reactor, pair: Pair) -> None:
    """Two sockets are ready in one batch; the first closes the second, and a new one is opened at once."""
    (one, one_far), (two, two_far) = pair(), pair()
    numbers = {one.fileno(): two, two.fileno(): one}
    opened: list[Watcher] = []

    def close_the_other(sock: socket.socket) -> Callable[[int], None]:
        def act(mask: int) -> None:
            other = numbers[sock.fileno()]
            number = other.fileno()
            reactor.unregister(number)
            reactor.close_later(other)
            sock.recv(10)
            new, _ = pair()
            assert new.fileno() != number
            opened.append(Watcher(reactor, new))

        return act

    Watcher(reactor, one, close_the_other(one))
    Watcher(reactor, two, close_the_other(two))
    one_far.send(b"x")
    two_far.send(b"x")
    reactor.turn()
    assert len(opened) == 1
    assert opened[0].events == []


def test_a_socket_is_closed_after_its_batch(reactor: Reactor, pair: Pair) -> None:
    near, far = pair()
    reactor.close_later(near)
    assert near.fileno() >= 0
    reactor.turn()
    assert near.fileno() == -1
    far.setblocking(True)
    assert far.recv(1) == b""


# -- the run-queue


def test_a_call_comes_in_order_and_never_inside_its_caller(reactor: Reactor) -> None:
    owner, order = Owner(), []

    def first() -> None:
        reactor.call_soon(owner, order.append, "called by first")
        order.append("first")

    reactor.call_soon(owner, first)
    reactor.call_soon(owner, order.append, "second")
    assert not reactor.turn()
    assert order == ["first", "second", "called by first"]


def test_what_a_callback_raises_ends_its_owner_and_nobody_else(
    reactor: Reactor, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = pair()
    other_near, other_far = pair()

    def fail(mask: int) -> None:
        near.recv(1)
        raise ValueError("in an event")

    watcher = Watcher(reactor, near, fail)
    other = Watcher(reactor, other_near, lambda mask: other_near.recv(1))
    owner, order = Owner(), []

    def fail_too() -> None:
        raise KeyError("in a call")

    reactor.call_soon(owner, fail_too)
    reactor.call_soon(owner, order.append, "next")
    far.send(b"x")
    other_far.send(b"x")
    reactor.turn()
    assert [str(error) for error in watcher.crashes] == ["in an event"]
    assert [type(error) for error in owner.crashes] == [KeyError]
    assert order == ["next"]
    assert other.events == [IN]
    assert "a callback of Watcher failed" in caplog.text


def test_an_owner_that_fails_at_its_end_ends_nobody_else(reactor: Reactor, caplog: pytest.LogCaptureFixture) -> None:
    class Bad:
        def on_crash(self, error: Exception) -> None:
            raise RuntimeError("and again")

    order: list[str] = []

    def fail() -> None:
        raise ValueError("first")

    reactor.call_soon(Bad(), fail)
    reactor.call_soon(Owner(), order.append, "next")
    reactor.turn()
    assert order == ["next"]
    assert "ending it failed too" in caplog.text


def test_a_turn_gives_way_when_its_time_is_over(reactor: Reactor, clock: Any) -> None:
    owner, done = Owner(), []
    for number in range(10 * LOOK_EVERY):
        reactor.call_soon(owner, done.append, number)
    clock.step = TURN_SECONDS
    assert reactor.turn()
    assert len(done) == LOOK_EVERY
    assert reactor.lag_seconds >= TURN_SECONDS
    while reactor.turn():
        pass
    assert done == list(range(10 * LOOK_EVERY))


def test_events_in_hand_are_kept_for_the_next_turn(reactor: Reactor, pair: Pair, clock: Any) -> None:
    watchers = []
    for _ in range(LOOK_EVERY + 4):
        near, far = pair()
        watchers.append(Watcher(reactor, near, lambda mask, near=near: near.recv(1)))
        far.send(b"x")
    clock.step = TURN_SECONDS
    assert reactor.turn()
    assert sum(len(watcher.events) for watcher in watchers) == LOOK_EVERY
    while reactor.turn():
        pass
    assert all(watcher.events == [IN] for watcher in watchers)


def test_a_steady_trickle_of_events_gives_way_too(reactor: Reactor, pair: Pair, clock: Any) -> None:
    """Two sockets that answer each other are never both silent: each poll finds one event, for ever."""
    one, two = pair()
    for sock in (one, two):
        Watcher(reactor, sock, lambda mask, sock=sock: sock.send(sock.recv(1)))
    one.send(b"x")
    clock.step = TURN_SECONDS / 10
    assert reactor.turn()
    assert reactor.turn()


# -- deadlines


class Alarm:
    """A deadline that writes down when it fired."""

    def __init__(self, reactor: Reactor, act: Callable[[], object] = lambda: None) -> None:
        self.fired: list[float] = []
        self.crashes: list[Exception] = []
        self.reactor, self.act = reactor, act
        self.deadline = Deadline(reactor, self, self.fire)

    def fire(self) -> None:
        self.fired.append(self.reactor.now)
        self.act()

    def on_crash(self, error: Exception) -> None:
        self.crashes.append(error)


def run_until(reactor: Reactor, clock: Any, end: float, step: float = 0.07) -> None:
    while clock.now < end:
        clock.now = min(end, clock.now + step)
        while reactor.turn():
            pass


def test_a_deadline_fires_soon_after_its_time_and_never_before(reactor: Reactor, clock: Any) -> None:
    times = [clock.now + offset for offset in (0.0, 0.01, 0.24, 0.25, 0.26, 1.0, 3.333, 3.334)]
    alarms = [Alarm(reactor) for _ in times]
    for alarm, at in zip(alarms, times, strict=True):
        alarm.deadline.set(at)
    run_until(reactor, clock, clock.now + 5)
    for alarm, at in zip(alarms, times, strict=True):
        assert len(alarm.fired) == 1
        assert at <= alarm.fired[0] <= at + TICK_SECONDS + 0.08


def test_a_deadline_may_move_later_and_earlier(reactor: Reactor, clock: Any) -> None:
    start = clock.now
    later, earlier, often = Alarm(reactor), Alarm(reactor), Alarm(reactor)
    later.deadline.set(start + 1)
    later.deadline.set(start + 3)
    earlier.deadline.set(start + 30)
    earlier.deadline.set(start + 2)
    for tenth in range(50):
        often.deadline.set(clock.now + 1)
        run_until(reactor, clock, start + tenth / 10)
    run_until(reactor, clock, start + 40)
    assert [round(alarm.fired[0] - start) for alarm in (later, earlier, often)] == [3, 2, 6]
    assert all(len(alarm.fired) == 1 for alarm in (later, earlier, often))


def test_a_cleared_deadline_is_silent_until_it_is_set_again(reactor: Reactor, clock: Any) -> None:
    start = clock.now
    alarm = Alarm(reactor)
    alarm.deadline.set(start + 1)
    alarm.deadline.clear()
    run_until(reactor, clock, start + 2)
    assert alarm.fired == []
    alarm.deadline.set(start + 3)
    run_until(reactor, clock, start + 4)
    assert len(alarm.fired) == 1


def test_a_dropped_deadline_leaves_nothing_behind(reactor: Reactor, clock: Any) -> None:
    alarms = [Alarm(reactor) for _ in range(100)]
    for alarm in alarms:
        alarm.deadline.set(clock.now + 600)
    for alarm in alarms:
        alarm.deadline.drop()
        alarm.deadline.drop()
    assert not any(reactor._buckets.values())
    run_until(reactor, clock, clock.now + 700, step=50)
    assert all(alarm.fired == [] for alarm in alarms)


def test_a_deadline_may_be_set_again_from_its_own_call(reactor: Reactor, clock: Any) -> None:
    start = clock.now
    alarm = Alarm(reactor)
    alarm.act = lambda: alarm.deadline.set(reactor.now + 1)
    alarm.deadline.set(start + 1)
    run_until(reactor, clock, start + 10)
    assert 7 <= len(alarm.fired) <= 9


def test_one_that_is_always_due_again_does_not_hold_the_turn(reactor: Reactor, clock: Any) -> None:
    alarm = Alarm(reactor)
    alarm.act = lambda: alarm.deadline.set(reactor.now)
    alarm.deadline.set(clock.now)
    clock.now += 1
    assert not reactor.turn()
    assert len(alarm.fired) == 1


def test_deadlines_of_one_bucket_may_change_each_other(reactor: Reactor, clock: Any) -> None:
    start = clock.now
    alarms = [Alarm(reactor) for _ in range(4)]
    first, dropped, moved, reset = alarms

    def act() -> None:
        dropped.deadline.drop()
        moved.deadline.set(start + 5)
        reset.deadline.drop()
        reset.deadline.set(start + 7)

    first.act = act
    for alarm in alarms:
        alarm.deadline.set(start + 1)
    run_until(reactor, clock, start + 9)
    assert [[round(at - start) for at in alarm.fired] for alarm in alarms] == [[1], [], [5], [7]]


def test_one_that_has_ended_is_never_called_again_and_does_not_hold_its_owner(reactor: Reactor, clock: Any) -> None:
    alarm = Alarm(reactor)
    fired, deadline = alarm.fired, alarm.deadline
    died = weakref.ref(alarm)
    deadline.set(clock.now + 1)
    gc.collect()
    gc.disable()
    try:
        deadline.end()
        del alarm
        assert died() is None
    finally:
        gc.enable()
    deadline.set(clock.now + 1)
    run_until(reactor, clock, clock.now + 5)
    assert fired == []


def test_thousands_that_are_due_at_once_share_turns(reactor: Reactor, clock: Any) -> None:
    alarms = [Alarm(reactor) for _ in range(1000)]
    for alarm in alarms:
        alarm.deadline.set(clock.now + 1)
    clock.now += 2
    clock.step = TURN_SECONDS
    assert reactor.turn()
    assert sum(len(alarm.fired) for alarm in alarms) == LOOK_EVERY
    while reactor.turn():
        pass
    assert all(len(alarm.fired) == 1 for alarm in alarms)


def test_one_that_was_moved_while_it_was_due_waits_on(reactor: Reactor, clock: Any) -> None:
    start = clock.now
    alarm, owner = Alarm(reactor), Owner()
    reactor.call_soon(owner, lambda: alarm.deadline.set(start + 5))
    alarm.deadline.set(start + 1)
    clock.now += 2
    reactor.turn()
    assert alarm.fired == []
    run_until(reactor, clock, start + 6)
    assert len(alarm.fired) == 1


def test_a_deadline_that_raises_ends_its_owner(reactor: Reactor, clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("late")

    bad, good = Alarm(reactor, fail), Alarm(reactor)
    bad.deadline.set(clock.now + 1)
    good.deadline.set(clock.now + 1)
    run_until(reactor, clock, clock.now + 2)
    assert len(bad.crashes) == len(good.fired) == 1
    assert "a callback of Alarm failed" in caplog.text


# -- in trio


@pytest.fixture
async def served(nursery: trio.Nursery) -> Reactor:
    reactor = Reactor(clock=trio.current_time)
    await nursery.start(reactor.serve)
    return reactor


async def test_a_call_from_another_task_wakes_the_loop(served: Reactor) -> None:
    await trio.testing.wait_all_tasks_blocked()
    done = trio.Event()
    served.call_soon(Owner(), done.set)
    with trio.fail_after(10):
        await done.wait()


async def test_a_socket_given_up_by_another_task_is_closed(served: Reactor, pair: Pair) -> None:
    near, far = pair()
    await trio.testing.wait_all_tasks_blocked()
    served.close_later(near)
    with trio.fail_after(10):
        await trio.lowlevel.wait_readable(far)
    assert far.recv(1) == b""


async def test_events_arrive_while_tasks_run(served: Reactor, pair: Pair) -> None:
    near, far = pair()
    done = trio.Event()

    def act(mask: int) -> None:
        if near.recv(10) == b"last":
            done.set()

    Watcher(served, near, act)
    for word in (b"first", b"last"):
        await trio.testing.wait_all_tasks_blocked()
        far.send(word)
    with trio.fail_after(10):
        await done.wait()


async def test_deadlines_fire_by_trios_clock(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        reactor = Reactor(clock=trio.current_time)
        await nursery.start(reactor.serve)
        start, fired = trio.current_time(), trio.Event()
        alarm = Alarm(reactor, fired.set)
        alarm.deadline.set(start + 600)
        await fired.wait()
        assert start + 600 <= alarm.fired[0] <= start + 600 + 2 * TICK_SECONDS
        # one that is set when none was, from outside of a turn
        second = Alarm(reactor, nursery.cancel_scope.cancel)
        second.deadline.set(trio.current_time() + 5)
        await trio.sleep_forever()
    assert len(second.fired) == 1


async def test_a_busy_loop_lets_tasks_run(served: Reactor) -> None:
    owner, stop = Owner(), False

    def again() -> None:
        if not stop:
            served.call_soon(owner, again)

    served.call_soon(owner, again)
    with trio.fail_after(10):
        for _ in range(20):
            await trio.lowlevel.checkpoint()
    stop = True


async def count_rests(pair: Pair, wakes: int, company: int) -> int:
    """How often a loop rests in so many wake-ups by one event each, where each rest brings ``company`` more."""
    rests = 0
    lines = [pair() for _ in range(1 + company)]

    def rest(seconds: float) -> None:
        nonlocal rests
        rests += 1
        for ours, _ in lines[1:]:
            ours.send(b"x")

    reactor = Reactor(sleep=rest)
    woken, wakings = trio.open_memory_channel[bytes](wakes)
    Watcher(reactor, lines[0][1], lambda mask: woken.send_nowait(lines[0][1].recv(64)))
    for _, theirs in lines[1:]:
        Watcher(reactor, theirs, lambda mask, theirs=theirs: theirs.recv(64))
    async with trio.open_nursery() as nursery:
        await nursery.start(reactor.serve)
        for _ in range(wakes):
            await trio.testing.wait_all_tasks_blocked()
            lines[0][0].send(b"x")
            await wakings.receive()
        nursery.cancel_scope.cancel()
    return rests


async def test_a_loop_rests_where_a_rest_brings_company(pair: Pair) -> None:
    assert await count_rests(pair, GATHER_AGAIN + 20, company=2) == 20


async def test_a_loop_does_not_rest_for_one_that_comes_alone(pair: Pair) -> None:
    assert await count_rests(pair, 2 * GATHER_AGAIN + 2, company=0) == 2


async def test_an_idle_loop_sleeps(pair: Pair) -> None:
    turns = 0

    class Counting(Reactor):
        def turn(self) -> bool:
            nonlocal turns
            turns += 1
            return super().turn()

    async with trio.open_nursery() as nursery:
        reactor = Counting()
        await nursery.start(reactor.serve)
        near, _ = pair()
        Watcher(reactor, near)
        await trio.sleep(0.2)
        nursery.cancel_scope.cancel()
    assert turns < 20


async def test_the_end_gives_the_descriptors_back(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    near, _ = pair()
    async with trio.open_nursery() as nursery:
        reactor = Reactor()
        await nursery.start(reactor.serve)
        Watcher(reactor, near)
        reactor.close_later(near)
        nursery.cancel_scope.cancel()
    reactor.close()
    assert near.fileno() == -1
    assert len(os.listdir("/proc/self/fd")) == before + 1


def test_what_outlives_the_reactor_can_still_end(pair: Pair) -> None:
    near, _ = pair()
    reactor = Reactor()
    Watcher(reactor, near)
    number = near.fileno()
    reactor.close()
    reactor.unregister(number)
    reactor.close_later(near)
    assert near.fileno() == -1


def test_a_close_that_reports_an_earlier_error_is_no_failure(
    reactor: Reactor, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd:
        closed = 0

        def close(self) -> None:
            self.closed += 1
            raise OSError("reported late")

    odd = Odd()
    with caplog.at_level(logging.DEBUG, "llmgw.reactor"):
        reactor.close_later(odd)  # type: ignore[arg-type]
        reactor.turn()
    assert odd.closed == 1
    assert "reported late" in caplog.text
