"""``llmgw agent``: runs this machine's engines as the server wants them; ``stop-all`` ends them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmgw.cli.log import start_log
from llmgw.cli.options import file_options
from llmgw.host.output import write_out

if TYPE_CHECKING:
    from llmgw.config.agent import AgentConfig
    from llmgw.engines.registry import Engine

FAILED = 1


@click.group("agent", invoke_without_command=True)
@file_options("agent.yaml")
@click.pass_context
def command(context: click.Context, *, config: Path | None, verbose: bool) -> None:
    """Run this machine's engines as the server wants them, until Ctrl-C or SIGTERM.

    What it is told is in /etc/llmgw/agent.yaml: see docs/configuration.md. Engines go on running when the agent stops,
    and the next one takes them over.

    \b
    llmgw agent
    llmgw agent --config ./agent.yaml
    """
    if context.invoked_subcommand is not None:
        return
    from llmgw.agent.program import run
    from llmgw.engines.registry import load_engines

    start_log(verbose=verbose)
    serve(config=config, environ=os.environ, engines=load_engines(), run=run)


def serve(
    *,
    config: Path | None,
    environ: Mapping[str, str],
    engines: Mapping[str, Engine],
    run: Callable[[AgentConfig], None],
) -> None:
    """Check all that can be checked, then hand over to ``run``."""
    from llmgw.config.load_agent import find_agent_file, load_agent

    path = find_agent_file(config, environ=environ)
    run(load_agent(path, engines=engines, host_name=socket.gethostname()))


@command.command("stop-all")
@click.option("--force", is_flag=True, help="Stop them although the server wants them here.")
@file_options("agent.yaml")
@click.pass_context
def stop_all_command(context: click.Context, *, force: bool, config: Path | None, verbose: bool) -> int:
    """Stop every engine of this node, whether or not its agent runs.

    Refused while the server wants engines here: remove the model there first (llmgw ctl model rm NAME), or --force,
    after which the server has them started again as soon as an agent runs.
    """
    from llmgw.engines.registry import load_engines

    start_log(verbose=verbose)
    # ``llmgw agent --config F stop-all`` means the same.
    above = context.parent.params["config"] if context.parent else None
    done = stop_all(config=config or above, environ=os.environ, engines=load_engines(), force=force)
    return 0 if done else FAILED


def stop_all(*, config: Path | None, environ: Mapping[str, str], engines: Mapping[str, Engine], force: bool) -> bool:
    """Whether every engine is seen gone. UsageError when that is refused."""
    import trio

    from llmgw.agent import stopping
    from llmgw.config.load_agent import find_agent_file, load_agent
    from llmgw.host.state import StateFolder

    path = find_agent_file(config, environ=environ)
    loaded = load_agent(path, engines=engines, host_name=socket.gethostname(), check_files=False)
    state = StateFolder(loaded.state)

    async def stop() -> bool:
        return await stopping.stop_all(state, engines, say=_tell, force=force)

    return trio.run(stop)


def _tell(line: str) -> None:
    """Whoever can't hear it has the engines stopped all the same."""
    with suppress(OSError):
        write_out(f"{line}\n")
