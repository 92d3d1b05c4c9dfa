"""``llmgw ctl replicas``: the replicas, how far they have come, and why one failed."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show
from llmgw.cli.ctl.drawing import Block, Grid, shown
from llmgw.cli.ctl.figures import ago, percent

COLUMNS = ("REPLICA", "MODEL", "NODE", "STATE", "SINCE", "RUNNING", "WAITING", "CACHE", "HITS", "DETAIL")


@click.command("replicas")
@operator_options
def command(*, asked: Asked) -> None:
    """Show the replicas.

    STATE is placed, launching, loading, ready, stopping, failed or unreachable (its node is lost);
    RUNNING and WAITING are requests in the engine, CACHE is the used share of its KV cache, HITS the share of the
    prompts' tokens that its prefix cache had, since it started. A dash is what an engine does not say.
    Below the table stands which of them takes shorter requests than its model promises; and, of each that failed, the
    cause, what to do about it, and the last lines of its engine.
    """
    show(asked, "/replicas", draw)


def draw(answer: Any) -> list[Block]:
    replicas = answer["replicas"]
    blocks: list[Block] = [Grid(columns=COLUMNS, rows=tuple(_row(replica) for replica in replicas))]
    for replica in replicas:
        blocks += _short_of_context(replica)
        blocks += _last_words(replica)
    return blocks


def _short_of_context(replica: dict[str, Any]) -> list[Block]:
    """Of one whose engine takes less than clients are told."""
    takes, promised = replica.get("context_length"), replica.get("context_promised")
    if takes is None or promised is None or takes >= promised:
        return []
    name, model = shown(replica["replica"]), shown(replica["model"])
    return ["", f"{name} takes {takes} tokens a request, and {model} promises context_length {promised}"]


def _last_words(replica: dict[str, Any]) -> list[Block]:
    """Of one that failed: the line that names the cause first, for the engine's last line seldom does."""
    cause, remedy, lines = replica.get("cause"), replica.get("remedy"), replica.get("lines") or ()
    if cause is None and not lines:
        return []
    blocks: list[Block] = ["", f"{shown(replica['replica'])} on {shown(replica['node'])}:"]
    blocks += [f"{name:<6}  {shown(text)}" for name, text in (("cause", cause), ("remedy", remedy)) if text is not None]
    if lines:
        blocks += ["the last lines of its engine:", *(f"  {shown(line)}" for line in lines)]
    return blocks


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    return (
        shown(replica["replica"]),
        shown(replica["model"]),
        shown(replica["node"]),
        # What has ended and is still shown is what is to be tried again.
        "failed" if replica["state"] == "ended" else shown(replica["state"]),
        ago(replica["seconds_in_state"]),
        shown(replica.get("running")),
        shown(replica.get("waiting")),
        percent(replica.get("cache_used"), 1.0),
        percent(replica.get("cached_tokens"), replica.get("prompt_tokens")),
        shown(replica.get("cause") or replica.get("progress") or ""),
    )
