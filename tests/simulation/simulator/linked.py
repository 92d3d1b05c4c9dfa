"""The larger size: the real scheduler, links, agents and exchange decisions under trio, over wires, machines and
engines of memory. The same scenarios, the same invariants, and the same stories."""

from __future__ import annotations

import itertools
import logging
import math
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, assert_never, cast

import trio
from clock import run_simulated
from depot import Origin
from hands import EngineProcess
from links import MemoryNetwork

from llmgw.agent.places import Places
from llmgw.agent.settings import AgentSettings, Pace, WeightsSettings
from llmgw.agent.tree import serve_node
from llmgw.core.effects import Effect
from llmgw.core.events import (
    Event,
    NodeLost,
    NodeRegistered,
    NodeRemoved,
    NodeSilent,
    ShardChanged,
)
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import Replica, ReplicaId, ShardAddress, ShardId, ShardReport, ShardSpec
from llmgw.core.weights import Phase
from llmgw.door.steps import Failure
from llmgw.link.dialer import Dialer
from simulator.books import Books, Reckoning, read_books
from simulator.client import AGAIN_SECONDS, HUNG_SECONDS, LONG_SHARE
from simulator.faults import (
    Act,
    AddModel,
    AgentCrash,
    BadEngines,
    ClockSkew,
    Cordon,
    DiskFull,
    DrainNode,
    EditModel,
    EngineCrash,
    FabricDown,
    Fault,
    ForeignMemory,
    Hold,
    Label,
    LinkBroken,
    LoadModel,
    NodeCrash,
    OriginDown,
    Partition,
    Recall,
    RemoveModel,
    RemoveNode,
    Rollback,
    Scenario,
    ServerRestart,
    SlowLink,
    SlowOrigin,
    SpoiledWeights,
    Storm,
    Turns,
)
from simulator.invariants import State
from simulator.judge import Broken, Judge
from simulator.linked_machine import Answering, Machine, find_engine
from simulator.linked_server import Server
from simulator.oracle import find_faults_at_rest, find_leftovers, find_place_on_demand
from simulator.site import ENGINE, MODELS, site
from simulator.stage import Seen, Story, see
from simulator.store import Rules, Store, edit

RESPONSE_SECONDS = 60.0
REST_SECONDS = 2700.0
# By when somebody is served who asks for a model that loads on demand.
PROBE_SECONDS = 600.0
# From the end of the last model: the last requests, and the engines' own time.
CLEAR_SECONDS = 900.0


