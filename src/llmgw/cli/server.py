"""``llmgw server``: what clients talk to, and what the agents of the machines dial."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from llmgw.cli.log import start_log
from llmgw.cli.options import file_options, say_not_in_effect

if TYPE_CHECKING:
    from llmgw.config.definition import Checker
    from llmgw.config.load_server import LoadedServer


class Run(Protocol):
    """What serves until it is told to stop, and reads ``path`` again when asked: ``llmgw.server.program.run``."""

    def __call__(self, loaded: LoadedServer, path: Path) -> None: ...


@click.command("server")
@file_options("server.yaml")
def command(*, config: Path | None, verbose: bool) -> None:
    """Serve clients with the machines whose agents dial in, until Ctrl-C or SIGTERM.

    What it is told is in /etc/llmgw/server.yaml: see docs/configuration.md. The certificates are made with
    llmgw ctl cert. Engines on the nodes go on running when the server stops.

    \b
    llmgw server
    llmgw server --config ./server.yaml
    """
    from llmgw.engines.registry import load_engines
    from llmgw.server.program import run

    start_log(verbose=verbose)
    serve(config=config, environ=os.environ, engines=load_engines(), run=run)


def serve(*, config: Path | None, environ: Mapping[str, str], engines: Mapping[str, Checker], run: Run) -> None:
    """Check all that can be checked, then hand over to ``run``."""
    from llmgw.config.load_server import find_server_file, load_server

    path = find_server_file(config, environ=environ)
    loaded = load_server(path, engines=engines)
    say_not_in_effect(loaded.definitions)
    run(loaded, path)
