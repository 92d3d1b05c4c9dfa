"""``llmgw ctl models``: the models, whether they serve, and what their replicas do."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show
from llmgw.cli.ctl.drawing import Block, Grid, shown

COLUMNS = ("MODEL", "SERVING", "REPLICAS", "STATUS", "ALIASES")


@click.command("models")
@operator_options
def command(*, asked: Asked) -> None:
    """Show the models.

    REPLICAS is ready/wanted. STATUS is ready, loading, waiting (no node can run it now), failed, unreachable (its node
    is lost), stopping, on-demand (loads when somebody asks) or stopped (scaling.max is 0).
    `llmgw ctl model show NAME` says more.
    """
    show(asked, "/models", draw)


def draw(answer: Any) -> list[Block]:
    return [Grid(columns=COLUMNS, rows=tuple(_row(model) for model in answer["models"]))]


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    return (
        shown(model["name"]),
        "yes" if model["serving"] else "no",
        f"{model['ready']}/{model['wanted']}",
        shown(model["status"]),
        ",".join(shown(alias) for alias in model["aliases"]),
    )
