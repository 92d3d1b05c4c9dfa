"""What either end needs of a control link, whatever carries its messages: a websocket, or a test's own memory."""

from __future__ import annotations

from typing import Protocol


class Line(Protocol):
    """One link: ``send`` from anywhere, ``receive`` in one task, ``look`` now and then. ``control.Control`` is one."""

    @property
    def heard_at(self) -> float:
        """trio's time of the last sign of life of the peer."""

    @property
    def lost(self) -> str | None:
        """Why the link is over; None while it is not."""

    def send(self, data: bytes) -> None:
        """Send in order, some time. When too much waits already the link ends; after its end nothing is sent."""

    async def receive(self) -> bytes:
        """The next message. Raises LinkLost at the link's end, after all that came before it."""

    async def is_alive(self, seconds: float) -> bool:
        """Whether anything is heard of the peer, asked now, within ``seconds``."""

    def look(self, *, ping_seconds: float, pong_seconds: float) -> None:
        """Ask a peer that has been silent for ``ping_seconds``; without an answer in ``pong_seconds`` the link ends."""

    async def close(self, reason: str) -> None:
        """Send what waits, say goodbye and end the link, in a few seconds at most."""

    def give_up(self) -> None:
        """The nursery is over: nothing more is sent, and nobody waits for a goodbye."""
