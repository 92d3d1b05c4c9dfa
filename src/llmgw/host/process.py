"""Engine processes: each in a group of its own, watched by pidfd, stopped as a whole tree and seen gone."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import trio

from llmgw.engines.types import Command, ProbeOutput

# Every engine carries this variable, with a text of its starter. It survives the death of the group's leader, and so
# tells our orphans from a stranger's process that happens to have got the same number.
MARKER = "LLMGW_SHARD"

# What llmgw itself is told by the environment (API keys among it) is nothing an engine needs to know.
OWN_PREFIX = "LLMGW_"

# What /proc calls a thread of the kernel, and what is ending: neither has an environment any more, or ever had.
PF_EXITING = 0x00000004
PF_KTHREAD = 0x00200000
# How long a program may be about to begin, with no environment to be seen; it takes far less than one pause.
EXEC_PAUSE_SECONDS = 0.002
EXEC_TRIES = 100
# More than an environment has: in one act, for it may be gone before a second.
ENVIRONMENT_BYTES = 1024 * 1024

# What a program does to itself.
CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP})

SECOND_TERM_SECONDS = 2.0
KILL_SECONDS = 5.0
REAP_SECONDS = 0.02
PROBE_BYTES = 1024 * 1024
# Longer than the stop of a process tree takes at most.
PROBE_END_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """What /proc says of one process; ``start_time`` is in clock ticks since boot, ``state`` is the first thread's."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    threads: int
    start_time: int

    @property
    def alive(self) -> bool:
        """Whether any of its threads is. The first one may be a zombie long before the last has let go of memory."""
        return self.state not in "ZX" or self.threads > 1


def read_stat(pid: int) -> Stat | None:
    """None when there is no such process."""
    fields = _read_fields(pid)
    if fields is None:
        return None
    return Stat(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        threads=int(fields[17]),
        start_time=int(fields[19]),
    )


def _read_fields(pid: int) -> list[str] | None:
    """What proc(5) counts from the third on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name stands in brackets and may itself hold spaces and brackets: count from the last one.
    return text.rpartition(")")[2].split()


def read_all_stats() -> list[Stat]:
    """Every living process of this machine."""
    stats = (read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in stats if stat is not None and stat.alive]


def read_boot_id() -> str:
    """What differs after a reboot, when process numbers begin again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read_marker(pid: int) -> str | None:
    """The marker that a process was started with; None for a stranger's, or when it may not be read."""
    return _read_markers([pid]).get(pid)


def _read_markers(pids: Iterable[int]) -> dict[int, str]:
    """The markers of those that carry one. What is just being executed is waited for: it has no environment for a
    moment, and passed over it would be nobody's."""
    prefix = f"{MARKER}=".encode()
    found = {}
    unsure = list(pids)
    for attempt in range(EXEC_TRIES):
        if attempt:
            time.sleep(EXEC_PAUSE_SECONDS)
        seen = [(pid, _read_environment(pid)) for pid in unsure]
        for pid, environment in seen:
            entries = (environment or b"").split(b"\0")
            marker = next((entry for entry in entries if entry.startswith(prefix)), None)
            if marker is not None:
                found[pid] = os.fsdecode(marker[len(prefix) :])
        unsure = [pid for pid, environment in seen if environment == b"" and _may_begin(pid)]
        if not unsure:
            break
    return found


def _read_environment(pid: int) -> bytes | None:
    """What it was started with; None when that may not be read, or there is no such process."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            return b"".join(iter(functools.partial(file.read, ENVIRONMENT_BYTES), b""))
    except OSError:
        return None


def _may_begin(pid: int) -> bool:
    """Whether a process whose environment reads as empty may have one: it is being executed, or was while we read."""
    fields = _read_fields(pid)
    if fields is None or fields[0] in "ZX" or int(fields[6]) & (PF_KTHREAD | PF_EXITING):
        return False
    # The kernel tells where its code is when all else is laid out. Then what begins and ends at one place is empty.
    code, begins, ends = int(fields[23]), int(fields[47]), int(fields[48])
    return code == 0 or begins < ends


def is_killed(pid: int) -> bool:
    """Whether a process is gone or has its SIGKILL already, which it can only not have noticed yet."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    pending = (line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:")))
    return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending)


def hash_argv(argv: tuple[str, ...]) -> str:
    """A short name of a command line."""
    return hashlib.sha256("\0".join(argv).encode(errors="surrogateescape")).hexdigest()[:16]


def find_tree(leader: int) -> dict[int, Stat]:
    """The living processes of a leader's group and session, and all that descend from them, by pid."""
    stats = read_all_stats()
    tree = {stat.pid: stat for stat in stats if leader in (stat.pid, stat.group, stat.session)}
    grown = True
    while grown:
        children = [stat for stat in stats if stat.parent in tree and stat.pid not in tree]
        tree.update((stat.pid, stat) for stat in children)
        grown = bool(children)
    return tree


