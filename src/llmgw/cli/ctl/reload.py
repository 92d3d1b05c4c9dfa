"""``llmgw ctl reload``: server.yaml is read again."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show, tell
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.models import draw as draw_models


@click.command("reload")
@operator_options
def command(*, asked: Asked) -> None:
    """Read server.yaml again, and say what has changed and what needs a new start.

    Where anything in the file is wrong, all stays as it was. With --watch the models are shown afterwards.
    """
    tell(asked, asked.operator.ask("POST", "/reload"), draw)
    if asked.watch:
        show(asked, "/models", draw_models)


def draw(answer: Any) -> list[Block]:
    file, changed, waits = shown(answer["file"]), answer["changed"], answer["needs_restart"]
    blocks: list[Block] = []
    if changed:
        blocks.append(f"{file}: {_named(changed)} changed and in effect")
    if waits:
        blocks.append(f"{file}: {_named(waits)} changed, in effect after a restart of the server")
    if not blocks:
        blocks.append(f"{file}: nothing has changed")
    return [*blocks, *(f"{shown(each['name'])}: {shown(each['message'])}" for each in answer.get("failed", ()))]


def _named(keys: list[str]) -> str:
    return ", ".join(shown(key) for key in keys)
