"""What an operator stops and loads: models that are held at zero, kept in the store, and replicas that are replaced."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import trio

from llmgw.admin.management import Refused
from llmgw.admin.views import LoadBegun, Removed, Stopped
from llmgw.core.events import ModelCalled, ModelsHeld, ReplicaRecalled
from llmgw.core.model import Model, ModelName
from llmgw.core.placement import Rejected
from llmgw.core.replica import Replica, ShardState
from llmgw.server.acts import carry_through
from llmgw.server.defining import Defining
from llmgw.server.history import Histories
from llmgw.server.looking import tell_reasons
from llmgw.server.names import what_it_is
from llmgw.server.scheduler import Scheduler


class HoldStore(Protocol):
    """Where holds are kept; what has returned is durable. LlmgwError when it can't be done."""

    async def list(self) -> Mapping[ModelName, float]: ...

    async def add(self, name: ModelName, now: float) -> bool:
        """Whether it was not held before."""
        ...

    async def remove(self, name: ModelName) -> bool:
        """Whether it was held."""
        ...


class Holding:
    """The acts, one after another; each is in the store before the fleet hears of it. A hold is by the model's name,
    and outlasts its declaration: who declares it again finds it stopped."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: HoldStore,
        *,
        defining: Defining,
        histories: Histories,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._store = store
        self._defining = defining
        self._histories = histories
        self._wall = wall
        # as the fleet knows it: of what the store has done nothing is left to be read, which may fail
        self._held: set[ModelName] = set()
        self._acting = trio.Lock()

    async def begin(self) -> None:
        """Tell the fleet what an earlier server has held: at the start, before it may place anything."""
        self._held = set(await self._store.list())
        await self._tell()

    async def _tell(self) -> None:
        await self._scheduler.settle(ModelsHeld(models=frozenset(self._held)))

    async def stop(self, name: str) -> Stopped:
        """Hold the model of that name or alias at zero, or replace the replica of that id."""
        model = self._scheduler.fleet.catalog.resolve(name)
        if model is not None and model.find_lora(name) is None:
            return await self._hold(model)
        replica = self._find_replica(name)
        if replica is not None:
            return await self._recall(replica)
        if model is not None:
            message = f"{name} is {what_it_is(model, name)}: give that name"
        else:
            close = difflib.get_close_matches(name, self._names(), n=1)
            message = f"there is no model or replica {name}" + (f"; did you mean {close[0]}?" if close else "")
        raise Refused(message, status=404, code="unknown_name")

    async def load(self, name: str) -> LoadBegun:
        """Let the model of that name or alias run: end its hold, try a definition again that has failed, and load it
        where it loads on demand."""
        model = self._defining.find_model(name)
        if model.scaling.max == 0:
            raise Refused(self._tell_unscaled(model.name), status=409, code="not_scaled")

        async def act() -> tuple[bool, bool]:
            retried = await self._defining.note(lambda: self._histories.excuse(model.name))
            # (the store may have ended it before, when the answer got lost)
            held = await self._store.remove(model.name) or model.name in self._held
            self._held.discard(model.name)
            await self._tell()
            await self._scheduler.settle(ModelCalled(model=model.name))
            return held, retried

        async with self._acting:
            held, retried = await carry_through(act)
        return LoadBegun(
            model=model.name,
            held=held,
            retried=retried,
            running=self._running(model.name),
            serving=tuple(replica.id for replica in self._scheduler.fleet.ready(model.name)),
            wanted=self._scheduler.fleet.wanted(model, trio.current_time()),
            waits=self._find_wait(model.name),
            makes_way=self._scheduler.fleet.makes_way(model.name),
        )

    def _find_wait(self, name: ModelName) -> str | None:
        """Why no replica of it is on its way, where that is so."""
        fleet = self._scheduler.fleet
        serving = {replica.id for replica in fleet.ready(name)}
        verdict = fleet.verdict(name)
        if set(self._running(name)) - serving:
            return None
        if isinstance(verdict, Rejected):
            return tell_reasons(name, verdict)
        # (one that serves waits for nothing that it is told of)
        return None if serving or verdict is not None else fleet.held_up(trio.current_time())

    async def remove(self, name: str) -> Removed:
        """Forget a model that was added, and that it was stopped."""

        async def act() -> Removed:
            removed = await self._defining.remove(name)
            if removed.declared is None:
                self._held.discard(ModelName(name))
                # Behind the word that it is gone: the other way round it would be started for a moment.
                await self._tell()
            return removed

        async with self._acting:
            return await carry_through(act)

    async def _hold(self, model: Model) -> Stopped:
        name, running = model.name, self._running(model.name)

        async def act() -> bool:
            is_new = await self._store.add(name, self._wall()) or name not in self._held
            self._held.add(name)
            await self._tell()
            return is_new

        async with self._acting:
            # (it may have been removed while this waited)
            self._defining.find_model(name)
            is_new = await carry_through(act)
        return Stopped(model=name, running=running, already=not is_new, unscaled=model.scaling.max == 0)

    async def _recall(self, replica: Replica) -> Stopped:
        if replica.state is ShardState.ENDED:
            message = f"{replica.id} has ended, and is tried again by itself: `llmgw ctl replicas` says why"
            raise Refused(message, status=409, code="replica_ended")
        already = replica.draining is not None or replica.state is ShardState.STOPPING
        if not already:
            await self._scheduler.settle(ReplicaRecalled(replica=replica.id, epoch=replica.epoch))
        return Stopped(
            model=replica.model,
            replica=replica.id,
            running=(replica.id,),
            already=already,
            idle=not already and not self._is_wanted(replica.model),
        )

    def _is_wanted(self, name: ModelName) -> bool:
        """Whether there is to be a replica of it now."""
        fleet = self._scheduler.fleet
        model = fleet.catalog.named(name)
        return model is not None and fleet.wanted(model, trio.current_time()) > 0

    def _replicas(self) -> dict[str, Replica]:
        """By id, the last epoch of each; also of models that are gone."""
        found = sorted(
            (replica for node in self._scheduler.fleet.statistics().nodes for replica in node.replicas),
            key=lambda replica: replica.epoch,
        )
        return {replica.id: replica for replica in found}

    def _find_replica(self, name: str) -> Replica | None:
        return self._replicas().get(name)

    def _running(self, name: ModelName) -> tuple[str, ...]:
        return tuple(
            sorted(
                replica.id
                for replica in self._replicas().values()
                if replica.model == name and replica.state is not ShardState.ENDED
            )
        )

    def _names(self) -> list[str]:
        models = [name for model in self._scheduler.fleet.catalog for name in (model.name, *model.aliases)]
        return [*models, *self._replicas()]

    def _tell_unscaled(self, name: ModelName) -> str:
        place = self._defining.places().get(name)
        scaling = "scaling: {min: 0, max: 1}"
        if place is not None:
            how = f"write {scaling} (or more) at {place}, then `llmgw ctl reload`"
        else:
            how = f"write {scaling} (or more) with `llmgw ctl model edit {name}`"
        return f"{name} is not to run: its scaling.max is 0, as where nothing is written. To have it loaded {how}"
