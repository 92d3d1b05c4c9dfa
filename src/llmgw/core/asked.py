"""What is asked of whom for pieces of a source: of the origin in requests, of members one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmgw.core.node import NodeId
from llmgw.core.weights import Member

# Transfers from one member at a time.
MOST_OF_ONE = 2
# A transfer has run for long, and a member was silent for long.
PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """One piece to be had from a member, which says that its BLAKE3 is ``expected``."""

    node: NodeId
    seed: str
    file: int
    piece: int
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Pieces [start, stop) of a file, to be had from the origin in one request; ``ordered``: it is the whole file, of
    which some pieces may be here."""

    file: int
    start: int
    stop: int
    ordered: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Line:
    """A request to the origin. ``next`` and ``stop``: the places that it has not begun, of those from ``start`` on;
    ``since``: when it was made."""

    start: int
    next: int
    stop: int
    since: float

    def measure(self, now: float) -> float:
        """How long it has taken for a piece, at least."""
        return (now - self.since) / max(self.next - self.start, 1)


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """What is known of a member. ``held``: a byte for each piece, 1 where it has one that was missing here when it said
    so; ``offers``: how many of those are still missing. ``heap``: where it is near, keys of these in the order in which
    to ask for them, where old ones may stand. ``asked``: in whose turn it was asked last. ``takes``: since when it is
    asked for which piece."""

    member: Member
    near: bool
    brought_at: float
    asked: int
    held: bytearray | bytes
    offers: int = 0
    heap: list[int] = field(default_factory=list)
    takes: dict[int, float] = field(default_factory=dict)
    slow_until: float = -float("inf")
    away_until: float = -float("inf")
    suspended_until: float = -float("inf")
    rests_until: float = -float("inf")
    refused_since: float | None = None
    # Since when it can't be asked for what is no fault of its own, and whether that is for too long to wait for it.
    missed_since: float | None = None
    passed_over: bool = False

    def is_there(self, now: float) -> bool:
        return self.away_until <= now

    def is_free(self, now: float) -> bool:
        """Whether it can be asked for one more: not who is at one for long."""
        rests = self.rests_until > now or self.missed_since is not None
        return len(self.takes) < MOST_OF_ONE and self.away_until <= now and not rests and not self.count_long(now)

    def count_long(self, now: float) -> int:
        """How many of its transfers have run for long."""
        return sum(now - since >= PATIENCE_SECONDS for since in self.takes.values())

    def is_second_choice(self, now: float) -> bool:
        return self.suspended_until > now or self.slow_until > now

    def is_trusted(self, now: float) -> bool:
        """Whether it is waited for."""
        return self.away_until <= now and self.suspended_until <= now and not self.passed_over