def find_marked(prefix: str) -> dict[Stat, str]:
    """The living processes whose marker begins so, and their markers."""
    stats = {stat.pid: stat for stat in read_all_stats()}
    marked = _read_markers(stats)
    return {stats[pid]: marker for pid, marker in marked.items() if marker.startswith(prefix)}


class Process:
    """An engine's process tree, started here or taken over: the leader's number, and a handle that can't go stale."""

    __slots__ = ("_handle", "_reaping", "_strays", "code", "ended", "marker", "pid", "start_time")

    def __init__(self, pid: int, start_time: int, handle: int, marker: str) -> None:
        self.pid = pid
        self.start_time = start_time
        self.marker = marker
        self.ended = False
        self.code: int | None = None
        # Descendants that left the group: once their parent is dead nothing leads to them any more.
        self._strays: set[Stat] = set()
        self._handle = handle
        # Two threads that wait at once: the one that comes second would find no child, and believe it never was ours.
        self._reaping = threading.Lock()

    def close(self) -> None:
        """Let go of the process without touching it."""
        os.close(self._handle)

    async def wait_exit(self) -> int | None:
        """Return when the leader has ended: its exit code, minus the signal, or None when it isn't our child."""
        while not self.ended:
            await trio.lowlevel.wait_readable(self._handle)
            if not self._reap():
                await trio.sleep(REAP_SECONDS)
        return self.code

    def _reap(self) -> bool:
        """Whether the leader has ended. Not yet while it is a zombie whose other threads still exit: the kernel gives
        such a one to nobody, and taken for ended it would stay a zombie for as long as we live."""
        with self._reaping:
            if not self.ended:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:
                    self.ended = True
                else:
                    if pid:
                        self.code = os.waitstatus_to_exitcode(status)
                        self.ended = True
            return self.ended

    async def stop(self, first: signal.Signals, grace_seconds: float) -> bool:
        """End the whole tree: asked, asked again (an early request gets lost), killed. True once it is seen gone."""
        steps = (
            (first, grace_seconds),
            (signal.SIGTERM, min(grace_seconds, SECOND_TERM_SECONDS)),
            (signal.SIGKILL, KILL_SECONDS),
        )
        for signum, seconds in steps:
            if not self._signal(await self._find_all(), signum):
                return True
            with trio.move_on_after(seconds):
                await self._wait_gone(signum)
                return True
        return not await self._find_all()

    async def _wait_gone(self, signum: signal.Signals) -> None:
        pause = 0.02
        while alive := await self.find_alive() or await self._find_all():
            # Who forked, or left the group, while it was signalled may have been passed over. A second SIGKILL is
            # nothing to anybody; a second request to end makes some programs give up halfway.
            if signum is signal.SIGKILL:
                self._signal(alive, signum)
            await trio.sleep(pause)
            pause = min(pause * 1.5, 0.2)

    async def _find_all(self) -> dict[int, Stat]:
        """With those that only the marker leads to: their parents are dead, and they are in no group of ours."""
        marked = await trio.to_thread.run_sync(find_marked, self.marker)
        self._strays |= {stat for stat, marker in marked.items() if marker == self.marker}
        return await self.find_alive()

    async def find_alive(self) -> dict[int, Stat]:
        """Everything that still lives of the tree, whether or not its leader does."""
        return await trio.to_thread.run_sync(self._find_alive)

    def _find_alive(self) -> dict[int, Stat]:
        tree = find_tree(self.pid)
        leader = tree.get(self.pid)
        if leader is not None and leader.start_time != self.start_time:
            # The number was given anew, which the kernel does only when nothing of the old group is left.
            tree = {}
        # As they are now: one that has left the group since it was found is not reached through the group any more.
        now = ((stray, read_stat(stray.pid)) for stray in self._strays)
        tree |= {stat.pid: stat for stray, stat in now if stat and stat.start_time == stray.start_time and stat.alive}
        self._strays = set(tree.values())
        if self.pid not in tree and not self._reap():
            unreaped = read_stat(self.pid)
            if unreaped is not None and unreaped.start_time == self.start_time:
                tree[self.pid] = unreaped
        return tree

    def _signal(self, tree: dict[int, Stat], signum: signal.Signals) -> bool:
        """Signal each of the tree once, those of the group in one act; False when there is nobody."""
        with suppress(ProcessLookupError):
            if any(stat.group == self.pid for stat in tree.values()):
                os.killpg(self.pid, signum)
        for stat in tree.values():
            if stat.group != self.pid:
                with suppress(ProcessLookupError):
                    os.kill(stat.pid, signum)
        return bool(tree)


def start_process(command: Command, *, log: Path, marker: str) -> Process:
    """Start an engine whose output goes to the end of ``log``. Blocks for the moment of a fork; raises OSError.

    A file, not a pipe: an unread pipe stops an engine, and a pipe whose reader died kills it, while engines are to
    outlive us.
    """
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return _start(command, output, output, marker)
    finally:
        os.close(output)


