"""A seed is all that there is to a run: whatever the process, and however Python shuffles its sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulator.chance import draw_scenario
from simulator.faults import (  # the names that a scenario prints as
    AddModel,
    AgentCrash,
    BadEngines,
    ClockSkew,
    Cordon,
    DiskFull,
    EditModel,
    EngineCrash,
    FabricDown,
    ForeignMemory,
    Label,
    LinkBroken,
    Mood,
    NodeCrash,
    Partition,
    RemoveModel,
    RemoveNode,
    Scenario,
    ServerRestart,
    SlowLink,
    Storm,
    show,
)
from simulator.world import World

PLAY = Path(__file__).with_name("play.py")
NAMES = {
    kind.__name__: kind
    for kind in (
        AddModel,
        AgentCrash,
        BadEngines,
        ClockSkew,
        Cordon,
        DiskFull,
        EditModel,
        EngineCrash,
        FabricDown,
        ForeignMemory,
        Label,
        LinkBroken,
        Mood,
        NodeCrash,
        Partition,
        RemoveModel,
        RemoveNode,
        Scenario,
        ServerRestart,
        SlowLink,
        Storm,
    )
}


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
    scenario = draw_scenario(3, nodes=12, hours=6.0)
    assert {type(fault).__name__ for fault in scenario.faults} | {"Scenario", "Mood"} == set(NAMES)
    assert eval(show(scenario), NAMES) == scenario
