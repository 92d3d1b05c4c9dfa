"""Who may be connected to a seed port before it has shown whose it is, and who gives way when there are too many."""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass, field

import trio

# Those of all addresses, and those of one. A handshake is a matter of milliseconds.
PLACES = 128
OF_ONE_ADDRESS = 32
# For so long a place is safe from others, but from those of addresses that have fewer.
SAFE_SECONDS = 1.0


@dataclass(eq=False, slots=True, kw_only=True)
class Stranger:
    """One connection of which nobody knows yet whose it is. ``scope`` is cancelled when it is to end."""

    address: str
    since: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Strangers:
    """All of them. Their number is bounded, and whoever holds places without proving anything loses them."""

    def __init__(self) -> None:
        self._all: dict[Stranger, None] = {}

    def admit(self, address: str, now: float) -> tuple[Stranger | None, Stranger | None]:
        """A place for one who comes from there, None where it is to be turned away; and the one who has lost its place
        for it."""
        stranger = Stranger(address=name_network(address), since=now)
        counts = Counter(each.address for each in self._all)
        own = counts[stranger.address]
        evicted = None
        if own >= OF_ONE_ADDRESS or len(self._all) >= PLACES:
            (most, count), *_ = counts.most_common(1)
            whose = stranger.address if own >= OF_ONE_ADDRESS else most
            evicted = self._find_oldest(whose, now if own + 1 < count else now - SAFE_SECONDS)
            if evicted is None:
                return None, None
            self.free(evicted)
            evicted.scope.cancel()
        self._all[stranger] = None
        return stranger, evicted

    def free(self, stranger: Stranger) -> None:
        """It has shown whose it is, or has ended."""
        self._all.pop(stranger, None)

    def _find_oldest(self, address: str, until: float) -> Stranger | None:
        """Of those from there that came no later."""
        return next((each for each in self._all if each.address == address and each.since <= until), None)


def name_network(address: str) -> str:
    """What counts as one address: of IPv6 a household has as many as it likes, in one network."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return str(found)
    return str(ipaddress.ip_network((found, 64), strict=False))
