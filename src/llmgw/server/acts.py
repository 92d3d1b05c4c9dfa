"""How an act of an operator is carried through: to its end, whoever asked for it has left or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from llmgw.admin.management import Refused

# A store that hangs ends it.
ACT_SECONDS = 15.0

T = TypeVar("T")


async def carry_through(change: Callable[[], Awaitable[T]]) -> T:
    """What ``change`` has returned. Refused when the store does not answer in time."""
    # Shielded: a client that leaves between the store and the fleet would leave them apart.
    with trio.CancelScope(shield=True, deadline=trio.current_time() + ACT_SECONDS):
        return await change()
    message = f"the store did not answer within {ACT_SECONDS:g} s; look whether it was done before you try again"
    raise Refused(message, status=503, code="store_unavailable")
