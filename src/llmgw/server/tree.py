"""The nursery tree of the control plane. Read this first: who is started, and what outlives what.

serve_server
└─ core nursery            ends last
   ├─ scheduler            the only caller of Fleet.handle
   ├─ request log
   └─ edge nursery         drains first
      ├─ reactor           the client port's bytes, and those of the trunks
      ├─ waits             what a request must wait for
      ├─ pages             Quart on a unix socket
      └─ of a cluster      the agents' port and the operators' port
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import trio

from llmgw.config.node import Limits, Timeouts
from llmgw.core.fleet import Fleet
from llmgw.core.replica import ShardAddress
from llmgw.counters import Counters
from llmgw.door.listener import Door, Listener, count_descriptors, fit_limits
from llmgw.door.origin import Origins
from llmgw.door.steps import Destination
from llmgw.door.upstream import Dialer, Pool, Upstream, dial
from llmgw.engines.registry import Engine
from llmgw.link.agentlink import Agents
from llmgw.link.listener import AgentPort, LinkView, serve_agents
from llmgw.link.tls import Credentials
from llmgw.link.trunk import Trunks
from llmgw.reactor.loop import Reactor
from llmgw.reactor.transports import Transport
from llmgw.server.gateway import FleetGateway, locate_by_trunk, locate_here
from llmgw.server.pages import Pages, serve_pages
from llmgw.server.requestlog import RequestLog
from llmgw.server.scheduler import Scheduler
from llmgw.server.showing import show
from llmgw.web.landing import create_app

log = logging.getLogger(__name__)

PAGES_DRAIN_SECONDS = 2.0
# What clients get to read why their request was cut.
LAST_WORDS_SECONDS = 0.5
MAX_SOCKET_PATH = 100
# Connections of the operators' port: a page that watches keeps one, and a script none.
MAX_OPERATORS = 128
# The collector walks everything that is alive; after start most of it stays alive for ever, so it is set aside, and the
# young generation may grow further before a walk: a walk is a pause of every stream.
GC_THRESHOLDS = (50_000, 20, 50)


class DoorConfig(Protocol):
    """What the client port goes by."""

    @property
    def host(self) -> str: ...
    @property
    def cors_origins(self) -> tuple[str, ...]: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def timeouts(self) -> Timeouts: ...
    @property
    def on_demand_wait(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a server of other machines has besides: the port that agents dial, and the one that operators ask."""

    agents: Agents
    agents_at: socket.socket
    credentials: Credentials[ssl.SSLContext]
    revoked: Path
    lease_seconds: float
    operator: Pages
    operator_at: socket.socket


@dataclass(slots=True, kw_only=True)
class ServerHalf:
    """What the other half, and the end of the program, need of a running server half."""

    config: DoorConfig
    engines: Mapping[str, Engine]
    listening: socket.socket
    created: int
    # open before the first client came
    descriptors: int = 0
    write_log: Callable[[str], object]
    # where the pages' socket is put; else it is in a temporary folder
    folder: Path | None = None
    counters: Counters = field(default_factory=Counters)
    scheduler: Scheduler = field(default_factory=lambda: Scheduler(Fleet()))
    # None: engines are on this machine and are dialled
    cluster: Cluster | None = None
    gateway: FleetGateway | None = None
    door: Door | None = None
    listener: Listener | None = None
    agents: AgentPort | None = None

    @property
    def base_url(self) -> str:
        """Where clients reach the door."""
        host, port = self.listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def links(self) -> tuple[LinkView, ...]:
        """How the agents are connected."""
        return self.agents.links() if self.agents is not None else ()

    def reconfigure(self, config: DoorConfig, *, lease_seconds: float) -> None:
        """Go by another configuration, as far as that can change while it runs."""
        self.config = config
        if self.door is not None:
            limits = fit_limits(config.limits, self.descriptors)
            self.door.reconfigure(Origins(config.host, config.cors_origins), limits, config.timeouts)
        if self.gateway is not None:
            self.gateway.set_wait(config.on_demand_wait)
        if self.agents is not None:
            self.agents.set_lease(lease_seconds)

    async def drain(self, seconds: float) -> None:
        """Accept nothing more and let running requests end, within ``seconds`` or until ``hurry`` is called."""
        if self.listener is not None:
            self.listener.close()
        if self.door is not None:
            running = sum(client.busy for client in self.door.clients)
            if running and seconds:
                log.warning("stopping; running requests (%d) have %g s, or until asked to stop again", running, seconds)
            with trio.move_on_after(seconds):
                await self.door.drain()
            self.door.close()
            with trio.move_on_after(LAST_WORDS_SECONDS):
                await self.door.wait_sent()
            self.door.reset_unsent()
        if self.agents is not None:
            self.agents.goaway("the server is stopping")
            # told in the next turns, or not at all: an agent finds out by itself as well
            await trio.sleep(LAST_WORDS_SECONDS)

    def hurry(self) -> None:
        """Somebody asked twice: end running requests now."""
        if self.door is not None:
            self.door.hurry()


