"""The nursery tree of the control plane. Read this first: who is started, and what outlives what.

serve_server
└─ core nursery            ends last
   ├─ scheduler            the only caller of Fleet.handle
   ├─ request log
   ├─ demand               how much each model is asked for, told about once a second
   ├─ keeping              of a store: what a later server is to know
   └─ edge nursery         drains first
      ├─ reactor           the client port's bytes, and those of the trunks
      ├─ waits             what a request must wait for
      ├─ pages             Quart on a unix socket
      └─ of a cluster      the agents' port
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import trio

from llmgw.config.node import Limits, Timeouts
from llmgw.core.fleet import Fleet
from llmgw.core.node import NodeId
from llmgw.core.replica import Replica
from llmgw.counters import Counters
from llmgw.door.listener import Door, Listener, count_descriptors, fit_limits
from llmgw.door.origin import Origins
from llmgw.door.upstream import Dialer, Pool, dial
from llmgw.engines.registry import Engine
from llmgw.reactor.loop import Reactor
from llmgw.server.gateway import FleetGateway, locate_by_trunk, locate_here
from llmgw.server.keeping import Keeper, Keeping
from llmgw.server.pages import serve_pages
from llmgw.server.requestlog import RequestLog
from llmgw.server.scheduler import Scheduler
from llmgw.server.showing import show
from llmgw.web.landing import create_app

log = logging.getLogger(__name__)

PAGES_DRAIN_SECONDS = 2.0
# What clients get to read why their request was cut.
LAST_WORDS_SECONDS = 0.5
MAX_SOCKET_PATH = 100
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


class Ports(Protocol):
    """What a server has besides, where its engines are on other machines: ``server/cluster.py``."""

    async def plant(self, reactor: Reactor, edge: trio.Nursery) -> Dialer:
        """Open them in ``edge``, and say how engines are reached."""

    def reaches(self, node: NodeId) -> bool:
        """Whether requests get through to a node now."""

    def goaway(self, reason: str) -> None:
        """Tell whoever is connected that the server stops."""


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
    scheduler: Scheduler = field(init=False)
    # what a later server is to know goes there; None: there is no later one
    keeper: Keeper | None = None
    # None: engines are on this machine and are dialled
    cluster: Ports | None = None
    gateway: FleetGateway | None = None
    door: Door | None = None
    listener: Listener | None = None

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(Fleet(), counters=self.counters)

    @property
    def base_url(self) -> str:
        """Where clients reach the door."""
        host, port = self.listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def reconfigure(self, config: DoorConfig) -> None:
        """Go by another configuration, as far as that can change while it runs."""
        self.config = config
        if self.door is not None:
            limits = fit_limits(config.limits, self.descriptors)
            self.door.reconfigure(Origins(config.host, config.cors_origins), limits, config.timeouts)
        if self.gateway is not None:
            self.gateway.set_wait(config.on_demand_wait)

    def counted(self, replica: Replica) -> AbstractContextManager[None]:
        """Count as a request in flight what is asked of this replica past the door."""
        return nullcontext() if self.gateway is None else self.gateway.counted(replica)

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
        if self.cluster is not None:
            self.cluster.goaway("the server is stopping")
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
        gateway = half.gateway = FleetGateway(
            half.scheduler,
            engines=half.engines,
            counters=half.counters,
            log=log,
            wait_seconds=half.config.on_demand_wait,
            created=half.created,
            pages=lambda: socket_path if pages_up else None,
            locate=locate_here if half.cluster is None else locate_by_trunk,
            reaches=None if half.cluster is None else half.cluster.reaches,
        )
        half.scheduler.attend(gateway.drain)
        async with trio.open_nursery() as core:
            if half.keeper is not None:
                keeping = Keeping(half.keeper)
                half.scheduler.entrust(keeping.keep)
                core.start_soon(keeping.serve)
            await core.start(half.scheduler.serve)
            core.start_soon(log.serve)
            core.start_soon(gateway.serve_demand)
            async with trio.open_nursery() as edge:
                await edge.start(reactor.serve)
                app = create_app(lambda: show(half.scheduler.fleet.statistics(), half.base_url))
                pages = functools.partial(serve_pages, app, socket_path, drain_seconds=PAGES_DRAIN_SECONDS)
                await edge.start(pages)
                pages_up = True
                dialer = dial if half.cluster is None else await half.cluster.plant(reactor, edge)
                half.descriptors = count_descriptors()
                half.door = Door(
                    reactor,
                    gateway,
                    spawn=edge.start_soon,
                    origins=Origins(half.config.host, half.config.cors_origins),
                    limits=fit_limits(half.config.limits, half.descriptors),
                    timeouts=half.config.timeouts,
                    pool=Pool(reactor, connect_seconds=half.config.timeouts.connect, dialer=dialer),
                )
                half.listener = Listener(reactor, half.listening, half.door)
                gc.collect()
                gc.freeze()
                gc.set_threshold(*GC_THRESHOLDS)
                task_status.started()


@contextmanager
def _socket_folder(state: Path | None) -> Iterator[Path]:
    """In the state folder, where a killed program leaves no litter; elsewhere when that is too long for a socket."""
    if state is not None and len(os.fsencode(state / "pages" / "pages.sock")) < MAX_SOCKET_PATH:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield state / "pages"
    else:
        with tempfile.TemporaryDirectory(prefix="llmgw-pages-") as folder:
            yield Path(folder)
