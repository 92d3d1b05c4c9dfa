"""What a later server is to know of this one's fleet: handed to whoever stores it, and never waited for."""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

import trio

from llmgw.core.effects import Learn, Proven, Reverted
from llmgw.core.learned import Fact
from llmgw.core.model import Model
from llmgw.errors import LlmgwError
from llmgw.host.weights.errors import show_url
from llmgw.units import printable

log = logging.getLogger(__name__)

MOST_WAITING = 1000
# What one may take.
KEEP_SECONDS = 15.0
# After a failure, doubled up to the second.
FIRST_PAUSE_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 300.0
# For what is left when the server stops.
LAST_SECONDS = 2.0

Outcome = Proven | Reverted
Kept = Outcome | Learn


class Keeper(Protocol):
    """Stores it. Raises an LlmgwError where the store can't now: nothing of it is stored then. It may be asked again,
    also where it has stored it after all."""

    async def proven(self, model: Model) -> None:
        """The model has served by this definition."""

    async def reverted(self, model: Model, by: Model, why: str) -> None:
        """This definition has failed, and the model goes on by another one."""

    async def learn(self, fact: Fact) -> None:
        """What a launch has shown, in place of what was kept under its key."""


class Keeping:
    """Hands over, one at a time. What became of a definition is offered in its order until it is taken; a fact only
    once, and after that: a thousand of them would keep it waiting for hours where the store hangs."""

    def __init__(self, keeper: Keeper, *, most: int = MOST_WAITING) -> None:
        self._keeper = keeper
        self._most = most
        self._outcomes: deque[Outcome] = deque()
        self._facts: deque[Learn] = deque()
        self._come = trio.Event()

    def keep(self, what: Kept) -> None:
        """A plain call of the scheduler's. Past the bound the oldest fact gives way, and what is new where there is
        none: the next launch shows it again, and a definition that has failed fails again."""
        if len(self._outcomes) + len(self._facts) >= self._most and not self._make_room():
            log.error("too much waits for the store: %s is not kept", _describe(what))
            return
        if isinstance(what, Learn):
            self._facts.append(what)
        else:
            self._outcomes.append(what)
        self._come.set()

    def _make_room(self) -> bool:
        if not self._facts:
            return False
        log.warning("too much waits for the store: %s is not kept", _describe(self._facts.popleft()))
        return True

    async def serve(self) -> None:
        """Hand over what comes, for ever; at the end what is left, within two seconds."""
        pause = FIRST_PAUSE_SECONDS
        try:
            while True:
                if await self._hand_over():
                    pause = FIRST_PAUSE_SECONDS
                    self._come = trio.Event()
                    await self._come.wait()
                else:
                    await trio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + LAST_SECONDS):
                await self._hand_over()

    async def _hand_over(self) -> bool:
        """All that waits; False where the store can't take what is now the first."""
        while self._outcomes or self._facts:
            if not self._outcomes:
                await self._offer(self._facts.popleft())
            elif await self._offer(self._outcomes[0]):
                self._outcomes.popleft()
            else:
                return False
        return True

    async def _offer(self, what: Kept) -> bool:
        trouble = f"the store did not answer within {KEEP_SECONDS:g} s"
        try:
            with trio.move_on_after(KEEP_SECONDS):
                await self._call(what)
                return True
        except LlmgwError as error:
            trouble = error.message
        except Exception:
            # by a fault of ours, which would be the same the next time
            log.exception("%s is not kept, by a fault of llmgw", _describe(what))
            return True
        after = "it is not tried again" if isinstance(what, Learn) else "it is tried again later"
        log.warning("%s is not kept, and %s: %s", _describe(what), after, trouble)
        return False

    async def _call(self, what: Kept) -> None:
        match what:
            case Proven(model=model):
                await self._keeper.proven(model)
            case Reverted(model=model, by=by, why=why):
                await self._keeper.reverted(model, by, why)
            case Learn(fact=fact):
                await self._keeper.learn(fact)


def _describe(what: Kept) -> str:
    match what:
        case Proven(model=model):
            return f"that {printable(model.name)} has served by its definition"
        case Reverted(model=model):
            return f"that the new definition of {printable(model.name)} has failed"
        case Learn(fact=fact):
            return f"what a launch of {show_url(fact.key.source)} has shown"