class LinkedWorld:
    """One simulation in the nursery of its run: see ``open_world``."""

    def __init__(
        self,
        nursery: trio.Nursery,
        scenario: Scenario,
        *,
        models: Mapping[str, Model] = MODELS,
        rules: Rules | None = None,
        checked: bool = True,
    ) -> None:
        self.rules = rules or Rules()
        self.judge = Judge(
            scenario,
            clock=trio.current_time,
            look=self._look,
            brake_seconds=self.rules.brake,
            checked=checked,
        )
        self.lines = self.judge.lines
        self.specs: dict[tuple[NodeId, ShardId, int], ShardSpec] = {}
        self.engines_by_name = {ENGINE: find_engine()}
        names = scenario.models if scenario.models is not None else tuple(models)
        self.store = Store(models={name: models[name] for name in names})
        self.origin = Origin()
        self._origin_down = 0
        # How much had come when a shard that waits for weights said so last.
        self._come: dict[tuple[NodeId, ShardId, int, str], int] = {}
        self.network = MemoryNetwork(nursery, self._chance("network"))
        self.machines = {
            shape.id: Machine(shape, self._chance(f"engines:{shape.id}"), self) for shape in site(scenario.nodes)
        }
        self.server: Server | None = None
        self._models = models
        self._nursery = nursery
        self._request_rng = self._chance("requests")
        self._ends: dict[str, int] = {}
        self._served: Counter[str] = Counter()
        self._in_flight: Counter[tuple[ReplicaId, int]] = Counter()
        # whoever began to ask again and again in an earlier time has stopped by now
        self._times = 0
        self._starts = itertools.count(1)
        self._agents: dict[NodeId, trio.CancelScope] = {}
        self._agent_down: dict[NodeId, int] = {}
        self._power_down: dict[NodeId, int] = {}
        self._cuts: dict[NodeId, int] = {}
        self._slow: dict[NodeId, list[float]] = {}
        self._server_down = 0
        self._lasting: list[Callable[[], None] | None] = []

    def _chance(self, part: str) -> Random:
        return Random(f"{self.judge.scenario.seed}:{part}")

    # -- to be looked at

    @property
    def now(self) -> float:
        return trio.current_time()

    def engines(self, model: str | None = None) -> list[Seen]:
        """The engines that really run, by node."""
        return see(self.machines, model)

    def ready(self, model: str) -> tuple[Replica, ...]:
        """Those that requests go to."""
        return self._fleet().ready(ModelName(model))

    def books(self) -> Books:
        return read_books(self._fleet(), self.now)

    def ends(self) -> dict[str, int]:
        """How many requests ended in which way."""
        return self._ends

    def _fleet(self) -> Fleet:
        if self.server is None:
            raise AssertionError("there is no server now")
        return self.server.fleet

    def strike(self, fault: Fault) -> None:
        """Something goes wrong now, that could not be written down before: it counts as part of the scenario."""
        scenario = self.judge.scenario
        self.judge.scenario = replace(scenario, faults=(*scenario.faults, fault))
        self._nursery.start_soon(self._begin, fault)

    # -- its course

    async def start(self) -> None:
        for fault in self.judge.scenario.faults:
            self._nursery.start_soon(self._begin_at, fault)
        await self._start_server()
        for node in self.machines:
            self._start_agent(node)

    async def end(self) -> None:
        """All faults are over: to rest, and until no model is left."""
        self.calm_down()
        await self.rest()
        await self.probe()
        await self.clear_away()

    async def rest(self) -> None:
        """The faults are over: what is desired has to be so within a bounded time."""
        await self._settle(
            "at rest", lambda: find_faults_at_rest(self.store, self.machines, self.books(), self.now), REST_SECONDS
        )

    async def probe(self) -> None:
        """Each model that loads on demand, and can have room, serves somebody who asks for it."""
        for name, model in sorted(self.store.models.items()):
            place = find_place_on_demand(model, self.store, self.machines)
            if place is None:
                continue
            before, until = self._served[name], self.now + PROBE_SECONDS
            self._nursery.start_soon(self._keep_asking, name, until, 1.0)
            for _ in range(round(PROBE_SECONDS / 10.0)):
                if self._served[name] == before:
                    await trio.sleep(10.0)
            if self._served[name] == before:
                self.judge.complain(f"{name} serves nobody who asks for it, and there is {place}")
            self._times += 1

    async def clear_away(self) -> None:
        """Remove all models: nothing may stay."""
        for name in [*self.store.models]:
            self.store.remove(name)
        if self.server is not None:
            await self.server.publish()
        await self._settle("all removed", lambda: find_leftovers(self.machines, self.books()), CLEAR_SECONDS)

    async def _settle(self, what: str, find: Callable[[], Iterator[str]], limit: float) -> None:
        """Well two minutes running, by then."""
        until, well = self.now + limit, 0
        while well < 2 and self.now < until:
            await trio.sleep(60.0)
            well = 0 if any(True for _ in find()) else well + 1
        self.judge.judge(what, find())

    def calm_down(self) -> None:
        """All faults that last end now, and nobody goes on asking."""
        self._times += 1
        for number in range(len(self._lasting)):
            self._end_fault(number)

    # -- what is checked

    def follow(self, event: Event, effects: list[Effect]) -> None:
        """The fleet has handled an event: this is a step."""
        server = self.server
        if server is not None:
            match event:
                case NodeRegistered(node=node, running=running):
                    server.linked.add(node.id)
                    self._come = {name: done for name, done in self._come.items() if name[0] != node.id}
                    self.specs.update({(node.id, spec.id, spec.epoch): spec for spec, _ in running})
                case ShardChanged(node=name, report=report):
                    self._check_fetch(name, report)
                case NodeSilent(node=name) | NodeLost(node=name) | NodeRemoved(node=name):
                    server.linked.discard(name)
        for effect in effects:
            for spec in getattr(effect, "shards", ()):
                self.specs[spec.node, spec.id, spec.epoch] = spec
        self.judge.follow(event, effects)
        self.judge.check()

    def _check_fetch(self, node: NodeId, report: ShardReport) -> None:
        """What has come of weights never grows less while an agent lives, and is all only when it was found whole."""
        fetch = report.fetch
        if fetch is None or fetch.phase is Phase.RESOLVING:
            return
        name = (node, report.shard, report.epoch, fetch.source)
        if fetch.done_bytes < self._come.get(name, 0):
            self.judge.complain(f"{report.shard} on {node} had more of {fetch.source} than now")
        if (fetch.done_bytes == fetch.total_bytes) is not (fetch.phase is Phase.READY):
            self.judge.complain(f"{report.shard} on {node} tells of {fetch.source} what is not so")
        self._come[name] = fetch.done_bytes

    def _look(self) -> State:
        linked = frozenset(self.server.linked) if self.server is not None else frozenset[NodeId]()
        return State(
            books=self.books() if self.server is not None else None,
            machines=self.machines,
            linked=linked,
            marks=self.store.marks,
            in_flight=self._in_flight,
            now=self.now,
            reckoning=Reckoning(self.server.fleet, self.now) if self.server is not None else None,
        )

    def is_joined(self, engine: EngineProcess) -> bool:
        """All of its group have loaded their part: those that serve nobody can't say so themselves."""
        specs = [
            machine.spec(each)
            for machine in self.machines.values()
            for each in machine.hands.running
            if each.epoch == engine.epoch and each.loaded
        ]
        mine = next(spec for spec in specs if spec.id == engine.shard)
        return sum(spec.replica == mine.replica for spec in specs) >= mine.count

    # -- server and agents

    async def _start_server(self) -> None:
        self.server = Server(self)
        await self._nursery.start(self.server.serve)

    def _start_agent(self, node: NodeId) -> None:
        self._nursery.start_soon(self._live, node, next(self._starts))

    async def _live(self, node: NodeId, start: int) -> None:
        machine, places = self.machines[node], Places()
        dialer = Dialer(
            self.network.server_for(node, partial(self._find_engine, machine, places)),
            node=node,
            trunks=1,
            version="0",
            randomness=self._chance(f"dials:{node}:{start}"),
            run=f"{node}-{start}",
        )
        settings = AgentSettings(
            node_id=node,
            state=Path("/simulated"),
            weights=WeightsSettings(cache=Path("/simulated")),
            labels=machine.shape.labels,
            pace=Pace(inventory=self.judge.scenario.beat_seconds),
        )
        with trio.CancelScope() as life:
            self._agents[node] = life
            async with trio.open_nursery() as nursery:
                serve = partial(serve_node, dialer, engines=self.engines_by_name, settings=settings)
                await nursery.start(partial(serve, hands=machine.hands, places=places))
                await nursery.start(dialer.serve)

    def _find_engine(self, machine: Machine, places: Places, shard: ShardId, epoch: int) -> Answering | str:
        port = places.find(shard, epoch)
        if isinstance(port, str):
            return port
        engine = machine.hands.find_listening(port)
        if engine is None or not machine.hands.is_ready(engine):
            return "no_shard"
        seconds = self._request_rng.uniform(0.5, 20.0)
        if self._request_rng.random() < LONG_SHARE:
            seconds *= 45
        return Answering(engine, seconds)

    # -- requests

    async def _ask(
        self, name: str, after_seconds: float, returns: int = 0, patience: float | None = None
    ) -> tuple[str, float]:
        """How it ended, and after how many seconds it may be asked again."""
        times = self._times
        await trio.sleep(after_seconds)
        how, again_seconds = await self._ask_once(name, patience)
        self._end(how)
        if returns and times == self._times and how in ("model_loading", "connection refused", "connection lost"):
            return await self._ask(name, again_seconds, returns - 1, patience)
        return how, again_seconds

    async def _keep_asking(self, name: str, until: float, apart: float) -> None:
        """One who asks again and again."""
        times = self._times
        while self.now < until and times == self._times:
            how, again_seconds = await self._ask(name, 0.0)
            await trio.sleep(apart if how == "answered" else max(apart, again_seconds))

    async def _ask_once(self, name: str, patience: float | None) -> tuple[str, float]:
        server = self.server
        if server is None:
            return "connection refused", AGAIN_SECONDS
        limit = self.rules.on_demand_wait + 3 * RESPONSE_SECONDS + 1000.0
        how: tuple[str, float] | None = "connection lost", AGAIN_SECONDS

        async def exchange() -> None:
            nonlocal how
            with trio.move_on_after(limit):
                how = None
                with trio.move_on_after(limit if patience is None else patience) as patient:
                    how = await self._exchange(server, name)
                if patient.cancelled_caught:
                    how = "hung up", AGAIN_SECONDS
            over.set()

        over = trio.Event()
        server.nursery.start_soon(exchange)
        with trio.move_on_after(limit + 1.0):
            while not over.is_set() and not server.life.cancel_called:
                with trio.move_on_after(5.0):
                    await over.wait()
        if how is None and not server.life.cancel_called:
            self.judge.complain(f"a request for {name} has no end")
        return how or ("connection lost", AGAIN_SECONDS)

    def _end(self, how: str) -> None:
        self._ends[how] = self._ends.get(how, 0) + 1

    async def _exchange(self, server: Server, name: str) -> tuple[str, float]:
        """The decisions of the door's exchange, without a connection."""
        model = server.gateway.resolve(name)
        if model is None:
            return "model_not_found", AGAIN_SECONDS
        tried: set[str] = set()
        waited = False
        while True:
            route = server.gateway.choose(model, tried)
            if route is None:
                if tried or waited:
                    return self._refuse(server, model, tried)
                waited = True
                await server.gateway.wait_ready(model)
                continue
            tried.add(route.replica)
            answer: Any = None
            address = cast("ShardAddress", route.address)
            on = ReplicaId(route.replica), address.epoch
            engine = self._find_serving(address)
            answers = engine is not None and not engine.is_hung
            self._served[name] += answers
            self._in_flight[on] += 1
            try:
                with trio.move_on_after(math.inf if answers else HUNG_SECONDS):
                    answer = await server.trunks.ask(address, name)
            except OSError as error:
                server.gateway.eject(route, str(error))
                continue
            finally:
                self._in_flight[on] -= 1
                server.gateway.release(route, answered=answer == "answered")
            if answer == "answered":
                return "answered", AGAIN_SECONDS
            if isinstance(answer, Failure) and answer.sent:
                return "error: the engine ended", AGAIN_SECONDS

    def _find_serving(self, address: ShardAddress) -> EngineProcess | None:
        """The engine behind an address, where it answers."""
        hands = self.machines[address.node].hands
        found = (each for each in hands.running if (each.shard, each.epoch) == (address.shard, address.epoch))
        return next((each for each in found if hands.is_ready(each)), None)

    def _refuse(self, server: Server, model: Model, tried: set[str]) -> tuple[str, float]:
        refusal = server.gateway.absent(model)
        if refusal.code == "model_not_found":
            return refusal.code, AGAIN_SECONDS
        if refusal.status != 503:
            self.judge.complain(f"a request for {model.name} is refused with {refusal.status}")
        if refusal.code != "model_not_running" and not 1 <= (refusal.retry_after or 0) <= 120:
            self.judge.complain(f"a request for {model.name} is told to come again in {refusal.retry_after} s")
        return refusal.code, float(refusal.retry_after or AGAIN_SECONDS)

    # -- faults

    async def _begin_at(self, fault: Fault) -> None:
        await trio.sleep_until(fault.at)
        await self._begin(fault)

    async def _begin(self, fault: Fault) -> None:
        self.judge.note(repr(fault))
        match fault:
            case LinkBroken(node=node):
                if not self._cuts.get(NodeId(node)):
                    self.network.reset(NodeId(node))
            case Partition(nodes=nodes):
                for each in nodes:
                    self._cut(NodeId(each))
                await self._last(fault, partial(self._heal, *map(NodeId, nodes)))
            case SlowLink(node=node, delay=delay):
                self._slow.setdefault(NodeId(node), []).append(delay / 2)
                self._show_slowness(NodeId(node))
                await self._last(fault, partial(self._speed_up, NodeId(node)))
            case NodeCrash(node=node):
                self._power_off(NodeId(node))
                await self._last(fault, partial(self._power_on, NodeId(node)))
            case AgentCrash(node=node):
                self._stop_agent(NodeId(node))
                await self._last(fault, partial(self._return_agent, NodeId(node)))
            case EngineCrash(node=node, pick=pick):
                hands = self.machines[NodeId(node)].hands
                if hands.running:
                    hands.die(hands.running[pick % len(hands.running)].pid, -11)
            case BadEngines(node=node, mood=mood):
                self.machines[NodeId(node)].set_mood(mood)
                await self._last(fault, partial(self.machines[NodeId(node)].end_mood, mood))
            case DiskFull(node=node):
                self.machines[NodeId(node)].set_disk(1)
                await self._last(fault, partial(self.machines[NodeId(node)].set_disk, -1))
            case FabricDown(node=node):
                self.machines[NodeId(node)].set_fabric(1)
                await self._last(fault, partial(self.machines[NodeId(node)].set_fabric, -1))
            case ForeignMemory(node=node, gpu=gpu, gb=gb):
                self.machines[NodeId(node)].add_foreign(gpu, gb)
                await self._last(fault, partial(self.machines[NodeId(node)].end_foreign, gpu))
            case ClockSkew(node=node, skew=skew):
                self.machines[NodeId(node)].hands.skew = skew
            case ServerRestart():
                self._stop_server()
                await self._last(fault, self._return_server)
            case OriginDown():
                self._set_origin(down=1)
                await self._last(fault, partial(self._set_origin, down=-1))
            case SlowOrigin(times=times):
                self.origin.slow *= times
                await self._last(fault, partial(self._speed_up_origin, times))
            case SpoiledWeights(node=node):
                self.machines[NodeId(node)].hands.depot.spoil += 1
            case Storm(model=model, requests=requests, seconds=seconds, returns=returns, patience=patience):
                for _ in range(requests):
                    after = self._request_rng.uniform(0.0, seconds)
                    self._nursery.start_soon(self._ask, model, after, returns, patience)
            case Turns(models=models, seconds=seconds, apart=apart):
                for model in models:
                    self._nursery.start_soon(self._keep_asking, model, fault.at + seconds, apart)
            case (
                AddModel()
                | RemoveModel()
                | EditModel()
                | Rollback()
                | Hold()
                | LoadModel()
                | Recall()
                | Cordon()
                | DrainNode()
                | Label()
                | RemoveNode()
            ):
                if self.server is not None:
                    await self._operate(fault, self.server)
            case _:
                assert_never(fault)

    async def _last(self, fault: Any, undo: Callable[[], None]) -> None:
        """The fault is over after its time, unless all are before."""
        number = len(self._lasting)
        self._lasting.append(undo)
        await trio.sleep_until(fault.at + fault.seconds)
        self._end_fault(number)

    def _end_fault(self, number: int) -> None:
        undo = self._lasting[number]
        if undo is not None:
            self._lasting[number] = None
            undo()

    async def _operate(self, act: Act, server: Server) -> None:
        match act:
            case AddModel(model=name):
                self.store.put(self._models[name])
            case RemoveModel(model=name):
                self.store.remove(name)
                await server.tell_held()
            case EditModel(model=name):
                if name in self.store.models:
                    self.store.put(edit(self.store.models[name], act, self._models[name]))
            case Rollback(model=name):
                self.store.roll_back(name)
            case Hold(model=name):
                await server.hold(name)
            case LoadModel(model=name):
                await server.load(name)
            case Recall(model=name, pick=pick):
                await server.recall(name, pick)
            case Cordon() | DrainNode() | Label():
                mark = self.store.marks[NodeId(act.node)] = self.store.marked(act)
                await server.scheduler.post(mark)
            case RemoveNode(node=node):
                await server.remove_node(NodeId(node))
            case _:
                assert_never(act)
        if isinstance(act, AddModel | RemoveModel | EditModel | Rollback):
            await server.publish()

    def _cut(self, node: NodeId) -> None:
        self._cuts[node] = self._cuts.get(node, 0) + 1
        self.network.cut(node)

    def _heal(self, *nodes: NodeId) -> None:
        for node in nodes:
            self._cuts[node] -= 1
            if not self._cuts[node]:
                self.network.heal(node)

    def _show_slowness(self, node: NodeId) -> None:
        slow = self._slow[node]
        self.network.slow(node, sum(slow))
        self.network.lose(node, 0.1 if slow else 0.0)

    def _speed_up(self, node: NodeId) -> None:
        self._slow[node].pop(0)
        self._show_slowness(node)

    def _set_origin(self, *, down: int) -> None:
        self._origin_down += down
        self.origin.down = self._origin_down > 0

    def _speed_up_origin(self, times: float) -> None:
        self.origin.slow /= times

    def _stop_agent(self, node: NodeId) -> None:
        self._agent_down[node] = self._agent_down.get(node, 0) + 1
        life = self._agents.pop(node, None)
        if life is not None:
            life.cancel()

    def _return_agent(self, node: NodeId) -> None:
        self._agent_down[node] -= 1
        if not self._agent_down[node]:
            self._start_agent(node)

    def _power_off(self, node: NodeId) -> None:
        self._power_down[node] = self._power_down.get(node, 0) + 1
        # Nobody is left to say that the connection is over.
        self._cut(node)
        self._stop_agent(node)
        self.machines[node].hands.reboot()

    def _power_on(self, node: NodeId) -> None:
        self._power_down[node] -= 1
        self._heal(node)
        self._return_agent(node)

    def _stop_server(self) -> None:
        self._server_down += 1
        if self.server is not None:
            self.server.life.cancel()
            self.server = None
            self.judge.forget_server()

    def _return_server(self) -> None:
        self._server_down -= 1
        if not self._server_down:
            self._nursery.start_soon(self._start_server)


