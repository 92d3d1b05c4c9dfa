"""``llmgw agent``: opens what it needs, plants the tree, and ends without touching the engines.

root
├─ watch_signals           SIGINT, SIGTERM, SIGQUIT, SIGHUP of a terminal: let requests end, then end; again: end now
├─ reactor                 the trunks' bytes
├─ dialer                  the control link and the trunks
└─ node                    shards, weights, inventory, the talk with the server
"""

from __future__ import annotations

import functools
import logging

import trio

from llmgw import __version__
from llmgw.agent.machine import Machine
from llmgw.agent.places import Places
from llmgw.agent.settings import AgentSettings, WeightsSettings
from llmgw.agent.tree import serve_node
from llmgw.config.agent import AgentConfig
from llmgw.core.node import NodeId
from llmgw.engines.registry import find_engines
from llmgw.errors import only_ours
from llmgw.host.inventory_file import InventoryFile
from llmgw.host.limits import raise_file_limit
from llmgw.host.signals import stop_signals
from llmgw.link.dial import TlsServer
from llmgw.link.dialer import Dialer
from llmgw.link.giving import Giving
from llmgw.reactor.loop import Reactor

log = logging.getLogger(__name__)

# For requests that pass through here. Engines are not concerned: they go on.
DRAIN_SECONDS = 30.0


def run(config: AgentConfig) -> None:
    """Run this node's engines until SIGINT or SIGTERM. UsageError when the state folder or the certificates can't be
    used, ConfigError when a fake inventory can't."""
    if config.discovery.fake is not None:
        # Once it runs a file that is wrong is passed over.
        InventoryFile(config.discovery.fake, config.node).load()
    try:
        trio.run(_main, config)
    except BaseExceptionGroup as group:
        raise only_ours(group) from None


async def _main(config: AgentConfig) -> None:
    raise_file_limit()
    reactor, places = Reactor(), Places()
    server = TlsServer(config, reactor=reactor, find_port=places.find)
    dialer = Dialer(server, node=config.node, trunks=config.trunks, version=__version__)
    settings = AgentSettings(
        node_id=NodeId(config.node),
        state=config.state,
        weights=WeightsSettings(
            cache=config.weights.cache,
            model_dirs=config.model_dirs,
            allow_hosts=config.weights.allow_hosts,
            hub_token=config.weights.hub_token,
            seed_listen=config.seed_listen,
            tls=config.tls,
            server=config.server,
            download_rate=config.limits.download_rate,
        ),
        engine_ports=config.engine_ports,
        binaries={name: each.bin for name, each in config.engines.items() if each.bin is not None},
        labels=config.labels,
        fabrics=config.fabrics,
        discovery=config.discovery,
    )
    hands = Machine(settings, make_giving=lambda answer: Giving(server.open_give, answer))
    # (whoever read the configuration has told of those that are left out)
    engines = find_engines().engines
    async with trio.open_nursery() as root:
        stopping = trio.Event()
        patience = trio.CancelScope()
        root.start_soon(_watch_signals, stopping, patience)
        await root.start(reactor.serve)
        node = functools.partial(serve_node, dialer, engines=engines, settings=settings, hands=hands, places=places)
        await root.start(node)
        await root.start(dialer.serve)
        log.warning("node %s is up; its server is %s", config.node, config.server.url)
        await stopping.wait()
        with patience, trio.move_on_after(DRAIN_SECONDS):
            await dialer.drain()
        root.cancel_scope.cancel()


async def _watch_signals(stopping: trio.Event, patience: trio.CancelScope) -> None:
    with trio.open_signal_receiver(*stop_signals()) as signals:
        async for _ in signals:
            if stopping.is_set():
                patience.cancel()
            else:
                log.warning("stopping; running requests have %g s, or until asked to stop again", DRAIN_SECONDS)
            stopping.set()
