"""Who waits for what happens next: a few at once, so that the port has places left for who wants to act."""

from __future__ import annotations

import trio

from llmgw.admin.management import Management
from llmgw.admin.reading import Since
from llmgw.admin.views import EventsView

# A quarter of the connections that the port takes.
MOST_WAITING = 32


class Followers:
    """Those that wait now. One more is answered at once, with nothing if there is nothing, and has to ask again."""

    def __init__(self, management: Management, *, most: int = MOST_WAITING) -> None:
        self._management = management
        self._places = trio.Semaphore(most)

    async def look(self, since: Since) -> EventsView:
        """What has happened, once there is something, or as long as may be waited for it."""
        if since.wait == 0 or not self._take_place():
            return await self._ask(since, 0)
        try:
            return await self._ask(since, since.wait)
        finally:
            self._places.release()

    def _take_place(self) -> bool:
        try:
            self._places.acquire_nowait()
        except trio.WouldBlock:
            return False
        return True

    async def _ask(self, since: Since, wait_seconds: float) -> EventsView:
        return await self._management.events(
            after=since.after, wait_seconds=wait_seconds, model=since.model, node=since.node
        )
