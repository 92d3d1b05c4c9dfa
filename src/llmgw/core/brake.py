"""Whether so many nodes went together that it is rather us who are cut off: then they are waited for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# Fewer nodes may well go together: one switch, or the two that were being worked on.
FEWEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Brake:
    """It holds until ``until``: ``lost`` of ``nodes`` went together."""

    lost: int
    nodes: int
    until: float


def find_brake(lost_at: Collection[float], nodes: int, seconds: float, now: float) -> Brake | None:
    """The brake, where more than half of ``nodes`` and at least three of them have been lost within ``seconds``.

    ``lost_at`` is when each of those that are lost now was. Who is lost for longer counts as gone, on neither side.
    """
    # (as ``until`` is reckoned: else the last bit of a float may keep it at the moment when it is to be over)
    recent = sorted(at for at in lost_at if now < at + seconds)
    rest = nodes - len(lost_at) + len(recent)
    if not _holds(len(recent), rest):
        return None
    # The oldest losses age out first.
    counted = enumerate(recent, 1)
    last = next(at for gone, at in counted if not _holds(len(recent) - gone, rest - gone))
    return Brake(lost=len(recent), nodes=rest, until=last + seconds)


def _holds(lost: int, nodes: int) -> bool:
    return lost >= FEWEST and 2 * lost > nodes
