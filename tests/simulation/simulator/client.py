"""Requests, as server/gateway.py takes them: each ends in an answer, or is told honestly why it gets none; and what the
fleet is told of them, as server/traffic.py tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from llmgw.core.events import Demand, Drained, Event
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.placement import Rejected
from llmgw.core.replica import Replica, ReplicaId
from llmgw.core.routing import choose
from simulator.control import Control
from simulator.link import Ways
from simulator.loop import Loop
from simulator.machine import Machine, Process

UNREACHABLE_SECONDS = 5.0
RESPONSE_SECONDS = 60.0
# Of the streams, these go on for many minutes.
LONG_SHARE = 0.02
# What nobody answers for so long is given up.
HUNG_SECONDS = 20.0
# How old what the fleet knows of the traffic may be.
DEMAND_SECONDS = 1.0
# Who finds no server, or none that stays, tries again.
AGAIN_SECONDS = 5.0

Epoch = tuple[ReplicaId, int]
# How many wait, and what is in flight.
Figures = tuple[int, Mapping[ReplicaId, int]]
NOTHING: Figures = (0, {})


@dataclass(slots=True, eq=False)
class Request:
    """One request. ``on`` is the epoch of a replica that answers it now, ``until`` when it is answered, ``end`` how it
    ended (None while it has not), ``again_seconds`` after how long it may be asked again."""

    model: str
    number: int
    began_at: float
    done: Callable[[Request], None]
    tried: list[str] = field(default_factory=list)
    on: Epoch | None = None
    until: float = 0.0
    end: str | None = None
    again_seconds: float = AGAIN_SECONDS


def leave_it(request: Request) -> None:
    """Whatever became of it."""


class Clients:
    """Everybody who asks. ``complain`` is told of a request that did not end as one has to."""

    def __init__(
        self,
        loop: Loop,
        rng: Random,
        control: Control,
        machines: Mapping[NodeId, Machine],
        ways: Ways,
        *,
        complain: Callable[[str], None],
    ) -> None:
        self.ends: dict[str, int] = {}
        self.open: dict[int, Request] = {}
        # how many an engine of each model has begun to answer
        self.served: Counter[str] = Counter()
        # by the epoch that answers them
        self.in_flight: Counter[Epoch] = Counter()
        self._loop = loop
        self._rng = rng
        self._control = control
        self._machines = machines
        self._ways = ways
        self._complain = complain
        self._numbers = 0
        # whoever began to ask again and again in an earlier time has stopped by now
        self._times = 0
        self._waiting: dict[int, Request] = {}
        self._models: dict[Epoch, ModelName] = {}
        self._drains: dict[Epoch, int] = {}
        self._asked: dict[ModelName, None] = {}
        self._answered: dict[ModelName, None] = {}
        self._answered_by: dict[ModelName, set[Epoch]] = {}
        self._told: dict[ModelName, Figures] = {}
        self._ticking = False

    # -- who asks

    def ask(
        self,
        model: str,
        returns: int = 0,
        patience: float | None = None,
        done: Callable[[Request], None] = leave_it,
    ) -> None:
        """Send one request for that name, and again where it is told to be, so many times."""

        def come_again(request: Request) -> None:
            if (
                returns
                and times == self._times
                and request.end in ("model_loading", "connection refused", "connection lost")
            ):
                self._loop.after(request.again_seconds, self.ask, model, returns - 1, patience, done)
            else:
                done(request)

        times = self._times
        self._numbers += 1
        request = Request(model, self._numbers, self._loop.now, come_again)
        if not self._control.up:
            self._end(request, "connection refused")
            return
        self.open[request.number] = request
        self._loop.after(self._control.rules.on_demand_wait + 3 * RESPONSE_SECONDS, self._must_have_ended, request)
        if patience is not None:
            self._loop.after(patience, self._hang_up, request)
        found = self._control.fleet.catalog.resolve(model)
        if found is None:
            self._end(request, "model_not_found")
        elif not self._send(request, found):
            self._wait(request, found)

    def keep_asking(self, model: str, until: float, apart: float) -> None:
        """One who asks again and again."""

        def ask(times: int) -> None:
            if self._loop.now < until and times == self._times:
                self.ask(model, done=again)

        def again(request: Request) -> None:
            seconds = apart if request.end == "answered" else max(apart, request.again_seconds)
            self._loop.after(seconds, ask, times)

        times = self._times
        ask(times)

    def be_content(self) -> None:
        """Nobody asks again."""
        self._times += 1

    def _must_have_ended(self, request: Request) -> None:
        if request.end is not None:
            return
        if self._loop.now < request.until:
            self._loop.at(request.until + 3 * RESPONSE_SECONDS, self._must_have_ended, request)
            return
        self._complain(f"request {request.number} for {request.model} has no end")

    def _hang_up(self, request: Request) -> None:
        if request.end is None:
            self._leave(request, asked=False)
            self._end(request, "hung up")

    def server_has_ended(self) -> None:
        """All who are connected see that."""
        self._waiting.clear()
        self.in_flight.clear()
        for known in (self._models, self._drains, self._asked, self._answered, self._answered_by, self._told):
            known.clear()
        for request in [*self.open.values()]:
            request.on = None
            self._end(request, "connection lost")

    def look_again(self) -> None:
        """Something has changed: those who wait may be served now, or better be told no."""
        for request in [*self._waiting.values()]:
            if request.number in self._waiting:
                found = self._control.fleet.catalog.resolve(request.model)
                if found is None or not self._may_run(found):
                    self._refuse(request, found)
                elif self._send(request, found):
                    self._leave(request, asked=False)
                elif self._is_hopeless(found):
                    self._refuse(request, found)

    # -- what the gateway does

    def _may_run(self, model: Model) -> bool:
        return model.scaling.max > 0 and not self._control.fleet.held(model.name)

    def _routable(self, model: Model) -> tuple[Replica, ...]:
        ready = self._control.fleet.ready(model.name)
        return tuple(replica for replica in ready if self._control.reaches(replica.shard.node))

    def _send(self, request: Request, model: Model) -> bool:
        """To a replica that was not tried yet; False where there is none."""
        routable = self._routable(model)
        busy = {replica.id: self.in_flight[replica.id, replica.epoch] for replica in routable}
        replica = choose(routable, busy, request.tried)
        if replica is None:
            return False
        request.tried.append(replica.id)
        on = request.on = (replica.id, replica.epoch)
        self.in_flight[on] += 1
        self._models[on] = model.name
        self._answered[model.name] = None
        self._stir()
        node = replica.shard.node
        process = self._find(replica)
        if self._ways.is_cut(node) or not self._machines[node].up:
            self._loop.after(RESPONSE_SECONDS, self._finish, request, on, None)
        elif process is None:
            self._loop.after(0.01, self._finish, request, on, None)
        elif process.hung:
            self._loop.after(HUNG_SECONDS, self._finish, request, on, None)
        else:
            seconds = self._rng.uniform(0.5, 20.0)
            if self._rng.random() < LONG_SHARE:
                seconds *= 45
            self.served[model.name] += 1
            request.until = self._loop.now + seconds
            self._loop.at(request.until, self._finish, request, on, process)
        return True

    def _find(self, replica: Replica) -> Process | None:
        """The engine itself, where the agent knows that epoch of it."""
        machine = self._machines[replica.shard.node]
        process = machine.records.get(replica.shard.id)
        there = process is not None and process.ready and process.spec.epoch == replica.epoch
        return process if there else None

    def _finish(self, request: Request, on: Epoch, process: Process | None) -> None:
        if request.end is not None or request.on != on:
            return
        self._release(request)
        if process is not None:
            if process.alive:
                self._answered_by.setdefault(request.model, set()).add(on)
                self._stir()
            self._end(request, "answered" if process.alive else "error: the engine ended")
            return
        model = self._control.fleet.catalog.resolve(request.model)
        if model is None or not self._send(request, model):
            self._refuse(request, model)

    def _release(self, request: Request) -> None:
        """Its replica has done with it."""
        on, request.on = request.on, None
        if on is None:
            return
        self.in_flight[on] -= 1
        if not self.in_flight[on]:
            del self.in_flight[on], self._models[on]
            number = self._drains.pop(on, None)
            if number is not None:
                self._put(Drained(replica=on[0], epoch=on[1], number=number))

    def _wait(self, request: Request, model: Model) -> None:
        if not self._may_run(model):
            self._refuse(request, model)
            return
        self._waiting[request.number] = request
        self._stir()
        if not self._told.get(model.name, NOTHING)[0]:
            demand = self._measure(model.name, asked=False)
            self._note(demand)
            self._control.handle(demand)
        if request.number not in self._waiting:
            return
        if self._send(request, model):
            self._leave(request, asked=False)
            return
        if self._is_hopeless(model):
            self._refuse(request, model)
            return
        wait = self._control.rules.on_demand_wait
        seconds = min(wait, UNREACHABLE_SECONDS) if self._control.fleet.silent_nodes(model.name) else wait
        self._loop.after(seconds, self._give_up, request)

    def _leave(self, request: Request, *, asked: bool) -> None:
        """It waits no longer. ``asked``: it is told to come back; it is not served, and has not just hung up."""
        if self._waiting.pop(request.number, None) is None:
            return
        found = self._control.fleet.catalog.resolve(request.model)
        if found is None:
            return
        if asked:
            self._asked[found.name] = None
            self._stir()
        demand = self._measure(found.name)
        if not demand.waiting and (asked or self._told.get(found.name, NOTHING)[0]):
            self._note(demand)
            self._put(demand)

    def _give_up(self, request: Request) -> None:
        if request.end is None and request.number in self._waiting:
            self._refuse(request, self._control.fleet.catalog.resolve(request.model))

    def _is_hopeless(self, model: Model) -> bool:
        fleet = self._control.fleet
        wait_seconds = fleet.least_wait_seconds(model.name, self._control.clock())
        return isinstance(fleet.verdict(model.name), Rejected) and wait_seconds > self._control.rules.on_demand_wait

    def _retry_after(self, model: Model) -> int:
        return self._control.fleet.retry_after_seconds(model.name, self._control.clock())

    def _refuse(self, request: Request, model: Model | None) -> None:
        """A no that is true, and says when to come again."""
        self._leave(request, asked=model is not None and self._may_run(model))
        if model is None:
            self._end(request, "model_not_found")
            return
        if not self._may_run(model):
            self._end(request, "model_not_running")
            return
        left = [replica.id for replica in self._routable(model) if replica.id not in request.tried]
        if left:
            self._complain(
                f"request {request.number} for {model.name} is refused, and {', '.join(left)} could serve it"
            )
        seconds = self._retry_after(model)
        if not 1 <= seconds <= 120:
            self._complain(f"request {request.number} for {model.name} is told to come again in {seconds} s")
        request.again_seconds = float(seconds)
        self._end(request, "model_loading")

    def _end(self, request: Request, how: str) -> None:
        request.end = how
        self._release(request)
        self.open.pop(request.number, None)
        self.ends[how] = self.ends.get(how, 0) + 1
        request.done(request)

    # -- what the fleet is told

    def drain(self, replica: ReplicaId, epoch: int, number: int) -> None:
        """Say so once nothing is in flight to this epoch."""
        if self.in_flight[replica, epoch]:
            self._drains[replica, epoch] = number
        else:
            self._put(Drained(replica=replica, epoch=epoch, number=number))

    def _put(self, event: Event) -> None:
        """In a turn to come: this may be in the middle of one."""
        self._loop.after(self._rng.uniform(0.0, 0.1), self._hand_over, event, self._control.lives)

    def _hand_over(self, event: Event, life: int) -> None:
        if self._control.up and life == self._control.lives:
            self._control.handle(event)

    def _stir(self) -> None:
        if not self._ticking:
            self._ticking = True
            self._loop.after(DEMAND_SECONDS, self._tell_changes)

    def _tell_changes(self) -> None:
        self._ticking = False
        if not self._control.up:
            return
        waiting = {found.name: None for each in self._waiting.values() if (found := self._resolve(each)) is not None}
        for model in {**self._asked, **self._answered, **self._answered_by, **self._told, **waiting}:
            demand = self._measure(model)
            news = (demand.waiting, demand.in_flight) != self._told.get(model, NOTHING)
            if demand.asked or demand.answered or demand.answered_by or news:
                self._note(demand)
                self._control.handle(demand)
        if self._told or self._asked or self._answered or self._waiting:
            self._stir()

    def _resolve(self, request: Request) -> Model | None:
        return self._control.fleet.catalog.resolve(request.model)

    def _measure(self, model: ModelName, *, asked: bool | None = None) -> Demand:
        newest: dict[ReplicaId, int] = {}
        for (replica, epoch), name in self._models.items():
            if name == model:
                newest[replica] = max(epoch, newest.get(replica, 0))
        return Demand(
            model=model,
            waiting=sum(each.model == model for each in self._waiting.values()),
            in_flight={replica: self.in_flight[replica, epoch] for replica, epoch in newest.items()},
            asked=model in self._asked if asked is None else asked,
            answered=model in self._answered,
            answered_by=frozenset(self._answered_by.get(model, ())),
        )

    def _note(self, demand: Demand) -> None:
        """It is told now."""
        self._answered.pop(demand.model, None)
        self._answered_by.pop(demand.model, None)
        if demand.asked:
            self._asked.pop(demand.model, None)
        if demand.waiting or demand.in_flight:
            self._told[demand.model] = demand.waiting, demand.in_flight
        else:
            self._told.pop(demand.model, None)
