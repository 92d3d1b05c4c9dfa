"""The door's Gateway, made of core rooms: who asks, which model, which replica, and the last word of each request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from llmgw.core.breaker import Breaker
from llmgw.core.identity import ANYONE, Caller
from llmgw.core.model import Model, ModelName
from llmgw.core.node import NodeId
from llmgw.core.placement import Rejected
from llmgw.core.replica import Endpoint, Replica, ReplicaId, ShardAddress
from llmgw.core.routing import choose
from llmgw.counters import Counters
from llmgw.dialects.refusal import Refusal
from llmgw.door.body import Fields, encode_fields
from llmgw.door.exchange import Route, Wording
from llmgw.door.request import Outcome, Request
from llmgw.door.steps import Destination
from llmgw.engines.registry import Engine
from llmgw.engines.types import RequestRules
from llmgw.server.requestlog import RequestLog
from llmgw.server.scheduler import Scheduler
from llmgw.server.shortage import tell_shortage
from llmgw.server.traffic import Flight, Traffic
from llmgw.units import printable

log = logging.getLogger(__name__)

# What a request waits for a model that is ready on a node which can't be reached.
UNREACHABLE_SECONDS = 5.0
# How old what the fleet knows of the traffic may be.
DEMAND_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted(Route):
    """A route, and where the requests on it are counted."""

    flight: Flight = field(compare=False)


def locate_here(replica: Replica) -> Destination:
    """An engine on this machine, which is dialled."""
    endpoint = replica.endpoint
    if endpoint is None:
        raise RuntimeError(f"{replica.id} is ready and says not where")
    return endpoint.host, endpoint.port


def locate_by_trunk(replica: Replica) -> Destination:
    """An engine behind its node's trunk. Whatever address its node says, it is never dialled from here."""
    shard = replica.shard
    return ShardAddress(node=shard.node, shard=shard.id, epoch=shard.epoch)


def _word_loras(engine: str, rules: RequestRules, served_name: str) -> dict[str, Wording]:
    """How each adapter is asked for. One whose fields can't be sent is left out, and so refused by its name."""
    found = {}
    for name, fields in rules.loras.items():
        try:
            found[name] = _word_lora(name, fields, served_name)
        except (TypeError, ValueError) as error:
            log.error(
                "the adapter %s can't be asked for: what the plugin of %s sets can't be sent: %s", name, engine, error
            )
    return found


def _word_base(engine: str, rules: RequestRules) -> Fields:
    """What a body must have that names the model itself. Its name is its own."""
    try:
        return encode_fields({key: value for key, value in rules.base.items() if key != "model"})
    except (TypeError, ValueError) as error:
        log.error("requests are passed on as they come: what the plugin of %s sets can't be sent: %s", engine, error)
        return ()


def _word_lora(name: str, fields: Mapping[str, object], served_name: str) -> Wording:
    told = {"model": served_name, **fields}
    model = told["model"]
    if not isinstance(model, str):
        raise TypeError(f"its model is {model!r}")
    if model == name:
        # An engine that knows the adapter by its own name gets that as it came.
        del told["model"]
    return Wording(encode_fields(told), tuple(sorted({served_name, model} - {name})))


