"""The connections over which the server asks nodes for weights: who has one that is free, and one question on one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import h11
import trio

from llmgw.core.node import NodeId
from llmgw.core.weights import RELAY_NODE
from llmgw.link.handshake import Arrival
from llmgw.link.pipe import Pipe

MAX_HEAD_BYTES = 16 * 1024
# Of one answer; news of many pieces and a list of many files are the longest, with the largest pieces.
MAX_BODY_BYTES = 32 * 1024 * 1024


class GiveBroke(Exception):  # noqa: N818 - named by what happened, like all of ours
    """The node that was asked went, or did not answer as nodes do."""


class Give:
    """One such connection, whose handshake is done. It waits until it is taken for a question, and after the answer
    waits again, if it is ``fit`` for that."""

    def __init__(self, arrival: Arrival) -> None:
        self.node = arrival.node
        self.fit = True
        self._pipe = Pipe(arrival.stream)
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._begin_rest()

    # -- waiting

    def _begin_rest(self) -> None:
        self._is_taken = False
        self._watch = trio.CancelScope()
        self.free, self._back = trio.Event(), trio.Event()

    def take(self) -> None:
        """For one question; it may be asked once ``free`` is set, if it is ``fit`` then."""
        self._is_taken = True
        self._watch.cancel()

    def give_back(self) -> None:
        """The answer is over, however it went: one that was not read to its end leaves nothing to go on with."""
        states = (self._http.our_state, self._http.their_state)
        self.fit = self.fit and states in ((h11.DONE, h11.DONE), (h11.IDLE, h11.IDLE))
        self._back.set()

    async def rest(self) -> None:
        """Until it was taken and given back. Sets ``fit`` to False where it went instead, or says what nobody asked."""
        self._begin_rest()
        with self._watch:
            try:
                await self._pipe.wait_ready()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.fit = False
        if not self._is_taken:
            self.fit = False
            return
        self.free.set()
        await self._back.wait()

    def close(self) -> None:
        """Whoever has taken it, or is about to, finds that it is gone."""
        self.fit = False
        self._pipe.close()
        self.free.set()

    # -- one question

    async def ask(self, target: str, node: NodeId, *, seconds: float) -> h11.Response:
        """The head of its answer to what ``node`` asks. Raises GiveBroke."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        headers = [("host", str(self.node)), (RELAY_NODE, str(node))]
        with trio.move_on_after(seconds):
            try:
                await self._pipe.send_all(
                    self._http.send(h11.Request(method="GET", target=target, headers=headers))
                    + self._http.send(h11.EndOfMessage())
                )
                while (event := self._http.next_event()) is h11.NEED_DATA:
                    self._http.receive_data(await self._pipe.receive_some())
            except (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError) as error:
                raise GiveBroke(f"it broke off: {error}") from error
            if not isinstance(event, h11.Response):
                raise GiveBroke("it went")
            return event
        raise GiveBroke(f"it gave no answer for {seconds:g} s")

    async def wait_body(self, *, seconds: float) -> None:
        """Until more of the body can be read. Raises GiveBroke."""
        with trio.move_on_after(seconds):
            try:
                return await self._pipe.wait_ready()
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise GiveBroke("it broke off in the middle") from error
        raise GiveBroke(f"it gave nothing for {seconds:g} s")

    def read_body(self) -> tuple[bytes, bool]:
        """What there is of the body, and whether that was all. Does not wait. Raises GiveBroke."""
        parts: list[bytes] = []
        try:
            while True:
                event = self._http.next_event()
                if isinstance(event, h11.Data):
                    parts.append(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    return b"".join(parts), True
                elif parts or (data := self._pipe.read()) is None:
                    return b"".join(parts), False
                else:
                    self._http.receive_data(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError) as error:
            raise GiveBroke("it broke off in the middle") from error


class Gives:
    """All of them, by their nodes."""

    def __init__(self) -> None:
        self._idle: dict[NodeId, list[Give]] = {}
        self._lots: dict[NodeId, trio.lowlevel.ParkingLot] = {}

    async def keep(self, give: Give) -> None:
        """Lend it to whoever asks its node, until it is fit no more."""
        try:
            while give.fit:
                # The one that was used last is used next, so that those that are too many end by themselves.
                self._idle.setdefault(give.node, []).append(give)
                if (lot := self._lots.pop(give.node, None)) is not None:
                    lot.unpark_all()
                await give.rest()
                self._forget(give)
        finally:
            self._forget(give)
            give.close()

    def _forget(self, give: Give) -> None:
        idle = self._idle.get(give.node, [])
        if give in idle:
            idle.remove(give)
        if not idle:
            self._idle.pop(give.node, None)

    @asynccontextmanager
    async def borrow(self, node: NodeId, *, seconds: float) -> AsyncIterator[Give | None]:
        """A connection to that node, for one question; None where there is none that is free within that time."""
        give = await self._find(node, trio.current_time() + seconds)
        if give is None:
            yield None
            return
        try:
            await give.free.wait()
            yield give
        finally:
            give.give_back()

    async def _find(self, node: NodeId, deadline: float) -> Give | None:
        while node not in self._idle:
            # (made anew by whoever comes first after all that waited were woken)
            lot = self._lots.setdefault(node, trio.lowlevel.ParkingLot())
            with trio.CancelScope(deadline=deadline) as limit:
                await lot.park()
            if limit.cancelled_caught and node not in self._idle:
                if not lot and self._lots.get(node) is lot:
                    del self._lots[node]
                return None
        give = self._idle[node].pop()
        give.take()
        if not self._idle[node]:
            del self._idle[node]
        return give
