"""What a shard holds at this moment: its process, its port and its log, taken and given back together."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from llmgw.agent.booked import wait_given_back
from llmgw.agent.hands import Hands, Log, Process, State
from llmgw.agent.peaks import Peaks
from llmgw.agent.programs import Programs
from llmgw.agent.settings import AgentSettings, Pace
from llmgw.agent.taken import Taken
from llmgw.agent.telling import WORDS_CHARS, Telling
from llmgw.agent.weights import Weights
from llmgw.core.node import Gpu, Node
from llmgw.core.replica import Endpoint, ShardReport, ShardSpec, ShardState
from llmgw.engines.registry import Engine
from llmgw.engines.types import Command, Launch
from llmgw.errors import EngineFailed
from llmgw.host.executable import advise_write, explain_start
from llmgw.host.ports import HOST, Ports
from llmgw.host.process import hash_argv
from llmgw.host.state import ShardRecord
from llmgw.host.usage import Usage

log = logging.getLogger(__name__)

# An engine whose worker was killed takes its time to notice and to end.
OOM_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every shard of a node works with. ``tell_node`` hands up what is new of the node, ahead of what is reported
    after it."""

    engines: Mapping[str, Engine]
    settings: AgentSettings
    hands: Hands
    programs: Programs
    weights: Weights
    ports: Ports
    taken: Taken = field(default_factory=Taken)
    tell_node: Callable[[Node], None] = lambda node: None

    @property
    def state(self) -> State:
        return self.hands.state


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """An engine that was found running, and what is known of it: LOADING or READY, as its health said."""

    record: ShardRecord
    process: Process
    report: ShardReport


def is_proven(spec: ShardSpec, record: ShardRecord | None) -> bool:
    """Whether the health of this shard can be believed: one of several may say that it is ready and hang at the first
    token, until it was seen to answer, and so may one of a changed definition."""
    return (spec.count == 1 and not spec.on_trial) or (record is not None and (record.proven or not record.serves))


def endpoint_of(spec: ShardSpec, port: int) -> Endpoint:
    """Where the engine of a shard listens."""
    return Endpoint(host=HOST, port=port, served_name=spec.model.name)


