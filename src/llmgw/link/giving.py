"""An agent's connections to the server over which it gives weights: some while others take them so, else none.

The agent dials, and then answers: the server asks over them for whoever can't reach this node.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable

import trio

from llmgw.link.dial import Backoff, DialFailed, Pace, TlsStream
from llmgw.link.dialer import Complaints
from llmgw.reactor.talk import Over

log = logging.getLogger("llmgw.link")

# That wait for a request; and all of them, for a node is asked by several others at a time.
SPARE = 2
MOST = 32
# Kept for so long after nobody takes from here: the next one may begin at once.
KEPT_SECONDS = 30.0

Answer = Callable[[trio.abc.Stream, Callable[[bool], None]], Awaitable[None]]


class Giving:
    """``serve`` it, and say when it is wanted."""

    def __init__(
        self,
        dial: Callable[[], Awaitable[TlsStream]],
        answer: Answer,
        *,
        pace: Pace | None = None,
        randomness: random.Random | None = None,
    ) -> None:
        """``dial`` makes a connection, or raises DialFailed. ``answer`` answers on it until it ends, and tells whether
        it is busy with that; what it raises ends the one connection."""
        self._dial = dial
        self._answer = answer
        self._pace = pace or Pace()
        self._random = randomness or random.Random()  # noqa: S311 - it spreads dials, and hides nothing
        self._backoff = Backoff(self._pace, self._random)
        self._complaints = Complaints("weights can't be given by way of the server", self._pace.repeat)
        self._is_wanted = False
        self._open = 0
        self._busy = 0
        # Whether a connection ended at once, before anything was asked over it.
        self._is_turned_away = False
        self._changed = trio.Event()

    def want(self, is_wanted: bool) -> None:
        """Whether somebody takes weights from this node through the server."""
        if is_wanted != self._is_wanted:
            self._is_wanted = is_wanted
            self._tell_change()

    async def serve(self) -> None:
        """Keep connections while that is wanted, for ever."""
        while True:
            await self._wait(lambda: self._is_wanted)
            self._is_turned_away = False
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep, nursery)
                await self._wait_unwanted()
                nursery.cancel_scope.cancel()

    async def _wait_unwanted(self) -> None:
        while True:
            await self._wait(lambda: not self._is_wanted)
            with trio.move_on_after(KEPT_SECONDS) as pause:
                await self._wait(lambda: self._is_wanted)
            if pause.cancelled_caught:
                return

    async def _keep(self, nursery: trio.Nursery) -> None:
        while True:
            await self._wait(lambda: self._open - self._busy < SPARE and self._open < MOST)
            if self._is_turned_away:
                self._is_turned_away = False
                await trio.sleep(self._backoff.draw(lived_seconds=0.0))
            try:
                stream = await self._dial()
            except DialFailed as failed:
                self._complaints.say(failed.message)
                await trio.sleep(self._backoff.draw(lived_seconds=0.0))
            else:
                self._open += 1
                nursery.start_soon(self._carry, stream)

    async def _carry(self, stream: TlsStream) -> None:
        """One connection; whatever happens on it, the others go on."""
        began, is_busy, was_asked = trio.current_time(), False, False

        def note(now_busy: bool) -> None:
            nonlocal is_busy, was_asked
            self._busy += now_busy - is_busy
            is_busy, was_asked = now_busy, True
            self._tell_change()

        try:
            await self._answer(stream, note)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            log.debug("a connection to give weights over broke: %s", error)
        except Over as over:
            log.debug("a connection to give weights over was ended: %s", over)
        except Exception as error:
            self._complaints.say(f"{type(error).__name__}: {error}")
        finally:
            stream.transport_stream.socket.close()
            self._open -= 1
            self._busy -= is_busy
            if was_asked or trio.current_time() - began >= self._pace.good:
                self._complaints.forget()
                self._backoff = Backoff(self._pace, self._random)
            else:
                self._is_turned_away = True
            self._tell_change()

    async def _wait(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
