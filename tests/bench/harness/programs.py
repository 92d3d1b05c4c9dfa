"""Programs of the bench: compiled, pinned to a cpu, watched with all their children, and ended by their ids."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[1]
STOP_SECONDS = 20.0
SETTLED_SECONDS = 0.5
SETTLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """Where the gateway runs, and where the mock and the load generator do: two, or one where there is no second."""

    gateway: int
    load: int
    every: frozenset[int]


def choose_cpus() -> Cpus:
    allowed = sorted(os.sched_getaffinity(0))
    return Cpus(gateway=allowed[0], load=allowed[1 % len(allowed)], every=frozenset(allowed))


def allow_files() -> None:
    """For this process and all it starts: a thousand clients have two thousand sockets in a gateway."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if most == resource.RLIM_INFINITY else min(most, 65536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def find_compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc")


def compile_program(name: str, folder: Path) -> Path:
    """The C program NAME, compiled into FOLDER."""
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("bench: no C compiler: install gcc (Debian: apt-get install gcc libc6-dev), or set CC")
    program = folder / f"llmgw-bench-{name}"
    command = [compiler, "-O2", "-Wall", "-Wextra", "-o", str(program), str(SOURCES / f"{name}.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise SystemExit(f"bench: {' '.join(command)} failed:\n{done.stderr}")
    return program


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def on_cpus(cpus: Iterable[int]) -> Iterator[None]:
    """What is started meanwhile runs on these: a child inherits them before its first instruction, and so do threads
    that it starts early."""
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, here)


@contextmanager
def started(
    argv: Sequence[str], *, log: Path, cpus: Iterable[int], env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program while it runs, on these cpus, writing to LOG; at the end it and all its children are gone."""
    with on_cpus(cpus), log.open("ab") as out:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, a while, then SIGKILL to whatever of its tree is left."""
    tree = {pid: start_time(pid) for pid in descendants(process.pid)}
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid, began in tree.items():
        if began is not None and start_time(pid) == began:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start_time(pid: int) -> str | None:
    """What tells a process from a later one of the same id; None when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        queue = [child for pid in queue for child in children.get(pid, [])]
        found += queue
    return found


def gateway_processes(root: int, mock: Path) -> list[int]:
    """ROOT and all its descendants, except the engine it may have started: the mock is no part of the gateway."""
    return [pid for pid in (root, *descendants(root)) if program_of(pid) not in (None, mock)]


def settled_processes(root: int, mock: Path) -> tuple[int, ...]:
    """The same once they stay: a llmgw that has just started tries its engines' programs, and those end soon."""
    seen, since = gateway_processes(root, mock), time.monotonic()
    deadline = since + SETTLE_SECONDS
    while (now := time.monotonic()) < min(deadline, since + SETTLED_SECONDS):
        time.sleep(0.02)
        if (found := gateway_processes(root, mock)) != seen:
            seen, since = found, now
    return tuple(seen)


def program_of(pid: int) -> Path | None:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return None


def memory_mib(pids: Sequence[int], field: str = "Rss") -> float:
    """Resident memory of all of them; with ``Pss``, pages that processes share are counted once."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
    return total / 1024


def cpu_seconds(pids: Sequence[int]) -> float:
    """The CPU time of all of them, threads that have ended included (man clock_getcpuclockid)."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def wait_until(holds: Callable[[], bool], *, seconds: float, every: float = 0.02) -> None:
    """TimeoutError when it doesn't hold in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(every)


class Others:
    """How many cpus other programs have used since this was made, on average: what wall-clock figures suffer from."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._before = machine_seconds() - own_seconds()

    def average(self) -> float:
        used = machine_seconds() - own_seconds() - self._before
        return max(0.0, used / (time.monotonic() - self._begin))


def machine_seconds() -> float:
    """All cpus' busy time (man proc_stat): user, nice, system, irq, softirq and what the host took away."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, words[1:9])
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Of this process and all its descendants that have ended."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
