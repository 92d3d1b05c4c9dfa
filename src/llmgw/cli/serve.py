"""``llmgw serve``: a server and an agent in one process, for the models it is given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmgw.cli.log import start_log
from llmgw.cli.options import Run, node_options, say_not_in_effect
from llmgw.errors import ConfigError, Problem, UsageError
from llmgw.host.output import say, write_out

if TYPE_CHECKING:
    from llmgw.cli.given import FileOptions
    from llmgw.config.definition import Definition
    from llmgw.engines.registry import Engine


@click.command("serve")
@click.argument("model", required=False, type=click.Path())
@click.option("--name", help="The name that clients ask for; else the file's own, in lower case.")
@click.option("--context-length", type=click.IntRange(1), metavar="TOKENS", help="Tokens of context of one request.")
@click.option("--arg", "args", multiple=True, metavar="WORD", help="A word for the engine's command line; repeat it.")
@node_options
def command(
    *,
    model: str | None,
    name: str | None,
    context_length: int | None,
    args: tuple[str, ...],
    port: int | None,
    config: Path | None,
    verbose: bool,
) -> None:
    """Serve MODEL until Ctrl-C.

    MODEL is a weights file that an installed engine reads, one that is fetched first (hf:org/repo/file, https://…), or
    a definition (.yaml) that says more: see docs/configuration.md. Without MODEL the models of node.yaml are served;
    with it, both.

    \b
    llmgw serve ./qwen2.5-3b-instruct-q4_k_m.gguf --context-length 8192
    llmgw serve hf:Qwen/Qwen2.5-3B-Instruct-GGUF/qwen2.5-3b-instruct-q4_k_m.gguf
    llmgw serve ./model.gguf --arg=--threads --arg=4
    """
    from llmgw.cli.given import FileOptions
    from llmgw.engines.registry import load_engines
    from llmgw.standalone.tree import run

    start_log(verbose=verbose)
    options = FileOptions(name=name, context_length=context_length, args=args)
    serve(model, options, config=config, port=port, environ=os.environ, engines=load_engines(), run=run)


def serve(
    model: str | None,
    options: FileOptions,
    *,
    config: Path | None,
    port: int | None,
    environ: Mapping[str, str],
    engines: Mapping[str, Engine],
    run: Run,
) -> None:
    """Check all that can be checked, then hand over to ``run``."""
    from llmgw.cli.given import check_runnable, read_given
    from llmgw.config.load_node import load_node

    loaded = load_node(config, environ=environ, engines=engines, port=port)
    given = read_given(model, options, engines) if model is not None else ()
    definitions = _together(given, loaded.definitions)
    if not any(definition.model.scaling.max for definition in definitions):
        raise UsageError(_nothing_to_serve(given, loaded.path))
    check_runnable(definitions, engines, loaded.config)
    say_not_in_effect(definitions)
    models = tuple(definition.model for definition in definitions)
    starting = ", ".join(entry.name for entry in models if entry.scaling.min)
    say(f"starting {starting}" if starting else "starting; each model loads when it is asked for")
    run(
        replace(loaded.config, models=models),
        models,
        on_ready=lambda base_url: write_out(f"{base_url.rstrip('/')}/v1 is ready; Ctrl-C stops it\n"),
    )


def _together(given: tuple[Definition, ...], written: tuple[Definition, ...]) -> tuple[Definition, ...]:
    taken = {name for definition in written for name in (definition.model.name, *definition.model.aliases)}
    problems = [
        Problem(key=str(definition.model.name), message=f"{name!r} is a model of node.yaml too", where=place)
        for definition in given
        for place in [definition.places.get("name", "")]
        for name in (definition.model.name, *definition.model.aliases)
        if name in taken
    ]
    if problems:
        raise ConfigError(problems)
    return (*given, *written)


def _nothing_to_serve(given: tuple[Definition, ...], path: Path | None) -> str:
    if given:
        return "nothing would run: scaling.max is 0; write scaling: {min: 1, max: 1}, or leave scaling out"
    where = f"no model in {path} is to run (scaling)" if path else "there is no node.yaml that names any"
    return f"which model? Give weights (a file, hf:…, https://…) or a definition: llmgw serve MODEL ({where})"
