"""``llmgw ctl model history``: the definitions that a model has had, and what became of each."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, drawn, operator_options, show
from llmgw.cli.ctl.client import as_word
from llmgw.cli.ctl.drawing import UNKNOWN, Block, Grid, shown
from llmgw.errors import LlmgwError, UsageError

COLUMNS = ("NUMBER", "SINCE", "KEPT", "NOW", "OUTCOME", "DETAIL")


@click.command("history")
@click.argument("name")
@click.option("--number", type=click.IntRange(min=1), metavar="N", help="Write that definition, as it was written.")
@operator_options
def command(*, name: str, number: int | None, asked: Asked) -> None:
    """Show the definitions that the model NAME (or of that alias) has had, the newest first.

    NOW: current is the one that is written, serving the one that replicas run by. OUTCOME: proven has served for a
    while, failed has not come to serve, and DETAIL says why; else it says where it is declared, or what brought it.
    `llmgw ctl model rollback NAME --to N` brings one back.

    \b
    llmgw ctl model history qwen3-8b --number 3 > qwen3-8b.yaml
    """
    path = f"/history/{as_word(name)}"
    if number is None:
        show(asked, path, draw)
        return
    if asked.watch:
        raise UsageError("--number writes one definition once: leave out --watch")
    found = drawn(asked.operator, asked.operator.ask("GET", path), lambda answer: _find(answer, number))
    text = drawn(asked.operator, json.dumps(found).encode(), lambda facts: str(facts["text"]))
    if asked.as_json:
        print(json.dumps(found), flush=True)
    elif sys.stdout.isatty():
        print("\n".join(map(shown, text.splitlines())), flush=True)
    else:
        # As it was written, to the last byte: it is to be added again.
        print(text, end="" if text.endswith("\n") else "\n", flush=True)


def draw(answer: Any) -> list[Block]:
    return [Grid(columns=COLUMNS, rows=tuple(_row(each) for each in answer["definitions"]))]


def _row(definition: dict[str, Any]) -> tuple[str, ...]:
    now = [word for word in ("current", "serving") if definition[word]]
    details = (definition.get(key) for key in ("why", "note", "where"))
    return (
        str(definition["number"]),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(definition["at"])),
        shown(definition["origin"]),
        ",".join(now) or UNKNOWN,
        shown(definition.get("outcome")),
        "; ".join(shown(detail) for detail in details if detail is not None),
    )


def _find(answer: Any, number: int) -> dict[str, Any]:
    definitions: list[dict[str, Any]] = answer["definitions"]
    for each in definitions:
        if each["number"] == number:
            return each
    there = ", ".join(str(each["number"]) for each in reversed(definitions)) or "none"
    raise LlmgwError(f"{shown(answer['model'])} has no definition {number}; those that are kept: {there}")
