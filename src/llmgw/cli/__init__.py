"""``llmgw``: the table of commands. Each is imported only when it runs, so that help and completion stay quick."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from llmgw import __version__, errors

# The line of each command that ``llmgw --help`` shows; the command itself is ``command`` in the module of its name.
COMMANDS = {
    "completion": "Print the script that completes llmgw's words in a shell.",
    "demo": "Serve a small real model, fetched if need be, and say how to talk to it.",
    "serve": "Serve a model on this machine.",
}

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130


class CommandTable(click.Group):
    """A group that knows its commands by name and imports one when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found = importlib.import_module(f"llmgw.cli.{cmd_name}").command
        if not isinstance(found, click.Command):
            raise TypeError(f"llmgw.cli.{cmd_name}.command is not a command")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word not in COMMANDS and not word.startswith("-") and not ctx.resilient_parsing:
            close = difflib.get_close_matches(word, COMMANDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there is {', '.join(sorted(COMMANDS))}"
            raise click.UsageError(f"no command {word!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.command(cls=CommandTable, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmgw", message="%(prog)s %(version)s")
def app() -> None:
    """One OpenAI-compatible LLM service from a handful of machines."""


def main(args: Sequence[str] | None = None, *, program: click.Command = app) -> NoReturn:
    """Run one command. Exit status: 0 done, 1 it did not work, 2 the command or configuration is wrong, 130 Ctrl-C."""
    try:
        status = program.main(args=args, prog_name="llmgw", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (errors.UsageError, errors.ConfigError) as error:
        click.echo(f"llmgw: {error.message}", err=True)
        sys.exit(WRONG)
    except errors.LlmgwError as error:
        last_words = error.lines if isinstance(error, errors.EngineFailed) else ()
        click.echo("\n  ".join((f"llmgw: {error.message}", *last_words)), err=True)
        sys.exit(FAILED)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone (``llmgw --help | head -1``): the interpreter's own flush would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    sys.exit(status if isinstance(status, int) else DONE)
