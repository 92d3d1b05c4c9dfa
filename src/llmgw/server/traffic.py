"""How much each model is asked for: who waits, what is in flight where, and what the fleet is told of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmgw.core.events import Demand, Drained
from llmgw.core.model import ModelName
from llmgw.core.replica import Replica, ReplicaId
from llmgw.server.scheduler import Scheduler


@dataclass(slots=True, eq=False)
class Flight:
    """The requests in flight to one epoch of a replica. ``newest``: no later epoch of it is known here; ``answered``:
    one was answered; ``drain``: the number of the ``Drain`` that waits for their end."""

    replica: ReplicaId
    epoch: int
    model: ModelName
    count: int = 0
    newest: bool = True
    answered: bool = False
    drain: int | None = None


# How many wait, and what is in flight.
Figures = tuple[int, Mapping[ReplicaId, int]]
NOTHING: Figures = (0, {})
# What nobody can have measured: whatever is, is told.
UNKNOWN: Figures = (-1, {})


class Traffic:
    """Counts, and tells the scheduler. Of an earlier epoch only its end is of interest: it is no longer sent anything.

    ``in_flight`` is by replica, of its newest epoch; none is absent.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.in_flight: dict[ReplicaId, int] = {}
        self._newest: dict[ReplicaId, Flight] = {}
        self._earlier: dict[tuple[ReplicaId, int], Flight] = {}
        self._of: dict[ModelName, dict[ReplicaId, Flight]] = {}
        self._waiting: dict[ModelName, int] = {}
        # since the last word (dicts, whose order is the same in each run of a simulation)
        self._asked: dict[ModelName, None] = {}
        self._answered: dict[ModelName, None] = {}
        self._answered_by: dict[ModelName, set[tuple[ReplicaId, int]]] = {}
        self._told: dict[ModelName, Figures] = {}

    # -- what is in flight

    def open(self, replica: Replica) -> Flight:
        """Where the requests to this epoch of a replica are counted."""
        name, epoch = replica.id, replica.epoch
        newest = self._newest.get(name)
        if newest is not None and newest.epoch == epoch:
            return newest
        flight = Flight(name, epoch, replica.model)
        if newest is not None:
            if newest.epoch > epoch:
                flight.newest = False
                return self._earlier.setdefault((name, epoch), flight)
            newest.newest = False
            if newest.count:
                self._earlier[name, newest.epoch] = newest
                del self.in_flight[name]
        self._newest[name] = self._of.setdefault(replica.model, {})[name] = flight
        return flight

    def begin(self, flight: Flight) -> None:
        """One request more."""
        flight.count += 1
        if flight.newest:
            self.in_flight[flight.replica] = flight.count
        self._answered[flight.model] = None

    def end(self, flight: Flight, *, answered: bool) -> None:
        """One that began is over, after an answer, or the first of one, or without."""
        flight.count -= 1
        if answered and not flight.answered:
            flight.answered = True
            self._answered_by.setdefault(flight.model, set()).add((flight.replica, flight.epoch))
        if flight.newest:
            if flight.count:
                self.in_flight[flight.replica] = flight.count
                return
            del self.in_flight[flight.replica]
        elif not flight.count:
            self._earlier.pop((flight.replica, flight.epoch), None)
        if flight.drain is not None and not flight.count:
            self._scheduler.put(Drained(replica=flight.replica, epoch=flight.epoch, number=flight.drain))
            flight.drain = None

    def drain(self, replica: ReplicaId, epoch: int, number: int) -> None:
        """Say ``Drained`` with this number, in place of any before, once nothing is in flight to this epoch."""
        flight = self._newest.get(replica)
        if flight is None or flight.epoch != epoch:
            flight = self._earlier.get((replica, epoch))
        if flight is not None and flight.count:
            flight.drain = number
        else:
            self._scheduler.put(Drained(replica=replica, epoch=epoch, number=number))

    def forget(self, model: ModelName) -> list[ReplicaId]:
        """The replicas of a model that is gone which nothing is in flight to any more, and of which nothing is kept."""
        flights = self._of.get(model, {})
        gone = [name for name, flight in flights.items() if not flight.count]
        for name in gone:
            del flights[name], self._newest[name]
        if not flights:
            self._of.pop(model, None)
        return gone

    def models(self) -> list[ModelName]:
        """Those with replicas that something is kept of."""
        return list(self._of)

    # -- who waits

    def join(self, model: ModelName) -> None:
        """One more waits for a replica of it."""
        self._waiting[model] = self._waiting.get(model, 0) + 1

    def leave(self, model: ModelName, *, asked: bool) -> None:
        """One waits no longer. ``asked``: it was told to come back; not served, and it has not just hung up."""
        if asked:
            self._asked[model] = None
        left = self._waiting[model] - 1
        if left:
            self._waiting[model] = left
            return
        del self._waiting[model]
        if asked or self._told.get(model, NOTHING)[0]:
            self._tell(self._measure(model))

    # -- what the fleet is told

    async def tell_waiting(self, model: ModelName) -> None:
        """Tell at once that somebody waits, unless that is known; how many do is told with the rest."""
        if self._told.get(model, NOTHING)[0]:
            return
        demand = self._measure(model, asked=False)
        self._note(demand)
        noted, arrived = self._told[model], False
        try:
            await self._scheduler.post(demand)
            # (one that had to wait may come after what was told later)
            arrived = self._told.get(model) is noted
        finally:
            if not arrived:
                self._told[model] = UNKNOWN

    def tell_changes(self) -> None:
        """Tell how much each model is asked for, where that is not what was told last or somebody has asked since."""
        for model in {**self._asked, **self._answered, **self._answered_by, **self._told, **self._waiting}:
            demand = self._measure(model)
            news = demand.asked or demand.answered or demand.answered_by
            if news or (demand.waiting, demand.in_flight) != self._told.get(model, NOTHING):
                self._tell(demand)

    def _measure(self, model: ModelName, *, asked: bool | None = None) -> Demand:
        flights = self._of.get(model, {})
        return Demand(
            model=model,
            waiting=self._waiting.get(model, 0),
            in_flight={name: flight.count for name, flight in flights.items() if flight.count},
            asked=model in self._asked if asked is None else asked,
            answered=model in self._answered,
            answered_by=frozenset(self._answered_by.get(model, ())),
        )

    def _tell(self, demand: Demand) -> None:
        self._asked.pop(demand.model, None)
        self._answered.pop(demand.model, None)
        self._answered_by.pop(demand.model, None)
        self._note(demand)
        self._scheduler.put(demand)

    def _note(self, demand: Demand) -> None:
        if demand.waiting or demand.in_flight:
            self._told[demand.model] = demand.waiting, demand.in_flight
        else:
            self._told.pop(demand.model, None)
