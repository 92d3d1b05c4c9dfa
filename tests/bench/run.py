"""`python tests/bench/run.py`: llmgw's door beside its peers on one mock upstream, and its figures with their goals."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from harness.cluster import run_cluster
from harness.control import measure_crowd, measure_restart
from harness.extras import measure_demo, measure_help, measure_memory
from harness.fleet import measure_fleet
from harness.goals import CLUSTER, Results, judge
from harness.programs import Others, allow_files, choose_cpus, compile_program
from harness.report import as_json, find_errors, render_rows, render_tables
from harness.scenarios import QUICK, SCENARIOS, WARM_UP, measure
from harness.servers import RECIPES, Site, StartError, find_nginx, install_vllm_router
from harness.weights import FULL_SIZES, QUICK_SIZES, measure_weights

SERVERS = RECIPES | {CLUSTER: run_cluster}
OURS = ("llmgw", CLUSTER)
PEERS = {"nginx", "vllm-router"}
# From here on a neighbour takes enough of a cpu to shift what is measured by the wall clock.
BUSY_CPUS = 0.1


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("servers", nargs="*", choices=[[], *SERVERS], help="default: all that can be had")
    parser.add_argument("--quick", action="store_true", help="no peers, one round, short windows: does it work at all")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of all servers, in a new order each (default 2)")
    parser.add_argument("--scenario", action="append", choices=[s.name for s in SCENARIOS], help="only these")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--llmgw", type=Path, default=find_llmgw(), help="the llmgw to measure")
    parser.add_argument("--no-demo", action="store_true", help="leave `llmgw demo` out")
    parser.add_argument("--no-agents", action="store_true", help="leave out what many agents cost their server")
    parser.add_argument("--no-fleet", action="store_true", help="leave out what the fleet's decisions cost")
    parser.add_argument("--no-weights", action="store_true", help="leave out what fetching weights costs")
    parser.add_argument("--strict", action="store_true", help="an unmet goal is a failure")
    return parser.parse_args(argv)


def find_llmgw() -> Path | None:
    beside = Path(sys.executable).parent / "llmgw"
    found = str(beside) if beside.exists() else shutil.which("llmgw")
    return Path(found) if found else None


def choose_servers(options: argparse.Namespace) -> list[str]:
    wanted = options.servers or (["mock", *OURS] if options.quick else list(SERVERS))
    if set(OURS) & set(wanted) and (options.llmgw is None or shutil.which(options.llmgw) is None):
        raise SystemExit("bench: no llmgw to run: pip install -e . first, or name it with --llmgw")
    if "nginx" in wanted and find_nginx() is None:
        print("bench: nginx is left out: not installed (Debian: apt-get install nginx-light)")
        wanted = [server for server in wanted if server != "nginx"]
    return wanted


def measure_server(
    site: Site, load: Path, name: str, results: Results, options: argparse.Namespace
) -> dict[str, float]:
    """All scenarios on one server; returns llmgw's idle memory when it is llmgw."""
    share = QUICK if options.quick else 1.0
    extras: dict[str, float] = {}
    with SERVERS[name](site) as running:
        if name == "llmgw":
            extras = measure_memory(running)
        measure(WARM_UP, running, load=load, cpus=site.cpus)
        for scenario in SCENARIOS:
            if not options.scenario or scenario.name in options.scenario:
                figures = measure(scenario, running, load=load, cpus=site.cpus, share=share)
                results[name].setdefault(scenario.name, []).append(figures)
    return extras


def run(site: Site, load: Path, servers: list[str], options: argparse.Namespace) -> tuple[Results, dict[str, float]]:
    results: Results = {server: {} for server in servers}
    extras: dict[str, float] = {}
    for number in range(1 if options.quick else options.rounds):
        order = random.sample(list(results), len(results))
        print(f"bench: round {number + 1}: {', '.join(order)}", flush=True)
        for name in order:
            try:
                extras |= measure_server(site, load, name, results, options)
            except StartError as problem:
                if name not in PEERS:
                    raise
                print(f"bench: {name} is left out: {problem}", flush=True)
                del results[name]
    if "llmgw" in results:
        extras |= measure_help(site)
        if not (options.quick or options.no_demo):
            extras |= try_demo(site)
    if CLUSTER in results and not options.no_agents:
        extras |= measure_agents(site, quick=options.quick)
    if not options.no_weights and set(OURS) & set(results):
        extras |= measure_weights(site, QUICK_SIZES if options.quick else FULL_SIZES)
    if not options.no_fleet:
        print("bench: decisions of the fleet", flush=True)
        extras |= measure_fleet(nodes=40, models=20) if options.quick else measure_fleet(nodes=1000, models=200)
    return results, extras


def measure_agents(site: Site, *, quick: bool) -> dict[str, float]:
    """Control links only, and no requests."""
    print("bench: many agents at one server", flush=True)
    if quick:
        return measure_crowd(site, 50, seconds=2.0) | measure_restart(site, 20)
    return measure_crowd(site, 1000, seconds=20.0) | measure_restart(site, 100)


def try_demo(site: Site) -> dict[str, float]:
    """The demo needs an engine and a model that this machine may lack; the rest stands without it."""
    try:
        return measure_demo(site)
    except StartError as problem:
        print(f"bench: the demo is left out: {problem}", flush=True)
        return {}


def main(argv: list[str]) -> int:
    options = parse(argv)
    # So that a stop from outside, too, unwinds to where servers and folders are cleared away.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    servers = choose_servers(options)
    router = install_vllm_router() if "vllm-router" in servers else None
    if router is None:
        servers = [server for server in servers if server != "vllm-router"]
    cpus = choose_cpus()
    allow_files()
    os.sched_setaffinity(0, {cpus.load})
    begin, others = time.monotonic(), Others()
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as name:
        folder = Path(name).resolve()
        load, mock = compile_program("load", folder), compile_program("mock", folder)
        site = Site(folder=folder, cpus=cpus, mock=mock, llmgw=options.llmgw or Path("llmgw"), router=router)
        try:
            results, extras = run(site, load, servers, options)
        except StartError as problem:
            print(f"bench: {problem}", file=sys.stderr)
            return 1
    rows = judge(results, extras)
    machine: dict[str, object] = {
        "seconds": round(time.monotonic() - begin),
        "cpus": os.cpu_count(),
        "cpus used by others": round(others.average(), 2),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    print(f"\n{render_tables(results)}\n\n### Figures\n{render_rows(rows)}\n")
    print("; ".join(f"{name}: {value}" for name, value in machine.items()))
    if others.average() > BUSY_CPUS:
        print("bench: this machine was busy: trust ratios of CPU time, not requests per second or latencies")
    if options.json:
        options.json.write_text(json.dumps(as_json(results, rows, machine), indent=1))
    problems = find_errors(results)
    for line in problems:
        print(f"bench: {line}", file=sys.stderr)
    unmet = options.strict and any(row.met is False for row in rows)
    return 1 if problems or unmet else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("bench: stopped")
