"""Which replicas are passed over for a while because no connection to them was had."""

from __future__ import annotations

from dataclasses import dataclass

from llmgw.core.replica import ReplicaId

FIRST_SECONDS = 2.0
MOST_SECONDS = 30.0
# Of peace after its last rest, until a failure is the first again; what is not heard of any more goes with it.
FORGET_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Rest:
    seconds: float
    until: float


class Breaker:
    """Each failure in a row doubles the rest; a success ends it. False while there is nobody to pass over."""

    __slots__ = ("_rests",)

    def __init__(self) -> None:
        self._rests: dict[ReplicaId, _Rest] = {}

    def __len__(self) -> int:
        return len(self._rests)

    def fail(self, replica: ReplicaId, now: float) -> float | None:
        """A connection to it failed: for how many seconds it rests. None while it rests already: a hundred requests
        that one crash ends are one failure."""
        for name, rest in [*self._rests.items()]:
            if now >= rest.until + FORGET_SECONDS:
                del self._rests[name]
        before = self._rests.get(replica)
        if before is not None and now < before.until:
            return None
        seconds = FIRST_SECONDS if before is None else min(2 * before.seconds, MOST_SECONDS)
        self._rests[replica] = _Rest(seconds, now + seconds)
        return seconds

    def clear(self, replica: ReplicaId) -> None:
        """It has answered, or is another try of the same replica."""
        self._rests.pop(replica, None)

    def rests(self, replica: ReplicaId, now: float) -> bool:
        """Whether any other is to be preferred."""
        rest = self._rests.get(replica)
        return rest is not None and now < rest.until
