"""``llmgw ctl stop``: a model is held at zero, or one replica is replaced."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, drawn, operator_options, show, tell
from llmgw.cli.ctl.client import as_name, as_word
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.replicas import draw as draw_replicas


@click.command("stop")
@click.argument("name", metavar="MODEL|REPLICA")
@operator_options
def command(*, name: str, asked: Asked) -> None:
    """Stop a model, or replace a replica.

    A MODEL (by its name or an alias) is held at zero, over restarts too, until `llmgw ctl load MODEL`: its replicas go
    once their requests are answered, and who asks for it is told that it does not run. A REPLICA (rep-...) is replaced:
    where there is room another one serves before it goes.

    With --watch the model's replicas are shown afterwards; those of a model until they have stopped.
    """
    answer = asked.operator.ask("POST", "/stop", {"name": as_name(name)})
    tell(asked, answer, draw)
    if asked.watch:
        model, is_replica = drawn(
            asked.operator, answer, lambda facts: (str(facts["model"]), facts.get("replica") is not None)
        )
        show(
            asked,
            f"/replicas?model={as_word(model)}",
            draw_replicas,
            until=lambda facts: not is_replica and not facts["replicas"],
        )


def draw(answer: Any) -> list[Block]:
    model, replica, already = shown(answer["model"]), answer.get("replica"), answer["already"]
    if replica is not None:
        if already:
            return [f"{shown(replica)} of {model} is on its way out already"]
        if answer.get("idle"):
            return [f"{shown(replica)} of {model} is stopped; nothing takes its place before somebody asks for {model}"]
        return [f"{shown(replica)} of {model} is replaced, by another one first where there is room"]
    blocks: list[Block] = [
        f"{model} was stopped already" if already else f"{model} is stopped, until `llmgw ctl load {model}`"
    ]
    if answer.get("unscaled"):
        blocks.append(f"{model}: its scaling.max is 0, so that nothing of it is loaded before that is another number")
    if running := ", ".join(map(shown, answer["running"])):
        blocks.append(f"these go once their requests are answered: {running}")
    return blocks
