"""A node's agent, as agent/tree.py has it: what is desired is taken whole, and compared with what runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from llmgw.core.effects import Desire
from llmgw.core.events import NodeRegistered, NodeReported, ShardChanged
from llmgw.core.replica import Endpoint, Measured, ShardId, ShardReport, ShardSpec, ShardState
from simulator.faults import Mood
from simulator.link import Link
from simulator.loop import Loop
from simulator.machine import Machine, Process

GRACE_SECONDS = 30.0
# How long the memory of engines that are gone is waited for.
FREE_SECONDS = 10.0
# An engine whose steps stand still is asked for a token, and given up without one.
HUNG_SECONDS = 90.0


@dataclass(slots=True)
class Life:
    """One shard that runs here. ``prepared``: all is there, and it waits for the others of its group. ``cause`` is why
    it ends, where nobody asked it to."""

    spec: ShardSpec
    report: ShardReport
    prepared: bool = False
    launched_at: float | None = None
    process: Process | None = None
    stopping: bool = False
    cause: str | None = None
    over: bool = False


class Agent:
    """One start of an agent: what it knows is gone with it, and its engines are not."""

    def __init__(
        self, machine: Machine, loop: Loop, rng: Random, *, beat_seconds: float, note: Callable[[str], None]
    ) -> None:
        self.machine = machine
        self.link: Link | None = None
        self.desired: dict[ShardId, ShardSpec] = {}
        self.running: dict[ShardId, Life] = {}
        self._ended: dict[ShardId, Life] = {}
        self._ended_before: list[tuple[ShardSpec, ShardReport]] = []
        self._applied: int | None = None
        self._outbox: dict[tuple[ShardId, int], ShardChanged] = {}
        self._loop = loop
        self._rng = rng
        self._beat_seconds = beat_seconds
        self._note = note
        self._gone = False
        machine.watcher = self
        self._adopt()
        loop.after(rng.uniform(0.0, beat_seconds), self._beat)

    def _adopt(self) -> None:
        """Take over what an earlier agent left; what ended meanwhile is told with the registration."""
        machine = self.machine
        for shard, process in [*machine.records.items()]:
            spec = process.spec
            if not process.alive:
                cause = process.cause
                report = replace(_first_report(spec), state=ShardState.ENDED, cause=cause)
                self._ended_before.append((spec, report))
                del machine.records[shard]
                machine.note_change()
                continue
            life = Life(spec=spec, report=_first_report(spec), process=process)
            state = ShardState.READY if process.ready else ShardState.LOADING
            life.report = replace(life.report, state=state, endpoint=_endpoint(spec))
            self.running[shard] = life
            if not process.ready:
                self._loop.after(spec.profile.startup_timeout_seconds, self._be_too_late, life)
            elif process.hung:
                self._loop.after(HUNG_SECONDS, self._give_up_hung, life)

    def crash(self) -> None:
        """Its engines go on, and nobody watches them."""
        self._gone = True
        self.machine.watcher = None
        self.link = None

    # -- the talk with the server

    def connect(self, link: Link) -> None:
        """A link is there: say what runs here, then all that waits."""
        self.link = link
        self._applied = None
        known = [(life.spec, life.report) for life in self.running.values()]
        known += [(life.spec, life.report) for life in self._ended.values() if self._is_desired(life.spec)]
        link.send_up(NodeRegistered(node=self.machine.look(), running=(*known, *self._ended_before)))
        self._ended_before = []
        for key in [*self._outbox]:
            link.send_up(self._outbox.pop(key))

    def take(self, desire: Desire) -> None:
        """The whole set that is to run."""
        self.desired = {spec.id: spec for spec in desire.shards}
        self._ended = {shard: life for shard, life in self._ended.items() if shard in self.desired}
        self._reconcile()
        self._applied = desire.revision
        self._report_node()

    def _beat(self) -> None:
        if not self._gone:
            self._report_node()
            self._loop.after(self._beat_seconds, self._beat)

    def _report_node(self) -> None:
        if self.link is not None:
            self.link.send_up(NodeReported(node=self.machine.look(), applied=self._applied))

    def _say(
        self,
        life: Life,
        state: ShardState,
        *,
        endpoint: Endpoint | None = None,
        cause: str | None = None,
        measured: Measured | None = None,
    ) -> None:
        life.report = replace(life.report, state=state, endpoint=endpoint, cause=cause, measured=measured)
        changed = ShardChanged(node=self.machine.id, report=life.report)
        if self.link is not None:
            self.link.send_up(changed)
        else:
            key = (life.spec.id, life.spec.epoch)
            self._outbox.pop(key, None)
            self._outbox[key] = changed

    # -- what runs against what is desired

    def _is_desired(self, spec: ShardSpec) -> bool:
        wanted = self.desired.get(spec.id)
        return wanted is not None and wanted.epoch == spec.epoch

    def _reconcile(self) -> None:
        for life in [*self.running.values()]:
            if not self._is_desired(life.spec):
                self._stop(life)
            elif self.desired[life.spec.id].go and not life.spec.go:
                life.spec = replace(life.spec, go=True)
                if life.prepared:
                    self._launch_soon(life)
        for shard, spec in self.desired.items():
            ended = self._ended.get(shard)
            # One whose older epoch still runs is begun when that has ended: two epochs never run at once.
            if shard not in self.running and (ended is None or ended.spec.epoch != spec.epoch):
                self._begin(spec)

    def _begin(self, spec: ShardSpec) -> None:
        life = Life(spec=spec, report=_first_report(spec))
        self.running[spec.id] = life
        self._say(life, ShardState.PREPARING)
        slow = Mood.SLOW_TO_PREPARE in self.machine.moods
        seconds = self._rng.uniform(200.0, 400.0) if slow else self._rng.uniform(0.05, 1.5)
        self._loop.after(seconds, self._be_prepared, life)

    def _be_prepared(self, life: Life) -> None:
        if self._gone or life.over or life.stopping:
            return
        life.prepared = True
        if life.spec.go:
            self._launch_soon(life)
        else:
            self._say(life, ShardState.PREPARED)

    def _launch_soon(self, life: Life) -> None:
        self._say(life, ShardState.LAUNCHING)
        self._loop.after(self._rng.uniform(0.05, 0.5), self._launch, life)

    def _launch(self, life: Life) -> None:
        if self._gone or life.over or life.stopping:
            return
        launched = self.machine.launch(life.spec)
        if isinstance(launched, str):
            self._end(life, launched)
            return
        life.process, life.launched_at = launched, self._loop.now
        self._note(f"{life.spec.id} epoch {life.spec.epoch} is launched on {self.machine.id}, pid {launched.pid}")
        self._say(life, ShardState.LOADING)
        self._loop.after(life.spec.profile.startup_timeout_seconds, self._be_too_late, life)

    def _be_too_late(self, life: Life) -> None:
        if self._gone or life.over or life.stopping or life.process is None or life.process.ready:
            return
        self._give_up(life, f"not ready within startup_timeout ({life.spec.profile.startup_timeout_seconds:g} s)")

    def _give_up(self, life: Life, cause: str) -> None:
        """It ends by its own fault."""
        life.cause = life.cause or cause
        self._stop(life)

    def _stop(self, life: Life) -> None:
        if life.stopping:
            return
        life.stopping = True
        if life.report.state is not ShardState.STOPPING:
            self._say(life, ShardState.STOPPING)
        process = life.process
        if process is None:
            self._end(life, life.cause)
        elif process.alive:
            self.machine.end(process)
            self._loop.after(GRACE_SECONDS, self._kill, life, process)
        else:
            self._wait_freed(life, process)

    def _kill(self, life: Life, process: Process) -> None:
        if not self._gone and not life.over:
            self.machine.die(process, "killed")

    def on_ready(self, process: Process) -> None:
        life = self._find(process)
        if life is not None and not life.stopping:
            self._say(life, ShardState.READY, endpoint=_endpoint(life.spec), measured=self._measure(life, process))

    def _measure(self, life: Life, process: Process) -> Measured:
        """What it took, as far as this agent has seen it."""
        seconds = None if life.launched_at is None else self._loop.now - life.launched_at
        gpu_gb = max(process.holds_gb.values(), default=None)
        return Measured(load_seconds=seconds, gpu_gb=gpu_gb, memory_gb=16.0)

    def on_hung(self, process: Process) -> None:
        life = self._find(process)
        if life is not None:
            self._loop.after(HUNG_SECONDS, self._give_up_hung, life)

    def _give_up_hung(self, life: Life) -> None:
        if not self._gone and not life.over and not life.stopping:
            self._give_up(life, f"hung: nothing was computed for {HUNG_SECONDS:g} s")

    def on_exit(self, process: Process) -> None:
        life = self._find(process)
        if life is None:
            return
        if life.stopping:
            self._wait_freed(life, process)
        else:
            self._give_up(life, process.cause)

    def _wait_freed(self, life: Life, process: Process) -> None:
        if process.freed or not process.holds_gb:
            self._end(life, life.cause)
        else:
            self._loop.after(FREE_SECONDS, self._stop_waiting, life)

    def on_freed(self, process: Process) -> None:
        life = self._find(process)
        if life is not None and life.stopping:
            self._end(life, life.cause)

    def _stop_waiting(self, life: Life) -> None:
        if not self._gone and not life.over:
            self._end(life, life.cause)

    def _end(self, life: Life, cause: str | None) -> None:
        if life.over:
            return
        life.over = True
        if life.process is not None:
            self.machine.forget(life.process)
        self._note(
            f"{life.spec.id} epoch {life.spec.epoch} has ended on {self.machine.id}: {cause or 'it was to stop'}"
        )
        self._say(life, ShardState.ENDED, cause=cause)
        del self.running[life.spec.id]
        # One that was to stop leaves nothing behind: a server that has begun anew may give its number again.
        if self._is_desired(life.spec):
            self._ended[life.spec.id] = life
        self._reconcile()

    def _find(self, process: Process) -> Life | None:
        life = self.running.get(process.spec.id)
        return life if life is not None and life.process is process else None


def _first_report(spec: ShardSpec) -> ShardReport:
    return ShardReport(shard=spec.id, replica=spec.replica, epoch=spec.epoch, state=ShardState.PLACED)


def _endpoint(spec: ShardSpec) -> Endpoint | None:
    """Rank 0 answers requests, and nobody else."""
    return Endpoint(host="127.0.0.1", port=18000, served_name=spec.model.name) if spec.rank == 0 else None
