"""``llmgw ctl uncordon``: a node takes new replicas again."""

from __future__ import annotations

import click

from llmgw.cli.ctl.asking import Asked, operator_options
from llmgw.cli.ctl.cordon import say


@click.command("uncordon")
@click.argument("node")
@operator_options
def command(*, node: str, asked: Asked) -> None:
    """Let NODE take new replicas again, after `llmgw ctl cordon` or `llmgw ctl drain`.

    With --watch the node is shown afterwards.
    """
    say(asked, node, cordoned=False)
