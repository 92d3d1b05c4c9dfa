"""A group of commands that imports each only when it runs, so that help and completion stay quick."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click


class CommandTable(click.Group):
    """A group that knows the line of each of its commands, and imports one when it is asked for.

    ``table`` is the line of each command for the help; the command itself is ``command`` in the module that ``prefix``
    and its name make, with ``_`` for ``-``.
    """

    def __init__(self, *args: Any, prefix: str, table: Mapping[str, str], **facts: Any) -> None:
        super().__init__(*args, **facts)
        self._prefix = prefix
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module = f"{self._prefix}{cmd_name.replace('-', '_')}"
        found = importlib.import_module(module).command
        if not isinstance(found, click.Command):
            raise TypeError(f"{module}.command is not a command")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word not in self._table and not word.startswith("-") and not ctx.resilient_parsing:
            close = difflib.get_close_matches(word, self._table, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there is {', '.join(sorted(self._table))}"
            raise click.UsageError(f"no command {word!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # click would write a line feed to stderr first, and hang there when nobody reads it.
            raise click.Abort from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self._table.items()))
