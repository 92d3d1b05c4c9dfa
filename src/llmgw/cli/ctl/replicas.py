"""``llmgw ctl replicas``: the replicas, how far they have come, and why one failed."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show
from llmgw.cli.ctl.drawing import Block, Grid, shown
from llmgw.cli.ctl.figures import ago

COLUMNS = ("REPLICA", "MODEL", "NODE", "STATE", "SINCE", "RUNNING", "WAITING", "DETAIL")


@click.command("replicas")
@operator_options
def command(*, asked: Asked) -> None:
    """Show the replicas.

    STATE is placed, launching, loading, ready, stopping, failed or unreachable (its node is lost);
    RUNNING and WAITING are requests in the engine.
    Below the table stand the last lines of the engine of each that failed.
    """
    show(asked, "/replicas", draw)


def draw(answer: Any) -> list[Block]:
    replicas = answer["replicas"]
    blocks: list[Block] = [Grid(columns=COLUMNS, rows=tuple(_row(replica) for replica in replicas))]
    for replica in replicas:
        if replica.get("lines"):
            blocks += ["", f"the last lines of {shown(replica['replica'])} on {shown(replica['node'])}:"]
            blocks += [f"  {shown(line)}" for line in replica["lines"]]
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
        shown(replica.get("cause") or replica.get("progress") or ""),
    )
