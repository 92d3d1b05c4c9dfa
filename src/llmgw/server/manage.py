"""Every management act, once: what is checked, what is stored, and what the fleet is told."""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import trio

from llmgw import __version__
from llmgw.admin.management import Refused
from llmgw.admin.views import (
    AddedModel,
    Concern,
    EnginesView,
    ModelDetail,
    ModelView,
    NodeView,
    Origin,
    Reloaded,
    Removed,
    ReplicaView,
    StatusView,
    ToolsChecked,
)
from llmgw.config.definition import Definition, find_rejections, parse_definitions
from llmgw.core.catalog import Catalog
from llmgw.core.events import CatalogChanged
from llmgw.core.fleet import FleetStatistics
from llmgw.core.model import Model, ModelName
from llmgw.core.placement import Rejected
from llmgw.engines.registry import Found
from llmgw.errors import ConfigError, LlmgwError, Problem
from llmgw.server.looking import (
    LinkFacts,
    away_nodes,
    count,
    find_concerns,
    view_engines,
    view_model,
    view_nodes,
    view_replicas,
)
from llmgw.server.scheduler import Scheduler

log = logging.getLogger(__name__)

# An act that has begun is carried through, whoever asked for it has left or not; a store that hangs ends it.
ACT_SECONDS = 15.0

T = TypeVar("T")


class StoredModel(Protocol):
    """A model that was added, what was written, and when it was (in seconds since 1970)."""

    @property
    def model(self) -> Model: ...
    @property
    def text(self) -> str: ...
    @property
    def added_at(self) -> float: ...


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
    apply: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """Who has a name already. ``words`` say who it is, for the end of a sentence."""

    model: ModelName
    words: str


