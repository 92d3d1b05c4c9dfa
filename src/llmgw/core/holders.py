"""How many of those near hold each piece of a listing, and which pieces are missing and held by none of them.

A large repository has more than a hundred thousand pieces, and a member comes and goes with all that it holds: that is
counted for all pieces in one go, a byte for each, and never for one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

# A count has one byte.
MOST_HOLDERS = 255

Held: TypeAlias = bytes | bytearray

_IS_ZERO = bytes([1]) + bytes(255)


class Holders:
    """``missing`` and what a member holds (``held``) have a byte for each piece, 1 where it is so."""

    def __init__(self, total: int) -> None:
        self._total = total
        self.missing = bytearray(b"\1") * total
        self._counts = bytearray(total)
        self._bare = bytearray(b"\1") * total

    def __getitem__(self, place: int) -> int:
        """How many hold it."""
        return self._counts[place]

    def take_out(self, places: Iterable[int]) -> None:
        """They are missing no more."""
        for place in places:
            self.missing[place] = self._bare[place] = 0

    def put_back(self, place: int) -> None:
        """It is missing."""
        self.missing[place] = 1
        self._bare[place] = not self._counts[place]

    def add(self, place: int, more: int) -> None:
        """So many more hold it."""
        count = self._counts[place] = self._counts[place] + more
        self._bare[place] = self.missing[place] and not count

    def drop(self, gone: Sequence[Held], rest: Sequence[Held]) -> None:
        """Those that hold ``gone`` count no more; ``rest`` is what the others hold, all of them."""
        if not gone:
            return
        counts = _read(self._counts) - sum(map(_read, gone)) if len(gone) < len(rest) else sum(map(_read, rest))
        self._counts = bytearray(counts.to_bytes(self._total, "little"))
        bare = _read(self.missing) & _read(self._counts.translate(_IS_ZERO))
        self._bare = bytearray(bare.to_bytes(self._total, "little"))

    def has_bare(self, places: range) -> bool:
        """Whether any of these is missing and held by none; ``places`` are neighbours, here and below."""
        return self._bare.find(1, places.start, places.stop) >= 0

    def list_bare(self, places: range) -> Iterator[int]:
        """Those that are missing and held by none."""
        place = self._bare.find(1, places.start, places.stop)
        while place >= 0:
            yield place
            place = self._bare.find(1, place + 1, places.stop)

    def list_bare_of(self, held: Held, places: range) -> Iterator[int]:
        """The same, of what one member far away holds."""
        return _list_both(self._bare, held, places)

    def list_missing_of(self, held: Held) -> Iterator[int]:
        """What of this is missing."""
        return _list_both(self.missing, held, range(self._total))


def _read(places: Held) -> int:
    return int.from_bytes(places, "little")


def _list_both(one: Held, other: Held, places: range) -> Iterator[int]:
    """Where both have a 1. Each leads the other past what it has not."""
    place = one.find(1, places.start, places.stop)
    while place >= 0:
        if other[place]:
            yield place
            place = one.find(1, place + 1, places.stop)
            continue
        place = other.find(1, place + 1, places.stop)
        if place >= 0 and not one[place]:
            place = one.find(1, place + 1, places.stop)
