"""Makes the simulator importable for its tests, and takes the seed that is to be played again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from simulator.faults import Scenario
from simulator.linked import tell_linked
from simulator.stage import Story
from simulator.world import tell as tell_alone

Tell = Callable[..., None]

# What a plain run of the tests plays: with two dozen hours of a dozen nodes each, more than a thousand node-hours.
SEEDS = (1, 2, 3, 4)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, metavar="N", help="play this seed of the simulation, instead of a few")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        # (where the whole of the tests is run, this file is read too late for an option)
        given = metafunc.config.getoption("--seed", default=None)
        metafunc.parametrize("seed", SEEDS if given is None else (given,))


@pytest.fixture(params=["core alone", pytest.param("over links", marks=pytest.mark.slow)])
def tell(request: pytest.FixtureRequest) -> Tell:
    """Play a story on a site of a dozen nodes with these models, at both sizes."""
    play = tell_alone if request.param == "core alone" else tell_linked

    def tell(story: Story, *models: str, nodes: int = 12) -> None:
        # (a story tells its own faults, and none is to be drawn)
        play(story, Scenario(seed=1, nodes=nodes, hours=12.0, models=models))

    return tell
