"""``llmgw ctl node rm``: a node that will not come back is forgotten."""

from __future__ import annotations

from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show, tell
from llmgw.cli.ctl.client import as_word
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.nodes import draw as draw_nodes


@click.command("rm")
@click.argument("node")
@operator_options
def command(*, node: str, asked: Asked) -> None:
    """Forget NODE, with its cordon and labels: one that is lost, or cordoned with nothing running there.

    Its certificate stays valid until it is revoked. With --watch the nodes are shown afterwards.
    """
    tell(asked, asked.operator.ask("DELETE", f"/nodes/{as_word(node)}"), draw)
    if asked.watch:
        show(asked, "/nodes", draw_nodes)


def draw(answer: Any) -> list[Block]:
    name, running = shown(answer["node"]), ", ".join(shown(replica) for replica in answer["running"])
    blocks: list[Block] = [f"{name} is removed"]
    if running:
        blocks.append(
            f"it was lost with {running}, which may run there still: switch it off, or run `llmgw agent stop-all` there"
        )
    if answer["connected"]:
        blocks.append("its agent runs and comes back as a new node: stop it there")
    blocks.append(f"its certificate is valid until you revoke it: llmgw ctl cert revoke {name} --dir DIR")
    return blocks
