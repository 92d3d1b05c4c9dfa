"""A seed is all that there is to a run: whatever the process, and however Python shuffles its sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from simulator.chance import draw_scenario
from simulator.faults import Fault, Flaw, Mood, Scenario, show
from simulator.world import World

PLAY = Path(__file__).with_name("play.py")
# Those that a scenario prints as.
NAMES = {kind.__name__: kind for kind in (*get_args(Fault), Flaw, Mood, Scenario)}


def test_the_same_seed_is_the_same_run_and_another_is_another() -> None:
    first, again, other = (World(draw_scenario(seed, nodes=12, hours=0.5)).run(1800.0) for seed in (5, 5, 6))
    assert first.lines == again.lines
    assert first.judge.log_hash() == again.judge.log_hash() != other.judge.log_hash()


@pytest.mark.slow
def test_the_same_seed_is_the_same_run_in_every_process() -> None:
    command = (sys.executable, str(PLAY), "--seed", "7", "--hours", "2")
    said = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=100
        ).stdout.splitlines()[0]
        for seed in ("1", "2")
    }
    (line,) = said
    assert line.startswith("seed 7: held")


def test_a_scenario_prints_as_the_code_that_makes_it() -> None:
    scenario = draw_scenario(3, nodes=12, hours=12.0)
    assert {type(fault) for fault in scenario.faults} == set(get_args(Fault))
    assert eval(show(scenario), NAMES) == scenario