class Held:
    """What a shard holds at this moment: its process, its port, its log."""

    __slots__ = (
        "go",
        "gpus",
        "log",
        "log_troubled",
        "measured_at",
        "oom_kills",
        "oom_seen_at",
        "peaks",
        "port",
        "process",
        "ready",
        "record",
        "serves",
        "spec",
        "telling",
        "tools",
    )

    def __init__(self, spec: ShardSpec, tools: Tools, telling: Telling, go: trio.Event | None = None) -> None:
        self.spec = spec
        # Set when the shards of a replica may be launched, where they have to wait for one another.
        self.go = trio.Event() if go is None else go
        self.tools = tools
        self.telling = telling
        self.process: Process | None = None
        self.port: int | None = None
        # Those of its launch as they were then, () for none; None where nobody chose, or an earlier agent launched it.
        self.gpus: tuple[Gpu, ...] | None = None
        self.ready = False
        # It answers HTTP: else it is up while its process lives.
        self.serves = True
        self.record: ShardRecord | None = None
        # How many the kernel had killed for memory when that was last looked at, and when it was seen to be more.
        self.oom_kills: int | None = None
        self.oom_seen_at: float | None = None
        self.peaks = Peaks(None)
        self.measured_at = -math.inf
        # said once, not at every poll
        self.log_troubled = False
        self.log: Log = tools.state.open_log(tools.state.log_path(spec.id), telling.hide)

    @property
    def pace(self) -> Pace:
        return self.tools.settings.pace

    def engine(self) -> Engine:
        """Raises EngineFailed when no plugin here is of that name."""
        name = self.spec.profile.engine
        if name not in self.tools.engines:
            known = ", ".join(sorted(self.tools.engines)) or "none"
            raise EngineFailed(f"no engine plugin is called {name}; installed here: {known}")
        return self.tools.engines[name]

    async def wait_exit(self) -> int | None:
        """Return when the engine has ended, with its exit code, None when that can't be known."""
        return None if self.process is None else await self.process.wait_exit()

    def take(self, adopted: Adopted) -> None:
        """Go on with an engine that was found running."""
        self.process, self.port, self.record = adopted.process, adopted.record.port, adopted.record
        self.serves = adopted.record.serves
        self.tools.taken.hold(self.spec)
        self.ready = adopted.report.state is ShardState.READY
        self.log = self.tools.state.open_log(Path(adopted.record.log), self.telling.hide)
        # The first look at the counter, which blocks, is a poll's.
        self.oom_kills, self.oom_seen_at = None, None

    async def note_proven(self) -> None:
        """It has answered one: the next agent need not ask again. A disk that is full ends no engine that serves."""
        if self.record is None:
            return
        self.record = replace(self.record, proven=True)
        try:
            await self.tools.hands.run(self.tools.state.write, self.record)
        except OSError as error:
            log.warning("state file %s can't be written: %s", error.filename, error.strerror or error)

    def take_port(self) -> int:
        """A port of its own: the one that it has, as long as nobody else listens there. Raises EngineFailed."""
        had = self.port
        if had is not None and self.tools.hands.is_free(had):
            return had
        port = self.port = self.tools.ports.take()
        if had is not None:
            self.tools.ports.give_back(had)
        return port

    async def start(self, launch: Launch) -> None:
        """Start the engine on a port of its own, and know of it even after a crash."""
        port = self.take_port()
        command = self.engine().build_command(replace(launch, port=port))
        version = None if launch.version is None else self.telling.hide(launch.version.number)[:WORDS_CHARS]
        self.peaks, self.measured_at = Peaks(trio.current_time(), version), -math.inf
        # In one step that a cancellation can't cut in two: a process without a file would be nobody's.
        pid = await self.tools.hands.run(self._start, command, port)
        self.telling.process(pid, endpoint_of(self.spec, port) if self.serves else None)

    def _start(self, command: Command, port: int) -> int:
        hands, state, path, program = self.tools.hands, self.tools.state, self.log.path, command.argv[0]
        marker = state.marker(self.spec)
        self.serves = command.serves
        self.oom_kills, self.oom_seen_at = hands.count_oom_kills(), None
        try:
            self.log = state.open_log(path, self.telling.hide)
            # Held before anything else can fail, so that it is stopped when its file can't be written.
            process = self.process = hands.start(command, log=path, marker=marker)
        except OSError as error:
            why = explain_start(program, error)
            raise EngineFailed(f"{program} can't be started: {why.reason}", remedy=why.remedy) from error
        argv_hash = hash_argv(command.argv)
        log.info("shard %s: pid %d, port %d, command %s", self.spec.id, process.pid, port, argv_hash)
        record = self.record = ShardRecord(
            spec=self.spec,
            pid=process.pid,
            start_time=process.start_time,
            boot_id=hands.read_boot_id(),
            argv_hash=argv_hash,
            port=port,
            log=str(path),
            marker=marker,
            serves=command.serves,
            weights=self.tools.weights.find_used(self.spec.id),
        )
        try:
            state.write(record)
        except OSError as error:
            # Without it the next agent would not know this engine for its own.
            text = f"state file {error.filename} can't be written: {error.strerror or error}"
            raise EngineFailed(text, remedy=advise_write(error, error.filename)) from error
        return process.pid

    async def measure(self, *, within_seconds: float) -> Usage | None:
        """What it takes of its machine; None where it was looked at within these seconds, or has no process."""
        now = trio.current_time()
        if self.process is None or now - self.measured_at < within_seconds:
            return None
        self.measured_at = now
        usage = await self.tools.hands.measure(self.tools, self.process)
        self.peaks.note(usage)
        return usage

    def tell_peaks(self) -> None:
        """Tell what its launch has shown, where that is news."""
        news = self.peaks.find_news()
        if news is not None:
            self.telling.measured(news)

    async def count_kills(self) -> None:
        """Look whether the kernel has killed more for want of memory, as far as it counts that."""
        now = await self.tools.hands.run(self.tools.hands.count_oom_kills)
        if None not in (now, self.oom_kills) and now != self.oom_kills:
            self.oom_seen_at = trio.current_time()
        self.oom_kills = now

    def has_seen_a_kill(self) -> bool:
        """Whether that was just now. It counts for all engines of this machine, and what it was an hour ago is no word
        on this one."""
        return self.oom_seen_at is not None and trio.current_time() - self.oom_seen_at <= OOM_SECONDS

    def read_log(self) -> list[str]:
        """The new lines; the file is kept in bounds on the way.

        No line when the disk is full or the file out of reach: that is no reason to end an engine that serves.
        """
        try:
            lines = self.log.read_new()
            self.log.cap()
        except OSError as error:
            if not self.log_troubled:
                log.warning("shard %s: its log %s: %s", self.spec.id, self.log.path, error.strerror or error)
            self.log_troubled = True
            return []
        self.log_troubled = False
        return lines

    async def has_lost_its_port(self) -> bool:
        """Whether it is another program that listens on our port."""
        tree = set() if self.process is None else set(await self.process.find_alive())
        return await self.tools.hands.run(self.tools.hands.is_foreign, self.port or 0, tree)

    async def clear(self) -> None:
        """Stop what is left of the process tree, see it gone and the memory of its GPUs free, and only then give its
        port back and forget it."""
        started = self.process is not None
        if self.process is not None:
            info = self.engine().info
            first = signal.Signals.__members__.get(info.stop_signal, signal.SIGTERM)
            while not await self.process.stop(first, info.stop_grace_seconds):
                pids = ", ".join(map(str, sorted(await self.process.find_alive())))
                log.error("shard %s: processes %s can't be killed; trying on", self.spec.id, pids)
                self.telling.progress(f"can't be killed: processes {pids}")
            self.close()
            if not await wait_given_back(self.spec, self.tools, self.gpus or ()):
                # The server is to hear of that before it hears of the end, or it takes the cards for free.
                self.tools.tell_node(await self.tools.hands.survey(self.tools))
        if self.port is not None:
            self.tools.ports.give_back(self.port)
            self.port = None
        self.ready = False
        if started:
            await self.tools.hands.run(self.tools.state.remove, self.spec.id)

    def close(self) -> None:
        """Let go of the process; it is not touched."""
        if self.process is not None:
            self.process.close()
            self.process = None
