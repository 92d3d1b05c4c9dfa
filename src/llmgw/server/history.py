"""Which definitions each model has had, and what became of them: kept in the store, the last of each also here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from llmgw.admin.views import DefinitionView, Origin, Outcome
from llmgw.core.model import Model, ModelName
from llmgw.core.replica import ShardSpec
from llmgw.core.rolling import defines, is_same_launch
from llmgw.errors import LlmgwError
from llmgw.store.history import FAILED, PROVEN, StoredDefinition

log = logging.getLogger(__name__)


class HistoryStore(Protocol):
    """Where definitions are kept; what has returned is durable. LlmgwError when it can't be done."""

    async def list(self, name: ModelName) -> tuple[StoredDefinition, ...]:
        """Those of one model, the newest first."""
        ...

    async def newest(self) -> tuple[StoredDefinition, ...]:
        """The last one of each model."""
        ...

    async def proven(self) -> tuple[StoredDefinition, ...]:
        """The last one of each model that is proven."""
        ...

    async def add(self, definitions: Iterable[StoredDefinition]) -> tuple[StoredDefinition, ...]:
        """Keep each as the newest of its model, and answer them with their numbers."""
        ...

    async def judge(self, name: ModelName, number: int, outcome: str, now: float, why: str | None = None) -> None:
        """Note what became of it; an empty outcome: nothing is known of that."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """A definition that is in effect. ``place``: the file and line where it is declared; None: it is stored."""

    model: Model
    text: str
    place: str | None = None

    @property
    def origin(self) -> Origin:
        return Origin.STORED if self.place is None else Origin.DECLARED


class Histories:
    """The newest entry of a model is its current definition, as it is written; the newest that is proven is what it
    returns to when that fails."""

    def __init__(self, store: HistoryStore, *, wall: Callable[[], float] = time.time) -> None:
        self._store = store
        self._wall = wall
        self._current: dict[ModelName, Model] = {}
        self._newest: dict[ModelName, StoredDefinition] = {}
        self._proven: dict[ModelName, StoredDefinition] = {}

    async def load(self) -> None:
        """Look at what an earlier server has kept."""
        self._newest = {each.model.name: each for each in await self._store.newest()}
        self._proven = {each.model.name: each for each in await self._store.proven()}

    # -- what is known

    def newest(self, name: str) -> StoredDefinition | None:
        return self._newest.get(ModelName(name))

    def failure(self, name: str) -> str | None:
        """Why the current definition has failed, where it has and another goes on."""
        newest, current = self._newest.get(ModelName(name)), self._current.get(ModelName(name))
        if newest is None or newest.outcome != FAILED or ModelName(name) not in self.proven([ModelName(name)]):
            return None
        # (where the newest could not be kept yet, nothing is known of it)
        is_known = current is not None and is_same_launch(newest.model, current)
        return newest.why or "it did not come to serve" if is_known else None

    def failed(self) -> frozenset[ModelName]:
        return frozenset(name for name in self._current if self.failure(name) is not None)

    def served(self) -> frozenset[ModelName]:
        """The models of which some definition is proven."""
        return frozenset(self._proven)

    def proven(self, names: Iterable[ModelName] | None = None) -> Mapping[ModelName, Model]:
        """What each of these models (all) served by last, where its current definition would launch it otherwise."""
        return {
            name: proven.model
            for name in (self._current if names is None else names)
            if (proven := self._proven.get(name)) is not None
            and name in self._current
            and not is_same_launch(proven.model, self._current[name])
        }

    async def list(self, name: ModelName) -> tuple[StoredDefinition, ...]:
        """All that is kept of one model, the newest first."""
        return await self._store.list(name)

    # -- what is kept

    async def record(self, currents: Iterable[Current]) -> None:
        """These are all that are in effect: keep those of them that are new. A store that can't take them is no reason
        to go without: they are kept with the next change."""
        currents = tuple(currents)
        self._current = {current.model.name: current.model for current in currents}
        new = [self._enter(current) for current in currents if self._is_new(current)]
        if not new:
            return
        try:
            await self._keep(new)
        except LlmgwError as error:
            names = ", ".join(str(each.model.name) for each in new[:8])
            log.error("the history does not have the newest definitions of %s yet: %s", names, error.message)

    def _is_new(self, current: Current) -> bool:
        newest = self._newest.get(current.model.name)
        written = (current.model, current.text, current.origin)
        return newest is None or (newest.model, newest.text, newest.origin) != written

    def _enter(self, current: Current) -> StoredDefinition:
        name = current.model.name
        # What an engine does not notice needs no proof of its own, and cures nothing.
        known = next((each for each in (self._proven.get(name), self._newest.get(name)) if _tells(each, current)), None)
        return StoredDefinition(
            number=0,
            model=current.model,
            text=current.text,
            origin=current.origin,
            place=current.place,
            added_at=self._wall(),
            outcome=known.outcome if known is not None else "",
            outcome_at=known.outcome_at if known is not None else None,
            why=known.why if known is not None else None,
        )

    async def enter_again(self, earlier: StoredDefinition, note: str) -> StoredDefinition:
        """An earlier definition of a stored model is the current one again: it gets a number of its own, so that the
        newest is the current one, and the last number tells how often it changed."""
        is_proven = earlier.outcome == PROVEN
        entry = StoredDefinition(
            number=0,
            model=earlier.model,
            text=earlier.text,
            origin=Origin.STORED,
            note=note,
            added_at=self._wall(),
            outcome=PROVEN if is_proven else "",
            outcome_at=earlier.outcome_at if is_proven else None,
        )
        (kept,) = await self._keep([entry])
        return kept

    async def _keep(self, entries: Sequence[StoredDefinition]) -> tuple[StoredDefinition, ...]:
        kept = await self._store.add(entries)
        for each in kept:
            self._newest[each.model.name] = each
            if each.outcome == PROVEN:
                self._proven[each.model.name] = each
        return kept

    # -- what became of them

    async def note_proven(self, model: Model) -> None:
        """The model has served by this definition."""
        entry = find_entry(await self._store.list(model.name), model)
        if entry is not None and entry.outcome != PROVEN:
            await self._judge(entry, PROVEN, None)

    async def note_failed(self, model: Model, why: str) -> StoredDefinition | None:
        """This definition has not come to serve; its entry, None where there is none."""
        entry = find_entry(await self._store.list(model.name), model)
        if entry is not None:
            await self._judge(entry, FAILED, why)
        return entry

    async def excuse(self, name: ModelName) -> bool:
        """Let the current definition be tried again; whether it had failed."""
        newest = self._newest.get(name)
        if newest is None or newest.outcome != FAILED:
            return False
        await self._judge(newest, "", None)
        return True

    async def _judge(self, entry: StoredDefinition, outcome: str, why: str | None) -> None:
        await self._store.judge(entry.model.name, entry.number, outcome, self._wall(), why)
        await self._load_model(entry.model.name)

    async def _load_model(self, name: ModelName) -> None:
        """Look at one model's anew."""
        entries = await self._store.list(name)
        _set(self._newest, name, next(iter(entries), None))
        _set(self._proven, name, next((each for each in entries if each.outcome == PROVEN), None))

    def forget(self, name: ModelName) -> None:
        """The model is gone, and the store has nothing of it any more."""
        self._newest.pop(name, None)
        self._proven.pop(name, None)


