"""``llmgw ctl label``: labels that a node gets from here, over those of its agent.yaml."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show, tell
from llmgw.cli.ctl.client import as_node
from llmgw.cli.ctl.cordon import never_here
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.nodes import draw_only
from llmgw.errors import UsageError


@click.command("label")
@click.argument("node")
@click.argument("labels", nargs=-1, required=True, metavar="NAME=VALUE|NAME-...")
@operator_options
def command(*, node: str, labels: tuple[str, ...], asked: Asked) -> None:
    """Give NODE labels, or take some away (NAME-); profiles choose nodes by them. They are kept over restarts.

    What is said here lies over the labels in the node's agent.yaml. With --watch the node is shown afterwards.

    \b
    llmgw ctl label gpu01 zone=a rack-
    """
    body = {"labels": _read(labels)}
    tell(asked, asked.operator.ask("POST", f"/nodes/{as_node(node)}/labels", body), draw)
    if asked.watch:
        show(asked, "/nodes", partial(draw_only, name=node))


def draw(answer: Any) -> list[Block]:
    name = shown(answer["node"])
    given = [f"{shown(label)}={shown(value)}" for label, value in answer["labels"].items()]
    taken = [f"{shown(label)}-" for label in answer["without"]]
    said = " ".join([*given, *taken])
    line = f"{name} has {said} from here" if said else f"{name} has only the labels of its own agent.yaml"
    return [line, *never_here(answer)]


def _read(words: tuple[str, ...]) -> dict[str, str | None]:
    labels: dict[str, str | None] = {}
    for word in words:
        name, given, value = word.partition("=")
        if not given:
            name = name.removesuffix("-")
        if not name or name == word:
            raise UsageError(f"{word!r} is no label: write NAME=VALUE, or NAME- to take one away")
        if name in labels:
            raise UsageError(f"label {name!r} is given twice")
        labels[name] = value if given else None
    return labels
