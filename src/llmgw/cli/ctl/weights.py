"""``llmgw ctl weights``: what the nodes have fetched and fetch, and what of it could be freed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from llmgw.cli.commands import CommandTable
from llmgw.cli.ctl.address import find_address
from llmgw.cli.ctl.asking import Asked, drawn, server_options, show, tell
from llmgw.cli.ctl.client import Operator
from llmgw.cli.ctl.drawing import UNKNOWN, Block, Grid, shown
from llmgw.cli.ctl.fetches import tell_pace
from llmgw.errors import UsageError
from llmgw.units import format_decimal

COMMANDS = {
    "pull": "Have nodes fetch a source now, and follow it.",
}
COLUMNS = ("NODE", "SOURCE", "COMMIT", "SIZE", "STATE")
# As many signs of a commit as tell it from any other.
COMMIT_CHARS = 12
# The server waits for its nodes, and for another such order before that.
COLLECT_SECONDS = 150.0


@click.command(
    "weights", cls=CommandTable, prefix="llmgw.cli.ctl.weights_", table=COMMANDS, invoke_without_command=True
)
@click.option("--collect", is_flag=True, help="Delete what can be freed.")
@click.option("--json", "as_json", is_flag=True, help="Write the server's answer as it is.")
@click.option("--watch", is_flag=True, help="Look again every 2 s, until Ctrl-C.")
@server_options
def command(*, collect: bool, as_json: bool, watch: bool, server: str | None, config: Path | None) -> int:
    """Show the weights that each node has fetched, and what could be freed.

    STATE is in use (by what runs there), wanted (a model of the catalog is made of it), can be freed, or how far a
    fetch is; unfinished is what is left of one that has not ended, damaged what is no longer as it was fetched. Below
    the table stands what went wrong, or holds a fetch up. Only what llmgw itself has fetched is here: whatever somebody
    put on a node is left alone.

    --collect has the nodes delete what can be freed. Each looks once more whether that is so; what it keeps is told
    with the reason. Exit status 1: a node did not do it.
    """
    if click.get_current_context().invoked_subcommand is not None:
        if collect or as_json or watch or server is not None or config is not None:
            raise UsageError("write the options of pull behind it, as llmgw ctl weights pull SOURCE --server URL")
        return 0
    asked = Asked(operator=Operator(find_address(server, config, environ=os.environ)), as_json=as_json, watch=watch)
    if not collect:
        show(asked, "/weights", draw)
        return 0
    patient = Operator(asked.operator.address, timeout_seconds=COLLECT_SECONDS)
    answer = patient.ask("POST", "/weights/collect", {})
    tell(asked, answer, draw_collected)
    if watch:
        show(asked, "/weights", draw)
    return drawn(asked.operator, answer, lambda facts: int(any(node.get("why") for node in facts["nodes"])))


def draw(answer: Any) -> list[Block]:
    nodes = answer["nodes"]
    blocks: list[Block] = [Grid(columns=COLUMNS, rows=tuple(row for node in nodes for row in _rows(node)))]
    lines = [f"{shown(node['node'])}: {line}" for node in nodes for line in _lines(node)]
    if lines:
        blocks += ["", *lines]
    if any(node["free_bytes"] for node in nodes):
        blocks += ["", "to delete what can be freed: llmgw ctl weights --collect"]
    return blocks


def _rows(node: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    name = shown(node["node"])
    for each in node.get("stored") or ():
        state = shown(each["state"])
        if not each.get("whole", True):
            state = f"{'unfinished' if each.get('wrong') is None else 'damaged'}, {state}"
        yield name, shown(each["source"]), _commit(each), format_decimal(each["size_bytes"]), state
    for fetch in node["fetches"]:
        total = fetch.get("total_bytes")
        size = UNKNOWN if total is None else format_decimal(total)
        yield name, shown(fetch["source"]), _commit(fetch), size, tell_pace(fetch)


def _commit(each: Mapping[str, Any]) -> str:
    commit = each.get("commit")
    return UNKNOWN if commit is None else shown(commit)[:COMMIT_CHARS]


def _lines(node: Mapping[str, Any]) -> Iterator[str]:
    if node.get("stored") is None and node["state"] == "ready":
        yield "it has not said what it has: its agent has just begun, or is of an earlier version"
    if node["state"] != "ready" and (node.get("stored") or node["fetches"]):
        yield f"it is {shown(node['state'])}: this is what it said last"
    for each in node.get("stored") or ():
        if (wrong := each.get("wrong")) is not None:
            yield f"{shown(each['source'])} ({_commit(each)}) is damaged: {shown(wrong)}"
            if (remedy := each.get("remedy")) is not None:
                yield f"what to do: {shown(remedy)}"
    for fetch in node["fetches"]:
        # (what goes on has one where it gets no further)
        if fetch["phase"] == "failed" or fetch.get("cause") is not None:
            yield f"{shown(fetch['source'])}: {shown(fetch.get('cause'))}"
            if (remedy := fetch.get("remedy")) is not None:
                yield f"what to do: {shown(remedy)}"
    if node["free_bytes"]:
        # (also of two agents on one machine, whose disk nobody else writes to)
        others = ", ".join(map(shown, node.get("shared_with") or ()))
        shared = f", in a folder shared with {others or 'other machines'}" if others or node["shared"] else ""
        yield f"{format_decimal(node['free_bytes'])} can be freed{shared}"


def draw_collected(answer: Any) -> list[Block]:
    """What became of it on each node."""
    lines: list[Block] = []
    for node in answer["nodes"]:
        name, why = shown(node["node"]), node.get("why")
        if why is not None:
            unknown = node.get("freed_bytes") is None
            known = "are still there" if not unknown else "could be freed, and what it has removed is not known"
            lines.append(f"{name}: {format_decimal(node['bytes'])} {known}: {shown(why)}")
            continue
        lines.append(f"{name}: {format_decimal(node['freed_bytes'])} are free again")
        lines += [f"{name}: kept {shown(each)}" for each in node["kept"]]
    return lines or ["nothing can be freed"]
