"""``llmgw ctl nodes``: the nodes, what they have, and when they were last heard of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show
from llmgw.cli.ctl.drawing import UNKNOWN, Block, Grid, listed, shown
from llmgw.cli.ctl.figures import ago, free_of, lasted, share_gb

COLUMNS = ("NODE", "STATE", "GPUS", "MEM", "DISK", "CLASSES", "FABRICS", "REPLICAS", "LAST SEEN")


@click.command("nodes")
@operator_options
def command(*, asked: Asked) -> None:
    """Show the nodes.

    STATE is ready, joining (connected, not registered yet), silent (its link is down), lost (silent for longer than
    its lease) or unseen (it was marked and has never been here), with ",cordoned" where nothing new is placed, and
    ",draining" where besides what runs there leaves. GPUS are those that no replica has, of all. MEM is what replicas
    could still book, of all: without what they have booked, whatever they use of it, and what other programs hold. DISK
    is what is free of the filesystems for weights, of all. A fabric that is out of service is marked (down). A dash is
    not known. LAST SEEN with a "<" is of before the server's start, and may have been later. Below stands what is the
    matter with a machine, and what one that drains still waits for.
    """
    show(asked, "/nodes", draw)


def draw(answer: Any) -> list[Block]:
    nodes = answer["nodes"]
    blocks: list[Block] = [Grid(columns=COLUMNS, rows=tuple(_row(node) for node in nodes))]
    lines = [f"{shown(node['node'])}: {shown(line)}" for node in nodes for line in _lines(node)]
    return [*blocks, "", *lines] if lines else blocks


def draw_only(answer: Any, name: str) -> list[Block]:
    """Of all nodes this one."""
    return draw({"nodes": [node for node in answer["nodes"] if node["node"] == name]})


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    return (
        shown(node["node"]),
        shown(node["state"]) + _marked(node),
        _gpus(node),
        share_gb(node.get("memory_free_gb"), node.get("memory_gb")),
        _disk(node.get("disks")),
        listed(node.get("classes")),
        listed([_fabric(fabric) for fabric in node.get("fabrics") or ()]),
        str(len(node["replicas"])),
        _heard(node),
    )


def _marked(node: dict[str, Any]) -> str:
    # (what drains is cordoned too)
    if node.get("draining"):
        return ",draining"
    return ",cordoned" if node.get("cordoned") else ""


def _lines(node: dict[str, Any]) -> Iterator[str]:
    """What is the matter with it, what of it is kept, and how far it is with its drain."""
    yield from node.get("warnings") or ()
    for kept in node.get("kept") or ():
        gpus, gb = len(kept["gpus"]), kept["memory_gb"]
        room = [f"{gpus} GPU{'' if gpus == 1 else 's'}"] if gpus else []
        room += [f"{gb:.3g} GB of memory"] if gb else []
        yield f"{' and '.join(room)} kept for {shown(kept['model'])} until it runs again, for a minute at most"
    if node.get("draining") and (waits := node.get("drain_waits_for")) is not None:
        left = node.get("drain_seconds_left")
        # (no deadline reaches a node that is away)
        timed = left is not None and node["state"] == "ready"
        limit = f"; what is left in {lasted(left)} stops in any case" if timed else ""
        yield f"it drains: {waits}{limit}"


def _heard(node: dict[str, Any]) -> str:
    when = ago(node.get("heard_seconds_ago"))
    # The store is some minutes behind: else a node that was there a moment ago would seem to have gone long before.
    return f"<{when}" if node.get("heard_before_start") and when not in {UNKNOWN, "now"} else when


def _gpus(node: dict[str, Any]) -> str:
    gpus = node.get("gpus")
    if gpus is None:
        return UNKNOWN
    return free_of(node["gpus_free"], len(gpus)) if gpus else "0"


def _fabric(fabric: dict[str, Any]) -> str:
    return f"{fabric['name']}(down)" if fabric.get("down") is not None else str(fabric["name"])


def _disk(disks: list[dict[str, float]] | None) -> str:
    if not disks:
        return UNKNOWN
    return share_gb(sum(disk["free_gb"] for disk in disks), sum(disk["total_gb"] for disk in disks))