async def serve_server(half: ServerHalf, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Serve for ever; started when the door is open."""
    log = RequestLog(half.write_log)
    reactor = Reactor()
    with _socket_folder(half.folder) as folder:
        socket_path = str(folder / "pages.sock")
        pages_up = False
        cluster = half.cluster
        trunks = Trunks(reactor, counters=half.counters)
        gateway = half.gateway = FleetGateway(
            half.scheduler,
            engines=half.engines,
            counters=half.counters,
            log=log,
            wait_seconds=half.config.on_demand_wait,
            created=half.created,
            pages=lambda: socket_path if pages_up else None,
            locate=locate_here if cluster is None else locate_by_trunk,
        )
        async with trio.open_nursery() as core:
            await core.start(half.scheduler.serve)
            core.start_soon(log.serve)
            async with trio.open_nursery() as edge:
                await edge.start(reactor.serve)
                app = create_app(lambda: show(half.scheduler.fleet.statistics(), half.base_url))
                pages = functools.partial(serve_pages, app, socket_path, drain_seconds=PAGES_DRAIN_SECONDS)
                await edge.start(pages)
                pages_up = True
                if cluster is not None:
                    operator = functools.partial(
                        serve_pages,
                        cluster.operator,
                        cluster.operator_at,
                        drain_seconds=PAGES_DRAIN_SECONDS,
                        max_connections=MAX_OPERATORS,
                    )
                    await edge.start(operator)
                    agents = functools.partial(
                        serve_agents,
                        cluster.agents_at,
                        cluster.agents,
                        credentials=cluster.credentials,
                        revoked=cluster.revoked,
                        trunks=trunks,
                        reactor=reactor,
                        lease_seconds=cluster.lease_seconds,
                        counters=half.counters,
                    )
                    half.agents = await edge.start(agents)
                half.descriptors = count_descriptors()
                half.door = Door(
                    reactor,
                    gateway,
                    spawn=edge.start_soon,
                    origins=Origins(half.config.host, half.config.cors_origins),
                    limits=fit_limits(half.config.limits, half.descriptors),
                    timeouts=half.config.timeouts,
                    pool=Pool(reactor, connect_seconds=half.config.timeouts.connect, dialer=dial_by(trunks)),
                )
                half.listener = Listener(reactor, half.listening, half.door)
                gc.collect()
                gc.freeze()
                gc.set_threshold(*GC_THRESHOLDS)
                task_status.started()


def dial_by(trunks: Trunks) -> Dialer:
    """Sockets for what can be dialled, streams of a trunk for shards of other machines."""

    def dial_destination(reactor: Reactor, address: Destination, owner: Upstream) -> Transport:
        if isinstance(address, ShardAddress):
            return trunks.open(address, owner, connected=owner.connected)
        return dial(reactor, address, owner)

    return dial_destination


@contextmanager
def _socket_folder(state: Path | None) -> Iterator[Path]:
    """In the state folder, where a killed program leaves no litter; elsewhere when that is too long for a socket."""
    if state is not None and len(os.fsencode(state / "pages" / "pages.sock")) < MAX_SOCKET_PATH:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield state / "pages"
    else:
        with tempfile.TemporaryDirectory(prefix="llmgw-pages-") as folder:
            yield Path(folder)
