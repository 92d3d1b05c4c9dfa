"""What is told of a fetch: made of what has happened, never above the truth and never backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from llmgw.core.weights import Fetch, Listing, Phase

# The rate is that of so many seconds, and so long nothing may come before it is said.
WINDOW_SECONDS = 10.0
TELL_SECONDS = 1.0
# Less than so many bytes are nothing, unless they are the last ones of a piece: a server that sends one now and then
# stalls all the same. Of what is held back on purpose as much less as that takes.
STEP_BYTES = 64 * 1024
# For so long nothing may come before it is told what is in the way: where one of several ways fails, the others bring
# something by then.
TROUBLE_SECONDS = 1.0


class ProgressMeter:
    """One fetch, told to ``tell`` at most once a second, and at each change of phase. ``now`` gives seconds of a clock
    that only grows; ``paced``: no more comes than so many bytes per second."""

    def __init__(
        self,
        source: str,
        tell: Callable[[Fetch], None],
        now: Callable[[], float],
        *,
        paced: float | None = None,
    ) -> None:
        self._source = source
        self._tell = tell
        self._now = now
        self._phase = Phase.RESOLVING
        self._commit: str | None = None
        self._total: int | None = None
        self._done = 0
        self._most = 0
        self._origin = 0
        self._peers = 0
        self._verified = 0
        # Whether what is read lay here whole before, and what of that was damaged.
        self._proves = False
        self._mends: str | None = None
        # When how much had come in all, in this phase, over the window.
        self._marks: deque[tuple[float, int]] = deque()
        self._came_at = now()
        # How much has come since then, and how much is something.
        self._dripped = 0
        self._step = STEP_BYTES if paced is None else min(STEP_BYTES, paced * WINDOW_SECONDS / 4)
        self._told_at = -float("inf")
        self._cause: str | None = None
        self._remedy: str | None = None
        self._explain: Callable[[], str | None] | None = None
        self._send()

    @property
    def came_at(self) -> float:
        """When it has gone on last."""
        return self._came_at

    @property
    def brought(self) -> int:
        """How many bytes have come, from anywhere and for anything."""
        return self._origin + self._peers

    def enter(self, phase: Phase) -> None:
        """It is in this phase now, if it was not."""
        if phase is not self._phase:
            self._phase = phase
            self._cause = self._remedy = None
            self._marks.clear()
            self._verified = 0
            self._go_on()
            self._send()

    def queue(self, holder: str) -> None:
        """It waits for another program on its folder, which ``holder`` names, and which has just gone on."""
        self.enter(Phase.QUEUED)
        self._go_on()
        self._cause = f"{holder} holds the lock"
        self._remedy = "see whether that program hangs: once it goes on, or ends, this goes on too"
        self._send()

    def know(self, listing: Listing, done_bytes: int) -> None:
        """What it is of, and how much of that lies on the disk. Another commit than before is another thing: then that
        begins anew."""
        if listing.commit != self._commit:
            self._most = 0
        self._commit, self._total = listing.commit, listing.size_bytes
        self._done = done_bytes
        self._send()

    def come(self, count: int, *, peer: bool) -> None:
        """Bytes have come in, whether or not they will do."""
        if peer:
            self._peers += count
        else:
            self._origin += count
        self._dripped += count
        if self._dripped >= self._step:
            self._go_on()
            self._cause = self._remedy = None

    def wait_for(self, explain: Callable[[], str | None] | None) -> None:
        """From now on it is something else that is to come. ``explain`` says what, if it has not come for long."""
        self._explain = explain
        self._cause = self._remedy = None

    def note_trouble(self, cause: str, remedy: str) -> None:
        """Why nothing comes at this moment, and what is to be done. Over as soon as something does."""
        self._cause, self._remedy = cause, remedy

    def lie(self, count: int) -> None:
        """So many bytes more lie on the disk, checked; fewer where what was there proves wrong."""
        self._done += count
        if count > 0:
            self._go_on()
            self._cause = self._remedy = None

    def verify(self, count: int) -> None:
        """So many bytes are read and hashed for the last time."""
        self._verified = max(self._verified, count)
        self._go_on()

    def prove(self, listing: Listing, read_bytes: int, right_bytes: int) -> None:
        """So many bytes of what lies here whole were read, and so many of them are what was fetched."""
        self._commit, self._total = listing.commit, listing.size_bytes
        self._proves = True
        self._done = max(self._done, right_bytes)
        self.verify(read_bytes)

    def mend(self, why: str) -> None:
        """What lay here of it was damaged: from now on it is told so, where there is nothing worse to tell."""
        self._proves = False
        self._mends = f"fetched anew, for what lay here of it was damaged: {why}"

    def end(self, commit: str, size_bytes: int) -> None:
        """All of it is there and was verified."""
        self._commit, self._total = commit, size_bytes
        self._phase = Phase.READY
        self._cause = self._remedy = None
        self._send()

    def fail(self, cause: str, remedy: str | None) -> None:
        self._phase = Phase.FAILED
        self._cause, self._remedy = cause, remedy
        self._send()

    def tick(self) -> None:
        """Tell how it goes, if that is due."""
        if self._now() - self._told_at >= TELL_SECONDS:
            self._send()

    def _go_on(self) -> None:
        self._came_at, self._dripped = self._now(), 0

    def _send(self) -> None:
        self._told_at = self._now()
        self._tell(self._make())

    def _make(self) -> Fetch:
        now = self._now()
        ready, failed = self._phase is Phase.READY, self._phase is Phase.FAILED
        if ready and self._total is not None:
            self._most = self._total
        else:
            # The last byte shows when everything is verified: until then it is not there.
            most = max(self._total - 1, 0) if self._total is not None else self._done
            self._most = max(self._most, min(self._done, most))
        rate = None if ready or failed else self._measure(now)
        left = None
        verifies = self._phase is Phase.VERIFYING
        # (of what is looked through before the rest comes nobody knows how long that will take in all)
        if rate and self._total is not None and (not verifies or self._proves or self._done >= self._total):
            left = max(self._total - (self._verified if verifies else self._done), 0) / rate
        silent = now - self._came_at
        stalls = not (ready or failed) and silent >= WINDOW_SECONDS
        cause, remedy = self._find_cause(silent)
        if cause is None:
            cause = self._mends
        return Fetch(
            source=self._source,
            phase=self._phase,
            commit=self._commit,
            done_bytes=self._most,
            total_bytes=self._total,
            rate=rate,
            left_seconds=left,
            stalled_seconds=silent if stalls else None,
            origin_bytes=self._origin,
            peer_bytes=self._peers,
            cause=cause,
            remedy=remedy,
        )

    def _find_cause(self, silent: float) -> tuple[str | None, str | None]:
        """Of a failure, or of nothing having come for so many seconds."""
        if self._phase is Phase.QUEUED:
            return self._cause, self._remedy if silent >= WINDOW_SECONDS else None
        is_on_its_way = self._phase in (Phase.RESOLVING, Phase.FETCHING)
        if is_on_its_way and silent < TROUBLE_SECONDS:
            return None, None
        if is_on_its_way and self._cause is None and silent >= WINDOW_SECONDS and self._explain is not None:
            return self._explain(), None
        return self._cause, self._remedy

    def _measure(self, now: float) -> float | None:
        """Bytes per second over the window; of a phase that is younger over that."""
        match self._phase:
            case Phase.FETCHING:
                count = self.brought
            case Phase.VERIFYING:
                count = self._verified
            case _:
                return None
        marks = self._marks
        marks.append((now, count))
        # One mark from before the window stays, where there is one: the rate is over all of it.
        while len(marks) > 2 and marks[1][0] <= now - WINDOW_SECONDS:
            marks.popleft()
        since, before = marks[0]
        return (count - before) / (now - since) if now > since else None
