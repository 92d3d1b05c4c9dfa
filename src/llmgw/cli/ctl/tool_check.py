"""``llmgw ctl tool-check``: whether tool calls work at a model, and if not, where they are lost."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from llmgw.cli.ctl.address import find_address
from llmgw.cli.ctl.asking import drawn, server_options
from llmgw.cli.ctl.client import Operator, as_name
from llmgw.cli.ctl.drawing import Block, Grid, shown, write

# How much longer than its check the server is waited for.
MARGIN_SECONDS = 30.0
COLUMNS = ("REQUEST", "ANSWER")
# Exit status by verdict. 1 and 2 are those of all commands: it could not be asked; the command is wrong.
STATUSES = {
    "works": 0,
    "unasked": 1,
    "parser_missed": 3,
    "template_drops": 4,
    "ignores": 5,
    "refuses": 6,
    "partly": 7,
    "untold": 8,
}

Answer = dict[str, Any]


@click.command("tool-check")
@click.argument("model", required=False)
@click.option("--replica", metavar="ID", help="The replica of MODEL that is asked; else any that is ready.")
@click.option("--endpoint", metavar="URL", help="Ask this OpenAI-compatible endpoint itself; no server is asked.")
@click.option("--model", "name", metavar="NAME", help="The model at --endpoint, where there are several.")
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Its first line is the key for --endpoint; else OPENAI_API_KEY has it.",
)
@click.option("--json", "as_json", is_flag=True, help="Write what was found as JSON.")
@server_options
def command(
    *,
    model: str | None,
    replica: str | None,
    endpoint: str | None,
    name: str | None,
    key_file: Path | None,
    as_json: bool,
    server: str | None,
    config: Path | None,
) -> int:
    """Check whether tool calls work at MODEL: whole and streamed, forced and by the model's own choice.

    Exit status: 0 they work, 3 the model calls and the engine does not parse it, 4 the chat template drops the tools,
    5 the model ignores them, 6 the endpoint refuses them, 7 they work in part, 8 it can't be told which of these;
    1 it could not be asked, 2 the command is wrong.

    \b
    llmgw ctl tool-check qwen2.5-coder-3b-instruct
    llmgw ctl tool-check --endpoint http://gpu01:8000
    """
    if (model is None) == (endpoint is None):
        raise click.UsageError("give one of MODEL (which the server runs) and --endpoint URL")
    if endpoint is None:
        if name is not None or key_file is not None:
            raise click.UsageError("--model and --key-file go with --endpoint")
        for given in (model or "", *(() if replica is None else (replica,))):
            as_name(given)
        from llmgw.dialects.toolcheck import CHECK_SECONDS

        timeout_seconds = CHECK_SECONDS + MARGIN_SECONDS
        operator = Operator(find_address(server, config, environ=os.environ), timeout_seconds=timeout_seconds)
        told = operator.ask("POST", "/tool-check", {"model": model, "replica": replica})
        answer, blocks, status = drawn(operator, told, lambda facts: (facts, draw(facts), _status(facts)))
    else:
        if replica is not None or server is not None or config is not None:
            raise click.UsageError("--replica, --server and --config go with MODEL: with --endpoint no server is asked")
        answer = _check_endpoint(endpoint, name, key_file, environ=os.environ)
        blocks, status = draw(answer), _status(answer)
    if as_json:
        print(json.dumps(answer, ensure_ascii=False), flush=True)
    else:
        write(blocks)
    return status


def draw(answer: Answer) -> list[Block]:
    check = answer["check"]
    where = answer.get("endpoint") or f"{answer['replica']} on {answer['node']}"
    rows = tuple((shown(each["request"]), shown(each["answer"])) for each in check["exchanges"])
    blocks: list[Block] = [
        f"{shown(answer['model'])} at {shown(where)}",
        "",
        Grid(columns=COLUMNS, rows=rows),
        "",
        f"{shown(check['verdict']).replace('_', ' ')}: {shown(check['message'])}",
    ]
    return [*blocks, f"what to do: {shown(check['remedy'])}"] if check.get("remedy") else blocks


def _status(answer: Answer) -> int:
    return STATUSES[answer["check"]["verdict"]]


def _check_endpoint(url: str, name: str | None, key_file: Path | None, *, environ: Mapping[str, str]) -> Answer:
    import msgspec
    import trio

    from llmgw.cli.ctl.endpoint import Served, ask_endpoint, read_endpoint
    from llmgw.core.model import Model, ModelName, Profile
    from llmgw.dialects.toolcheck import CHECK_SECONDS, EXCHANGE_SECONDS, Parsers, judge
    from llmgw.engines.registry import load_engines

    def find_parsers(served: Served) -> Parsers:
        engines = load_engines(environ)
        of_owner = {
            key: engine
            for key, engine in engines.items()
            if served.owned_by is not None and engine.info.owned_by == served.owned_by
        }
        model = Model(name=ModelName(served.name), source=served.root or served.name)
        flags = {
            engine.info.title: engine.name_parser(model, Profile(name="endpoint", engine=key))
            for key, engine in (of_owner or engines).items()
        }
        # Of an engine that may not be the one only a flag is worth a word.
        named = flags if of_owner else {title: flag for title, flag in flags.items() if flag is not None}
        return Parsers(by_engine=named, sure=bool(of_owner))

    endpoint = read_endpoint(url, key_file, environ=environ)
    ask = functools.partial(ask_endpoint, exchange_seconds=EXCHANGE_SECONDS, check_seconds=CHECK_SECONDS)
    served, found = trio.run(ask, endpoint, name)
    check = msgspec.to_builtins(judge(found, find_parsers(served)))
    known = {key: value for key, value in check.items() if value is not None}
    return {"model": served.name, "endpoint": endpoint.url, "check": known}
