"""``llmgw ctl models``: the models, whether they serve, and what their replicas do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show
from llmgw.cli.ctl.drawing import Block, Grid, shown
from llmgw.cli.ctl.fetches import tell_fetch

COLUMNS = ("MODEL", "SERVING", "REPLICAS", "STATUS", "ALIASES")


@click.command("models")
@operator_options
def command(*, asked: Asked) -> None:
    """Show the models.

    REPLICAS is ready/wanted. STATUS is ready, loading, waiting (no node can run it now), failed, unreachable (its node
    is lost), stopping, on-demand (loads when somebody asks) or stopped (scaling.max is 0, or `llmgw ctl stop`). Below
    stands which of them is held by an operator, on its way to another definition, or goes on by an earlier one, and
    what those wait for that no node can run.
    `llmgw ctl model show NAME` says more.
    """
    show(asked, "/models", draw)


def draw(answer: Any) -> list[Block]:
    models = answer["models"]
    blocks: list[Block] = [Grid(columns=COLUMNS, rows=tuple(_row(model) for model in models))]
    lines = [f"{shown(model['name'])}: {line}" for model in models for line in _tell_course(model)]
    return [*blocks, "", *lines] if lines else blocks


def _tell_course(model: dict[str, Any]) -> Iterator[str]:
    """What an operator or a definition has made of it, or what it waits for, which its status does not say."""
    told = model.get("held") or model.get("failed") is not None or model["status"] == "waiting"
    if told and (detail := model.get("detail")) is not None:
        yield shown(detail)
    if (rolling := model.get("rolling")) is not None:
        yield shown(rolling)


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    return (
        shown(model["name"]),
        "yes" if model["serving"] else "no",
        f"{model['ready']}/{model['wanted']}",
        _status(model),
        ",".join(shown(alias) for alias in model["aliases"]),
    )


def _status(model: dict[str, Any]) -> str:
    fetch = model.get("fetch")
    return shown(model["status"]) if fetch is None else f"{shown(model['status'])}: {tell_fetch(fetch)}"