class Manage:
    """Looks and acts for the operator port, the pages, and a signal that asks for a reload.

    Acts come one after another, so that no two of them can claim one name; each is in the store before the fleet hears
    of it. Where server.yaml and the store have the same name, server.yaml wins.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        plugins: Found,
        store: ModelStore,
        declared: tuple[Definition, ...],
        links: Callable[[], tuple[LinkFacts, ...]],
        reread: Callable[[], Awaitable[Reread]],
        check_tools: Callable[[Model, str | None], Awaitable[ToolsChecked]],
        clock: Callable[[], float] = trio.current_time,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._plugins = plugins
        self._engines = plugins.engines
        self._store = store
        self._declared = declared
        self._stored: tuple[StoredModel, ...] = ()
        self._links = links
        self._reread = reread
        self._check_tools = check_tools
        self._clock = clock
        self._wall = wall
        self._started_at = clock()
        self._acting = trio.Lock()

    async def load(self) -> None:
        """Tell the fleet of the models that there are: once, at the start."""
        await self._publish()
        for concern in self._shadowed():
            log.warning("%s: %s", concern.name, concern.message)

    # what looks

    def status(self) -> StatusView:
        fleet = self._scheduler.fleet.statistics()
        nodes, models = view_nodes(fleet, self._links()), self._view_models(fleet)
        return StatusView(
            version=__version__,
            up_seconds=round(self._clock() - self._started_at, 1),
            nodes=count(node.state for node in nodes),
            models=count(model.status for model in models),
            replicas=count(replica.state for replica in view_replicas(fleet, self._clock())),
            memory_gb=sum(each.node.memory_gb for each in fleet.nodes),
            memory_booked_gb=sum(each.booked_gb for each in fleet.nodes),
            concerns=(*find_concerns(nodes, models), *self._shadowed()),
        )

    def nodes(self) -> tuple[NodeView, ...]:
        return view_nodes(self._scheduler.fleet.statistics(), self._links())

    def engines(self) -> EnginesView:
        return view_engines(self._plugins, self.nodes())

    def models(self) -> tuple[ModelView, ...]:
        return self._view_models(self._scheduler.fleet.statistics())

    def _view_models(self, fleet: FleetStatistics) -> tuple[ModelView, ...]:
        places, away = self._declared_places(), away_nodes(fleet, self._links())
        return tuple(view_model(each, away, *self._origin(each.model.name, places)) for each in fleet.models)

    def replicas(self, model: str | None) -> tuple[ReplicaView, ...]:
        found = view_replicas(self._scheduler.fleet.statistics(), self._clock())
        return found if model is None else tuple(replica for replica in found if replica.model == model)

    def model(self, name: str) -> ModelDetail:
        found = self._scheduler.fleet.catalog.resolve(name)
        if found is None:
            raise self._unknown(name)
        fleet = self._scheduler.fleet.statistics()
        each = next(each for each in fleet.models if each.model.name == found.name)
        origin, where = self._origin(found.name, self._declared_places())
        stored = self._find_stored(found.name) if origin is Origin.STORED else None
        return ModelDetail(
            model=view_model(each, away_nodes(fleet, self._links()), origin, where),
            definition=each.model,
            replicas=self.replicas(found.name),
            rejections=each.verdict.rejections if isinstance(each.verdict, Rejected) else (),
            text=stored.text if stored else None,
            added_at=stored.added_at if stored else None,
        )

    async def tool_check(self, name: str, replica: str | None) -> ToolsChecked:
        model = self._scheduler.fleet.catalog.resolve(name)
        if model is None:
            raise self._unknown(name)
        return await self._check_tools(model, replica)

    # what acts

    async def add(self, file: str, text: str, *, replace: bool) -> tuple[AddedModel, ...]:
        # Reading a long definition takes longer than a turn of the loop may.
        definitions = await trio.to_thread.run_sync(self._read, text, file)
        async with self._acting:
            if problems := self._clashes(definitions, replace=replace):
                raise _name_taken(problems)
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
        async with self._acting:
            place = self._declared_places().get(name)
            if place is not None and self._find_stored(name) is None:
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
            if problems := self._claims_of_stored(found.declared):
                raise _name_taken(problems)

            async def apply() -> None:
                found.apply()
                self._declared = found.declared

            await self._act(apply)
        for concern in self._shadowed():
            log.warning("%s: %s", concern.name, concern.message)
        return Reloaded(file=found.file, changed=found.changed, needs_restart=found.needs_restart)

    async def _read_again(self) -> Reread:
        with trio.move_on_after(ACT_SECONDS):
            return await self._reread()
        message = f"server.yaml could not be read within {ACT_SECONDS:g} s; look at its disk, then try again"
        raise Refused(message, status=503, code="config_unavailable")

    async def _act(self, change: Callable[[], Awaitable[T]]) -> T:
        """Make a change, then tell the fleet which models there are."""
        # Shielded: a client that leaves between the two would leave them apart.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + ACT_SECONDS):
            try:
                done = await change()
            except LlmgwError:
                # Of several models the first may be in.
                await self._publish()
                raise
            await self._publish()
            return done
        message = f"the store did not answer within {ACT_SECONDS:g} s; look whether it was done before you try again"
        raise Refused(message, status=503, code="store_unavailable")

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

    def _clashes(self, definitions: tuple[Definition, ...], *, replace: bool) -> list[Problem]:
        names = {definition.model.name for definition in definitions}
        owners = self._owners(without=names)
        stored = {each.model.name for each in self._stored}
        problems = []
        for definition in definitions:
            name = definition.model.name
            if name in stored and name not in owners and not replace:
                message = f"{name!r} is stored already; --replace puts this definition in its place"
                problems.append(Problem(key="name", message=message, where=definition.places["name"]))
            problems += _taken(definition, owners)
        return problems

    def _claims_of_stored(self, declared: tuple[Definition, ...]) -> list[Problem]:
        """Names of stored models that these take; a stored model of the same name just makes way."""
        names = {definition.model.name for definition in declared}
        owners = {
            name: _Owner(model=each.model.name, words=_words_of_stored(each.model, name))
            for each in self._stored
            if each.model.name not in names
            for name in each.model.names()
        }
        return [problem for definition in declared for problem in _taken(definition, owners)]

    def _owners(self, without: set[ModelName]) -> dict[str, _Owner]:
        """Who has each name, alias and adapter; stored models named in ``without`` are about to be replaced."""
        owners = {
            name: _Owner(model=each.model.name, words=_words_of_stored(each.model, name))
            for each in self._stored
            if each.model.name not in without
            for name in each.model.names()
        }
        for definition in self._declared:
            model = definition.model
            for key, name in definition.claims():
                words = f"{_what_it_is(model, name)}, declared at {definition.places[key]}"
                owners[name] = _Owner(model=model.name, words=words)
        return owners

    def _declared_places(self) -> dict[str, str]:
        return {definition.model.name: definition.places["name"] for definition in self._declared}

    def _origin(self, name: ModelName, places: Mapping[str, str]) -> tuple[Origin, str | None]:
        return (Origin.DECLARED, places[name]) if name in places else (Origin.STORED, None)

    def _find_stored(self, name: str) -> StoredModel | None:
        return next((each for each in self._stored if each.model.name == name), None)

    def _shadowed(self) -> list[Concern]:
        """Stored models that server.yaml has taken the name of."""
        places = self._declared_places()
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

    def _unknown(self, name: str) -> Refused:
        catalog = self._scheduler.fleet.catalog
        meant = catalog.resolve(name)
        if meant is not None and meant.name != name:
            message = f"{name} is {_what_it_is(meant, name)}: give that name"
        else:
            close = difflib.get_close_matches(name, [model.name for model in catalog], n=1)
            message = f"there is no model {name}" + (f"; did you mean {close[0]}?" if close else "")
        return Refused(message, status=404, code="unknown_model")


def _name_taken(problems: list[Problem]) -> Refused:
    message = "; ".join(str(problem) for problem in problems)
    return Refused(message, status=409, code="name_taken", problems=tuple(problems))


def _words_of_stored(model: Model, name: str) -> str:
    return f"{_what_it_is(model, name)}, stored (`llmgw ctl model rm {model.name}` removes it)"


def _what_it_is(model: Model, name: str) -> str:
    if name == model.name:
        return "a model"
    return f"an {'alias' if model.find_lora(name) is None else 'adapter'} of {model.name}"


def _taken(definition: Definition, owners: Mapping[str, _Owner]) -> Iterator[Problem]:
    for key, name in definition.claims():
        if owner := owners.get(name):
            message = f"{name!r} is taken already: it is {owner.words}"
            yield Problem(key=key, message=message, where=definition.places[key])
