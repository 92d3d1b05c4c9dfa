"""How fast the simulation goes: node-hours of a fleet in each second of a processor."""

from __future__ import annotations

import time
from dataclasses import dataclass

import trio

from simulator.chance import draw_scenario
from simulator.site import MODELS, many_models
from simulator.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was simulated, and what it took. ``events`` are those that the fleet handled or that came due elsewhere."""

    nodes: int
    node_hours: float
    cpu_seconds: float
    steps: int

    @property
    def node_hours_per_second(self) -> float:
        return self.node_hours / self.cpu_seconds

    def __str__(self) -> str:
        return (
            f"{self.nodes} nodes: {self.node_hours:.0f} node-hours in {self.cpu_seconds:.1f} s of CPU, "
            f"{self.node_hours_per_second:.1f} a second ({self.steps} steps)"
        )


def measure_over_links(nodes: int, hours: float, *, seed: int = 1, checked: bool = True) -> Figure:
    """The same of the larger size."""
    from simulator.linked import LinkedWorld, run_linked

    models = MODELS if nodes < 100 else {**MODELS, **many_models(nodes // 5)}
    scenario = draw_scenario(seed, nodes=nodes, hours=hours)
    spent = 0.0

    async def story(world: LinkedWorld) -> None:
        nonlocal spent
        began = time.process_time()
        await trio.sleep(hours * 3600.0)
        spent = time.process_time() - began

    world = run_linked(story, scenario, models=models, checked=checked)
    return Figure(nodes=nodes, node_hours=nodes * hours, cpu_seconds=spent, steps=world.judge.events)


def measure(nodes: int, hours: float, *, seed: int = 1, checked: bool = True) -> Figure:
    """Play a scenario of that size with its faults, checked after every step or not."""
    models = MODELS if nodes < 100 else {**MODELS, **many_models(nodes // 5)}
    world = World(draw_scenario(seed, nodes=nodes, hours=hours), models=models, checked=checked)
    began = time.process_time()
    world.run(hours * 3600.0)
    spent = time.process_time() - began
    return Figure(nodes=nodes, node_hours=nodes * hours, cpu_seconds=spent, steps=world.loop.steps)
