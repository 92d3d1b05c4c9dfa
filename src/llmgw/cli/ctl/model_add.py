"""``llmgw ctl model add``: the models of a definition file become the server's."""

from __future__ import annotations

import os
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, drawn, operator_options, show, tell
from llmgw.cli.ctl.client import MAX_BODY_BYTES, as_word
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.model_show import draw as draw_model
from llmgw.cli.ctl.models import draw as draw_models
from llmgw.errors import UsageError


@click.command("add")
@click.option("-f", "--file", required=True, metavar="FILE", help="The definition (.yaml); - is stdin.")
@click.option("--replace", is_flag=True, help="Put it in the place of an added model of the same name.")
@operator_options
def command(*, file: str, replace: bool, asked: Asked) -> None:
    """Add the models of a definition file; they are kept over restarts of the server.

    The file is checked as a whole, and added as a whole. Its source is a path on the nodes, not on this machine.
    With --watch the model is shown afterwards.

    \b
    llmgw ctl model add -f qwen-coder-3b.yaml
    """
    # A file's name may be any bytes; what goes to the server is text.
    name = "stdin" if file == "-" else os.fsencode(file).decode("utf-8", "replace")
    body = {"file": name, "text": read_file(file), "replace": replace}
    answer = asked.operator.ask("POST", "/models", body)
    tell(asked, answer, draw)
    if asked.watch:
        names = drawn(asked.operator, answer, lambda facts: [str(model["name"]) for model in facts["models"]])
        if len(names) == 1:
            show(asked, f"/models/{as_word(names[0])}", draw_model)
        else:
            show(asked, "/models", draw_models)


def draw(answer: Any) -> list[Block]:
    blocks: list[Block] = []
    for model in answer["models"]:
        name = shown(model["name"])
        fate = "replaced" if model["replaced"] else "added"
        blocks.append(f"{name} is {fate}" if model["runs"] else f"{name} is {fate}, and does not run: scaling.max is 0")
        if model.get("rolls") and not model.get("held"):
            blocks.append(f"{name}: {tell_rolling(model, runs=model['runs'])}: llmgw ctl replicas {name}")
        if model.get("held"):
            blocks.append(f"{name} is stopped: `llmgw ctl load {name}` lets it run")
        if model["not_in_effect"]:
            blocks.append(f"{name}: not in effect yet: {', '.join(shown(key) for key in model['not_in_effect'])}")
    return blocks


def tell_rolling(answer: Any, *, runs: bool = True) -> str:
    """What becomes of replicas that run by an earlier definition."""
    if not runs:
        return "its replicas go once their requests are answered"
    if answer.get("on_demand"):
        return "its replicas are replaced where somebody asks for it, and go where nobody does"
    return "its replicas of another definition are replaced, one after the other"


def read_file(file: str) -> str:
    """What a definition's file holds; ``-`` is stdin. UsageError where that is no text, or too much of it."""
    try:
        with click.open_file(file, "rb") as opened:
            raw = opened.read(MAX_BODY_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror}") from None
    if len(raw) > MAX_BODY_BYTES:
        raise UsageError(f"{file} is larger than {MAX_BODY_BYTES // 1024} KiB: not a definition")
    try:
        return str(raw, "utf-8-sig")
    except UnicodeDecodeError as error:
        line = bytes(raw).count(b"\n", 0, error.start) + 1
        raise UsageError(f"{file} is not UTF-8 (line {line})") from None
