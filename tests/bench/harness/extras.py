"""What llmgw costs besides its door: the start of the command, of the demo, and the memory of a service that waits."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from typing import NamedTuple

from harness.programs import free_port, memory_mib, started, wait_until
from harness.servers import Running, Site, StartError, ask, tail

HELP_TRIES = 15
DEMO_SECONDS = 180.0


class Spent(NamedTuple):
    wall_ms: float
    cpu_ms: float


def spend(argv: list[str]) -> Spent:
    begin = time.perf_counter()
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise StartError(f"{' '.join(argv)} ended with {process.returncode}")
    return Spent((time.perf_counter() - begin) * 1e3, (usage.ru_utime + usage.ru_stime) * 1e3)


def measure_help(site: Site) -> dict[str, float]:
    """The best of some tries of each, in turn: the best is what the program costs, the rest is the machine."""
    bare, ours = [], []
    for _ in range(HELP_TRIES):
        bare.append(spend([sys.executable, "-c", "pass"]))
        ours.append(spend([str(site.llmgw), "--help"]))
    wall_ms, bare_wall_ms = (min(spent.wall_ms for spent in tries) for tries in (ours, bare))
    cpu_ms, bare_cpu_ms = (min(spent.cpu_ms for spent in tries) for tries in (ours, bare))
    return {
        "bare Python, wall time, ms": bare_wall_ms,
        "`llmgw --help` above bare Python, wall time, ms": wall_ms - bare_wall_ms,
        "`llmgw --help` above bare Python, CPU time, ms": cpu_ms - bare_cpu_ms,
    }


def measure_memory(running: Running) -> dict[str, float]:
    """Of `llmgw serve` with one model ready and nothing asked yet but one small completion, without its engine."""
    time.sleep(2)
    return {
        "`llmgw serve`, idle memory (resident), MiB": memory_mib(running.pids),
        "`llmgw serve`, idle memory (shared pages divided), MiB": memory_mib(running.pids, "Pss"),
    }


def measure_demo(site: Site) -> dict[str, float]:
    """On all cpus. The first run fills the weights cache, so it doesn't count."""
    run_demo(site)
    return {"from `llmgw demo` to its first answer, s": run_demo(site)}


def run_demo(site: Site) -> float:
    log = site.log("demo")
    port = free_port()
    begin = time.perf_counter()
    with started([str(site.llmgw), "demo", "--port", str(port)], log=log, cpus=site.cpus.every) as process:

        def answers() -> bool:
            if process.poll() is not None:
                raise StartError(f"llmgw demo ended with {process.returncode}:\n{tail(log)}")
            return ask_demo(port)

        try:
            wait_until(answers, seconds=DEMO_SECONDS)
        except TimeoutError:
            raise StartError(f"llmgw demo gave no answer in {DEMO_SECONDS:.0f} s:\n{tail(log)}") from None
        return time.perf_counter() - begin


def ask_demo(port: int) -> bool:
    """One token from whatever model the demo serves."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/v1/models")
        models = json.loads(connection.getresponse().read()).get("data") or []
    except (OSError, ValueError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return bool(models) and ask(port, model=models[0]["id"]) == 200
