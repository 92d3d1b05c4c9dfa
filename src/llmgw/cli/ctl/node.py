"""``llmgw ctl node``: the table of what can be done to one node as a whole."""

from __future__ import annotations

import click

from llmgw.cli.commands import CommandTable

COMMANDS = {
    "rm": "Forget a node that is lost, or drained.",
}


@click.command("node", cls=CommandTable, prefix="llmgw.cli.ctl.node_", table=COMMANDS)
def command() -> None:
    """Remove nodes that will not come back."""
