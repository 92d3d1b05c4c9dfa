"""How a model comes by an earlier definition again: an operator asks for it, or a newer one has failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from llmgw.admin.management import Refused
from llmgw.admin.views import HistoryView, RolledBack
from llmgw.core.effects import Happening
from llmgw.core.learned import Fact
from llmgw.core.model import Model, ModelName
from llmgw.core.replica import ShardState
from llmgw.core.rolling import is_same_launch
from llmgw.server.defining import Defining
from llmgw.server.history import Histories, find_entry, view_entries
from llmgw.server.scheduler import Scheduler
from llmgw.store import StoredDefinition
from llmgw.store.history import PROVEN

log = logging.getLogger(__name__)


class FactStore(Protocol):
    """Where facts are kept; what has returned is durable. LlmgwError when it can't be done."""

    async def put(self, fact: Fact, now: float) -> None: ...


class Returning:
    """Keeps what the fleet says of definitions and launches (``keeping.Keeper``), and shows and goes back to what was.

    A stored model whose definition has failed has the one before as its current one again, under a new number; of a
    declared one the file is the operator's to change, and it goes on by the one before until it is.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        defining: Defining,
        histories: Histories,
        facts: FactStore,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._defining = defining
        self._histories = histories
        self._facts = facts
        self._wall = wall

    # -- what the fleet says

    async def proven(self, model: Model) -> None:
        """The model has served by this definition."""
        await self._defining.note(lambda: self._histories.note_proven(model))

    async def reverted(self, model: Model, by: Model, why: str) -> None:
        """This definition has failed, and the model goes on by another one."""
        await self._defining.change(lambda: self._return(model, by, why))

    async def learn(self, fact: Fact) -> None:
        """What a launch has shown, in place of what was kept under its key."""
        await self._facts.put(fact, self._wall())

    async def _return(self, model: Model, by: Model, why: str) -> None:
        name = model.name
        failed = await self._histories.note_failed(model, why)
        place = self._defining.places().get(name)
        if place is not None and failed is not None:
            text = (
                f"the definition of {name} at {place} has failed: the one before goes on until that changes, or until "
                f"`llmgw ctl load {name}` has it tried again"
            )
            log.warning("%s", text)
            self._scheduler.chronicle.note(Happening.REVERTED, text, model=name, warning=True)
        stored = self._defining.find_stored(name)
        if stored is None or place is not None or not is_same_launch(stored.model, model):
            # It is declared, gone, or changed once more by now.
            return
        earlier = find_entry(await self._histories.list(name), by)
        if failed is None or earlier is None:
            log.error(
                "%s: its history does not have the definition that it returns to: it stays as it is written", name
            )
            return
        try:
            await self._defining.put_back(earlier, f"returned to {earlier.number}: {failed.number} failed")
        except Refused as refused:
            log.warning("%s goes on by definition %d, and stays as it is written: %s", name, earlier.number, refused)
            return
        text = f"definition {failed.number} of {name} failed: {why}; it has definition {earlier.number} again"
        log.warning("%s", text)
        self._scheduler.chronicle.note(Happening.REVERTED, text, model=name, warning=True)

    # -- what an operator asks for

    async def history(self, name: str) -> HistoryView:
        """The last definitions of the model of that name or alias, the newest first."""
        model = self._defining.find_model(name)
        entries = await self._histories.list(model.name)
        found = (each for each in self._scheduler.fleet.statistics().models if each.model.name == model.name)
        running = (replica.shard for each in found for replica in each.replicas if replica.state is ShardState.READY)
        return HistoryView(model=model.name, definitions=view_entries(entries, running))

    async def rollback(self, name: str, number: int | None) -> RolledBack:
        """Make an earlier definition of a stored model the current one: that of the number, or the last that is proven
        and another than the current one."""
        model = self._defining.find_model(name)

        async def act() -> tuple[StoredDefinition, StoredDefinition]:
            self._refuse_declared(model.name)
            entry = _choose(model.name, await self._histories.list(model.name), number)
            return entry, await self._defining.put_back(entry, f"rolled back to {entry.number}")

        entry, kept = await self._defining.change(act)
        rolls = model.name in self._defining.find_rolling([entry.model])
        on_demand = entry.model.scaling.on_demand
        return RolledBack(model=model.name, number=kept.number, to=entry.number, rolls=rolls, on_demand=on_demand)

    def _refuse_declared(self, name: ModelName) -> None:
        place = self._defining.places().get(name)
        if place is not None:
            message = (
                f"{name} is declared at {place}: write the earlier definition there, then `llmgw ctl reload`; "
                f"`llmgw ctl model history {name} --number N` shows it"
            )
            raise Refused(message, status=409, code="declared_model")


def _choose(name: str, entries: Sequence[StoredDefinition], number: int | None) -> StoredDefinition:
    """The first of ``entries`` is the current one."""
    if number is None:
        others = (each for each in entries[1:] if each.outcome == PROVEN and each.model != entries[0].model)
        found = next(others, None)
        if found is None:
            message = (
                f"no other definition of {name} has served: `llmgw ctl model history {name}` lists them, and "
                f"`llmgw ctl model rollback {name} --to N` takes any"
            )
            raise Refused(message, status=409, code="nothing_proven")
        return found
    found = next((each for each in entries if each.number == number), None)
    if found is None:
        kept = f"{entries[-1].number} to {entries[0].number} are kept" if entries else "none is kept"
        raise Refused(f"there is no definition {number} of {name}: {kept}", status=404, code="unknown_definition")
    if (found.model, found.text) == (entries[0].model, entries[0].text):
        raise Refused(f"definition {number} is what {name} has already", status=409, code="current_definition")
    return found
