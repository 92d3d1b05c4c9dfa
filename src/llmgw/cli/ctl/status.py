"""``llmgw ctl status``: the whole in a few lines, and what needs somebody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.figures import lasted, share_gb

STATES = {"ended": "failed"}


@click.command("status")
@operator_options
def command(*, asked: Asked) -> None:
    """Show the whole in a few lines: nodes, models and replicas by state, and what needs you."""
    show(asked, "/status", lambda answer: draw(answer, asked.operator.address.url))


def draw(answer: Any, url: str) -> list[Block]:
    booked, memory = answer["memory_booked_gb"], answer["memory_gb"]
    blocks: list[Block] = [
        f"llmgw {shown(answer['version'])} at {url}, up {lasted(answer['up_seconds'])}",
        f"nodes     {_counted(answer['nodes'])}",
        f"models    {_counted(answer['models'])}",
        f"replicas  {_counted(answer['replicas'])}",
    ]
    if memory:
        blocks.append(f"memory    {share_gb(booked, memory)} booked")
    concerns = answer["concerns"]
    if concerns:
        blocks.append("")
        blocks += [f"{each['kind']} {shown(each['name'])}: {shown(each['message'])}" for each in concerns]
    return blocks


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {shown(STATES.get(state, state))}" for state, number in counts.items()) or "none"
