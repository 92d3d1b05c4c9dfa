"""How a server is loaded: each scenario is a set of flags for the load generator, which answers with its figures."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from harness.programs import Cpus
from harness.servers import MODEL, Running

Figures = dict[str, float | int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """``chunks`` and ``rate`` (a second) are per stream; ``seconds`` is the measured window, after ``warm``."""

    name: str
    title: str
    mode: str
    connections: int
    seconds: float
    warm: float = 0.5
    chunks: int = 1
    rate: int = 1

    @property
    def offered(self) -> int:
        """Chunks a second that the mock sends to a gateway which keeps up."""
        return self.connections * self.rate


ENDLESS = 90_000_000

WARM_UP = Scenario(name="warm-up", title="", mode="whole", connections=4, seconds=0.3, warm=0.1)

# In this order: idle streams come first, while no earlier load has left free memory behind that would hide growth.
SCENARIOS = (
    Scenario(
        name="idle", title="512 idle streams and 512 more", mode="idle", connections=1024, seconds=1.0, chunks=2, rate=0
    ),
    Scenario(name="c1", title="whole replies, 1 connection", mode="whole", connections=1, seconds=1.5),
    Scenario(name="c32", title="whole replies, 32 connections", mode="whole", connections=32, seconds=3.0),
    Scenario(name="c256", title="whole replies, 256 connections", mode="whole", connections=256, seconds=2.5),
    Scenario(
        name="ttfb", title="short streams, 1 connection", mode="stream", connections=1, seconds=2.0, chunks=3, rate=500
    ),
    Scenario(
        name="s64", title="64 streams x 50/s", mode="stream", connections=64, seconds=2.5, warm=1.0, chunks=100, rate=50
    ),
    Scenario(
        name="s512",
        title="512 streams x 20/s",
        mode="stream",
        connections=512,
        seconds=4.0,
        warm=1.5,
        chunks=100,
        rate=20,
    ),
    Scenario(
        name="sat",
        title="64 streams x 2,500/s",
        mode="flood",
        connections=64,
        seconds=3.0,
        warm=1.0,
        chunks=ENDLESS,
        rate=2500,
    ),
    Scenario(
        name="slow",
        title="32 readers at 20 kB/s, upstream flat out",
        mode="slow",
        connections=32,
        seconds=3.0,
        chunks=ENDLESS,
        rate=20_000,
    ),
)

# Enough to see that everything works, too little to compare.
QUICK = 0.3


def measure(
    scenario: Scenario, server: Running, *, load: Path, cpus: Cpus, share: float = 1.0, enough: int = 0
) -> Figures:
    """One run, of a SHARE of its length; at most until ENOUGH replies (in streams: chunks) and errors were seen.

    A wrong or missing reply is an error, and the first is told in words.
    """
    argv = [str(load), "--port", str(server.port), "--mode", scenario.mode, "--model", MODEL, "--cpu", str(cpus.load)]
    argv += ["--connections", str(scenario.connections), "--chunks", str(scenario.chunks), "--rate", str(scenario.rate)]
    argv += ["--seconds", str(scenario.seconds * share), "--warm", str(scenario.warm * share)]
    argv += ["--enough", str(enough)]
    for pid in server.pids:
        argv += ["--watch", str(pid)]
    for pid in server.beside:
        argv += ["--beside", str(pid)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60 + scenario.seconds)
    if done.returncode != 0:
        return {"errors": 1, "first_error": done.stderr.strip() or f"the load generator ended with {done.returncode}"}
    figures: Figures = json.loads(done.stdout)
    return figures
