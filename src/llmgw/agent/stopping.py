"""Stopping every engine of a node by its state folder alone, whether or not an agent runs there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import trio

from llmgw.core.effects import Desire
from llmgw.engines.registry import Engine
from llmgw.errors import UsageError
from llmgw.host.process import Process, Stat, find_marked, read_boot_id, take_over
from llmgw.host.state import ShardRecord, StateFolder, StateTaken, hold_state

GRACE_SECONDS = 10.0


@dataclass(slots=True)
class Left:
    """What there is of one shard: its file, its living processes, or both."""

    marker: str
    record: ShardRecord | None = None
    stats: list[Stat] = field(default_factory=list)

    @property
    def name(self) -> str:
        # A marker ends in the shard and its epoch.
        return self.record.spec.id if self.record else self.marker.rpartition(":")[0].rpartition(":")[2]


async def stop_all(
    state: StateFolder, engines: Mapping[str, Engine], *, say: Callable[[str], None], force: bool = False
) -> bool:
    """Stop every engine of this folder, and say of each what became of it. False when one of them can't be killed.

    Raises UsageError while engines are to run here, which ``force`` overrules, and when the folder can't be used.
    """
    if not await trio.to_thread.run_sync(_is_there, state):
        say(f"nothing runs here: there is no state folder {state.path}")
        return True
    wanted = _read_wanted(state, force=force)
    if wanted is not None and wanted.shards and not force:
        raise UsageError(_refusal(wanted))
    with _hold(state) as agent:
        left = await trio.to_thread.run_sync(_find, state)
        if not left:
            say(f"nothing runs here: there is no engine of {state.path}")
        # Each is finished before the next, so that an interrupt leaves no engine whose file is gone.
        gone = [await _stop(state, engines, each, say, keep_file=agent is not None) for each in left]
    if left and wanted is not None and wanted.shards:
        say(_what_comes_back(wanted, agent))
    return all(gone)


def _is_there(state: StateFolder) -> bool:
    try:
        state.path.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UsageError(
            f"{state.path} can't be looked into: {error.strerror}; be the user that the agent is"
        ) from error
    if not os.access(state.path, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"{state.path} is another user's: run this as the one that the agent runs as (root: sudo)")
    return True


def _read_wanted(state: StateFolder, *, force: bool) -> Desire | None:
    try:
        return state.read_desired()
    except UsageError as error:
        if force:
            return None
        # Not knowing is no leave to stop what somebody may be using.
        raise UsageError(f"{error.message}; to stop the engines all the same, add --force") from error


def _refusal(desire: Desire) -> str:
    shards = ", ".join(f"{spec.id} (model {spec.model.name})" for spec in desire.shards)
    return (
        f"the server wants engines on {desire.node}: {shards}. Remove the model there (llmgw ctl model rm NAME, or its "
        "entry in server.yaml), or stop the engines all the same with --force; the server then has them started again "
        "as soon as an agent runs here"
    )


def _what_comes_back(desire: Desire, agent: str | None) -> str:
    models = ", ".join(sorted({spec.model.name for spec in desire.shards}))
    if agent is not None:
        # It may be another stop-all as well: both hold the folder.
        return f"another llmgw (pid {agent}) works here: if it is the agent, it starts {models} again"
    return f"the server still wants {models} here: the next agent of this node starts them again"


@contextmanager
def _hold(state: StateFolder) -> Iterator[str | None]:
    """Keep an agent from starting meanwhile, which would take over engines that are being stopped. What is given is the
    pid of one that runs already, else None."""
    with ExitStack() as held:
        agent = None
        try:
            held.enter_context(hold_state(state.path))
        except StateTaken as taken:
            agent = taken.holder
        yield agent


def _find(state: StateFolder) -> list[Left]:
    """Blocks."""
    state.make()
    left = {record.marker: Left(record.marker, record) for record in state.read()}
    # Children of a dead leader, and engines whose file is damaged or not written yet.
    for stat, marker in find_marked(state.marker_prefix()).items():
        left.setdefault(marker, Left(marker)).stats.append(stat)
    return sorted(left.values(), key=lambda each: each.marker)


async def _stop(
    state: StateFolder, engines: Mapping[str, Engine], left: Left, say: Callable[[str], None], *, keep_file: bool
) -> bool:
    """``keep_file`` where an agent lives, which sees the end and may have written the next try's file already."""
    process = await trio.to_thread.run_sync(_take, left)
    gone = True
    if process is None:
        say(f"{left.name}: had ended before")
    else:
        try:
            say(f"{left.name}: stopping pid {process.pid}")
            gone = await process.stop(*_way(engines, left.record))
            alive = sorted(await process.find_alive())
        finally:
            process.close()
        say(
            f"{left.name}: stopped" if gone else f"{left.name}: can't be killed: processes {', '.join(map(str, alive))}"
        )
    if gone and left.record is not None and not keep_file:
        await trio.to_thread.run_sync(state.remove, left.record.spec.id)
    return gone


def _take(left: Left) -> Process | None:
    """The leader, or failing that any process that carries the marker: stopping it finds the others. Blocks."""
    candidates = [(stat.pid, stat.start_time) for stat in sorted(left.stats, key=_leaders_first)]
    record = left.record
    if record is not None and record.boot_id == read_boot_id():
        candidates.insert(0, (record.pid, record.start_time))
    found = (take_over(pid, start_time, left.marker) for pid, start_time in candidates)
    return next((process for process in found if process is not None), None)


def _leaders_first(stat: Stat) -> tuple[bool, int]:
    return stat.pid != stat.group, stat.start_time


def _way(engines: Mapping[str, Engine], record: ShardRecord | None) -> tuple[signal.Signals, float]:
    """How this engine is asked to stop; one that nobody here knows is asked as any program is."""
    engine = engines.get(record.spec.profile.engine) if record is not None else None
    if engine is None:
        return signal.SIGTERM, GRACE_SECONDS
    first = signal.Signals.__members__.get(engine.info.stop_signal, signal.SIGTERM)
    return first, engine.info.stop_grace_seconds
