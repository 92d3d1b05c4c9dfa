"""``llmgw ctl drain``: what runs on a node goes elsewhere, so that the machine can be taken away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from llmgw.cli.ctl.asking import Asked, drawn, operator_options, show, tell
from llmgw.cli.ctl.client import as_node
from llmgw.cli.ctl.cordon import never_here
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.figures import lasted
from llmgw.cli.ctl.nodes import draw_only
from llmgw.errors import LlmgwError, UsageError
from llmgw.units import parse_duration

# Of a node that is on its way here nobody knows yet what it runs.
TO_COME = {"silent", "joining"}


@click.command("drain")
@click.argument("node")
@click.option("--deadline", metavar="10m", help="Stop what is left then, room elsewhere or not.")
@click.option("--wait", is_flag=True, help="Follow it until nothing runs there.")
@operator_options
def command(*, node: str, deadline: str | None, wait: bool, asked: Asked) -> None:
    """Have what runs on NODE run elsewhere, and place nothing new there, until `llmgw ctl uncordon`.

    Each replica goes once another serves in its place and its requests are answered. One that there is no room for
    elsewhere stays, and it is said what it waits for; with --deadline it stops then all the same. It is kept over
    restarts, and said again it goes by the new deadline, or none. A node that is drained can be removed:
    `llmgw ctl node rm`.

    --wait ends with status 0 once nothing runs there, and with 1 where that can't be known, or somebody has ended the
    drain. With --watch the node is shown until Ctrl-C.

    \b
    llmgw ctl drain gpu02 --deadline 10m --wait
    """
    if wait and asked.watch:
        raise UsageError("--wait follows the drain to its end, --watch the node for ever: give one of them")
    path, body = f"/nodes/{as_node(node)}/drain", {"deadline_seconds": _read_deadline(deadline)}
    answer = asked.operator.ask("POST", path, body)
    if asked.as_json or wait:
        tell(asked, answer, draw)
    else:
        # What waits for room is known only now.
        seen = drawn(asked.operator, asked.operator.ask("GET", "/nodes"), lambda facts: draw_progress(facts, node))
        tell(asked, answer, lambda marks: [*draw(marks), *seen])
    if wait:
        follow(asked, node)
    elif asked.watch:
        show(asked, "/nodes", lambda facts: draw_only(facts, node))


def draw(marks: Any) -> list[Block]:
    """What is said of the node from now on."""
    name = shown(marks["node"])
    return [
        f"{name} drains: nothing new is placed there, and what runs there goes once it runs elsewhere",
        *never_here(marks),
    ]


def draw_progress(answer: Any, name: str) -> list[Block]:
    """What is left on the node, what for, and what can be done next."""
    node, called = _find(answer, name), shown(name)
    if node is None:
        return [f"{called} is removed"]
    if node["replicas"]:
        return [*_draw_left(node, called), f"to end it: llmgw ctl uncordon {called}"]
    if node["state"] in TO_COME or node["state"] == "lost":
        return [f"{called} is {shown(node['state'])}: what runs there is not known"]
    return [f"nothing runs there: llmgw ctl node rm {called} forgets it, llmgw ctl uncordon {called} uses it again"]


def _draw_left(node: Any, called: str) -> list[Block]:
    why, state = node.get("drain_waits_for"), shown(node["state"])
    left = shown(why) if why is not None else ", ".join(map(shown, node["replicas"]))
    if state == "lost":
        return [f"{called} is lost: {left}"]
    seconds = node.get("drain_seconds_left")
    if state != "ready":
        # No deadline reaches a node that is away.
        return [f"still there: {left}", f"{called} is {state}"]
    return [
        f"still there: {left}",
        *([] if seconds is None else [f"what is left in {lasted(seconds)} stops in any case"]),
    ]


def _read_deadline(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--deadline: {error}") from None


def _find(answer: Any, name: str) -> Any:
    return next((node for node in answer["nodes"] if node["node"] == name), None)


def follow(asked: Asked, name: str) -> None:
    """Show how far it is until nothing runs there. LlmgwError where that is not how it ends; Abort at Ctrl-C: whoever
    goes on after this command must know that the node is empty."""
    ends: list[str | None] = []

    def is_over(answer: Any) -> bool:
        node = _find(answer, name)
        if node is None:
            ends.append(None)
        elif not node.get("draining"):
            ends.append(f"somebody has ended the drain of {name}: what runs there stays")
        elif node["state"] == "lost":
            what = ", ".join(node["replicas"]) or "what it ran before"
            ends.append(f"{name} is lost, and may still run {what}: switch it off, or look there")
        elif not node["replicas"] and node["state"] not in TO_COME:
            ends.append(None)
        return bool(ends)

    show(replace(asked, watch=True), "/nodes", lambda answer: draw_progress(answer, name), until=is_over)
    if not ends:
        raise click.Abort
    if (why := ends[-1]) is not None:
        raise LlmgwError(why)
