"""The core alone, over days of faults that are drawn from a seed: everything has to hold after every step."""

from __future__ import annotations

import pytest
from simulator.chance import draw_scenario
from simulator.world import World

NODES = 12
HOURS = 24.0


@pytest.mark.slow
def test_a_day_of_faults_breaks_nothing(seed: int) -> None:
    world = World(draw_scenario(seed, nodes=NODES, hours=HOURS)).play()
    # It was a day in which something happened.
    assert world.control.lives > 1
    assert len({line.split(" ", 1)[1] for line in world.lines}) > 1000
    assert world.ends()["answered"] > 100
