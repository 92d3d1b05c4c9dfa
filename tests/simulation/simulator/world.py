"""A whole fleet, joined by hand: plays a scenario, checks it after every step, and judges how it ends."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import assert_never

from llmgw.core.effects import Desire
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.replica import Replica, ReplicaId, ShardSpec
from simulator.agent import Agent
from simulator.books import Books, Reckoning, read_books
from simulator.client import Clients
from simulator.control import Control
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
from simulator.link import Link, Ways
from simulator.loop import Loop, Standstill
from simulator.machine import Machine
from simulator.oracle import find_faults_at_rest, find_leftovers, find_place_on_demand
from simulator.site import MODELS, site
from simulator.stage import Seen, Story, see
from simulator.store import Rules, edit

# How long an end waits for the other before it takes the connection for dead.
DEAD_SECONDS = 15.0
# From the end of the last fault: the longest back-off, a load that takes its whole startup_timeout, and a brake.
REST_SECONDS = 2700.0
# By when somebody is served who asks for a model that loads on demand.
PROBE_SECONDS = 600.0
# From the end of the last model: the last requests, and the engines' own time.
CLEAR_SECONDS = 900.0


class World:
    """One simulation. ``play`` it to the end, or ``run`` it a while and look."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        rules: Rules | None = None,
        models: Mapping[str, Model] = MODELS,
        checked: bool = True,
    ) -> None:
        """Unchecked it is faster, and proves nothing."""
        rules = rules or Rules()
        self.loop = Loop()
        self.judge = Judge(
            scenario, clock=lambda: self.loop.now, look=self._look, brake_seconds=rules.brake, checked=checked
        )
        self.lines = self.judge.lines
        self.ways = Ways()
        self._models = models
        self._lasting: list[tuple[Callable[..., None], tuple[object, ...]] | None] = []
        self._down: dict[NodeId, int] = {}
        self._agent_down: dict[NodeId, int] = {}
        self._server_down = 0
        self._wires: dict[NodeId, Link] = {}
        self._cut_at: dict[NodeId, float] = {}
        self._wire_rng = self._chance("links")
        self._dial_rng = self._chance("dials")
        names = scenario.models if scenario.models is not None else tuple(models)
        self.control = Control(
            self.loop,
            rules,
            [models[name] for name in names],
            done=self.judge.follow,
            stirred=self._stir,
            drain=self._drain,
            hung_up=self._hang_up,
            pings=self._pings,
        )
        self.machines = {
            shape.id: Machine(
                shape,
                self.loop,
                self._chance(f"engines:{shape.id}"),
                is_group_there=self._is_group_there,
                moved=self._move,
            )
            for shape in site(scenario.nodes)
        }
        self.agents: dict[NodeId, Agent] = {}
        self.clients = Clients(
            self.loop, self._chance("clients"), self.control, self.machines, self.ways, complain=self.judge.complain
        )
        self._storm_rng = self._chance("storms")
        for fault in scenario.faults:
            self.loop.at(fault.at, self._begin, fault)
        self.control.start()
        for node in self.machines:
            self._start_agent(node)

    def _chance(self, part: str) -> Random:
        return Random(f"{self.judge.scenario.seed}:{part}")

    # -- to be played and looked at

    def play(self) -> World:
        """To the end: through all faults, to rest, and until no model is left."""
        self.run(self.judge.scenario.hours * 3600.0)
        self.calm_down()
        self.rest()
        self.probe()
        self.clear_away()
        return self

    def run(self, until: float) -> World:
        """Let time go on to ``until``."""
        try:
            self.loop.run(until, self.judge.check)
        except Standstill:
            self.judge.complain("time stands still: there is always one more thing to do now")
        except Broken:
            raise
        except Exception:
            self.judge.complain(f"nothing may raise: {traceback.format_exc()}")
        return self

    def run_for(self, seconds: float) -> World:
        return self.run(self.loop.now + seconds)

    def strike(self, fault: Fault) -> None:
        """Let something go wrong now, that could not be written down before: it counts as part of the scenario."""
        scenario = self.judge.scenario
        self.judge.scenario = replace(scenario, faults=(*scenario.faults, fault))
        self.loop.at(fault.at, self._begin, fault)

    def rest(self) -> None:
        """The faults are over: what is desired has to be so within a bounded time."""
        self.run_for(REST_SECONDS)
        self.judge.judge("at rest", find_faults_at_rest(self.control.store, self.machines, self.books(), self.now))

    def probe(self) -> None:
        """Each model that loads on demand, and can have room, serves somebody who asks for it."""
        for name, model in sorted(self.control.store.models.items()):
            place = find_place_on_demand(model, self.control.store, self.machines)
            if place is None:
                continue
            before = self.clients.served[name]
            self.clients.keep_asking(name, self.now + PROBE_SECONDS, 1.0)
            until = self.now + PROBE_SECONDS
            while self.now < until and self.clients.served[name] == before:
                self.run_for(10.0)
            if self.clients.served[name] == before:
                self.judge.complain(f"{name} serves nobody who asks for it, and there is {place}")
            self.run_for(PROBE_SECONDS + 60.0)

    def clear_away(self) -> None:
        """Remove all models: nothing may stay."""
        for name in [*self.control.store.models]:
            self.control.remove_model(name)
        self.run_for(CLEAR_SECONDS)
        self.judge.judge("all removed", find_leftovers(self.machines, self.books()))

    @property
    def now(self) -> float:
        return self.loop.now

    def engines(self, model: str | None = None) -> list[Seen]:
        """The engines that really run, by node."""
        return see(self.machines, model)

    def ready(self, model: str) -> tuple[Replica, ...]:
        """Those that requests go to."""
        return self.control.fleet.ready(ModelName(model))

    def ends(self) -> dict[str, int]:
        """How many requests ended in which way."""
        return self.clients.ends

    def books(self) -> Books:
        return read_books(self.control.fleet, self.control.clock())

    # -- what is checked

    def _move(self) -> None:
        self.judge.moved = True

    def _look(self) -> State:
        linked = frozenset(node for node in self.control.links if self.control.reaches(node))
        return State(
            books=self.books() if self.control.up else None,
            machines=self.machines,
            linked=linked,
            marks=self.control.store.marks,
            in_flight=self.clients.in_flight,
            now=self.loop.now,
            reckoning=Reckoning(self.control.fleet, self.control.clock()) if self.control.up else None,
        )

    # -- nodes and their agents

    def _is_group_there(self, spec: ShardSpec) -> bool:
        if spec.count == 1:
            return True
        alive = (process.spec for machine in self.machines.values() for process in machine.alive())
        return sum((each.replica, each.epoch) == (spec.replica, spec.epoch) for each in alive) == spec.count

    def _start_agent(self, node: NodeId) -> None:
        rng = self._chance(f"agent:{node}:{self.loop.now}")
        beat_seconds = self.judge.scenario.beat_seconds
        agent = Agent(self.machines[node], self.loop, rng, beat_seconds=beat_seconds, note=self.judge.note)
        self.agents[node] = agent
        self.loop.after(rng.uniform(0.0, 2.0), self._dial, agent)

    def _stop_agent(self, node: NodeId, *, silently: bool) -> None:
        agent = self.agents.pop(node, None)
        if agent is None:
            return
        agent.crash()
        link = self._wires.get(node)
        if link is not None and link.agent_open:
            link.agent_open = False
            if not silently and not self.ways.is_cut(node):
                self.loop.after(0.05, self._close_server_end, link)

    def _dial(self, agent: Agent) -> None:
        node = agent.machine.id
        if self.agents.get(node) is not agent or agent.link is not None:
            return
        if not self.control.up or self.ways.is_cut(node):
            self.loop.after(self._dial_rng.uniform(1.0, 10.0), self._dial, agent)
            return
        link = Link(node, self.loop, self._wire_rng, self.ways, up=self.control.receive, down=self._give)
        self._wires[node] = link
        self.control.enter(link)
        agent.connect(link)

    def _give(self, link: Link, desire: Desire) -> None:
        agent = self.agents.get(link.node)
        if agent is not None and agent.link is link:
            agent.take(desire)

    def _close_agent_end(self, link: Link) -> None:
        if not link.agent_open:
            return
        link.agent_open = False
        agent = self.agents.get(link.node)
        if agent is not None and agent.link is link:
            agent.link = None
            self.loop.after(self._dial_rng.uniform(0.5, 3.0), self._dial, agent)

    def _pings(self, link: Link) -> bool:
        """An agent that is there answers pings, whatever else it has to say."""
        node = link.node
        there = link.agent_open and self.machines[node].up and not self.ways.is_cut(node)
        return there and self.ways.slowness(node) < DEAD_SECONDS / 4

    def _stir(self) -> None:
        self.clients.look_again()

    def _drain(self, replica: ReplicaId, epoch: int, number: int) -> None:
        self.clients.drain(replica, epoch, number)

    def _hang_up(self, link: Link) -> None:
        if not self.ways.is_cut(link.node):
            self.loop.after(0.05, self._settle, link)

    def _close_server_end(self, link: Link) -> None:
        if self.control.up:
            self.control.leave(link)

    # -- faults

    def _begin(self, fault: Fault) -> None:
        self.judge.note(repr(fault))
        match fault:
            case LinkBroken(node=node):
                self._break(NodeId(node))
            case Partition(nodes=nodes):
                for each in nodes:
                    self._cut(NodeId(each))
                self._later(fault, self._heal, nodes)
            case SlowLink(node=node, delay=delay):
                self.ways.slow_down(NodeId(node), delay)
                self._later(fault, self.ways.speed_up, NodeId(node))
            case NodeCrash(node=node):
                self._power_off(NodeId(node))
                self._later(fault, self._power_on, NodeId(node))
            case AgentCrash(node=node):
                self._agent_down[NodeId(node)] = self._agent_down.get(NodeId(node), 0) + 1
                self._stop_agent(NodeId(node), silently=False)
                self._later(fault, self._return_agent, NodeId(node))
            case EngineCrash(node=node, pick=pick):
                machine = self.machines[NodeId(node)]
                running = [*machine.alive()]
                if running:
                    machine.die(running[pick % len(running)], "exited on SIGSEGV")
            case BadEngines(node=node, mood=mood):
                self.machines[NodeId(node)].moods.append(mood)
                self._later(fault, self.machines[NodeId(node)].moods.remove, mood)
            case DiskFull(node=node):
                self._set_disk(NodeId(node), 1)
                self._later(fault, self._set_disk, NodeId(node), -1)
            case FabricDown(node=node):
                self._set_fabric(NodeId(node), 1)
                self._later(fault, self._set_fabric, NodeId(node), -1)
            case ForeignMemory(node=node, gpu=gpu, gb=gb):
                self.machines[NodeId(node)].add_foreign(gpu, gb)
                self._later(fault, self.machines[NodeId(node)].end_foreign, gpu)
            case ClockSkew(node=node, skew=skew):
                self.machines[NodeId(node)].skew = skew
            case ServerRestart():
                self._stop_server()
                self._later(fault, self._return_server)
            case OriginDown() | SlowOrigin() | SpoiledWeights():
                # (an agent of this size has all weights that it wants)
                pass
            case Storm(model=model, requests=requests, seconds=seconds, returns=returns, patience=patience):
                for _ in range(requests):
                    after = self._storm_rng.uniform(0.0, seconds)
                    self.loop.after(after, self.clients.ask, model, returns, patience)
            case Turns(models=models, seconds=seconds, apart=apart):
                for model in models:
                    self.clients.keep_asking(model, fault.at + seconds, apart)
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
                if self.control.up:
                    self._operate(fault)
            case _:
                assert_never(fault)

    def _later(
        self,
        fault: Partition
        | SlowLink
        | NodeCrash
        | AgentCrash
        | BadEngines
        | DiskFull
        | FabricDown
        | ForeignMemory
        | ServerRestart,
        undo: Callable[..., None],
        *args: object,
    ) -> None:
        """The fault is over after its time, unless all are before."""
        number = len(self._lasting)
        self._lasting.append((undo, args))
        self.loop.at(fault.at + fault.seconds, self._end_fault, number)

    def _end_fault(self, number: int) -> None:
        ending = self._lasting[number]
        if ending is not None:
            self._lasting[number] = None
            undo, args = ending
            undo(*args)

    def calm_down(self) -> None:
        """All faults that last end now, and nobody goes on asking."""
        self.clients.be_content()
        for number in range(len(self._lasting)):
            self._end_fault(number)

    def _operate(self, act: Act) -> None:
        match act:
            case AddModel(model=name):
                self.control.put_model(self._models[name])
            case RemoveModel(model=name):
                self.control.remove_model(name)
            case EditModel(model=name):
                model = self.control.store.models.get(name)
                if model is not None:
                    self.control.put_model(edit(model, act, self._models[name]))
            case Rollback(model=name):
                self.control.roll_back(name)
            case Hold(model=name):
                self.control.hold(name)
            case LoadModel(model=name):
                self.control.load(name)
            case Recall(model=name, pick=pick):
                self.control.recall(name, pick)
            case Cordon() | DrainNode() | Label():
                self.control.mark(act)
            case RemoveNode(node=node):
                self.control.remove_node(NodeId(node))
            case _:
                assert_never(act)

    def _break(self, node: NodeId) -> None:
        link = self._wires.get(node)
        if link is not None and not self.ways.is_cut(node):
            self._close_agent_end(link)
            self._close_server_end(link)

    def _cut(self, node: NodeId) -> None:
        if not self.ways.is_cut(node):
            self._cut_at[node] = self.loop.now
        self.ways.cut(node)
        link = self._wires.get(node)
        if link is not None:
            self.loop.after(DEAD_SECONDS, self._miss_server, link)

    def _miss_server(self, link: Link) -> None:
        """The agent has heard nothing for long enough."""
        if self.ways.is_cut(link.node) and self.loop.now - self._cut_at[link.node] >= DEAD_SECONDS:
            self._close_agent_end(link)

    def _heal(self, nodes: Iterable[str]) -> None:
        for node in map(NodeId, nodes):
            link = self._wires.get(node)
            if self.ways.heal(node) and link is not None:
                link.release()
                self.loop.after(0.05, self._settle, link)

    def _settle(self, link: Link) -> None:
        """Whichever end is still open learns that the other is not."""
        if self.ways.is_cut(link.node) or not self.machines[link.node].up:
            return
        if not link.server_open:
            self._close_agent_end(link)
        elif not link.agent_open:
            self._close_server_end(link)

    def _power_off(self, node: NodeId) -> None:
        self._down[node] = self._down.get(node, 0) + 1
        self._agent_down[node] = self._agent_down.get(node, 0) + 1
        # Nobody is left to say that the connection is over.
        self._stop_agent(node, silently=True)
        self.machines[node].power_off()

    def _power_on(self, node: NodeId) -> None:
        self._down[node] -= 1
        if not self._down[node]:
            self.machines[node].up = True
        self._return_agent(node)

    def _return_agent(self, node: NodeId) -> None:
        self._agent_down[node] -= 1
        if not self._agent_down[node]:
            self._start_agent(node)

    def _set_disk(self, node: NodeId, by: int) -> None:
        self.machines[node].disk_full += by
        self.machines[node].note_change()

    def _set_fabric(self, node: NodeId, by: int) -> None:
        self.machines[node].fabric_down += by
        self.machines[node].note_change()

    def _stop_server(self) -> None:
        self._server_down += 1
        if not self.control.up:
            return
        links = self.control.crash()
        self.clients.server_has_ended()
        self.judge.forget_server()
        for link in links:
            if not self.ways.is_cut(link.node):
                self.loop.after(0.05, self._close_agent_end, link)

    def _return_server(self) -> None:
        self._server_down -= 1
        if not self._server_down:
            self.control.start()


def tell(story: Story, scenario: Scenario) -> None:
    """Play a story to its end, and what has to come after any."""
    world = World(scenario)
    for seconds in story(world):
        world.run_for(seconds)
    world.calm_down()
    world.rest()
    world.probe()
    world.clear_away()
