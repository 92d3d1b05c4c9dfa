"""``llmgw ctl model``: the table of what can be done to one model."""

from __future__ import annotations

import click

from llmgw.cli.commands import CommandTable

COMMANDS = {
    "add": "Add the models of a definition file; they are kept over restarts.",
    "edit": "Edit the definition of a model that was added.",
    "facts": "What launches of a model have shown of the memory and time that it takes.",
    "history": "The definitions that a model has had, and what became of each.",
    "plan": "How much disk and memory a model takes, and where it would fit now.",
    "rm": "Remove a model that was added.",
    "rollback": "Give a model that was added an earlier definition again.",
    "show": "Everything about one model.",
}


@click.command("model", cls=CommandTable, prefix="llmgw.cli.ctl.model_", table=COMMANDS)
def command() -> None:
    """Add, edit, remove and show models while the server runs, and return to earlier definitions."""
