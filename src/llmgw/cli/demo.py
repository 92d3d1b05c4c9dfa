"""``llmgw demo``: a small real model served at once, and how to talk to it."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmgw.cli.log import start_log
from llmgw.cli.options import Run, node_options
from llmgw.errors import UsageError
from llmgw.host.output import say, write_out
from llmgw.host.signals import stop_signals

if TYPE_CHECKING:
    from llmgw.config.node import NodeConfig
    from llmgw.engines.registry import Engine

NAME = "smollm2-135m-instruct"
# All that the model was trained on; its memory for one request of that length is 190 MB.
CONTEXT_LENGTH = 8192

FindModel = Callable[["NodeConfig"], Path]


@click.command("demo")
@click.option("--model", type=click.Path(), metavar="FILE", help="Serve this weights file instead.")
@click.option("--ask", metavar="TEXT", help="Put one question, write the answer, and end.")
@node_options
def command(*, model: str | None, ask: str | None, port: int | None, config: Path | None, verbose: bool) -> None:
    """Serve a small real model (SmolLM2-135M-Instruct) until Ctrl-C.

    The model is fetched once, about 93 MB, and kept; everything runs on this machine's CPU.

    \b
    llmgw demo
    llmgw demo --ask "Why is the sky blue?"
    """
    from llmgw.engines.registry import load_engines
    from llmgw.standalone.tree import run

    start_log(verbose=verbose)
    demo(
        model,
        ask=ask,
        config=config,
        port=port,
        environ=os.environ,
        engines=load_engines(),
        find=fetch_with_progress,
        run=run,
    )


def demo(
    model: str | None,
    *,
    ask: str | None,
    config: Path | None,
    port: int | None,
    environ: Mapping[str, str],
    engines: Mapping[str, Engine],
    find: FindModel,
    run: Run,
) -> None:
    """Find the engine first, then the model (nobody wants to fetch what can't be run), then hand over to ``run``."""
    from llmgw.cli.given import DEFINITION_SUFFIXES, FileOptions, check_runnable, describe_file, existing_file
    from llmgw.config.load_node import load_node
    from llmgw.standalone.model_file import DEMO_FILE

    if ask is not None:
        _check_text(ask)
        # beside a demo that runs already; nobody is told this address
        port = 0 if port is None else port
    loaded = load_node(config, environ=environ, engines=engines, port=port)
    own = FileOptions(name=NAME, context_length=CONTEXT_LENGTH)
    if model is not None:
        file = existing_file(model, engines, definitions=False)
        if file.suffix.lower() in DEFINITION_SUFFIXES:
            raise UsageError(f"--model takes a weights file, and {model} is a definition: llmgw serve {model}")
        definition = describe_file(file, FileOptions(), engines, definitions=False)
    else:
        check_engine(Path(DEMO_FILE.name), engines, loaded.config)
        definition = describe_file(find(loaded.config), own, engines)
    check_runnable((definition,), engines, loaded.config)
    name = definition.model.name
    say(f"starting {name}")

    def on_ready(base_url: str) -> None:
        if ask is None:
            write_out(welcome(base_url, name) + "\n")

    run(loaded.config, (definition.model,), on_ready=on_ready, ask=ask)


def _check_text(ask: str) -> None:
    try:
        ask.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("--ask: this text is not UTF-8; check the terminal's encoding") from None


def check_engine(file: Path, engines: Mapping[str, Engine], config: NodeConfig) -> None:
    """UsageError with the ways out when nothing on this machine could run such a file."""
    from llmgw.cli.given import FileOptions, check_programs, describe_file

    check_programs(describe_file(file, FileOptions(), engines).model, engines, config)


def fetch_with_progress(config: NodeConfig) -> Path:
    """The demo's model on disk. A stop while it is fetched takes the download with it."""
    from llmgw.cli.progress import Shown, terminal
    from llmgw.standalone.model_file import DEMO_FILE, find_model
    from llmgw.standalone.settings import weights_cache

    with stop_as_interrupt(), Shown(terminal()) as shown:
        return find_model(DEMO_FILE, weights_cache(config), shown)


def welcome(base_url: str, name: str) -> str:
    """What to paste."""
    base_url = base_url.rstrip("/")
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Say hello."}]})
    url = f"{base_url}/v1/chat/completions"
    curl = f"curl {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    program = (
        "from openai import OpenAI; "
        f'print(OpenAI(base_url="{base_url}/v1", api_key="none").chat.completions.create('
        f'model="{name}", messages=[{{"role": "user", "content": "Say hello."}}]).choices[0].message.content)'
    )
    return f"""
{name} is ready at {base_url}/v1

With curl:
  {curl}

With Python (pip install openai):
  python3 -c {shlex.quote(program)}

Ctrl-C stops it."""


@contextmanager
def stop_as_interrupt() -> Iterator[None]:
    """SIGTERM, SIGHUP and SIGQUIT unwind like Ctrl-C, so that no half file and no pip is left behind."""
    before = {each: signal.signal(each, signal.default_int_handler) for each in stop_signals() if each != signal.SIGINT}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
