"""The door's Gateway, made of core rooms: who asks, which model, which replica, and the last word of each request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import trio

from llmgw.core.breaker import Breaker
from llmgw.core.events import Demand
from llmgw.core.identity import ANYONE, Caller
from llmgw.core.model import Model
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
from llmgw.units import printable

log = logging.getLogger(__name__)

# What a request waits for a model that is ready on a node which can't be reached.
UNREACHABLE_SECONDS = 5.0


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
        self._in_flight: dict[ReplicaId, int] = {}
        self._routes: dict[ReplicaId, tuple[Endpoint, Route]] = {}
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
        return [model for model in self._fleet.catalog if model.scaling.max > 0]

    def created(self) -> int:
        return self._created

    def choose(self, model: Model, without: Collection[str]) -> Route | None:
        ready = self._routable(model)
        replica = ready[0] if len(ready) == 1 and not without else self._pick(ready, without)
        if replica is None or replica.endpoint is None:
            return None
        name = replica.id
        self._in_flight[name] = self._in_flight.get(name, 0) + 1
        known = self._routes.get(name)
        if known is not None and known[0] is replica.endpoint:
            return known[1]
        route = self._make_route(replica, replica.endpoint)
        self._routes[replica.id] = (replica.endpoint, route)
        # what an earlier try was, this one need not be
        self._breaker.clear(replica.id)
        return route

    def _pick(self, ready: Sequence[Replica], without: Collection[str]) -> Replica | None:
        """One of those that rest only when there is no other: better a slow answer than none."""
        if self._breaker:
            resting = self._list_resting(ready)
            preferred = choose(ready, self._in_flight, {*without, *resting}) if resting else None
            if preferred is not None:
                return preferred
        return choose(ready, self._in_flight, without)

    def _list_resting(self, ready: Sequence[Replica]) -> list[ReplicaId]:
        now = self._clock()
        return [
            replica.id
            for replica in ready
            if self._breaker.rests(replica.id, now) and self._routes[replica.id][0] is replica.endpoint
        ]

    def eject(self, route: Route, reason: str) -> None:
        name = ReplicaId(route.replica)
        if self._routes[name][1] is not route:
            # late news of an earlier try
            return
        seconds = self._breaker.fail(name, self._clock())
        if seconds is not None:
            log.warning("%s is asked only if no other can be, for %g s: %s", name, seconds, printable(reason))

    def _make_route(self, replica: Replica, endpoint: Endpoint) -> Route:
        # The model as its engine was started with it: by now the catalog may name adapters that this one lacks.
        shard = replica.shard
        engine = self._engines.get(shard.profile.engine)
        rules = engine.build_request(shard.model, shard.profile) if engine is not None else RequestRules()
        return Route(
            replica=replica.id,
            address=self._locate(replica),
            served_name=endpoint.served_name,
            usage_in_streams=rules.usage_in_streams,
            loras=_word_loras(shard.profile.engine, rules, endpoint.served_name),
            base=_word_base(shard.profile.engine, rules),
        )

    def release(self, route: Route) -> None:
        name = ReplicaId(route.replica)
        count = self._in_flight.get(name, 0) - 1
        if count > 0:
            self._in_flight[name] = count
        else:
            self._in_flight.pop(name, None)

    async def wait_ready(self, model: Model) -> bool:
        if model.scaling.max == 0:
            return False
        await self._scheduler.post(Demand(model=model.name))
        # An agent or a server that begins anew is back in seconds; a node that is gone is not waited for as a load is.
        seconds = min(self._wait_seconds, UNREACHABLE_SECONDS) if self._out_of_reach(model) else self._wait_seconds
        with trio.move_on_after(seconds):
            while not self._routable(model):
                if self._hopeless(model):
                    return False
                await self._scheduler.wait_changed()
            return True
        return False

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
        verdict = self._fleet.verdict(model.name)
        return isinstance(verdict, Rejected) and self._retry_after(model) > self._wait_seconds

    def _retry_after(self, model: Model) -> int:
        return self._fleet.retry_after_seconds(model.name, self._clock())

    def absent(self, model: Model) -> Refusal:
        if model.scaling.max == 0:
            message = f"The model {model.name} is configured and deliberately not running (scaling.max is 0)."
            return Refusal(status=503, code="model_not_running", message=message)
        seconds = self._retry_after(model)
        out_of_reach = self._out_of_reach(model)
        if out_of_reach:
            message = (
                f"The model {model.name} can't be reached now: there is no connection to {', '.join(out_of_reach)}."
            )
            return Refusal(status=503, code="model_unreachable", message=message, retry_after=seconds)
        message = f"The model {model.name} is loading; try again in {seconds} s."
        verdict = self._fleet.verdict(model.name)
        if isinstance(verdict, Rejected):
            # What nodes there are, and what else runs there, is the operator's business.
            reasons = verdict.counted() or "there is no node"
            message = f"The model {model.name} can't be placed now ({reasons}); try again in {seconds} s."
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
