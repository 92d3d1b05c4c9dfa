"""What a driver says of its cards, before anybody judges it: sizes in bytes, processes by pid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llmgw.core.node import MigInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has memory of a card; ``memory_bytes`` is None where the driver does not say how much. ``name`` is
    the driver's word for it."""

    pid: int
    memory_bytes: int | None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card by its UUID. ``index`` is the driver's number of it, ``pci`` its address as the kernel writes it
    (``0000:3b:00.0``).

    ``memory_bytes`` is None where it has none of its own and takes the machine's. ``used_bytes`` is without what the
    driver keeps for itself only where ``reserve_apart``. ``holders`` is None where the driver lists no processes.
    """

    uuid: str
    index: int
    name: str
    pci: str | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None
    reserve_apart: bool = False
    temperature_c: float | None = None
    utilization_percent: float | None = None
    ecc_errors: int | None = None
    nvlink_peers: tuple[str, ...] | None = None
    mig: tuple[MigInstance, ...] | None = None
    holders: tuple[Holder, ...] | None = None
    broken: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostCard:
    """A card that the driver counts and can't open: whatever is known of which one it is, and why."""

    reason: str
    index: int | None = None
    pci: str | None = None
    uuid: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All that one look found. ``problem``: why it may not be all that there is, in one line."""

    cards: tuple[Card, ...] = ()
    lost: tuple[LostCard, ...] = ()
    driver: str | None = None
    problem: str | None = None


class Source(Protocol):
    """One way to ask a driver. It never raises, and may block for as long as a driver hangs."""

    def survey(self) -> Survey | None:
        """What there is now; None where there is no such way on this machine."""
