"""All that an operator can see and do, in one place: what looks is drawn together here, acts are handed on."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import trio

from llmgw import __version__
from llmgw.admin.views import (
    AddedModel,
    CollectedView,
    Concern,
    DecisionView,
    EnginesView,
    EventsView,
    EventView,
    ExplanationView,
    FactsView,
    HistoryView,
    LoadBegun,
    ModelDetail,
    ModelView,
    NodeMarks,
    NodeState,
    NodeView,
    Origin,
    PlanView,
    PullView,
    Reloaded,
    Removed,
    RemovedNode,
    ReplicaView,
    RolledBack,
    StatusView,
    Stopped,
    StoreView,
    ToolsChecked,
    WeightsView,
)
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.picture import FleetStatistics, ModelStatistics
from llmgw.core.placement import Rejected
from llmgw.core.replica import ReplicaId
from llmgw.core.sizing import Needs
from llmgw.engines.registry import Found
from llmgw.server.chronicle import Happened
from llmgw.server.defining import Defining
from llmgw.server.explaining import (
    Answer,
    Question,
    explain_model,
    explain_written,
    find_away,
    is_served,
    see_hosts,
    view_decisions,
)
from llmgw.server.holding import Holding
from llmgw.server.learning import Learning
from llmgw.server.looking import (
    away_nodes,
    concerns_of_store,
    count,
    find_concerns,
    view_engines,
    view_model,
    view_replicas,
)
from llmgw.server.machines import KeptNode, LinkFacts, sum_classes, sum_fabrics, view_brake, view_nodes
from llmgw.server.marking import Marking
from llmgw.server.planning_ahead import find_engines, plan_ahead
from llmgw.server.returning import Returning
from llmgw.server.scheduler import Scheduler
from llmgw.server.stock import Stock, find_stalls, show_model, sum_fetching, sum_holdings, view_weights
from llmgw.server.supplying import Supplying

# Of one question for events: whoever follows asks again.
MAX_WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """All that is looked at, as it was at once: what is drawn from it may take longer than a turn of the loop may."""

    now: float
    wall: float
    up_seconds: float
    fleet: FleetStatistics
    held_up: str | None
    links: tuple[LinkFacts, ...]
    kept: Mapping[NodeId, KeptNode]
    skews: Mapping[NodeId, float]
    places: Mapping[str, str]
    shadowed: tuple[Concern, ...]
    failures: Mapping[str, str]
    store: StoreView
    stock: Stock

    def view_nodes(self, *, gpus: bool = True) -> tuple[NodeView, ...]:
        return view_nodes(self.fleet, self.links, kept=self.kept, skews=self.skews, wall=self.wall, gpus=gpus)

    def judge_nodes(self) -> Mapping[NodeId, NodeState]:
        return {NodeId(node.node): node.state for node in self.view_nodes(gpus=False)}

    def view_models(self) -> tuple[ModelView, ...]:
        away = away_nodes(self.fleet, self.links)
        return tuple(self.view_model(each, away) for each in self.fleet.models)

    def view_model(self, each: ModelStatistics, away: frozenset[NodeId] | None = None) -> ModelView:
        where = self.places.get(each.model.name)
        origin = Origin.STORED if where is None else Origin.DECLARED
        away = away_nodes(self.fleet, self.links) if away is None else away
        failure = self.failures.get(each.model.name)
        return view_model(each, away, origin, where, failure=failure, held_up=self.held_up is not None)

    def sum_up(self) -> StatusView:
        fleet, nodes, models = self.fleet, self.view_nodes(gpus=False), self.view_models()
        machines, known = {each.node.id: each for each in fleet.nodes}, self.stock.known
        away = frozenset(NodeId(node.node) for node in nodes if node.state is not NodeState.READY)
        return StatusView(
            version=__version__,
            up_seconds=self.up_seconds,
            nodes=count(node.state for node in nodes),
            models=count(model.status for model in models),
            replicas=count(replica.state for replica in view_replicas(fleet, self.now)),
            memory_gb=sum(each.node.memory_gb for each in fleet.nodes),
            memory_booked_gb=sum(each.booked_gb for each in fleet.nodes),
            classes=sum_classes(fleet),
            fabrics=sum_fabrics(fleet),
            store=self.store,
            held_up=self.held_up,
            brake=view_brake(fleet, self.now),
            concerns=(
                *find_concerns(nodes, machines, models),
                *find_stalls(known, away),
                *self.shadowed,
                *concerns_of_store(self.store),
            ),
            holdings=sum_holdings(fleet),
            fetching=sum_fetching(known, away),
        )


class Manage:
    """Looks and acts for the operator port, the pages, and a signal that asks for a reload."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        plugins: Found,
        defining: Defining,
        marking: Marking,
        holding: Holding,
        returning: Returning,
        learning: Learning,
        supplying: Supplying,
        skews: Mapping[NodeId, float],
        describe_store: Callable[[], StoreView],
        check_tools: Callable[[Model, str | None], Awaitable[ToolsChecked]],
        in_flight: Callable[[], Mapping[ReplicaId, int]],
        clock: Callable[[], float] = trio.current_time,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``skews`` are the seconds that nodes' clocks are ahead, kept as they change; ``in_flight`` are the requests
        that each replica answers."""
        self._scheduler = scheduler
        self._plugins = plugins
        self._defining = defining
        self._marking = marking
        self._holding = holding
        self._returning = returning
        self._learning = learning
        self._supplying = supplying
        self._skews = skews
        self._describe_store = describe_store
        self._check_tools = check_tools
        self._in_flight = in_flight
        self._clock = clock
        self._wall = wall
        self._started_at = clock()

    # what looks

    async def status(self) -> StatusView:
        return await trio.to_thread.run_sync(self._take_moment().sum_up)

    async def nodes(self) -> tuple[NodeView, ...]:
        return await trio.to_thread.run_sync(self._take_moment().view_nodes)

    async def engines(self) -> EnginesView:
        moment = self._take_moment()
        return await trio.to_thread.run_sync(lambda: view_engines(self._plugins, moment.view_nodes(gpus=False)))

    def models(self) -> tuple[ModelView, ...]:
        return self._take_moment().view_models()

    def _take_moment(self) -> _Moment:
        now = self._clock()
        fleet = self._scheduler.fleet.statistics(now)
        return _Moment(
            now=now,
            wall=self._wall(),
            up_seconds=round(now - self._started_at, 1),
            fleet=fleet,
            held_up=self._scheduler.fleet.held_up(now),
            links=self._marking.links(),
            kept=self._marking.kept,
            skews=dict(self._skews),
            places=self._defining.places(),
            shadowed=tuple(self._defining.shadowed()),
            failures=self._defining.failures(),
            store=self._describe_store(),
            stock=self._supplying.look(fleet),
        )

    async def weights(self) -> WeightsView:
        moment = self._take_moment()
        models = [each.model for each in moment.fleet.models]
        return await trio.to_thread.run_sync(lambda: view_weights(moment.stock, models, moment.judge_nodes()))

    async def pull(self, number: int) -> PullView:
        return self._supplying.find_pull(number, states=await self._judge_nodes())

    async def _judge_nodes(self) -> Mapping[NodeId, NodeState]:
        return await trio.to_thread.run_sync(self._take_moment().judge_nodes)

    def replicas(self, model: str | None) -> tuple[ReplicaView, ...]:
        found = view_replicas(self._scheduler.fleet.statistics(), self._clock(), self._in_flight())
        return found if model is None else tuple(replica for replica in found if replica.model == model)

    def model(self, name: str) -> ModelDetail:
        found, moment = self._defining.find(name), self._take_moment()
        each = next(each for each in moment.fleet.models if each.model.name == found.name)
        view = moment.view_model(each)
        stored = self._defining.find_stored(found.name) if view.origin is Origin.STORED else None
        verdict = each.verdict if isinstance(each.verdict, Rejected) else Rejected()
        return ModelDetail(
            model=view,
            definition=show_model(each.model),
            replicas=self.replicas(found.name),
            rejections=verdict.rejections,
            more_rejections=sum(verdict.reasons().values()) - len(verdict.rejections),
            text=stored.text if stored else None,
            added_at=stored.added_at if stored else None,
        )

    async def explain(self, name: str) -> ExplanationView:
        fleet, written, now = self._scheduler.fleet, self._defining.find(name), self._clock()
        model = fleet.launched(written.name) or written
        filled = fleet.filled(model)
        backing_off, failed = fleet.backing_off(model.name), fleet.failed(model.name, now)
        picture = fleet.statistics(now)
        away = find_away(picture, self._marking.seen())

        def explain_now() -> Answer:
            return Question(
                model=model,
                filled=filled,
                hosts=see_hosts(picture, model.name, now),
                now=now,
                backing_off=backing_off,
                failed=failed,
                away=away,
                serves=is_served(picture, model.name),
            ).explain()

        # With many nodes it takes longer than a turn may.
        return explain_model(fleet, model, await trio.to_thread.run_sync(explain_now), now)

    async def explain_what_if(self, file: str, text: str) -> tuple[ExplanationView, ...]:
        definitions = await self._defining.read(file, text)
        now = self._clock()
        fleet, held_up = self._scheduler.fleet.statistics(now), self._scheduler.fleet.held_up(now)
        away = find_away(fleet, self._marking.seen())
        models = [definition.model for definition in definitions]
        filled = {model.name: self._scheduler.fleet.filled(model) for model in models}
        return await trio.to_thread.run_sync(
            lambda: explain_written(models, fleet, now, filled=filled, away=away, held_up=held_up)
        )

    async def plan(self, needs: Needs) -> PlanView:
        now, engines = self._clock(), find_engines(needs.format, self._plugins.engines)
        picture, held_up = self._scheduler.fleet.statistics(now), self._scheduler.fleet.held_up(now)
        away = find_away(picture, self._marking.seen())
        return await trio.to_thread.run_sync(
            lambda: plan_ahead(needs, engines, picture, now, away=away, held_up=held_up)
        )

    def decisions(self) -> tuple[DecisionView, ...]:
        return view_decisions(self._scheduler.fleet.trace, self._clock())

    async def facts(self, name: str) -> FactsView:
        return await self._learning.show(name)

    async def history(self, name: str) -> HistoryView:
        return await self._returning.history(name)

    async def events(
        self, *, after: int, wait_seconds: float = 0.0, model: str | None = None, node: str | None = None
    ) -> EventsView:
        chronicle = self._scheduler.chronicle
        meant = None if model is None else self._scheduler.fleet.catalog.resolve(model)
        # (of a model that is gone there may be events all the same)
        about = meant.name if meant is not None else None if model is None else ModelName(model)
        of = None if node is None else NodeId(node)
        found = chronicle.since(after, model=about, node=of)
        missed, unknown = found.missed, self._list_unknown(model, node)
        with trio.move_on_after(min(max(wait_seconds, 0.0), MAX_WAIT_SECONDS)):
            while not found.happened:
                await chronicle.wait(found.last)
                found = chronicle.since(found.last, model=about, node=of)
                missed += found.missed
        return EventsView(
            events=tuple(map(_view_event, found.happened)),
            last=found.last,
            began=chronicle.began,
            missed=missed,
            unknown=unknown,
        )

    def _list_unknown(self, model: str | None, node: str | None) -> tuple[str, ...]:
        """What is to be said of these names, where there is no such model or node now."""
        said = (
            self._defining.tell_unknown(model) if model is not None else None,
            self._marking.tell_unknown(node) if node is not None else None,
        )
        return tuple(each for each in said if each is not None)

    async def tool_check(self, name: str, replica: str | None) -> ToolsChecked:
        return await self._check_tools(self._defining.find(name), replica)

    # what acts

    async def cordon(self, node: str, *, cordoned: bool) -> NodeMarks:
        return await self._marking.cordon(node, cordoned=cordoned)

    async def drain(self, node: str, *, deadline_seconds: float | None) -> NodeMarks:
        return await self._marking.drain(node, deadline_seconds=deadline_seconds)

    async def label(self, node: str, changes: Mapping[str, str | None]) -> NodeMarks:
        return await self._marking.label(node, changes)

    async def remove_node(self, node: str) -> RemovedNode:
        return await self._marking.remove(node)

    async def add(self, file: str, text: str, *, replace: bool) -> tuple[AddedModel, ...]:
        return await self._defining.add(file, text, replace=replace)

    async def remove(self, name: str) -> Removed:
        return await self._holding.remove(name)

    async def rollback(self, name: str, number: int | None) -> RolledBack:
        return await self._returning.rollback(name, number)

    async def stop(self, name: str) -> Stopped:
        return await self._holding.stop(name)

    async def load(self, name: str) -> LoadBegun:
        return await self._holding.load(name)

    async def forget_facts(self, name: str) -> FactsView:
        return await self._learning.forget(name)

    async def pull_weights(self, source: str, nodes: Sequence[str]) -> PullView:
        return await self._supplying.pull(source, nodes, states=await self._judge_nodes())

    async def collect_weights(self) -> CollectedView:
        return await self._supplying.collect(states=await self._judge_nodes())

    async def reload(self) -> Reloaded:
        return await self._defining.reload()


def _view_event(happened: Happened) -> EventView:
    return EventView(
        number=happened.number,
        at=happened.at,
        what=happened.what,
        text=happened.text,
        model=happened.model,
        node=happened.node,
        lines=happened.lines,
        warning=happened.warning,
    )
