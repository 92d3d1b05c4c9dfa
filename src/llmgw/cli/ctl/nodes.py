"""``llmgw ctl nodes``: the nodes, what they have, and when they were last heard of."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show
from llmgw.cli.ctl.drawing import UNKNOWN, Block, Grid, listed, shown
from llmgw.cli.ctl.figures import ago, share_gb

COLUMNS = ("NODE", "STATE", "GPUS", "MEM", "DISK", "CLASSES", "FABRICS", "REPLICAS", "LAST SEEN")


@click.command("nodes")
@operator_options
def command(*, asked: Asked) -> None:
    """Show the nodes.

    STATE is ready, joining (connected, not registered yet), silent (its link is down) or lost (silent for longer than
    its lease). MEM and DISK are free/total; DISK is that of the filesystems for weights. A dash is not known.
    """
    show(asked, "/nodes", draw)


def draw(answer: Any) -> list[Block]:
    return [Grid(columns=COLUMNS, rows=tuple(_row(node) for node in answer["nodes"]))]


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    gpus = node.get("gpus")
    return (
        shown(node["node"]),
        shown(node["state"]),
        UNKNOWN if gpus is None else str(len(gpus)),
        share_gb(node.get("memory_available_gb"), node.get("memory_gb")),
        _disk(node.get("disks")),
        listed(node.get("classes")),
        listed(node.get("fabrics")),
        str(len(node["replicas"])),
        ago(node.get("heard_seconds_ago")),
    )


def _disk(disks: list[dict[str, float]] | None) -> str:
    if not disks:
        return UNKNOWN
    return share_gb(sum(disk["free_gb"] for disk in disks), sum(disk["total_gb"] for disk in disks))