def _start(command: Command, stdout: int, stderr: int, marker: str) -> Process:
    child = subprocess.Popen(
        command.argv,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=_environment(command) | {MARKER: marker},
        cwd=command.cwd,
        start_new_session=True,
    )
    # Else the interpreter warns of a child that outlives the object, and later reaps it in our stead.
    child.returncode = 0
    stat = read_stat(child.pid)
    # Our own child can't vanish before we have waited for it: it is there, if only as a zombie.
    return Process(child.pid, stat.start_time if stat else 0, os.pidfd_open(child.pid), marker)


def take_over(pid: int, start_time: int, marker: str) -> Process | None:
    """Watch a process that an earlier llmgw started; None when it is not there any more, or is another one."""
    try:
        handle = os.pidfd_open(pid)
    except (OSError, ValueError):
        return None
    # Asked after the handle was opened, so that what is compared is what the handle holds.
    stat = read_stat(pid)
    if stat is None or stat.start_time != start_time or stat.state in "ZX" or is_killed(pid):
        os.close(handle)
        return None
    return Process(pid, start_time, handle, marker)


def _environment(command: Command) -> dict[str, str]:
    scrub = (OWN_PREFIX, *command.scrub)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(scrub)}
    return command.defaults | inherited | command.env


class Silence(StrEnum):
    """Why a probe tells nothing."""

    NOT_STARTED = "not_started"
    TIMED_OUT = "timed_out"
    TOO_MUCH = "too_much"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOutput:
    """A probe that tells nothing; ``error`` is what the system said where it was not started."""

    why: Silence
    error: OSError | None = None


async def run_probe(command: Command, limit_seconds: float, *, marker: str) -> ProbeOutput | NoOutput:
    """Run a program that prints something and ends. NoOutput when it can't be started, takes too long, or prints more
    than a pipe holds. However this ends, cancelled too, the program and all that it started are gone."""
    try:
        with _pipe() as (out, to_out), _pipe() as (err, to_err):
            # Not to be cut in two by a cancellation: what was started has to be ended.
            process = await trio.to_thread.run_sync(_start, command, to_out, to_err, marker)
            code, full = None, False
            try:
                with trio.move_on_after(limit_seconds):
                    code = await process.wait_exit()
                full = _is_full(to_out) or _is_full(to_err)
            finally:
                with trio.move_on_after(PROBE_END_SECONDS, shield=True):
                    await process.stop(signal.SIGKILL, KILL_SECONDS)
                process.close()
            if code is None:
                return NoOutput(why=Silence.TOO_MUCH if full else Silence.TIMED_OUT)
            return ProbeOutput(code=code, stdout=_read_now(out), stderr=_read_now(err))
    except OSError as error:
        return NoOutput(why=Silence.NOT_STARTED, error=error)


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Both ends, for one text that is read when all of it is there: nobody has to read beside the program, and one that
    prints without an end fills no memory."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        # Where the system grants no more, the usual 64 KiB are still many lines.
        with suppress(OSError):
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PROBE_BYTES)
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


def _is_full(writing: int) -> bool:
    """Whether a program that writes here has to wait for somebody who reads."""
    poll = select.poll()
    poll.register(writing, select.POLLOUT)
    return not poll.poll(0)


def _read_now(pipe: int) -> str:
    try:
        return os.read(pipe, PROBE_BYTES).decode(errors="replace")
    except BlockingIOError:
        return ""


def split_exit(code: int | None) -> tuple[int | None, int | None]:
    """An exit code, and the signal that ended it in its place: one of the two, or neither where nobody knows."""
    return (None, -code) if code is not None and code < 0 else (code, None)


def find_signal(code: int | None) -> signal.Signals | None:
    """The signal that an exit code tells of; a shell tells of one as 128 and its number."""
    number = 0 if code is None else -code if code < 0 else code - 128
    with suppress(ValueError):
        return signal.Signals(number)
    return None


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "ended with an exit code that is unknown, because an earlier llmgw started it"
    killed = find_signal(code)
    if killed is not None:
        hint = {signal.SIGKILL: " (out of memory?)", signal.SIGILL: " (built for another CPU?)"}.get(killed, "")
        return f"killed by {killed.name}{hint}"
    hint = {126: " (the program can't be executed)", 127: " (a program or shared library is missing)"}.get(code, "")
    return f"ended by itself with exit code {code}{hint}"


def advise_exit(code: int | None) -> str:
    """What to do about an engine that ended so, where no line that it printed tells."""
    if code == 0:
        return (
            "look at its last lines: it ended as one does that has done all. A wrapper has to exec the engine and not "
            "leave it in the background; a flag in args may only print something"
        )
    killed = find_signal(code)
    if killed in CRASHES:
        return "it crashed: look at its last lines; another release of it, or a build for this machine, may do better"
    if killed is not None:
        return "look at its last lines, and for who ended it: a person, a service manager, or a limit that llmgw has"
    return "look at its last lines: what went wrong stands there, if it was told at all"
