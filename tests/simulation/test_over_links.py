"""The real scheduler, links, agents and exchange decisions over memory: the same faults, and the same has to hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulator.chance import draw_scenario
from simulator.linked import play_linked

NODES = 12
HOURS = 1.1
PLAY = Path(__file__).with_name("play.py")


@pytest.mark.slow
def test_an_hour_of_faults_breaks_nothing_over_links_either(seed: int) -> None:
    world = play_linked(draw_scenario(seed, nodes=NODES, hours=HOURS))
    assert world.judge.events > 1000


@pytest.mark.slow
def test_the_same_seed_is_the_same_run_over_links_in_every_process() -> None:
    command = (sys.executable, str(PLAY), "--over-links", "--seed", "2", "--hours", "0.3")
    said = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=100
        ).stdout.splitlines()[0]
        for seed in ("1", "2", "3")
    }
    (line,) = said
    assert line.startswith("seed 2: held")
