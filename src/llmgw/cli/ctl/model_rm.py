"""``llmgw ctl model rm``: a model that was added is removed."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show, tell
from llmgw.cli.ctl.client import as_word
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.replicas import draw as draw_replicas


@click.command("rm")
@click.argument("name")
@operator_options
def command(*, name: str, asked: Asked) -> None:
    """Remove the model NAME, which was added with `llmgw ctl model add`; its replicas stop.

    One that server.yaml declares is taken out there. With --watch its replicas are shown until they have stopped.
    """
    tell(asked, asked.operator.ask("DELETE", f"/models/{as_word(name)}"), draw)
    if asked.watch:
        path = f"/replicas?model={as_word(name)}"
        show(asked, path, draw_replicas, until=lambda answer: not answer["replicas"])


def draw(answer: Any) -> list[Block]:
    name = shown(answer["name"])
    place = answer.get("declared")
    if place is None:
        return [f"{name} is removed"]
    return [f"{name}: the definition that was added is removed; the one declared at {shown(place)} stays"]
