"""How an agent touches its machine: each thread, process, file, socket and device of it, behind one Protocol.

In life it is ``machine.Machine``. A simulation has hands of its own and runs all the rest of the agent as it is: no
other room of a running agent may reach for the machine past them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

import trio

from llmgw.agent.preflight import Preflight
from llmgw.core.effects import Desire
from llmgw.core.model import Model
from llmgw.core.node import FabricFound, Node, NodeId
from llmgw.core.replica import ShardId, ShardSpec
from llmgw.core.weights import Cached, Fetch, Manifest, SetAside, Source, Swarm
from llmgw.engines.registry import Engine
from llmgw.engines.types import Command
from llmgw.host.gpus import GpusFound
from llmgw.host.http import Reply
from llmgw.host.process import Stat
from llmgw.host.state import ShardRecord
from llmgw.host.usage import Usage
from llmgw.host.weights.disk.damage import Damaged

if TYPE_CHECKING:
    from llmgw.agent.held import Tools

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class Process(Protocol):
    """An engine's process tree, started here or taken over."""

    @property
    def pid(self) -> int: ...

    @property
    def start_time(self) -> int: ...

    async def wait_exit(self) -> int | None:
        """Return when the leader has ended: its exit code, minus the signal, or None when nobody knows."""

    async def stop(self, first: signal.Signals, grace_seconds: float) -> bool:
        """End the whole tree: asked, and killed when it does not heed that. True once it is seen gone."""

    async def find_alive(self) -> Collection[int]:
        """The pids of all that still lives of the tree, whether or not its leader does."""

    def close(self) -> None:
        """Let go of the process without touching it."""


class Log(Protocol):
    """What an engine prints. Everything here blocks."""

    @property
    def path(self) -> Path: ...

    def read_new(self) -> list[str]:
        """The complete lines since the last call. Raises OSError."""

    def cap(self) -> None:
        """Keep what there is in bounds. Raises OSError."""

    def read_last(self, count: int) -> tuple[str, ...]:
        """The last ``count`` lines, the unfinished one included."""


class State(Protocol):
    """What an agent must still know after its own death (``host.state.StateFolder``). What it does blocks; writing
    raises OSError with a ``filename``."""

    @property
    def cache(self) -> Path: ...

    def hold(self) -> AbstractContextManager[None]:
        """Keep a second agent off it. Raises UsageError."""

    def make(self) -> None:
        """Create what is missing. Raises UsageError."""

    def make_cache(self) -> Path:
        """The folder for what engines keep over restarts. Raises OSError."""

    def marker(self, spec: ShardSpec) -> str:
        """What the processes of this shard carry."""

    def marker_prefix(self) -> str:
        """How every marker of this state begins."""

    def write(self, record: ShardRecord) -> None:
        """Replace what is known of a shard that runs."""

    def remove(self, shard: ShardId) -> None:
        """Forget a shard. Raises nothing."""

    def read(self) -> list[ShardRecord]:
        """Every shard that ran when this was last written."""

    def write_desired(self, desire: Desire) -> None:
        """Remember the set that is to run here."""

    def log_path(self, shard: ShardId) -> Path:
        """Where the shard's engine writes."""

    def open_log(self, path: Path, hide: Callable[[str], str]) -> Log:
        """A reader of that from its beginning; ``hide`` takes out of each line what nobody is to read."""

    def prune_logs(self, in_use: set[Path]) -> None:
        """Remove the oldest logs of engines that run no more."""


class Use(Protocol):
    """Holds a commit: while it is held nobody removes that, no other program on the same folder either."""

    def close(self) -> None:
        """Let go of it. Does not block."""


