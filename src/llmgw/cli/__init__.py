"""``llmgw``: the table of commands. Each is imported only when it runs, so that help and completion stay quick."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from llmgw import __version__, errors, units
from llmgw.cli.commands import CommandTable
from llmgw.host.output import STDERR, give_up_stdout, open_standard, say

# The line of each command that ``llmgw --help`` shows; the command itself is ``command`` in the module of its name.
COMMANDS = {
    "agent": "Run this machine's engines as the server wants them, or stop them all.",
    "completion": "Print the script that completes llmgw's words in a shell.",
    "ctl": "Look into a running server, and change its models.",
    "demo": "Serve a small real model, fetched if need be, and say how to talk to it.",
    "serve": "Serve a model on this machine.",
    "server": "Serve clients with the machines whose agents dial in.",
}

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130


@click.command(
    cls=CommandTable,
    prefix="llmgw.cli.",
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="llmgw", message="%(prog)s %(version)s")
def app() -> None:
    """One OpenAI-compatible LLM service from a handful of machines."""


def main(args: Sequence[str] | None = None, *, program: click.Command = app) -> NoReturn:
    """Run one command. Exit status: 0 done, 1 it did not work, 2 the command or configuration is wrong, 130 Ctrl-C."""
    open_standard()
    sys.exit(_run(program, args))


def _run(program: click.Command, args: Sequence[str] | None) -> int:
    """Its status, once all that is to be said is said; nothing of it is said through a buffer that fails later."""
    try:
        status = program.main(args=args, prog_name="llmgw", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        say(shown.getvalue().rstrip("\n"))
        return error.exit_code
    except (errors.UsageError, errors.ConfigError) as error:
        say(_shown(f"llmgw: {error.message}"))
        return WRONG
    except errors.LlmgwError as error:
        last_words = error.lines if isinstance(error, errors.EngineFailed) else ()
        say(_shown("\n  ".join((f"llmgw: {error.message}", *last_words))))
        return FAILED
    except (click.Abort, KeyboardInterrupt):
        return _end_interrupted()
    except BaseExceptionGroup as group:
        # So trio hands it on, until the tree hears signals by itself.
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        return _end_interrupted()
    except BrokenPipeError:
        # Whoever read our output has gone (``llmgw --help | head -1``).
        give_up_stdout()
        return FAILED
    except OSError as error:
        give_up_stdout()
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        say(f"llmgw: {where}{error.strerror or error}")
        return FAILED
    return status if isinstance(status, int) else DONE


def _shown(text: str) -> str:
    """As a terminal may have it: what a message quotes may be anybody's."""
    return "\n".join(map(units.printable, text.split("\n")))


def _end_interrupted() -> int:
    if os.isatty(STDERR):
        # behind the ^C that the terminal shows
        say("")
    return INTERRUPTED
