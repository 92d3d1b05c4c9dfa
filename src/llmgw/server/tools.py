"""``tool-check`` of a model that the server runs: which replica is asked, and what its engine is to be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import trio

from llmgw.admin.management import Refused
from llmgw.admin.views import Origin, ToolsChecked
from llmgw.core.fleet import Fleet
from llmgw.core.model import Model, Task
from llmgw.core.node import NodeId
from llmgw.core.picture import ModelStatistics
from llmgw.core.replica import Endpoint, Replica, ShardState
from llmgw.dialects.toolcheck import (
    CHAT_PATH,
    CHECK_SECONDS,
    EXCHANGE_SECONDS,
    Findings,
    Parsers,
    Request,
    advance,
    ask_about_tools,
    judge,
)
from llmgw.dialects.toolreplies import Reply
from llmgw.door.steps import Destination
from llmgw.door.upstream import Pool
from llmgw.engines.registry import Engine
from llmgw.server.asking import ask_engine
from llmgw.server.looking import away_nodes, view_model
from llmgw.server.machines import LinkFacts

# Each takes a place in an engine for as long as it lasts.
MAX_CHECKS = 4


class ToolChecks:
    """The checks in progress, a few at most."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        engines: Mapping[str, Engine],
        pool: Callable[[], Pool | None],
        locate: Callable[[Replica], Destination],
        links: Callable[[], Iterable[LinkFacts]],
        counted: Callable[[Replica], AbstractContextManager[None]],
    ) -> None:
        """``pool`` is None before the client port is open. ``counted``: a replica is not stopped meanwhile."""
        self._fleet = fleet
        self._engines = engines
        self._pool = pool
        self._locate = locate
        self._links = links
        self._counted = counted
        self._running = 0

    async def check(self, model: Model, replica: str | None) -> ToolsChecked:
        """Ask one replica of ``model``, this one or any that is ready. Refused where there is none to be asked."""
        if model.task is not Task.CHAT:
            message = f"{model.name} is for {model.task}, which knows no tools"
            raise Refused(message, status=409, code="not_for_chat")
        chosen, endpoint = self._choose(model, replica)
        pool = self._pool()
        if pool is None:
            raise Refused("the server is not open yet: ask again", status=503, code="no_replica")
        if self._running >= MAX_CHECKS:
            message = f"{MAX_CHECKS} checks are in progress: ask again when one has ended"
            raise Refused(message, status=429, code="too_many_checks")
        self._running += 1
        try:
            with self._counted(chosen):
                found = await self._ask(pool, self._locate(chosen), endpoint.served_name)
        finally:
            self._running -= 1
        return ToolsChecked(
            model=model.name,
            replica=chosen.id,
            node=chosen.shard.node,
            engine=chosen.shard.profile.engine,
            check=judge(found, self._parsers(chosen)),
        )

    async def _ask(self, pool: Pool, address: Destination, served_name: str) -> Findings:
        until = trio.current_time() + CHECK_SECONDS
        steps = ask_about_tools(served_name)
        step = advance(steps, None)
        while isinstance(step, Request):
            left = until - trio.current_time()
            if left <= 0:
                reply = Reply(problem=f"not asked: the check has taken its {CHECK_SECONDS:g} s")
            else:
                seconds = min(left, EXCHANGE_SECONDS)
                reply = await ask_engine(pool, address, CHAT_PATH, step.body, seconds=seconds)
            # In a thread: an engine may answer with megabytes, and nobody else is served meanwhile.
            step = await trio.to_thread.run_sync(advance, steps, reply)
        return step

    def _parsers(self, replica: Replica) -> Parsers:
        # as its engine was started: by now the catalog may say otherwise
        model, profile = replica.shard.model, replica.shard.profile
        engine = self._engines.get(profile.engine)
        if engine is None:
            return Parsers(by_engine={}, profile=profile.name)
        title = engine.info.title
        keyed = frozenset({title} if engine.info.tool_parser else ())
        flags = {title: engine.name_parser(model, profile)}
        return Parsers(by_engine=flags, keyed=keyed, profile=profile.name)

    # which replica

    def _choose(self, model: Model, replica: str | None) -> tuple[Replica, Endpoint]:
        fleet = self._fleet.statistics()
        away = away_nodes(fleet, self._links())
        of_model = next((each for each in fleet.models if each.model.name == model.name), None)
        found = of_model.replicas if of_model is not None else ()
        if replica is None:
            for each in found:
                ready = each.state is ShardState.READY and each.draining is None and each.shard.node not in away
                if ready and each.endpoint is not None:
                    return each, each.endpoint
            raise Refused(_why_none(of_model, model, away), status=503, code="no_replica")
        named = next((each for each in found if each.id == replica), None)
        if named is None:
            others = (each for node in fleet.nodes for each in node.replicas)
            raise self._unknown_replica(model, replica, found, others)
        if named.state is not ShardState.READY or named.endpoint is None:
            why = f"; {named.cause}" if named.cause else f" ({named.progress})" if named.progress else ""
            raise Refused(f"{replica} is not ready: it is {named.state}{why}", status=503, code="no_replica")
        if named.draining is not None:
            message = f"{replica} takes nothing new: it is to stop when its requests have ended ({named.draining})"
            raise Refused(message, status=503, code="no_replica")
        if named.shard.node in away:
            message = f"{replica} can't be reached: there is no connection to {named.shard.node}"
            raise Refused(message, status=503, code="no_replica")
        return named, named.endpoint

    def _unknown_replica(
        self, model: Model, replica: str, found: tuple[Replica, ...], others: Iterable[Replica]
    ) -> Refused:
        other = next((each for each in others if each.id == replica), None)
        if other is not None:
            message = f"{replica} is no replica of {model.name}, but of {other.model}"
        else:
            names = ", ".join(each.id for each in found) or "none"
            message = f"{model.name} has no replica {replica}; there is {names}"
        return Refused(message, status=404, code="unknown_replica")


def _why_none(of_model: ModelStatistics | None, model: Model, away: frozenset[NodeId]) -> str:
    if of_model is None:
        return f"{model.name} has no replica yet: ask again"
    view = view_model(of_model, away, Origin.STORED, None)
    cut_off = sorted({each.shard.node for each in of_model.replicas if each.shard.node in away})
    if cut_off:
        return f"no replica of {model.name} can be reached: there is no connection to {', '.join(cut_off)}"
    detail = f": {view.detail}" if view.detail else ""
    return f"{model.name} has no ready replica: it is {view.status}{detail}"
