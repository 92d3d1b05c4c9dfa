"""The memory that all request bodies in progress may fill together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from llmgw.reactor.loop import Owner, Reactor


class Budget:
    """Bytes taken and given back; whoever finds none left is called when some came back, the first first."""

    __slots__ = ("_reactor", "_waiting", "left", "total")

    def __init__(self, reactor: Reactor, total: int) -> None:
        self.total = self.left = total
        self._reactor = reactor
        self._waiting: deque[tuple[Owner, Callable[[], None]]] = deque()

    def take(self, size: int) -> bool:
        """Take ``size`` bytes; False, and nothing taken, when there are not that many."""
        if size > self.left:
            return False
        self.left -= size
        return True

    def give(self, size: int) -> None:
        """Give back what was taken."""
        self.left += size
        if size:
            waiting, self._waiting = self._waiting, deque()
            for owner, call in waiting:
                self._reactor.call_soon(owner, call)

    def resize(self, total: int) -> None:
        """Another total from here on; what is taken stays taken."""
        self.left += total - self.total
        self.total = total

    def wait(self, owner: Owner, call: Callable[[], None]) -> None:
        """Call once, after the next bytes came back; whoever still finds none waits again."""
        self._waiting.append((owner, call))
