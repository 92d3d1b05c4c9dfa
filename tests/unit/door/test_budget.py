"""The memory that all bodies share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmgw.door.budget import Budget
from llmgw.reactor.loop import Reactor


class Waiting:
    """Wants some bytes, and tries again whenever some came back."""

    def __init__(self, budget: Budget, size: int, log: list[str], name: str) -> None:
        self.budget, self.size, self.log, self.name = budget, size, log, name

    def on_crash(self, error: Exception) -> None:
        raise error

    def again(self) -> None:
        if self.budget.take(self.size):
            self.log.append(self.name)
        else:
            self.budget.wait(self, self.again)


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor(clock=lambda: 0.0)
    yield reactor
    reactor.close()


def test_what_is_not_there_is_not_taken(reactor: Reactor) -> None:
    budget = Budget(reactor, 10)
    assert budget.take(6)
    assert not budget.take(5)
    assert budget.left == 4
    assert budget.take(4)


def test_who_waits_is_called_when_bytes_come_back_the_first_first(reactor: Reactor) -> None:
    budget, log = Budget(reactor, 10), []
    budget.take(10)
    for name, size in (("first", 4), ("large", 8), ("third", 2)):
        budget.wait(waiting := Waiting(budget, size, log, name), waiting.again)
    budget.give(6)
    # not from inside give: whoever gives is in the middle of its own end
    assert log == []
    reactor.turn()
    assert log == ["first", "third"]
    budget.give(4)
    reactor.turn()
    assert log == ["first", "third"]
    budget.give(6)
    reactor.turn()
    assert log == ["first", "third", "large"]


def test_giving_nothing_back_wakes_nobody(reactor: Reactor) -> None:
    budget, log = Budget(reactor, 10), []
    budget.wait(waiting := Waiting(budget, 1, log, "x"), waiting.again)
    budget.give(0)
    reactor.turn()
    assert log == []
