"""``llmgw ctl weights pull``: nodes fetch a source now, and it is shown how far they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from llmgw.cli.ctl.address import find_address
from llmgw.cli.ctl.asking import Asked, drawn, server_options, tell
from llmgw.cli.ctl.client import NoAnswer, Operator, as_node
from llmgw.cli.ctl.drawing import Block, shown
from llmgw.cli.ctl.fetches import tell_doing, tell_fetch, tell_pace, tell_sources
from llmgw.cli.progress import Bars, terminal
from llmgw.errors import UsageError
from llmgw.host.output import say
from llmgw.units import format_decimal

POLL_SECONDS = 1.0


@click.command("pull")
@click.argument("source")
@click.option("--node", "nodes", metavar="NODE", multiple=True, help="Only there; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="Write the server's last answer as it is.")
@server_options
def command(*, source: str, nodes: tuple[str, ...], as_json: bool, server: str | None, config: Path | None) -> int:
    """Have nodes fetch the newest commit of SOURCE now: hf:org/repo/FILE, hf:org/repo/GLOB or https://….

    What a node has of it already is compared with its hashes, and what is damaged there is fetched anew, where nothing
    runs by it. Without --node that is done on the nodes that could run a model of it by what they have; on all that are
    ready where no model is made of it. Ctrl-C ends only the showing: the fetches go on. Exit status 1: not all have it.

    \b
    llmgw ctl weights pull hf:Qwen/Qwen2.5-Coder-3B-Instruct-GGUF/qwen2.5-coder-3b-instruct-q4_k_m.gguf --node gpu01
    """
    if not source.strip():
        raise UsageError("SOURCE is empty: write hf:org/repo/FILE, hf:org/repo/GLOB or https://…")
    for node in nodes:
        as_node(node)
    asked = Asked(operator=Operator(find_address(server, config, environ=os.environ)), as_json=as_json)
    with Bars(terminal()) as bars:
        answer = follow(asked, source, nodes, bars)
    tell(asked, answer, draw)
    return drawn(asked.operator, answer, lambda facts: int(any(_has_failed(node) for node in facts["nodes"])))


def follow(asked: Asked, source: str, nodes: tuple[str, ...], bars: Bars) -> bytes:
    """Begin it, and show it until it is over everywhere; the last answer. A server that does not answer is waited
    for. Abort at Ctrl-C: whoever goes on after this command must know that the weights are there."""
    answer = asked.operator.ask("POST", "/weights/pull", {"source": source, "nodes": list(nodes)})
    number = drawn(asked.operator, answer, lambda facts: int(facts["number"]))
    told = False
    try:
        while not drawn(asked.operator, answer, _showing(bars)):
            asked.sleep(POLL_SECONDS)
            try:
                answer = asked.operator.ask("GET", f"/weights/pull/{number}")
                told = False
            except NoAnswer as silence:
                if not told:
                    bars.say(f"{silence.message}; waiting for it")
                told = True
    except KeyboardInterrupt:
        bars.close()
        say("the fetches go on: llmgw ctl weights --watch shows how far they are")
        raise click.Abort from None
    return answer


def _showing(bars: Bars) -> Callable[[Any], bool]:
    """Shows an answer, and says whether it is the last."""

    def show(answer: Any) -> bool:
        for node in answer["nodes"]:
            fetch = node.get("fetch") or {}
            words, doing = _tell(node)
            bars.show(shown(node["node"]), fetch.get("done_bytes", 0), fetch.get("total_bytes"), words, doing=doing)
        return all(node["ended"] for node in answer["nodes"])

    return show


def _tell(node: Mapping[str, Any]) -> tuple[str, str]:
    """How far it is, and of that what is news when it changes."""
    fetch = node.get("fetch")
    if not node["ended"] and node["state"] != "ready":
        words = f"{shown(node['state'])}: it goes on once the node is back"
    elif fetch is None:
        words = "has not begun"
    elif node["ended"]:
        # (why it failed is told at the end)
        words = tell_pace(fetch)
    else:
        # (of what nothing comes of for now it is said whether, and how often, it is tried again)
        hint = "" if (remedy := fetch.get("remedy")) is None else f"; {shown(remedy)}"
        return f"{tell_fetch(fetch)}{hint}", f"{tell_doing(fetch)}{hint}"
    return words, words


def _has_failed(node: Mapping[str, Any]) -> bool:
    return bool(node["fetch"]["phase"] == "failed")


def draw(answer: Any) -> list[Block]:
    """How it has ended on each node."""
    return [line for node in answer["nodes"] for line in _lines(node)]


def _lines(node: Mapping[str, Any]) -> Iterator[str]:
    name, fetch = shown(node["node"]), node["fetch"]
    if _has_failed(node):
        yield f"{name}: failed: {shown(fetch.get('cause'))}"
        if (remedy := fetch.get("remedy")) is not None:
            yield f"{name}: what to do: {shown(remedy)}"
    elif fetch.get("total_bytes") == 0:
        # (nobody can say whether it has just come)
        yield f"{name}: ready, 0B: it is empty"
    elif fetch["origin_bytes"] or fetch["peer_bytes"]:
        size = format_decimal(fetch.get("total_bytes") or fetch["done_bytes"])
        yield f"{name}: ready, {size}: {tell_sources(fetch)}{_tell_mended(fetch)}"
    elif fetch.get("cause") is not None:
        yield f"{name}: ready, nothing had to come{_tell_mended(fetch)}"
    else:
        yield f"{name}: ready, it had the newest already, and all of it is right"


def _tell_mended(fetch: Mapping[str, Any]) -> str:
    cause = fetch.get("cause")
    return "" if cause is None else f"; {shown(cause)}"
