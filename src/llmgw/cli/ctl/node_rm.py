"""``llmgw ctl node rm``: a node that will not come back is forgotten."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show, tell
from llmgw.cli.ctl.client import as_node
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.figures import lasted
from llmgw.cli.ctl.nodes import draw as draw_nodes

# Names in one line.
FEW = 8


@click.command("rm")
@click.argument("node")
@operator_options
def command(*, node: str, asked: Asked) -> None:
    """Forget NODE, with its cordon and labels: one that is lost, or cordoned with nothing running there.

    Of a brake that holds there is less without it, or none, and that is said. Its certificate stays valid until it is
    revoked. With --watch the nodes are shown afterwards.
    """
    tell(asked, asked.operator.ask("DELETE", f"/nodes/{as_node(node)}"), draw)
    if asked.watch:
        show(asked, "/nodes", draw_nodes)


def draw(answer: Any) -> list[Block]:
    name, running = shown(answer["node"]), ", ".join(shown(replica) for replica in answer["running"])
    blocks: list[Block] = [f"{name} is removed", *_braked(answer)]
    if running:
        blocks.append(
            f"it was lost with {running}, which may run there still: switch it off, or run `llmgw agent stop-all` there"
        )
    if answer["connected"]:
        blocks.append("its agent runs and comes back as a new node: stop it there")
    if answer["known"]:
        blocks.append(f"its certificate is valid until you revoke it: llmgw ctl cert revoke {name} --dir DIR")
    else:
        blocks.append("no node of this name has ever been here: what you said of it is forgotten")
    return blocks


def _braked(answer: Any) -> list[Block]:
    """What the brake was for is judged by who is lost, and that has changed."""
    before, brake = answer.get("brake_before"), answer.get("brake")
    if before is None:
        return []
    if brake is not None:
        counted = f"{brake['lost']} of {brake['nodes']} nodes were lost together"
        return [f"the brake still holds without it, for {lasted(brake['seconds_left'])}: {counted}"]
    held = f" ({_few(before['held'])})" if before["held"] else ""
    return [f"with that the brake is over: what ran on nodes that are lost{held} is placed anew elsewhere"]


def _few(names: list[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(map(shown, names[:FEW])) + more
