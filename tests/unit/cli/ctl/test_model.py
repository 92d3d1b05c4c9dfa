from __future__ import annotations

import click

from llmgw.cli.ctl.model import COMMANDS, command


def test_every_command_of_the_table_can_be_had() -> None:
    for name in COMMANDS:
        found = command.get_command(click.Context(command), name)
        assert found is not None
        assert found.name == name
