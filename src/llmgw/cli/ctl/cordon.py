"""``llmgw ctl cordon``: nothing new is placed on a node."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show, tell
from llmgw.cli.ctl.client import as_node
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.nodes import draw_only


@click.command("cordon")
@click.argument("node")
@operator_options
def command(*, node: str, asked: Asked) -> None:
    """Keep new replicas off NODE. What runs there stays; it is kept over restarts, until `llmgw ctl uncordon`.

    With --watch the node is shown afterwards.
    """
    say(asked, node, cordoned=True)


def say(asked: Asked, node: str, *, cordoned: bool) -> None:
    """Have the node cordoned, or no longer."""
    tell(asked, asked.operator.ask("POST", f"/nodes/{as_node(node)}/cordon", {"cordoned": cordoned}), draw)
    if asked.watch:
        show(asked, "/nodes", partial(draw_only, name=node))


def draw(answer: Any) -> list[Block]:
    name, running = shown(answer["node"]), ", ".join(shown(replica) for replica in answer["running"])
    if not answer["cordoned"]:
        return [f"{name} takes new replicas", *never_here(answer)]
    blocks: list[Block] = [f"{name} is cordoned: nothing new is placed there"]
    if running and not answer.get("draining"):
        blocks.append(f"what runs there stays: {running}")
    if answer.get("draining"):
        blocks.append(f"it drains: what runs there goes once it runs elsewhere (llmgw ctl uncordon {name} ends that)")
    return [*blocks, *never_here(answer)]


def never_here(answer: Any) -> list[Block]:
    """What to say of marks for a node that nobody has seen."""
    if answer["known"]:
        return []
    close = answer.get("close")
    meant = "" if close is None else f"; did you mean {shown(close)}?"
    kept = answer["cordoned"] or answer["labels"] or answer["without"]
    fate = "it is kept for when one comes" if kept else "nothing is kept for it"
    return [f"no node of this name has ever been here, and {fate}{meant}"]
