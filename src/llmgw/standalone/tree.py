"""``llmgw serve`` and ``llmgw demo``: a server half and an agent half in one process, joined by a link in memory.

root
├─ watch_signals           first: stop in good order; second: drain no longer
├─ server half             scheduler, door, pages
└─ agent half              shards, weights, inventory
"""

from __future__ import annotations

import functools
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

from llmgw.agent.settings import AgentSettings, WeightsSettings
from llmgw.agent.tree import serve_node
from llmgw.config.node import NodeConfig
from llmgw.core.effects import Desire
from llmgw.core.events import CatalogChanged, Event, Stopping
from llmgw.core.model import Model
from llmgw.core.node import NodeId
from llmgw.core.placement import Rejected
from llmgw.core.replica import ShardState
from llmgw.core.weights import WeightsOrder
from llmgw.door.listener import bind
from llmgw.engines.registry import find_engines
from llmgw.errors import EngineFailed, LlmgwError, only_ours
from llmgw.host.limits import raise_file_limit
from llmgw.host.output import write_err, write_out
from llmgw.host.signals import stop_signals
from llmgw.host.weights.errors import show_url
from llmgw.host.weights.sources.asker import Asker
from llmgw.server.scheduler import Scheduler
from llmgw.server.tree import ServerHalf, serve_server
from llmgw.standalone.ask import ask as ask_model
from llmgw.standalone.places import hold_own_folder, warn_of_leftovers
from llmgw.standalone.settings import state_folder, weights_cache

log = logging.getLogger(__name__)

# A node by itself has no name to defend, and a machine that is renamed must find its engines again.
NODE = NodeId("local")
# An engine gets its own grace; this is what stopping all of them may take before we say that some would not.
STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class MemoryLink:
    """The agent's way to a server in the same process."""

    scheduler: Scheduler
    node: NodeId

    async def desired(self, after: int) -> Desire:
        return await self.scheduler.desired(self.node, after)

    async def order(self, after: WeightsOrder | None) -> WeightsOrder:
        """It is the only node: nobody has weights that it could take."""
        await trio.sleep_forever()
        raise AssertionError

    async def report(self, event: Event) -> None:
        await self.scheduler.post(event)

    async def wait_open(self) -> None:
        await trio.lowlevel.checkpoint()

    async def wait_lost(self) -> None:
        await trio.sleep_forever()

    @property
    def give_up_seconds(self) -> None:
        """It is never lost."""


def run(
    config: NodeConfig, models: tuple[Model, ...], *, on_ready: Callable[[str], None], ask: str | None = None
) -> None:
    """Serve ``models`` until SIGINT or SIGTERM; with ``ask`` only until that question is answered.

    ``on_ready`` gets the base URL when the door is open and every model that is to run does. Raises UsageError when
    the port or the state folder is taken, EngineFailed when a model to ask can't be started. ``on_ready`` may block: it
    is called in a thread, which is left behind when the program is to stop.
    """
    listening = bind(config.host, config.port)
    try:
        with hold_own_folder(state_folder(config), config.port) as folder:
            trio.run(_main, config, models, Held(listening=listening, folder=folder), on_ready, ask)
    except BaseExceptionGroup as group:
        raise only_ours(group) from None
    finally:
        listening.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What no other program has from the start to the end of this one: the clients' port and the state folder."""

    listening: socket.socket
    folder: Path


