"""The models' definitions, declared in server.yaml or stored: what is checked, what is kept, what the fleet is told.

Each that becomes the current one of its model gets a number in the history of that; what became of it decides whether
the fleet goes by it after a restart.
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import trio

from llmgw.admin.management import Refused
from llmgw.admin.views import AddedModel, Concern, Reloaded, Removed
from llmgw.config.definition import Definition, find_rejections, parse_definitions
from llmgw.core.catalog import Catalog
from llmgw.core.events import CatalogChanged
from llmgw.core.model import Model, ModelName
from llmgw.core.replica import ShardState
from llmgw.core.rolling import defines
from llmgw.engines.registry import Engine
from llmgw.errors import ConfigError, LlmgwError, Problem
from llmgw.server.acts import ACT_SECONDS, carry_through
from llmgw.server.history import Current, Histories
from llmgw.server.names import StoredModel, find_claims, find_clashes, name_taken, what_it_is
from llmgw.server.scheduler import Scheduler
from llmgw.store import StoredDefinition

log = logging.getLogger(__name__)

T = TypeVar("T")


class ModelStore(Protocol):
    """Where added models are kept; what has returned is durable. LlmgwError when it can't be done."""

    async def list(self) -> tuple[StoredModel, ...]: ...

    async def put(self, model: Model, text: str, now: float) -> None:
        """Add it, or put it in the place of the one of that name."""
        ...

    async def remove(self, name: ModelName) -> bool:
        """Whether there was one. What became of its definitions, and its hold, stay."""
        ...

    async def forget(self, name: ModelName) -> bool:
        """The same, and these go with it: all of it or nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reread:
    """server.yaml as it is now: its models, the keys that have changed, and what puts those into effect that can be."""

    file: str
    declared: tuple[Definition, ...]
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]
    apply: Callable[[], Awaitable[None]]


class Defining:
    """The acts upon models, one after another, so that no two of them can claim one name; each is in the store before
    the fleet hears of it. Where server.yaml and the store have the same name, server.yaml wins.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        engines: Mapping[str, Engine],
        store: ModelStore,
        histories: Histories,
        declared: tuple[Definition, ...],
        reread: Callable[[], Awaitable[Reread]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._engines = engines
        self._store = store
        self._histories = histories
        self._declared = declared
        self._stored: tuple[StoredModel, ...] = ()
        self._reread = reread
        self._wall = wall
        self._acting = trio.Lock()

    async def load(self) -> None:
        """Tell the fleet of the models that there are: once, at the start."""
        await self._histories.load()
        await self._publish()
        self._warn()

    def _warn(self) -> None:
        for concern in (*self.shadowed(), *self.failed()):
            log.warning("%s: %s", concern.name, concern.message)

    # what there is

    def places(self) -> Mapping[str, str]:
        """Where each declared model stands, by its name."""
        return {definition.model.name: definition.places["name"] for definition in self._declared}

    def find_stored(self, name: str) -> StoredModel | None:
        return next((each for each in self._stored if each.model.name == name), None)

    def find(self, name: str) -> Model:
        """The model of that name, alias or adapter. Refused when there is none."""
        found = self._scheduler.fleet.catalog.resolve(name)
        if found is None:
            raise self._unknown(name)
        return found

    def find_model(self, name: str) -> Model:
        """The model of that name or alias. Refused when there is none, and for an adapter: it is only a part of one."""
        found = self.find(name)
        if found.find_lora(name) is not None:
            raise self._unknown(name)
        return found

    def shadowed(self) -> list[Concern]:
        """Stored models that server.yaml has taken the name of."""
        places = self.places()
        return [
            Concern(
                kind="model",
                name=each.model.name,
                message=f"stored as well as declared at {places[each.model.name]}, which is in effect; "
                f"`llmgw ctl model rm {each.model.name}` forgets the stored one",
            )
            for each in self._stored
            if each.model.name in places
        ]

    def failures(self) -> Mapping[str, str]:
        """Why the definition of a model has failed, by its name, where the one before goes on."""
        found = ((name, self._histories.failure(name)) for name in sorted(self._histories.failed()))
        return {name: why for name, why in found if why is not None}

    def failed(self) -> list[Concern]:
        """The same, for who is to do something about it."""
        return [
            Concern(kind="model", name=name, message=self._tell_failure(name, why))
            for name, why in self.failures().items()
        ]

    def _tell_failure(self, name: str, why: str) -> str:
        place = self.places().get(name)
        where, how = ("", f"`llmgw ctl model edit {name}`") if place is None else (f" in {place}", "change it there")
        return (
            f"the definition{where} failed: {why}; the one before goes on ({how}, or `llmgw ctl load {name}` to try it "
            "again)"
        )

    async def read(self, file: str, text: str) -> tuple[Definition, ...]:
        """What a file says, if it could be added or put in the place of what has these names. Nothing is changed."""
        # Reading a long definition takes longer than a turn of the loop may.
        definitions = await trio.to_thread.run_sync(self._read, text, file)
        names = {definition.model.name for definition in definitions}
        others = [definition for definition in self._declared if definition.model.name not in names]
        if problems := find_clashes(definitions, stored=self._stored, declared=others, replace=True):
            raise name_taken(problems)
        return definitions

    # what acts

    async def add(self, file: str, text: str, *, replace: bool) -> tuple[AddedModel, ...]:
        """Store the models of a definition, none unless all can be."""
        # Reading a long definition takes longer than a turn of the loop may.
        definitions = await trio.to_thread.run_sync(self._read, text, file)
        async with self._acting:
            if problems := find_clashes(definitions, stored=self._stored, declared=self._declared, replace=replace):
                raise name_taken(problems)
            before = {each.model.name for each in self._stored}
            rolls = self.find_rolling(each.model for each in definitions)

            async def put_all() -> None:
                for definition in definitions:
                    # Of many each has its own part: a file kept with each of its models would grow by their square.
                    kept = text if len(definitions) == 1 else definition.text
                    await self._store.put(definition.model, kept, self._wall())

            await self._act(put_all)
        return tuple(
            AddedModel(
                name=each.model.name,
                replaced=each.model.name in before,
                runs=each.model.scaling.max > 0,
                rolls=each.model.name in rolls,
                on_demand=each.model.scaling.on_demand,
                held=self._scheduler.fleet.held(each.model.name),
                number=newest.number if (newest := self._histories.newest(each.model.name)) is not None else None,
                not_in_effect=each.not_in_effect,
            )
            for each in definitions
        )

    def find_rolling(self, definitions: Iterable[Model]) -> set[ModelName]:
        """Those of them that have replicas which these definitions would launch otherwise."""
        written = {model.name: model for model in definitions}
        return {
            replica.model
            for each in self._scheduler.fleet.statistics().models
            for replica in each.replicas
            if replica.state is not ShardState.ENDED
            and replica.model in written
            and not defines(written[replica.model], replica.shard)
        }

    async def remove(self, name: str) -> Removed:
        """Forget a model that was added, with its history and its hold where server.yaml does not declare it too."""
        async with self._acting:
            place = self.places().get(name)
            if place is not None and self.find_stored(name) is None:
                message = f"{name} is declared at {place}: take it out there, then `llmgw ctl reload`"
                raise Refused(message, status=409, code="declared_model")

            async def forget() -> bool:
                # The store is asked in any case: it may keep one that this version can't read. And it may have
                # forgotten one before, when the answer got lost, that the fleet still has.
                was_known = self.find_stored(name) is not None
                if place is not None:
                    return await self._store.remove(ModelName(name)) or was_known
                was_there = await self._store.forget(ModelName(name)) or was_known
                if was_there:
                    self._histories.forget(ModelName(name))
                return was_there

            if not await self._act(forget):
                raise self._unknown(name)
        return Removed(name=name, declared=place)

    async def put_back(self, entry: StoredDefinition, note: str) -> StoredDefinition:
        """Within a change: store an earlier definition again, as the current one of a model that is not declared; the
        entry that it gets. Refused where another model has one of its names by now."""
        places = dict.fromkeys(("name", "aliases"), f"definition {entry.number}")
        places |= {f"loras[{index}].name": places["name"] for index, _ in enumerate(entry.model.loras)}
        definition = Definition(model=entry.model, scaled=True, not_in_effect=(), places=places, text=entry.text)
        if problems := find_clashes([definition], stored=self._stored, declared=self._declared, replace=True):
            raise name_taken(problems)
        await self._store.put(entry.model, entry.text, self._wall())
        return await self._histories.enter_again(entry, note)

    async def reload(self) -> Reloaded:
        """Read server.yaml again. Where anything in it is wrong all stays as it was."""
        async with self._acting:
            found = await self._read_again()
            if problems := find_claims(found.declared, stored=self._stored):
                raise name_taken(problems)

            async def apply() -> None:
                await found.apply()
                self._declared = found.declared

            await self._act(apply)
        self._warn()
        failed = tuple(concern for concern in self.failed() if concern.name in self.places())
        return Reloaded(file=found.file, changed=found.changed, needs_restart=found.needs_restart, failed=failed)

    async def _read_again(self) -> Reread:
        with trio.move_on_after(ACT_SECONDS):
            return await self._reread()
        message = f"server.yaml could not be read within {ACT_SECONDS:g} s; look at its disk, then try again"
        raise Refused(message, status=503, code="config_unavailable")

    async def change(self, make: Callable[[], Awaitable[T]]) -> T:
        """Make a change to what is stored, while nobody else does, then tell the fleet which models there are."""
        async with self._acting:
            return await self._act(make)

    async def note(self, make: Callable[[], Awaitable[T]]) -> T:
        """The same for what the fleet knows already."""
        async with self._acting:
            return await carry_through(make)

    async def _act(self, change: Callable[[], Awaitable[T]]) -> T:
        """Make a change, then tell the fleet which models there are."""

        async def act() -> T:
            try:
                done = await change()
            except LlmgwError:
                # Of several models the first may be in.
                await self._publish()
                raise
            await self._publish()
            return done

        return await carry_through(act)

    async def _publish(self) -> None:
        self._stored = await self._store.list()
        currents = list(self._currents())
        await self._histories.record(currents)
        models = Catalog(current.model for current in currents).models
        proven, failed = self._histories.proven(), self._histories.failed()
        served = self._histories.served()
        await self._scheduler.post(CatalogChanged(models=models, proven=proven, failed=failed, served=served))

    def _currents(self) -> Iterator[Current]:
        """The definitions in effect: of two of one name, the declared one."""
        for each in self._declared:
            yield Current(model=each.model, text=each.text, place=each.places["name"])
        places = self.places()
        for stored in self._stored:
            if stored.model.name not in places:
                yield Current(model=stored.model, text=stored.text)

    # what is checked

    def _read(self, text: str, file: str) -> tuple[Definition, ...]:
        definitions = parse_definitions(text, file, self._engines)
        problems = [*find_rejections(definitions, self._engines), *self._loose_files(definitions)]
        if problems:
            raise ConfigError(problems)
        return definitions

    def _loose_files(self, definitions: tuple[Definition, ...]) -> Iterator[Problem]:
        """A bare file name would be looked for wherever the agent of a node happened to be started."""
        suffixes = tuple(suffix for engine in self._engines.values() for suffix in engine.info.file_suffixes)
        for definition in definitions:
            for key, source in definition.sources():
                if not source.startswith("/") and ":" not in source and source.endswith(suffixes):
                    message = f"{source!r} is no whole path; write the one that the file has on the nodes"
                    yield Problem(key=key, message=message, where=definition.places[key])

    def tell_unknown(self, name: str) -> str | None:
        """That there is no model of that name, alias or adapter, and which may be meant; None where there is."""
        return None if self._scheduler.fleet.catalog.resolve(name) is not None else self._unknown(name).message

    def _unknown(self, name: str) -> Refused:
        catalog = self._scheduler.fleet.catalog
        meant = catalog.resolve(name)
        if meant is not None and meant.name != name:
            message = f"{name} is {what_it_is(meant, name)}: give that name"
        else:
            close = difflib.get_close_matches(name, [model.name for model in catalog], n=1)
            message = f"there is no model {name}" + (f"; did you mean {close[0]}?" if close else "")
        return Refused(message, status=404, code="unknown_model")
