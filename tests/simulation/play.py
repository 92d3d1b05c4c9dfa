"""Plays many seeds, each in a process of its own, and prints how to play one again that fails; `nox -s simulation`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from simulator.chance import draw_scenario
from simulator.figures import measure, measure_over_links
from simulator.judge import Broken
from simulator.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """How one seed ended: ``fault`` is what did not hold, "" when all did."""

    seed: int
    log_hash: str = ""
    events: int = 0
    fault: str = ""


def play(seed: int, nodes: int, hours: float, over_links: bool) -> Played:
    """The whole of what a seed stands for."""
    scenario = draw_scenario(seed, nodes=nodes, hours=hours)
    try:
        if over_links:
            # (the smaller size does without trio, and all that is built on it)
            from simulator.linked import play_linked

            judge = play_linked(scenario).judge
        else:
            judge = World(scenario).play().judge
    except Broken as broken:
        return Played(seed=seed, fault=str(broken))
    return Played(seed=seed, log_hash=judge.log_hash(), events=judge.events)


def main() -> int:
    """The exit status: 0 when everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=24.0, metavar="H", help="of each (default: %(default)g)")
    parser.add_argument("--nodes", type=int, default=12, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", help="play this one only")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="the first seed (default: %(default)s)")
    parser.add_argument("--over-links", action="store_true", help="the larger size: scheduler, links and agents too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="at once")
    parser.add_argument("--figures", action="store_true", help="print how fast it goes, and prove nothing")
    given = parser.parse_args()
    if given.figures:
        # (to look through a thousand nodes after every step is no figure of the core)
        for nodes, hours, checked in ((12, 12.0, True), (12, 12.0, False), (1000, 0.2, False)):
            state = "checked" if checked else "unchecked"
            print(f"the core alone, {state}: {measure(nodes, hours, checked=checked)}", flush=True)
        for nodes, hours, checked in ((12, 1.0, True), (12, 1.0, False), (1000, 0.02, False)):
            state = "checked" if checked else "unchecked"
            print(f"over links, {state}: {measure_over_links(nodes, hours, checked=checked)}", flush=True)
        return 0
    seeds = [given.seed] if given.seed is not None else [*range(given.first, given.first + given.seeds)]
    began, failed = time.monotonic(), 0
    with ProcessPoolExecutor(max_workers=min(given.jobs, len(seeds))) as pool:
        running = [pool.submit(play, seed, given.nodes, given.hours, given.over_links) for seed in seeds]
        for done in as_completed(running):
            played = done.result()
            failed += bool(played.fault)
            held = f"held, {played.events} events, log {played.log_hash[:16]}"
            print(f"seed {played.seed}: {played.fault or held}", flush=True)
    node_hours, spent = len(seeds) * given.nodes * given.hours, time.monotonic() - began
    print(f"{len(seeds)} seeds, {node_hours:.0f} node-hours in {spent:.0f} s; {failed} did not hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
