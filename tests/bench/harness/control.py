"""What a thousand agents cost their server, and how soon they are back when it was started anew: control links only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.cluster import Place, make_place, run_cluster_server
from harness.programs import SOURCES, cpu_seconds, memory_mib, program_of, started, wait_until
from harness.servers import Running, Site, StartError, tail

PROCESSES = 4
LINK_SECONDS = 180.0
AGENTS_PER_SECOND = 60
# A heartbeat of each, so that a window begins when all of them are in step with nothing but their clocks.
SETTLE_SECONDS = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Agents that run in a few processes, and write down when they were linked."""

    nodes: tuple[str, ...]
    logs: tuple[Path, ...]

    def count_linked(self, since: float) -> int:
        """How many have come to a link after that moment (of ``time.monotonic``)."""
        words = [line.split() for log in self.logs for line in log.read_text().splitlines()]
        return len({each[1] for each in words if len(each) == 3 and each[0] == "linked" and float(each[2]) > since})

    def wait_linked(self, since: float, server: Running) -> None:
        """Until all of them are."""

        def holds() -> bool:
            if any(program_of(pid) is None for pid in server.pids):
                raise StartError("the server has ended, with its agents still there")
            return self.count_linked(since) == len(self.nodes)

        try:
            wait_until(holds, seconds=LINK_SECONDS, every=0.1)
        except TimeoutError:
            linked = self.count_linked(since)
            raise StartError(
                f"{linked} of {len(self.nodes)} agents were linked in {LINK_SECONDS:.0f} s:\n{tail(self.logs[0])}"
            ) from None

    def last_linked(self) -> float:
        """When the last of them was."""
        lines = [line for log in self.logs for line in log.read_text().splitlines() if line.startswith("linked ")]
        return max(float(line.split()[2]) for line in lines)


def name_nodes(count: int) -> tuple[str, ...]:
    return tuple(f"node{number:04d}" for number in range(count))


@contextmanager
def run_crowd(site: Site, place: Place, nodes: tuple[str, ...]) -> Iterator[Crowd]:
    """Each process has every fourth of the nodes; all of them share the cpu that the server has not.

    They come one after the other: a thousand machines have a thousand cpus for their handshakes, and these have one.
    """
    argv = [sys.executable, str(SOURCES / "agents.py"), "--port", str(place.agents), "--folder", str(place.folder)]
    argv += ["--over", str(len(nodes) / AGENTS_PER_SECOND)]
    logs = tuple(place.folder / f"agents-{number}.log" for number in range(min(PROCESSES, len(nodes))))
    with ExitStack() as stack:
        for number, log in enumerate(logs):
            mine = nodes[number :: len(logs)]
            stack.enter_context(started([*argv, *mine], log=log, cpus={site.cpus.load}))
        yield Crowd(nodes=nodes, logs=logs)


def measure_crowd(
    site: Site, count: int, *, seconds: float, settle_seconds: float = SETTLE_SECONDS
) -> dict[str, float]:
    """A server's CPU time and memory while so many agents say every 5 s that they live."""
    nodes = name_nodes(count)
    place = make_place(site, nodes)
    with run_cluster_server(site, place, []) as server:
        memory, cpu, began = memory_mib(server.pids), cpu_seconds(server.pids), time.monotonic()
        with run_crowd(site, place, nodes) as crowd:
            crowd.wait_linked(began, server)
            arrival = cpu_seconds(server.pids) - cpu
            time.sleep(settle_seconds)
            cpu, began = cpu_seconds(server.pids), time.monotonic()
            time.sleep(seconds)
            share = (cpu_seconds(server.pids) - cpu) / (time.monotonic() - began)
            grown = memory_mib(server.pids) - memory
    return {
        f"{count:,} agents with heartbeats: server CPU, % of a core": share * 100,
        f"{count:,} agents: server memory each, KiB": grown * 1024 / count,
        f"{count:,} agents come, {AGENTS_PER_SECOND} a second: server CPU each, ms": arrival * 1000 / count,
    }


def measure_restart(site: Site, count: int) -> dict[str, float]:
    """A server ends in good order and another takes its place: when its agents are all back, and what that costs it."""
    nodes = name_nodes(count)
    place = make_place(site, nodes)
    with ExitStack() as first:
        before = first.enter_context(run_cluster_server(site, place, []))
        began = time.monotonic()
        with run_crowd(site, place, nodes) as crowd:
            crowd.wait_linked(began, before)
            first.close()
            began = time.monotonic()
            with run_cluster_server(site, place, []) as server:
                # Some may have been faster than whoever waited for the server.
                cpu, early = cpu_seconds(server.pids), crowd.count_linked(began)
                crowd.wait_linked(began, server)
                used, late = cpu_seconds(server.pids) - cpu, count - early
            seconds = crowd.last_linked() - began
    figures = {f"{count} agents, from the start of a new server until all are linked, s": seconds}
    if late:
        figures[f"{count} agents come back to a new server: its CPU per handshake, ms"] = used * 1000 / late
    return figures
