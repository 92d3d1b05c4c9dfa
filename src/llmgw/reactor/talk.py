"""Small requests without a body, and their answers, on one connection of HTTP/1.1: each within its time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import h11
import trio

MAX_HEAD_BYTES = 16 * 1024
READ_BYTES = 16 * 1024
# Encrypted and handed over at once: some tenths of a millisecond of everybody's time.
SEND_BYTES = 128 * 1024
LINGER_SECONDS = 1.0


class Over(Exception):  # noqa: N818 - named by what it is, like all of ours
    """A connection ends, for this reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request. ``problem``: the status and the words for what is none."""

    method: str = ""
    target: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    problem: tuple[int, str] | None = None

    def find(self, name: str) -> str | None:
        """What a header says; None where it is not there once."""
        found = [value for key, value in self.headers if key == name.encode()]
        return found[0].decode("latin-1") if len(found) == 1 else None


class Talk:
    """The answering end of a connection that stands. Seconds: for a head from its first byte, for the next request, and
    for a reader that takes nothing."""

    def __init__(
        self, stream: trio.abc.Stream, *, head_seconds: float, idle_seconds: float, stall_seconds: float
    ) -> None:
        self._stream = stream
        self._head_seconds = head_seconds
        self._idle_seconds = idle_seconds
        self._stall_seconds = stall_seconds
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def hear(self) -> Asked | None:
        """The next request; None when none comes any more. Raises Over for a half one."""
        begun = bool(self._http.trailing_data[0])
        with trio.move_on_after(self._head_seconds if begun else self._idle_seconds) as limit:
            try:
                while (event := self._http.next_event()) is h11.NEED_DATA:
                    data = await self._stream.receive_some(READ_BYTES)
                    if data and not begun:
                        begun = True
                        limit.deadline = min(limit.deadline, trio.current_time() + self._head_seconds)
                    self._http.receive_data(bytes(data))
                return self._read(event)
            except h11.RemoteProtocolError as error:
                return Asked(problem=(error.error_status_hint, "this can't be understood"))
        if begun:
            raise Over("it sent half a request")
        return None

    def _read(self, event: object) -> Asked | None:
        if not isinstance(event, h11.Request):
            return None
        # Of what is asked nothing has a body: after it there is no telling where the next request begins.
        if not isinstance(self._http.next_event(), h11.EndOfMessage):
            return Asked(problem=(400, "nothing that is asked here has a body"))
        return Asked(
            method=event.method.decode("ascii"), target=event.target.decode("latin-1"), headers=tuple(event.headers)
        )

    async def say(self, status: int, headers: Iterable[tuple[str, str]], body: bytes = b"") -> None:
        """A whole answer, whose headers say how long it is. Raises Over when the other end takes nothing for too
        long."""
        await self.begin(status, headers)
        left = memoryview(body)
        for start in range(0, len(left), SEND_BYTES):
            await self.go_on(bytes(left[start : start + SEND_BYTES]))
        await self.end()

    async def begin(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """An answer whose body follows. Raises Over."""
        await self._send(self._http.send(h11.Response(status_code=status, headers=[*headers])))

    async def go_on(self, data: bytes) -> None:
        """Some of the body. Raises Over."""
        await self._send(self._http.send(h11.Data(data=data)))

    async def end(self) -> None:
        """That was all of it. Raises Over."""
        await self._send(self._http.send(h11.EndOfMessage()))

    async def _send(self, data: bytes | None) -> None:
        if not data:
            return
        with trio.move_on_after(self._stall_seconds) as limit:
            await self._stream.send_all(data)
        if limit.cancelled_caught:
            raise Over(f"it took nothing for {self._stall_seconds:g} s")

    def goes_on(self) -> bool:
        """Whether another request may follow the one that was answered."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def close(self) -> None:
        """Say goodbye, so that the other end knows that nothing was cut off."""
        with trio.move_on_after(LINGER_SECONDS):
            await self._stream.aclose()
