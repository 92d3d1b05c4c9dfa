"""``llmgw server``: opens what it needs, plants the tree, and ends it in good order.

root
├─ watch_signals           SIGINT, SIGTERM, SIGQUIT: drain, then end; again: end now; SIGHUP: read server.yaml again
├─ weights                 what nodes are told of each other's weights
├─ server half             scheduler, door, pages, agents' port
└─ operators' port         what llmgw ctl asks
"""

from __future__ import annotations

import functools
import logging
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from llmgw.admin.manage import create_app
from llmgw.admin.views import StoreView
from llmgw.config.addresses import show_listen
from llmgw.config.changes import changed, take_changes
from llmgw.config.load_server import LoadedServer, load_server
from llmgw.config.server import Listen, Seeding, ServerConfig
from llmgw.core.events import FactsKnown, NodesExpected, RulesChanged
from llmgw.door.listener import bind
from llmgw.engines.registry import Engine, find_engines
from llmgw.errors import LlmgwError, only_ours
from llmgw.host.limits import raise_file_limit
from llmgw.host.output import write_err
from llmgw.host.signals import stop_signals_of_a_server
from llmgw.link.relay import Relay
from llmgw.link.tls import server_context
from llmgw.reactor.credentials import Credentials
from llmgw.server.agents import FleetAgents
from llmgw.server.cluster import Cluster
from llmgw.server.defining import Defining, Reread
from llmgw.server.gateway import locate_by_trunk
from llmgw.server.history import Histories
from llmgw.server.holding import Holding
from llmgw.server.learning import Learning
from llmgw.server.manage import Manage
from llmgw.server.marking import Marking
from llmgw.server.pages import serve_pages
from llmgw.server.returning import Returning
from llmgw.server.scheduler import Scheduler
from llmgw.server.supplying import Supplying
from llmgw.server.tools import ToolChecks
from llmgw.server.tree import PAGES_DRAIN_SECONDS, ServerHalf, serve_server
from llmgw.server.weights import Weights
from llmgw.store import KIND as STORE_KIND
from llmgw.store import Store, open_store
from llmgw.store.facts import Facts

log = logging.getLogger(__name__)

# What the nodes of an earlier server get to come back: an agent dials at least every 10 s, and many come at once.
SETTLE_SECONDS = 30.0
# Connections of the operators' port: a page that watches keeps one, and a script none.
MAX_OPERATORS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Sockets:
    """What listens, from before anything else is begun: a port that is taken is to be told at once."""

    clients: socket.socket
    operators: socket.socket
    agents: socket.socket


def run(loaded: LoadedServer, path: Path) -> None:
    """Serve until SIGINT or SIGTERM; ``path`` is read again at SIGHUP. UsageError when a port is taken, LlmgwError when
    the store or the certificates can't be used."""
    with _listen(loaded.config) as sockets:
        try:
            trio.run(_main, loaded, path, sockets)
        except BaseExceptionGroup as group:
            raise only_ours(group) from None


@contextmanager
def _listen(config: ServerConfig) -> Iterator[Sockets]:
    opened: list[socket.socket] = []

    def open_at(listen: Listen, key: str) -> socket.socket:
        sock = bind(listen.host, listen.port, ways=f"choose another ({key}), or end what listens there")
        opened.append(sock)
        return sock

    try:
        yield Sockets(
            clients=open_at(config.listen, "listen"),
            operators=open_at(config.admin_listen, "admin_listen"),
            agents=open_at(config.agent_listen, "agent_listen"),
        )
    finally:
        for sock in opened:
            sock.close()


