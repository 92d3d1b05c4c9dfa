"""Runs of trio whose time jumps and whose chance is a seed's."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import trio
from clock import run_simulated


async def race(order: list[int]) -> float:
    """Twenty tasks that are ready at the same moments."""

    async def run(number: int) -> None:
        for _ in range(5):
            await trio.sleep(3600.0)
            order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(run, number)
    return trio.current_time()


def play(seed: int) -> list[int]:
    order: list[int] = []
    assert run_simulated(partial(race, order), seed=seed) == 5 * 3600.0
    return order


def test_the_same_seed_takes_ready_tasks_in_the_same_order_and_another_in_another() -> None:
    assert play(1) == play(1) != play(2)


def test_a_run_in_which_everybody_waits_for_another_ends() -> None:
    """In a process of its own: trio takes an error of its clock for one of its own, and leaves everything lying."""
    code = "import trio, clock; clock.run_simulated(trio.Event().wait)"
    ran = subprocess.run(
        (sys.executable, "-c", code),
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == 1
    assert "every task of the simulation waits for another" in ran.stderr