class Alarm(logging.Handler):
    """Whatever is logged with where it was raised is a fault of llmgw's own, that it survives in life."""

    def __init__(self, world: LinkedWorld) -> None:
        super().__init__(logging.ERROR)
        self.world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None:
            raised = "".join(traceback.format_exception(record.exc_info[1]))
            self.world.judge.complain(f"nothing may raise: {record.getMessage()}\n{raised}")


@asynccontextmanager
async def open_world(scenario: Scenario, **given: Any) -> AsyncIterator[LinkedWorld]:
    """A world that has begun, and ends with the block."""
    async with trio.open_nursery() as nursery:
        world = LinkedWorld(nursery, scenario, **given)
        alarm = Alarm(world)
        logging.getLogger("llmgw").addHandler(alarm)
        try:
            await world.start()
            yield world
        finally:
            logging.getLogger("llmgw").removeHandler(alarm)
            nursery.cancel_scope.cancel()


def run_linked(story: Callable[[LinkedWorld], Awaitable[None]], scenario: Scenario, **given: Any) -> LinkedWorld:
    """A world in a run of its own; what does not hold is raised as it was found."""

    async def main() -> LinkedWorld:
        async with open_world(scenario, **given) as world:
            await story(world)
            return world

    try:
        return run_simulated(main, seed=scenario.seed)
    except BaseExceptionGroup as group:
        raise _first(group) from None


def play_linked(scenario: Scenario) -> LinkedWorld:
    """The whole of a scenario, to its end."""

    async def story(world: LinkedWorld) -> None:
        await trio.sleep(scenario.hours * 3600.0)
        await world.end()

    return run_linked(story, scenario)


def tell_linked(story: Story, scenario: Scenario) -> None:
    """Play a story to its end, and what has to come after any."""

    async def tell(world: LinkedWorld) -> None:
        for seconds in story(world):
            await trio.sleep(seconds)
        await world.end()

    run_linked(tell, scenario)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What was found: of several the one that the judge has worded."""
    leaves = [*_leaves(group)]
    return next((leaf for leaf in leaves if isinstance(leaf, Broken)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