async def _main(
    config: NodeConfig,
    models: tuple[Model, ...],
    held: Held,
    on_ready: Callable[[str], None],
    question: str | None,
) -> None:
    raise_file_limit()
    await trio.to_thread.run_sync(warn_of_leftovers, held.folder)
    half = ServerHalf(
        config=config,
        # (whoever read the definitions has told of those that are left out)
        engines=find_engines().engines,
        listening=held.listening,
        created=int(time.time()),
        write_log=write_err if question is None else _drop_log,
        folder=held.folder,
    )
    settings = AgentSettings(
        node_id=NODE,
        state=held.folder,
        engine_ports=config.engine_ports,
        binaries={name: each.bin for name, each in config.engines.items() if each.bin is not None},
        weights=WeightsSettings(
            cache=weights_cache(config),
            allow_hosts=config.weights.allow_hosts,
            hub_token=config.weights.hub_token,
            download_rate=config.limits.download_rate,
            asker=Asker(environment="llmgw's environment", file="node.yaml"),
        ),
        stop_on_exit=True,
    )
    async with trio.open_nursery() as root:
        stopping = trio.Event()
        root.start_soon(_watch_signals, stopping, half)
        await root.start(serve_server, half)
        await half.scheduler.post(CatalogChanged(models=models))
        link = MemoryLink(half.scheduler, NODE)
        await root.start(functools.partial(serve_node, link, engines=half.engines, settings=settings, held=True))
        visit = Visit(question=question)
        root.start_soon(_attend, visit, half, models, on_ready, stopping)
        await stopping.wait()
        if question is not None:
            # whoever asked has the answer, or wants it no more
            visit.scope.cancel()
        await half.drain(0 if question is not None else config.timeouts.drain)
        await half.scheduler.post(Stopping())
        with trio.move_on_after(STOP_SECONDS) as patience:
            while not half.scheduler.fleet.idle():
                await half.scheduler.wait_changed()
        if patience.cancelled_caught:
            raise LlmgwError(f"engines did not stop within {STOP_SECONDS:g} s; the log names their processes")
        root.cancel_scope.cancel()
    if visit.failure is not None:
        raise visit.failure
    if question is not None and not visit.answered:
        raise KeyboardInterrupt


@dataclass(slots=True, kw_only=True)
class Visit:
    """What whoever started the program came for: an answer, or that it serves. A failure ends it in good order."""

    question: str | None
    answered: bool = False
    failure: Exception | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


def _drop_log(text: str) -> None:
    """Somebody asked one question: the answer is all that belongs on the terminal."""


async def _watch_signals(stopping: trio.Event, half: ServerHalf) -> None:
    with trio.open_signal_receiver(*stop_signals()) as signals:
        async for _ in signals:
            if stopping.is_set():
                half.hurry()
            stopping.set()


async def _attend(
    visit: Visit, half: ServerHalf, models: tuple[Model, ...], on_ready: Callable[[str], None], stopping: trio.Event
) -> None:
    """Whatever goes wrong here, the engines are stopped before it is told: nobody else would stop them."""
    try:
        with visit.scope:
            await _say_ready(visit, half, models, on_ready)
    except Exception as error:
        visit.failure = error
    if visit.question is not None or visit.failure is not None:
        stopping.set()


async def _say_ready(
    visit: Visit, half: ServerHalf, models: tuple[Model, ...], on_ready: Callable[[str], None]
) -> None:
    fleet = half.scheduler.fleet
    wanted = [model for model in models if model.scaling.min > 0]
    while not all(fleet.ready(model.name) for model in wanted):
        if visit.question is not None:
            _raise_failure(half)
        await half.scheduler.wait_changed()
    try:
        await trio.to_thread.run_sync(on_ready, half.base_url, abandon_on_cancel=True)
    except OSError as error:
        log.warning("that it is ready can't be written: %s", error.strerror or error)
    if visit.question is not None:
        await ask_model(half.base_url, models[0].name, visit.question, _write_answer)
        visit.answered = True


async def _write_answer(text: str) -> None:
    """In a thread: whoever reads may have stopped, and is no reason to hear no signal any more."""
    try:
        await trio.to_thread.run_sync(write_out, text, abandon_on_cancel=True)
    except OSError as error:
        raise LlmgwError(f"the answer can't be written: {error.strerror or error}") from None


def _raise_failure(half: ServerHalf) -> None:
    """Somebody waits for one answer: the first failure of the model is the answer."""
    for each in half.scheduler.fleet.statistics().models:
        for replica in each.replicas:
            if replica.state is ShardState.ENDED:
                # Its last lines are in the log already.
                raise EngineFailed(
                    f"{each.model.name} ({show_url(each.model.source)}) can't be started: {replica.cause}"
                )
        if isinstance(each.verdict, Rejected) and each.verdict.rejections:
            reasons = "; ".join(rejection.detail for rejection in each.verdict.rejections)
            raise EngineFailed(f"{each.model.name} can't be placed: {reasons}")
