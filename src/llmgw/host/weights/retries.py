"""How long an origin is left alone that has failed, and when it is given up."""

from __future__ import annotations

FIRST_REST_SECONDS = 1.0
MOST_REST_SECONDS = 30.0
MOST_TRIES = 10


class Retries:
    """Tries that brought nothing, ``most`` in a row, over all lines to one origin. Lines that break together are one
    try: the lines of a try carry its ``number``."""

    def __init__(self, most: int = MOST_TRIES) -> None:
        self._most = most
        self.number = 0
        self.rest_until = -float("inf")
        self._in_vain = 0

    @property
    def left(self) -> int:
        """How many tries more there are, if none brings anything."""
        return self._most - self._in_vain

    def clear(self) -> None:
        """Something has come."""
        self._in_vain = 0

    def describe(self, remedy: str | None = None) -> str:
        """What is done about it, behind what somebody else can do."""
        again = f"it is tried again, {self.left} {'times' if self.left > 1 else 'time'} more at most"
        return "; ".join(filter(None, (remedy, again if self.left > 0 else "it was the last try")))

    def note(self, number: int, wait_seconds: float, now: float) -> bool:
        """A line of this try broke, and is not to begin anew for so long at least. False: it was the last try."""
        if number == self.number:
            self.number += 1
            self._in_vain += 1
            rest = min(FIRST_REST_SECONDS * 2 ** (self._in_vain - 1), MOST_REST_SECONDS)
            self.rest_until = now + rest
        self.rest_until = max(self.rest_until, now + wait_seconds)
        return self._in_vain < self._most
