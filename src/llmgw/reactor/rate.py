"""How fast bytes go, over all that take from one bucket."""

from __future__ import annotations

import trio

# What nobody took in this time is not saved up.
BURST_SECONDS = 0.25


class Rate:
    """A bucket that fills at so many bytes per second; None: without a bound. What is taken may be more than is in it:
    then the next ones wait, each for its turn."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        self._free_at = -float("inf")

    async def take(self, count: int) -> None:
        """Return once that many bytes may go."""
        if self.bytes_per_second is None:
            return
        now = trio.current_time()
        self._free_at = max(self._free_at, now - BURST_SECONDS) + count / self.bytes_per_second
        if self._free_at > now:
            await trio.sleep_until(self._free_at)
