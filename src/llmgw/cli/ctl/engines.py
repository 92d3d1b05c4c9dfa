"""``llmgw ctl engines``: the engine plugins of the server, and the binary that each node has for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, operator_options, show
from llmgw.cli.ctl.drawing import UNKNOWN, Block, Grid, listed, shown

PLUGIN_COLUMNS = ("ENGINE", "TITLE", "TASKS", "CAN", "BINARY", "FROM")
NODE_COLUMNS = ("NODE", "ENGINE", "VERSION", "CHECK", "BINARY")
# As the keys of an answer and of a definition have them.
ABILITIES = ("cpu", "tp", "pp", "nodes", "loras", "mmproj", "tool_parser", "reasoning_parser")


@click.command("engines")
@operator_options
def command(*, asked: Asked) -> None:
    """Show the engine plugins, and what each node would launch for them.

    CAN is what a definition may ask of the engine. CHECK is what came of trying the binary on its node: ok, problems,
    broken (it can't be used, and nothing is placed there) or waiting (not tried yet). Below the tables stands what is
    the matter. `llmgw ctl engine-check` looks at one binary closer.
    """
    show(asked, "/engines", draw)


def draw(answer: Any) -> list[Block]:
    plugins, nodes = answer["plugins"], answer["nodes"]
    blocks: list[Block] = [Grid(columns=PLUGIN_COLUMNS, rows=tuple(_plugin_row(plugin) for plugin in plugins))]
    rows = tuple(row for node in nodes for row in _node_rows(node))
    if rows:
        blocks += ["", Grid(columns=NODE_COLUMNS, rows=rows)]
    troubles = [f"left out: {shown(each['plugin'])}: {shown(each['reason'])}" for each in answer["left_out"]]
    troubles += [trouble for node in nodes for trouble in _troubles(node)]
    return [*blocks, "", *troubles] if troubles else blocks


def _plugin_row(plugin: dict[str, Any]) -> tuple[str, ...]:
    return (
        shown(plugin["name"]),
        shown(plugin["title"]),
        listed(plugin["tasks"]),
        listed([ability for ability in ABILITIES if plugin[ability]]),
        shown(plugin["binary"]),
        shown(plugin.get("origin")),
    )


def _node_rows(node: dict[str, Any]) -> list[tuple[str, ...]]:
    engines = node.get("engines")
    if not engines:
        return [(shown(node["node"]), UNKNOWN if engines is None else "none", UNKNOWN, UNKNOWN, UNKNOWN)]
    return [
        (
            shown(node["node"]),
            shown(each["engine"]),
            shown(each.get("version")),
            judge(each),
            shown(" ".join(each["program"])),
        )
        for each in engines
    ]


def judge(found: dict[str, Any]) -> str:
    """What came of trying a binary, in one word."""
    if found.get("broken") is not None:
        return "broken"
    if not found["checked"]:
        return "waiting"
    return "problems" if found["problems"] or found["missing_libraries"] else "ok"


def _troubles(node: dict[str, Any]) -> Iterator[str]:
    for each in node.get("engines") or ():
        yield from (f"{shown(node['node'])}: {shown(each['engine'])}: {line}" for line in troubles_of(each))


def troubles_of(found: dict[str, Any], fate: str = "it can't be used") -> Iterator[str]:
    """What is the matter with a binary, a line each, none of it twice; ``fate`` is that of a broken one."""
    broken = shown(found.get("broken") or "")
    if broken:
        yield f"{fate}: {broken}"
    missing = [name for name in map(shown, found["missing_libraries"]) if name not in broken]
    if missing:
        yield f"missing libraries: {', '.join(missing)}"
    yield from (problem for problem in map(shown, found["problems"]) if problem not in broken)