async def _main(loaded: LoadedServer, path: Path, sockets: Sockets) -> None:
    raise_file_limit()
    config, plugins = loaded.config, find_engines()
    # (whoever read the configuration has told of those that are left out)
    engines = dict(plugins.engines)
    relays = config.seeding is Seeding.RELAY
    credentials = Credentials(config.agent_tls, functools.partial(server_context, relays=relays))
    revoked = config.agent_tls.revoked
    if revoked is not None and not revoked.exists():
        log.warning("agent_tls.revoked: %s is not there, and nobody is revoked until it is", revoked)
    async with open_store(config.auth.store) as store:
        half = ServerHalf(
            config=config,
            engines=engines,
            listening=sockets.clients,
            created=int(time.time()),
            write_log=write_err,
        )
        seeds = config.seeding is not Seeding.OFF
        weights = Weights(half.scheduler, counters=half.counters, seeds=seeds, relays=relays)
        agents = FleetAgents(half.scheduler, store.nodes, weights=weights, counters=half.counters)
        cluster = Cluster(
            agents=agents,
            agents_at=sockets.agents,
            credentials=credentials,
            revoked=config.agent_tls.revoked_file,
            lease_seconds=config.fleet.lease,
            replace_after_seconds=config.fleet.replace_after,
            counters=half.counters,
            stir=half.scheduler.stir,
            relay=(
                Relay(weights.may_take, bytes_per_second=config.relay_rate, counters=half.counters) if relays else None
            ),
        )
        half.cluster = cluster
        reread = Rereading(half=half, cluster=cluster, path=path, engines=engines, config=config)
        tools = ToolChecks(
            half.scheduler.fleet,
            engines=engines,
            pool=lambda: half.door.pool if half.door is not None else None,
            locate=locate_by_trunk,
            links=cluster.links,
            counted=half.counted,
        )
        marking = Marking(
            half.scheduler, store.nodes, links=cluster.links, forgotten=agents.forget, let_go=cluster.let_go
        )
        histories = Histories(store.history)
        defining = Defining(
            half.scheduler,
            engines=engines,
            store=store.models,
            histories=histories,
            declared=loaded.definitions,
            reread=reread.read,
        )
        returning = Returning(half.scheduler, defining=defining, histories=histories, facts=store.facts)
        half.keeper = returning
        holding = Holding(half.scheduler, store.holds, defining=defining, histories=histories)
        manage = Manage(
            half.scheduler,
            plugins=plugins,
            defining=defining,
            marking=marking,
            holding=holding,
            returning=returning,
            learning=Learning(half.scheduler, store.facts, defining=defining),
            supplying=Supplying(half.scheduler, weights),
            skews=agents.skews,
            describe_store=functools.partial(_describe_store, store),
            check_tools=tools.check,
            in_flight=lambda: half.gateway.in_flight if half.gateway is not None else {},
        )
        known = Known(marking=marking, holding=holding, defining=defining, facts=store.facts, weights=weights)
        await _load(half.scheduler, config, known)
        async with trio.open_nursery() as root:
            stopping = trio.Event()
            root.start_soon(_watch_signals, stopping, half)
            root.start_soon(_watch_reload, manage)
            root.start_soon(weights.serve)
            await root.start(serve_server, half)
            operators = functools.partial(
                serve_pages,
                create_app(manage, listen_host=config.admin_listen.host),
                sockets.operators,
                drain_seconds=PAGES_DRAIN_SECONDS,
                max_connections=MAX_OPERATORS,
            )
            await root.start(operators)
            log.warning("serving clients at %s; %s", half.base_url, _describe(sockets, len(marking.seen())))
            await stopping.wait()
            await half.drain(half.config.timeouts.drain)
            root.cancel_scope.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Who knows what an earlier server has left to this one."""

    marking: Marking
    holding: Holding
    defining: Defining
    facts: Facts
    weights: Weights


async def _load(scheduler: Scheduler, config: ServerConfig, known: Known) -> None:
    """Tell the fleet all that is known, before any agent or client is let in."""
    async with trio.open_nursery() as loading:
        # There may be more nodes than an inbox holds.
        await loading.start(scheduler.serve)
        await scheduler.post(_rules(config))
        await scheduler.post(FactsKnown(facts=await known.facts.list()))
        await known.marking.load()
        await known.holding.begin()
        # What these run is theirs to say, before anything is started in its place.
        until = trio.current_time() + SETTLE_SECONDS
        await scheduler.post(NodesExpected(nodes=known.marking.seen(), until=until))
        known.weights.expect(known.marking.seen(), until)
        await known.defining.load()
        loading.cancel_scope.cancel()


def _describe_store(store: Store) -> StoreView:
    condition = store.condition
    return StoreView(kind=STORE_KIND, where=store.path, size_bytes=condition.size_bytes, failing=condition.failing)


def _describe(sockets: Sockets, known: int) -> str:
    # As they are, not as they were written: port 0 takes any.
    agents, operators = (
        show_listen(Listen(host=host, port=port))
        for host, port, *_ in (sockets.agents.getsockname(), sockets.operators.getsockname())
    )
    nodes = f", {known} known" if known else ""
    return f"agents dial {agents}{nodes}; llmgw ctl asks {operators}"


def _rules(config: ServerConfig) -> RulesChanged:
    return RulesChanged(replace_after=config.fleet.replace_after, brake=config.fleet.brake)


async def _watch_signals(stopping: trio.Event, half: ServerHalf) -> None:
    with trio.open_signal_receiver(*stop_signals_of_a_server()) as signals:
        async for _ in signals:
            if stopping.is_set():
                half.hurry()
            stopping.set()


async def _watch_reload(manage: Manage) -> None:
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        async for _ in signals:
            try:
                done = await manage.reload()
            except LlmgwError as error:
                log.error("server.yaml was read again and is not taken; all stays as it was:\n%s", error.message)
            except Exception:
                log.exception("server.yaml could not be read again; all stays as it was")
            else:
                log.warning("%s was read again; changed: %s", done.file, ", ".join(done.changed) or "nothing")
                if done.needs_restart:
                    log.warning("in effect only after a restart: %s", ", ".join(done.needs_restart))


@dataclass(slots=True, kw_only=True)
class Rereading:
    """Reads server.yaml again, and knows what of it is in effect."""

    half: ServerHalf
    cluster: Cluster
    path: Path
    engines: dict[str, Engine]
    config: ServerConfig

    async def read(self) -> Reread:
        """What it says now. ConfigError when that can't be used."""
        # A disk that does not answer must not keep who asks.
        found = await trio.to_thread.run_sync(
            lambda: load_server(self.path, engines=self.engines), abandon_on_cancel=True
        )
        applied, needs_restart = changed(self.config, found.config)

        async def apply() -> None:
            self.config = take_changes(self.config, found.config)
            self.half.reconfigure(self.config)
            self.cluster.set_lease(self.config.fleet.lease)
            self.cluster.set_replace_after(self.config.fleet.replace_after)
            await self.half.scheduler.post(_rules(self.config))

        return Reread(
            file=str(self.path),
            declared=found.definitions,
            changed=applied,
            needs_restart=needs_restart,
            apply=apply,
        )
