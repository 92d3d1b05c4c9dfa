"""The models' definitions, declared in server.yaml or stored: what is checked, what is kept, what the fleet is told."""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import trio

from llmgw.admin.management import Refused
from llmgw.admin.views import AddedModel, Concern, Reloaded, Removed
from llmgw.config.definition import Definition, find_rejections, parse_definitions
from llmgw.core.catalog import Catalog
from llmgw.core.events import CatalogChanged
from llmgw.core.model import Model, ModelName
from llmgw.engines.registry import Engine
from llmgw.errors import ConfigError, LlmgwError, Problem
from llmgw.server.acts import ACT_SECONDS, carry_through
from llmgw.server.names import StoredModel, find_claims, find_clashes, name_taken, what_it_is
from llmgw.server.scheduler import Scheduler

log = logging.getLogger(__name__)

T = TypeVar("T")


class ModelStore(Protocol):
    """Where added models are kept; what has returned is durable. LlmgwError when it can't be done."""

    async def list(self) -> tuple[StoredModel, ...]: ...

    async def put(self, model: Model, text: str, now: float) -> None:
        """Add it, or put it in the place of the one of that name."""
        ...

    async def remove(self, name: ModelName) -> bool:
        """Whether there was one."""
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
        declared: tuple[Definition, ...],
        reread: Callable[[], Awaitable[Reread]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._engines = engines
        self._store = store
        self._declared = declared
        self._stored: tuple[StoredModel, ...] = ()
        self._reread = reread
        self._wall = wall
        self._acting = trio.Lock()

    async def load(self) -> None:
        """Tell the fleet of the models that there are: once, at the start."""
        await self._publish()
        for concern in self.shadowed():
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
                not_in_effect=each.not_in_effect,
            )
            for each in definitions
        )

    async def remove(self, name: str) -> Removed:
        """Forget a model that was added."""
        async with self._acting:
            place = self.places().get(name)
            if place is not None and self.find_stored(name) is None:
                message = f"{name} is declared at {place}: take it out there, then `llmgw ctl reload`"
                raise Refused(message, status=409, code="declared_model")
            # The store is asked in any case: it may keep one that this version can't read.
            if not await self._act(lambda: self._store.remove(ModelName(name))):
                raise self._unknown(name)
        return Removed(name=name, declared=place)

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
        for concern in self.shadowed():
            log.warning("%s: %s", concern.name, concern.message)
        return Reloaded(file=found.file, changed=found.changed, needs_restart=found.needs_restart)

    async def _read_again(self) -> Reread:
        with trio.move_on_after(ACT_SECONDS):
            return await self._reread()
        message = f"server.yaml could not be read within {ACT_SECONDS:g} s; look at its disk, then try again"
        raise Refused(message, status=503, code="config_unavailable")

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
        models = [definition.model for definition in self._declared]
        models += [stored.model for stored in self._stored]
        await self._scheduler.post(CatalogChanged(models=Catalog(models).models))

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

    def _unknown(self, name: str) -> Refused:
        catalog = self._scheduler.fleet.catalog
        meant = catalog.resolve(name)
        if meant is not None and meant.name != name:
            message = f"{name} is {what_it_is(meant, name)}: give that name"
        else:
            close = difflib.get_close_matches(name, [model.name for model in catalog], n=1)
            message = f"there is no model {name}" + (f"; did you mean {close[0]}?" if close else "")
        return Refused(message, status=404, code="unknown_model")
