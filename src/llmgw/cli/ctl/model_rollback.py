"""``llmgw ctl model rollback``: a model has an earlier definition again."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, drawn, operator_options, show, tell
from llmgw.cli.ctl.client import as_name, as_word
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.model_add import tell_rolling
from llmgw.cli.ctl.model_show import draw as draw_model


@click.command("rollback")
@click.argument("name")
@click.option("--to", "number", type=click.IntRange(min=1), metavar="N", help="The number of the definition.")
@operator_options
def command(*, name: str, number: int | None, asked: Asked) -> None:
    """Give the model NAME an earlier definition again: that of --to, else the last other one that has served.

    `llmgw ctl model history NAME` has the numbers. What it gets back is kept as its newest definition. One that
    server.yaml declares is changed there. With --watch the model is shown afterwards.
    """
    answer = asked.operator.ask("POST", "/rollback", {"model": as_name(name), "number": number})
    tell(asked, answer, draw)
    if asked.watch:
        model = drawn(asked.operator, answer, lambda facts: str(facts["model"]))
        show(asked, f"/models/{as_word(model)}", draw_model)


def draw(answer: Any) -> list[Block]:
    name = shown(answer["model"])
    blocks: list[Block] = [f"{name} has definition {answer['to']} again, kept as number {answer['number']}"]
    if answer["rolls"]:
        blocks.append(f"{tell_rolling(answer)}: llmgw ctl replicas {name}")
    return blocks
