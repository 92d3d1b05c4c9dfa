"""Requests, as server/gateway.py takes them: each ends in an answer, or is told honestly why it gets none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from llmgw.core.events import Demand
from llmgw.core.model import Model
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


@dataclass(slots=True, eq=False)
class Request:
    """One request. ``end`` is how it ended, None while it has not."""

    model: str
    number: int
    life: int
    began_at: float
    tried: list[str] = field(default_factory=list)
    end: str | None = None


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
        self._loop = loop
        self._rng = rng
        self._control = control
        self._machines = machines
        self._ways = ways
        self._complain = complain
        self._numbers = 0
        self._in_flight: dict[ReplicaId, int] = {}
        self._waiting: dict[int, Request] = {}

    def ask(self, model: str) -> None:
        """Send one request for that name."""
        self._numbers += 1
        request = Request(model, self._numbers, self._control.lives, self._loop.now)
        if not self._control.up:
            self._end(request, "connection refused")
            return
        self.open[request.number] = request
        longest = self._control.rules.on_demand_wait + 3 * RESPONSE_SECONDS
        self._loop.after(longest, self._must_have_ended, request)
        found = self._control.fleet.catalog.resolve(model)
        if found is None:
            self._end(request, "model_not_found")
        elif not self._send(request, found):
            self._wait(request, found)

    def _must_have_ended(self, request: Request) -> None:
        if request.end is None:
            self._complain(f"request {request.number} for {request.model} has no end")

    def server_has_ended(self) -> None:
        """All who are connected see that."""
        for request in [*self.open.values()]:
            self._end(request, "connection lost")
        self._waiting.clear()
        self._in_flight.clear()

    def look_again(self) -> None:
        """Something has changed: those who wait may be served now, or better be told no."""
        for request in [*self._waiting.values()]:
            found = self._control.fleet.catalog.resolve(request.model)
            if found is None:
                self._refuse(request, None)
            elif self._send(request, found):
                del self._waiting[request.number]
            elif self._is_hopeless(found):
                self._refuse(request, found)

    # -- what the gateway does

    def _routable(self, model: Model) -> tuple[Replica, ...]:
        ready = self._control.fleet.ready(model.name)
        return tuple(replica for replica in ready if self._control.reaches(replica.shard.node))

    def _send(self, request: Request, model: Model) -> bool:
        """To a replica that was not tried yet; False where there is none."""
        replica = choose(self._routable(model), self._in_flight, request.tried)
        if replica is None:
            return False
        request.tried.append(replica.id)
        self._in_flight[replica.id] = self._in_flight.get(replica.id, 0) + 1
        node = replica.shard.node
        process = self._find(replica)
        if self._ways.is_cut(node) or not self._machines[node].up:
            self._loop.after(RESPONSE_SECONDS, self._finish, request, replica.id, None)
        elif process is None:
            self._loop.after(0.01, self._finish, request, replica.id, None)
        else:
            self._loop.after(self._rng.uniform(0.5, 20.0), self._finish, request, replica.id, process)
        return True

    def _find(self, replica: Replica) -> Process | None:
        """The engine itself, where the agent knows that epoch of it."""
        machine = self._machines[replica.shard.node]
        process = machine.records.get(replica.shard.id)
        there = process is not None and process.ready and process.spec.epoch == replica.epoch
        return process if there else None

    def _finish(self, request: Request, replica: ReplicaId, process: Process | None) -> None:
        if request.end is not None:
            return
        self._in_flight[replica] -= 1
        if process is not None:
            self._end(request, "answered" if process.alive else "error: the engine ended")
            return
        model = self._control.fleet.catalog.resolve(request.model)
        if model is None or not self._send(request, model):
            self._refuse(request, model)

    def _wait(self, request: Request, model: Model) -> None:
        if model.scaling.max == 0:
            self._refuse(request, model)
            return
        self._control.handle(Demand(model=model.name))
        if self._send(request, model):
            return
        if self._is_hopeless(model):
            self._refuse(request, model)
            return
        wait = self._control.rules.on_demand_wait
        seconds = min(wait, UNREACHABLE_SECONDS) if self._control.fleet.silent_nodes(model.name) else wait
        self._waiting[request.number] = request
        self._loop.after(seconds, self._give_up, request)

    def _give_up(self, request: Request) -> None:
        if request.end is None and request.number in self._waiting:
            self._refuse(request, self._control.fleet.catalog.resolve(request.model))

    def _is_hopeless(self, model: Model) -> bool:
        rejected = isinstance(self._control.fleet.verdict(model.name), Rejected)
        return rejected and self._retry_after(model) > self._control.rules.on_demand_wait

    def _retry_after(self, model: Model) -> int:
        return self._control.fleet.retry_after_seconds(model.name, self._control.clock())

    def _refuse(self, request: Request, model: Model | None) -> None:
        """A no that is true, and says when to come again."""
        self._waiting.pop(request.number, None)
        if model is None:
            self._end(request, "model_not_found")
            return
        if model.scaling.max == 0:
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
        self._end(request, "model_loading")

    def _end(self, request: Request, how: str) -> None:
        request.end = how
        self.open.pop(request.number, None)
        self.ends[how] = self.ends.get(how, 0) + 1