class FleetGateway:
    """Reads the fleet, counts what is in flight, and never changes the fleet but by an event."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        engines: Mapping[str, Engine],
        counters: Counters,
        log: RequestLog,
        wait_seconds: float,
        created: int,
        pages: Callable[[], str | None],
        locate: Callable[[Replica], Destination],
        reaches: Callable[[NodeId], bool] | None = None,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        """``reaches``: whether requests get through to a node now; None where all engines are on this machine."""
        self._reaches = reaches
        self._scheduler = scheduler
        self._fleet = scheduler.fleet
        self._engines = engines
        self._log = log
        self._wait_seconds = wait_seconds
        self._created = created
        self._pages = pages
        self._locate = locate
        self._clock = clock
        self._traffic = Traffic(scheduler)
        # of the newest epoch of each
        self._routes: dict[ReplicaId, tuple[Endpoint, _Counted]] = {}
        self._breaker = Breaker()
        self._requests = counters.counter(
            "llmgw_requests_total",
            "Requests that ended, by model, path, status and outcome.",
            ("model", "path", "status", "outcome"),
        )
        self._tokens = counters.counter(
            "llmgw_tokens_total", "Tokens that engines reported, by model and kind.", ("model", "kind")
        )

    def set_wait(self, seconds: float) -> None:
        """What a request waits for a model that is not ready, from here on."""
        self._wait_seconds = seconds

    def identify(self, headers: Mapping[bytes, bytes]) -> Caller | Refusal:
        return ANYONE

    def resolve(self, name: str) -> Model | None:
        return self._fleet.catalog.resolve(name)

    def models(self) -> list[Model]:
        """What runs, and what would run when asked for."""
        held = self._fleet.held
        return [model for model in self._fleet.catalog if model.scaling.max > 0 and not held(model.name)]

    def created(self) -> int:
        return self._created

    @property
    def in_flight(self) -> Mapping[ReplicaId, int]:
        """The requests that each replica answers, of its newest epoch; one that answers none is absent."""
        return self._traffic.in_flight

    # -- which replica

    def choose(self, model: Model, without: Collection[str]) -> Route | None:
        ready = self._routable(model)
        replica = ready[0] if len(ready) == 1 and not without else self._pick(ready, without)
        if replica is None:
            return None
        endpoint = replica.endpoint
        if endpoint is None:
            return None
        known = self._routes.get(replica.id)
        route = known[1] if known is not None and known[0] is endpoint else self._find_route(replica, endpoint)
        self._traffic.begin(route.flight)
        return route

    def _find_route(self, replica: Replica, endpoint: Endpoint) -> _Counted:
        known, flight = self._routes.get(replica.id), self._traffic.open(replica)
        if known is not None and known[1].flight is flight and known[0] == endpoint:
            # (each report of a node tells it anew)
            route = known[1]
        else:
            route = self._make_route(replica, endpoint, flight)
        if known is not None and known[1].flight is not flight:
            # what an earlier try was, this one need not be
            self._breaker.clear(replica.id)
        self._routes[replica.id] = endpoint, route
        return route

    def _pick(self, ready: Sequence[Replica], without: Collection[str]) -> Replica | None:
        """One of those that rest only when there is no other: better a slow answer than none."""
        in_flight = self._traffic.in_flight
        if self._breaker:
            resting = self._list_resting(ready)
            preferred = choose(ready, in_flight, {*without, *resting}) if resting else None
            if preferred is not None:
                return preferred
        return choose(ready, in_flight, without)

    def _list_resting(self, ready: Sequence[Replica]) -> list[ReplicaId]:
        now = self._clock()
        return [
            replica.id
            for replica in ready
            if self._breaker.rests(replica.id, now) and self._routes[replica.id][1].flight.epoch == replica.epoch
        ]

    def eject(self, route: Route, reason: str) -> None:
        assert isinstance(route, _Counted)  # noqa: S101 - all are made here
        name = route.flight.replica
        if name not in self._routes or self._routes[name][1].flight is not route.flight:
            # late news of an earlier try
            return
        seconds = self._breaker.fail(name, self._clock())
        if seconds is not None:
            log.warning("%s is asked only if no other can be, for %g s: %s", name, seconds, printable(reason))

    def _make_route(self, replica: Replica, endpoint: Endpoint, flight: Flight) -> _Counted:
        # The model as its engine was started with it: by now the catalog may name adapters that this one lacks.
        shard = replica.shard
        engine = self._engines.get(shard.profile.engine)
        rules = engine.build_request(shard.model, shard.profile) if engine is not None else RequestRules()
        return _Counted(
            flight=flight,
            replica=replica.id,
            address=self._locate(replica),
            served_name=endpoint.served_name,
            usage_in_streams=rules.usage_in_streams,
            loras=_word_loras(shard.profile.engine, rules, endpoint.served_name),
            base=_word_base(shard.profile.engine, rules),
        )

    def release(self, route: Route, *, answered: bool) -> None:
        assert isinstance(route, _Counted)  # noqa: S101 - all are made here
        self._traffic.end(route.flight, answered=answered)

    @contextmanager
    def counted(self, replica: Replica) -> Iterator[None]:
        """Count as a request in flight what is asked of this replica past the door."""
        flight = self._traffic.open(replica)
        self._traffic.begin(flight)
        try:
            yield
        finally:
            # (whoever asks by a way of its own looks at the answer itself)
            self._traffic.end(flight, answered=False)

    def drain(self, replica: ReplicaId, epoch: int, number: int) -> None:
        """Put ``Drained`` with this number as soon as nothing is in flight to this epoch."""
        self._traffic.drain(replica, epoch, number)

    async def serve_demand(self, *, pace_seconds: float = DEMAND_SECONDS) -> None:
        """Tell the fleet how much each model is asked for, for ever."""
        while True:
            await trio.sleep(pace_seconds)
            self._traffic.tell_changes()
            self._forget_gone()

    def _forget_gone(self) -> None:
        """There is no end of models that were there once."""
        for name in self._traffic.models():
            if self._fleet.catalog.named(name) is None:
                for replica in self._traffic.forget(name):
                    self._routes.pop(replica, None)
                    self._breaker.clear(replica)

    # -- a model that is not ready

    async def wait_ready(self, model: Model) -> bool:
        name = model.name
        if not self._may_run(name):
            return False
        # whoever hangs up has not asked
        asked = False
        self._traffic.join(name)
        try:
            await self._traffic.tell_waiting(name)
            ready = await self._wait(model)
            asked = not ready and self._may_run(name)
        finally:
            self._traffic.leave(name, asked=asked)
        return ready

    async def _wait(self, model: Model) -> bool:
        # An agent or a server that begins anew is back in seconds; a node that is gone is not waited for as a load is.
        seconds = min(self._wait_seconds, UNREACHABLE_SECONDS) if self._out_of_reach(model) else self._wait_seconds
        with trio.move_on_after(seconds):
            while not self._routable(model):
                if not self._may_run(model.name) or self._hopeless(model):
                    return False
                await self._scheduler.wait_changed()
            return True
        return False

    def _may_run(self, name: ModelName) -> bool:
        """By now the model may be another, or stopped, or gone."""
        model = self._fleet.catalog.named(name)
        return model is not None and model.scaling.max > 0 and not self._fleet.held(name)

    def _routable(self, model: Model) -> tuple[Replica, ...]:
        ready, reaches = self._fleet.ready(model.name), self._reaches
        return ready if reaches is None else tuple(replica for replica in ready if reaches(replica.shard.node))

    def _out_of_reach(self, model: Model) -> list[NodeId]:
        """The nodes that replicas of this model are on, and that requests don't get through to."""
        nodes = set(self._fleet.silent_nodes(model.name))
        if self._reaches is not None:
            on = {replica.shard.node for replica in self._fleet.ready(model.name)}
            nodes |= {node for node in on if not self._reaches(node)}
        return sorted(nodes)

    def _hopeless(self, model: Model) -> bool:
        """It will not be ready within the wait: better to say so now."""
        if self._find_rejected(model) is None:
            return False
        # (room may be there any moment, and a load takes its time)
        return self._fleet.least_wait_seconds(model.name, self._clock()) > self._wait_seconds

    def _find_rejected(self, model: Model) -> Rejected | None:
        """Why it has no place; None also where one of its own replicas makes room for the next."""
        verdict = self._fleet.verdict(model.name)
        return verdict if isinstance(verdict, Rejected) and not self._fleet.renews_in_place(model.name) else None

    def _retry_after(self, model: Model) -> int:
        return self._fleet.retry_after_seconds(model.name, self._clock())

    def absent(self, model: Model) -> Refusal:
        now = self._fleet.catalog.named(model.name)
        if now is None:
            message = f"The model {model.name} does not exist here any more. GET /v1/models lists what does."
            return Refusal(status=404, code="model_not_found", message=message, param="model")
        if self._fleet.held(model.name):
            message = f"An operator has stopped the model {model.name}."
            return Refusal(status=503, code="model_not_running", message=message)
        if now.scaling.max == 0:
            message = f"The model {model.name} is configured and deliberately not running (scaling.max is 0)."
            return Refusal(status=503, code="model_not_running", message=message)
        seconds = self._retry_after(model)
        if self._out_of_reach(model):
            # What nodes there are, and what else runs there, is the operator's business.
            message = f"The model {model.name} can't be reached now; try again in {seconds} s."
            return Refusal(status=503, code="model_unreachable", message=message, retry_after=seconds)
        message = f"The model {model.name} is loading; try again in {seconds} s."
        verdict = self._find_rejected(model)
        if verdict is not None:
            why = tell_shortage(verdict.reasons())
            message = f"The model {model.name} can't be placed now: {why}; try again in {seconds} s."
        return Refusal(status=503, code="model_loading", message=message, retry_after=seconds)

    def pages(self) -> str | None:
        return self._pages()

    def settle(self, request: Request) -> None:
        # only names of ours become labels: a path that a client made up would be one more series each time
        model, usage = request.model, request.usage
        path = request.path if model is not None else "other"
        self._requests.add((model or "", path, str(request.status), request.outcome or Outcome.CRASHED), 1)
        if self._breaker and request.outcome is Outcome.DONE and request.replica is not None:
            self._breaker.clear(ReplicaId(request.replica))
        if usage is not None and model is not None:
            self._tokens.add((model, "prompt"), usage.prompt_tokens)
            self._tokens.add((model, "completion"), usage.completion_tokens)
        self._log.add(request)
