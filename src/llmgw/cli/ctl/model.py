"""``llmgw ctl model``: the table of what can be done to one model."""

from __future__ import annotations

import click

from llmgw.cli.commands import CommandTable

COMMANDS = {
    "add": "Add the models of a definition file; they are kept over restarts.",
    "edit": "Edit the definition of a model that was added.",
    "rm": "Remove a model that was added.",
    "show": "Everything about one model.",
}


@click.command("model", cls=CommandTable, prefix="llmgw.cli.ctl.model_", table=COMMANDS)
def command() -> None:
    """Add, edit, remove and show models while the server runs."""