class Depot(Protocol):
    """Weights on this machine, and how more of them come (``depot.Depot``). What is not async blocks, unless it says
    so; what a folder or a file can't do is EngineFailed."""

    @property
    def seed(self) -> str | None:
        """Where others may take pieces now, as ``host:port``; None: nowhere. Does not block."""

    async def serve(self, is_allowed: Callable[[NodeId, str], bool], *, task_status: trio.TaskStatus[None]) -> None:
        """For ever: keep open what fetches need, and give pieces to others. Asked by node and key of a source who is
        to have them. Before it has started nothing can be fetched."""

    def note_swarms(self, swarms: Collection[Swarm]) -> None:
        """These are the swarms that this node is in now. Does not block."""

    async def fetch(
        self,
        source: Source,
        *,
        swarm: Callable[[], Swarm | None],
        tell: Callable[[Fetch], None],
        newest: bool,
        users: Callable[[str], Sequence[str]],
    ) -> Manifest:
        """Have the source, and tell how that goes; ``newest``: as it is now, and all of what there is of that already
        compared with its hashes. What has come stays when it is cancelled, and the next fetch goes on from there.
        ``users`` are the shards that run by a commit: while there are any nothing of it is mended. Raises
        EngineFailed."""

    def find(self, source: str) -> Manifest | None:
        """The newest commit of this source that is here; nobody else is asked. None where that is not whole, or no
        copy any more: what is to be done then a fetch knows."""

    async def list(self) -> tuple[Manifest, ...]:
        """All that has been fetched and is whole."""

    def list_damaged(self) -> tuple[Damaged, ...]:
        """What the last ``list`` has found that was fetched, and is no copy any more. Does not block."""

    @property
    def set_asides(self) -> tuple[SetAside, ...]:
        """The last commits that were found damaged and set aside, to be fetched anew. Does not block."""

    def look(self, manifest: Manifest) -> str | None:
        """What an engine would end by, as the beginnings of the files tell it; from then on it is no copy any more."""

    def list_unfinished(self) -> tuple[Cached, ...]:
        """What is left of fetches that have not ended."""

    def path_of(self, manifest: Manifest, *, as_file: bool) -> Path:
        """What an engine is pointed at: the file (of several parts the first), or the folder of all of it."""

    def use(self, manifest: Manifest) -> Use | None:
        """Hold it; None when it was removed meanwhile."""

    def remove(self, source: str, commit: str, stands: Callable[[], bool]) -> int:
        """Remove a commit, or what there is of it, and return how many bytes that has freed. ``stands``: whether it is
        still to go, asked in the last moment. Raises LlmgwError when it is to stay: that is not so, it is in use, being
        fetched, or nothing that llmgw has fetched."""

    def is_shared(self) -> bool:
        """Whether other machines write to what is fetched here as well."""

    async def look_around(self) -> tuple[str, ...]:
        """The models that people have put into this node's folders, as sources that name them."""


class Hands(Protocol):
    """What an agent does to its machine and asks of it. What is not async blocks, unless it says so: it is called by
    ``run``."""

    @property
    def state(self) -> State: ...

    @property
    def depot(self) -> Depot: ...

    async def run(self, work: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Do what blocks while others go on. A cancellation comes before it or after it, never between."""

    async def survey(self, tools: Tools) -> Node:
        """The node as it is now."""

    async def look_at_gpus(self, tools: Tools) -> GpusFound:
        """Its GPUs as they are now."""

    async def measure(self, tools: Tools, process: Process) -> Usage:
        """What an engine's process tree takes now, and of GPUs when they were last looked at."""

    async def look_at_fabrics(self, tools: Tools) -> tuple[FabricFound, ...]:
        """The networks that it was declared to be on, as they are now."""

    def find_program(self, engine: Engine, binaries: Mapping[str, str]) -> tuple[str, ...]:
        """What is run for the engine before any flag, with these as configured. Raises EngineFailed."""

    def stamp_program(self, engine: Engine, program: tuple[str, ...]) -> tuple[int, ...]:
        """What differs once the program is another."""

    async def examine(self, engine: Engine, program: tuple[str, ...], *, marker: str) -> Preflight:
        """Try the program; what is started for that carries the marker, and is gone after."""

    def check_sources(self, model: Model, engine: Engine) -> None:
        """Raise EngineFailed when the engine can't be pointed at all that the model is made of. What is to be fetched
        is not looked for."""

    def choose_threads(self) -> int | None:
        """How many an engine is to have; None: it may count for itself."""

    def start(self, command: Command, *, log: Path, marker: str) -> Process:
        """Start an engine that prints to a new log there. Raises OSError."""

    def take_over(self, pid: int, start_time: int, marker: str) -> Process | None:
        """Watch a process that an earlier agent started; None when it is not there any more. Does not block."""

    def find_marked(self, prefix: str) -> Mapping[Stat, str]:
        """The living processes whose marker begins so, and their markers."""

    def boot_seconds(self) -> float:
        """A clock that only goes on, also while this process is stopped or the machine sleeps. Does not block."""

    def read_boot_id(self) -> str:
        """What differs after a reboot, when process numbers begin again."""

    def count_oom_kills(self) -> int | None:
        """How many the kernel has killed for want of memory until now; None where nobody counts."""

    def is_free(self, port: int) -> bool:
        """Whether an engine could listen there now. Does not block."""

    def is_taken(self, address: str) -> bool:
        """Whether it is certain that another program listens at this ``host:port`` of here. Does not block."""

    def is_foreign(self, port: int, tree: set[int]) -> bool:
        """Whether it is certain that a process other than these listens on the port."""

    async def get(self, port: int, path: str) -> Reply | None:
        """Ask an engine: REFUSED where nobody listens, None where somebody does and does not answer in HTTP. Waits as
        long as the other side does: the caller has the deadline."""

    async def post(self, port: int, path: str, body: object) -> Reply | None:
        """The same for a POST of ``body`` as JSON."""
