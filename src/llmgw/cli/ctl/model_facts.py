"""``llmgw ctl model facts``: what launches of a model have shown, and its end where that leads astray."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show, tell
from llmgw.cli.ctl.client import as_word
from llmgw.cli.ctl.drawing import UNKNOWN, Block, Grid, listed, shown
from llmgw.cli.ctl.figures import lasted
from llmgw.errors import UsageError

COLUMNS = ("PROFILE", "ENGINE", "VERSION", "GPUS", "LOAD", "GPU MEMORY", "MEMORY")


@click.command("facts")
@click.argument("name")
@click.option("--forget", is_flag=True, help="Have them forgotten; what runs is measured anew.")
@operator_options
def command(*, name: str, forget: bool, asked: Asked) -> None:
    """Show what launches of the model NAME (or of that alias) have shown, by profile, engine and class of GPU.

    LOAD is the usual time to ready, the others are the most memory that one has held, of each GPU and of the machine.
    Placement goes by them where the definition says nothing. --forget is for a figure that is wrong: it shows them once
    more. A model that is launched in the same way shares them.
    """
    path = f"/facts/{as_word(name)}"
    if not forget:
        show(asked, path, draw)
        return
    if asked.watch:
        raise UsageError("--forget is done once: leave out --watch")
    tell(asked, asked.operator.ask("DELETE", path), draw)


def draw(answer: Any) -> list[Block]:
    name, facts = shown(answer["model"]), answer["facts"]
    if not facts:
        return [f"nothing is known of launches of {name}"]
    told = [f"{name}: this is forgotten"] if answer["forgotten"] else []
    return [*told, Grid(columns=COLUMNS, rows=tuple(map(_row, facts)))]


def _row(fact: Any) -> tuple[str, ...]:
    return (
        listed(fact["profiles"]),
        shown(fact["engine"]),
        shown(fact.get("version")),
        shown(fact.get("gpu_class")),
        lasted(fact.get("load_seconds")),
        _size(fact.get("gpu_gb")),
        _size(fact.get("memory_gb")),
    )


def _size(size_gb: float | None) -> str:
    return UNKNOWN if size_gb is None else f"{size_gb:.4g} GB"
