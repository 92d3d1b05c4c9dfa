"""What launches of a model have shown, for an operator to see, and to have forgotten where it leads astray."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import trio

from llmgw.admin.views import FactsView, FactView
from llmgw.core.events import FactsKnown
from llmgw.core.learned import Fact, FactKey, make_key
from llmgw.core.model import Model, ModelName
from llmgw.server.acts import carry_through
from llmgw.server.defining import Defining
from llmgw.server.scheduler import Scheduler


class FactStore(Protocol):
    """Where facts are kept; what has returned is durable. LlmgwError when it can't be done."""

    async def list(self) -> tuple[Fact, ...]:
        """All of them, the newest last."""
        ...

    async def remove(self, keys: Iterable[FactKey]) -> None: ...


class Learning:
    """The facts as the store has them, which has each a moment after the fleet."""

    def __init__(self, scheduler: Scheduler, store: FactStore, *, defining: Defining) -> None:
        self._scheduler = scheduler
        self._store = store
        self._defining = defining
        self._acting = trio.Lock()

    async def show(self, name: str) -> FactsView:
        """Those of the model of that name or alias, as it is written and as it is launched."""
        model = self._defining.find_model(name)
        facts = await self._store.list()
        return _view(model, _choose(facts, self._list_launches(model.name)))

    async def forget(self, name: str) -> FactsView:
        """Have them forgotten: what they were. Another model that is launched alike shares them."""
        model = self._defining.find_model(name)

        async def act() -> Mapping[Fact, tuple[str, ...]]:
            facts = await self._store.list()
            chosen = _choose(facts, self._list_launches(model.name))
            await self._store.remove([fact.key for fact in chosen])
            # Told in any case: an earlier try may have ended between the store and the fleet.
            await self._scheduler.settle(FactsKnown(facts=tuple(fact for fact in facts if fact not in chosen)))
            return chosen

        async with self._acting:
            return _view(model, await carry_through(act), forgotten=True)

    def _list_launches(self, name: ModelName) -> Iterator[Model]:
        fleet = self._scheduler.fleet
        yield from (model for model in (fleet.catalog.named(name), fleet.launched(name)) if model is not None)


def _choose(facts: Iterable[Fact], models: Iterable[Model]) -> Mapping[Fact, tuple[str, ...]]:
    """Those of launches of these, each with the profiles that launch so."""
    launches = [(model, profile) for model in models for profile in model.profiles]
    chosen: dict[Fact, tuple[str, ...]] = {}
    for fact in facts:
        key = fact.key
        profiles = {
            profile.name: None
            for model, profile in launches
            # (others are far more, and this is quicker)
            if key.source == model.source and make_key(model, profile, key.version, key.gpu_class) == key
        }
        if profiles:
            chosen[fact] = tuple(profiles)
    return chosen


def _view(model: Model, facts: Mapping[Fact, tuple[str, ...]], *, forgotten: bool = False) -> FactsView:
    return FactsView(
        model=model.name,
        forgotten=forgotten,
        facts=tuple(
            FactView(
                profiles=profiles,
                engine=fact.key.engine,
                version=fact.key.version or None,
                gpu_class=fact.key.gpu_class or None,
                load_seconds=fact.load_seconds,
                gpu_gb=fact.gpu_gb,
                memory_gb=fact.memory_gb,
            )
            for fact, profiles in facts.items()
        ),
    )