def _tells(entry: StoredDefinition | None, current: Current) -> TypeGuard[StoredDefinition]:
    """What became of this entry becomes of the current definition as well."""
    return entry is not None and is_same_launch(entry.model, current.model)


def _set(known: dict[ModelName, StoredDefinition], name: ModelName, entry: StoredDefinition | None) -> None:
    if entry is None:
        known.pop(name, None)
    else:
        known[name] = entry


def find_entry(entries: Sequence[StoredDefinition], model: Model) -> StoredDefinition | None:
    """The newest that is this very definition, or else the newest that engines are launched alike by."""
    for each in entries:
        if each.model == model:
            return each
    return next((each for each in entries if is_same_launch(each.model, model)), None)


def view_entries(entries: Sequence[StoredDefinition], running: Iterable[ShardSpec]) -> tuple[DefinitionView, ...]:
    """The newest first, as they come; ``running`` are the launches of what serves now."""
    serving: set[int] = set()
    for spec in running:
        by = next((each.number for each in entries if each.model == spec.model), None)
        if by is None:
            by = next((each.number for each in entries if defines(each.model, spec)), None)
        if by is not None:
            serving.add(by)
    return tuple(
        DefinitionView(
            number=each.number,
            at=each.added_at,
            origin=Origin(each.origin),
            current=position == 0,
            serving=each.number in serving,
            outcome=Outcome(each.outcome) if each.outcome else None,
            outcome_at=each.outcome_at,
            why=each.why,
            where=each.place,
            note=each.note,
            text=each.text,
        )
        for position, each in enumerate(entries)
    )
